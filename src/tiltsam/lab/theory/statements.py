"""The paper's statements about TSAM as functions that return numbers.

Each check computes two sides of a statement, or a quantity and its bound, exactly (see :mod:`tiltsam.toys`); the
tests compare them and :func:`tiltsam.lab.theory.findings.table` shows them next to what the paper states. Not all of
it holds as printed: see :func:`prefers_flatter` (Theorem 3.6), :func:`smoothness` (Lemma 3.3), :func:`small_t`, and
the reading of :func:`generalisation_bound` (Theorem 3.7); their docstrings say what does hold.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from tiltsam.tilting import tilted_loss
from tiltsam.toys.descent import Minimum, minimise
from tiltsam.toys.objectives import Ball, Noise, Problem, erm, lemma_derivatives, sam, tsam
from tiltsam.toys.quadrature import gauss_legendre

__all__ = [
    "Bound",
    "Flatter",
    "Limits",
    "Pair",
    "Sandwich",
    "best_tilt",
    "finite_samples",
    "generalisation_bound",
    "jensen_gap",
    "lemma_gradient",
    "lemma_hessian",
    "limits",
    "linear_under_ball",
    "lipschitz",
    "prefers_flatter",
    "quadratic_under_normal",
    "shift",
    "slope_in_t",
    "small_t",
    "smoothness",
    "strong_convexity",
]


class Pair(NamedTuple):
    """A quantity as computed, and what it should be, or the bound it should respect."""

    found: float
    expected: float


class Sandwich(NamedTuple):
    """A quantity between two bounds."""

    lower: float
    value: float
    upper: float

    def holds(self, slack: float = 1e-12) -> bool:
        """Whether the value lies between the bounds, up to rounding."""
        return self.lower - slack <= self.value <= self.upper + slack


class Limits(NamedTuple):
    """The TSAM objective at a small and a large tilt, beside the mean and the maximum of the losses."""

    mean: float
    small: float
    large: float
    maximum: float


def slope_in_t(problem: Problem, theta: float, t: float, noise: Noise, step: float = 1e-4) -> Pair:
    """``dL^t/dt`` by central differences, and ``KL(w mu || mu)/t^2``, which it equals; so ``L^t`` never falls in ``t``.

    The appendix titles this "monotonically non-increasing"; what it proves, rightly, is non-decreasing.
    """
    after, before = (float(tsam(problem, theta, t + sign * step, noise).value) for sign in (1, -1))
    here = tsam(problem, theta, t, noise)
    # KL = E_w[log w] = E_w[t (L - L^t)]
    return Pair((after - before) / (2 * step), float(here.mean - here.value) / t)


def limits(problem: Problem, theta: float, ball: Ball, small: float = 1e-8, large: float = 1e6) -> Limits:
    """Both limits: ``t -> 0`` is the mean over the ball, ``t -> inf`` the maximum, SAM's objective."""
    return Limits(
        mean=float(tsam(problem, theta, 0.0, ball).value),
        small=float(tsam(problem, theta, small, ball).value),
        large=float(tsam(problem, theta, large, ball).value),
        maximum=float(sam(problem, theta, ball.rho).value),
    )


def small_t(problem: Problem, theta: float, noise: Noise, t: float = 0.1) -> Pair:
    """The limit of ``(L^t - mean - t/2 var)/t^2`` as ``t -> 0``, and ``kappa_3/6``, which it equals.

    So the expansion's remainder is ``O(t^2)``; the paper's ``o(t^2)`` holds only for losses without skew. The limit is
    extrapolated (Richardson) from ``t, t/2, t/4, ...``, as the quotient itself drowns in rounding when ``t`` is tiny.
    """
    plain = tsam(problem, theta, 0.0, noise)

    def quotient(t: float) -> float:
        value = tsam(problem, theta, t, noise).value
        return float(value - plain.value - t / 2 * plain.var) / t**2

    column = [quotient(t / 2**k) for k in range(5)]
    for order in range(1, 5):
        column = [b + (b - a) / (2**order - 1) for a, b in itertools.pairwise(column)]
    return Pair(column[0], float(plain.third) / 6)


