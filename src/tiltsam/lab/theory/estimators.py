"""Bias and standard deviation of the gradient estimates that TSAM descends.

A TSAM step draws ``s`` perturbations and averages their gradients with weights ``softmax((t - delta) L_j)`` (Algorithm
1). Here the samplers of :mod:`tiltsam.samplers` run on a loss of one variable, for which quadrature gives the exact
gradient of ``L^t``.

An estimator is *consistent* if bias and standard deviation vanish as ``s`` grows. Normalised weights have a bias of
order ``1/s``; a bias that stays is an error of the sampler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tiltsam.samplers import HMC, Ascent, Gaussian, Sampler, Uniform
from tiltsam.toys import HMC_TEST, Ball, Noise, Normal, Problem, tsam
from tiltsam.toys.chain_space import ChainSpace, sample_chains

__all__ = [
    "ESTIMATORS",
    "Estimator",
    "Quality",
    "draw_perturbations",
    "exact_density",
    "ks_distance",
    "measure",
    "render",
    "study",
]

CENTER = -1.0
"""Where the gradient of ``L^t`` of :data:`~tiltsam.toys.HMC_TEST` is estimated. The worst case over [-2, 0] is at its
right end, where the slope is .8, so the gradient does not vanish at large ``t``."""


@dataclass(frozen=True)
class Estimator:
    """An estimator of the gradient of the tilted loss.

    Args:
        name: Name for tables and figures.
        sampler: The sampler.
        noise: The distribution ``mu`` that defines the tilted loss.
        radius: Radius of the ball that the sampler draws from.
        rho: Length of the ascent.
        delta_over_t: The sampler's tilt ``delta`` divided by ``t``.
    """

    name: str
    sampler: Sampler
    noise: Noise
    radius: float = 1.0
    rho: float = 0.0
    delta_over_t: float = 0.0


def _hmc(integrator: Literal["leapfrog", "euler-corrected", "euler"], num_proposals: int) -> HMC:
    # N = 1 step per proposal, as in the paper. 80 proposals of step .2 diffuse over .2 sqrt(80) = 1.8, enough to forget
    # the uniform start.
    return HMC(num_steps=1, step_size=0.2, integrator=integrator, num_proposals=num_proposals)


# mu is uniform on [-1, 1], except for the Gaussian. Algorithm 2 splits the unit radius into R + rho = .9 + .1, so that
# its points stay inside.
ESTIMATORS = {
    estimator.name: estimator
    for estimator in (
        Estimator("uniform", Uniform(), Ball(1.0)),
        Estimator("Gaussian", Gaussian(std=0.5), Normal(0.5)),
        Estimator("Algorithm 2, δ = t/2", Ascent(), Ball(1.0), radius=0.9, rho=0.1, delta_over_t=0.5),
        Estimator("Algorithm 2, δ = 0", Ascent(), Ball(1.0), radius=0.9, rho=0.1),
        Estimator("HMC leapfrog", _hmc("leapfrog", 80), Ball(1.0), delta_over_t=0.5),
        Estimator("HMC Euler, corrected", _hmc("euler-corrected", 80), Ball(1.0), delta_over_t=0.5),
        Estimator("HMC Euler, as printed", _hmc("euler", 80), Ball(1.0), delta_over_t=0.5),
        Estimator("HMC leapfrog, 1 proposal", _hmc("leapfrog", 1), Ball(1.0), delta_over_t=0.5),
    )
}
"""The estimators to compare, by name."""


class Quality(NamedTuple):
    """Errors of an estimator at one tilt and one number of samples."""

    name: str
    t: float
    num_samples: int
    exact: float  # gradient of L^t by quadrature
    bias: float
    bias_error: float  # standard error of the bias
    std: float  # standard deviation of one estimate


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
    """Return bias and standard deviation of an estimator at tilt ``t`` for several numbers of samples ``s``.

    The samples of a step are independent for every sampler here, so the same ``num_draws`` draws are cut into groups of
    ``s``. More samples mean fewer groups, and the standard error of the bias stays about the same.

    Args:
        estimator: One of :data:`ESTIMATORS`, or another.
        t: The tilt.
        num_samples: The numbers ``s``, each at most ``num_draws / 2``.
        problem: The loss.
        theta: Where the gradient is estimated.
        num_draws: Total number of perturbations to draw.
        seed: Seed of the draws.
    """
    if max(num_samples) * 2 > num_draws:
        raise ValueError(f"num_draws must be at least {max(num_samples) * 2}, twice the largest s, got {num_draws}")
    delta = estimator.delta_over_t * t
    space = _chains(problem, theta, num_draws, estimator.rho, estimator.radius, delta, seed)
    (draw,), _ = sample_chains(estimator.sampler, space)
    exact = float(tsam(problem, theta, t, estimator.noise).grad)
    qualities = []
    for s in num_samples:
        num_used = num_draws // s * s
        losses, gradients = draw.loss[:num_used].reshape(-1, s), draw.gradient[:num_used, 0].reshape(-1, s)
        weights = ((t - delta) * losses).softmax(1)  # Algorithm 1
        estimates = (weights * gradients).sum(1)
        std = float(estimates.std())
        error = std / math.sqrt(len(estimates))
        qualities.append(Quality(estimator.name, t, s, exact, float(estimates.mean()) - exact, error, std))
    return qualities


def study(
    tilts: Sequence[float] = (1.0, 5.0, 20.0),
    num_samples: Sequence[int] = (1, 3, 5, 10, 30, 100, 300),
    *,
    num_draws: int = 16384,
    seed: int = 0,
) -> list[Quality]:
    """Measure all of :data:`ESTIMATORS` at several tilts and numbers of samples."""
    return [
        quality
        for t in tilts
        for estimator in ESTIMATORS.values()
        for quality in measure(estimator, t, num_samples, num_draws=num_draws, seed=seed)
    ]


def render(qualities: Sequence[Quality]) -> str:
    """Return a text table with a line per estimator and tilt, and ``bias (standard error) std`` for each ``s``."""
    counts = sorted({q.num_samples for q in qualities})
    cells = {(q.name, q.t, q.num_samples): f"{q.bias:+.3f} ({q.bias_error:.3f}) {q.std:.3f}" for q in qualities}
    exact = {(q.name, q.t): q.exact for q in qualities}
    lines = [f"{'estimator':<26}{'t':>5}{'exact':>8}" + "".join(f"{f's = {s}':>24}" for s in counts)]
    for (name, t), value in exact.items():
        row = "".join(f"{cells.get((name, t, s), ''):>24}" for s in counts)
        lines.append(f"{name:<26}{t:>5g}{value:>8.3f}{row}")
    return "\n".join(lines)


def draw_perturbations(sampler: Sampler, *, delta: float, num_draws: int, seed: int = 0) -> Tensor:
    """Draw perturbations of 0 on the unit ball with tilt ``delta``, for ``HMC_TEST``, of shape (num_draws,)."""
    space = _chains(HMC_TEST, 0.0, num_draws, rho=0.0, radius=1.0, delta=delta, seed=seed)
    _, eps = sample_chains(sampler, space)
    return eps[0, :, 0]


def exact_density(problem: Problem, delta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return a grid on [-1, 1] with the density proportional to ``exp(delta L(eps))`` and its CDF."""
    eps = torch.linspace(-1, 1, 4001, dtype=torch.float64)
    height = (delta * problem.loss(eps)).exp()
    below = torch.cat([height.new_zeros(1), torch.cumulative_trapezoid(height, eps)])
    return eps, height / below[-1], below / below[-1]


def ks_distance(draws: Tensor, problem: Problem, delta: float) -> float:
    """Return the Kolmogorov-Smirnov distance of the draws from the exact density: the largest gap between the CDFs."""
    import numpy as np  # here, because the tables need torch only

    eps, _, exact = exact_density(problem, delta)
    at_draws = np.interp(draws.sort().values, eps, exact)
    rank = np.arange(len(draws))
    return float(np.maximum(at_draws - rank / len(draws), (rank + 1) / len(draws) - at_draws).max())


def _chains(
    problem: Problem, theta: float, num_chains: int, rho: float, radius: float, delta: float, seed: int
) -> ChainSpace:
    center = torch.tensor([theta], dtype=torch.float64)
    return ChainSpace(
        lambda x: problem.loss(x[:, 0]), center, num_chains, rho=rho, radius=radius, delta=delta, seed=seed
    )
