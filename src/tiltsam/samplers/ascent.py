"""Kernels that climb: Algorithm 2 and the ascents of SAM's relatives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from tiltsam.samplers.kernel import EPS, Draw, Start, Stateless, after_ascent, evaluated
from tiltsam.samplers.noise import Uniform
from tiltsam.space import Evaluation, Space

__all__ = ["AdaptiveAscent", "Ascent", "CenterThenAscent", "LineSearch", "RandomAscent"]


def _ascend(space: Space, at: Evaluation, parts: int = 1) -> None:
    """``point <- point + ρ/parts n(gradient)``. A gradient that is not finite moves nothing: weights stay finite."""
    space.climb(at, space.rho if parts == 1 else space.rho / parts)


@dataclass(frozen=True)
class Ascent:
    """Algorithm 2: a random start δ in the ball of radius R, then ρ along the normalised gradient there.

    ``ε = δ + ρ n(∇L(θ+δ))``, so ``‖ε‖ ≤ R + ρ``. With R = 0 this is SAM's ascent. Two passes a sample.

    Args:
        start: Where δ comes from; :class:`Uniform` as in the paper, or ``Gaussian(clip=True)``.
        shared: Take one ascent gradient, at θ, for all samples of a step: ``ε = δ + ρ n(∇L(θ))``, s+1 passes instead
            of 2s, and one more vector in memory.
        num_steps: The paper's N: that many ascents of ρ/N each, every one along the gradient where it begins; N+1
            passes a sample. Above 1 not with ``shared``.

    Note:
        Not consistent: the draws follow neither μ nor μ·exp(δL), so no weights make the aggregate tend to the gradient
        of the tilted loss (``docs/theory.md`` measures the bias).
    """

    start: Start = field(default_factory=Uniform)
    shared: bool = False
    num_steps: int = 1
    tilted: ClassVar[bool] = True
    independent: ClassVar[bool] = True
    scale_free: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {self.num_steps}")
        if self.shared and self.num_steps > 1:
            raise ValueError(f"one ascent gradient is shared: num_steps must be 1, got {self.num_steps}")

    @property
    def deterministic(self) -> bool:
        """Whether all samples of a step are the same."""
        return getattr(self.start, "deterministic", False)

    def begin(self, space: Space) -> Evaluation | None:
        """The shared gradient, where there is one: ρ n(∇L(θ)) goes into the vector ``ascent``."""
        if not (self.shared and space.ascending):
            return None
        space.go_home()
        at = space.evaluate(ascent=True)
        space.keep_(at.gradient, at.finite)
        space.copy_(space.vector("ascent"), at.gradient)
        space.scale_(space.vector("ascent"), space.rho / (at.norm + EPS))
        return at

    def sample(self, space: Space, index: int, state: Evaluation | None) -> tuple[Draw, Evaluation | None]:
        """Start, ascend, evaluate."""
        self.start.move(space, index)
        if not space.ascending:
            return evaluated(space.evaluate()), None
        if state is None:
            first = at = space.evaluate(ascent=True)
            _ascend(space, at, self.num_steps)
            for _ in range(self.num_steps - 1):
                at = space.evaluate(ascent=True, after=at)
                _ascend(space, at, self.num_steps)
            return after_ascent(first, space.evaluate(after=at)), None
        space.add_(space.point, space.vector("ascent"))
        return after_ascent(state, space.evaluate(after=state)), state


@dataclass(frozen=True)
class AdaptiveAscent(Stateless):
    """ASAM's ascent, scaled to each weight: ``ε = ρ T²g/‖Tg‖``, ``T = |w| + η`` (Kwon et al. 2021). Two passes."""

    tilted: ClassVar[bool] = True
    independent: ClassVar[bool] = True
    scale_free: ClassVar[bool] = True
    only_for: ClassVar[str] = "ASAM"  # which has eta

    def sample(self, space: Space, index: int, state: None) -> tuple[Draw, None]:
        """Ascend from θ in the metric of the weights, evaluate."""
        space.go_home()
        if not space.ascending:
            return evaluated(space.evaluate()), None
        first = space.evaluate(ascent=True)
        space.keep_(first.gradient, first.finite)
        eta = space.setting("eta")
        space.stretch_(first.gradient, space.center, eta)
        # Tg gets its length before it is stretched again: in half precision T²g may be too small to hold.
        space.scale_(first.gradient, space.rho / (space.norm(first.gradient) + EPS))
        space.stretch_(first.gradient, space.center, eta)
        space.add_(space.point, first.gradient)
        return after_ascent(first, space.evaluate(after=first)), None