def finite_samples(losses: Tensor, t: float) -> Sandwich:
    """``max - log(s)/t <= tilted loss <= max`` for ``s`` losses: how far a finite sample is from the worst case."""
    top = float(losses.max())
    return Sandwich(top - math.log(losses.numel()) / t, float(tilted_loss(losses, t)), top)


def shift(problem: Problem, theta: float, t: float, noise: Noise, constant: float) -> tuple[Pair, Pair]:
    """Adding a constant to the loss adds it to ``L^t`` and leaves the weights, hence the gradient, alone.

    Returns:
        How much the value changed, beside the constant; the new gradient, beside the old.
    """
    moved = Problem(problem.name, lambda x: problem.loss(x) + constant, problem.lo, problem.hi)
    before, after = tsam(problem, theta, t, noise), tsam(moved, theta, t, noise)
    return (
        Pair(float(after.value - before.value), constant),
        Pair(float(after.grad), float(before.grad)),
    )


def lemma_gradient(problem: Problem, theta: float, t: float, noise: Noise) -> Pair:
    """Lemma 3.2: ``E_w[L']``, beside the derivative of ``L^t`` taken through the density of the noise."""
    return Pair(float(lemma_derivatives(problem, theta, t, noise)[0]), float(tsam(problem, theta, t, noise).grad))


def lemma_hessian(problem: Problem, theta: float, t: float, noise: Noise) -> Pair:
    """Lemma 3.2: ``t Var_w(L') + E_w[L'']``, beside the second derivative taken through the density of the noise.

    In more dimensions the variance is the covariance matrix, made of outer products of the gradients.
    """
    return Pair(float(lemma_derivatives(problem, theta, t, noise)[1]), float(tsam(problem, theta, t, noise).hess))


def lipschitz(problem: Problem, t: float, ball: Ball) -> Pair:
    """The steepest slope of ``L^t`` on the problem's interval, and of ``L`` on the interval widened by ``rho``.

    A ``p``-Lipschitz loss has a ``p``-Lipschitz ``L^t``: the first never exceeds the second.
    """
    steepest = tsam(problem, _grid(problem.lo, problem.hi), t, ball).grad.abs().max()
    reference = erm(problem, _grid(problem.lo - ball.rho, problem.hi + ball.rho, 20001)).grad.abs().max()
    return Pair(float(steepest), float(reference))


def strong_convexity(problem: Problem, t: float, ball: Ball) -> Pair:
    """The least curvature of ``L^t`` on the problem's interval, and of ``L`` on the interval widened by ``rho``.

    A ``mu``-strongly convex loss has a ``mu``-strongly convex ``L^t``: the first is never below the second.
    """
    least = tsam(problem, _grid(problem.lo, problem.hi), t, ball).hess.min()
    reference = erm(problem, _grid(problem.lo - ball.rho, problem.hi + ball.rho)).hess.min()
    return Pair(float(least), float(reference))


def smoothness(problem: Problem, theta: float, t: float, ball: Ball, beta: float) -> Pair:
    """The curvature of ``L^t`` at a point, and its bound ``beta + t beta^2 rho^2`` for a ``beta``-smooth loss.

    The bound is Popoviciu's: within the ball the gradient varies by at most ``2 beta rho``, so its variance is at most
    ``beta^2 rho^2``. A quadratic at its minimum attains the rate: ``hess/t -> beta^2 rho^2``.

    Note:
        Lemma 3.3 states ``0 < lim beta(t)/t < inf`` for any ``mu``. The left inequality fails for linear losses, whose
        ``L^t`` is linear; the right one fails for unbounded noise: under Gaussian ``mu`` the ``L^t`` of a quadratic is
        infinite from ``t = 1/(sigma^2 beta)`` on.
    """
    return Pair(float(tsam(problem, theta, t, ball).hess), beta + t * beta**2 * ball.rho**2)


