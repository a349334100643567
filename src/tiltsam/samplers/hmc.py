"""Hamiltonian Monte Carlo on the ball: draws ε from μ·exp(δL), the distribution that Algorithm 1 assumes.

Potential ``U(ε) = −δ L(θ+ε)``, kinetic energy ``‖p‖²/2σ²``, μ uniform on ``‖ε‖ ≤ R``. A proposal draws
``p ~ N(0, σ²I)``, follows the dynamics for N steps of size β, and is accepted with probability
``min(1, exp(H_0 − H_N))``.

The integrators differ in the momentum that enters ``H_N``:

- ``leapfrog``: half a kick, drift, half a kick. Reversible and volume preserving: exact for any β.
- ``euler-corrected``: the paper's kicks and drifts, and one more kick ``p_N + βδ∇L(ε_N)`` before accepting. That makes
  the map reversible, hence exact, and the gradient is needed for the descent anyway.
- ``euler``: as printed in the paper, accepted with ``p_N`` itself. Volume preserving but *not* reversible: biased. At
  N = 1 and β → 0 the chain follows exp(2δL) instead of exp(δL). Offered to reproduce the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tiltsam.samplers.base import Sampler
from tiltsam.space.protocol import Draw, Evaluation, Space, Spread, Vector, draw_at
from tiltsam.space.validation import check_count, check_positive

__all__ = ["HMC"]

INTEGRATORS = ("leapfrog", "euler-corrected", "euler")
BOUNDARIES = ("reflect", "reject")
DIVERGENT = 1000.0  # an energy error beyond this is reported as a divergence
_TINY = 1e-30  # keeps divisions by a speed or a chord of zero finite


@dataclass(frozen=True)
class HMC(Sampler):
    """Samples of μ·exp(δL): each starts uniform in the ball and makes ``num_proposals`` accept/reject moves.

    Cost: ``1 + num_steps · num_proposals`` passes a sample. Memory: six vectors, whatever s. Consistent as
    ``num_proposals`` grows, except for ``integrator="euler"``; after one proposal the distribution of the start still
    shows. At R = 0 there is nowhere to move: one pass a sample, at θ.

    Args:
        num_steps: N, drifts per proposal.
        step_size: β.
        sigma: σ, standard deviation of the momentum; the drift is ``β p/σ²``.
        integrator: ``"leapfrog"``, ``"euler-corrected"`` or ``"euler"`` (see the module).
        boundary: ``"reflect"`` reflects the momentum at the sphere; ``"reject"`` rejects a final point outside. Both
            are exact; in high dimension almost every straight path leaves the ball, so reject hardly ever accepts.
        num_proposals: Proposals per sample.
    """

    num_steps: int = 1
    step_size: float = 0.1
    sigma: float = 1.0
    integrator: Literal["leapfrog", "euler-corrected", "euler"] = "leapfrog"
    boundary: Literal["reflect", "reject"] = "reflect"
    num_proposals: int = 1

    def __post_init__(self) -> None:
        for name in ("num_steps", "num_proposals"):
            check_count(name, getattr(self, name))
        for name in ("step_size", "sigma"):
            check_positive(name, getattr(self, name))
        if self.integrator not in INTEGRATORS:
            raise ValueError(f"integrator must be one of {', '.join(INTEGRATORS)}; got {self.integrator!r}")
        if self.boundary not in BOUNDARIES:
            raise ValueError(f"boundary must be one of {', '.join(BOUNDARIES)}; got {self.boundary!r}")

    def sample(self, space: Space, index: int, common: None) -> Draw:
        """Start in the ball, propose, accept or reject."""
        if not space.noisy:
            space.reset_to_center()
            here = space.evaluate()
            zero, one = torch.zeros_like(here.loss), torch.ones_like(here.loss)
            info = {"acceptance": one, "energy_error": zero, "divergence": zero}
            return draw_at(here)._replace(info=info)
        position = space.vector("position")
        space.normal_(position, index)
        ball = Spread(radius=space.radius)
        space.scale_(position, ball.scale(lambda: space.norm(position), lambda: space.uniform(index), space.dim))
        here = _evaluate_at_position(space)
        start_loss, valid = here.loss, here.finite
        infos = []
        for _ in range(self.num_proposals):
            here, info = self._propose(space, here, index)
            infos.append(info)
        means = {name: torch.stack([i[name] for i in infos]).mean(0) for name in infos[0]}
        return Draw(here.loss, here.gradient, here.norm, valid, start_loss, means)

    def _propose(self, space: Space, here: Evaluation, index: int) -> tuple[Evaluation, dict[str, Tensor]]:
        position, momentum = space.vector("position"), space.vector("momentum")
        old_position = space.copy_to("old position", position)
        old_gradient = space.copy_to("old gradient", here.gradient)
        space.normal_(momentum, index)
        space.scale_(momentum, torch.full_like(space.radius, self.sigma))
        there, work = self._integrate(space, here, position, momentum)
        inside = (space.norm(position) <= space.radius) | (self.boundary == "reflect")  # a reflected path never leaves
        error = work - space.setting("delta") * (there.loss - here.loss)
        accept = (space.uniform(index).log() < -error) & inside & there.finite  # NaN compares false: a rejection
        space.select_(position, old_position, ~accept)
        space.select_(there.gradient, old_gradient, ~accept)
        space.reset_to_center()
        space.add_(space.point, position)
        chosen = Evaluation(
            torch.where(accept, there.loss, here.loss),
            there.gradient,
            torch.where(accept, there.norm, here.norm),
            accept | here.finite,
        )
        bounded = torch.where(error.isnan(), torch.inf, error)
        info = {
            "acceptance": torch.where(inside & there.finite, (-bounded).exp().clamp_max(1.0), 0.0),
            "energy_error": error,
            "divergence": (bounded.abs() > DIVERGENT).to(error.dtype),
        }
        return chosen, info

    def _integrate(self, space: Space, at: Evaluation, position: Vector, momentum: Vector) -> tuple[Evaluation, Tensor]:
        """Take N steps from the evaluation ``at``; leave the momentum that enters the acceptance test.

        Returns:
            The last evaluation, and the work of all kicks, which is the change of the kinetic energy: drifts and
            reflections conserve it. The difference of two kinetic energies would lose it: with ten million coordinates
            each is 5e6, known to 0.5 in float32.
        """
        half = 0.5 if self.integrator == "leapfrog" else 1.0
        work = torch.zeros_like(at.loss)
        for i in range(self.num_steps):
            work = work + self._kick(space, momentum, at, half if i == 0 else 1.0)
            self._drift(space, position, momentum)
            at = _evaluate_at_position(space)
        if self.integrator != "euler":
            work = work + self._kick(space, momentum, at, half)
        return at, work

    def _kick(self, space: Space, momentum: Vector, at: Evaluation, fraction: float) -> Tensor:
        """``p <- p + c ∇L`` with ``c = fraction β δ``; return the work ``(c p·∇L + c²‖∇L‖²/2)/σ²``.

        The force is zero where the gradient is not finite: a proposal that ends there is rejected.
        """
        force = space.copy_to("force", at.gradient)
        space.zero_unless_(force, at.finite)
        scale = space.setting("delta") * (fraction * self.step_size)
        work = scale * (space.dot(momentum, force) + scale * at.norm.square() / 2) / self.sigma**2
        space.add_scaled_(momentum, force, scale)
        return work

    def _drift(self, space: Space, position: Vector, momentum: Vector) -> None:
        """``ε <- ε + β p/σ²``, reflected at the sphere if the boundary says so."""
        time = torch.full_like(space.radius, self.step_size / self.sigma**2)
        if self.boundary == "reflect":
            drift_and_reflect(space, position, momentum, time)
        else:
            space.add_scaled_(position, space.copy_to("force", momentum), time)


def drift_and_reflect(space: Space, position: Vector, momentum: Vector, time: Tensor) -> None:
    """Move freely for ``time`` at velocity ``momentum`` inside the ball, reflected wherever the path meets the sphere.

    A billiard in a ball stays in the plane of position x and momentum p, and all chords after the first impact are
    alike: at incidence angle φ they have length ``2R cos φ`` and rotate the point of impact by ``ψ = π − 2φ``. So any
    number of reflections is one linear map of (x, p) with four scalar entries. These are computed in float64: in many
    dimensions paths graze the sphere, and many reflections add up. A position that rounding has put outside counts as
    on the sphere.
    """
    x2 = space.dot(position, position).double()
    xp = space.dot(position, momentum).double()
    p2 = space.dot(momentum, momentum).double()
    radius, time = torch.maximum(space.radius.double(), x2.sqrt()), time.double()
    speed = p2.sqrt().clamp_min(_TINY)
    exit_time = ((xp.square() + p2 * (radius.square() - x2)).clamp_min(0.0).sqrt() - xp) / speed.square()
    hit = exit_time < time
    first = torch.where(hit, exit_time.clamp_min(0.0), time)

    # The first impact, in units of R and of the speed: normal n = (x + first p)/R, tangent (p/speed − cos φ n)/sin φ.
    cos = ((xp + first * p2) / (radius * speed)).clamp(1e-9, 1.0)
    sin = (1 - cos.square()).clamp_min(1e-18).sqrt()

    # The last impact is rotated by num_reflections · ψ; the rest of the path leaves it in a straight line.
    path = (time - first) * speed
    chord = 2 * radius * cos
    num_reflections = (path / chord.clamp_min(_TINY)).floor()
    rest = path - num_reflections * chord
    angle = num_reflections * (torch.pi - 2 * torch.atan2(sin, cos))
    velocity_normal = -cos * angle.cos() - sin * angle.sin()
    velocity_tangent = -cos * angle.sin() + sin * angle.cos()
    position_normal = radius * angle.cos() + rest * velocity_normal
    position_tangent = radius * angle.sin() + rest * velocity_tangent

    # From (normal, tangent) to (x, p).
    def in_terms_of_x_and_p(normal: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
        of_x = (normal - tangent * cos / sin) / radius.clamp_min(_TINY)
        return of_x, first * of_x + tangent / (sin * speed)

    x_of_x, x_of_p = in_terms_of_x_and_p(position_normal, position_tangent)
    p_of_x, p_of_p = in_terms_of_x_and_p(speed * velocity_normal, speed * velocity_tangent)

    dtype = space.radius.dtype
    one, zero = torch.ones_like(first), torch.zeros_like(first)
    old_position = space.copy_to("before reflection", position)
    space.scale_(position, torch.where(hit, x_of_x, one).to(dtype))
    space.add_scaled_(position, space.copy_to("force", momentum), torch.where(hit, x_of_p, time).to(dtype))
    space.scale_(momentum, torch.where(hit, p_of_p, one).to(dtype))
    space.add_scaled_(momentum, old_position, torch.where(hit, p_of_x, zero).to(dtype))


def _evaluate_at_position(space: Space) -> Evaluation:
    space.reset_to_center()
    space.add_(space.point, space.vector("position"))
    return space.evaluate()
