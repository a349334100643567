"""The paper's statements about TSAM as functions that return numbers.

Each function computes both sides of a statement exactly, or a quantity and its bound. The tests compare them, and
:func:`tiltsam.lab.theory.findings.table` shows them next to the paper's text. Not every statement holds as printed; see
the notes of :func:`prefers_flatter` (Theorem 3.6), :func:`smoothness` (Lemma 3.3), :func:`small_t` and
:func:`generalisation_bound` (Theorem 3.7).
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from tiltsam.toys import Ball, Minimum, Noise, Problem, erm, minimise, sam, tsam
from tiltsam.toys.quadrature import gauss_legendre

__all__ = [
    "Bound",
    "Flatter",
    "Limits",
    "Pair",
    "best_tilt",
    "generalisation_bound",
    "limits",
    "linear_under_ball",
    "lipschitz",
    "prefers_flatter",
    "quadratic_under_normal",
    "slope_in_t",
    "small_t",
    "smoothness",
    "strong_convexity",
    "variance_term",
]


class Pair(NamedTuple):
    """A computed quantity, and the value it should equal or the bound it should respect."""

    found: float
    expected: float


class Limits(NamedTuple):
    """The TSAM objective at a small and a large tilt, with the mean and the maximum of the losses."""

    mean: float
    small: float
    large: float
    maximum: float


def slope_in_t(problem: Problem, theta: float, t: float, noise: Noise) -> Pair:
    """Return ``dL^t/dt`` by central differences, and ``KL(w mu || mu)/t^2``, which it equals.

    So ``L^t`` never decreases in ``t``. The appendix titles this "monotonically non-increasing" and proves
    non-decreasing.
    """
    step = 1e-4
    after, before = (float(tsam(problem, theta, t + sign * step, noise).value) for sign in (1, -1))
    here = tsam(problem, theta, t, noise)
    # KL = E_w[log w] = E_w[t (L - L^t)]
    return Pair((after - before) / (2 * step), float(here.mean - here.value) / t)


def limits(problem: Problem, theta: float, ball: Ball) -> Limits:
    """Return both limits: ``t -> 0`` is the mean over the ball, ``t -> inf`` the maximum, SAM's objective."""
    return Limits(
        mean=float(tsam(problem, theta, 0.0, ball).value),
        small=float(tsam(problem, theta, 1e-8, ball).value),
        large=float(tsam(problem, theta, 1e6, ball).value),
        maximum=float(sam(problem, theta, ball.rho).value),
    )


def small_t(problem: Problem, theta: float, noise: Noise) -> Pair:
    """Return the limit of ``(L^t - mean - t/2 var)/t^2`` as ``t -> 0``, and ``kappa_3/6``, which it equals.

    So the remainder of the expansion is ``O(t^2)``; the paper's ``o(t^2)`` holds only for losses without skew. The
    limit is extrapolated (Richardson) from ``0.1, 0.05, ...``, because at tiny ``t`` the quotient is rounding error.
    """
    plain = tsam(problem, theta, 0.0, noise)

    def quotient(t: float) -> float:
        value = tsam(problem, theta, t, noise).value
        return float(value - plain.value - t / 2 * plain.var) / t**2

    column = [quotient(0.1 / 2**k) for k in range(5)]
    for order in range(1, 5):
        column = [b + (b - a) / (2**order - 1) for a, b in itertools.pairwise(column)]
    return Pair(column[0], float(plain.third) / 6)


def lipschitz(problem: Problem, t: float, ball: Ball) -> Pair:
    """Return the steepest slope of ``L^t`` on the problem's interval, and of ``L`` on the interval widened by ``rho``.

    If ``L`` is ``p``-Lipschitz, so is ``L^t``: the first never exceeds the second.
    """
    steepest = tsam(problem, _grid(problem.lo, problem.hi), t, ball).grad.abs().max()
    reference = erm(problem, _grid(problem.lo - ball.rho, problem.hi + ball.rho, 20001)).grad.abs().max()
    return Pair(float(steepest), float(reference))


