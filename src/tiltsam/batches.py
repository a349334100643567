"""A mini-batch: the tensors in it, wherever they are, and its parts, cut by examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["cut", "leaves", "to_device", "tree_map"]


def cut(part: Any, length: int, begin: int, end: int) -> Any:
    """The rows ``begin`` to ``end`` of a part of a batch of ``length`` examples.

    What is not a tensor with a row for each example belongs to all of them (a number, class weights) and stays whole.

    Example:
        >>> cut(torch.arange(4), 4, 1, 3), cut(torch.ones(2), 4, 1, 3)
        (tensor([1, 2]), tensor([1., 1.]))
    """
    return part[begin:end] if isinstance(part, Tensor) and part.dim() > 0 and len(part) == length else part


def leaves(batch: Any) -> Iterator[Tensor]:
    """The tensors in a batch (tuples, lists and dicts of them), depth first."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for item in batch.values():
            yield from leaves(item)
    elif isinstance(batch, tuple | list):
        for item in batch:
            yield from leaves(item)


def tree_map(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """The batch with every tensor in it replaced by ``function(tensor)``."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        # A plain dict, whatever mapping came in: a model called with ** or [] cannot tell the difference.
        return {key: tree_map(function, item) for key, item in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(tree_map(function, item) for item in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(tree_map(function, item) for item in batch)
    return batch


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on that device."""
    return tree_map(lambda tensor: tensor.to(device, non_blocking=True), batch)
