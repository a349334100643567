"""The ERM, SAM and TSAM objectives of a one-dimensional problem, each with its first and second derivative.

    erm    L(theta)                                                 (Eq. 1)
    sam    max of L(theta + eps) over |eps| <= rho                  (Eq. 2), the true maximum, no ascent step
    tsam   (1/t) log E exp(t L(theta + eps)), eps ~ mu              (Eq. 3), mu uniform on a ball or Gaussian

They are computed by quadrature in float64, to about 1e-12.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from tiltsam.space.validation import check_nonnegative, check_positive
from tiltsam.toys.problems import Problem
from tiltsam.toys.quadrature import Nodes, adaptive_nodes

__all__ = ["Ball", "Noise", "Normal", "Point", "Tilted", "erm", "lemma_derivatives", "sam", "tsam"]

_MAX_SIGMAS = 1000  # how far from the center the mass of Gaussian noise may lie


@dataclass(frozen=True)
class Ball:
    """Noise uniform on ``|eps| <= rho``."""

    rho: float

    def __post_init__(self) -> None:
        check_positive("rho", self.rho)


@dataclass(frozen=True)
class Normal:
    """Gaussian noise ``eps ~ N(0, sigma^2)``."""

    sigma: float

    def __post_init__(self) -> None:
        check_positive("sigma", self.sigma)


Noise: TypeAlias = Ball | Normal
"""The distribution ``mu`` of the perturbation."""


class Point(NamedTuple):
    """An objective with its first two derivatives."""

    value: Tensor
    """Value of the objective."""
    grad: Tensor
    """First derivative."""
    hess: Tensor
    """Second derivative."""


class Tilted(NamedTuple):
    """The TSAM objective at a point, and the tilted statistics of the losses around it.

    ``grad`` and ``hess`` differentiate the density of the noise instead of the loss, so they hold for any loss, kinks
    and jumps included. For a smooth loss they agree with the paper's Lemma 3.2 (:func:`lemma_derivatives`).
    """

    value: Tensor
    """Value of the objective."""
    grad: Tensor
    """First derivative."""
    hess: Tensor
    """Second derivative."""
    mean: Tensor
    """Tilted mean of the loss (Definition 3.4)."""
    var: Tensor
    """Tilted variance of the loss: the t-sharpness (Definition 3.5)."""
    third: Tensor
    """Tilted third central moment of the loss."""


def erm(problem: Problem, theta: Tensor | float) -> Point:
    """Return the loss itself (Eq. 1)."""
    return Point(*problem.derivatives(_as_tensor(theta)))


def sam(problem: Problem, theta: Tensor | float, rho: float) -> Point:
    """Return the exact worst case over ``|eps| <= rho`` (Eq. 2): the higher end of the ball, or a peak inside it.

    Where the maximiser jumps the objective has a kink; ``grad`` is then one of its subgradients.

    Raises:
        ValueError: If ``rho`` is not a finite number >= 0, or if a maximum inside the ball is not in ``problem.peaks``.
    """
    check_nonnegative("rho", rho)
    theta = _as_tensor(theta)
    best = Point(*problem.derivatives(theta - rho))
    right = Point(*problem.derivatives(theta + rho))
    best = Point(*(torch.where(right.value > best.value, r, b) for r, b in zip(right, best, strict=True)))
    for peak, height in problem.peaks:
        inside = (theta - rho <= peak) & (peak < theta + rho) & (best.value < height)
        best = Point(best.value.masked_fill(inside, height), *(b.masked_fill(inside, 0.0) for b in best[1:]))
    grid = theta[..., None] + rho * torch.linspace(-1, 1, 65, dtype=torch.float64)
    missed = problem.loss(grid) > (best.value + 1e-9 * (1 + best.value.abs()))[..., None]
    if missed.any():
        raise ValueError(f"peaks of {problem.name!r} must include the maximum near {float(grid[missed][0]):.4g}")
    return best


def tsam(problem: Problem, theta: Tensor | float, t: float, noise: Noise) -> Tilted:
    """Return the TSAM objective ``(1/t) log E exp(t L(theta + eps))`` (Eq. 3) with derivatives and tilted statistics.

    Accurate to about 1e-12 for any ``t >= 0``; ``t = 0`` is the plain mean. Where the mean of ``exp(t L)`` is infinite
    (a quadratic under too much Gaussian noise) the value is ``inf`` and the rest NaN.

    Args:
        problem: The loss.
        theta: A number or a tensor of any shape; the results have its shape.
        t: The tilt.
        noise: The distribution ``mu``: :class:`Ball` or :class:`Normal`.

    Raises:
        ArithmeticError: If the tilt moves the mass of Gaussian noise more than 1000 sigma from the center.

    Example:
        >>> from tiltsam.toys import linear
        >>> tsam(linear(2.0), 0.0, t=1.0, noise=Ball(0.5)).value  # log(sinh(1)/1)
        tensor(0.1614, dtype=torch.float64)
    """
    theta = _as_tensor(theta)
    center = theta.reshape(-1)
    nodes, finite = _tilted_nodes(problem, center, t, noise, with_slopes=False)
    result = _moments(problem, center, t, noise, nodes)
    result = Tilted(*(x.masked_fill(~finite, math.nan) for x in result))
    result = result._replace(value=result.value.masked_fill(~finite, math.inf))
    return Tilted(*(x.reshape(theta.shape) for x in result))


def lemma_derivatives(problem: Problem, theta: Tensor | float, t: float, noise: Noise) -> tuple[Tensor, Tensor]:
    """Return gradient and Hessian of ``L^t`` by the paper's Lemma 3.2: ``E_w[L']`` and ``t Var_w(L') + E_w[L'']``.

    For a smooth loss they agree with :func:`tsam`, which differentiates the density of the noise instead. Where ``L^t``
    is infinite both are NaN.
    """
    theta = _as_tensor(theta)
    center = theta.reshape(-1)
    nodes, finite = _tilted_nodes(problem, center, t, noise, with_slopes=True)
    slope, curvature = nodes.factors[2], nodes.factors[3]
    w, _ = _tilted_weights(nodes, center.numel())
    grad = _row_sum(nodes.row, w * slope, center.numel())
    hess = _row_sum(nodes.row, w * (t * (slope - grad[nodes.row]).square() + curvature), center.numel())
    grad, hess = (x.masked_fill(~finite, math.nan) for x in (grad, hess))
    return grad.reshape(theta.shape), hess.reshape(theta.shape)


def _tilted_nodes(problem: Problem, center: Tensor, t: float, noise: Noise, with_slopes: bool) -> tuple[Nodes, Tensor]:
    """Return nodes for means over the tilted density at every center, and a mask of the centers with a finite mean.

    The factors are 1 and the loss, and with ``with_slopes`` also the first and second derivative of the loss.
    """
    check_nonnegative("t", t)
    if not isinstance(noise, Ball | Normal):
        raise TypeError(f"noise must be Ball(rho) or Normal(sigma), got {noise!r}")
    width, finite = _support(problem, center, t, noise)

    def integrand(row: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        theta = center[row] + eps
        values = problem.derivatives(theta) if with_slopes else (problem.loss(theta),)
        return t * values[0] + _log_prior(noise, eps), torch.stack([torch.ones_like(eps), *values])

    # Initial panels are two sigma or half the radius wide. Each is halved at least once before it is accepted.
    num_panels = 4 if isinstance(noise, Ball) else math.ceil(width / noise.sigma)
    edges = torch.linspace(-width, width, num_panels + 1, dtype=torch.float64).expand(center.numel(), -1)
    breaks = (torch.tensor(problem.breaks, dtype=torch.float64) - center[:, None]).clamp(-width, width)
    edges = torch.cat([edges, breaks], 1).sort(1).values
    # The second derivative does not decide on acceptance: where the loss is linear it is rounding error only.
    return adaptive_nodes(integrand, edges, num_judged=3 if with_slopes else 2), finite


def _log_prior(noise: Noise, eps: Tensor) -> Tensor:
    if isinstance(noise, Ball):
        return torch.full_like(eps, -math.log(2 * noise.rho))
    return -0.5 * (eps / noise.sigma).square() - math.log(noise.sigma * math.sqrt(2 * math.pi))


def _support(problem: Problem, center: Tensor, t: float, noise: Noise) -> tuple[float, Tensor]:
    """Return half the width of an interval that holds the tilted mass, and a mask of the centers with a finite mass."""
    if isinstance(noise, Ball):
        return noise.rho, torch.ones_like(center, dtype=torch.bool)
    # At 12 sigma the untilted density is exp(-72) of its peak, but a tilt can move the mass much farther: search grids
    # of 12, 24, ..., 12 * 2^24 sigma, the widest first, so that its two ends are columns 0 and 256.
    grid = torch.linspace(-12, 12, 257, dtype=torch.float64)
    eps = noise.sigma * torch.cat([grid * 2**k for k in range(24, -1, -1)])
    log_density = t * problem.loss(center[:, None] + eps) - 0.5 * (eps / noise.sigma).square()
    negligible = log_density < log_density.amax(1, keepdim=True) - 70
    finite = negligible[:, 0] & negligible[:, len(grid) - 1]
    farthest = float(eps.abs().masked_fill(negligible | ~finite[:, None], 0.0).amax())
    if farthest > _MAX_SIGMAS * noise.sigma:
        found = farthest / noise.sigma
        raise ArithmeticError(f"tilted mass must lie within {_MAX_SIGMAS} sigma of the center, got {found:.0f} sigma")
    width = 12 * noise.sigma
    while width <= farthest:
        width *= 2
    return width, finite


def _row_sum(row: Tensor, x: Tensor, num_rows: int) -> Tensor:
    return x.new_zeros(num_rows).index_add(0, row, x)


def _tilted_weights(nodes: Nodes, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the weight of each node under the tilted density, with sum 1 per row, and the log of each row's mass."""
    peak = nodes.x.new_full((num_rows,), -math.inf).scatter_reduce(0, nodes.row, nodes.log_weight, "amax")
    share = nodes.weight * (nodes.log_weight - peak[nodes.row]).exp()
    mass = _row_sum(nodes.row, share, num_rows)
    return share / mass[nodes.row], peak + mass.log()


def _moments(problem: Problem, center: Tensor, t: float, noise: Noise, nodes: Nodes) -> Tilted:
    row, loss = nodes.row, nodes.factors[1]

    def total(x: Tensor) -> Tensor:
        return _row_sum(row, x, center.numel())

    prior = nodes.weight * _log_prior(noise, nodes.x).exp()
    w, log_mass = _tilted_weights(nodes, center.numel())
    value = base = total(prior * loss)
    if t > 0:
        # Where all losses are within 1/t of the mean, log1p around the mean avoids taking the log of nearly 1.
        gap = t * (loss - base[row])
        near = torch.zeros_like(center).scatter_reduce(0, row, gap.abs(), "amax") < 1
        small = total(prior * torch.where(near[row], gap, 0.0).expm1())
        value = torch.where(near, base + small.log1p() / t, log_mass / t)
    if isinstance(noise, Ball):
        grad, hess = _ball_derivatives(problem, center, t, noise, value)
    else:
        grad, hess = _normal_derivatives(nodes, t, noise, value, prior, w)
    mean = total(w * loss)
    deviation = loss - mean[row]
    return Tilted(value, grad, hess, mean, total(w * deviation**2), total(w * deviation**3))


def _ball_derivatives(problem: Problem, center: Tensor, t: float, ball: Ball, value: Tensor) -> tuple[Tensor, Tensor]:
    # The derivative of an integral over a moving window is the difference of the integrand at its two ends.
    right, left = (problem.derivatives(center + sign * ball.rho) for sign in (1.0, -1.0))
    plus, minus = (_tilt_change(end.loss, value, t) for end in (right, left))
    grad = (plus - minus) / (2 * ball.rho)
    hess = ((t * plus + 1) * (right.grad - grad) - (t * minus + 1) * (left.grad - grad)) / (2 * ball.rho)
    return grad, hess


def _normal_derivatives(
    nodes: Nodes, t: float, normal: Normal, value: Tensor, prior: Tensor, w: Tensor
) -> tuple[Tensor, Tensor]:
    # Stein's identity: differentiate the Gaussian density. change = (w - prior)/t, computed without cancellation where
    # the tilt is small; at t = 0 everywhere.
    row, loss, here = nodes.row, nodes.factors[1], value[nodes.row]
    small = t * (loss - here).abs() < 1
    change = torch.where(
        small, prior * _tilt_change(torch.where(small, loss, here), here, t), (w - prior) / (t if t > 0 else 1.0)
    )
    score = nodes.x / normal.sigma**2
    grad = _row_sum(row, change * score, value.numel())
    hess = _row_sum(row, change * (score.square() - normal.sigma**-2), value.numel()) - t * grad.square()
    return grad, hess


def _tilt_change(loss: Tensor, value: Tensor, t: float) -> Tensor:
    """Return ``(exp(t (loss - value)) - 1)/t``, or ``loss - value`` at ``t = 0``."""
    return (t * (loss - value)).expm1() / t if t > 0 else loss - value


def _as_tensor(theta: Tensor | float) -> Tensor:
    return torch.as_tensor(theta, dtype=torch.float64)
