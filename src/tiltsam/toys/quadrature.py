"""Adaptive Gauss-Legendre quadrature in float64, many integrals at once.

The tilted density ``exp(t L)`` is flat at small ``t`` and a needle at large ``t``; no fixed grid serves both. Here
every integral starts from a few panels and bisects those that are not resolved, all integrals (one for each
``theta``) advancing together as rows of one batch. Only torch is used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

__all__ = ["Nodes", "adaptive_nodes", "gauss_hermite", "gauss_legendre"]

Integrand: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""``(row, x) -> (log_weight, factors)``: the integrals of ``exp(log_weight) * factors[k]`` are wanted."""

_ORDER = 16  # exact for polynomials of degree 31 on each panel
_EPS = torch.finfo(torch.float64).eps


class Nodes(NamedTuple):
    """Quadrature nodes of a batch of integrals, flat: ``sum of weight * f(x)`` over a row is the row's integral."""

    row: Tensor  # which integral the node serves
    x: Tensor
    weight: Tensor  # of plain dx
    log_weight: Tensor  # the integrand at x
    factors: Tensor


@cache
def gauss_legendre(order: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights on [-1, 1], exact for polynomials of degree ``2*order - 1``.

    By Golub and Welsch: the nodes are the eigenvalues of the Jacobi matrix of the Legendre recurrence.

    Example:
        >>> x, w = gauss_legendre(4)
        >>> torch.testing.assert_close((w * x**6).sum(), torch.tensor(2 / 7, dtype=torch.float64))
    """
    k = torch.arange(1, order, dtype=torch.float64)
    return _golub_welsch(k / (4 * k * k - 1).sqrt(), mass=2.0)


@cache
def gauss_hermite(order: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights for the mean over a standard normal variable, exact to degree ``2*order - 1``.

    A fixed rule, right for smooth integrands that do not outgrow the normal density: the independent witness of the
    adaptive rule in the tests.

    Example:
        >>> x, w = gauss_hermite(5)
        >>> torch.testing.assert_close((w * x**8).sum(), torch.tensor(105.0, dtype=torch.float64))
    """
    k = torch.arange(1, order, dtype=torch.float64)
    return _golub_welsch(k.sqrt(), mass=1.0)


def _golub_welsch(off_diagonal: Tensor, mass: float) -> tuple[Tensor, Tensor]:
    jacobi = torch.diag(off_diagonal, 1) + torch.diag(off_diagonal, -1)
    nodes, vectors = torch.linalg.eigh(jacobi)
    return nodes, mass * vectors[0].square()


def adaptive_nodes(
    integrand: Integrand, edges: Tensor, *, num_judged: int, rtol: float = 1e-12, max_depth: int = 60
) -> Nodes:
    """Nodes that resolve ``exp(log_weight) * factors[k]`` for every row and the first ``num_judged`` values of ``k``.

    A panel is accepted once its two halves agree with the whole to ``rtol`` of the row's integral of absolute values,
    and no needle between their nodes can be as high as the highest found elsewhere; otherwise its halves are tried. A
    jump costs one panel per bit of precision unless it lies on an edge.

    Args:
        integrand: See :data:`Integrand`; ``row`` and ``x`` have shape (panels, order), ``factors`` one more in front.
        edges: The first panels' edges, ascending along the last dimension: (rows, panels + 1).
        num_judged: How many of the factors decide; the first must be 1. The others are carried along.
        rtol: Relative tolerance, raised where ``log_weight`` itself is only known to so many digits.
        max_depth: How many bisections at most; what is left then is accepted (a panel of ``2**-60`` holds nothing).

    Returns:
        The nodes of the accepted panels.

    Raises:
        ArithmeticError: If the integrand is too rough to be resolved.
    """
    num_rows, num_panels = edges.shape[0], edges.shape[1] - 1
    row = torch.arange(num_rows).repeat_interleave(num_panels)
    left, right = edges[:, :-1].reshape(-1), edges[:, 1:].reshape(-1)
    x, weight = _nodes(left, right)
    log_weight, factors = integrand(row[:, None].expand_as(x), x)
    top = _row_max(log_weight, row, num_rows)
    whole = _panel_sums(log_weight, factors[:num_judged], weight, top[row])
    accepted = whole.new_zeros(whole.shape[0], num_rows)  # integrals of |...| over the accepted panels
    parts: list[Nodes] = []
    for depth in range(max_depth + 1):
        middle = (left + right) / 2
        left, right = torch.stack([left, middle], 1).reshape(-1), torch.stack([middle, right], 1).reshape(-1)
        row = row.repeat_interleave(2)
        x, weight = _nodes(left, right)
        log_weight, factors = integrand(row[:, None].expand_as(x), x)
        raised = torch.maximum(top, _row_max(log_weight, row, num_rows))
        fade = (top - raised).exp()
        whole, accepted, top = whole * fade[row[::2]], accepted * fade, raised
        halves = _panel_sums(log_weight, factors[:num_judged], weight, top[row])
        size = accepted.index_add(1, row, halves.abs())
        size = torch.maximum(size, 1e-3 * size[:1])[:, row[::2]]  # a factor near 0 all over may be mere rounding
        noise = 8 * _EPS * float(log_weight.abs().max())  # rounding of log_weight, which no bisection can remove
        error = (whole - halves[:, ::2] - halves[:, 1::2]).abs()
        done = (error <= max(rtol, noise) * size).all(0) & ~_may_hide(log_weight, top[row]).view(-1, 2).any(1)
        if depth == max_depth:
            done = torch.ones_like(done)
        ready = done.repeat_interleave(2)
        parts.append(
            Nodes(
                row[ready, None].expand(-1, _ORDER).reshape(-1),
                x[ready].reshape(-1),
                weight[ready].reshape(-1),
                log_weight[ready].reshape(-1),
                factors[:, ready].flatten(1),
            )
        )
        accepted = accepted.index_add(1, row[ready], halves[:, ready].abs())
        left, right, row, whole = left[~ready], right[~ready], row[~ready], halves[:, ~ready]
        if row.numel() == 0:
            break
        if row.numel() > 10_000 + 300 * num_rows:
            raise ArithmeticError(f"{row.numel()} panels are not resolved after {depth} bisections")
    return Nodes(*(torch.cat(part, -1) for part in zip(*parts, strict=True)))


def _nodes(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    nodes, weights = gauss_legendre(_ORDER)
    half = ((right - left) / 2)[:, None]
    return ((left + right) / 2)[:, None] + half * nodes, half * weights


def _may_hide(log_weight: Tensor, top: Tensor) -> Tensor:
    """Panels whose nodes differ so much from one to the next that something in between may count.

    A step of 4 is resolved by the rule itself; ``exp(-30)`` of the highest is below the tolerance.
    """
    step = log_weight.diff(dim=1).abs().amax(1)
    return (step > 4) & (log_weight.amax(1) + step > top - 30)


def _panel_sums(log_weight: Tensor, factors: Tensor, weight: Tensor, top: Tensor) -> Tensor:
    return (factors * (weight * (log_weight - top[:, None]).exp())).sum(-1)


def _row_max(values: Tensor, row: Tensor, num_rows: int) -> Tensor:
    empty = values.new_full((num_rows,), -torch.inf)
    return empty.scatter_reduce(0, row, values.amax(-1), "amax")
