"""Moves of the weights, in the precision that the weights have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tiltsam.warning import warn

__all__ = ["place"]


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
        warn(
            "a step this small is rounded away, or up, by low-precision weights: measure a float32 copy of the model",
        )
