"""Draws of μ itself: the point θ, a ball around it, a Gaussian. Naive sampling, and the starts of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from tiltsam.samplers.kernel import Draw, Stateless, evaluated
from tiltsam.space import Space, Spread

__all__ = ["Center", "Gaussian", "Uniform"]


@dataclass(frozen=True)
class Center(Stateless):
    """ε = 0: plain training. One pass a sample."""

    deterministic: ClassVar[bool] = True
    tilted: ClassVar[bool] = False
    independent: ClassVar[bool] = True
    scale_free: ClassVar[bool] = True

    def move(self, space: Space, index: int) -> None:
        """``point <- θ``."""
        space.go_home()

    def sample(self, space: Space, index: int, state: None) -> tuple[Draw, None]:
        """Evaluate at θ."""
        self.move(space, index)
        return evaluated(space.evaluate()), None


@dataclass(frozen=True)
class Uniform(Stateless):
    """ε uniform in the ball of radius R (naive sampling, appendix of the paper). One pass a sample.

    Consistent: with weights softmax(t L) the aggregate tends to the gradient of the tilted loss as s grows, its bias
    falling like 1/s. At R = 0 no noise is drawn and the point is θ, bit for bit.
    """

    tilted: ClassVar[bool] = False
    independent: ClassVar[bool] = True
    scale_free: ClassVar[bool] = True

    def move(self, space: Space, index: int) -> None:
        """``point <- θ + δ``."""
        if not space.noisy:
            space.go_home()
            return
        space.scatter(index, Spread(radius=space.radius))

    def sample(self, space: Space, index: int, state: None) -> tuple[Draw, None]:
        """Evaluate at a random point."""
        self.move(space, index)
        return evaluated(space.evaluate()), None


@dataclass(frozen=True)
class Gaussian(Stateless):
    """ε ~ N(0, std² I) (naive sampling under Gaussian μ). One pass a sample; consistent as :class:`Uniform` is.

    Args:
        std: Standard deviation of a coordinate, whatever R; ``None`` means R/√d, whose typical length is R.
        clip: Shorten draws longer than R to R. Then μ is no longer Gaussian, but ‖ε‖ ≤ R holds (at R = 0, ε = 0).
    """

    std: float | None = None
    clip: bool = False
    tilted: ClassVar[bool] = False
    independent: ClassVar[bool] = True
    scale_free: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.std is not None and self.std < 0:
            raise ValueError(f"std must be >= 0, got {self.std}")

    def move(self, space: Space, index: int) -> None:
        """``point <- θ + δ``."""
        bound_by_radius = self.std is None or self.clip
        if self.std == 0 or (bound_by_radius and not space.noisy):
            space.go_home()
            return
        std = space.radius / space.dim**0.5 if self.std is None else torch.full_like(space.radius, self.std)
        space.scatter(index, Spread(std=std, longest=space.radius if self.clip else None))

    def sample(self, space: Space, index: int, state: None) -> tuple[Draw, None]:
        """Evaluate at a random point."""
        self.move(space, index)
        return evaluated(space.evaluate()), None