def strong_convexity(problem: Problem, t: float, ball: Ball) -> Pair:
    """Return the least curvature of ``L^t`` on the problem's interval, and of ``L`` on the interval widened by ``rho``.

    If ``L`` is ``mu``-strongly convex, so is ``L^t``: the first is never below the second.
    """
    least = tsam(problem, _grid(problem.lo, problem.hi), t, ball).hess.min()
    reference = erm(problem, _grid(problem.lo - ball.rho, problem.hi + ball.rho)).hess.min()
    return Pair(float(least), float(reference))


def smoothness(problem: Problem, theta: float, t: float, ball: Ball, beta: float) -> Pair:
    """Return the curvature of ``L^t`` at a point, and its bound ``beta + t beta^2 rho^2`` for a ``beta``-smooth loss.

    The bound is Popoviciu's: in the ball the gradient varies by at most ``2 beta rho``, so its variance is at most
    ``beta^2 rho^2``. A quadratic at its minimum attains the rate: ``hess/t -> beta^2 rho^2``.

    Note:
        Lemma 3.3 states ``0 < lim beta(t)/t < inf`` for any ``mu``. The left inequality fails for linear losses, whose
        ``L^t`` is linear. The right one fails for unbounded noise: under Gaussian ``mu`` the ``L^t`` of a quadratic is
        infinite from ``t = 1/(sigma^2 beta)`` on.
    """
    return Pair(float(tsam(problem, theta, t, ball).hess), beta + t * beta**2 * ball.rho**2)


def quadratic_under_normal(curvatures: Tensor, theta: Tensor, t: float, sigma: float) -> float:
    """Return ``L^t`` of ``L = sum lambda theta^2 / 2`` under Gaussian noise, in any dimension, in closed form.

    ``sum of -log(1 - t sigma^2 lambda)/(2t) + lambda theta^2 / (2 (1 - t sigma^2 lambda))``, or infinity if some
    ``t sigma^2 lambda >= 1``.
    """
    curvatures, theta = curvatures.double(), theta.double()
    left = 1 - t * sigma**2 * curvatures
    if bool((left <= 0).any()):
        return math.inf
    spread = sigma**2 * curvatures / 2 if t == 0 else -left.log() / (2 * t)
    return float((spread + curvatures * theta.square() / (2 * left)).sum())


def linear_under_ball(slope: float, rho: float, t: float) -> float:
    """Return ``L^t - L = log(sinh(z)/z)/t``, ``z = t rho |slope|``, for a linear loss under uniform noise in 1-D."""
    z = t * rho * abs(slope)
    if z < 1e-3:
        return (z * z / 6 - z**4 / 180) / t if t > 0 else 0.0
    # log sinh z = z + log(1 - exp(-2z)) - log 2
    return (z + math.log1p(-math.exp(-2 * z)) - math.log(2 * z)) / t


class Flatter(NamedTuple):
    """The quantities of Theorem 3.6 at two points."""

    var1: float  # t-sharpness of theta1: its tilted variance at t
    var2: float
    slope: float  # d/dt of g = L^t(theta1) - L^t(theta2)
    integral: float  # t^-2 int_0^t s (V_s(theta1) - V_s(theta2)) ds, which equals the slope


def prefers_flatter(problem: Problem, theta1: float, theta2: float, t: float, noise: Noise) -> Flatter:
    """Return both sides of Theorem 3.6, "TSAM prefers flatter models as t increases", and of the identity behind it.

    With ``g = L^t(theta1) - L^t(theta2)`` and ``V_s`` the tilted variance of the losses around a point at tilt ``s``,

        t^2 dg/dt = int_0^t s (V_s(theta1) - V_s(theta2)) ds.

    So ``g`` grows at ``t`` if ``theta1`` is ``s``-sharper than ``theta2`` for **all** ``s <= t``.

    Note:
        The printed theorem assumes sharper at the single ``t``. Its proof concludes that ``t^2 dg/dt`` is
        non-decreasing in ``t``, which needs all smaller ``s`` as well. ``toys.COUNTEREXAMPLE`` with theta1 = 0,
        theta2 = -10, t = .3 and noise on [-1, 1] is convex, satisfies the assumptions, is sharper at theta1
        (.282 > .266), and has a decreasing g (slope -.0122).
    """
    both = torch.tensor([theta1, theta2], dtype=torch.float64)
    here = tsam(problem, both, t, noise)
    slopes = (here.mean - here.value) / t  # KL/t^2, see slope_in_t
    nodes, weights = gauss_legendre(12)
    integral = 0.0
    # The variances change on the scale of s itself, so each panel is as long as all panels before it.
    edges = [0.0, *(t / 2**k for k in range(10, -1, -1))]
    for lo, hi in itertools.pairwise(edges):
        tilts = lo + (nodes + 1) * (hi - lo) / 2
        for s, weight in zip(tilts.tolist(), (weights * (hi - lo) / 2).tolist(), strict=True):
            variance = tsam(problem, both, s, noise).var
            integral += weight * s * float(variance[0] - variance[1])
    return Flatter(float(here.var[0]), float(here.var[1]), float(slopes[0] - slopes[1]), integral / t**2)


