"""Descent and minimisation on a line: paths, stationary points, global minimisers and where they jump.

Everything takes plain functions of one variable, elementwise on float64 tensors, and calls them on many places at once.
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

_FAN = 33  # places looked at at once in a bracket; each round leaves 1/32 of it (2/32 around a minimum)


class Path(NamedTuple):
    """Where an optimizer went: the places in order, the last one, and whether it settled there."""

    theta: Tensor
    end: float
    settled: bool  # False: it left the interval, or never came to rest


def descend(
    grad: Function, start: float, lr: float, num_steps: int, lo: float = -math.inf, hi: float = math.inf
) -> Path:
    """Gradient descent with a fixed learning rate, until ``num_steps`` are done or ``[lo, hi]`` is left."""
    theta = torch.tensor(start, dtype=torch.float64)
    places = [theta]
    for _ in range(num_steps):
        theta = theta - lr * grad(theta)
        places.append(theta)
        if not lo <= float(theta) <= hi:
            break
    moved = float((places[-1] - places[-2]).abs()) if num_steps else 0.0
    settled = lo <= float(theta) <= hi and moved < 1e-9
    return Path(torch.stack(places), float(theta), settled)


def flow(grad: Function, start: float, lo: float, hi: float, num: int = 401) -> Path:
    """Gradient flow ``dtheta/dtau = -grad(theta)`` from ``start``: the limit of gradient descent for small steps.

    On a line the flow is monotone and rests at the first stationary point downhill, so no integration is needed: the
    gradient is scanned on ``num`` places in that direction and its first change of sign is located.

    Raises:
        ValueError: If ``start`` is not within ``[lo, hi]``.
    """
    if not lo <= start <= hi:
        raise ValueError(f"start must be in [{lo}, {hi}], got {start}")
    begin = torch.tensor(start, dtype=torch.float64)
    down = -float(grad(begin).sign())
    if down == 0:
        return Path(begin[None], start, True)
    places = torch.linspace(start, hi if down > 0 else lo, num, dtype=torch.float64)
    turned = (grad(places) * down >= 0).nonzero()
    if turned.numel() == 0:
        return Path(places, float(places[-1]), False)
    first = int(turned[0])
    end = _zeros(grad, places[first - 1 : first], places[first : first + 1])
    return Path(torch.cat([places[:first], end]), float(end), True)


def stationary_points(grad: Function, lo: float, hi: float, num: int = 401) -> Tensor:
    """The zeros of ``grad`` in ``[lo, hi]`` at which it changes sign, ascending."""
    places = torch.linspace(lo, hi, num, dtype=torch.float64)
    signs = grad(places).sign()
    change = (signs[:-1] * signs[1:] <= 0) & (signs[:-1] != 0)
    return _zeros(grad, places[:-1][change], places[1:][change])


def _zeros(fn: Function, left: Tensor, right: Tensor, num_rounds: int = 10) -> Tensor:
    """Zeros of ``fn`` in brackets, all at once; 32**-10 of a bracket is below rounding."""
    if left.numel() == 0:
        return left
    sign = fn(left).sign()[:, None]
    for _ in range(num_rounds):
        fan = _fan(left, right)
        # The first place beyond the change of sign; the right end counts as beyond, whatever its value.
        beyond = (fn(fan).sign() != sign).index_fill(1, torch.tensor([_FAN - 1]), True).int().argmax(1, True)
        left, right = fan.gather(1, (beyond - 1).clamp_min(0))[:, 0], fan.gather(1, beyond)[:, 0]
    return (left + right) / 2


def _fan(left: Tensor, right: Tensor) -> Tensor:
    return left[:, None] + (right - left)[:, None] * torch.linspace(0, 1, _FAN, dtype=torch.float64)


class Minimum(NamedTuple):
    """A global minimiser and its value."""

    theta: float
    value: float


def minimise(objective: Function, lo: float, hi: float, num: int = 201, num_rounds: int = 5) -> Minimum:
    """The global minimum on ``[lo, hi]``: every local minimum of a grid of ``num``, zoomed into.

    Only values are used, so kinks do no harm; theta is good to about 1e-8, the square root of the precision. Each of
    the ``num_rounds`` of zooming looks at 33 places and leaves a sixteenth of a bracket.
    """
    places = torch.linspace(lo, hi, num, dtype=torch.float64)
    values = torch.nn.functional.pad(objective(places)[None], (1, 1), value=math.inf)[0]
    dips = ((values[1:-1] <= values[:-2]) & (values[1:-1] <= values[2:])).nonzero()[:, 0]
    left, right = places[(dips - 1).clamp_min(0)], places[(dips + 1).clamp_max(num - 1)]
    best = math.inf
    for _ in range(num_rounds):
        fan = _fan(left, right)
        heights = objective(fan)
        low, place = heights.min(1, keepdim=True)
        before, after = (place - 1).clamp_min(0), (place + 1).clamp_max(_FAN - 1)
        best = min(best, float(low.min()))
        # A convex dip goes no deeper than its steeper side continued; one that cannot win is dropped.
        floor = 2 * low - torch.maximum(heights.gather(1, before), heights.gather(1, after))
        keep = (floor <= best)[:, 0]
        left, right = fan.gather(1, before)[keep, 0], fan.gather(1, after)[keep, 0]
    # A minimum on a grid place, such as an end of the interval, is met exactly there and only nearly by zooming.
    found = torch.cat([(left + right) / 2, places[dips]])
    heights = objective(found)
    winner = int(heights.argmin())
    return Minimum(float(found[winner]), float(heights[winner]))


def jumps(
    minimiser: Callable[[float], float],
    lo: float,
    hi: float,
    num: int = 20,
    gap: float = 0.1,
    tol: float = 1e-6,
) -> list[tuple[float, float, float]]:
    """Where a global minimiser jumps as a parameter (``t`` or ``rho``) grows from ``lo`` to ``hi``.

    Args:
        minimiser: From the parameter to the global minimiser.
        lo: Smallest parameter.
        hi: Largest parameter.
        num: How many values to scan first; two jumps closer than that are seen as one.
        gap: A move larger than this between neighbours is a jump.
        tol: To what precision in the parameter a jump is located.

    Returns:
        For each jump: the parameter, the minimiser before, the minimiser after.
    """
    grid = [lo + (hi - lo) * k / (num - 1) for k in range(num)]
    places = [minimiser(x) for x in grid]
    found = []
    for k in range(num - 1):
        (a, before), (b, after) = (grid[k], places[k]), (grid[k + 1], places[k + 1])
        if abs(after - before) <= gap:
            continue
        while b - a > tol:
            middle = (a + b) / 2
            place = minimiser(middle)
            if abs(place - before) <= abs(place - after):
                a, before = middle, place
            else:
                b, after = middle, place
        found.append(((a + b) / 2, before, after))
    return found
