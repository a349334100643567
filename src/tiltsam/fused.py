"""One kernel for each thing that happens to all parameters: Triton, float32, one CUDA device.

The foreach kernels of :mod:`tiltsam.vectors` read and write every vector once per elementary operation, and torch has
no fused random numbers at all: on a ResNet-18 drawing the noise alone is 62 launches. Here each stage of a sample is
one launch over all tensors, which find each other through tables of addresses:

=============================  =============================================  ===================================
stage                          reads and writes, in vectors                   foreach kernels for the same
=============================  =============================================  ===================================
``point <- θ + scale z``       2 (the noise is drawn twice, never stored)     7
norm of a gradient             1                                              1
``point <- point + scale g``   4, and ``‖point − θ‖`` comes with it           7, and 4 for the norm
``mean += share (g − mean)``   3                                              9
=============================  =============================================  ===================================

That is 11 vectors a sample against 29, in 8 launches against some 90. At float32 and the 11.2 million parameters of a
ResNet-18 the floor is 11 × 45 MB; ``benchmarks/records`` holds what was measured.

Noise is Philox in counter mode, addressed by (seed, element): the same whatever the launch, hence the same eagerly and
in a captured graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tiltsam.tilting import StreamingTilt

try:
    from tiltsam import kernels
except ImportError:  # torch comes without Triton on some platforms; the foreach kernels then do all the work
    kernels = None  # type: ignore[assignment]

__all__ = ["FusedTilt", "FusedVectors", "supported"]

CHUNK = 4096  # elements a program handles: four normals from each of 1024 Philox counters
LANES = CHUNK // 4


def supported(tensors: Sequence[Tensor]) -> bool:
    """Whether the kernels can take these tensors: float32, dense, aligned, on one CUDA device, and Triton is there."""
    return (
        kernels is not None
        and len({x.device for x in tensors}) == 1
        and all(x.is_cuda and x.dtype == torch.float32 and _dense(x) and x.data_ptr() % 16 == 0 for x in tensors)
        and sum(x.numel() for x in tensors) < 2**31
    )


def _dense(x: Tensor) -> bool:
    """Every element has a place of its own and there are no gaps, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


