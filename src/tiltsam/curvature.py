"""Curvature of the loss: the top of the Hessian's spectrum, its trace, its density.

The Hessian is that of the mean loss over a data set, in eval mode, with respect to all trainable parameters or to
those named in ``parameters``. It is never formed: all functions use Hessian-vector products
(:mod:`tiltsam.flatness.hessian`), each of which costs a forward, a backward and a double backward over the data.

| function | products | error estimate |
|---|---|---|
| :func:`top_eigenvalues` | until converged, at most ``max_products`` | residual norm of each pair, and a flag |
| :func:`trace` | ``num_samples`` | standard error over the probes |
| :func:`spectral_density` | ``num_probes * num_steps`` | standard error over the probes at each point |

``by_layer(top_eigenvalues, model, loss_fn, batches, k=1)`` measures layer by layer.

Why not scipy's ``eigsh`` on the operators of curvlinops? Top 5 eigenvalues of an 11 M-parameter ResNet-18 (one batch of
256 images, float32, one H200, relative residual 1e-3) take 5.0 s here, 4.3 s with ``keep_graph``, against 12.4 s for
``eigsh`` on the same products and 6.8 s for ``eigsh`` on those of curvlinops: it copies every vector to the host and
back. This module also needs neither package, and differentiates SiLU, which the forward-over-reverse products of
curvlinops do not. ``benchmarks/bench_curvature.py`` repeats the measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tiltsam.flatness.hessian import HessianOperator
from tiltsam.flatness.lanczos import Which, quadrature, thick_restart
from tiltsam.flatness.loss_surface import Batches, LossFn, LossSurface, ProgressCallback, trainable
from tiltsam.flatness.numerics import Estimate, rademacher_, weighted_mean
from tiltsam.flatness.randomness import Purpose, generator
from tiltsam.space.validation import check_count, check_nonnegative, check_positive

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
        residuals: ``||H v - value v||``, but at least the rounding of a product: some eigenvalue lies within this
            distance of the value, whose error is of the order of the squared residual over the gap to the next one.
        converged: Whether the residual is within the tolerance.
        vectors: One flat unit vector per row, orthonormal, on the device of the model.
        shapes: The names and shapes of the parameters along a row.
        num_products: The number of Hessian-vector products used.
        substitutes: The kernels that were replaced because they have no second derivative.
    """

    values: Tensor
    residuals: Tensor
    converged: Tensor
    vectors: Tensor = field(repr=False)
    shapes: dict[str, torch.Size] = field(repr=False)
    num_products: int
    substitutes: tuple[str, ...] = ()

    def direction(self, index: int) -> dict[str, Tensor]:
        """Return eigenvector ``index`` as tensors by parameter name, a direction for :mod:`tiltsam.landscape`."""
        pieces = torch.split(self.vectors[index], [shape.numel() for shape in self.shapes.values()])
        return {name: piece.view(shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}


@dataclass(frozen=True)
class Trace:
    """The trace of the Hessian.

    Attributes:
        value: The estimate; unbiased.
        error: Its standard error.
        layers: The trace of each layer's block, from the same probes; they add up to ``value``.
        samples: The estimate of each probe (float64, on the host).
        substitutes: The kernels that were replaced because they have no second derivative.
    """

    value: float
    error: float
    layers: dict[str, Estimate]
    samples: Tensor = field(repr=False)
    substitutes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Density:
    """The density of the Hessian's eigenvalues, smoothed by a Gaussian; it integrates to 1.

    Attributes:
        grid: The points at which it is given.
        values: The density there, a mean over probes.
        error: Its standard error over probes; NaN for a single one.
        nodes: The quadrature nodes of each probe, ``[num_probes, num_steps]``; those beyond an exhausted Krylov space
            have weight 0.
        weights: Their weights; each row sums to 1.
        width: The standard deviation of the Gaussian.
        substitutes: The kernels that were replaced because they have no second derivative.
    """

    grid: Tensor
    values: Tensor
    error: Tensor
    nodes: Tensor = field(repr=False)
    weights: Tensor = field(repr=False)
    width: float
    substitutes: tuple[str, ...] = ()

    def smooth(self, grid: Tensor, width: float) -> tuple[Tensor, Tensor]:
        """Return the density on another grid with another width, and its standard error; costs no product."""
        return _smooth(self.nodes, self.weights, grid, width)

    def moment(self, power: int) -> Estimate:
        """Return the mean of ``eigenvalue ** power``: trace / d for 1, squared Frobenius norm / d for 2."""
        return weighted_mean((self.weights * self.nodes**power).sum(1))


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
    progress: ProgressCallback | None = None,
) -> Eigenpairs:
    """Return the ``k`` largest eigenvalues of the Hessian, by thick-restart Lanczos on the device.

    Cost: usually 5 to 10 Hessian-vector products per eigenvalue. Memory: ``basis_size + 1`` copies of the weights, and
    that of a double backward. Deterministic except for the random start; finds a repeated eigenvalue once.

    Args:
        model: The model. Measured in eval mode and restored.
        loss_fn: ``loss_fn(model, batch)``, the mean loss of a batch.
        batches: The data set, see :mod:`tiltsam.flatness.loss_surface`.
        k: The number of eigenvalues; all of them if there are fewer parameters.
        which: ``largest``, ``smallest`` (most negative) or ``magnitude``.
        tol: The relative residual to reach. The eigenvalues are then usually right to ``tol ** 2``.
        max_products: Stop after this many products; see ``converged``.
        basis_size: Vectors kept before a restart: fewer save memory but take more products. ``2 k + 2`` by default.
        keep_graph: With a single batch, keep its graph between products: about 15% faster, up to 30% more memory.
        parameters: Names of the parameters whose block of the Hessian to use; all trainable ones by default.
        seed: Seed of the random start.
        size_of: Weight of a batch; its number of examples by default.
        progress: Called as ``progress(products, max_products)``.

    Raises:
        ValueError: If the data is empty, a loss or a product is not finite, the model has no trainable parameters,
            or an argument is out of range.

    Example:
        >>> from tiltsam.sharpness import supervised
        >>> data = [(torch.randn(8, 2), torch.randn(8, 1))]
        >>> found = top_eigenvalues(nn.Linear(2, 1), supervised(nn.functional.mse_loss), data, k=2)
        >>> bool(found.converged.all()), bool(found.values[0] >= found.values[1])
        (True, True)
    """
    check_count("k", k)
    check_count("max_products", max_products)
    check_nonnegative("tol", tol)
    if basis_size is not None:
        check_count("basis_size", basis_size, k + 1)
    if which not in ("largest", "smallest", "magnitude"):
        raise ValueError(f"which must be 'largest', 'smallest' or 'magnitude', got {which!r}")
    with LossSurface(model, loss_fn, batches, parameters=parameters, size_of=size_of, seed=seed) as surface:
        hessian = HessianOperator(surface, keep_graph=keep_graph)
        random = generator(hessian.device, Purpose.EIGENVALUES, seed)
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
            # Rounding breaks the Lanczos relation that gives residuals for free: compute them.
            residuals = _residuals(hessian, found.values, found.vectors)
            converged = residuals <= tol * found.values.abs()
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
    progress: ProgressCallback | None = None,
) -> Trace:
    """Return the trace of the Hessian, whole and by layer, by Hutchinson's estimator with random signs.

        tr H = E[v^T H v],   variance 2 (||H||_F^2 - sum_i H_ii^2) per probe

    With ``deflate`` the span of known eigenvectors counts exactly and the probes see only the rest (the idea of
    Hutch++). This removes the outliers, and most of the variance with them, at no further product:

        tr H = sum_i lambda_i + E[v^T P H P v],   P = I - Q Q^T

    Cost: ``num_samples`` Hessian-vector products. Unbiased (deflated layers only as far as the pairs converged).

    Args:
        model: The model. Measured in eval mode and restored.
        loss_fn: ``loss_fn(model, batch)``, the mean loss of a batch.
        batches: The data set, see :mod:`tiltsam.flatness.loss_surface`.
        num_samples: The number of probes, at least 2. The error falls like ``1 / sqrt(num_samples)``.
        deflate: Eigenpairs of the same Hessian from :func:`top_eigenvalues`.
        keep_graph: With a single batch, keep its graph between products.
        parameters: Names of the parameters whose block of the Hessian to use; all trainable ones by default.
        seed: Seed of the probes.
        size_of: Weight of a batch; its number of examples by default.
        progress: Called as ``progress(done, num_samples)``.

    Raises:
        ValueError: If the data is empty, a loss or a product is not finite, the model has no trainable parameters,
            ``num_samples < 2``, or ``deflate`` belongs to other parameters.

    Example:
        >>> from tiltsam.sharpness import supervised
        >>> data = [(torch.randn(8, 2), torch.randn(8, 1))]
        >>> found = trace(nn.Linear(2, 1), supervised(nn.functional.mse_loss), data, num_samples=50)
        >>> found.value > 0 and found.error < found.value
        True
    """
    check_count("num_samples", num_samples, 2)
    with LossSurface(model, loss_fn, batches, parameters=parameters, size_of=size_of, seed=seed) as surface:
        hessian = HessianOperator(surface, keep_graph=keep_graph)
        if deflate is not None and list(deflate.shapes.items()) != _shapes(surface):
            raise ValueError("deflate must hold eigenpairs with respect to the same parameters")
        known = None if deflate is None else deflate.vectors.to(hessian.device, hessian.dtype)
        sizes = [p.numel() for p in surface.params]
        rows = []
        probe = torch.empty(hessian.size, device=hessian.device, dtype=hessian.dtype)
        out = torch.empty_like(probe)
        for sample in range(num_samples):
            rademacher_(probe, generator(hessian.device, Purpose.TRACE, seed, sample))
            hessian(probe if known is None else _project_out(probe, known), out)
            product = out if known is None else _project_out(out, known)
            rows.append(torch.stack([part.sum() for part in torch.split(probe.mul_(product), sizes)]))
            if progress is not None:
                progress(sample + 1, num_samples)
        table = torch.stack(rows).to("cpu", torch.float64)  # one row per probe, one column per parameter
    if not table.isfinite().all():
        raise ValueError("a product with the Hessian is not finite: the loss has no second derivative here")
    if deflate is not None:
        # The part that the probes do not see: eigenvalue times the share of the eigenvector in each parameter.
        shares = torch.split(deflate.vectors.square(), sizes, dim=1)
        table += deflate.values @ torch.stack([s.sum(1).to("cpu", torch.float64) for s in shares], 1)
    column = {name: number for number, name in enumerate(surface.names)}
    samples = table.sum(1)
    return Trace(
        *weighted_mean(samples),
        layers={
            layer: weighted_mean(table[:, [column[name] for name in names]].sum(1))
            for layer, names in _names_by_layer(surface.names).items()
        },
        samples=samples,
        substitutes=tuple(hessian.substitutes),
    )


