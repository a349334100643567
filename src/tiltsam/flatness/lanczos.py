"""Lanczos iterations on the device: thick restart for a few eigenpairs, plain for quadrature.

Both build an orthonormal basis ``V`` of the Krylov space of a random start, one product with the symmetric operator
``A`` at a time, with

    A V = V T + beta * v_next * e_last^T

for a small matrix ``T``. The eigenpairs ``(theta, s)`` of ``T`` give Ritz pairs ``(theta, V s)`` with residual
``|beta * s_last|``, known without another product. The basis stays on the device of the operator; only ``T`` (float64)
is copied to the host, in one transfer per product.

References:
    Wu and Simon, *Thick-restart Lanczos method for large symmetric eigenvalue problems*, SIAM J. Matrix Anal. 2000.
    Golub and Meurant, *Matrices, Moments and Quadrature*, 2010.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from tiltsam.flatness.numerics import block_length, total_norm

__all__ = ["Operator", "RitzPairs", "Which", "quadrature", "thick_restart"]

ROUNDING = 64  # a remainder of this many eps is the rounding of products in float32, seen up to 20

Which: TypeAlias = Literal["largest", "smallest", "magnitude"]
"""Which end of the spectrum: the largest, the smallest (most negative) or the largest in magnitude."""

Fill: TypeAlias = Callable[[Tensor], object]
"""Fills a vector in place: writing the start into the basis avoids a copy of it."""


class Operator(Protocol):
    """A symmetric linear operator on flat vectors."""

    size: int
    dtype: torch.dtype
    device: torch.device

    def __call__(self, v: Tensor, out: Tensor, /) -> None:
        """Write ``A v`` into ``out``."""


class RitzPairs(NamedTuple):
    """Approximate eigenpairs, the wanted end of the spectrum first."""

    values: Tensor  # float64 on the host
    residuals: Tensor  # ||A v - value v|| by the Lanczos relation, but at least its rounding; float64 on the host
    converged: Tensor  # bool on the host
    vectors: Tensor  # one row each, orthonormal, on the device


def thick_restart(
    operator: Operator,
    start: Fill,
    k: int,
    *,
    basis_size: int,
    tol: float,
    max_products: int,
    which: Which = "largest",
    generator: torch.Generator | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> RitzPairs:
    """Return the ``k`` extreme eigenpairs of a symmetric operator by thick-restart Lanczos, fully reorthogonalised.

    When the basis is full, it is rotated in place to the best Ritz vectors and the iteration continues from there:
    memory is ``basis_size + 1`` vectors, whatever the number of products. A pair has converged when

        residual <= tol * max(|theta|, sqrt(eps) * max |theta|),

    which is checked after every product from the ``k + 1``-th on, not once per restart.

    Args:
        operator: The operator.
        start: Fills the start vector, not with zeros.
        k: The number of pairs, at most the size of the operator.
        basis_size: Vectors kept before a restart, more than ``k``.
        tol: The relative residual to reach.
        max_products: Stop after this many products, converged or not.
        which: Which end of the spectrum.
        generator: Draws new directions when the Krylov space is exhausted.
        progress: Called as ``progress(products, max_products)``.

    Note:
        Like every single-vector Krylov method it finds a repeated eigenvalue once, until rounding or a new direction
        brings in the copies.
    """
    limit = min(basis_size, operator.size)
    basis = _Basis(operator, k, limit + 1 - k)
    basis.start(start)
    small = torch.zeros(limit, limit, dtype=torch.float64, device="cpu")
    eps = torch.finfo(operator.dtype).eps
    products = filled = 0
    scale = 0.0
    exhausted = False
    while True:
        column, beta = basis.extend(operator, filled)
        small[: filled + 1, filled] = small[filled, : filled + 1] = column
        filled += 1
        products += 1
        scale = max(scale, math.hypot(float(column.norm()), beta))
        if beta <= ROUNDING * eps * scale:  # the remainder is rounding error, not a direction
            beta = 0.0
            exhausted = True
            if filled < operator.size:
                basis.fill_random(filled, generator)
        values, rotation = torch.linalg.eigh(small[:filled, :filled])
        order = _order(values, which)
        wanted = order[:k]
        residuals = beta * rotation[-1, wanted].abs()
        converged = residuals <= tol * values[wanted].abs().clamp_min(eps**0.5 * float(values.abs().max()))
        if progress is not None:
            progress(products, max_products)
        # The Krylov space of one start may lack an eigenvalue: once it is exhausted, continue until the basis is full.
        # Also continue beyond k vectors: a random start is nearly an eigenvector of the bulk of the spectrum, and only
        # the next vector shows an outlier.
        done = filled > k and bool(converged.all()) and not (exhausted and filled < limit)
        if done or products >= max_products or filled == operator.size:
            break
        if filled == limit:
            # Keep half of the vectors beyond k: fewer lose information, more mean a restart every few products.
            kept = min(k + (limit - k) // 2, limit - 1)
            basis.rotate(filled, rotation[:, order[:kept]])
            basis.row(kept).copy_(basis.row(limit))
            small.zero_()
            small[:kept, :kept] = values[order[:kept]].diag()
            filled = kept
            exhausted = False
    basis.rotate(filled, rotation[:, wanted])
    # The Lanczos relation itself is rounded, by eps * scale in each column: no residual is smaller than that.
    rounding = math.sqrt(filled) * eps * scale
    return RitzPairs(values[wanted], residuals.clamp_min(rounding), converged, basis.blocks[0][: len(wanted)])


def quadrature(
    operator: Operator,
    start: Fill,
    num_steps: int,
    *,
    reorthogonalize: bool = True,
    progress: Callable[[int], object] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return nodes and weights of the Gauss quadrature of the spectral measure of a vector.

    ``sum_i weights_i f(nodes_i) = v^T f(A) v`` for the unit vector ``v`` along the start, exactly for polynomials of
    degree up to ``2 num_steps - 1``.

    Args:
        operator: The operator.
        start: Fills the start vector, not with zeros.
        num_steps: The number of products and nodes; fewer if the Krylov space is exhausted.
        reorthogonalize: Keep the whole basis, ``num_steps`` vectors, and stay orthogonal to it. Otherwise three
            vectors suffice; copies of nodes then appear but share their weight, so integrals stay right.
        progress: Called after each product with the number done.

    Returns:
        ``(nodes, weights)`` in float64 on the host; the weights sum to 1.
    """
    steps = min(num_steps, operator.size)
    basis = _Basis(operator, steps + 1 if reorthogonalize else 3)
    basis.start(start)
    small = torch.zeros(steps, steps, dtype=torch.float64, device="cpu")
    eps = torch.finfo(operator.dtype).eps
    scale = 0.0
    for step in range(steps):
        if reorthogonalize:
            column, beta = basis.extend(operator, step)
            alpha = float(column[-1])
        else:
            alpha, beta = basis.three_term(operator, float(small[step, step - 1]) if step else 0.0)
        small[step, step] = alpha
        scale = max(scale, abs(alpha), beta)
        if progress is not None:
            progress(step + 1)
        if step + 1 == steps or beta <= eps * scale:
            break
        small[step, step + 1] = small[step + 1, step] = beta
    nodes, vectors = torch.linalg.eigh(small[: step + 1, : step + 1])
    return nodes, vectors[0].square()