class FusedVectors:
    """The kernels, bound to the shapes of one set of parameters.

    Args:
        like: The parameters; every vector handed to a method has their shapes and strides.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        self.device = like[0].device
        self._strides = [x.stride() for x in like]
        owner, start, length = [], [], []
        for i, x in enumerate(like):
            for at in range(0, x.numel(), CHUNK):
                owner.append(i)
                start.append(at)
                length.append(min(CHUNK, x.numel() - at))
        self.num_chunks = len(owner)
        table = torch.tensor([owner, start, length], dtype=torch.int32)
        self._owner, self._start, self._length = table.to(self.device)
        self._partial = torch.empty(self.num_chunks, device=self.device)
        self._fixed: dict[str, tuple[list[int], Tensor]] = {}
        self._pinned: list[Tensor] | None = None
        self._used = 0

    def fits(self, x: Sequence[Tensor | None]) -> bool:
        """Whether a gradient is complete and laid out as the parameters are."""
        return all(
            a is not None and a.dtype == torch.float32 and a.stride() == s and a.data_ptr() % 16 == 0
            for a, s in zip(x, self._strides, strict=True)
        )

    # ---------------------------------------------------------------- addresses

    def reserve(self, num_tables: int) -> None:
        """Before a capture: page-locked memory for the addresses of that many gradients, which a graph then owns."""
        count = len(self._strides)
        self._pinned = [torch.empty(count, dtype=torch.int64, pin_memory=True) for _ in range(num_tables)]
        self._used = 0

    def release(self) -> list[Tensor]:
        """After a capture: the memory that the graph reads its addresses from, to be kept as long as the graph is."""
        kept, self._pinned = self._pinned or [], None
        return kept

    def named(self, name: str, x: Sequence[Tensor]) -> Tensor:
        """The address table of a vector that stays where it is."""
        addresses = [a.data_ptr() for a in x]
        known = self._fixed.get(name)
        if known is None or known[0] != addresses:
            known = (addresses, self._upload(addresses))
            self._fixed[name] = known
        return known[1]

    def table(self, x: Sequence[Tensor | None]) -> Tensor:
        """The address table of a gradient: new at every pass."""
        return self._upload([a.data_ptr() for a in x if a is not None])

    def _upload(self, addresses: list[int]) -> Tensor:
        if self._pinned is None:  # the allocator of page-locked memory waits for the copy before it lends it out again
            host = torch.tensor(addresses, dtype=torch.int64).pin_memory()
        else:
            host = self._pinned[self._used]
            self._used += 1
            host.copy_(torch.tensor(addresses, dtype=torch.int64))
        return host.to(self.device, non_blocking=True)

    # ---------------------------------------------------------------- stages

    def noise_norm(self, seed: Tensor) -> Tensor:
        """``‖z‖`` of the noise that ``seed`` stands for."""
        partial = torch.empty_like(self._partial)  # its own: this may run beside the other stages
        _launch(kernels.noise_squares, self, seed, partial)
        return partial.sum().sqrt()

    def noise_move(self, point: Tensor, center: Tensor, seed: Tensor, scale: Tensor) -> None:
        """``point <- center + scale z``."""
        _launch(kernels.noise_move, self, point, center, seed, scale)

    def evaluate(self, gradient: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of a gradient (0 if not finite), and whether it and the loss are finite."""
        _launch(kernels.squares, self, gradient, self._partial)
        norm = torch.empty((), device=self.device)
        finite = torch.empty((), dtype=torch.bool, device=self.device)
        kernels.judge[(1,)](self._partial, loss, norm, finite, self.num_chunks, BLOCK=4096, num_warps=8)
        return norm, finite

    def climb(self, point: Tensor, center: Tensor, gradient: Tensor, scale: Tensor, finite: Tensor) -> Tensor:
        """``point <- point + scale gradient`` where ``finite``; returns ``‖point − center‖``."""
        _launch(kernels.climb, self, point, center, gradient, scale, finite, self._partial)
        return self._partial.sum().sqrt()

    def tilt(self, t: Tensor) -> FusedTilt:
        """A streaming tilt whose shares are one kernel each."""
        return FusedTilt(t)

    def mix(self, mean: Tensor, gradient: Tensor, share: Tensor, valid: Tensor, *, first: bool) -> None:
        """``mean <- mean + share (gradient − mean)`` where ``valid``; the first gradient just replaces the mean."""
        _launch(kernels.mix, self, mean, gradient, share, valid, FIRST=first)


class FusedTilt:
    """What :class:`~tiltsam.tilting.StreamingTilt` does, in one launch a loss; the aggregate loss comes at the end."""

    def __init__(self, t: Tensor) -> None:
        self._t = t
        self._state = torch.empty(2, device=t.device)
        self._losses: list[Tensor] = []
        self._valid: list[Tensor] = []

    def add(self, losses: Tensor, valid: Tensor) -> Tensor:
        """The share of one more loss in the total weight."""
        share = torch.empty_like(self._t)
        kernels.weigh[(1,)](losses, valid, self._t, self._state, share, FIRST=not self._losses, num_warps=1)
        self._losses.append(losses)
        self._valid.append(valid)
        return share

    def loss(self) -> Tensor:
        """The tilted loss of all that was added."""
        return self._all().loss()

    def weights(self, losses: Tensor, valid: Tensor) -> Tensor:
        """The weights that ``losses`` hold in all that was added."""
        return self._all().weights(losses, valid)

    def _all(self) -> StreamingTilt:
        tilt = StreamingTilt(self._t)
        tilt.add(torch.stack(self._losses), torch.stack(self._valid))
        return tilt


def _launch(kernel: Any, on: FusedVectors, *args: Any, **options: Any) -> None:
    kernel[(on.num_chunks,)](on._owner, on._start, on._length, *args, LANES=LANES, num_warps=4, **options)
