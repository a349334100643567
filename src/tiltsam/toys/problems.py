"""Losses of one variable: the paper's toy problems and examples with closed forms."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tiltsam.toys.descent import Function

__all__ = ["COUNTEREXAMPLE", "HMC_TEST", "TOY1", "TOY2", "WAVE", "Derivatives", "Problem", "linear", "quadratic"]


class Derivatives(NamedTuple):
    """A loss with its first two derivatives, elementwise."""

    loss: Tensor
    grad: Tensor
    hess: Tensor


@dataclass(frozen=True)
class Problem:
    """A loss of one variable.

    Args:
        name: Name for tables and figures.
        loss: The loss, elementwise on float64 tensors.
        lo: Left end of the interval of interest.
        hi: Right end of the interval of interest.
        minima: Known local minimisers in the interval.
        peaks: Local maxima ``(theta, value)`` that the worst case may reach inside the ball. At a jump the value is the
            supremum, whether or not it is attained.
        breaks: Positions of kinks and jumps; quadrature panels end there.
    """

    name: str
    loss: Function = field(repr=False)
    lo: float
    hi: float
    minima: tuple[float, ...] = ()
    peaks: tuple[tuple[float, float], ...] = ()
    breaks: tuple[float, ...] = ()

    def derivatives(self, theta: Tensor) -> Derivatives:
        """Return the loss and its first two derivatives by autograd; one-sided at breaks."""
        with torch.enable_grad():
            x = theta.detach().requires_grad_()
            loss = self.loss(x)
            (grad,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
            hess = torch.zeros_like(x)
            if grad.requires_grad:  # False for a linear loss
                (hess,) = torch.autograd.grad(grad.sum(), x)
        return Derivatives(loss.detach(), grad.detach(), hess)


def quadratic(curvature: float) -> Problem:
    """Return ``L = curvature/2 * theta^2``; its TSAM objective under Gaussian noise has a closed form."""
    return Problem("quadratic", lambda x: 0.5 * curvature * x * x, -2.0, 2.0, (0.0,) if curvature > 0 else ())


def linear(slope: float) -> Problem:
    """Return ``L = slope * theta``; its TSAM objective under uniform noise has a closed form and no minimum."""
    return Problem("linear", lambda x: slope * x, -2.0, 2.0)


def _toy1(x: Tensor) -> Tensor:
    # sin(z)/x with z = 4 pi x is smooth at 0, but its second derivative is lost to cancellation there. The Taylor
    # series to z^10 is exact in float64 for |z| < .3.
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
    # log(1 + exp(60 x))/60; exp(600) is finite in float64, and above it the function is exactly linear.
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
"""Figure 1: ``sin(4 pi theta)/theta + .005 (theta - 1)^2``; minima get flatter and higher from left to right."""

TOY2 = Problem("toy 2", _toy2, 0.0, 4.0, minima=(1.0, 3.0), peaks=((2.0, 1.0),), breaks=(1.0, 2.0))
"""Figures 3 and 4: a sharp minimum at 1 (loss -.01) and a flat one at 3 (loss 0), with a jump at 2."""

HMC_TEST = Problem(
    "hmc test",
    lambda x: (2 * x).cos() + 0.8 * x,
    -1.0,
    1.0,
    peaks=((math.asin(0.4) / 2, math.sqrt(1 - 0.16) + 0.4 * math.asin(0.4)),),
)
"""``cos(2 eps) + .8 eps`` on [-1, 1]: HMC samplers are tested on the density ``exp(delta L)``."""

WAVE = Problem(
    "wave",
    lambda x: 0.5 + 0.4 * (3 * x).sin(),
    -1.0,
    1.0,
    minima=(-math.pi / 6,),
    peaks=((math.pi / 6, 0.9), (-math.pi / 2, 0.9)),
)
"""``.5 + .4 sin(3 x)``, with values in [0, 1]: the example for the generalisation bound."""

COUNTEREXAMPLE = Problem("counterexample", lambda x: 0.9 * _softplus60(-x - 5) + 12 * _softplus60(x - 0.8), -12.0, 2.0)
"""A convex loss that satisfies the assumptions of Theorem 3.6 and violates its conclusion."""
