"""The protocol of a sampler, and what it returns."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from tiltsam.space.protocol import Draw, Space, after_ascent, evaluated

__all__ = ["Draw", "Sampler", "Start", "Stateless", "after_ascent", "evaluated"]


class Sampler(Protocol):
    """Where to evaluate. Equal samplers do the same: a captured step is replayed only with an equal one.

    A sampler must be hashable and must not change: use ``@dataclass(frozen=True)``.
    """

    tilted: ClassVar[bool]
    """Whether the draws are meant to follow μ·exp(δL) rather than μ. TSAM's default δ depends on it."""
    independent: ClassVar[bool]
    """Whether a sample can be drawn without the samples before it, and so on another rank."""
    # Optional attributes:
    # deterministic: all samples of a step are the same, so more than one is refused.
    # state_names: names of vectors kept between steps (space.state_vector); requires independent = False.
    # only_for: name of the only method or methods that this sampler works in.

    def begin(self, space: Space) -> Any:
        """Do what all samples of a step have in common; the result is passed to every ``sample``."""
        ...

    def sample(self, space: Space, index: int, common: Any) -> Draw:
        """Draw sample number ``index``."""
        ...


class Start(Protocol):
    """A sampler that can start another one: it only moves the point."""

    def move(self, space: Space, index: int) -> None:
        """``point <- θ + δ``."""
        ...


class Stateless:
    """Base class of samplers whose samples share nothing."""

    def begin(self, space: Space) -> None:
        """Share nothing."""
