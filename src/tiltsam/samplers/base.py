"""The protocol of a sampler, and what it returns."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from tiltsam.space.protocol import Draw, Space, draw_after_ascent, draw_at

__all__ = ["BaseSampler", "Draw", "Sampler", "Start", "draw_after_ascent", "draw_at"]


class Sampler(Protocol):
    """Where to evaluate. Equal samplers do the same: a captured step is replayed only with an equal one.

    A sampler must be hashable and must not change: use ``@dataclass(frozen=True)``. :class:`BaseSampler` has defaults
    of everything but ``sample``, and the optional attributes.
    """

    tilted: ClassVar[bool]
    """Whether the draws are meant to follow μ·exp(δL) rather than μ. TSAM's default δ depends on it."""
    independent: ClassVar[bool]
    """Whether a sample can be drawn without the samples before it, and so on another rank."""

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


class BaseSampler:
    """Defaults of a :class:`Sampler`; a subclass defines ``sample``."""

    tilted: ClassVar[bool] = True
    """Whether the draws are meant to follow μ·exp(δL) rather than μ. TSAM's default δ depends on it."""
    independent: ClassVar[bool] = True
    """Whether a sample can be drawn without the samples before it, and so on another rank."""
    deterministic: ClassVar[bool] = False
    """Whether all samples of a step are the same: TSAM then refuses more than one."""
    state_names: ClassVar[tuple[str, ...]] = ()
    """Names of vectors kept between steps (:meth:`Space.state_vector`); requires ``independent = False``."""
    only_for: ClassVar[str | None] = None
    """Name of the only method or methods that this sampler works in."""

    def begin(self, space: Space) -> Any:
        """Return ``None``: samples share nothing."""
        return None
