"""The density of the Hessian's eigenvalues, by stochastic Lanczos quadrature."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tiltsam.flatness.evaluation import Batches, LossFn, LossSurface, Progress, generator
from tiltsam.flatness.hessian import HessianOperator
from tiltsam.flatness.lanczos import quadrature
from tiltsam.flatness.probes import Estimate, mean, signs

__all__ = ["Density", "spectral_density"]


@dataclass(frozen=True)
class Density:
    """The density of the Hessian's eigenvalues, smoothed by a Gaussian; it integrates to 1.

    Attributes:
        grid: Where it is given.
        values: The density there, a mean over probes.
        error: Its standard error over probes; NaN for a single one.
        nodes: The quadrature nodes of each probe, ``[num_probes, num_steps]``; those beyond an exhausted Krylov
            space have weight 0.
        weights: Their weights; each row sums to 1.
        width: The standard deviation of the Gaussian.
        substitutes: Kernels that had to be replaced because they have no second derivative.
    """

    grid: Tensor
    values: Tensor
    error: Tensor
    nodes: Tensor = field(repr=False)
    weights: Tensor = field(repr=False)
    width: float
    substitutes: tuple[str, ...] = ()

    def smooth(self, grid: Tensor, width: float) -> tuple[Tensor, Tensor]:
        """The density on another grid with another width, and its standard error; costs no product."""
        bumps = torch.exp(-0.5 * ((grid - self.nodes[..., None]) / width).square()) / (width * math.sqrt(2 * math.pi))
        curves = (self.weights[..., None] * bumps).sum(1)
        error = curves.std(0) / len(curves) ** 0.5 if len(curves) > 1 else torch.full_like(grid, math.nan)
        return curves.mean(0), error

    def moment(self, power: int) -> Estimate:
        """The mean of ``eigenvalue ** power``: power 1 is the trace, and 2 the squared Frobenius norm, over d."""
        per_probe = (self.weights * self.nodes**power).sum(1)
        return mean(per_probe)


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
    progress: Progress | None = None,
) -> Density:
    """The density of the Hessian's eigenvalues, by stochastic Lanczos quadrature.

    Each random unit probe gives the nodes and weights of a Gauss quadrature of its spectral measure, whose mean over
    probes is the spectrum; a Gaussian of standard deviation ``width`` makes a curve of it (Ghorbani et al. 2019).

    Cost: ``num_probes * num_steps`` Hessian-vector products; memory: ``num_steps + 1`` copies of the weights, or
    three with ``reorthogonalize=False``. Biased by the smoothing, and by the quadrature where the curve has detail
    that a polynomial of degree ``2 num_steps - 1`` does not follow; the moments up to that degree are unbiased.

    Args:
        model: The model. Measured in eval mode, left as it was.
        loss_fn: ``loss_fn(model, batch)``, the mean loss of a batch.
        batches: The data set, see :mod:`tiltsam.flatness.evaluation`.
        num_probes: Random probes; one is often enough for a large model, two are needed for an error.
        num_steps: Lanczos steps per probe.
        width: Smoothing; by default a hundredth of the range of the spectrum.
        num_points: Points of the grid.
        reorthogonalize: See :func:`tiltsam.flatness.lanczos.quadrature`.
        keep_graph: With a single batch, keep its graph between products.
        parameters: Names of the parameters whose block is wanted; all trainable ones by default.
        seed: Seed of the probes.
        size_of: The weight of a batch, its number of examples by default.
        progress: Called as ``progress(products, num_probes * num_steps)``.

    Raises:
        ValueError: If the data is empty, a loss or a product is not finite, the model has no trainable parameters,
            or an argument is out of range.

    Example:
        >>> from tiltsam.flatness.evaluation import supervised
        >>> data = [(torch.randn(8, 2), torch.randn(8, 1))]
        >>> found = spectral_density(nn.Linear(2, 1), supervised(nn.functional.mse_loss), data)
        >>> abs(float(torch.trapezoid(found.values, found.grid)) - 1) < 1e-3
        True
    """
    if num_probes < 1 or num_steps < 1 or num_points < 2 or (width is not None and not width > 0):
        raise ValueError(
            "num_probes and num_steps must be at least 1, num_points at least 2 and width above 0: "
            f"got {num_probes}, {num_steps}, {num_points} and {width}"
        )
    with LossSurface(model, loss_fn, batches, parameters=parameters, size_of=size_of, seed=seed) as surface:
        nodes, weights = torch.zeros(2, num_probes, num_steps, dtype=torch.float64, device="cpu")
        hessian = HessianOperator(surface, keep_graph=keep_graph)
        for probe in range(num_probes):
            random = generator(hessian.device, "density", seed, probe)

            def tell(step: int, done: int = probe * num_steps) -> None:
                if progress is not None:
                    progress(done + step, num_probes * num_steps)

            start = partial(signs, random)
            found = quadrature(hessian, start, num_steps, reorthogonalize=reorthogonalize, progress=tell)
            nodes[probe, : len(found[0])], weights[probe, : len(found[1])] = found
        hessian.close()
    seen = nodes[weights > 0]
    low, high = float(seen.min()), float(seen.max())
    size = max(abs(low), abs(high))
    # A Hessian that is a multiple of the identity has no range but rounding, of a few eps; its size sets the scale
    # then, or 1 if it is zero.
    spread = width or ((high - low) / 100 if high - low > 100 * hessian.eps * size else size / 100) or 0.01
    # Five standard deviations beyond the ends: what is cut off is below 1e-6.
    grid = torch.linspace(low - 5 * spread, high + 5 * spread, num_points, dtype=torch.float64, device="cpu")
    empty = torch.empty_like(grid)
    raw = Density(grid, empty, empty, nodes, weights, spread, tuple(hessian.substitutes))
    values, error = raw.smooth(grid, spread)
    return replace(raw, values=values, error=error)
