"""Lanczos iterations that live on the device: thick restart for a few eigenpairs, plain for quadrature.

Both build an orthonormal basis ``V`` of the Krylov space of a random start, one product with the symmetric operator
``A`` at a time, with

    A V = V T + beta * v_next * e_last^T

for a small matrix ``T``; the eigenpairs ``(theta, s)`` of ``T`` give Ritz pairs ``(theta, V s)`` whose residual is
``|beta * s_last|``, known without another product. The basis stays where the operator works; only ``T`` (float64)
comes to the host, in one transfer per product.

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

from tiltsam.flatness.sums import block_length, total_norm

__all__ = ["Operator", "RitzPairs", "Which", "quadrature", "thick_restart"]

Which: TypeAlias = Literal["largest", "smallest", "magnitude"]
"""Which end of the spectrum: largest, smallest (most negative), largest in magnitude."""

Fill: TypeAlias = Callable[[Tensor], object]
"""Fills a vector in place; a start is handed over like this so that no copy of it stays behind."""


class Operator(Protocol):
    """A symmetric linear operator on flat vectors."""

    size: int
    dtype: torch.dtype
    device: torch.device

    def __call__(self, v: Tensor, out: Tensor, /) -> None:
        """Write ``A v`` into ``out``."""


class RitzPairs(NamedTuple):
    """What the iteration found, best first."""

    values: Tensor  # float64 on the host
    residuals: Tensor  # ||A v - value v|| by the Lanczos relation, at least its rounding, float64 on the host
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
    progress: Callable[[int, int], None] | None = None,
) -> RitzPairs:
    """The ``k`` extreme eigenpairs of a symmetric operator by thick-restart Lanczos, fully reorthogonalised.

    When the basis is full, it is turned in place into the best Ritz vectors and the iteration goes on from there,
    so the memory is ``basis_size + 1`` vectors whatever the number of products. A pair has converged when

        residual <= tol * max(|theta|, sqrt(eps) * max |theta|),

    and convergence is looked for after every product from the ``k + 1``-th on, not once per restart.

    Args:
        operator: The operator.
        start: Fills the vector to start from, not with zeros.
        k: How many pairs, at most the size of the operator.
        basis_size: Vectors kept before a restart, more than ``k``.
        tol: The relative residual asked for.
        max_products: Stop here, converged or not.
        which: Which end of the spectrum.
        generator: For the fresh directions drawn when the Krylov space is exhausted.
        progress: Called as ``progress(products, max_products)``.

    Note:
        Like every single-vector Krylov method it sees a repeated eigenvalue once (until rounding, or a fresh
        direction, brings the copies in).
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
        if beta <= eps * scale:  # what is left is rounding error, not a direction
            beta = 0.0
            exhausted = True
            if filled < operator.size:
                basis.draw(filled, generator)
        values, rotation = torch.linalg.eigh(small[:filled, :filled])
        order = _order(values, which)
        wanted = order[:k]
        residuals = beta * rotation[-1, wanted].abs()
        converged = residuals <= tol * values[wanted].abs().clamp_min(eps**0.5 * float(values.abs().max()))
        if progress is not None:
            progress(products, max_products)
        # The Krylov space of one start may lack an eigenvalue: once it is exhausted, look on until the basis is full.
        # And of k vectors all may lie in the bulk of the spectrum, where a random start is nearly an eigenvector: the
        # next one shows what sticks out.
        done = filled > k and bool(converged.all()) and not (exhausted and filled < limit)
        if done or products >= max_products or filled == operator.size:
            break
        if filled == limit:
            # Keep half of the room beyond k: dropping more forgets, dropping less restarts all the time.
            kept = min(k + (limit - k) // 2, limit - 1)
            basis.turn(filled, rotation[:, order[:kept]])
            basis.row(kept).copy_(basis.row(limit))
            small.zero_()
            small[:kept, :kept] = values[order[:kept]].diag()
            filled = kept
            exhausted = False
    basis.turn(filled, rotation[:, wanted])
    # The relation holds to within rounding, which no residual is below: eps * scale in each column that a pair is of.
    rounding = math.sqrt(filled) * eps * scale
    return RitzPairs(values[wanted], residuals.clamp_min(rounding), converged, basis.blocks[0][: len(wanted)])


def quadrature(
    operator: Operator,
    start: Fill,
    num_steps: int,
    *,
    reorthogonalize: bool = True,
    progress: Callable[[int], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the Gauss quadrature of the spectral measure of a vector.

    ``sum_i weights_i f(nodes_i) = v^T f(A) v`` for the unit vector ``v`` along the start, exactly for polynomials of
    degree up to ``2 num_steps - 1``.

    Args:
        operator: The operator.
        start: Fills the vector, not with zeros.
        num_steps: Products, and nodes (fewer if the Krylov space is exhausted).
        reorthogonalize: Keep the whole basis, ``num_steps`` vectors, and stay orthogonal to it. Without, three
            vectors are enough; copies of nodes then appear, but share their weight, so integrals stay right.
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
    """Rows of orthonormal vectors, in blocks that can be let go of one by one."""

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
        """Write the vector after row ``last``; return its coefficients against the rows and its length."""
        new = self.row(last + 1)
        operator(self.row(last), new)
        # Gram-Schmidt twice is enough (Giraud et al. 2005), and matrix products beat a loop over the rows.
        column = self._orthogonalize(new, last + 1)
        column = column + self._orthogonalize(new, last + 1)
        length = total_norm([new])
        new.div_(length.clamp_min(torch.finfo(new.dtype).tiny))
        host = _finite(torch.cat([column, length[None]]))
        return host[:-1], float(host[-1])

    def three_term(self, operator: Operator, previous: float) -> tuple[float, float]:
        """One step on rows (current, before, next), left turned for the following step."""
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

    def draw(self, index: int, generator: torch.Generator | None) -> None:
        """Fill a row with a random unit vector orthogonal to the rows before it."""
        new = self.row(index).normal_(generator=generator)
        for _ in range(2):
            self._orthogonalize(new, index)
            new.div_(total_norm([new]))

    def turn(self, filled: int, rotation: Tensor) -> None:
        """Replace the first rows by the combinations in the columns of ``rotation``, in place."""
        coefficients = rotation.T.to(self.blocks[0])
        for columns in self._columns():
            old = torch.cat([block[:, columns] for block in self._rows(filled)])
            new = coefficients @ old
            for block in self._rows(len(new)):
                block[:, columns], new = new[: len(block)], new[len(block) :]

    def _orthogonalize(self, new: Tensor, count: int) -> Tensor:
        """Take out of ``new`` its part in the first ``count`` rows; return the coefficients of that part."""
        rows = self._rows(count)
        parts = [torch.stack([b[:, c] @ new[c] for c in self._columns()]).sum(0) for b in rows]
        for block, part in zip(rows, parts, strict=True):
            new.addmv_(block.T, part, alpha=-1)
        return torch.cat(parts)

    def _rows(self, count: int) -> list[Tensor]:
        """The first ``count`` rows, block by block."""
        rows = []
        for block in self.blocks:
            if count > 0:
                rows.append(block[:count])
                count -= len(block)
        return rows

    def _columns(self) -> Iterator[slice]:
        """The columns in blocks, see :func:`tiltsam.flatness.sums.block_length`."""
        size, step = self.blocks[0].shape[1], block_length(self.blocks[0])
        return (slice(begin, begin + step) for begin in range(0, size, step))


def _finite(numbers: Tensor) -> Tensor:
    """The numbers on the host, in float64; a clear error if a product went wrong."""
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
