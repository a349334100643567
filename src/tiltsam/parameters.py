"""The trainable parameters of a model as one vector, with a centre θ and the point being visited.

:class:`ParameterSpace` is all that a sampler sees of a network. It backs the weights up once, lends them out as a
scratch vector, evaluates the closure wherever they stand, and puts every bit back when the visit ends, however it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tiltsam import fused, vectors
from tiltsam.accumulator import Accumulator
from tiltsam.blocks import BlockVectors
from tiltsam.branches import Branch
from tiltsam.checks import check_gradient, check_kind, check_storage
from tiltsam.distributed import Parallel, Sharding, World, local_gradient, local_part, reshard
from tiltsam.passes import CapturedRandom, NeedsGraphError, Passes, forward_only
from tiltsam.scaling import LossScaling
from tiltsam.settings import DeviceSettings
from tiltsam.space import EPS, Evaluation, Spread
from tiltsam.streams import Streams
from tiltsam.tilting import StreamingTilt
from tiltsam.weighing import Ledger, OneSample, TorchLedger, Weighing

__all__ = ["Closure", "ParameterSpace"]

Closure: TypeAlias = Callable[[], Any]
"""Torch's own protocol: runs forward and backward, returns the loss."""


class ParameterSpace(BlockVectors, DeviceSettings):
    """The trainable parameters of some parameter groups as a :class:`Space`.

    Memory, beyond the parameters: one copy of them (``center``), one accumulator for gradients, and whatever vectors
    a sampler asks for by name (the default sampler asks for none). All are allocated once and reused at every step.

    Args:
        groups: The parameters, group by group: those of one group share ``rho``. Frozen ones are left alone.
        passes: What to keep alike among the passes of a step.
        parallel: Which processes take the step together.
        foreach: Fused kernels, or the plain loop.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        *,
        passes: Passes | None = None,
        parallel: Parallel | None = None,
        foreach: bool = True,
    ) -> None:
        every = ((p, g) for g, group in enumerate(groups) for p in group if p.requires_grad)
        trainable = list({id(p): (p, g) for p, g in every}.values())  # torch only warns of one that is listed twice
        # Empty tensors have no coordinates; leaving them out spares every kernel the special case.
        members = [(p, g) for p, g in trainable if p.numel()]
        self._empty = [p for p, _ in trainable if not p.numel()]
        if not members:
            raise ValueError("no trainable parameters: every tensor is frozen (requires_grad=False) or empty")
        self.params = [p for p, _ in members]
        self.passes = passes if passes is not None else Passes()
        self.sharding = Sharding(self.params)
        self.world = World(parallel, self.passes.model, self.sharding)
        check_storage(self.params)
        here = [vectors.real(local_part(p)) for p in self.params]
        self.world.check_alike(here)
        dtype = torch.float64 if any(x.dtype == torch.float64 for x in here) else torch.float32
        groups_of = [g for _, g in members]
        dims = [p.dim() for p in self.params]
        BlockVectors.__init__(self, here, groups_of, dims, sharding=self.sharding, dtype=dtype, foreach=foreach)
        DeviceSettings.__init__(self, len(groups), dtype, here[0].device)
        self.dim = sum(p.numel() * (2 if p.is_complex() else 1) for p in self.params)
        self._center, _ = vectors.allocate(self.point)
        self._backed_up = False  # whether it holds θ
        self._gradients: list[Tensor | None] | None = None  # those before the step, until the mean replaces them
        self._unfinished = False  # whether buffers and the sampler's vectors are those of a step not taken yet
        self._gradient: list[Tensor | None] = []  # of the last evaluation
        whole = foreach and self.sharding.mesh is None
        self._fused = fused.FusedVectors(self.point) if whole and fused.supported(self.point) else None
        self.mean = Accumulator(
            self.params, self._blocks, sharding=self.sharding, world=self.world, fused=self._fused, foreach=foreach
        )
        self._table: Tensor | None = None  # addresses of the last gradient, where the fused kernels can take it
        self._moved: Tensor | None = None  # ‖point − θ‖, where it is known without looking
        self._at_center = True  # whether the point is θ
        self.streams = Streams([x.device for x in self.point])
        self._scales: dict[int, tuple[Tensor, Tensor]] = {}  # of a sample's noise, and the length it then has
        self._num_samples = 1
        self.branch = Branch(self.device)
        self.closures: Sequence[Closure] = [_no_closure]  # one for all samples, or one for each
        self.turn = 0  # whose turn it is
        self.ascent_closure: Closure | None = None
        self.scaling = LossScaling(self.dtype, self.device)
        self._differentiates = False  # whether the closure takes derivatives before it calls backward()
        self.num_forwards = self.num_backwards = self.num_ascents = 0

    # ---------------------------------------------------------------- visiting and coming back

    def ledger(self, weighing: Weighing, num_samples: int) -> Ledger:
        """Where the samples of a step are written down."""
        tilt = weighing.t if isinstance(weighing, StreamingTilt) else None
        if isinstance(weighing, OneSample):
            tilt = self._zero  # any tilt gives a single sample all the weight
        if self._fused is None or not isinstance(tilt, Tensor) or self.world.splits_samples:
            return TorchLedger(weighing)
        return self._fused.ledger(tilt, num_samples)

    def on_device(self) -> AbstractContextManager[object]:
        """Inside, the parameters' GPU is the current one: Triton launches there and nowhere else."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    @contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph, num_passes: int, *, drawing: bool) -> Iterator[CapturedRandom]:
        """Around the capture of a step into ``graph``, which gets address tables of its own.

        ``drawing`` says that the passes draw random numbers (dropout): the graph then gets random states of its own.
        """
        self.roll_back()  # if an earlier restore failed, its backup must not be overwritten
        self.streams.register(graph)
        with self.passes.capturing(graph, self.device, num_passes if drawing else 0) as random:
            if self._fused is not None:
                self._fused.reserve(num_passes + 3)  # one for each gradient; point, center, mean
            try:
                with self.branch.of_a_graph():
                    yield random
            except BaseException:
                self.streams.forget()
                raise
            finally:
                self._at_center, self._backed_up = True, False  # captured kernels have not run
                random.keep.append(self)
                if self._fused is not None:
                    random.keep += self._fused.release()

    def begin_step(self, num_samples: int = 1) -> None:
        """Save what :meth:`roll_back` restores. From here on ``point`` may be moved.

        θ itself is saved when the point first moves, or when a sampler reads ``center``.
        """
        self.roll_back()  # if an earlier restore failed, its backup must not be overwritten
        self.point = [vectors.real(local_part(p)) for p in self.params]  # p.data may be another tensor than last time
        self._at_center, self._moved, self._backed_up = True, self._zero, False
        self.mean.begin()
        self.num_forwards = self.num_backwards = self.num_ascents = 0
        self._num_samples, self._scales, self.turn = num_samples, {}, 0
        self.passes.begin_step()
        if not self.branch.capturing:  # a graph runs as a whole or not at all
            self.memory.begin_step()
            self._unfinished = True
        self._gradients = [p.grad for p in self.params + self._empty]

    def end_passes(self) -> None:
        """Move the weights back to θ, bit for bit."""
        self.passes.end_step()
        self._restore()

    def hand_over(self) -> None:
        """Make the mean of the samples' gradients the gradient of the parameters."""
        self.mean.hand_over()
        self._gradients = None

    def begin_update(self, *_: object) -> None:
        """Check the gradients, and keep the buffers and the sampler's vectors: from here on the step is taken."""
        if self._unfinished:
            self.world.check_averaged(self.params)
            self._unfinished = False

    def roll_back(self) -> None:
        """Undo a step that was not taken: weights, gradients, buffers and the sampler's vectors.

        What to undo follows from what was saved, not from where the step was interrupted: this does nothing if there
        is nothing to undo, and may be repeated if it was interrupted itself. Gradients stay once :meth:`hand_over` has
        set them.

        Raises:
            RuntimeError: If the weights cannot be restored. Their backup is kept, and the next step tries again.
        """
        if self.branch.capturing:
            self._at_center = True  # captured kernels have not run
        try:
            self._restore()
        except Exception as error:
            raise RuntimeError(
                "the weights could not be restored and are still perturbed. Their original values are in "
                "optimizer.current_space().center; the next optimizer.step() restores them first"
            ) from error
        finally:
            if self._gradients is not None:
                self.passes.end_step()
                for p, grad in zip(self.params + self._empty, self._gradients, strict=True):
                    p.grad = grad
                self.mean.drop()
                if self.sharding.mesh is not None:
                    reshard(self.passes.model)  # FSDP must not reuse the copies it gathered at the perturbed weights
                self._gradients = None
            if self._unfinished:
                self.passes.roll_back()
                self.memory.roll_back()
                self._unfinished = False

    @property
    def center(self) -> list[Tensor]:
        """See :class:`Space`."""
        self._back_up()
        return self._center

    def _back_up(self) -> None:
        """Copy θ while the point is still there. The flag is set after the copy: a Ctrl-C between loses nothing."""
        if not self._backed_up:
            self._copy(self._center, self.point)
            self._backed_up = True

    def _backs_up_in_passing(self) -> bool:
        """Whether the kernel that is about to move the point may write the backup too.

        In a graph alone, which runs whole or not at all: outside, a Ctrl-C between the kernel and our taking note of it
        would lose θ.
        """
        if self._backed_up or not self.branch.capturing:
            self._back_up()
            return False
        self._backed_up = True
        return True

    def _restore(self) -> None:
        """Copy θ back, if the point has moved; safe to repeat."""
        if self._backed_up and not self._at_center:
            try:
                self._copy(self.point, self._center)
            except Exception:  # a fused copy may need memory
                for x, theta in zip(self.point, self._center, strict=True):
                    x.copy_(theta)
            self._at_center = True
        self._backed_up = False

    def evaluate(self, *, ascent: bool = False, after: Evaluation | None = None) -> Evaluation:
        """See :class:`Space`."""
        self._gradient.clear()  # whoever still holds the last one holds an empty list: its memory is free
        for p in self.params:
            p.grad = None  # autograd then hands its own buffer over instead of adding to ours
        closure = self.ascent_closure if ascent and self.ascent_closure else self._closure()
        with self.passes.one(), self.world.ascending() if ascent else nullcontext(), torch.enable_grad():
            loss = self._loss(closure())
        self.num_forwards += 1
        self.num_backwards += 1
        self.num_ascents += ascent
        found = (None if p.grad is None else _gradient(p) for p in self.params)
        gradient = vectors.apart(found)  # it will be overwritten
        for p in self.params:
            p.grad = None  # the list is the one owner
        check_gradient(gradient)
        self._gradient, self._table = gradient, None
        loss = self.world.average(loss)
        if self.scaling.scaler is not None and not self.scaling.free:
            self.scale_(gradient, 1 / self.scaling.factor())
        if self._fused is not None and self._fused.fits(gradient):
            self._table = self._fused.table(gradient)
            norm, finite = self._fused.evaluate(self._table, loss, after)
        else:
            norm = self.norm(gradient)
            finite = torch.isfinite(loss) & torch.isfinite(norm)
            if after is not None:
                finite = finite & after.finite
            norm = norm.masked_fill(~finite, 0.0)
        if ascent and self.world.local_ascent:
            finite = self.world.all(finite)  # each rank has a gradient of its own: all have to judge alike
            norm = norm.masked_fill(~finite, 0.0)
        return Evaluation(loss, gradient, norm, finite)

    def forward(self) -> Tensor:
        """See :class:`Space`. Backward passes are skipped, and no graph is built unless the loss differentiates."""
        try:
            loss = self._forward()
        except NeedsGraphError:
            self._differentiates = True  # inside the loss: forces, say, or the norm of a gradient
            loss = self._forward()
        self.num_forwards += 1
        if self.sharding.mesh is not None:
            if self.passes.model is None:
                raise ValueError(
                    "a forward pass alone through sharded parameters needs model=, to reshard them after it"
                )
            reshard(self.passes.model)
        return self.world.average(loss)

    def _closure(self) -> Closure:
        return self.closures[self.turn if len(self.closures) > 1 else 0]

    def _forward(self) -> Tensor:
        with self.passes.one():
            return self._loss(forward_only(self._closure(), graph=self._differentiates))

    def _loss(self, value: Any) -> Tensor:
        if not isinstance(value, Tensor | float | int):
            raise TypeError(f"the closure must return the loss, a tensor with one element; got {type(value).__name__}")
        loss = value.detach() if isinstance(value, Tensor) else self._zero + value
        if loss.numel() != 1:
            raise ValueError(f"the closure must return one loss, got a tensor of shape {tuple(loss.shape)}")
        return loss.reshape(()).to(device=self.device, dtype=self.dtype)

    # ---------------------------------------------------------------- the gradient handed to the base optimizer

    def accumulate(
        self, gradient: list[Tensor | None], share: Tensor, valid: Tensor, *, first: bool, keep: bool = False
    ) -> None:
        """Mix a gradient into the mean that the base gets; see :meth:`Accumulator.add`."""
        self.mean.add(gradient, self._table_of(gradient), share, valid, self.point, first=first, keep=keep)

    def stand_by(self) -> None:
        """What a rank does that holds no sample while others do: one pass at θ, whose gradient counts nothing.

        So its random numbers move on as theirs do, and it knows which parameters have a gradient.
        """
        self.go_home()
        at = self.evaluate()
        self.accumulate(at.gradient, self._zero, torch.zeros_like(at.finite), first=True)

    def join_samples(self, mine: Ledger, indices: Sequence[int], joined: Ledger) -> Ledger:
        """Put together what the ranks that share the samples have found: ``joined`` gets all samples, the mean too.

        One exchange of scalars, and one sum of gradients, each rank's weighted by what its samples weigh in all.
        """
        assert isinstance(mine, TorchLedger)
        assert isinstance(joined, TorchLedger)
        numbers = torch.zeros(5 * self._num_samples + len(self.params), dtype=self.dtype, device=self.device)
        rows, seen = numbers[: 5 * self._num_samples].view(-1, 5), numbers[5 * self._num_samples :]
        for j, row in zip(indices, mine.rows(), strict=True):
            rows[j] = row
        seen.copy_(self.mean.seen(self.dtype))
        self.world.sum_over_samples(numbers)
        for row in rows:
            joined.add_row(row)
        weights = joined.numbers()["weights"]
        self.mean.join(weights[list(indices)].sum() if indices else self._zero, (seen > 0).tolist())
        self.world.copy_from_first([*self.passes.buffers(), *self.memory.tensors()])
        return joined

    def _table_of(self, gradient: list[Tensor | None]) -> Tensor | None:
        """The addresses of the last evaluation's gradient, where the fused kernels can take it."""
        return self._table if gradient is self._gradient else None

    # ---------------------------------------------------------------- vectors

    def go_home(self) -> None:
        """See :class:`Space`."""
        if not self._at_center:
            self.copy_(self.point, self.center)
            self._at_center, self._moved = True, self._zero

    def scatter(self, sample: int, spread: Spread) -> None:
        """See :class:`Space`. The noise is made in the point itself, or not stored at all: no vector holds it."""
        if self._fused is None:
            self.normal_(self.point, sample)
            self.scale_(self.point, spread.scale(self.norm(self.point), lambda: self.uniform(sample), self.dim))
            self.add_(self.point, self.center)
            return
        scale, moved = self._noise_scale(sample, spread)
        seed, backup = self.streams.number(self.device), self._backs_up_in_passing()
        self._at_center = False  # before the kernel: a Ctrl-C right after it must find this
        self._fused.noise_move(*self._tables(), seed, sample, scale, backup=backup)
        self._moved = moved
        self._look_ahead(sample, spread)

    def _noise_scale(self, sample: int, spread: Spread) -> tuple[Tensor, Tensor]:
        """What a sample's noise is multiplied by, and the length it then has."""
        assert self._fused is not None
        if sample in self._scales:
            self.branch.rejoin()
            return self._scales[sample]
        return self._fused.noise_scale(self.streams.number(self.device), sample, spread, ahead=False)

    def _look_ahead(self, sample: int, spread: Spread) -> None:
        """In a graph, find the scales of later samples' noise beside the passes of this one."""
        assert self._fused is not None
        if self._scales or not self.branch.capturing:
            return
        seed = self.streams.number(self.device)
        with self.branch.aside():
            for later in range(sample + 1, self._num_samples):
                self._scales[later] = self._fused.noise_scale(seed, later, spread, ahead=True)
        self.branch.hold(spread)

    def climb(self, at: Evaluation, rho: Tensor) -> None:
        """See :class:`Space`."""
        table = self._table_of(at.gradient)
        if self._fused is not None and table is not None and rho.dim() == 0:
            backup = self._backs_up_in_passing()
            self._at_center = False
            self._moved = self._fused.climb(*self._tables(), table, rho, at, backup=backup)
            return
        from_center = self._at_center and rho.dim() == 0
        scale = rho / (at.norm + EPS)
        self.keep_(at.gradient, at.finite)
        self.add_scaled_(self.point, at.gradient, scale)
        if from_center:
            self._moved = scale * at.norm

    def _tables(self) -> tuple[Tensor, Tensor]:
        """The addresses of the point and the centre."""
        assert self._fused is not None
        return self._fused.named("point", self.point), self._fused.named("center", self._center)

    def normal_(self, x: Sequence[Tensor], sample: int) -> None:
        """See :class:`Space`. Drawn tensor by tensor in parameter order, whatever the grouping."""
        self._writes(x)
        for i, a in enumerate(x):
            self.sharding.normal_(i, a, self.streams.generator(sample, a.device))

    def uniform(self, sample: int) -> Tensor:
        """See :class:`Space`."""
        stream = self.streams.generator(sample, self.device)
        return torch.rand((), generator=stream, dtype=self.dtype, device=self.device)

    def displacement(self) -> Tensor:
        """``‖point − θ‖``. Uses the point up: it is left at some place that is not to be evaluated."""
        if self._moved is not None:
            return self._moved
        self.add_(self.point, self.center, alpha=-1.0)
        return self.norm(self.point)

    def _writes(self, x: object) -> None:
        if x is self.point:
            self._back_up()
            self._moved, self._at_center = None, False


def _no_closure() -> Tensor:
    raise RuntimeError("no closure was set")


def _gradient(p: Tensor) -> Tensor:
    grad = local_gradient(p)
    check_kind(grad, p.dtype)
    return vectors.real(grad.resolve_conj().resolve_neg())