def quadratic_under_normal(curvatures: Tensor, theta: Tensor, t: float, sigma: float) -> float:
    """``L^t`` of ``L = sum lambda theta^2 / 2`` under Gaussian noise, in any dimension.

    ``sum of -log(1 - t sigma^2 lambda)/(2t) + lambda theta^2 / (2 (1 - t sigma^2 lambda))``; infinite as soon as some
    ``t sigma^2 lambda >= 1``.
    """
    curvatures, theta = curvatures.double(), theta.double()
    left = 1 - t * sigma**2 * curvatures
    if bool((left <= 0).any()):
        return math.inf
    spread = sigma**2 * curvatures / 2 if t == 0 else -left.log() / (2 * t)
    return float((spread + curvatures * theta.square() / (2 * left)).sum())


def linear_under_ball(slope: float, rho: float, t: float) -> float:
    """``L^t - L = log(sinh(z)/z)/t`` with ``z = t rho |slope|``, for a linear loss under uniform noise in 1-D."""
    z = t * rho * abs(slope)
    if z < 1e-3:
        return (z * z / 6 - z**4 / 180) / t if t > 0 else 0.0
    # log sinh z = z + log(1 - exp(-2z)) - log 2
    return (z + math.log1p(-math.exp(-2 * z)) - math.log(2 * z)) / t


class Flatter(NamedTuple):
    """What Theorem 3.6 compares at two points, and what its proof rests on."""

    var1: float  # t-sharpness of theta1: its tilted variance at t
    var2: float
    slope: float  # d/dt of g = L^t(theta1) - L^t(theta2)
    integral: float  # t^-2 int_0^t s (V_s(theta1) - V_s(theta2)) ds, which equals the slope


def prefers_flatter(problem: Problem, theta1: float, theta2: float, t: float, noise: Noise) -> Flatter:
    """Theorem 3.6, "TSAM prefers flatter models as t increases", and the identity behind it.

    With ``g = L^t(theta1) - L^t(theta2)`` and ``V_s`` the tilted variance of the losses around a point at tilt ``s``,

        t^2 dg/dt = int_0^t s (V_s(theta1) - V_s(theta2)) ds.

    So ``g`` grows at ``t`` if ``theta1`` is ``s``-sharper than ``theta2`` for **all** ``s <= t``.

    Note:
        The printed theorem asks for sharper at the single ``t``, and its proof passes from there to "t^2 dg/dt is
        non-decreasing in t", which needs all smaller ``s`` as well. ``toys.COUNTEREXAMPLE`` with theta1 = 0,
        theta2 = -10, t = .3 and noise on [-1, 1] is convex, of the theorem's class, sharper at theta1 (.282 > .266),
        and has a falling g (slope -.0122).
    """
    both = torch.tensor([theta1, theta2], dtype=torch.float64)
    here = tsam(problem, both, t, noise)
    slopes = (here.mean - here.value) / t  # KL/t^2, see slope_in_t
    nodes, weights = gauss_legendre(12)
    integral = 0.0
    # The variances change on the scale of s itself, so each panel is as long as all before it.
    edges = [0.0, *(t / 2**k for k in range(10, -1, -1))]
    for lo, hi in itertools.pairwise(edges):
        places = lo + (nodes + 1) * (hi - lo) / 2
        for s, weight in zip(places.tolist(), (weights * (hi - lo) / 2).tolist(), strict=True):
            variance = tsam(problem, both, s, noise).var
            integral += weight * s * float(variance[0] - variance[1])
    return Flatter(float(here.var[0]), float(here.var[1]), float(slopes[0] - slopes[1]), integral / t**2)


