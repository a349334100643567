"""What a kernel is, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from tiltsam.space import EPS, Evaluation, Space, Vector

__all__ = ["EPS", "Draw", "Sampler", "Start", "Stateless", "after_ascent", "drawn", "evaluated"]


class Draw(NamedTuple):
    """One sample: the loss and gradient at θ+ε_j."""

    loss: Tensor
    gradient: Vector
    """Adding it to the aggregate may overwrite it, unless ``keep`` is true."""
    gradient_norm: Tensor
    valid: Tensor
    """False if any loss or gradient on the way was not finite."""
    start_loss: Tensor
    """The loss where the sample began: at θ for SAM, at θ+δ_j for TSAM; ``loss`` itself where there is no ascent."""
    info: Mapping[str, Tensor] = {}
    """What a kernel has to say beyond that (HMC: acceptance, energy error, divergence)."""
    keep: bool = False
    """Whether the sampler reads ``gradient`` again after it was added to the aggregate."""


class Sampler(Protocol):
    """A kernel. Two that are equal do the same: a captured step asks that before it replays what it recorded.

    So it has to be hashable, and its fields must not change: a frozen dataclass is both. One that keeps vectors from
    step to step names them in ``keeps``, a tuple, and finds them by ``kept`` of the space; its samples are not
    ``independent`` then.
    """

    tilted: ClassVar[bool]
    """What its draws are meant to follow: μ·exp(δL) if true, μ itself if not. By it TSAM finds its default δ."""
    independent: ClassVar[bool]
    """Whether a sample can be drawn without those before it, and so on another rank."""
    scale_free: ClassVar[bool]
    """Whether gradients may come multiplied by some number (a GradScaler's): their direction alone counts.

    If false, they are unscaled at each evaluation.
    """
    # Optional: ``deterministic``, true if all samples of a step are the same, so that several are a mistake.

    def begin(self, space: Space) -> Any:
        """Work that all samples of a step share; what it returns is handed to the first ``sample``."""
        ...

    def sample(self, space: Space, index: int, state: Any) -> tuple[Draw, Any]:
        """Sample number ``index``, and the state for the next."""
        ...


class Start(Protocol):
    """A kernel that only moves: ``point <- θ + δ``."""

    def move(self, space: Space, index: int) -> None:
        """Put the point somewhere near θ."""
        ...


def evaluated(evaluation: Evaluation) -> Draw:
    """A sample that was evaluated where it began."""
    return Draw(evaluation.loss, evaluation.gradient, evaluation.norm, evaluation.finite, evaluation.loss)


def after_ascent(first: Evaluation, last: Evaluation) -> Draw:
    """A sample that began at ``first`` and ascended to ``last``, evaluated ``after`` it."""
    return Draw(last.loss, last.gradient, last.norm, last.finite, first.loss)


class Stateless:
    """A kernel whose samples share nothing."""

    def begin(self, space: Space) -> None:
        """Nothing to share."""


def drawn(sampler: Sampler, space: Space, index: int, state: Any) -> tuple[Draw, Any]:
    """What a sampler's ``sample`` returns, if it is what it should be."""
    found = sampler.sample(space, index, state)
    if isinstance(found, Draw) or not isinstance(found, tuple) or len(found) != 2:
        raise TypeError(f"{type(sampler).__name__}.sample must return (draw, state), got {type(found).__name__}")
    return found