def spectral_density(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Batches,
    num_probes: int = 4,
    num_steps: int = 40,
    *,
    width: float | None = None,
    num_points: int = 512,
    reorthogonalize: bool = True,
    keep_graph: bool = False,
    parameters: Sequence[str] | None = None,
    seed: int = 0,
    size_of: Callable[[Any], float] | None = None,
    progress: ProgressCallback | None = None,
) -> Density:
    """Return the density of the Hessian's eigenvalues, by stochastic Lanczos quadrature.

    Each random unit probe gives the nodes and weights of a Gauss quadrature of its spectral measure, whose mean over
    probes is the spectrum; a Gaussian of standard deviation ``width`` smooths it to a curve (Ghorbani et al. 2019).

    Cost: ``num_probes * num_steps`` Hessian-vector products; memory: ``num_steps + 1`` copies of the weights, or three
    with ``reorthogonalize=False``. Biased by the smoothing, and by the quadrature if the curve has detail finer than a
    polynomial of degree ``2 num_steps - 1``; the moments up to that degree are unbiased.

    Args:
        model: The model. Measured in eval mode and restored.
        loss_fn: ``loss_fn(model, batch)``, the mean loss of a batch.
        batches: The data set, see :mod:`tiltsam.flatness.loss_surface`.
        num_probes: Random probes; one is often enough for a large model, two are needed for an error.
        num_steps: Lanczos steps per probe.
        width: Standard deviation of the smoothing; a hundredth of the range of the spectrum by default.
        num_points: Points of the grid.
        reorthogonalize: See :func:`tiltsam.flatness.lanczos.quadrature`.
        keep_graph: With a single batch, keep its graph between products.
        parameters: Names of the parameters whose block of the Hessian to use; all trainable ones by default.
        seed: Seed of the probes.
        size_of: Weight of a batch; its number of examples by default.
        progress: Called as ``progress(products, num_probes * num_steps)``.

    Raises:
        ValueError: If the data is empty, a loss or a product is not finite, the model has no trainable parameters, or
            an argument is out of range.

    Example:
        >>> from tiltsam.sharpness import supervised
        >>> data = [(torch.randn(8, 2), torch.randn(8, 1))]
        >>> found = spectral_density(nn.Linear(2, 1), supervised(nn.functional.mse_loss), data)
        >>> abs(float(torch.trapezoid(found.values, found.grid)) - 1) < 1e-3
        True
    """
    check_count("num_probes", num_probes)
    check_count("num_steps", num_steps)
    check_count("num_points", num_points, 2)
    if width is not None:
        check_positive("width", width)
    with LossSurface(model, loss_fn, batches, parameters=parameters, size_of=size_of, seed=seed) as surface:
        nodes, weights = torch.zeros(2, num_probes, num_steps, dtype=torch.float64, device="cpu")
        hessian = HessianOperator(surface, keep_graph=keep_graph)
        for probe in range(num_probes):

            def report(step: int, done: int = probe * num_steps) -> None:
                if progress is not None:
                    progress(done + step, num_probes * num_steps)

            start = partial(rademacher_, random=generator(hessian.device, Purpose.DENSITY, seed, probe))
            found = quadrature(hessian, start, num_steps, reorthogonalize=reorthogonalize, progress=report)
            nodes[probe, : len(found[0])], weights[probe, : len(found[1])] = found
    seen = nodes[weights > 0]
    low, high = float(seen.min()), float(seen.max())
    size = max(abs(low), abs(high))
    # The range of a multiple of the identity is a few eps of rounding: use its size instead, or 1 if that is zero.
    spread = width or ((high - low) / 100 if high - low > 100 * hessian.eps * size else size / 100) or 0.01
    # Five standard deviations beyond the ends: less than 1e-6 is cut off.
    grid = torch.linspace(low - 5 * spread, high + 5 * spread, num_points, dtype=torch.float64, device="cpu")
    values, error = _smooth(nodes, weights, grid, spread)
    return Density(grid, values, error, nodes, weights, spread, tuple(hessian.substitutes))


