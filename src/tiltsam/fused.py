"""One kernel for each thing that happens to all parameters: Triton, float32, one CUDA device.

The foreach kernels of :mod:`tiltsam.vectors` read and write every vector once per elementary operation, and torch has
no fused random numbers at all: on a ResNet-18 drawing the noise alone is 62 launches. Here each stage of a sample is
one launch over all tensors, which find each other through tables of addresses:

=============================  =============================================  ===================================
stage                          reads and writes, in vectors                   foreach kernels for the same
=============================  =============================================  ===================================
``point <- θ + scale z``       2 (the noise is drawn twice, never stored)     7
norm of a gradient, twice      2                                              2
``point <- point + ρ n(g)``    4, and ``‖point − θ‖`` comes with it           7, and 4 for the norm
``mean += share (g − mean)``   3, the first time 2                            9
=============================  =============================================  ===================================

That is 11 vectors a sample against 29, in 7 launches against some 90: the scalars (norms, radii, what to scale by) are
found by whichever program of a kernel finishes last. Backing θ up is one more vector in a step, since the first kernel
that moves the point writes the copy on its way. At float32 and the 11.2 million parameters of a ResNet-18 the floor is
11 × 45 MB a sample; ``benchmarks/records`` holds what was measured.

Noise is Philox in counter mode, addressed by (seed, sample, element): the same whatever the launch, hence the same
eagerly and in a captured graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tiltsam.samplers import Draw
from tiltsam.space import Evaluation, Spread
from tiltsam.vectors import dense

try:
    from tiltsam import kernels
except ImportError:  # torch comes without Triton on some platforms; the foreach kernels then do all the work
    kernels = None  # type: ignore[assignment]

__all__ = ["FusedLedger", "FusedVectors", "supported"]

CHUNK = 4096  # elements a program handles: four normals from each of 1024 Philox counters
LANES = CHUNK // 4
WARPS = 4


def supported(tensors: Sequence[Tensor]) -> bool:
    """Whether the kernels can take these tensors: float32, dense, aligned, on one CUDA device, and Triton is there."""
    return (
        kernels is not None
        and len({x.device for x in tensors}) == 1
        and all(x.is_cuda and x.dtype == torch.float32 and dense(x) and x.data_ptr() % 16 == 0 for x in tensors)
        and sum(x.numel() for x in tensors) < 2**31
    )


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
        # Three allocations: kernels are compiled for the alignment of what they get, and rows of one would differ.
        self._owner, self._start, self._length = (
            torch.tensor(x, dtype=torch.int32, device=self.device) for x in (owner, start, length)
        )
        # Two of each: what runs in a branch of a graph must not write what the main line writes.
        self._partial = [self._empty(self.num_chunks) for _ in range(2)]
        self._counter = [torch.zeros((), dtype=torch.int32, device=self.device) for _ in range(2)]
        self._true = torch.ones((), dtype=torch.bool, device=self.device)
        self._infinity = torch.full((), torch.inf, dtype=torch.float32, device=self.device)
        self._dim = sum(x.numel() for x in like)
        self._fixed: dict[str, tuple[list[int], Tensor]] = {}
        self._reserved: Tensor | None = None
        self._filled: list[list[int]] = []

    def fits(self, x: Sequence[Tensor | None]) -> bool:
        """Whether a gradient is complete and laid out as the parameters are."""
        return all(
            a is not None and a.dtype == torch.float32 and a.stride() == s and a.data_ptr() % 16 == 0
            for a, s in zip(x, self._strides, strict=True)
        )

    # ---------------------------------------------------------------- addresses

    def reserve(self, num_tables: int) -> None:
        """Before a capture: room for that many address tables, which the graph reads and :meth:`release` fills."""
        self._load_backups()
        width = len(self._strides) + len(self._strides) % 2  # rows begin at multiples of 16 bytes, as all tables do
        self._reserved = torch.zeros(num_tables, width, dtype=torch.int64, device=self.device)
        self._filled = []

    def release(self) -> list[Tensor]:
        """After a capture: write the addresses, which are the same at every replay; to be kept as long as the graph."""
        tables, self._reserved = self._reserved, None
        assert tables is not None
        if self._filled:
            tables[: len(self._filled), : len(self._strides)].copy_(torch.tensor(self._filled, dtype=torch.int64))
        return [tables, *(table for _, table in self._fixed.values())]

    def _load_backups(self) -> None:
        """Load the kernels that run in graphs alone: code that is not there yet cannot be loaded inside a capture.

        They run over an empty chunk, and write to tensors of no use.
        """
        owner, start, length = (torch.zeros(1, dtype=torch.int32, device=self.device) for _ in range(3))
        table = torch.zeros(2, dtype=torch.int64, device=self.device)
        number = self._empty().zero_()
        flag = torch.zeros((), dtype=torch.bool, device=self.device)
        options = {"BACKUP": True, "LANES": LANES, "num_warps": WARPS}
        kernels.noise_move[(1,)](owner, start, length, table, table, table[0], 0, number, **options)
        counter = torch.zeros((), dtype=torch.int32, device=self.device)
        sums = self._empty(1), counter, number.clone(), self.num_chunks
        kernels.climb[(1,)](owner, start, length, table, table, table, number, number, flag, *sums, **options)

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
        if self._reserved is not None:
            self._filled.append(addresses)
            return self._reserved[len(self._filled) - 1]
        # The allocator of page-locked memory waits for the copy before it lends the memory out again.
        return torch.tensor(addresses, dtype=torch.int64, device="cpu").pin_memory().to(self.device, non_blocking=True)

    # ---------------------------------------------------------------- stages

    def noise_scale(self, seed: Tensor, sample: int, spread: Spread, *, ahead: bool) -> tuple[Tensor, Tensor]:
        """What a sample's noise is to be multiplied by, and the length it then has.

        ``ahead`` says that this runs in a branch of a graph, beside the other stages.
        """
        scale, moved = (self._empty() for _ in range(2))
        radius, std = (x if x is not None else scale for x in spread[:2])  # a missing one is not read
        longest = spread.longest if spread.longest is not None else self._infinity
        self._launch(
            kernels.noise_scale, seed, sample, self._partial[int(ahead)], self._counter[int(ahead)], radius, std,
            longest, scale, moved, self.num_chunks, self._dim, BALL=spread.radius is not None,
        )  # fmt: skip
        return scale, moved

    def noise_move(
        self, point: Tensor, center: Tensor, seed: Tensor, sample: int, scale: Tensor, *, backup: bool
    ) -> None:
        """``point <- center + scale z``; with ``backup`` the point is θ and ``center`` becomes its copy."""
        self._launch(kernels.noise_move, point, center, seed, sample, scale, BACKUP=backup)

    def evaluate(self, gradient: Tensor, loss: Tensor, after: Evaluation | None) -> tuple[Tensor, Tensor]:
        """The norm of a gradient (0 if not finite), and whether it, the loss and what came before are finite."""
        norm = self._empty()
        finite = torch.empty((), dtype=torch.bool, device=self.device)
        sums = self._partial[0], self._counter[0]
        before = self._true if after is None else after.finite
        self._launch(kernels.gradient_norm, gradient, *sums, loss, before, norm, finite, self.num_chunks)
        return norm, finite

    def climb(
        self, point: Tensor, center: Tensor, gradient: Tensor, rho: Tensor, at: Evaluation, *, backup: bool
    ) -> Tensor:
        """``point <- point + ρ n(gradient)`` where finite; returns ``‖point − center‖``. ``backup`` as above."""
        moved = self._empty()
        scale = rho, at.norm, at.finite
        sums = self._partial[0], self._counter[0], moved, self.num_chunks
        self._launch(kernels.climb, point, center, gradient, *scale, *sums, BACKUP=backup)
        return moved

    def ledger(self, tilt: Tensor, num_samples: int) -> FusedLedger:
        """A ledger that is one launch a sample."""
        return FusedLedger(tilt, num_samples)

    def mix(self, mean: Tensor, gradient: Tensor, share: Tensor, valid: Tensor, *, first: bool) -> None:
        """``mean <- mean + share (gradient − mean)`` where ``valid``; the first gradient just replaces the mean."""
        self._launch(kernels.mix, mean, gradient, share, valid, FIRST=first)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def _launch(self, kernel: Any, *args: Any, **options: Any) -> None:
        chunks = self._owner, self._start, self._length
        kernel[(self.num_chunks,)](*chunks, *args, LANES=LANES, num_warps=WARPS, **options)


class FusedLedger:
    """A :class:`~tiltsam.weighing.Ledger` for samples that are tilted: one launch a sample, and none at the end.

    Args:
        tilt: The tilt of the weights.
        num_samples: How many samples the step takes.
    """

    def __init__(self, tilt: Tensor, num_samples: int) -> None:
        self._tilt = tilt
        self._num_samples = num_samples
        self._count = 0
        # loss, effective sample size, how many are not finite, largest loss, total weight; then a row for each of
        # loss, weight, start loss, distance, gradient norm, validity.
        self._board = torch.empty(5 + 6 * num_samples, dtype=torch.float32, device=tilt.device)

    def add(self, draw: Draw, distance: Tensor) -> Tensor:
        """See :class:`~tiltsam.weighing.Ledger`."""
        share = torch.empty_like(self._tilt)
        seen = draw.loss, draw.valid, draw.start_loss, distance, draw.gradient_norm
        kernels.weigh[(1,)](
            *seen, self._tilt, self._board, share, self._count, self._num_samples,
            LAST=self._count == self._num_samples - 1, WIDTH=1 << (self._num_samples - 1).bit_length(), num_warps=1,
        )  # fmt: skip
        self._count += 1
        return share

    def numbers(self) -> dict[str, Tensor]:
        """See :class:`~tiltsam.weighing.Ledger`."""
        loss, size, bad = self._board[:3].unbind()
        losses, weights, starts, distances, norms, _ = self._board[5:].view(6, self._num_samples).unbind()
        return {
            "loss": loss,
            "losses": losses,
            "weights": weights,
            "effective_sample_size": size,
            "start_losses": starts,
            "perturbation_norms": distances,
            "gradient_norms": norms,
            "num_nonfinite": bad.to(torch.int64),
        }
