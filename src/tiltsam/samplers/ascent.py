"""Samplers that ascend the loss: Algorithm 2, and the ascents of ASAM, ESAM2, RSAM and PGN."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from tiltsam.samplers.base import Sampler, Start
from tiltsam.samplers.noise import Uniform
from tiltsam.space.protocol import EPS, Draw, Evaluation, Space, draw_after_ascent, draw_at
from tiltsam.space.validation import check_count

__all__ = ["AdaptiveAscent", "Ascent", "CenterThenAscent", "LineSearch", "RandomAscent"]


@dataclass(frozen=True)
class Ascent(Sampler):
    """Algorithm 2: a random start δ in the ball of radius R, then ρ along the normalised gradient there.

    ``ε = δ + ρ n(∇L(θ+δ))``, so ``‖ε‖ ≤ R + ρ``. With R = 0 this is SAM's ascent. Two passes a sample.

    Args:
        start: Where δ comes from: :class:`Uniform` as in the paper, or ``Gaussian(clip=True)``.
        share_ascent: Use one ascent gradient, at θ, for all samples of a step: ``ε = δ + ρ n(∇L(θ))``. s+1 passes
            instead of 2s, and one more vector of memory.
        num_steps: The paper's N: ascend N times by ρ/N, each time along the gradient at the current point. N+1 passes a
            sample. Must be 1 with ``share_ascent``.

    Note:
        Not consistent: the draws follow neither μ nor μ·exp(δL), so weights that depend on the losses alone cannot make
        the aggregate tend to ∇L^t (``docs/theory.md`` measures the bias).
    """

    start: Start = field(default_factory=Uniform)
    share_ascent: bool = False
    num_steps: int = 1

    def __post_init__(self) -> None:
        check_count("num_steps", self.num_steps)
        if self.share_ascent and self.num_steps > 1:
            raise ValueError(f"num_steps must be 1 with share_ascent=True, got {self.num_steps}")

    @property
    def deterministic(self) -> bool:  # type: ignore[override]
        """Whether all samples of a step are the same."""
        return self.start.deterministic

    def begin(self, space: Space) -> Evaluation | None:
        """Compute the shared ascent ρ n(∇L(θ)) into the vector ``ascent``."""
        if not (self.share_ascent and space.ascending):
            return None
        space.reset_to_center()
        at = space.evaluate(ascent=True)
        space.zero_unless_(at.gradient, at.finite)
        space.copy_(space.vector("ascent"), at.gradient)
        space.scale_(space.vector("ascent"), space.rho / (at.norm + EPS))
        return at

    def sample(self, space: Space, index: int, common: Evaluation | None) -> Draw:
        """Start, ascend, evaluate."""
        self.start.move(space, index)
        if not space.ascending:
            return draw_at(space.evaluate())
        if common is not None:
            space.add_(space.point, space.vector("ascent"))
            return draw_after_ascent(common, space.evaluate(after=common))
        rho = space.rho if self.num_steps == 1 else space.rho / self.num_steps
        first = at = space.evaluate(ascent=True)
        space.ascend(at, rho)
        for _ in range(self.num_steps - 1):
            at = space.evaluate(ascent=True, after=at)
            space.ascend(at, rho)
        return draw_after_ascent(first, space.evaluate(after=at))


@dataclass(frozen=True)
class AdaptiveAscent(Sampler):
    """ASAM's ascent, scaled to each weight: ``ε = ρ T²g/‖Tg‖``, ``T = |w| + η`` (Kwon et al. 2021). Two passes."""

    only_for: ClassVar[str | None] = "ASAM"  # which has eta

    def sample(self, space: Space, index: int, common: None) -> Draw:
        """Ascend from θ in the metric of the weights, evaluate."""
        space.reset_to_center()
        if not space.ascending:
            return draw_at(space.evaluate())
        first = space.evaluate(ascent=True)
        space.ascend_adaptive(first, space.rho, space.setting("eta"))
        return draw_after_ascent(first, space.evaluate(after=first))


@dataclass(frozen=True)
class LineSearch(Sampler):
    """The paper's ESAM2: among ``ρ_k = ρ k/K`` along ``n(∇L(θ))``, k = 1..K, the one with the largest loss.

    Two passes and K forward passes. Losses that are not finite are ignored.

    Args:
        num_points: K.
    """

    num_points: int = 10
    deterministic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("num_points", self.num_points)

    def sample(self, space: Space, index: int, common: None) -> Draw:
        """Search along the gradient, evaluate at the worst point found."""
        space.reset_to_center()
        if not space.ascending:
            return draw_at(space.evaluate())
        first = space.evaluate(ascent=True)
        space.zero_unless_(first.gradient, first.finite)
        space.scale_(first.gradient, space.rho / (self.num_points * (first.norm + EPS)))
        losses = []
        for k in range(1, self.num_points + 1):
            space.reset_to_center()
            space.add_(space.point, first.gradient, alpha=k)  # in one move: K small ones would add up their rounding
            losses.append(space.forward())
        found = torch.stack(losses)
        worst = found.masked_fill(~found.isfinite(), -torch.inf).argmax(0) + 1  # k
        space.reset_to_center()
        space.add_scaled_(space.point, first.gradient, worst.to(first.norm.dtype))
        return draw_after_ascent(first, space.evaluate(after=first))


@dataclass(frozen=True)
class RandomAscent(Sampler):
    """RSAM's ascent (Liu et al. 2022): noise scaled to each filter, then ``ε = ρ n(Δ + λ ∇L(θ+Δ))``. Two passes.

    ``Δ`` is N(0, (γ‖w_filter‖)²) on each filter, a filter being a slice along the first dimension; a tensor of one
    dimension (a bias) is one filter.
    """

    only_for: ClassVar[str | None] = "RSAM"  # which has gamma and lam

    def sample(self, space: Space, index: int, common: None) -> Draw:
        """Add noise, ascend, evaluate."""
        if not space.ascending:
            space.reset_to_center()
            return draw_at(space.evaluate())
        space.add_filter_noise(index, space.setting("gamma"))
        first = space.evaluate(ascent=True)
        space.zero_unless_(first.gradient, first.finite)
        direction = space.point
        space.add_(direction, space.center, alpha=-1.0)  # Δ
        space.add_scaled_(direction, first.gradient, space.setting("lam"))
        space.zero_unperturbed_(direction)
        space.scale_(direction, space.rho / (space.norm(direction) + EPS))
        space.add_(space.point, space.center)
        return draw_after_ascent(first, space.evaluate(after=first))


@dataclass(frozen=True)
class CenterThenAscent(Sampler):
    """Two points, of PGN and WSAM: sample 0 is θ, sample 1 is ``θ + ρ n(g)`` with the gradient g at θ. Two passes."""

    independent: ClassVar[bool] = False
    only_for: ClassVar[str | None] = "PGN or WSAM"  # which take two samples

    def begin(self, space: Space) -> Evaluation:
        """Evaluate at θ, for both samples."""
        space.reset_to_center()
        return space.evaluate()

    def sample(self, space: Space, index: int, common: Evaluation) -> Draw:
        """Return the gradient at θ, then evaluate at SAM's point."""
        space.reset_to_center()
        if index == 0:
            return draw_at(common)  # sample 1 reads the gradient again: adding the first to the mean leaves it as it is
        space.ascend(common, space.rho)
        return draw_after_ascent(common, space.evaluate(after=common))
