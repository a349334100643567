"""The parts of a mini-batch, cut by examples."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["cut"]


def cut(part: Any, length: int, begin: int, end: int) -> Any:
    """The rows ``begin`` to ``end`` of a part of a batch of ``length`` examples.

    What is not a tensor with a row for each example belongs to all of them (a number, class weights) and stays whole.

    Example:
        >>> cut(torch.arange(4), 4, 1, 3), cut(torch.ones(2), 4, 1, 3)
        (tensor([1, 2]), tensor([1., 1.]))
    """
    return part[begin:end] if isinstance(part, Tensor) and part.dim() > 0 and len(part) == length else part
