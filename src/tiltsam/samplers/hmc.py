"""Hamiltonian Monte Carlo on the ball: draws ε from μ·exp(δL), the distribution that Algorithm 1 asks for.

Potential ``U(ε) = −δ L(θ+ε)``, kinetic energy ``‖p‖²/2σ²``, μ uniform on ``‖ε‖ ≤ R``. A proposal draws
``p ~ N(0, σ²I)``, follows the dynamics for N steps of size β, and is accepted with probability
``min(1, exp(H_0 − H_N))``.

The integrators differ in the momentum that enters ``H_N``, and only two of them are exact:

- ``leapfrog``: half a kick, drift, half a kick. Reversible and volume preserving: exact for any β.
- ``euler-corrected``: the paper's kicks and drifts, then one more kick ``p_N + βδ∇L(ε_N)`` before accepting. That makes
  the map reversible, so it is exact, and the gradient is needed for the descent anyway.
- ``euler``: as printed, accepted with ``p_N`` itself. Volume preserving but *not* reversible: biased. At N = 1 and
  β → 0 the chain follows exp(2δL) in place of exp(δL). Offered to reproduce the paper, and by name only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tiltsam.samplers.kernel import Draw, evaluated
from tiltsam.space import Evaluation, Space, Spread, Vector

__all__ = ["HMC"]

INTEGRATORS = ("leapfrog", "euler-corrected", "euler")
BOUNDARIES = ("reflect", "reject")
_TINY = 1e-30
DIVERGENT = 1000.0  # an energy error beyond this is called a divergence


@dataclass(frozen=True)
class HMC:
    """Samples of μ·exp(δL): each starts uniform in the ball and makes ``num_proposals`` accept/reject moves.

    Cost: ``1 + num_steps · num_proposals`` passes a sample. Memory: six vectors, whatever s. Consistent as
    ``num_proposals`` grows, for all but ``integrator="euler"``; at one proposal the start's distribution still shows.
    At R = 0 there is nowhere to move: one pass a sample, at θ.

    Args:
        num_steps: N, drifts a proposal.
        step_size: β.
        sigma: σ, standard deviation of the momentum; the drift is ``β p/σ²``.
        integrator: ``"leapfrog"``, ``"euler-corrected"`` or ``"euler"`` (see the module).
        boundary: ``"reflect"`` turns the momentum at the sphere; ``"reject"`` refuses a final point outside. Both are
            exact; in high dimension almost every straight path leaves the ball, so that reject hardly ever accepts.
        num_proposals: Moves a sample.
    """

    num_steps: int = 1
    step_size: float = 0.1
    sigma: float = 1.0
    integrator: Literal["leapfrog", "euler-corrected", "euler"] = "leapfrog"
    boundary: Literal["reflect", "reject"] = "reflect"
    num_proposals: int = 1
    tilted: ClassVar[bool] = True
    independent: ClassVar[bool] = True
    scale_free: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("num_steps", "num_proposals"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("step_size", "sigma"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        if self.integrator not in INTEGRATORS:
            raise ValueError(f"integrator must be one of {', '.join(INTEGRATORS)}; got {self.integrator!r}")
        if self.boundary not in BOUNDARIES:
            raise ValueError(f"boundary must be one of {', '.join(BOUNDARIES)}; got {self.boundary!r}")

    def begin(self, space: Space) -> None:
        """Nothing to share: samples are independent."""

    def sample(self, space: Space, index: int, state: None) -> tuple[Draw, None]:
        """Start in the ball, propose, accept or go back."""
        if not space.noisy:
            space.go_home()
            here = space.evaluate()
            zero, one = torch.zeros_like(here.loss), torch.ones_like(here.loss)
            calm = {"acceptance": one, "energy_error": zero, "divergence": zero}
            return evaluated(here)._replace(info=calm), None
        position = space.vector("position")
        space.normal_(position, index)
        reach = Spread(radius=space.radius)
        space.scale_(position, reach.scale(space.norm(position), lambda: space.uniform(index), space.dim))
        here = _visit(space)
        start_loss, valid = here.loss, here.finite
        infos = []
        for _ in range(self.num_proposals):
            here, info = self._propose(space, here, index)
            infos.append(info)
        means = {name: torch.stack([i[name] for i in infos]).mean(0) for name in infos[0]}
        return Draw(here.loss, here.gradient, here.norm, valid, start_loss, means), None

    def _propose(self, space: Space, here: Evaluation, index: int) -> tuple[Evaluation, dict[str, Tensor]]:
        position, momentum = space.vector("position"), space.vector("momentum")
        old_position = space.save("old position", position)
        old_gradient = space.save("old gradient", here.gradient)
        space.normal_(momentum, index)
        space.scale_(momentum, torch.full_like(space.radius, self.sigma))
        there, work = self._integrate(space, here, position, momentum)
        inside = (space.norm(position) <= space.radius) | (self.boundary == "reflect")  # a reflected path never leaves
        error = work - space.delta * (there.loss - here.loss)
        accept = (space.uniform(index).log() < -error) & inside & there.finite  # NaN compares false: a rejection
        refuse = ~accept
        space.select_(position, old_position, refuse)
        space.select_(there.gradient, old_gradient, refuse)
        space.go_home()
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
        """N steps from where ``at`` was taken; leaves the momentum that the acceptance test is to see.

        Returns the last evaluation and the work of all kicks. That is how much the kinetic energy has grown, for drifts
        and bounces conserve it. Subtracting one kinetic energy from another would lose it: with ten million coordinates
        each is 5e6, of which a float32 knows 0.5.
        """
        half = 0.5 if self.integrator == "leapfrog" else 1.0
        work = torch.zeros_like(at.loss)
        for i in range(self.num_steps):
            work = work + self._kick(space, momentum, at, half if i == 0 else 1.0)
            self._drift(space, position, momentum)
            at = _visit(space)
        if self.integrator != "euler":
            work = work + self._kick(space, momentum, at, half)
        return at, work

    def _kick(self, space: Space, momentum: Vector, at: Evaluation, fraction: float) -> Tensor:
        """``p <- p + c ∇L`` with ``c = fraction β δ``. Returns the work, ``(c p·∇L + c²‖∇L‖²/2)/σ²``.

        Where ``at`` is not finite there is no force (a move that ends there will be refused).
        """
        force = space.save("force", at.gradient)
        space.keep_(force, at.finite)
        scale = space.delta * (fraction * self.step_size)
        work = scale * (space.dot(momentum, force) + scale * at.norm.square() / 2) / self.sigma**2
        space.add_scaled_(momentum, force, scale)
        return work

    def _drift(self, space: Space, position: Vector, momentum: Vector) -> None:
        """``ε <- ε + β p/σ²``, turning at the sphere if the boundary reflects."""
        time = torch.full_like(space.radius, self.step_size / self.sigma**2)
        if self.boundary == "reflect":
            bounce(space, position, momentum, time)
        else:
            space.add_scaled_(position, space.save("force", momentum), time)


def bounce(space: Space, position: Vector, momentum: Vector, time: Tensor) -> None:
    """Fly freely for ``time`` inside the ball, at velocity ``momentum``, reflected wherever the path meets the sphere.

    A billiard in a ball stays in the plane of position and momentum, and all its chords after the first hit are alike:
    with incidence angle φ they have length ``2R cos φ`` and turn the point of impact by ``ψ = π − 2φ``. So any number
    of bounces is one linear map of (position, momentum), whose four entries are scalars. They are computed in float64:
    in many dimensions paths graze the sphere, and there are many bounces to add up. A position that rounding has put
    outside counts as on the sphere.
    """
    x2, xp, p2 = (
        space.dot(x, y).double() for x, y in ((position, position), (position, momentum), (momentum, momentum))
    )
    radius, time = torch.maximum(space.radius.double(), x2.sqrt()), time.double()
    speed = p2.sqrt().clamp_min(_TINY)
    exit_time = ((xp.square() + p2 * (radius.square() - x2)).clamp_min(0.0).sqrt() - xp) / speed.square()
    hit = exit_time < time
    first = torch.where(hit, exit_time.clamp_min(0.0), time)
    # At the first impact, in units of R and of speed: the normal n = (x + first p)/R, the tangent (u − cos φ n)/sin φ.
    cos = ((xp + first * p2) / (radius * speed)).clamp(1e-9, 1.0)
    sin = (1 - cos.square()).clamp_min(1e-18).sqrt()
    flight = (time - first) * speed
    chord = 2 * radius * cos
    bounces = (flight / chord.clamp_min(_TINY)).floor()
    rest = flight - bounces * chord
    turn = bounces * (torch.pi - 2 * torch.atan2(sin, cos))
    # Position and direction after the last bounce, as coefficients of (n, tangent).
    x_n = radius * turn.cos() + rest * (-cos * turn.cos() - sin * turn.sin())
    x_t = radius * turn.sin() + rest * (-cos * turn.sin() + sin * turn.cos())
    v_n = -cos * turn.cos() - sin * turn.sin()
    v_t = -cos * turn.sin() + sin * turn.cos()
    rows = []
    for along, across in ((x_n, x_t), (speed * v_n, speed * v_t)):
        of_x = (along - across * cos / sin) / radius.clamp_min(
            _TINY
        )  # tangent = (p/speed − cos n)/sin, n = (x + first p)/R
        rows.append((of_x, first * of_x + across / (sin * speed)))
    (xx, xp_), (px, pp) = rows
    dtype = space.radius.dtype
    one, zero = torch.ones_like(first), torch.zeros_like(first)
    before = space.save("turn", position)
    space.scale_(position, torch.where(hit, xx, one).to(dtype))
    space.add_scaled_(position, space.save("force", momentum), torch.where(hit, xp_, time).to(dtype))
    space.scale_(momentum, torch.where(hit, pp, one).to(dtype))
    space.add_scaled_(momentum, before, torch.where(hit, px, zero).to(dtype))


def _visit(space: Space) -> Evaluation:
    """Evaluate at θ + position."""
    space.go_home()
    space.add_(space.point, space.vector("position"))
    return space.evaluate()
