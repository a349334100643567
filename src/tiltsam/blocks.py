"""A model's parameters as one vector: what a sampler does with vectors, done block by block.

A block is a list of tensors that one kernel of :mod:`tiltsam.vectors` can take together. Tensors may be missing (a
parameter without gradient), and may be held in parts by several processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tiltsam import vectors
from tiltsam.distributed import Sharding
from tiltsam.memory import Memory

__all__ = ["Block", "BlockVectors"]


class Block(NamedTuple):
    """Positions of tensors that one fused kernel can take together."""

    device: torch.device
    indices: tuple[int, ...]
    group: int  # the parameter group, where blocks do not cross groups


class BlockVectors:
    """The vectors of a :class:`~tiltsam.space.Space` over some tensors.

    Args:
        like: The tensors of a vector, as this process holds them.
        groups: The parameter group of each.
        dims: The dimensions of each parameter; a complex one has one more here, of real and imaginary parts.
        sharding: How they are split over processes.
        dtype: Of sums over all coordinates.
        foreach: Fused kernels, or the plain loop.
    """

    def __init__(
        self,
        like: Sequence[Tensor],
        groups: Sequence[int],
        dims: Sequence[int],
        *,
        sharding: Sharding,
        dtype: torch.dtype,
        foreach: bool,
    ) -> None:
        self.sharding, self.dtype, self.foreach = sharding, dtype, foreach
        self.device = like[0].device
        self._dims = dims
        self.point = list(like)
        self._zero = torch.zeros((), dtype=dtype, device=self.device)
        self._blocks = _partition(like, [0] * len(like))
        self._group_blocks = _partition(like, groups)
        self._scratch: dict[str, list[Tensor]] = {}
        self.memory = Memory()

    def _writes(self, x: object) -> None:
        """Called before a vector is written."""

    def vector(self, name: str) -> list[Tensor]:
        """See :class:`Space`."""
        if name not in self._scratch:
            self._scratch[name] = [torch.zeros_like(x) for x in self.point]
        return self._scratch[name]

    def save(self, name: str, x: Sequence[Tensor | None]) -> list[Tensor | None]:
        """See :class:`Space`. Missing where ``x`` is missing."""
        kept = self.vector(name)
        self.copy_(kept, x)
        return [None if a is None else k for a, k in zip(x, kept, strict=True)]

    def kept(self, name: str) -> list[Tensor]:
        """See :class:`Space`."""
        return self.memory.vector(name)

    def norm(self, x: Sequence[Tensor | None]) -> Tensor:
        """See :class:`Space`. Missing tensors count as zero."""
        if self.sharding.mesh is not None:
            lengths = {i: torch.linalg.vector_norm(a, dtype=self.dtype) for i, a in enumerate(x) if a is not None}
            return self._total({i: length.square() for i, length in lengths.items()}).sqrt()
        parts = []
        for block in self._blocks:
            if here := [a for i in block.indices if (a := x[i]) is not None]:
                parts.append(vectors.norm(here, self.dtype, foreach=self.foreach).to(self.device))
        total: Tensor = torch.linalg.vector_norm(parts[0] if len(parts) == 1 else torch.cat(parts))
        return total

    def dot(self, x: Sequence[Tensor | None], y: Sequence[Tensor | None]) -> Tensor:
        """See :class:`Space`. Missing tensors count as zero."""
        if self.sharding.mesh is not None:
            both = ((i, a, b) for i, (a, b) in enumerate(zip(x, y, strict=True)) if a is not None and b is not None)
            return self._total({i: (a.to(self.dtype) * b).sum() for i, a, b in both})
        parts = [vectors.dot(a, b, self.dtype).to(self.device) for _, a, b in self._pairs(x, y)]
        return torch.stack(parts).sum()

    def _total(self, numbers: Mapping[int, Tensor]) -> Tensor:
        """The sum of one number for each tensor, where some tensors are held in parts by several ranks."""
        sums = [self._zero, self._zero]
        for i, number in numbers.items():
            sums[self.sharding.split(i)] = sums[self.sharding.split(i)] + number.to(self.device)
        return sums[0] + self.sharding.sum(sums[1])

    def filter_norms(self, x: Sequence[Tensor]) -> list[Tensor]:
        """See :class:`Space`."""
        norms = [_filter_norms(a, dim, self.dtype) for a, dim in zip(x, self._dims, strict=True)]
        if self.sharding.mesh is not None:  # every rank holds a part of each filter of these
            apart = [i for i in range(len(x)) if not self.sharding.rows_are_whole(i)]
            flat = self.sharding.sum(torch.cat([self._zero[None], *(norms[i].reshape(-1).square() for i in apart)]))
            for i, total in zip(apart, flat[1:].sqrt().split([norms[i].numel() for i in apart]), strict=True):
                norms[i] = total.view(norms[i].shape)
        return [norm.to(a.dtype) for norm, a in zip(norms, x, strict=True)]

    def copy_(self, x: Sequence[Tensor], y: Sequence[Tensor | None]) -> None:
        """See :class:`Space`. Where ``y`` is missing, ``x`` becomes zero."""
        self._writes(x)
        for _, a, b in self._pairs(x, y):
            vectors.copy_(a, b, foreach=self.foreach)
        for at, source in zip(x, y, strict=True):
            if source is None:
                at.zero_()

    def scale_(self, x: Sequence[Tensor | None], scale: Tensor) -> None:
        """See :class:`Space`."""
        self._writes(x)
        for block, a, _ in self._pairs(x, x, by_group=scale.dim() > 0):
            vectors.scale_(a, self._scale_for(scale, block), foreach=self.foreach)

    def add_(self, x: Sequence[Tensor], y: Sequence[Tensor | None], alpha: float = 1.0) -> None:
        """See :class:`Space`."""
        self._writes(x)
        for _, a, b in self._pairs(x, y):
            vectors.add_(a, b, alpha=alpha, foreach=self.foreach)

    def add_scaled_(self, x: Sequence[Tensor], y: Sequence[Tensor | None], scale: Tensor) -> None:
        """See :class:`Space`."""
        self._writes(x)
        for block, a, b in self._pairs(x, y, by_group=scale.dim() > 0):
            vectors.add_scaled_(a, b, self._scale_for(scale, block), foreach=self.foreach)

    def stretch_(self, x: Sequence[Tensor | None], w: Sequence[Tensor], eta: Tensor) -> None:
        """See :class:`Space`."""
        self._writes(x)
        for block, a, b in self._pairs(x, w):
            vectors.stretch_(a, b, eta.to(block.device), foreach=self.foreach)

    def keep_(self, x: Sequence[Tensor | None], mask: Tensor) -> None:
        """See :class:`Space`."""
        self._writes(x)
        for block, a, _ in self._pairs(x, x):
            vectors.keep_(a, mask.to(block.device), foreach=self.foreach)

    def select_(self, x: list[Tensor | None], y: Sequence[Tensor | None], mask: Tensor) -> None:
        """See :class:`Space`. A missing tensor counts as zero, and stays missing only if it is in both."""
        self._writes(x)
        for i, (a, b) in enumerate(zip(x, y, strict=True)):
            if a is None and b is not None:
                x[i] = torch.zeros_like(b)
        for block, here, there in self._pairs(x, y):
            vectors.select_(here, there, mask.to(block.device))
        for a, b in zip(x, y, strict=True):
            if a is not None and b is None:
                vectors.keep_([a], ~mask.to(a.device), foreach=self.foreach)

    def map_(
        self, x: Sequence[Tensor | None], function: Callable[..., Tensor], *others: Sequence[Tensor | None] | Tensor
    ) -> None:
        """See :class:`Space`. Where ``x`` is missing, nothing happens; where another is, it counts as zero."""
        self._writes(x)
        for i, a in enumerate(x):
            if a is not None:
                rest = (y.to(a.device) if isinstance(y, Tensor) else y[i] for y in others)
                a.copy_(function(a, *(torch.zeros_like(a) if b is None else b for b in rest)))

    def _copy(self, x: list[Tensor], y: list[Tensor]) -> None:
        for _, a, b in self._pairs(x, y):
            vectors.copy_(a, b, foreach=self.foreach)

    def _pairs(
        self, x: Sequence[Tensor | None], y: Sequence[Tensor | None], *, by_group: bool = False
    ) -> Iterator[tuple[Block, list[Tensor], list[Tensor]]]:
        """The tensors that are there in both, block by block."""
        for block in self._group_blocks if by_group else self._blocks:
            both = [(a, b) for i in block.indices if (a := x[i]) is not None and (b := y[i]) is not None]
            if both:
                yield block, [a for a, _ in both], [b for _, b in both]

    def _scale_for(self, scale: Tensor, block: Block) -> Tensor:
        return (scale if scale.dim() == 0 else scale[block.group]).to(block.device)


def _partition(tensors: Sequence[Tensor], groups: Sequence[int]) -> list[Block]:
    found: dict[tuple[torch.device, torch.dtype, int], list[int]] = {}
    for i, (x, group) in enumerate(zip(tensors, groups, strict=True)):
        found.setdefault((x.device, x.dtype, group), []).append(i)
    return [Block(device, tuple(at), group) for (device, _, group), at in found.items()]


def _filter_norms(w: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The norm of each filter of a parameter of ``dim`` dimensions, shaped to be multiplied with it; in one kernel."""
    inner = tuple(range(1, w.dim())) if dim > 1 else None
    norms: Tensor = torch.linalg.vector_norm(w, dim=inner, keepdim=inner is not None, dtype=dtype)
    return norms
