"""How good are the gradient estimates that TSAM descends? The kernels of the optimizer against the exact gradient.

A step of TSAM draws ``s`` perturbations and aggregates their gradients with weights ``softmax((t - delta) L_j)``
(Algorithm 1). Here the very kernels that train networks (:mod:`tiltsam.samplers`) run on a loss of one variable whose
gradient of ``L^t`` is known by quadrature, on many chains at once, and two questions are answered for each of them:

* bias: how far is the mean of the estimate from the exact gradient?
* spread: what is its standard deviation over draws?

An estimator is *consistent* if both vanish as ``s`` grows. A bias that falls like ``1/s`` is the usual price of
normalised weights; one that stays is an error of the sampler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tiltsam.samplers import HMC, Ascent, Gaussian, Sampler, Uniform
from tiltsam.toys.chain_space import ChainSpace, sample_chains
from tiltsam.toys.objectives import HMC_TEST, Ball, Noise, Normal, Problem, tsam

__all__ = [
    "ESTIMATORS",
    "Estimator",
    "Quality",
    "density",
    "draw_perturbations",
    "measure",
    "render",
    "study",
    "sup_cdf",
]

CENTER = -1.0
"""Where the gradient of ``L^t`` of :data:`~tiltsam.toys.HMC_TEST` is estimated: the worst case over [-2, 0] is then the
right end, where the slope is .8, so that the gradient does not vanish at large ``t``."""


@dataclass(frozen=True)
class Estimator:
    """A way to estimate the gradient of the tilted loss.

    Args:
        name: For tables and figures.
        sampler: The kernel that draws.
        noise: The measure whose tilted loss is meant.
        radius: Radius of the ball that the kernel draws from.
        rho: Length of the ascent.
        delta_share: The sampler's tilt as a share of ``t``: ``delta = delta_share * t``.
        consistent: Whether it should tend to the exact gradient as ``s`` grows.
        passes: Gradient evaluations a sample.
    """

    name: str
    sampler: Sampler
    noise: Noise
    radius: float
    rho: float
    delta_share: float
    consistent: bool
    passes: int


def _estimators() -> dict[str, Estimator]:
    # The neighbourhood is [-1, 1] for all but the Gaussian. Algorithm 2 splits it into R + rho, so that its draws stay
    # inside; rho is a tenth of it, so that the ascent does something. HMC takes N = 1 step a proposal, as the paper
    # does, and as many proposals as it needs to forget the uniform start (80 steps of .2 diffuse over 1.8).
    ball, split = Ball(1.0), {"radius": 0.9, "rho": 0.1}

    def hmc(name: str, integrator: str, num_proposals: int, consistent: bool) -> Estimator:
        sampler = HMC(1, 0.2, 1.0, integrator, "reflect", num_proposals)  # type: ignore[arg-type]
        return Estimator(name, sampler, ball, 1.0, 0.0, 0.5, consistent, 1 + num_proposals)

    return {
        e.name: e
        for e in (
            Estimator("uniform", Uniform(), ball, 1.0, 0.0, 0.0, True, 1),
            Estimator("Gaussian", Gaussian(std=0.5), Normal(0.5), 1.0, 0.0, 0.0, True, 1),
            Estimator("Algorithm 2, δ = t/2", Ascent(), ball, delta_share=0.5, consistent=False, passes=2, **split),
            Estimator("Algorithm 2, δ = 0", Ascent(), ball, delta_share=0.0, consistent=False, passes=2, **split),
            hmc("HMC leapfrog", "leapfrog", 80, True),
            hmc("HMC Euler, corrected", "euler-corrected", 80, True),
            hmc("HMC Euler, as printed", "euler", 80, False),
            hmc("HMC leapfrog, 1 proposal", "leapfrog", 1, False),
        )
    }


ESTIMATORS = _estimators()
"""Those that are compared, by name."""


class Quality(NamedTuple):
    """An estimator's errors at one tilt and one number of samples."""

    name: str
    t: float
    num_samples: int
    exact: float  # the gradient of L^t by quadrature
    bias: float
    bias_error: float  # standard error of the bias, from the finite number of repeats
    spread: float  # standard deviation of the estimate

    @property
    def rmse(self) -> float:
        """Root of the mean squared error."""
        return math.hypot(self.bias, self.spread)