@dataclass(frozen=True)
class LineSearch(Stateless):
    """The paper's ESAM2: of ``ρ_k = ρ k/K`` along ``n(∇L(θ))``, k = 1..K, the one with the largest loss.

    Two passes and K forward passes. Losses that are not finite are passed over.

    Args:
        num_points: K.
    """

    num_points: int = 10
    deterministic: ClassVar[bool] = True
    tilted: ClassVar[bool] = True
    independent: ClassVar[bool] = True
    scale_free: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.num_points < 1:
            raise ValueError(f"num_points must be at least 1, got {self.num_points}")

    def sample(self, space: Space, index: int, state: None) -> tuple[Draw, None]:
        """Search along the gradient, evaluate at the worst point found."""
        space.go_home()
        if not space.ascending:
            return evaluated(space.evaluate()), None
        first = space.evaluate(ascent=True)
        space.keep_(first.gradient, first.finite)
        space.scale_(first.gradient, space.rho / (self.num_points * (first.norm + EPS)))
        losses = []
        for k in range(1, self.num_points + 1):
            space.go_home()
            space.add_(space.point, first.gradient, alpha=k)  # at once: K small steps would add up their rounding
            losses.append(space.forward())
        found = torch.stack(losses)
        worst = found.masked_fill(~found.isfinite(), -torch.inf).argmax(0) + 1  # k
        space.go_home()
        space.add_scaled_(space.point, first.gradient, worst.to(first.norm.dtype))
        return after_ascent(first, space.evaluate(after=first)), None


@dataclass(frozen=True)
class RandomAscent(Stateless):
    """RSAM's ascent (Liu et al. 2022): noise sized to each filter, then ``ε = ρ n(Δ + λ ∇L(θ+Δ))``. Two passes.

    ``Δ`` is N(0, (γ‖w_filter‖)²) on each filter, a filter being a slice along the first dimension; a tensor of one
    dimension (a bias) is one filter.
    """

    tilted: ClassVar[bool] = True
    independent: ClassVar[bool] = True
    scale_free: ClassVar[bool] = False
    only_for: ClassVar[str] = "RSAM"  # which has gamma and lam

    def sample(self, space: Space, index: int, state: None) -> tuple[Draw, None]:
        """Smooth by noise, ascend, evaluate."""
        if not space.ascending:
            space.go_home()
            return evaluated(space.evaluate()), None
        space.normal_(space.point, index)
        scales = space.filter_norms(space.center)
        space.scale_(scales, space.setting("gamma"))
        space.map_(space.point, lambda z, w, scale: torch.addcmul(w, z, scale), space.center, scales)
        first = space.evaluate(ascent=True)
        space.keep_(first.gradient, first.finite)
        space.add_(space.point, space.center, alpha=-1.0)  # the point now holds Δ
        space.add_scaled_(space.point, first.gradient, space.setting("lam"))
        space.scale_(space.point, space.rho / (space.norm(space.point) + EPS))
        space.add_(space.point, space.center)
        return after_ascent(first, space.evaluate(after=first)), None


@dataclass(frozen=True)
class CenterThenAscent:
    """PGN's two points: sample 0 is θ, sample 1 is ``θ + ρ n(∇L(θ))``, from the same gradient. Two passes in all."""

    tilted: ClassVar[bool] = True
    independent: ClassVar[bool] = False
    scale_free: ClassVar[bool] = True
    only_for: ClassVar[str] = "PGN"  # which takes two samples

    def begin(self, space: Space) -> None:
        """Nothing to share before θ is evaluated."""

    def sample(self, space: Space, index: int, state: Evaluation | None) -> tuple[Draw, Evaluation | None]:
        """Evaluate at θ, then at SAM's point."""
        space.go_home()
        if state is None or not space.ascending:
            at = space.evaluate()
            return evaluated(at)._replace(keep=space.ascending), at
        _ascend(space, state)
        return after_ascent(state, space.evaluate(after=state)), state
