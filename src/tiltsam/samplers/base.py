"""The base classes of samplers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from tiltsam.space.protocol import Draw, Space, draw_at

__all__ = ["Sampler", "Start"]


class Sampler(ABC):
    """Chooses where to evaluate. Subclasses define ``sample``.

    A sampler must be hashable and must not change: use ``@dataclass(frozen=True)``. Equal samplers must behave
    identically: a captured step is replayed only with an equal one.
    """

    tilted: ClassVar[bool] = True
    """Whether the draws are meant to follow μ·exp(δL) rather than μ. TSAM's default δ depends on it."""
    independent: ClassVar[bool] = True
    """Whether a sample can be drawn without the samples before it, and so on another rank."""
    moves: ClassVar[bool] = True
    """Whether the point leaves θ: if not, the weights need no copy."""
    deterministic: ClassVar[bool] = False
    """Whether all samples of a step are the same: TSAM then refuses more than one."""
    share_ascent: bool = False
    """Whether ``begin`` computes an ascent that all samples use."""
    state_names: ClassVar[tuple[str, ...]] = ()
    """Names of vectors kept between steps (:meth:`Space.state_vector`); requires ``independent = False``."""
    only_for: ClassVar[str | None] = None
    """Name of the only method or methods that this sampler works in."""

    def begin(self, space: Space) -> Any:
        """Do what all samples of a step have in common; the result is passed to every ``sample``."""
        return None

    @abstractmethod
    def sample(self, space: Space, index: int, common: Any) -> Draw:
        """Draw sample number ``index``.

        The point is undefined at first: call ``reset_to_center``, ``add_noise`` or ``add_filter_noise``.
        """


class Start(Sampler):
    """A sampler that moves the point and evaluates there; ``move`` alone can start an ascent."""

    tilted: ClassVar[bool] = False

    @abstractmethod
    def move(self, space: Space, index: int) -> None:
        """``point <- θ + δ``."""

    def sample(self, space: Space, index: int, common: None) -> Draw:
        """Move, evaluate."""
        self.move(space, index)
        return draw_at(space.evaluate())
