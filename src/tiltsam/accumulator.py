"""The gradient handed to the base optimizer: a running weighted mean of those that a step's samples gave."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tiltsam import vectors
from tiltsam.blocks import Block
from tiltsam.distributed import Sharding, World, local_part
from tiltsam.fused import FusedVectors

__all__ = ["Accumulator"]

Gradient = list[Tensor | None]


class Accumulator:
    """One vector, allocated at the first step and kept in place from then on.

    Args:
        params: The parameters that get the mean as their gradient.
        blocks: Which of their tensors one kernel can take together.
        sharding: How they are split over processes.
        world: The processes that take a step together.
        fused: The fused kernels, where they can be used.
        foreach: Fused kernels on lists, or the plain loop.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        blocks: Sequence[Block],
        *,
        sharding: Sharding,
        world: World,
        fused: FusedVectors | None,
        foreach: bool,
    ) -> None:
        self._params, self._blocks, self._sharding, self._world = params, blocks, sharding, world
        self._fused, self._foreach = fused, foreach
        self._mean: Gradient = [None] * len(params)
        self._buffers: list[Tensor] = []  # the memory it lies in
        self._seen: list[bool] = []
        self.begin()

    def begin(self) -> None:
        """Before a step: nothing has been added yet."""
        self._seen = [False] * len(self._params)  # which parameters had a gradient in this step

    def add(
        self,
        gradient: Gradient,
        table: Tensor | None,
        share: Tensor,
        valid: Tensor,
        like: Sequence[Tensor],
        *,
        first: bool,
        keep: bool = False,
    ) -> None:
        """Mix a gradient into the mean: ``mean += share (gradient − mean)``. May overwrite it unless ``keep``.

        A gradient that is not ``valid`` counts as zero (its share is zero too), and so does a first one without weight.
        So does a parameter without gradient in this pass; one without any in the whole step keeps ``None``.

        Args:
            gradient: The gradient.
            table: Its addresses, where the fused kernels can take it.
            share: Its share of the weight so far.
            valid: Whether it counts.
            like: Tensors of the mean's shapes.
            first: Whether it is the first of the step.
            keep: Leave the gradient as it is. Costs a copy, except for the first of the step.
        """
        self._make_room(gradient, like)
        if self._fused is not None and table is not None and (first or all(self._seen)):
            mean = self._fused.named("mean", [m for m in self._mean if m is not None])
            # The first one's share is all or nothing, and tells as much as a truth value.
            self._fused.mix(mean, table, share, share if first else valid, first=first)
            self._seen = [True] * len(self._params)
            return
        for block in self._blocks:
            part = share.to(block.device)
            ok = part > 0 if first else valid.to(block.device)
            new = [i for i in block.indices if gradient[i] is not None and not self._seen[i]]
            old = [i for i in block.indices if gradient[i] is not None and self._seen[i]]
            gone = [i for i in block.indices if gradient[i] is None and self._seen[i]]
            if new:
                vectors.keep_copy_(_pick(self._mean, new), _pick(gradient, new), ok, foreach=self._foreach)
                if not first:
                    vectors.scale_(_pick(self._mean, new), part, foreach=self._foreach)
            if old:
                mine = [g.clone() if keep else g for g in _pick(gradient, old)]
                vectors.keep_(mine, ok, foreach=self._foreach)
                vectors.lerp_(_pick(self._mean, old), mine, part, foreach=self._foreach)
            if gone:
                vectors.scale_(_pick(self._mean, gone), 1 - part, foreach=self._foreach)
        self._seen = [seen or g is not None for seen, g in zip(self._seen, gradient, strict=True)]

    def _make_room(self, gradient: Gradient, like: Sequence[Tensor]) -> None:
        """Memory for every parameter that has a gradient and none yet: at the first step, as a rule for all."""
        everywhere = self._world.splits_samples  # one layout for all ranks, whose gradients may be of other parameters
        missing = [i for i, g in enumerate(gradient) if (everywhere or g is not None) and self._mean[i] is None]
        if missing:
            new, buffers = vectors.allocate([like[i] for i in missing])
            self._buffers += buffers
            for i, mean in zip(missing, new, strict=True):
                self._mean[i] = mean

    def scale_(self, factor: Tensor) -> None:
        """Multiply the mean."""
        for buffer in self._buffers:
            buffer.mul_(factor.to(buffer.device))

    def seen(self, dtype: torch.dtype) -> Tensor:
        """Which parameters had a gradient, as numbers that ranks can add up."""
        return torch.tensor(self._seen, dtype=dtype)

    def join(self, weight: Tensor, seen: list[bool]) -> None:
        """Put the means of the ranks that share samples together: this one's counts ``weight`` of the whole."""
        for mean, here in zip(self._mean, self._seen, strict=True):
            if mean is not None and not here:
                mean.zero_()  # other ranks may have a gradient where this one has none
        self._seen = seen
        self.scale_(weight)
        for buffer in self._buffers:
            self._world.sum_over_samples(buffer)

    def hand_over(self) -> None:
        """Make the mean the gradient of every parameter that had one in any pass."""
        for i, (p, mean, seen) in enumerate(zip(self._params, self._mean, self._seen, strict=True)):
            p.grad = None if not seen or mean is None else self._sharding.wrap(i, _like(mean, p))

    def drop(self) -> None:
        """Half a sum is none: where a parameter still has the mean for its gradient, that becomes zero."""
        for p, mean, seen in zip(self._params, self._mean, self._seen, strict=True):
            if seen and p.grad is not None and mean is not None and local_part(p.grad).data_ptr() == mean.data_ptr():
                mean.zero_()


def _like(real: Tensor, p: Tensor) -> Tensor:
    return torch.view_as_complex(real) if p.is_complex() else real


def _pick(x: Sequence[Tensor | None], indices: Sequence[int]) -> list[Tensor]:
    return [a for i in indices if (a := x[i]) is not None]
