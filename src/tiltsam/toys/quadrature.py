"""Adaptive Gauss-Legendre quadrature in float64, many integrals at once.

The tilted density ``exp(t L)`` is flat at small ``t`` and very narrow at large ``t``, so no fixed grid serves both.
Each integral starts from a few panels and bisects those that are not resolved. All integrals (one for each ``theta``)
advance together as the rows of one batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

__all__ = ["Integrand", "Nodes", "adaptive_nodes", "gauss_legendre"]

Integrand: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""``(row, x) -> (log_weight, factors)``, for the integrals of ``exp(log_weight) * factors[k]``."""

_ORDER = 16  # exact for polynomials of degree 31 on each panel
_RTOL = 1e-12  # raised where log_weight itself is less precise
_MAX_DEPTH = 60  # bisections; the remaining panels, 2**-60 wide, are then accepted
_EPS = torch.finfo(torch.float64).eps


class Nodes(NamedTuple):
    """Flat quadrature nodes of a batch of integrals: the sum of ``weight * f(x)`` over a row is the row's integral."""

    row: Tensor  # index of the integral
    x: Tensor
    weight: Tensor  # quadrature weight of dx
    log_weight: Tensor  # log of the density at x
    factors: Tensor


@cache
def gauss_legendre(order: int) -> tuple[Tensor, Tensor]:
    """Return nodes and weights on [-1, 1], exact for polynomials of degree ``2*order - 1``.

    The nodes are the eigenvalues of the Jacobi matrix of the Legendre recurrence (Golub and Welsch).

    Example:
        >>> x, w = gauss_legendre(4)
        >>> torch.testing.assert_close((w * x**6).sum(), torch.tensor(2 / 7, dtype=torch.float64))
    """
    k = torch.arange(1, order, dtype=torch.float64)
    off_diagonal = k / (4 * k * k - 1).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(off_diagonal, 1) + torch.diag(off_diagonal, -1))
    return nodes, 2.0 * vectors[0].square()


def adaptive_nodes(integrand: Integrand, edges: Tensor, *, num_judged: int) -> Nodes:
    """Return nodes that resolve ``exp(log_weight) * factors[k]`` for every row and for ``k < num_judged``.

    A panel is accepted once its two halves agree with the whole to 1e-12 of the row's integral of absolute values,
    and no needle between their nodes can be as high as the row's maximum; otherwise its halves are tried. A jump costs
    one panel per bit of precision unless it lies on an edge.

    Args:
        integrand: See :data:`Integrand`; ``row`` and ``x`` have shape (panels, order), ``factors`` one more in front.
        edges: Edges of the initial panels, ascending along the last dimension: (rows, panels + 1).
        num_judged: How many of the factors decide on acceptance; the first must be 1. The others are carried along.

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
    accepted = whole.new_zeros(whole.shape[0], num_rows)  # integrals of absolute values over accepted panels
    parts: list[Nodes] = []
    for depth in range(_MAX_DEPTH + 1):
        middle = (left + right) / 2
        left, right = torch.stack([left, middle], 1).reshape(-1), torch.stack([middle, right], 1).reshape(-1)
        row = row.repeat_interleave(2)
        x, weight = _nodes(left, right)
        log_weight, factors = integrand(row[:, None].expand_as(x), x)
        new_top = torch.maximum(top, _row_max(log_weight, row, num_rows))
        rescale = (top - new_top).exp()
        whole, accepted, top = whole * rescale[row[::2]], accepted * rescale, new_top
        halves = _panel_sums(log_weight, factors[:num_judged], weight, top[row])
        size = accepted.index_add(1, row, halves.abs())
        size = torch.maximum(size, 1e-3 * size[:1])[:, row[::2]]  # a factor near 0 everywhere may be rounding error
        noise = 8 * _EPS * float(log_weight.abs().max())  # rounding error of log_weight; bisection cannot remove it
        error = (whole - halves[:, ::2] - halves[:, 1::2]).abs()
        done = (error <= max(_RTOL, noise) * size).all(0) & ~_may_hide_needle(log_weight, top[row]).view(-1, 2).any(1)
        if depth == _MAX_DEPTH:
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
            raise ArithmeticError(f"integrand not resolved after {depth} bisections: {row.numel()} panels left")
    return Nodes(*(torch.cat(part, -1) for part in zip(*parts, strict=True)))


def _nodes(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    nodes, weights = gauss_legendre(_ORDER)
    half = ((right - left) / 2)[:, None]
    return ((left + right) / 2)[:, None] + half * nodes, half * weights


def _may_hide_needle(log_weight: Tensor, top: Tensor) -> Tensor:
    """Return a mask of panels whose neighbouring nodes differ so much that a needle between them may matter.

    The rule itself resolves a step of 4; ``exp(-30)`` of the maximum is below the tolerance.
    """
    step = log_weight.diff(dim=1).abs().amax(1)
    return (step > 4) & (log_weight.amax(1) + step > top - 30)


def _panel_sums(log_weight: Tensor, factors: Tensor, weight: Tensor, top: Tensor) -> Tensor:
    return (factors * (weight * (log_weight - top[:, None]).exp())).sum(-1)


def _row_max(values: Tensor, row: Tensor, num_rows: int) -> Tensor:
    empty = values.new_full((num_rows,), -torch.inf)
    return empty.scatter_reduce(0, row, values.amax(-1), "amax")