def variance_term(problem: Problem, theta: float, t: float, noise: Noise, maximum: float) -> float:
    """Return ``Var(e^{tL})/(2t e^{2tM})``, the only term of Theorem 3.7 that depends on ``t``.

    For losses in [0, M] it is at most ``L^t - E[L]``, and with M replaced by 0 at least that (Lemma B.1).
    """
    # E e^{tL} = e^{t L^t} and E e^{2tL} = e^{2t L^{2t}}.
    once, twice = (float(tsam(problem, theta, k * t, noise).value) for k in (1, 2))
    relative = math.expm1(2 * t * (twice - once))  # Var(e^{tL}) / (E e^{tL})^2
    if relative <= 0:  # all losses are equal up to rounding
        return 0.0
    log = 2 * t * (once - maximum) + math.log(relative / (2 * t))
    return math.exp(log) if log < 709 else math.inf


class Bound(NamedTuple):
    """The terms of Theorem 3.7; with probability ``1 - confidence`` the gap is at most ``total``."""

    hoeffding: float  # M sqrt(log(2/confidence)/(2n))
    variance: float  # variance_term, which enters with a minus
    smoothing: float  # c = L(theta) - E[L(theta + eps)], independent of t
    total: float  # bound on (population risk - L^t)
    risk: float  # bound on the population risk itself: L^t + total


def generalisation_bound(
    problem: Problem, theta: float, t: float, noise: Noise, maximum: float, num_data: int, confidence: float
) -> Bound:
    """Return Theorem 3.7: ``risk - L^t <= M sqrt(log(2/confidence)/2n) - Var(e^{tL})/(2t e^{2tM}) + L - E[L]``.

    Args:
        problem: The loss, with values in [0, M] around ``theta``.
        theta: The point.
        t: The tilt, positive.
        noise: The distribution ``mu``.
        maximum: M.
        num_data: n.
        confidence: The probability that the bound fails (the paper's delta).

    Note:
        The middle term is largest at some finite ``t`` (:func:`best_tilt`), which the paper reads as a best tilt. But
        the bound is on the distance to ``L^t``, and ``L^t`` exceeds the mean by at least that term
        (:func:`variance_term`). The implied bound on the population risk, ``risk`` here, is never below its value at
        ``t -> 0``, which is ``L(theta) + M sqrt(...)``, at the same ``theta``. The theorem does not favour any ``t``.
        It holds for a fixed ``theta`` (Hoeffding), not for one that was trained on the same data.
    """
    hoeffding = maximum * math.sqrt(math.log(2 / confidence) / (2 * num_data))
    variance = variance_term(problem, theta, t, noise, maximum)
    smoothing = float(erm(problem, theta).value - tsam(problem, theta, 0.0, noise).value)
    total = hoeffding - variance + smoothing
    return Bound(hoeffding, variance, smoothing, total, float(tsam(problem, theta, t, noise).value) + total)


def best_tilt(problem: Problem, theta: float, noise: Noise, maximum: float) -> Minimum:
    """Return the ``t`` in (0, 10] at which :func:`variance_term` is largest, and that largest value."""

    def negative(ts: Tensor) -> Tensor:
        terms = [-variance_term(problem, theta, t, noise, maximum) for t in ts.reshape(-1).tolist()]
        return torch.tensor(terms, dtype=torch.float64).reshape(ts.shape)

    minimum = minimise(negative, 1e-3, 10.0, num_points=21, num_rounds=3)  # t to 1e-3
    return Minimum(minimum.theta, -minimum.value)


def _grid(lo: float, hi: float, num_points: int = 201) -> Tensor:
    return torch.linspace(lo, hi, num_points, dtype=torch.float64)
