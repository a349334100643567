"""Toy problems in one dimension, with objectives that are exact: the paper's figures 1, 4 and 5 as a laboratory.

A :class:`Problem` is a loss of one variable with its minima known. Its objectives are computed by quadrature in
float64, to about 1e-12, so that they can judge everything else:

    erm    L(theta)                                                 (Eq. 1)
    sam    max of L(theta + eps) over |eps| <= rho                  (Eq. 2), the true maximum, no ascent step
    tsam   (1/t) log E exp(t L(theta + eps)), eps ~ mu              (Eq. 3), mu uniform on a ball or Gaussian

each with its derivative and second derivative. What follows from them, trajectories and minimisers, is in
:mod:`tiltsam.toys.descent`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from tiltsam.toys.descent import Function
from tiltsam.toys.quadrature import Nodes, adaptive_nodes

__all__ = [
    "COUNTEREXAMPLE",
    "HMC_TEST",
    "TOY1",
    "TOY2",
    "WAVE",
    "Ball",
    "Noise",
    "Normal",
    "Point",
    "Problem",
    "Tilted",
    "erm",
    "lemma_derivatives",
    "linear",
    "quadratic",
    "sam",
    "tsam",
]

_TINY = 1e-300  # stands in for t = 0 in quotients that are not used then
_MOST_SIGMAS = 1000  # how far from the centre Gaussian noise is followed


class Derivatives(NamedTuple):
    """A loss with its first two derivatives, elementwise."""

    loss: Tensor
    grad: Tensor
    hess: Tensor


@dataclass(frozen=True)
class Problem:
    """A loss of one variable.

    Args:
        name: For tables and figures.
        loss: The loss, elementwise on float64 tensors.
        lo: Left end of the interval of interest.
        hi: Right end.
        minima: Its local minimisers in the interval, as far as they are known.
        peaks: Its local maxima ``(theta, value)`` in reach: what the worst case may hit inside the ball. At a jump the
            supremum counts, attained or not.
        breaks: Where the loss has a kink or a jump; quadrature panels end there.
    """

    name: str
    loss: Function = field(repr=False)
    lo: float
    hi: float
    minima: tuple[float, ...] = ()
    peaks: tuple[tuple[float, float], ...] = ()
    breaks: tuple[float, ...] = ()

    def derivatives(self, theta: Tensor) -> Derivatives:
        """Loss, first and second derivative, by differentiating twice; one-sided at breaks."""
        with torch.enable_grad():
            x = theta.detach().requires_grad_()
            loss = self.loss(x)
            (grad,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
            hess = torch.zeros_like(x)
            if grad.requires_grad:  # not so for a linear loss
                (hess,) = torch.autograd.grad(grad.sum(), x)
        return Derivatives(loss.detach(), grad.detach(), hess)

    def grad(self, theta: Tensor) -> Tensor:
        """The derivative of the loss, elementwise."""
        return self.derivatives(theta).grad


def quadratic(curvature: float) -> Problem:
    """``L = curvature/2 * theta^2``: under Gaussian noise its TSAM objective has a closed form."""
    return Problem("quadratic", lambda x: 0.5 * curvature * x * x, -2.0, 2.0, (0.0,) if curvature > 0 else ())


def linear(slope: float) -> Problem:
    """``L = slope * theta``: under uniform noise its TSAM objective has a closed form, and no minimum."""
    return Problem("linear", lambda x: slope * x, -2.0, 2.0)


def _toy1(x: Tensor) -> Tensor:
    # sin(z)/x with z = 4 pi x is smooth through 0, where wide noise reaches, but its second derivative is lost to
    # cancellation there; within |z| < .3 the Taylor series to z^10 is exact.
    z = 4 * math.pi * x
    near = z.abs() < 0.3
    square = torch.where(near, z, 0.0).square()
    series = torch.zeros_like(x)
    for k in range(5, -1, -1):
        series = series * square + (-1) ** k / math.factorial(2 * k + 1)
    far = torch.where(near, 1.0, x)
    return torch.where(near, 4 * math.pi * series, z.sin() / far) + 0.005 * (x - 1).square()


def _toy2(x: Tensor) -> Tensor:
    return torch.where(x <= 2, (x - 1).abs() - 0.01, (x - 3).square())


def _softplus60(x: Tensor) -> Tensor:
    # log(1 + exp(60 x))/60; exp(600) is still finite, and beyond it the function is linear to the last bit.
    return torch.nn.functional.softplus(x, beta=60, threshold=600)


TOY1 = Problem(
    "toy 1",
    _toy1,
    0.2,
    2.5,
    minima=(0.357589066304, 0.867729729789, 1.370351969902, 1.871515180949, 2.372125422351),
    peaks=(
        (-0.000015118135, 12.571370689950),
        (0.614740885387, 1.613944310855),
        (1.119360628012, 0.891196042736),
        (1.621160627482, 0.618053430774),
        (2.122168085889, 0.477214166141),
        (2.622855782714, 0.394293721743),
    ),
)
"""Figure 1: ``sin(4 pi theta)/theta + .005 (theta - 1)^2``, minima flatter and higher from left to right."""

TOY2 = Problem("toy 2", _toy2, 0.0, 4.0, minima=(1.0, 3.0), peaks=((2.0, 1.0),), breaks=(1.0, 2.0))
"""Figures 4 and 5: a sharp minimum at 1 (loss -.01) and a flat one at 3 (loss 0), with a jump at 2."""

HMC_TEST = Problem(
    "hmc test",
    lambda x: (2 * x).cos() + 0.8 * x,
    -1.0,
    1.0,
    peaks=((math.asin(0.4) / 2, math.sqrt(1 - 0.16) + 0.4 * math.asin(0.4)),),
)
"""``cos(2 eps) + .8 eps`` on [-1, 1]: the density ``exp(delta L)`` that HMC samplers are tested on."""

WAVE = Problem(
    "wave",
    lambda x: 0.5 + 0.4 * (3 * x).sin(),
    -1.0,
    1.0,
    minima=(-math.pi / 6,),
    peaks=((math.pi / 6, 0.9), (-math.pi / 2, 0.9)),
)
"""``.5 + .4 sin(3 x)``, within [0, 1]: the loss of the generalisation bound's example."""