class _Basis:
    """Orthonormal row vectors, in blocks so that those not returned can be freed."""

    def __init__(self, operator: Operator, *sizes: int) -> None:
        shape = {"dtype": operator.dtype, "device": operator.device}
        self.blocks = [torch.empty(size, operator.size, **shape) for size in sizes]  # type: ignore[call-overload]

    def row(self, index: int) -> Tensor:
        for block in self.blocks:
            if index < len(block):
                vector: Tensor = block[index]
                return vector
            index -= len(block)
        raise IndexError(index)

    def start(self, fill: Fill) -> None:
        fill(self.row(0))
        self.row(0).div_(total_norm([self.row(0)]))

    def extend(self, operator: Operator, last: int) -> tuple[Tensor, float]:
        """Write the row after ``last``; return its coefficients in the rows before it and its length."""
        new = self.row(last + 1)
        operator(self.row(last), new)
        # Gram-Schmidt twice is enough (Giraud et al. 2005); matrix products are faster than a loop over the rows.
        column = self._orthogonalize(new, last + 1)
        column = column + self._orthogonalize(new, last + 1)
        length = total_norm([new])
        new.div_(length.clamp_min(torch.finfo(new.dtype).tiny))
        host = _finite(torch.cat([column, length[None]]))
        return host[:-1], float(host[-1])

    def three_term(self, operator: Operator, previous: float) -> tuple[float, float]:
        """Do one step on rows (current, before, next) and shift them for the next step."""
        current, before, new = (self.row(i) for i in range(3))
        operator(current, new)
        if previous:
            new.sub_(before, alpha=previous)
        alpha = torch.stack([current[c] @ new[c] for c in self._columns()]).sum()
        new.addcmul_(current, alpha, value=-1)
        host = _finite(torch.stack([alpha, total_norm([new])]))
        before.copy_(current)
        torch.div(new, max(float(host[1]), torch.finfo(new.dtype).tiny), out=current)
        return float(host[0]), float(host[1])

    def fill_random(self, index: int, generator: torch.Generator | None) -> None:
        """Fill a row with a random unit vector orthogonal to the rows before it."""
        new = self.row(index).normal_(generator=generator)
        for _ in range(2):
            self._orthogonalize(new, index)
            new.div_(total_norm([new]))

    def rotate(self, filled: int, rotation: Tensor) -> None:
        """Replace the first rows by the combinations in the columns of ``rotation``, in place."""
        coefficients = rotation.T.to(self.blocks[0])
        for columns in self._columns():
            old = torch.cat([block[:, columns] for block in self._rows(filled)])
            new = coefficients @ old
            for block in self._rows(len(new)):
                block[:, columns], new = new[: len(block)], new[len(block) :]

    def _orthogonalize(self, new: Tensor, count: int) -> Tensor:
        """Subtract from ``new`` its projection on the first ``count`` rows; return the coefficients."""
        rows = self._rows(count)
        parts = [torch.stack([b[:, c] @ new[c] for c in self._columns()]).sum(0) for b in rows]
        for block, part in zip(rows, parts, strict=True):
            new.addmv_(block.T, part, alpha=-1)
        return torch.cat(parts)

    def _rows(self, count: int) -> list[Tensor]:
        """Return the first ``count`` rows, block by block."""
        rows = []
        for block in self.blocks:
            if count > 0:
                rows.append(block[:count])
                count -= len(block)
        return rows

    def _columns(self) -> Iterator[slice]:
        """Return the columns in blocks, see :func:`tiltsam.flatness.numerics.block_length`."""
        size, step = self.blocks[0].shape[1], block_length(self.blocks[0])
        return (slice(begin, begin + step) for begin in range(0, size, step))


def _finite(numbers: Tensor) -> Tensor:
    """Return the numbers on the host in float64; raise ValueError if one is not finite."""
    host = numbers.to("cpu", torch.float64)
    if not host.isfinite().all():
        raise ValueError("a product with the operator is not finite: the loss has no second derivative here")
    return host


def _order(values: Tensor, which: Which) -> Tensor:
    if which == "largest":
        return values.argsort(descending=True)
    if which == "smallest":
        return values.argsort()
    return values.abs().argsort(descending=True)