def by_layer(measure: Callable[..., T], model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, T]:
    """Measure each layer on its own; return ``{layer: result}``.

    ``by_layer(f, model, ...)`` calls ``f(model, ..., parameters=names)`` with the trainable parameters of each layer.
    The functions of this module, :func:`~tiltsam.sharpness.neighborhood` and :func:`~tiltsam.sharpness.m_sharpness`
    take them. The result is about the layer's block of the Hessian, or about that layer moved alone. (:func:`trace`
    returns all layers in one run, see :attr:`Trace.layers`.)

    Example:
        >>> from tiltsam.sharpness import supervised
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        >>> data = [(torch.randn(8, 2), torch.randn(8, 1))]
        >>> found = by_layer(top_eigenvalues, model, supervised(nn.functional.mse_loss), data, k=1)
        >>> list(found), found["2"].values.shape
        (['0', '2'], torch.Size([1]))
    """
    layers = _names_by_layer(trainable(model))
    return {layer: measure(model, *args, parameters=names, **kwargs) for layer, names in layers.items()}


def _names_by_layer(names: Iterable[str]) -> dict[str, list[str]]:
    """Group parameter names by the module that owns them."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return layers


def _shapes(surface: LossSurface) -> list[tuple[str, torch.Size]]:
    return [(name, p.shape) for name, p in zip(surface.names, surface.params, strict=True)]


def _smooth(nodes: Tensor, weights: Tensor, grid: Tensor, width: float) -> tuple[Tensor, Tensor]:
    """Return the mean over probes of the nodes smoothed by a Gaussian, and its standard error; NaN for one probe."""
    bumps = torch.exp(-0.5 * ((grid - nodes[..., None]) / width).square()) / (width * math.sqrt(2 * math.pi))
    curves = (weights[..., None] * bumps).sum(1)
    error = curves.std(0) / len(curves) ** 0.5 if len(curves) > 1 else torch.full_like(grid, math.nan)
    return curves.mean(0), error


def _project_out(v: Tensor, known: Tensor) -> Tensor:
    """Return ``v`` minus its projection on the orthonormal rows of ``known``."""
    return torch.addmv(v, known.T, known @ v, alpha=-1)


def _residuals(hessian: HessianOperator, values: Tensor, vectors: Tensor) -> Tensor:
    """Return ``||H v - value v||`` of each pair (float64, on the host). Cost: one product each."""
    out = torch.empty_like(vectors[0])
    found = []
    for value, vector in zip(values.tolist(), vectors, strict=True):
        hessian(vector, out)
        found.append(torch.linalg.vector_norm(out.sub_(vector, alpha=value)))
    return torch.stack(found).to("cpu", torch.float64)