COUNTEREXAMPLE = Problem("counterexample", lambda x: 0.9 * _softplus60(-x - 5) + 12 * _softplus60(x - 0.8), -12.0, 2.0)
"""A convex loss of the theorem's class for which sharper at a single ``t`` does not suffice (Theorem 3.6)."""


@dataclass(frozen=True)
class Ball:
    """Noise uniform on ``|eps| <= rho``."""

    rho: float

    def __post_init__(self) -> None:
        if not 0 < self.rho < math.inf:
            raise ValueError(f"rho must be positive and finite, got {self.rho}")


@dataclass(frozen=True)
class Normal:
    """Gaussian noise ``eps ~ N(0, sigma^2)``."""

    sigma: float

    def __post_init__(self) -> None:
        if not 0 < self.sigma < math.inf:
            raise ValueError(f"sigma must be positive and finite, got {self.sigma}")


Noise: TypeAlias = Ball | Normal
"""The measure ``mu`` of the perturbation."""


class Point(NamedTuple):
    """An objective with its first two derivatives."""

    value: Tensor
    grad: Tensor
    hess: Tensor


class Tilted(NamedTuple):
    """The TSAM objective at a point, and the tilted statistics of the losses around it.

    ``grad`` and ``hess`` differentiate the density of the noise instead of the loss, so they hold for any loss, kinks
    and jumps included. For a smooth loss they agree with the paper's Lemma 3.2 (:func:`lemma_derivatives`).
    """

    value: Tensor
    grad: Tensor
    hess: Tensor
    mean: Tensor  # tilted mean of the loss (Definition 3.4)
    var: Tensor  # tilted variance of the loss: the t-sharpness (Definition 3.5)
    third: Tensor  # tilted third central moment of the loss


def erm(problem: Problem, theta: Tensor | float) -> Point:
    """The loss itself (Eq. 1)."""
    return Point(*problem.derivatives(_as_tensor(theta)))


def sam(problem: Problem, theta: Tensor | float, rho: float) -> Point:
    """The worst case over ``|eps| <= rho`` (Eq. 2), exactly: the larger end of the ball, or a peak inside it.

    Where the maximum changes place the objective has a kink; ``grad`` is then one of its subgradients.

    Raises:
        ValueError: If ``rho`` is not a finite number >= 0, or a maximum inside the ball is not among the ``peaks``.
    """
    if not (math.isfinite(rho) and rho >= 0):
        raise ValueError(f"rho must be a finite number >= 0, got {rho}")
    theta = _as_tensor(theta)
    best = Point(*problem.derivatives(theta - rho))
    right = Point(*problem.derivatives(theta + rho))
    best = Point(*(torch.where(right.value > best.value, r, b) for r, b in zip(right, best, strict=True)))
    for place, height in problem.peaks:
        inside = (theta - rho <= place) & (place < theta + rho) & (best.value < height)
        best = Point(best.value.masked_fill(inside, height), *(b.masked_fill(inside, 0.0) for b in best[1:]))
    places = theta[..., None] + rho * torch.linspace(-1, 1, 65, dtype=torch.float64)
    missed = problem.loss(places) > (best.value + 1e-9 * (1 + best.value.abs()))[..., None]
    if missed.any():
        raise ValueError(f"{problem.name} has a maximum near {float(places[missed][0]):.4g} that its peaks do not name")
    return best


