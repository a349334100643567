"""Samplers of SAM's variants: GSAM, LookSAM, Friendly-SAM, USAM and Momentum-SAM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tiltsam.samplers.base import Sampler
from tiltsam.space.protocol import EPS, Draw, Evaluation, Space, Vector, draw_after_ascent, draw_at

__all__ = ["FriendlyAscent", "MomentumAscent", "PowerAscent", "ReusedAscent", "SurrogateGap"]


@dataclass(frozen=True)
class SurrogateGap(Sampler):
    """GSAM's gradient: SAM's ``g_p``, minus α times the part of ``g`` that is orthogonal to it. Two passes."""

    only_for: ClassVar[str | None] = "GSAM"  # which has alpha

    def sample(self, space: Space, index: int, common: None) -> Draw:
        """Evaluate at θ and at SAM's point, combine the gradients."""
        space.reset_to_center()
        first = space.evaluate()
        if not space.ascending:
            return draw_at(first)
        g = space.copy_to("g", first.gradient)
        space.ascend(first, space.rho)
        last = space.evaluate(after=first)
        alpha, along = space.setting("alpha"), space.dot(g, last.gradient) / (last.norm + EPS) ** 2
        space.scale_(last.gradient, 1 + alpha * along)
        space.add_scaled_(last.gradient, g, -alpha)
        return draw_after_ascent(first, last)


@dataclass(frozen=True)
class ReusedAscent(Sampler):
    """LookSAM's gradient: SAM's, whose part ``g_v`` orthogonal to ``g`` is kept, or ``g`` plus the kept part.

    Two passes with ``refresh``, else one. A gradient that is not finite does not change ``g_v``.

    Args:
        refresh: Whether to ascend and keep a new ``g_v``.
    """

    refresh: bool = True
    independent: ClassVar[bool] = False
    state_names: ClassVar[tuple[str, ...]] = ("orthogonal",)
    only_for: ClassVar[str | None] = "LookSAM"  # which has alpha

    def sample(self, space: Space, index: int, common: None) -> Draw:
        """Ascend and keep the orthogonal part, or add the one that is kept."""
        space.reset_to_center()
        first, orthogonal = space.evaluate(), space.state_vector("orthogonal")
        if not self.refresh:
            scale = space.setting("alpha") * first.norm / (space.norm(orthogonal) + EPS)
            space.map_(first.gradient, lambda g, v, scale: g + scale * v, orthogonal, scale)
            return draw_at(first)
        g = space.copy_to("g", first.gradient)
        space.ascend(first, space.rho)
        last = space.evaluate(after=first)
        along = space.dot(last.gradient, g) / (first.norm + EPS) ** 2
        space.map_(orthogonal, _orthogonal_if, last.gradient, g, along, last.finite)
        return draw_after_ascent(first, last)


@dataclass(frozen=True)
class FriendlyAscent(Sampler):
    """Friendly-SAM's ascent, along what is specific to the batch: ``ε = ρ n(g − σ m)``, m a running mean of g.

    Two passes. Without an ascent (ρ = 0) the mean is still updated, at one pass.
    """

    independent: ClassVar[bool] = False
    state_names: ClassVar[tuple[str, ...]] = ("mean",)
    only_for: ClassVar[str | None] = "FriendlySAM"  # which has sigma and lam

    def sample(self, space: Space, index: int, common: None) -> Draw:
        """Update the mean, ascend, evaluate."""
        space.reset_to_center()
        first, mean = space.evaluate(ascent=space.ascending), space.state_vector("mean")
        _add_to_running_mean(space, mean, first, space.setting("lam"))
        if not space.ascending:
            return draw_at(first)
        sigma, direction = space.setting("sigma"), space.point
        space.map_(direction, lambda _, g, m, sigma: g - sigma * m, first.gradient, mean, sigma)
        space.zero_unperturbed_(direction)  # the mean may hold gradients of plain steps
        space.scale_(direction, space.rho / (space.norm(direction) + EPS))
        space.add_(space.point, space.center)
        return draw_after_ascent(first, space.evaluate(after=first))


@dataclass(frozen=True)
class PowerAscent(Sampler):
    """USAM's ascent, longer where the gradient is large: ``ε = ρ ‖g‖^p n(g)``. Two passes."""

    only_for: ClassVar[str | None] = "USAM"  # which has power

    def sample(self, space: Space, index: int, common: None) -> Draw:
        """Ascend by a length that depends on the gradient, evaluate."""
        space.reset_to_center()
        if not space.ascending:
            return draw_at(space.evaluate())
        first = space.evaluate(ascent=True)
        space.ascend(first, space.rho * first.norm ** space.setting("power"))
        return draw_after_ascent(first, space.evaluate(after=first))


@dataclass(frozen=True)
class MomentumAscent(Sampler):
    """Momentum-SAM's point: ``ε = −ρ n(v)``, v a running mean of the gradients of earlier steps. One pass."""

    independent: ClassVar[bool] = False
    state_names: ClassVar[tuple[str, ...]] = ("velocity",)
    only_for: ClassVar[str | None] = "MomentumSAM"  # which has beta

    def sample(self, space: Space, index: int, common: None) -> Draw:
        """Move against the momentum, evaluate, update the momentum."""
        space.reset_to_center()
        velocity = space.state_vector("velocity")
        if space.ascending:
            direction = space.point
            space.copy_(direction, velocity)
            space.zero_unperturbed_(direction)
            space.scale_(direction, -space.rho / (space.norm(direction) + EPS))
            space.add_(space.point, space.center)
        at = space.evaluate()
        _add_to_running_mean(space, velocity, at, space.setting("beta"))
        return draw_at(at)


def _orthogonal_if(before: Tensor, x: Tensor, y: Tensor, along: Tensor, mask: Tensor) -> Tensor:
    """Return ``x − along y``, or ``before`` unless ``mask`` is true."""
    return torch.where(mask, x - along * y, before)


def _add_to_running_mean(space: Space, mean: Vector, at: Evaluation, decay: Tensor) -> None:
    """``mean <- decay mean + (1 − decay) gradient``; a gradient that is not finite is zeroed and leaves the mean."""
    space.zero_unless_(at.gradient, at.finite)
    space.map_(mean, lambda m, g, share: m + share * (g - m), at.gradient, (1 - decay) * at.finite)
