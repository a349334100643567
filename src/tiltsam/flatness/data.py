"""Mini-batches: tensors in nested tuples, lists and mappings; their size, their device and their parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

__all__ = ["batch_size", "chunks", "cut", "leaves", "to_device", "tree_map"]


def leaves(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors in a batch, depth first."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | tuple | list):
        for item in batch.values() if isinstance(batch, Mapping) else batch:
            yield from leaves(item)


def tree_map(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Return the batch with every tensor replaced by ``function(tensor)``; any mapping becomes a plain dict."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: tree_map(function, item) for key, item in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(tree_map(function, item) for item in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(tree_map(function, item) for item in batch)
    return batch


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with every tensor on ``device``."""
    return tree_map(lambda tensor: tensor.to(device, non_blocking=True), batch)


def batch_size(batch: Any) -> int:
    """Return the number of examples in a batch: the length of its first tensor that has dimensions.

    Raises:
        ValueError: If there is no such tensor.
    """
    for leaf in leaves(batch):
        if leaf.dim() > 0:
            return len(leaf)
    raise ValueError(f"a batch of type {type(batch).__name__} has no tensor to take its size from; pass size_of")


def cut(part: Any, length: int, begin: int, end: int) -> Any:
    """Return rows ``begin`` to ``end`` of a part of a batch of ``length`` examples.

    Anything but a tensor with one row per example (a number, class weights) is returned whole.

    Example:
        >>> cut(torch.arange(4), 4, 1, 3), cut(torch.ones(2), 4, 1, 3)
        (tensor([1, 2]), tensor([1., 1.]))
    """
    return part[begin:end] if isinstance(part, Tensor) and part.dim() > 0 and len(part) == length else part


def chunks(batch: Any, size: int) -> Iterator[Any]:
    """Yield the batch in parts of ``size`` examples; the last one may be smaller.

    Example:
        >>> [len(x) for x, weights in chunks((torch.ones(5, 2), torch.ones(3)), 2)]
        [2, 2, 1]
    """
    length = batch_size(batch)
    for begin in range(0, length, size):
        yield tree_map(partial(cut, length=length, begin=begin, end=begin + size), batch)