def tsam(problem: Problem, theta: Tensor | float, t: float, noise: Noise) -> Tilted:
    """The TSAM objective ``(1/t) log E exp(t L(theta + eps))`` (Eq. 3), its derivatives and tilted statistics.

    Exact to about 1e-12 for any ``t >= 0``; at 0 the plain mean. Where the mean of ``exp(t L)`` is infinite (a
    quadratic under too much Gaussian noise) the value is ``inf`` and the rest NaN.

    Args:
        problem: The loss.
        theta: A number or a tensor of any shape; the results have its shape.
        t: The tilt.
        noise: The measure ``mu``: :class:`Ball` or :class:`Normal`.

    Raises:
        ArithmeticError: If the tilt puts the mass of Gaussian noise more than 1000 sigma from the centre.

    Example:
        >>> tsam(linear(2.0), 0.0, t=1.0, noise=Ball(0.5)).value  # log(sinh(1)/1)
        tensor(0.1614, dtype=torch.float64)
    """
    theta = _as_tensor(theta)
    center = theta.reshape(-1)
    nodes, finite = _resolve(problem, center, t, noise, with_slopes=False)
    result = _moments(problem, center, t, noise, nodes)
    result = Tilted(*(x.masked_fill(~finite, math.nan) for x in result))
    result = result._replace(value=result.value.masked_fill(~finite, math.inf))
    return Tilted(*(x.reshape(theta.shape) for x in result))


def lemma_derivatives(problem: Problem, theta: Tensor | float, t: float, noise: Noise) -> tuple[Tensor, Tensor]:
    """Gradient and Hessian of ``L^t`` by the paper's Lemma 3.2: ``E_w[L']`` and ``t Var_w(L') + E_w[L'']``.

    It needs a smooth loss, and then agrees with :func:`tsam`, which differentiates the density of the noise instead.
    Where ``L^t`` is infinite both are NaN.
    """
    theta = _as_tensor(theta)
    center = theta.reshape(-1)
    nodes, finite = _resolve(problem, center, t, noise, with_slopes=True)
    slope, curvature = nodes.factors[2], nodes.factors[3]
    w = _tilted_weights(nodes, center.numel())[0]
    grad = _row_sum(nodes.row, w * slope, center.numel())
    hess = _row_sum(nodes.row, w * (t * (slope - grad[nodes.row]).square() + curvature), center.numel())
    grad, hess = (x.masked_fill(~finite, math.nan) for x in (grad, hess))
    return grad.reshape(theta.shape), hess.reshape(theta.shape)


