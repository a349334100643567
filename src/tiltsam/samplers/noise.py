"""Samplers of μ itself: θ, a ball around it, a Gaussian. They also start the samplers that ascend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from tiltsam.samplers.base import Start
from tiltsam.space.protocol import Space, Spread
from tiltsam.space.validation import check_nonnegative

__all__ = ["Center", "Gaussian", "Uniform"]


@dataclass(frozen=True)
class Center(Start):
    """ε = 0: plain training. One pass a sample."""

    moves: ClassVar[bool] = False
    deterministic: ClassVar[bool] = True

    def move(self, space: Space, index: int) -> None:
        """``point <- θ``."""
        space.reset_to_center()


@dataclass(frozen=True)
class Uniform(Start):
    """ε uniform in the ball of radius R (naive sampling, appendix of the paper). One pass a sample.

    Consistent: with sample weights softmax(t L) the aggregate tends to the gradient of the tilted loss as s grows, with
    a bias that falls like 1/s. At R = 0 no noise is drawn and the point is θ, bit for bit.
    """

    def move(self, space: Space, index: int) -> None:
        """``point <- θ + δ``."""
        if space.noisy:
            space.add_noise(index, Spread(radius=space.radius))
        else:
            space.reset_to_center()


@dataclass(frozen=True)
class Gaussian(Start):
    """ε ~ N(0, std² I) (naive sampling under Gaussian μ). One pass a sample; consistent like :class:`Uniform`.

    Args:
        std: Standard deviation of a coordinate, independent of R; ``None`` means R/√d, whose typical length is R.
        clip: Shorten draws longer than R to length R. Then μ is no longer Gaussian, but ‖ε‖ ≤ R holds.
    """

    std: float | None = None
    clip: bool = False

    def __post_init__(self) -> None:
        if self.std is not None:
            check_nonnegative("std", self.std)

    def move(self, space: Space, index: int) -> None:
        """``point <- θ + δ``."""
        depends_on_radius = self.std is None or self.clip
        if self.std == 0 or (depends_on_radius and not space.noisy):
            space.reset_to_center()
            return
        std = space.radius / space.dim**0.5 if self.std is None else torch.full_like(space.radius, self.std)
        space.add_noise(index, Spread(std=std, max_norm=space.radius if self.clip else None))
