"""The gradient of a step: a running weighted mean over its samples, kept in one vector."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tiltsam.distributed import Ranks, Sharding, local_part
from tiltsam.space.tensor_lists import Block, allocate, zero_unless_

__all__ = ["GradientMean"]

Gradient = list[Tensor | None]


class GradientMean:
    """Running mean ``mean += share (gradient − mean)``.

    The gradient of a step with one sample is used as it is: it needs no second vector.

    Args:
        params: The parameters that receive the mean as their gradient.
        like: Tensors of the mean's shapes: what this process holds of the parameters, as real tensors.
        blocks: Tensors that one foreach call can take together.
        sharding: How the parameters are split over processes.
        ranks: The processes that take a step together.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        like: Sequence[Tensor],
        blocks: Sequence[Block],
        sharding: Sharding,
        ranks: Ranks,
    ) -> None:
        self._params, self._like, self._blocks, self._sharding, self._ranks = params, like, blocks, sharding, ranks
        self._memory: Gradient = [None] * len(params)
        self._buffers: list[Tensor] = []  # flat buffers behind the memory
        self._single: Gradient | None = None  # the gradient of a step with one sample
        self._seen = [False] * len(params)

    def begin_step(self) -> None:
        """Reset the mean.

        If ``.grad`` still aliases the gradient of the last one-sample step, release it: keeping it to restore after an
        error would cost one more vector of memory.
        """
        for p, g in zip(self._params, self._single or (), strict=False):
            if g is not None and p.grad is not None and local_part(p.grad).data_ptr() == g.data_ptr():
                p.grad = None
        self._single = None
        self._seen = [False] * len(self._params)

    def set(self, gradient: Gradient) -> None:
        """Use the gradient of the only sample of a step as it is."""
        self._single = list(gradient)
        self._seen = [g is not None for g in gradient]

    def add(self, gradient: Gradient, share: Tensor, valid: Tensor) -> None:
        """Add a gradient; it is overwritten.

        A gradient that is not valid counts as zero, and so does a first gradient without weight. A parameter without a
        gradient in this pass counts as zero; one without a gradient in the whole step keeps ``None``.

        Args:
            gradient: The gradient.
            share: Its share of the total weight so far.
            valid: Whether it counts.
        """
        first = self.is_empty
        memory = self.allocate(gradient)
        for block in self._blocks:
            part = share.to(block.device)
            here = [(m, g, i) for i in block.indices if (m := memory[i]) is not None and (g := gradient[i]) is not None]
            means, gradients = [m for m, _, _ in here], [g for _, g, _ in here]
            if here and first:  # its share is 1, or 0 if it has no weight
                torch._foreach_copy_(means, gradients)
                zero_unless_(means, part > 0)
            elif here:
                for m, _, i in here:
                    if not self._seen[i]:
                        m.zero_()
                zero_unless_(gradients, valid.to(block.device))
                torch._foreach_mul_(means, 1 - part)
                torch._foreach_mul_(gradients, part)
                torch._foreach_add_(means, gradients)
            missing = [m for i in block.indices if (m := memory[i]) is not None and gradient[i] is None]
            if missing and not first:
                torch._foreach_mul_(missing, 1 - part)
        self._seen = [seen or g is not None for seen, g in zip(self._seen, gradient, strict=True)]

    @property
    def seen(self) -> tuple[bool, ...]:
        """Which parameters have had a gradient in this step."""
        return tuple(self._seen)

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been added in this step."""
        return not any(self._seen)

    @property
    def is_complete(self) -> bool:
        """Whether every parameter has had a gradient in this step."""
        return all(self._seen)

    def allocate(self, gradient: Gradient) -> Gradient:
        """Allocate memory for parameters that have a gradient for the first time; return the memory of all."""
        everywhere = self._ranks.splits_samples  # ranks need one layout, whichever parameters have a gradient on each
        missing = [i for i, g in enumerate(gradient) if (everywhere or g is not None) and self._memory[i] is None]
        if missing:
            new, buffers = allocate([self._like[i] for i in missing])
            self._buffers += buffers
            for i, mean in zip(missing, new, strict=True):
                self._memory[i] = mean
        return self._memory

    def mark_complete(self) -> None:
        """Note that a kernel has added a gradient of every parameter."""
        self._seen = [True] * len(self._params)

    @property
    def tensors(self) -> Gradient:
        """The mean; ``None`` for parameters without a gradient in this step."""
        if self._single is not None:
            return self._single
        return [mean if seen else None for mean, seen in zip(self._memory, self._seen, strict=True)]

    def scale_(self, factor: Tensor) -> None:
        """Multiply the mean by a scalar."""
        tensors = self.tensors
        for block in self._blocks:
            if here := [x for i in block.indices if (x := tensors[i]) is not None]:
                torch._foreach_mul_(here, factor.to(block.device))

    def sum_over_ranks(self, weight: Tensor, seen: list[bool]) -> None:
        """Replace the mean by the sum over the ranks that share samples, this rank's multiplied by ``weight``."""
        for mean, here in zip(self._memory, self._seen, strict=True):
            if mean is not None and not here:
                mean.zero_()  # other ranks may have a gradient here
        self._seen = seen
        for buffer in self._buffers:
            buffer.mul_(weight.to(buffer.device))
            self._ranks.sum_over_samples(buffer)

    def assign(self) -> None:
        """Assign the mean to ``.grad`` of the parameters."""
        for i, (p, mean) in enumerate(zip(self._params, self.tensors, strict=True)):
            if mean is not None and self._sharding.needs_views:
                mean = self._sharding.wrap(i, torch.view_as_complex(mean) if p.is_complex() else mean)
            p.grad = mean

    def discard(self) -> None:
        """Discard a partial mean: zero any ``.grad`` that still aliases it."""
        for p, mean, seen in zip(self._params, self._memory, self._seen, strict=True):
            if seen and p.grad is not None and mean is not None and local_part(p.grad).data_ptr() == mean.data_ptr():
                mean.zero_()