def measure(
    estimator: Estimator,
    t: float,
    num_samples: Sequence[int],
    *,
    problem: Problem = HMC_TEST,
    theta: float = CENTER,
    num_draws: int = 16384,
    seed: int = 0,
) -> list[Quality]:
    """Bias and spread of an estimator at tilt ``t`` for several numbers of samples ``s``.

    The samples of a step are independent for every kernel here, so the same ``num_draws`` draws are cut into groups of
    ``s``: the more samples, the fewer repeats, and the standard error of the bias stays about the same.

    Args:
        estimator: One of :data:`ESTIMATORS`, or another.
        t: The tilt.
        num_samples: The numbers ``s``; each at most ``num_draws / 2``.
        problem: The loss.
        theta: Where the gradient is estimated.
        num_draws: How many perturbations to draw in all.
        seed: Of the draws.
    """
    if max(num_samples) * 2 > num_draws:
        raise ValueError(f"num_draws must be at least twice the largest s, got {num_draws} for {max(num_samples)}")
    delta = estimator.delta_share * t
    losses, grads = _draw(estimator, problem, theta, delta, num_draws, seed)[1:]
    exact = float(tsam(problem, theta, t, estimator.noise).grad)
    found = []
    for s in num_samples:
        whole = num_draws // s * s
        weights = ((t - delta) * losses[:whole].reshape(-1, s)).softmax(1)  # Algorithm 1
        estimates = (weights * grads[:whole].reshape(-1, s)).sum(1)
        spread = float(estimates.std())
        error = spread / math.sqrt(len(estimates))
        found.append(Quality(estimator.name, t, s, exact, float(estimates.mean()) - exact, error, spread))
    return found


def study(
    tilts: Sequence[float] = (1.0, 5.0, 20.0),
    num_samples: Sequence[int] = (1, 3, 5, 10, 30, 100, 300),
    *,
    num_draws: int = 16384,
    seed: int = 0,
) -> list[Quality]:
    """All of :data:`ESTIMATORS`, at several tilts and numbers of samples."""
    return [
        quality
        for t in tilts
        for estimator in ESTIMATORS.values()
        for quality in measure(estimator, t, num_samples, num_draws=num_draws, seed=seed)
    ]


def render(qualities: Sequence[Quality]) -> str:
    """A text table: a line for each estimator and tilt, ``bias (its standard error) spread`` for each ``s``."""
    counts = sorted({q.num_samples for q in qualities})
    cells = {(q.name, q.t, q.num_samples): f"{q.bias:+.3f} ({q.bias_error:.3f}) {q.spread:.3f}" for q in qualities}
    exact = {(q.name, q.t): q.exact for q in qualities}
    head = f"{'estimator':<26}{'t':>5}{'exact':>8}" + "".join(f"{f's = {s}':>24}" for s in counts)
    lines = [head]
    for (name, t), value in exact.items():
        row = "".join(f"{cells.get((name, t, s), ''):>24}" for s in counts)
        lines.append(f"{name:<26}{t:>5g}{value:>8.3f}{row}")
    return "\n".join(lines)


def draw_perturbations(
    sampler: Sampler, *, delta: float, num_draws: int, problem: Problem = HMC_TEST, theta: float = 0.0, seed: int = 0
) -> Tensor:
    """Perturbations that a kernel draws on the unit ball with tilt ``delta``, of shape (num_draws,)."""
    plain = Estimator("", sampler, Ball(1.0), 1.0, 0.0, 0.0, True, 1)
    return _draw(plain, problem, theta, delta, num_draws, seed)[0]


def density(problem: Problem, delta: float, theta: float = 0.0, num: int = 4001) -> tuple[Tensor, Tensor, Tensor]:
    """The exact density proportional to ``exp(delta L(theta + eps))`` on [-1, 1]: places, density, distribution."""
    eps = torch.linspace(-1, 1, num, dtype=torch.float64)
    height = (delta * problem.loss(theta + eps)).exp()
    below = torch.cat([height.new_zeros(1), torch.cumulative_trapezoid(height, eps)])
    return eps, height / below[-1], below / below[-1]


def sup_cdf(draws: Tensor, problem: Problem, delta: float) -> float:
    """Largest distance between the distribution of ``draws`` and the exact one (Kolmogorov and Smirnov)."""
    eps, _, exact = density(problem, delta)
    ordered = draws.sort().values
    right = torch.searchsorted(eps, ordered).clamp(1, len(eps) - 1)
    fraction = (ordered - eps[right - 1]) / (eps[right] - eps[right - 1])
    at_draws = torch.lerp(exact[right - 1], exact[right], fraction)
    rank = torch.arange(len(draws), dtype=torch.float64)
    return float(torch.maximum(at_draws - rank / len(draws), (rank + 1) / len(draws) - at_draws).max())


def _draw(
    estimator: Estimator, problem: Problem, theta: float, delta: float, num_draws: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Perturbations, losses and gradients of independent chains, one sample each."""
    space = ChainSpace(
        lambda x: problem.loss(x[:, 0]),
        torch.tensor([theta], dtype=torch.float64),
        num_draws,
        rho=estimator.rho,
        radius=estimator.radius,
        delta=delta,
        seed=seed,
    )
    (draw,), eps = sample_chains(estimator.sampler, space)
    return eps[0, :, 0], draw.loss, draw.gradient[:, 0]
