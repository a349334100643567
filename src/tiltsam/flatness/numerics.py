"""Arithmetic of the measurements: means with their errors, long sums, random signs, rounding of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tiltsam.space.validation import warn

__all__ = [
    "Estimate",
    "at_least_float32",
    "block_length",
    "finite_losses",
    "rademacher_",
    "total_norm",
    "weighted_mean",
    "write_sum",
]


class Estimate(NamedTuple):
    """A number and its standard error."""

    value: float
    """The number."""
    error: float
    """Its standard error."""


def weighted_mean(values: Tensor, weights: Sequence[float] | None = None) -> Estimate:
    """Return the mean of independent values (float64, on the host) and its standard error, NaN for a single value.

    Args:
        values: The values.
        weights: Positive weights; equal ones by default, for which the error is ``std / sqrt(n)``.
    """
    raw = torch.ones_like(values) if weights is None else torch.tensor(weights, dtype=torch.float64, device="cpu")
    shares = raw / raw.sum()
    mean = shares @ values
    if len(values) < 2:
        return Estimate(float(mean), math.nan)
    squares = shares.square()
    variance = squares @ (values - mean).square() / (1 - squares.sum())  # Bessel's correction for unequal weights
    return Estimate(float(mean), float(variance.sqrt()))


def finite_losses(losses: Sequence[Tensor], where: str = "") -> Tensor:
    """Return the losses of all batches as one float64 tensor on the host, in one transfer.

    Raises:
        ValueError: If a loss is not finite; it names the first such batch, and ``where`` the weights are.
    """
    host = torch.stack(list(losses)).to("cpu", torch.float64)
    bad = (~host.isfinite()).nonzero()
    if len(bad):
        number = int(bad[0, 0])
        raise ValueError(f"the loss is not finite{where}: got {host[number].item()} on batch {number}")
    return host


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the Euclidean norm of all tensors as one vector, computed in float32 or better."""
    norms = [
        torch.linalg.vector_norm(block, dtype=at_least_float32(block))
        for x in tensors
        for block in torch.split(x.reshape(-1), block_length(x))
    ]
    total: Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0]) for n in norms]))
    return total


def block_length(tensor: Tensor) -> int:
    """Return how many elements to sum at once.

    On a CPU a float32 norm over 1e7 elements at once is off by 4e-4 and a matrix product by 3e-5; summed in blocks
    they are right to 1e-6 and cost the same. A GPU sums in a tree, and each block costs it a launch.
    """
    return 1 << 17 if tensor.device.type == "cpu" else 1 << 20


def at_least_float32(tensor: Tensor) -> torch.dtype:
    """Return the dtype to compute in: float32 for half precision, else the tensor's own."""
    return torch.promote_types(tensor.dtype, torch.float32)


def rademacher_(vector: Tensor, random: torch.Generator) -> Tensor:
    """Fill a vector with random signs, in place."""
    # U(-1/2, 1/2) can be exactly 0, whose sign is 0: the second pass maps it to 1.
    return vector.uniform_(-0.5, 0.5, generator=random).sign_().add_(0.5).sign_()


def write_sum(out: Sequence[Tensor], start: Iterable[Tensor], offsets: Iterable[Tensor]) -> None:
    """Set ``out`` to ``start + offsets``, tensor by tensor; only the sum is rounded to the precision of ``out``.

    Warns:
        UserWarning: If rounding to half precision changes the distance along the offsets by more than a tenth.
    """
    lost, squares = [], []
    with torch.no_grad():
        for x, base, offset in zip(out, start, offsets, strict=True):
            point = offset.to(base.device) + base
            x.copy_(point)
            if torch.finfo(x.dtype).bits < 32:
                lost.append((offset.to(point) * (x - point)).sum())
                squares.append(offset.square().sum())
    if lost and abs(sum(x.item() for x in lost)) > 0.1 * sum(x.item() for x in squares):
        warn(
            "low-precision weights round a step this small away, or up; measure a float32 copy of the model",
            UserWarning,
        )
