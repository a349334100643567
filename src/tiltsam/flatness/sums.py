"""Losses and moves looked at; means and norms over many numbers, in the precision they need."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["block_length", "check_finite", "place", "scalar", "total_norm", "weighted_mean", "wide"]


def scalar(loss: Tensor) -> Tensor:
    """The loss as a 0-dim tensor; a clear error for one that is not a single number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn must return the mean loss of the batch as a scalar tensor, got {shape}")
    return loss.reshape(())


def check_finite(losses: Tensor, where: str = "") -> None:
    """Raise a ValueError that names the first batch whose loss is not finite."""
    bad = (~losses.isfinite()).nonzero()
    if len(bad):
        number = int(bad[0, 0])
        raise ValueError(f"the loss is not finite{where}: {losses[number].item()} on batch {number}")


def weighted_mean(values: Tensor, weights: Tensor) -> tuple[float, float]:
    """The weighted mean of the values of independent batches and its standard error (NaN for a single one)."""
    share = weights / weights.sum()
    mean = share @ values
    if len(values) < 2:
        return float(mean), math.nan
    # sd / sqrt(n) for equal weights; the denominator is Bessel's correction for unequal ones.
    squares = share.square()
    return float(mean), float((squares @ (values - mean).square() / (1 - squares.sum())).sqrt())


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of all tensors as one vector, at least in float32, in blocks of :func:`block_length`."""
    blocks = [block for x in tensors for block in torch.split(x.reshape(-1), block_length(x))]
    norms = [torch.linalg.vector_norm(block, dtype=wide(block)) for block in blocks]
    total: Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0]) for n in norms]))
    return total


def place(params: Sequence[Tensor], origin: Iterable[Tensor], moves: Iterable[Tensor]) -> None:
    """Set the parameters to ``origin + move``; only the sum is rounded to their precision.

    Warns:
        UserWarning: If rounding makes the way along the moves longer or shorter by more than a tenth.
    """
    strayed, squares = [], []
    with torch.no_grad():
        for param, saved, move in zip(params, origin, moves, strict=True):
            point = move.to(saved.device) + saved
            param.copy_(point)
            if torch.finfo(param.dtype).bits < 32:
                strayed.append((move.to(point) * (param - point)).sum())
                squares.append(move.square().sum())
    if strayed and abs(sum(x.item() for x in strayed)) > 0.1 * sum(x.item() for x in squares):
        warnings.warn(
            "a step this small is rounded away, or up, by low-precision weights: measure a float32 copy of the model",
            stacklevel=4,
        )


def block_length(tensor: Tensor) -> int:
    """How many elements to sum in one go.

    On a CPU a float32 norm over 1e7 elements in one go is off by 4e-4 and a matrix product by 3e-5; summed in blocks
    they are right to 1e-6 and cost the same. A GPU sums in a tree, and every block costs it a launch.
    """
    return 1 << 17 if tensor.device.type == "cpu" else 1 << 20


def wide(tensor: Tensor) -> torch.dtype:
    """The dtype to compute in: that of the tensor, but float32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)