def jensen_gap(problem: Problem, theta: float, t: float, noise: Noise, maximum: float) -> Sandwich:
    """``Var(e^{tL})/(2t e^{2tM}) <= L^t - E[L] <= Var(e^{tL})/(2t)`` for losses in [0, M] (Lemma B.1)."""
    plain, here = tsam(problem, theta, 0.0, noise), tsam(problem, theta, t, noise)
    lower = _variance_term(problem, theta, t, noise, maximum)
    return Sandwich(lower, float(here.value - plain.value), _variance_term(problem, theta, t, noise, 0.0))


class Bound(NamedTuple):
    """Theorem 3.7 taken apart; with probability ``1 - confidence`` the gap is at most ``total``."""

    hoeffding: float  # M sqrt(log(2/confidence)/(2n))
    variance: float  # Var(e^{tL})/(2t e^{2tM}), which enters with a minus
    smoothing: float  # c = L(theta) - E[L(theta + eps)], free of t
    total: float  # bound on (population risk - L^t)
    risk: float  # bound on the population risk itself: L^t + total


def generalisation_bound(
    problem: Problem, theta: float, t: float, noise: Noise, maximum: float, num_data: int, confidence: float
) -> Bound:
    """Theorem 3.7: ``risk - L^t <= M sqrt(log(2/confidence)/2n) - Var(e^{tL})/(2t e^{2tM}) + L - E[L]``.

    Args:
        problem: The loss, with values in [0, M] around ``theta``.
        theta: The point.
        t: The tilt, positive.
        noise: The measure.
        maximum: M.
        num_data: n.
        confidence: The probability that the bound fails (the paper's delta).

    Note:
        The middle term is largest at some finite ``t`` (:func:`best_tilt`), which the paper reads as a best tilt. But
        the bound is on the distance to ``L^t``, and ``L^t`` exceeds the mean by at least that term
        (:func:`jensen_gap`): the implied bound on the population risk, ``risk`` here, is never below its value at
        ``t -> 0``, which is ``L(theta) + M sqrt(...)``, at the same ``theta``. The theorem alone prefers no ``t``.
    """
    hoeffding = maximum * math.sqrt(math.log(2 / confidence) / (2 * num_data))
    variance = _variance_term(problem, theta, t, noise, maximum)
    smoothing = float(erm(problem, theta).value - tsam(problem, theta, 0.0, noise).value)
    total = hoeffding - variance + smoothing
    return Bound(hoeffding, variance, smoothing, total, float(tsam(problem, theta, t, noise).value) + total)


def best_tilt(problem: Problem, theta: float, noise: Noise, maximum: float, hi: float = 10.0) -> Minimum:
    """The ``t`` in (0, hi] at which ``Var(e^{tL})/(2t e^{2tM})`` is largest, and that largest value."""

    def negative(ts: Tensor) -> Tensor:
        terms = [-_variance_term(problem, theta, t, noise, maximum) for t in ts.reshape(-1).tolist()]
        return torch.tensor(terms, dtype=torch.float64).reshape(ts.shape)

    found = minimise(negative, 1e-3, hi, num=21, num_rounds=3)  # the t to 1e-4 of hi, the value to its square
    return Minimum(found.theta, -found.value)


def _variance_term(problem: Problem, theta: float, t: float, noise: Noise, maximum: float) -> float:
    """``Var(e^{tL})/(2t e^{2tM})``, from ``E e^{tL} = e^{t L^t}`` and ``E e^{2tL} = e^{2t L^{2t}}``."""
    once, twice = (float(tsam(problem, theta, k * t, noise).value) for k in (1, 2))
    spread = math.expm1(2 * t * (twice - once))
    if spread <= 0:  # losses that are all the same, up to rounding
        return 0.0
    log = 2 * t * (once - maximum) + math.log(spread / (2 * t))
    return math.exp(log) if log < 709 else math.inf


def _grid(lo: float, hi: float, num: int = 201) -> Tensor:
    return torch.linspace(lo, hi, num, dtype=torch.float64)
