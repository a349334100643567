"""Curvature of the loss: the top of the Hessian's spectrum, its trace, its density.

The Hessian is that of the mean loss over a data set, in eval mode, with respect to all trainable parameters or to
those named in ``parameters``. It is never formed: everything is made of Hessian-vector products
(:mod:`tiltsam.flatness.hessian`), each of which costs a forward, a backward and a double backward over the data.

| function | products | error estimate |
|---|---|---|
| :func:`top_eigenvalues` | until converged, at most ``max_products`` | residual norm of each pair, and a flag |
| :func:`trace` | ``num_samples`` | standard error over the probes |
| :func:`spectral_density` | ``num_probes * num_steps`` | standard error over the probes at each point |

Each can be had layer by layer: ``by_layer(top_eigenvalues, model, loss_fn, batches, k=1)``. The last lives in
:mod:`tiltsam.flatness.density`, and is importable from here.

Why a Lanczos of our own rather than scipy's ``eigsh`` on curvlinops' operators: measured. Top 5 eigenvalues of an
11 M-parameter ResNet-18 (one batch of 256 images, float32, one H200, relative residual 1e-3): 5.0 s, 4.3 s with
``keep_graph``, against 12.4 s for ``eigsh`` on the same products and 6.8 s for ``eigsh`` on curvlinops', which
carry every vector to the host and back. It also needs neither package, and differentiates SiLU, which curvlinops'
forward-over-reverse product does not. ``benchmarks/bench_curvature.py`` repeats the measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tiltsam.flatness.density import Density, spectral_density
from tiltsam.flatness.evaluation import Batches, LossFn, LossSurface, Progress, generator, layers
from tiltsam.flatness.hessian import HessianOperator
from tiltsam.flatness.lanczos import Which, thick_restart
from tiltsam.flatness.probes import Estimate, mean, signs

__all__ = [
    "Density",
    "Eigenpairs",
    "Estimate",
    "Trace",
    "by_layer",
    "spectral_density",
    "top_eigenvalues",
    "trace",
]

T = TypeVar("T")


@dataclass(frozen=True)
class Eigenpairs:
    """Eigenvalues of the Hessian, the wanted end of the spectrum first, and their eigenvectors.

    Attributes:
        values: The eigenvalues (float64, on the host).
        residuals: ``||H v - value v||``, or the rounding of a product where that is more: some eigenvalue lies within
            this distance of the value, and the error of the value itself is of the order of its square over the gap
            to the next.
        converged: Where the residual is within the tolerance asked for.
        vectors: One flat unit vector per row, orthonormal, on the device of the model.
        shapes: The names and shapes of the parameters along a row.
        num_products: Hessian-vector products spent.
        substitutes: Kernels that had to be replaced because they have no second derivative.
    """

    values: Tensor
    residuals: Tensor
    converged: Tensor
    vectors: Tensor = field(repr=False)
    shapes: dict[str, torch.Size] = field(repr=False)
    num_products: int
    substitutes: tuple[str, ...] = ()

    def direction(self, index: int) -> dict[str, Tensor]:
        """Eigenvector ``index`` as tensors by parameter name; what :mod:`tiltsam.landscape` walks along."""
        pieces = torch.split(self.vectors[index], [shape.numel() for shape in self.shapes.values()])
        return {name: piece.view(shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}


@dataclass(frozen=True)
class Trace:
    """The trace of the Hessian.

    Attributes:
        value: The estimate; unbiased.
        error: Its standard error.
        layers: The trace of each layer's own block, from the same probes; they add up to ``value``.
        samples: The estimate of each probe (float64, on the host).
        substitutes: Kernels that had to be replaced because they have no second derivative.
    """

    value: float
    error: float
    layers: dict[str, Estimate]
    samples: Tensor = field(repr=False)
    substitutes: tuple[str, ...] = ()


def top_eigenvalues(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Batches,
    k: int = 5,
    *,
    which: Which = "largest",
    tol: float = 1e-3,
    max_products: int = 500,
    basis_size: int | None = None,
    keep_graph: bool = False,
    parameters: Sequence[str] | None = None,
    seed: int = 0,
    size_of: Callable[[Any], float] | None = None,
    progress: Progress | None = None,
) -> Eigenpairs:
    """The ``k`` largest eigenvalues of the Hessian, by thick-restart Lanczos on the device.

    Cost: usually 5 to 10 Hessian-vector products per eigenvalue. Memory: ``basis_size + 1`` copies of the weights
    beside what a double backward takes. Deterministic but for the random start; it sees an eigenvalue of
    multiplicity two once.

    Args:
        model: The model. Measured in eval mode, left as it was.
        loss_fn: ``loss_fn(model, batch)``, the mean loss of a batch.
        batches: The data set, see :mod:`tiltsam.flatness.evaluation`.
        k: How many; all of them if there are fewer parameters than that.
        which: ``largest``, ``smallest`` (most negative) or ``magnitude``.
        tol: The relative residual asked for. The eigenvalues are then usually right to ``tol ** 2``.
        max_products: Stop here; see ``converged``.
        basis_size: Vectors kept before a restart: fewer save memory and cost products. ``2 k + 2`` by default.
        keep_graph: With a single batch, keep its graph between products: about 15% faster, up to 30% more memory.
        parameters: Names of the parameters whose block of the Hessian is wanted; all trainable ones by default.
        seed: Seed of the random start.
        size_of: The weight of a batch, its number of examples by default.
        progress: Called as ``progress(products, max_products)``.

    Raises:
        ValueError: If the data is empty, a loss or a product is not finite, the model has no trainable parameters,
            or an argument is out of range.

    Example:
        >>> from tiltsam.flatness.evaluation import supervised
        >>> data = [(torch.randn(8, 2), torch.randn(8, 1))]
        >>> found = top_eigenvalues(nn.Linear(2, 1), supervised(nn.functional.mse_loss), data, k=2)
        >>> bool(found.converged.all()), bool(found.values[0] >= found.values[1])
        (True, True)
    """
    if k < 1 or max_products < 1 or not tol >= 0:
        raise ValueError(f"k and max_products must be at least 1 and tol at least 0, got {k}, {max_products} and {tol}")
    if basis_size is not None and basis_size <= k:
        raise ValueError(f"basis_size must be larger than k = {k}, got {basis_size}")
    if which not in ("largest", "smallest", "magnitude"):
        raise ValueError(f"which must be 'largest', 'smallest' or 'magnitude', got {which!r}")
    with LossSurface(model, loss_fn, batches, parameters=parameters, size_of=size_of, seed=seed) as surface:
        hessian = HessianOperator(surface, keep_graph=keep_graph)
        random = generator(hessian.device, "lanczos", seed)
        found = thick_restart(
            hessian,
            lambda vector: vector.normal_(generator=random),
            min(k, hessian.size),
            basis_size=2 * k + 2 if basis_size is None else basis_size,
            tol=tol,
            max_products=max_products,
            which=which,
            generator=random,
            progress=progress,
        )
        residuals, converged = found.residuals, found.converged
        if hessian.eps > torch.finfo(hessian.dtype).eps:
            # Rounding breaks the relation that gives residuals for free: look at each pair itself.
            residuals = _residuals(hessian, found.values, found.vectors)
            converged = residuals <= tol * found.values.abs()
        hessian.close()
    return Eigenpairs(
        found.values,
        residuals,
        converged,
        found.vectors,
        dict(_shapes(surface)),
        hessian.num_products,
        tuple(hessian.substitutes),
    )


def trace(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Batches,
    num_samples: int = 100,
    *,
    deflate: Eigenpairs | None = None,
    keep_graph: bool = False,
    parameters: Sequence[str] | None = None,
    seed: int = 0,
    size_of: Callable[[Any], float] | None = None,
    progress: Progress | None = None,
) -> Trace:
    """The trace of the Hessian, whole and by layer, by Hutchinson's estimator with random signs.

        tr H = E[v^T H v],   variance 2 (||H||_F^2 - sum_i H_ii^2) per probe

    With ``deflate`` the span of known eigenvectors counts exactly and the probes see the rest only (the idea of
    Hutch++), which takes the outliers, and with them most of the variance, away at no further product:

        tr H = sum_i lambda_i + E[v^T P H P v],   P = I - Q Q^T

    Cost: ``num_samples`` Hessian-vector products. Unbiased (deflated layers only as far as the pairs converged).

    Args:
        model: The model. Measured in eval mode, left as it was.
        loss_fn: ``loss_fn(model, batch)``, the mean loss of a batch.
        batches: The data set, see :mod:`tiltsam.flatness.evaluation`.
        num_samples: Probes, at least 2. The error falls like ``1 / sqrt(num_samples)``.
        deflate: Eigenpairs of the same Hessian from :func:`top_eigenvalues`.
        keep_graph: With a single batch, keep its graph between products.
        parameters: Names of the parameters whose block is wanted; all trainable ones by default.
        seed: Seed of the probes.
        size_of: The weight of a batch, its number of examples by default.
        progress: Called as ``progress(done, num_samples)``.

    Raises:
        ValueError: If the data is empty, a loss or a product is not finite, the model has no trainable parameters,
            ``num_samples < 2``, or ``deflate`` belongs to other parameters.

    Example:
        >>> from tiltsam.flatness.evaluation import supervised
        >>> data = [(torch.randn(8, 2), torch.randn(8, 1))]
        >>> found = trace(nn.Linear(2, 1), supervised(nn.functional.mse_loss), data, num_samples=50)
        >>> found.value > 0 and found.error < found.value
        True
    """
    if num_samples < 2:
        raise ValueError(f"num_samples must be at least 2 to estimate an error, got {num_samples}")
    with LossSurface(model, loss_fn, batches, parameters=parameters, size_of=size_of, seed=seed) as surface:
        hessian = HessianOperator(surface, keep_graph=keep_graph)
        if deflate is not None and list(deflate.shapes.items()) != _shapes(surface):
            raise ValueError("deflate holds eigenpairs with respect to other parameters")
        known = None if deflate is None else deflate.vectors.to(hessian.device, hessian.dtype)
        owners = [name.rpartition(".")[0] for name in surface.names]
        rows = []
        probe = torch.empty(hessian.size, device=hessian.device, dtype=hessian.dtype)
        out = torch.empty_like(probe)
        for sample in range(num_samples):
            signs(generator(hessian.device, "trace", seed, sample), probe)
            hessian(probe if known is None else _project(probe, known), out)
            product = out if known is None else _project(out, known)
            parts = torch.split(probe.mul_(product), [p.numel() for p in surface.params])
            rows.append(torch.stack([part.sum() for part in parts]))
            if progress is not None:
                progress(sample + 1, num_samples)
        hessian.close()
        table = torch.stack(rows).to("cpu", torch.float64)
    if not table.isfinite().all():
        raise ValueError("a product with the Hessian is not finite: the loss has no second derivative here")
    if deflate is not None:
        # What the probes no longer see: eigenvalue times the share of the eigenvector in each parameter.
        shares = torch.split(deflate.vectors.square(), [p.numel() for p in surface.params], dim=1)
        table += deflate.values @ torch.stack([s.sum(1).to("cpu", torch.float64) for s in shares], 1)
    names = dict.fromkeys(owners)
    by_owner = {name: table[:, [i for i, o in enumerate(owners) if o == name]].sum(1) for name in names}
    total = table.sum(1)
    return Trace(
        *mean(total),
        layers={name: mean(column) for name, column in by_owner.items()},
        samples=total,
        substitutes=tuple(hessian.substitutes),
    )


def by_layer(measure: Callable[..., T], model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, T]:
    """A measurement that takes ``parameters`` for each layer by itself: ``{layer: result}``.

    ``by_layer(f, model, ...)`` calls ``f(model, ..., parameters=names)`` with the names of the trainable parameters
    of each layer in turn: those of this module, :func:`~tiltsam.sharpness.neighborhood` and
    :func:`~tiltsam.sharpness.m_sharpness` take them. What comes out is about the layer's own block of the Hessian, or
    about that layer moved alone. (:func:`trace` has its layers from one run already, see :attr:`Trace.layers`.)

    Example:
        >>> from tiltsam.flatness.evaluation import supervised
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        >>> data = [(torch.randn(8, 2), torch.randn(8, 1))]
        >>> found = by_layer(top_eigenvalues, model, supervised(nn.functional.mse_loss), data, k=1)
        >>> list(found), found["2"].values.shape
        (['0', '2'], torch.Size([1]))
    """
    return {layer: measure(model, *args, parameters=names, **kwargs) for layer, names in layers(model).items()}


def _shapes(surface: LossSurface) -> list[tuple[str, torch.Size]]:
    return [(name, p.shape) for name, p in zip(surface.names, surface.params, strict=True)]


def _project(v: Tensor, known: Tensor) -> Tensor:
    """``v`` less its part in the span of the orthonormal rows of ``known``."""
    return torch.addmv(v, known.T, known @ v, alpha=-1)


def _residuals(hessian: HessianOperator, values: Tensor, vectors: Tensor) -> Tensor:
    out = torch.empty_like(vectors[0])
    found = []
    for value, vector in zip(values.tolist(), vectors, strict=True):
        hessian(vector, out)
        found.append(torch.linalg.vector_norm(out.sub_(vector, alpha=value)))
    return torch.stack(found).to("cpu", torch.float64)
