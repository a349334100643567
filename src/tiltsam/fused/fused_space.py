"""A :class:`ParameterSpace` whose stages are one Triton launch each: float32 weights on one CUDA device.

Torch's foreach kernels read and write every vector once per elementary operation, and torch has no fused random
numbers: on a ResNet-18 drawing the noise alone takes 62 launches. Here each stage of a sample is one launch over all
tensors, which are found through tables of addresses:

=============================  =============================================  ===================================
stage                          reads and writes, in vectors                   foreach kernels for the same
=============================  =============================================  ===================================
``point <- θ + scale z``       2 (the noise is drawn twice, never stored)     7
norm of a gradient, twice      2                                              2
``point <- point + ρ n(g)``    4, including ``‖point − θ‖``                   7, and 4 for the norm
``mean += share (g − mean)``   3, the first time 2                            9
=============================  =============================================  ===================================

That is 11 vectors a sample instead of 29, in 7 launches instead of about 90. ``benchmarks/records`` has measurements.

Noise is Philox in counter mode, indexed by (seed, sample, element): the same eagerly and in a captured graph.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from tiltsam.distributed import is_sharded
from tiltsam.space.gradient_mean import Gradient
from tiltsam.space.parameter_space import ParameterSpace
from tiltsam.space.protocol import Draw, Evaluation, Spread
from tiltsam.space.step_record import HEADER, StepRecord, Weighting, unpack
from tiltsam.space.tensor_lists import is_dense
from tiltsam.tilting import StreamingTilt

__all__ = ["AddressTables", "FusedSpace"]

CHUNK = 4096  # elements of a program: four normals from each of 1024 Philox counters
LANES = CHUNK // 4
WARPS = 4
FILTER_BLOCK = 1024


kernels: Any = None  # the module of kernels, once loaded


def _load_kernels() -> bool:
    """Import the kernels when they are first needed; return False on platforms without Triton."""
    global kernels
    if kernels is None:
        with contextlib.suppress(ImportError):
            kernels = importlib.import_module("tiltsam.fused.kernels")
    return kernels is not None


class FusedSpace(ParameterSpace):
    """The space with Triton kernels. Gradients that are incomplete or laid out differently fall back to torch's."""

    @staticmethod
    def supports(groups: Sequence[Sequence[Tensor]]) -> bool:
        """Return whether the kernels can take these parameters: float32, dense, aligned, on one CUDA device."""
        params = [p for group in groups for p in group if p.requires_grad and p.numel()]
        return (
            _load_kernels()
            and not any(is_sharded(p) for p in params)
            and len({p.device for p in params}) == 1
            and all(p.is_cuda and p.dtype == torch.float32 and is_dense(p) for p in params)
            and all(p.data_ptr() % 16 == 0 for p in params)
            # The kernels count elements of a tensor, and Philox counters of the model, in 32 bits.
            and all(p.numel() <= 2**31 - CHUNK for p in params)
            and sum(-(-p.numel() // CHUNK) for p in params) * LANES < 2**31
        )

    def __init__(self, groups: Sequence[Sequence[Tensor]], **options: Any) -> None:
        _load_kernels()
        super().__init__(groups, **options)
        self.tables = AddressTables(self.device)
        self._launcher = _Launcher(self._like)
        self._strides = [x.stride() for x in self._like]
        self._gradient_table: Tensor | None = None  # addresses of the last gradient, if the kernels can take it

    def replica(self, point: list[Tensor]) -> Self:
        """See :class:`ParameterSpace`. The copy has its own scratch memory, so it may run concurrently."""
        other = super().replica(point)
        other._launcher = self._launcher.copy()
        return other

    # ---------------------------------------------------------------- stages

    def _norm_if_finite(self, gradient: Gradient, loss: Tensor, after: Evaluation | None) -> tuple[Tensor, Tensor]:
        self._gradient_table = None
        if not self._fits(gradient):
            return super()._norm_if_finite(gradient, loss, after)
        self._gradient_table = self.tables.of(gradient)
        norm, finite = self._launcher.number(), torch.empty((), dtype=torch.bool, device=self.device)
        before = self.true if after is None else after.finite
        self._launcher.launch_sum(
            kernels.gradient_norm, gradient=self._gradient_table, loss=loss, before=before, norm=norm, finite=finite
        )
        return norm, finite

    def _fits(self, gradient: Gradient) -> bool:
        return all(
            g is not None and g.stride() == stride and g.data_ptr() % 16 == 0
            for g, stride in zip(gradient, self._strides, strict=True)
        )

    def _table_of(self, gradient: Sequence[Tensor | None] | None) -> Tensor | None:
        return self._gradient_table if gradient is self._gradient else None

    def add_noise(self, sample: int, spread: Spread) -> None:
        """See :class:`Space`. The noise is never stored."""
        point, center = self._point_table(), self._center_table()
        seed, scale, distance = self.generators.device_seed(self.device), *self._launcher.numbers(2)
        self._launcher.launch_sum(
            kernels.noise_scale,
            seed=seed,
            sample=sample,
            radius=scale if spread.radius is None else spread.radius,  # a missing one is not read
            std=scale if spread.std is None else spread.std,
            max_norm=self._launcher.infinity if spread.max_norm is None else spread.max_norm,
            scale=scale,
            distance=distance,
            dim=self.dim,
            BALL=spread.radius is not None,
        )
        self._launcher.launch(kernels.noise_move, point=point, center=center, seed=seed, sample=sample, scale=scale)
        self._perturbation_norm = distance

    def add_filter_noise(self, sample: int, gamma: Tensor) -> None:
        """See :class:`Space`."""
        if not self._launcher.has_filters:
            super().add_filter_noise(sample, gamma)
            return
        self._launcher.add_filter_noise(
            self._point_table(), self._center_table(), self.generators.device_seed(self.device), sample, gamma
        )

    def ascend(self, at: Evaluation, rho: Tensor) -> None:
        """See :class:`Space`."""
        table = self._table_of(at.gradient)
        if table is None or rho.dim() > 0:
            super().ascend(at, rho)
            return
        distance = self._launcher.number()
        self._launcher.launch_sum(
            kernels.ascend,
            point=self._point_table(),
            center=self._center_table(),
            gradient=table,
            rho=rho,
            norm=at.norm,
            finite=at.finite,
            distance=distance,
        )
        self._perturbation_norm = distance

    def ascend_adaptive(self, at: Evaluation, rho: Tensor, eta: Tensor) -> None:
        """See :class:`Space`."""
        table = self._table_of(at.gradient)
        if table is None or rho.dim() > 0 or self._perturbation_norm is not self.zero:
            super().ascend_adaptive(at, rho, eta)
            return
        norm, distance = self._launcher.numbers(2)
        center = self._center_table()
        self._launcher.launch_sum(kernels.adaptive_norm, center=center, gradient=table, eta=eta, norm=norm)
        self._launcher.launch_sum(
            kernels.adaptive_ascend,
            point=self._point_table(),
            center=center,
            gradient=table,
            eta=eta,
            rho=rho,
            norm=norm,
            finite=at.finite,
            distance=distance,
        )
        self._perturbation_norm = distance

    def zero_unless_(self, x: Sequence[Tensor | None], mask: Tensor) -> None:
        """See :class:`Space`."""
        table = self._table_of(x)
        if table is None:
            super().zero_unless_(x, mask)
        else:
            self._launcher.launch(kernels.zero_unless, x=table, mask=mask)

    def add_to_mean(self, draw: Draw, share: Tensor, *, single: bool) -> None:
        """See :class:`ParameterSpace`."""
        mean, table = self.gradient_mean, self._table_of(draw.gradient)
        first = mean.is_empty
        if single or table is None or not (first or mean.is_complete):
            super().add_to_mean(draw, share, single=single)
            return
        memory = [m for m in mean.allocate(draw.gradient) if m is not None]
        self._launcher.launch(
            kernels.mix,
            mean=self.tables.named("mean", memory),
            gradient=table,
            share=share,
            valid=share if first else draw.valid,  # the first sample has all the weight or none
            FIRST=first,
        )
        mean.mark_complete()

    def step_record(self, weighting: Weighting | None, num_samples: int) -> StepRecord:
        """See :class:`ParameterSpace`."""
        if weighting is None and isinstance(self.tables, ReservedTables):
            return _FusedRecord(self.zero, num_samples)  # any tilt: one sample has all the weight
        tilted = type(weighting) is StreamingTilt and isinstance(weighting.t, Tensor)  # a subclass may differ
        if tilted and not self.ranks.splits_samples:
            return _FusedRecord(weighting.t, num_samples)  # type: ignore[union-attr]
        return super().step_record(weighting, num_samples)

    def _point_table(self) -> Tensor:
        return self.tables.named("point", self.point)

    def _center_table(self) -> Tensor:
        return self.tables.named("center", self._center)


class AddressTables:
    """Addresses of the tensors of vectors, on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._named: dict[str, tuple[list[int], Tensor]] = {}

    def named(self, name: str, x: Sequence[Tensor]) -> Tensor:
        """Return the table of a vector that stays in place."""
        addresses = [a.data_ptr() for a in x]
        known = self._named.get(name)
        if known is None or known[0] != addresses:
            known = (addresses, self._upload(addresses))
            self._named[name] = known
        return known[1]

    def of(self, x: Sequence[Tensor | None]) -> Tensor:
        """Return the table of a gradient, which is elsewhere in every pass."""
        return self._upload([a.data_ptr() for a in x if a is not None])

    def _upload(self, addresses: list[int]) -> Tensor:
        # The allocator of pinned memory waits for the copy before it reuses the memory.
        table = torch.tensor(addresses, dtype=torch.int64, device="cpu").pin_memory()
        return table.to(self._device, non_blocking=True)


class ReservedTables(AddressTables):
    """Tables of a graph that is being captured: allocated before, filled after the capture.

    Args:
        device: The device.
        num_tables: How many tables the graph needs at most.
        num_tensors: Addresses of a table.
    """

    def __init__(self, device: torch.device, num_tables: int, num_tensors: int) -> None:
        super().__init__(device)
        width = num_tensors + num_tensors % 2  # rows start at multiples of 16 bytes, as all tables do
        self.memory = torch.zeros(num_tables, width, dtype=torch.int64, device=device)
        self._rows: list[list[int]] = []

    def _upload(self, addresses: list[int]) -> Tensor:
        self._rows.append(addresses)
        return self.memory[len(self._rows) - 1]

    def fill(self) -> None:
        """Write the addresses, which are the same at every replay."""
        for row, addresses in zip(self.memory, self._rows, strict=False):
            row[: len(addresses)].copy_(torch.tensor(addresses, dtype=torch.int64))


class _FusedRecord(StepRecord):
    """A record of tilted samples: one launch a sample, none at the end.

    Args:
        tilt: The tilt of the weights.
        num_samples: Number of samples of the step.
    """

    def __init__(self, tilt: Tensor, num_samples: int) -> None:
        super().__init__(None)
        self._tilt, self._num_samples = tilt, num_samples
        self._packed = torch.empty(HEADER + 6 * num_samples, dtype=torch.float32, device=tilt.device)

    def add(self, draw: Draw, perturbation_norm: Tensor) -> Tensor:
        """See :class:`StepRecord`."""
        share, count, total = torch.empty_like(self._tilt), len(self._draws), self._num_samples
        kernels.weigh[(1,)](
            draw.loss, draw.valid, draw.start_loss, perturbation_norm, draw.gradient_norm, self._tilt, self._packed,
            share, count, total, LAST=count == total - 1, WIDTH=1 << (total - 1).bit_length(), num_warps=1,
        )  # fmt: skip
        self._draws.append(draw._replace(gradient=None))
        self.valid.append(draw.valid)
        return share

    def loss(self) -> Tensor:
        """See :class:`StepRecord`."""
        return unpack(self._packed)[0]

    def table(self) -> Tensor:
        """See :class:`StepRecord`."""
        return unpack(self._packed)[1]

    def pack(self) -> Tensor:
        """See :class:`StepRecord`."""
        return self._packed


class _Launcher:
    """Launches kernels over all elements of a set of parameters.

    Args:
        like: The parameters; every vector has their shapes and strides.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._device = like[0].device
        self._like = like
        owner, start, length = [], [], []
        for i, x in enumerate(like):
            for at in range(0, x.numel(), CHUNK):
                owner.append(i)
                start.append(at)
                length.append(min(CHUNK, x.numel() - at))
        self._num_chunks = len(owner)
        # Separate allocations: kernels are compiled for the alignment of their arguments, which rows would not share.
        self._chunks = {"owners": self._int32(owner), "starts": self._int32(start), "lengths": self._int32(length)}
        self.infinity = torch.full((), torch.inf, dtype=torch.float32, device=self._device)
        self.has_filters = all(x.dim() < 2 or x.stride(0) * x.shape[0] == x.numel() for x in like)
        self._filters: dict[str, Tensor] = {}
        self._num_filters = 0
        self._allocate_scratch()

    def _allocate_scratch(self) -> None:
        self._partial = torch.empty(self._num_chunks, dtype=torch.float32, device=self._device)
        self._counter = torch.zeros((), dtype=torch.int32, device=self._device)
        self._filter_norms = torch.empty(self._num_filters, dtype=torch.float32, device=self._device)

    def copy(self) -> Self:
        """Return a launcher with its own scratch memory. Tables are shared: a capture could not upload them again."""
        other = copy.copy(self)
        other._allocate_scratch()
        return other

    def launch(self, kernel: Any, **arguments: Any) -> None:
        """Launch a kernel with one program per chunk."""
        kernel[(self._num_chunks,)](**self._chunks, **arguments, LANES=LANES, num_warps=WARPS)

    def launch_sum(self, kernel: Any, **arguments: Any) -> None:
        """Launch a kernel that also sums over all chunks."""
        self.launch(kernel, **arguments, partial=self._partial, counter=self._counter, count=self._num_chunks)

    def add_filter_noise(self, point: Tensor, center: Tensor, seed: Tensor, sample: int, gamma: Tensor) -> None:
        """``point <- center + γ ‖filter‖ z``."""
        if not self._filters:
            self._make_filters()
        f, norms = self._filters, self._filter_norms
        kernels.filter_norms[(self._num_filters,)](
            f["owners"], f["starts"], f["lengths"], center, norms, BLOCK=FILTER_BLOCK, num_warps=WARPS
        )
        self.launch(
            kernels.filter_noise_move,
            point=point,
            center=center,
            seed=seed,
            sample=sample,
            gamma=gamma,
            norms=norms,
            first_filters=f["first"],
            filter_sizes=f["sizes"],
        )

    def _make_filters(self) -> None:
        """Lay out the filters: slices along the first dimension, or a whole tensor of one dimension."""
        names = ("owners", "starts", "lengths", "first", "sizes")
        owner, start, length, first, size = lists = tuple[list[int], ...]([] for _ in names)
        for i, x in enumerate(self._like):
            rows = x.shape[0] if x.dim() > 1 else 1
            first.append(len(owner))
            size.append(x.numel() // rows)
            for r in range(rows):
                owner.append(i)
                start.append(r * size[-1])
                length.append(size[-1])
        self._filters = {name: self._int32(values) for name, values in zip(names, lists, strict=True)}
        self._num_filters = len(owner)
        self._allocate_scratch()

    def number(self) -> Tensor:
        """Return an uninitialised scalar."""
        return torch.empty((), dtype=torch.float32, device=self._device)

    def numbers(self, count: int) -> list[Tensor]:
        """Return uninitialised scalars."""
        return [self.number() for _ in range(count)]

    def _int32(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)
