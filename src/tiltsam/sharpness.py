"""Sharpness: what the loss does in a neighbourhood of the weights.

For draws ``eps ~ N(0, std^2 I)`` on all trainable parameters and ``x = L(theta + eps)``, the mean loss over a data set
in eval mode:

    mean               E[x]
    variance           Var[x]
    t-weighted mean    sum w x                       w proportional to exp(t x)
    t-weighted variance  sum w (x - mean_w)^2        Definition 3.5 of the paper: t-sharpness

:func:`neighborhood` estimates all four, with standard errors, at one or several ``std``; :func:`t_sharper` compares two
of them. :func:`rounding` measures the loss after the weights are rounded to a few bits, a perturbation that deployed
models meet. Worst-case sharpness (:mod:`tiltsam.flatness.worst_case`), the losses of ERM, SAM and TSAM
(:mod:`tiltsam.flatness.objectives`) and :func:`~tiltsam.flatness.loss_surface.supervised` are re-exported here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from tiltsam.flatness.loss_surface import Batches, LossFn, LossSurface, ProgressCallback, supervised
from tiltsam.flatness.numerics import at_least_float32, total_norm
from tiltsam.flatness.objectives import CrossEntry, CrossTable, ErmLoss, SamLoss, TsamLoss, cross_objectives
from tiltsam.flatness.randomness import Purpose, generator
from tiltsam.flatness.worst_case import WorstCase, m_sharpness
from tiltsam.space.validation import check_count, check_nonnegative
from tiltsam.tilting import effective_sample_size, tilted_weights

__all__ = [
    "CrossEntry",
    "CrossTable",
    "ErmLoss",
    "Neighborhood",
    "Rounding",
    "SamLoss",
    "SharpnessComparison",
    "TsamLoss",
    "WorstCase",
    "cross_objectives",
    "m_sharpness",
    "neighborhood",
    "rounding",
    "supervised",
    "t_sharper",
]

_LEAVE_ONE_OUT_CELLS = 1 << 22  # cells of the (draws x draws) table computed at a time: 32 MB of float64


@dataclass(frozen=True)
class Neighborhood:
    """Statistics of the loss around a point for each ``std``, with their standard errors.

    All tensors are float64 on the host with one entry per ``std``. Errors are by the jackknife, exact for the mean;
    those of variances are NaN for two draws. If ``effective_samples`` is less than most of the draws, a few of them
    decide the t-weighted numbers: these are then too low and their errors too small (docs/measure.md has numbers). Draw
    more, or lower ``t``.

    Attributes:
        std: The standard deviations of the noise.
        t: The tilt of the t-weighted numbers.
        center: The loss at the weights themselves.
        mean: The mean loss. Unbiased.
        mean_error: Standard error of ``mean``.
        variance: The variance of the loss; unbiased (divides by ``num_samples - 1``).
        variance_error: Standard error of ``variance``.
        tilted_mean: The t-weighted mean; a ratio of estimates, so its bias is of order 1/num_samples.
        tilted_mean_error: Standard error of ``tilted_mean``.
        tilted_variance: The t-weighted variance (t-sharpness); likewise. At ``t = 0`` it is ``variance``
            times ``(num_samples - 1) / num_samples``.
        tilted_variance_error: Standard error of ``tilted_variance``.
        effective_samples: The effective number of draws under the tilted weights.
        losses: Every loss, ``[num_std, num_samples]``.
    """

    std: Tensor
    t: float
    center: float
    mean: Tensor
    mean_error: Tensor
    variance: Tensor
    variance_error: Tensor
    tilted_mean: Tensor
    tilted_mean_error: Tensor
    tilted_variance: Tensor
    tilted_variance_error: Tensor
    effective_samples: Tensor
    losses: Tensor = field(repr=False)

    @classmethod
    def from_losses(cls, std: Tensor, losses: Tensor, center: float, t: float) -> Neighborhood:
        """Return the statistics of losses of shape ``[num_std, num_samples]``."""
        check_nonnegative("t", t)
        num = losses.shape[1]
        check_count("num_samples", num, 2)
        plain = [_leave_one_out(row, 0.0) for row in losses]
        tilted = [_leave_one_out(row, t) for row in losses] if t > 0 else plain
        weights = [tilted_weights(row, t) for row in losses]
        tilted_mean = torch.stack([w @ x for w, x in zip(weights, losses, strict=True)])
        about = (losses - tilted_mean[:, None]).square()
        return cls(
            std=std,
            t=t,
            center=center,
            mean=losses.mean(1),
            mean_error=_jackknife([means for means, _ in plain]),
            variance=losses.var(1),
            # With one of n left out, the unbiased variance is the plain one times (n-1)/(n-2); already NaN for n = 2.
            variance_error=_jackknife([variances for _, variances in plain]) * (num - 1) / max(num - 2, 1),
            tilted_mean=tilted_mean,
            tilted_mean_error=_jackknife([means for means, _ in tilted]),
            tilted_variance=torch.stack([w @ a for w, a in zip(weights, about, strict=True)]),
            tilted_variance_error=_jackknife([variances for _, variances in tilted]),
            effective_samples=torch.stack([effective_sample_size(w) for w in weights]),
            losses=losses,
        )

    def at_tilt(self, t: float) -> Neighborhood:
        """Return the statistics of the same draws with another ``t``; costs no pass over the data."""
        return Neighborhood.from_losses(self.std, self.losses, self.center, t)


@dataclass(frozen=True)
class SharpnessComparison:
    """The comparison of two points by t-sharpness, per ``std``.

    Attributes:
        std: The standard deviations of the noise.
        t: The tilt.
        difference: The t-weighted variance of the first less that of the second.
        error: The standard error of the difference; NaN for two draws.
        sharper: Whether the first is sharper: its t-weighted variance is larger (Definition 3.5 of the paper).
        significant: Whether the difference, of either sign, is more than twice its error.
    """

    std: Tensor
    t: float
    difference: Tensor
    error: Tensor
    sharper: Tensor
    significant: Tensor


def neighborhood(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Batches,
    std: float | Sequence[float],
    num_samples: int = 100,
    t: float = 0.0,
    seed: int = 0,
    *,
    parameters: Sequence[str] | None = None,
    size_of: Callable[[Any], float] | None = None,
    progress: ProgressCallback | None = None,
) -> Neighborhood:
    """Return the mean and variance of the loss under Gaussian noise on the weights, plain and t-weighted.

    Draw ``i`` uses the same direction at every ``std`` and in every model of the same shape: curves against ``std`` are
    smooth, and the difference of two models has a smaller error than either.

    Cost: ``len(std) * num_samples + 1`` forward passes over the data; memory: one copy of the weights.

    Args:
        model: The model. Measured in eval mode and restored.
        loss_fn: ``loss_fn(model, batch)``, the mean loss of a batch.
        batches: The data set, see :mod:`tiltsam.flatness.loss_surface`.
        std: The standard deviation of the noise on every coordinate, or several.
        num_samples: Draws per ``std``, at least 2, or 3 for errors of the variances. The errors fall like
            ``1 / sqrt(num_samples)``.
        t: The tilt, at least 0; :meth:`Neighborhood.at_tilt` gives other values from the same draws.
        seed: Seed of the draws; the same seed gives the same numbers on the same type of device.
        parameters: Names of the parameters to perturb; all trainable ones by default.
        size_of: Weight of a batch; its number of examples by default.
        progress: Called as ``progress(done, total)`` after each pass over the data.

    Raises:
        ValueError: If the data is empty, a loss is not finite, the model has no trainable parameters, or an argument
            is out of range.

    Warns:
        UserWarning: If half-precision weights round the noise by more than a tenth of its length.

    Example:
        >>> from tiltsam.sharpness import supervised
        >>> data = [(torch.randn(8, 2), torch.randn(8, 1))]
        >>> around = neighborhood(nn.Linear(2, 1), supervised(nn.functional.mse_loss), data, std=[0.01, 0.1])
        >>> around.mean.shape, bool((around.variance > 0).all())
        (torch.Size([2]), True)
    """
    stds = _check_stds(std)
    check_count("num_samples", num_samples, 2)
    check_nonnegative("t", t)
    total = len(stds) * num_samples + 1
    with LossSurface(model, loss_fn, batches, parameters=parameters, size_of=size_of, seed=seed) as surface:
        losses = torch.empty(len(stds), num_samples, dtype=torch.float64, device="cpu")
        center = surface.mean_loss()
        for row, scale in enumerate(stds):
            for sample in range(num_samples):
                _add_noise(surface, scale, seed, sample)
                losses[row, sample] = surface.mean_loss(f" at draw {sample} of std {scale:g}")
                if progress is not None:
                    progress(row * num_samples + sample + 2, total)  # the center was the first
    return Neighborhood.from_losses(torch.tensor(stds, dtype=torch.float64, device="cpu"), losses, center, t)


def t_sharper(a: Neighborhood, b: Neighborhood, t: float = 1.0) -> SharpnessComparison:
    """Return whether ``a`` is t-sharper than ``b``: whether its t-weighted variance of the loss is larger.

    Models of the same shape that were measured with the same seed had the same draws. The error is that of the paired
    difference. Costs no pass over the data.

    Args:
        a: The neighbourhood of a model, from :func:`neighborhood`.
        b: The neighbourhood of the other model, with the same ``std`` and number of draws.
        t: The tilt; replaces those of the neighbourhoods.

    Raises:
        ValueError: If the neighbourhoods differ in ``std`` or number of draws.

    Note:
        The theorem that TSAM prefers the flatter of two minima requires one to be sharper at *every* tilt up to ``t``;
        a single ``t`` is not enough.

    Example:
        >>> from tiltsam.sharpness import supervised
        >>> data = [(torch.randn(8, 2), torch.randn(8, 1))]
        >>> flat, steep = nn.Linear(2, 1), nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
        >>> sides = [neighborhood(model, supervised(nn.functional.mse_loss), data, std=0.1) for model in (flat, steep)]
        >>> t_sharper(*sides).sharper.shape
        torch.Size([1])
    """
    first, second = a.at_tilt(t), b.at_tilt(t)
    if first.losses.shape != second.losses.shape or not torch.equal(first.std, second.std):
        raise ValueError("the two neighbourhoods differ in std or in the number of draws")
    difference = first.tilted_variance - second.tilted_variance
    pairs = zip(first.losses, second.losses, strict=True)
    error = _jackknife([_leave_one_out(x, t)[1] - _leave_one_out(y, t)[1] for x, y in pairs])
    return SharpnessComparison(first.std, t, difference, error, difference > 0, difference.abs() > 2 * error)


@dataclass(frozen=True)
class Rounding:
    """The loss after the weights are rounded to integers of ``bits`` bits, for each number of bits.

    Attributes:
        bits: The numbers of bits.
        center: The loss at the weights themselves.
        losses: The loss at the rounded weights, one entry per number of bits; float64 on the host.
        distances: Norm of the change of the weights, one entry per number of bits; float64 on the host.
    """

    bits: tuple[int, ...]
    center: float
    losses: Tensor
    distances: Tensor


def rounding(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Batches,
    bits: int | Sequence[int] = (8, 4),
    *,
    parameters: Sequence[str] | None = None,
    size_of: Callable[[Any], float] | None = None,
) -> Rounding:
    """Return the loss after the weights are rounded to integers, as weight-only quantisation does.

    A row ``w`` of a weight matrix (a filter of a convolution) becomes ``a * round(w / a)`` with
    ``a = max|w| / (2^(bits-1) - 1)``: symmetric rounding to nearest, one scale per output. Parameters with fewer than
    two dimensions (biases, normalisation) are not rounded, activations neither.

    Cost: ``len(bits) + 1`` forward passes over the data; memory: one copy of the weights.

    Args:
        model: The model. Measured in eval mode and restored.
        loss_fn: ``loss_fn(model, batch)``, the mean loss of a batch.
        batches: The data set, see :mod:`tiltsam.flatness.loss_surface`.
        bits: The number of bits, 2 to 16, or several.
        parameters: Names of the parameters to round; by default all trainable ones with two or more dimensions.
        size_of: Weight of a batch; its number of examples by default.

    Raises:
        ValueError: If a number of bits is out of range, or no parameter has two dimensions; else as
            :func:`neighborhood`.

    Example:
        >>> from tiltsam.sharpness import supervised
        >>> data = [(torch.randn(8, 2), torch.randn(8, 1))]
        >>> rounding(nn.Linear(2, 1), supervised(nn.functional.mse_loss), data).losses.shape
        torch.Size([2])
    """
    widths = tuple(bits) if isinstance(bits, Sequence) else (bits,)
    if not widths or not all(isinstance(width, Integral) and 2 <= width <= 16 for width in widths):
        raise ValueError(f"bits must be one or more integers from 2 to 16, got {bits}")
    losses, distances = [], []
    with LossSurface(model, loss_fn, batches, parameters=parameters, size_of=size_of) as surface:
        if not any(p.ndim > 1 for p in surface.params):
            raise ValueError("no parameter with two or more dimensions to round")
        center = surface.mean_loss()
        for width in widths:
            errors = [_rounding_error(p, width) for p in surface.origin]
            surface.move_to(errors)
            losses.append(surface.mean_loss(f" at {width} bits"))
            distances.append(total_norm(errors).item())
    return Rounding(
        widths,
        center,
        torch.tensor(losses, dtype=torch.float64, device="cpu"),
        torch.tensor(distances, dtype=torch.float64, device="cpu"),
    )


def _rounding_error(weight: Tensor, bits: int) -> Tensor:
    """Return ``rounded - weight``, with one scale per row; zero for parameters with fewer than two dimensions."""
    weight = weight.to(at_least_float32(weight))
    if weight.ndim < 2:
        return torch.zeros_like(weight)
    largest = weight.abs().amax(dim=tuple(range(1, weight.ndim)), keepdim=True)
    scale = torch.where(largest > 0, largest / (2 ** (bits - 1) - 1), 1.0)
    return scale * torch.round(weight / scale) - weight


def _add_noise(surface: LossSurface, std: float, seed: int, sample: int) -> None:
    """Move the parameters to ``origin + std * N(0, I)``, one parameter of noise at a time in memory."""
    random = generator(surface.device, Purpose.NEIGHBORHOOD, seed, sample)
    surface.move_to(
        torch.randn(p.shape, generator=random, device=surface.device, dtype=at_least_float32(p)).mul_(std)
        for p in surface.params
    )


def _leave_one_out(losses: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """Return the t-weighted mean and variance of all losses but the i-th, for every i; NaN variances for two losses."""
    num = len(losses)
    means, variances = [], []
    draws = torch.arange(num, device=losses.device)
    for rows in torch.split(draws, max(1, _LEAVE_ONE_OUT_CELLS // num)):
        others = draws != rows[:, None]
        weights = (t * (losses - losses.max())).where(others, -math.inf).softmax(1)
        mean = weights @ losses
        means.append(mean)
        variances.append((weights * (losses - mean[:, None]).square()).sum(1))
    return torch.cat(means), torch.cat(variances) if num > 2 else torch.full_like(losses, math.nan)


def _jackknife(left_out: list[Tensor]) -> Tensor:
    """Return standard errors from estimates with one draw left out each: ``sqrt((n-1)/n sum (x_i - mean)^2)``."""
    rows = torch.stack(left_out)
    num = rows.shape[1]
    return (rows.var(1, correction=0) * (num - 1)).sqrt()


def _check_stds(std: float | Sequence[float]) -> list[float]:
    stds: list[float] = torch.as_tensor(std, dtype=torch.float64, device="cpu").reshape(-1).tolist()
    if not stds or not all(math.isfinite(s) and s > 0 for s in stds):
        raise ValueError(f"std must be one or more finite numbers > 0, got {std}")
    return stds
