"""Gradient descent and minimisation on a line.

Everything here takes functions of one variable, elementwise on float64 tensors, and calls them on many points at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

__all__ = ["Function", "Minimum", "Path", "descend", "flow", "jumps", "minimise", "stationary_points"]

Function: TypeAlias = Callable[[Tensor], Tensor]
"""A function of one variable, elementwise on a float64 tensor of any shape."""

_GAP = 0.1  # a minimiser that moves further between neighbouring parameters jumps
_FAN = 33  # points per round in a bracket; each round keeps 1/32 of it, or 2/32 around a minimum


class Path(NamedTuple):
    """The points an optimizer visited."""

    theta: Tensor
    """All points, from the start on."""
    end: float
    """The last point."""
    converged: bool
    """False if it left the interval or was still moving."""


def descend(
    grad: Function, start: float, lr: float, num_steps: int, lo: float = -math.inf, hi: float = math.inf
) -> Path:
    """Run gradient descent with a fixed learning rate for ``num_steps``, or until it leaves ``[lo, hi]``."""
    theta = torch.tensor(start, dtype=torch.float64)
    visited = [theta]
    for _ in range(num_steps):
        theta = theta - lr * grad(theta)
        visited.append(theta)
        if not lo <= float(theta) <= hi:
            break
    last_step = float((visited[-1] - visited[-2]).abs()) if num_steps else 0.0
    converged = lo <= float(theta) <= hi and last_step < 1e-9
    return Path(torch.stack(visited), float(theta), converged)


def flow(grad: Function, start: float, lo: float, hi: float, num_points: int = 401) -> Path:
    """Follow the gradient flow ``dtheta/dtau = -grad(theta)`` from ``start``, the limit of descent for small steps.

    On a line the flow is monotone and ends at the first stationary point downhill, so no integration is needed:
    find the first sign change of the gradient on ``num_points`` in that direction.

    Raises:
        ValueError: If ``start`` is not in ``[lo, hi]``.
    """
    if not lo <= start <= hi:
        raise ValueError(f"start must be in [{lo}, {hi}], got {start}")
    begin = torch.tensor(start, dtype=torch.float64)
    down = -float(grad(begin).sign())
    if down == 0:
        return Path(begin[None], start, True)
    grid = torch.linspace(start, hi if down > 0 else lo, num_points, dtype=torch.float64)
    uphill = (grad(grid) * down >= 0).nonzero()
    if uphill.numel() == 0:
        return Path(grid, float(grid[-1]), False)
    first = int(uphill[0])
    end = _zeros(grad, grid[first - 1 : first], grid[first : first + 1])
    return Path(torch.cat([grid[:first], end]), float(end), True)


def stationary_points(grad: Function, lo: float, hi: float) -> Tensor:
    """Return the zeros of ``grad`` in ``[lo, hi]`` at which it changes sign, ascending."""
    grid = torch.linspace(lo, hi, 401, dtype=torch.float64)
    signs = grad(grid).sign()
    change = (signs[:-1] * signs[1:] <= 0) & (signs[:-1] != 0)
    return _zeros(grad, grid[:-1][change], grid[1:][change])


def _zeros(fn: Function, left: Tensor, right: Tensor) -> Tensor:
    """Return the zeros of ``fn`` in all brackets; after ten rounds a bracket of 32**-10 is below rounding."""
    if left.numel() == 0:
        return left
    sign = fn(left).sign()[:, None]
    for _ in range(10):
        fan = _fan(left, right)
        # The first point after the sign change. The right end always counts as after it.
        after = (fn(fan).sign() != sign).index_fill(1, torch.tensor([_FAN - 1]), True).int().argmax(1, True)
        left, right = fan.gather(1, (after - 1).clamp_min(0))[:, 0], fan.gather(1, after)[:, 0]
    return (left + right) / 2


def _fan(left: Tensor, right: Tensor) -> Tensor:
    return left[:, None] + (right - left)[:, None] * torch.linspace(0, 1, _FAN, dtype=torch.float64)


class Minimum(NamedTuple):
    """A global minimiser and its value."""

    theta: float
    """The minimiser."""
    value: float
    """The objective there."""


def minimise(objective: Function, lo: float, hi: float, num_points: int = 201, num_rounds: int = 5) -> Minimum:
    """Return the global minimum on ``[lo, hi]``.

    Start from every local minimum of a grid of ``num_points`` and zoom in ``num_rounds`` times by a factor of 16. Only
    values are used, so kinks are fine; theta is accurate to about 1e-8, the square root of the precision.
    """
    grid = torch.linspace(lo, hi, num_points, dtype=torch.float64)
    values = torch.nn.functional.pad(objective(grid)[None], (1, 1), value=math.inf)[0]
    dips = ((values[1:-1] <= values[:-2]) & (values[1:-1] <= values[2:])).nonzero()[:, 0]
    left, right = grid[(dips - 1).clamp_min(0)], grid[(dips + 1).clamp_max(num_points - 1)]
    best = math.inf
    for _ in range(num_rounds):
        fan = _fan(left, right)
        heights = objective(fan)
        low, lowest = heights.min(1, keepdim=True)
        before, after = (lowest - 1).clamp_min(0), (lowest + 1).clamp_max(_FAN - 1)
        best = min(best, float(low.min()))
        # A convex dip lies above the extension of its steeper side; drop those that cannot be the global minimum.
        floor = 2 * low - torch.maximum(heights.gather(1, before), heights.gather(1, after))
        keep = (floor <= best)[:, 0]
        left, right = fan.gather(1, before)[keep, 0], fan.gather(1, after)[keep, 0]
    # A minimum exactly on a grid point, such as an end of the interval, is only approximated by zooming.
    candidates = torch.cat([(left + right) / 2, grid[dips]])
    heights = objective(candidates)
    winner = int(heights.argmin())
    return Minimum(float(candidates[winner]), float(heights[winner]))


def jumps(
    minimiser: Callable[[float], float],
    lo: float,
    hi: float,
    num_points: int = 20,
    tol: float = 1e-6,
) -> list[tuple[float, float, float]]:
    """Return where a global minimiser jumps as a parameter (``t`` or ``rho``) grows from ``lo`` to ``hi``.

    Args:
        minimiser: Function from the parameter to the global minimiser.
        lo: Smallest parameter.
        hi: Largest parameter.
        num_points: Number of values to scan first; two jumps between neighbours are seen as one.
        tol: Precision of the parameter at a jump.

    Returns:
        For each jump: the parameter, the minimiser before, the minimiser after.
    """
    grid = [lo + (hi - lo) * k / (num_points - 1) for k in range(num_points)]
    minimisers = [minimiser(x) for x in grid]
    found = []
    for k in range(num_points - 1):
        (a, before), (b, after) = (grid[k], minimisers[k]), (grid[k + 1], minimisers[k + 1])
        if abs(after - before) <= _GAP:
            continue
        while b - a > tol:
            middle = (a + b) / 2
            theta = minimiser(middle)
            if abs(theta - before) <= abs(theta - after):
                a, before = middle, theta
            else:
                b, after = middle, theta
        found.append(((a + b) / 2, before, after))
    return found