def _resolve(problem: Problem, center: Tensor, t: float, noise: Noise, with_slopes: bool) -> tuple[Nodes, Tensor]:
    """Nodes for means over the tilted density at every center, and where these means are finite.

    The factors are 1 and the loss; then, if asked for, its first and second derivative.
    """
    if not (math.isfinite(t) and t >= 0):
        raise ValueError(f"the tilt t must be a finite number >= 0, got {t}")
    if not isinstance(noise, Ball | Normal):
        raise TypeError(f"noise must be Ball(rho) or Normal(sigma), got {noise!r}")
    width, finite = _reach(problem, center, t, noise)

    def integrand(row: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        place = center[row] + eps
        values = problem.derivatives(place) if with_slopes else (problem.loss(place),)
        return t * values[0] + _log_prior(noise, eps), torch.stack([torch.ones_like(eps), *values])

    # Panels of two sigma, or of half the radius, to begin with; none of them is accepted before it was halved.
    num_panels = 4 if isinstance(noise, Ball) else math.ceil(width / noise.sigma)
    edges = torch.linspace(-width, width, num_panels + 1, dtype=torch.float64).expand(center.numel(), -1)
    kinks = (torch.tensor(problem.breaks, dtype=torch.float64) - center[:, None]).clamp(-width, width)
    edges = torch.cat([edges, kinks], 1).sort(1).values
    # The second derivative is carried, not judged: where the loss is linear it is nothing but rounding.
    return adaptive_nodes(integrand, edges, num_judged=3 if with_slopes else 2), finite


def _log_prior(noise: Noise, eps: Tensor) -> Tensor:
    if isinstance(noise, Ball):
        return torch.full_like(eps, -math.log(2 * noise.rho))
    return -0.5 * (eps / noise.sigma).square() - math.log(noise.sigma * math.sqrt(2 * math.pi))


def _reach(problem: Problem, center: Tensor, t: float, noise: Noise) -> tuple[float, Tensor]:
    """Half the width of the interval that holds all the mass, and for which centers there is one."""
    if isinstance(noise, Ball):
        return noise.rho, torch.ones_like(center, dtype=torch.bool)
    # Out to 12 sigma, where the density falls to exp(-72) of its peak, and farther: the tilt may put the mass anywhere.
    scale = torch.linspace(-12, 12, 257, dtype=torch.float64)
    eps = noise.sigma * torch.cat([scale * 2**k for k in range(24, -1, -1)])  # the two ends come first and 257th
    height = t * problem.loss(center[:, None] + eps) - 0.5 * (eps / noise.sigma).square()
    light = height < height.amax(1, keepdim=True) - 70
    finite = light[:, 0] & light[:, len(scale) - 1]
    far = float(eps.abs().masked_fill(light | ~finite[:, None], 0.0).amax())
    if far > _MOST_SIGMAS * noise.sigma:
        raise ArithmeticError(f"the mass lies {far / noise.sigma:.0f} sigma from the centre, more than {_MOST_SIGMAS}")
    width = 12 * noise.sigma
    while width <= far:
        width *= 2
    return width, finite


def _row_sum(row: Tensor, x: Tensor, num_rows: int) -> Tensor:
    return x.new_zeros(num_rows).index_add(0, row, x)


def _tilted_weights(nodes: Nodes, num_rows: int) -> tuple[Tensor, Tensor]:
    """The weight of each node under the tilted density, of sum 1 in a row, and the logarithm of each row's mass."""
    peak = nodes.x.new_full((num_rows,), -math.inf).scatter_reduce(0, nodes.row, nodes.log_weight, "amax")
    share = nodes.weight * (nodes.log_weight - peak[nodes.row]).exp()
    mass = _row_sum(nodes.row, share, num_rows)
    return share / mass[nodes.row], peak + mass.log()


def _moments(problem: Problem, center: Tensor, t: float, noise: Noise, nodes: Nodes) -> Tilted:
    """All the fields of a Tilted from nodes that resolve them."""
    row, eps, loss = nodes.row, nodes.x, nodes.factors[1]

    def total(x: Tensor) -> Tensor:
        return _row_sum(row, x, center.numel())

    prior = nodes.weight * _log_prior(noise, eps).exp()
    w, log_mass = _tilted_weights(nodes, center.numel())
    value = base = total(prior * loss)
    if t > 0:
        # Where all losses are within 1/t, the logarithm of nearly 1 is taken by log1p about the mean loss.
        gap = t * (loss - base[row])
        near = torch.zeros_like(center).scatter_reduce(0, row, gap.abs(), "amax") < 1
        small = total(prior * torch.where(near[row], gap, 0.0).expm1())
        value = torch.where(near, base + small.log1p() / t, log_mass / t)
    mean = total(w * loss)
    away = loss - mean[row]

    def lift(x: Tensor, value: Tensor) -> Tensor:
        """``(exp(t (x - value)) - 1)/t``, and ``x - value`` at ``t = 0``: the tilt's effect on the density."""
        return (t * (x - value)).expm1() / t if t > 0 else x - value

    if isinstance(noise, Ball):
        # d/dtheta of an integral over a moving window is the difference of the integrand at its ends.
        ends = [problem.derivatives(center + sign * noise.rho) for sign in (1.0, -1.0)]
        plus, minus = (lift(end.loss, value) for end in ends)
        grad = (plus - minus) / (2 * noise.rho)
        tilt_plus, tilt_minus = t * plus + 1, t * minus + 1
        hess = (tilt_plus * (ends[0].grad - grad) - tilt_minus * (ends[1].grad - grad)) / (2 * noise.rho)
    else:
        # Stein: the derivative falls on the Gaussian. w - prior is formed without cancellation where the tilt is small.
        gentle = t * (loss - value[row]).abs() < 1
        calm = torch.where(gentle, loss, value[row])
        change = torch.where(gentle, prior * lift(calm, value[row]), (w - prior) / max(t, _TINY))
        score = eps / noise.sigma**2
        grad = total(change * score)
        hess = total(change * (score.square() - noise.sigma**-2)) - t * grad.square()
    return Tilted(value, grad, hess, mean, total(w * away**2), total(w * away**3))


def _as_tensor(theta: Tensor | float) -> Tensor:
    return torch.as_tensor(theta, dtype=torch.float64)
