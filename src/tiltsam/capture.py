"""A whole step as one CUDA graph: every pass, the noise, the norms, the tilt and the base's update in one launch.

A step of TSAM with three samples on a ResNet-18 is some 2,500 kernels, and the host needs longer to launch them than
the GPU to run them. Captured once and replayed, the host does one launch a step.

    step = tiltsam.capture(optimizer, loss_fn, (inputs, targets))
    for inputs, targets in loader:
        loss = step(inputs, targets)

What may change between replays: the learning rate, ``rho``, ``t``, ``delta``, ``radius``, the seed, all through
``param_groups`` or schedules as ever; the noise is new at every step, and the very noise the eager step would draw.
What cannot live in a graph (another batch shape, another ``num_samples``, a frozen layer, a changed weight decay) is
noticed, and a new graph is captured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiltsam.bases import FUSABLE, arrange_state, places_of_state, reads_rate_from_device
from tiltsam.flatness.data import cut
from tiltsam.info import StepInfo, row_of, with_numbers
from tiltsam.lanes import Lanes, Room, fits, rooms_for
from tiltsam.parameters import Closure, ParameterSpace
from tiltsam.passes import CapturedRandom
from tiltsam.warning import warn
from tiltsam.wrapper import SharpnessAware

__all__ = ["CapturedStep", "capture"]

WARM_UP = 3  # eager steps before a capture: cuDNN chooses its kernels, Triton compiles, the base creates its state


class _Seen(NamedTuple):
    """What eager steps have shown of a kind of step."""

    steps: int = 0
    passes: int = 0
    drawing: bool = True  # whether its passes draw random numbers


class _Graph(NamedTuple):
    """A captured step, and the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    info: StepInfo
    numbers: Tensor  # all of info's, in one row
    batch: tuple[Any, ...]
    random: CapturedRandom
    state: tuple[int, ...]  # where the base's state lies


def capture(
    optimizer: SharpnessAware,
    loss_fn: Callable[..., Tensor],
    example_batch: Sequence[Any],
    *,
    ascent_fraction: float = 1.0,
    split: bool = False,
    concurrent: bool = False,
    warm_up: int = WARM_UP,
) -> CapturedStep:
    """A callable that runs one whole step of ``optimizer`` on a batch, as one CUDA graph.

    The first ``warm_up`` calls for a batch shape are ordinary eager steps (real ones: nothing is trained twice or
    thrown away), then the step is captured. On a CPU, or where capturing fails, it says why in ``step.reason`` and a
    warning, and goes on eagerly with the same results.

    Args:
        optimizer: Any method of :data:`tiltsam.METHODS`.
        loss_fn: From the tensors of a batch to the loss; open ``torch.autocast`` inside it, and put a compiled model
            in it, as you like. It must not read values back to the host.
        example_batch: A batch, for its shapes and device.
        ascent_fraction: Passes that only point the way up see this share of the batch: the first rows of every tensor
            that is as long as the first.
        split: Each sample of a step sees a part of the batch of its own, in ascent and descent: s samples at the price
            of one. The tilt then weighs parts against each other as well.
        concurrent: Samples of a captured step run beside each other, each on weights of its own: s more copies of them
            in memory, and of gradients and activations. Pays where a pass does not fill the GPU: small parts, batches
            or models. Needs ``model=`` and samples that share no ascent; where a pass moves buffers other than
            BatchNorm's they run one by one, with a warning. ``loss_fn`` must write to no other memory that outlives it.
        warm_up: Eager steps before the capture.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = tiltsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> batch = torch.randn(8, 4), torch.randn(8, 1)
        >>> step = capture(optimizer, lambda x, y: torch.nn.functional.mse_loss(model(x), y), batch)
        >>> loss = step(*batch)
        >>> step.reason
        'the parameters are on the cpu'
    """
    return CapturedStep(
        optimizer,
        loss_fn,
        example_batch,
        ascent_fraction=ascent_fraction,
        split=split,
        concurrent=concurrent,
        warm_up=warm_up,
    )


class CapturedStep:
    """See :func:`capture`."""

    def __init__(
        self,
        optimizer: SharpnessAware,
        loss_fn: Callable[..., Tensor],
        example_batch: Sequence[Any],
        *,
        ascent_fraction: float = 1.0,
        split: bool = False,
        concurrent: bool = False,
        warm_up: int = WARM_UP,
    ) -> None:
        if not isinstance(optimizer, SharpnessAware):
            raise TypeError(
                f"optimizer must be one of tiltsam's, got {type(optimizer).__name__}; for plain training wrap it in "
                "tiltsam.ERM"
            )
        if not 0 < ascent_fraction <= 1:
            raise ValueError(f"ascent_fraction must be in (0, 1], got {ascent_fraction}")
        if split and ascent_fraction < 1:
            raise ValueError("split gives each sample a part of the batch already: leave out ascent_fraction")
        if concurrent and (optimizer.model is None or not optimizer.current_space().passes.buffers_once):
            raise ValueError(
                "concurrent samples need model= and buffers_once: BatchNorm's statistics may move in one of them alone"
            )
        if concurrent and not fits(optimizer.sampler):
            raise ValueError(
                f"the samples of this {type(optimizer).__name__} share an ascent and cannot run beside each other: "
                "leave out concurrent"
            )
        if warm_up < 1:
            raise ValueError(f"warm_up must be at least 1, got {warm_up}")
        self.optimizer = optimizer
        self.loss_fn = loss_fn
        self.reason: str | None = _obstacle(optimizer)
        """Why steps run eagerly, or ``None``."""
        self._ascent_fraction, self._split, self._concurrent = ascent_fraction, split, concurrent
        self._space: ParameterSpace | None = None  # whose steps were seen and captured
        self._rooms: list[Room] | None = None  # of lanes
        self._warm_up = warm_up
        self._seen: dict[Any, _Seen] = {}
        self._graphs: dict[Any, _Graph] = {}
        self._pool: Any = None
        self._rates: list[Tensor] = []  # the learning rates, where graphs read them
        self._rate_values: list[float] = []
        self._stream: torch.cuda.Stream | None = None
        self._check(tuple(example_batch))

    def _check(self, batch: tuple[Any, ...]) -> None:
        if not any(isinstance(x, Tensor) for x in batch):
            raise TypeError("a batch must hold at least one tensor; pass its parts separately: step(inputs, targets)")

    def __call__(self, *batch: Any) -> Tensor:
        """One step; returns the loss that was descended, as ``optimizer.step`` does."""
        self._check(batch)
        if self.reason is not None:
            return self.optimizer.step(*self._closures(batch))
        space = self.optimizer.current_space()
        with space.on_device():
            return self._step(batch, space)

    def _step(self, batch: tuple[Any, ...], space: ParameterSpace) -> Tensor:
        key = self._key(batch)
        self._drop_if_stale(key, space)
        seen = self._seen.get(key, _Seen())
        if key not in self._graphs and seen.steps >= self._warm_up:
            self._try_capture(key, batch, seen)
        if (graph := self._graphs.get(key)) is not None:
            return self._replay(graph, batch)
        generator = torch.cuda.default_generators[space.device.index]
        offset = generator.get_offset()
        with self._side_stream():  # autograd remembers the stream it first ran on: make it the one of the capture
            loss = self.optimizer.step(*self._closures(batch))
        drawing = generator.get_offset() != offset
        self._seen[key] = _Seen(seen.steps + 1, self.optimizer.last.num_forwards, drawing)
        return loss

    def _closures(self, batch: tuple[Any, ...]) -> tuple[Closure | list[Closure], Closure | None]:
        """Forward and backward on the batch or its parts, and on the part of it that ascents see."""

        def closure(batch: tuple[Any, ...] = batch) -> Tensor:
            loss = self.loss_fn(*batch)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                got = f"Tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                raise TypeError(f"loss_fn must return the loss, a tensor with one element; got {got}")
            loss.backward()
            return loss

        length = next((len(x) for x in batch if isinstance(x, Tensor) and x.dim()), 0)

        def on(begin: int, end: int) -> Closure:
            return partial(closure, tuple(cut(x, length, begin, end) for x in batch))

        if self._split:
            number = self.optimizer.num_samples
            if length < number:
                raise ValueError(f"a batch of {length} cannot be split among {number} samples")
            edges = [length * i // number for i in range(number + 1)]
            return [on(begin, end) for begin, end in pairwise(edges)], None
        if self._ascent_fraction == 1:
            return closure, None
        return closure, on(0, math.ceil(self._ascent_fraction * length))

    # ---------------------------------------------------------------- replaying

    def _replay(self, captured: _Graph, batch: tuple[Any, ...]) -> Tensor:
        for mine, given in zip(captured.batch, batch, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(given, non_blocking=True)

        def run(space: ParameterSpace) -> StepInfo:
            self._write_rates()
            with captured.random.replaying():
                captured.graph.replay()
            space.mean.hand_over()
            return with_numbers(
                captured.info, captured.numbers.clone()
            )  # the graph's are overwritten at the next replay

        with self.optimizer.executing(run):
            return self.optimizer.step(_never_called)

    def _write_rates(self) -> None:
        for i, group in enumerate(self.optimizer.param_groups if self._rates else ()):
            value = float(group["lr"])
            if value != self._rate_values[i]:
                self._rates[i].fill_(value)
                self._rate_values[i] = value

    # ---------------------------------------------------------------- capturing

    def _key(self, batch: tuple[Any, ...]) -> Any:
        """All that a graph has frozen into it."""
        shapes = tuple((x.shape, x.dtype, x.device, x.stride()) if isinstance(x, Tensor) else x for x in batch)
        changeable = {"lr", "initial_lr"} if reads_rate_from_device(self.optimizer.base) else {"initial_lr"}
        places = tuple(p.data_ptr() for group in self.optimizer.param_groups for p in group["params"])
        return shapes, places, self.optimizer.frozen(frozenset(changeable))

    def _try_capture(self, key: Any, batch: tuple[Any, ...], seen: _Seen) -> None:
        try:
            self._graphs[key] = self._capture(batch, seen)
        except Exception as error:  # whatever the model does that a graph cannot hold
            self.reason = f"capturing failed: {_told(error)}"
            self._forget()
            warn(f"steps run eagerly, because {self.reason}", RuntimeWarning)

    def _capture(self, batch: tuple[Any, ...], seen: _Seen) -> _Graph:
        optimizer = self.optimizer
        mine = tuple(x.clone() if isinstance(x, Tensor) else x for x in batch)
        space = optimizer.prepare(*self._closures(mine))
        graph = torch.cuda.CUDAGraph()
        with (
            self._device_rates(),
            space.capturing(graph, seen.passes, drawing=seen.drawing) as random,
            self._in_lanes(space, seen.passes, random),
            torch.no_grad(),
            torch.cuda.graph(
                graph,
                pool=self._living_pool(),
                stream=self._own_stream(),
                capture_error_mode="thread_local",  # a loader's thread may pin memory meanwhile
            ),
        ):
            rows: list[Tensor] = []
            info = optimizer.execute(space, watch=lambda info: rows.append(row_of(info)))
        return _Graph(graph, info, rows[0], mine, random, places_of_state(optimizer.base))

    @contextmanager
    def _in_lanes(self, space: ParameterSpace, num_passes: int, random: CapturedRandom) -> Iterator[None]:
        """While a graph is captured, samples are drawn beside each other, if they can and should be."""
        lanes = self._lanes(space)
        if lanes is None:
            yield
            return
        with lanes.of_a_graph(num_passes) as kept, self.optimizer.drawing_in(lanes):
            yield
        random.keep += kept

    def _lanes(self, space: ParameterSpace) -> Lanes | None:
        number = self.optimizer.num_lanes() if self._concurrent else 0
        if not number:
            return None
        if space.passes.moves_other_buffers():
            warn(
                "samples run one after the other, because the model changes buffers other than BatchNorm's statistics",
                RuntimeWarning,
            )
            return None
        if self._rooms is None or len(self._rooms) != number:
            self._rooms = rooms_for(space, number)
        return Lanes(space, self._rooms)

    def _living_pool(self) -> Any:
        """The memory that graphs share; it goes with the last of them."""
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def _drop_if_stale(self, key: Any, space: ParameterSpace) -> None:
        """A graph knows tensors by their addresses: layers that were frozen for a while, or a loaded state, end it."""
        if self._space is not space:  # all of it has to be warmed up anew
            self._forget()
            self._seen.clear()
            self._space = space
        graph = self._graphs.get(key)
        if graph is not None and graph.state != places_of_state(self.optimizer.base):
            del self._graphs[key]

    def _forget(self) -> None:
        """There will be no more replays of what was captured: others can use the memory."""
        self._graphs.clear()
        self._rooms = self._pool = None

    @contextmanager
    def _device_rates(self) -> Iterator[None]:
        """While a graph is captured, the base reads its learning rates from the device, and uses kernels that can."""
        base = self.optimizer.base
        if not reads_rate_from_device(base):
            yield
            return
        groups = base.param_groups
        if len(self._rates) != len(groups):
            self._graphs.clear()  # they read the old ones
            device = groups[0]["params"][0].device
            self._rate_values = [float(group["lr"]) for group in groups]
            self._rates = [torch.full((), v, dtype=torch.float32, device=device) for v in self._rate_values]
        self._write_rates()
        before = [dict(group) for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
            if type(base) in FUSABLE:
                group["fused"], group["foreach"] = True, False
            if "capturable" in group:
                group["capturable"] = True
        arrange_state(base)
        try:
            yield
        finally:
            for group, old in zip(groups, before, strict=True):
                for name in ("lr", "fused", "foreach", "capturable"):
                    if name in old:
                        group[name] = old[name]

    def _own_stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        return self._stream

    @contextmanager
    def _side_stream(self) -> Iterator[None]:
        stream = self._own_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)


def _told(error: BaseException) -> str:
    """An error in a line, with the one it came from: a capture that broke off says no more than that it did."""
    first = f"{type(error).__name__}: {error}".splitlines()[0]
    return first if error.__context__ is None else f"{first}, after {_told(error.__context__)}"


def _obstacle(optimizer: SharpnessAware) -> str | None:
    devices = {p.device.type for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if devices != {"cuda"}:
        return f"the parameters are on the {' and the '.join(sorted(devices - {'cuda'}))}"
    space = optimizer.current_space()
    if not space.world.alone or space.sharding.mesh is not None:
        return "several processes take the step together"
    if optimizer.skip_nonfinite:
        return "skip_nonfinite reads a value back to the host at every step"
    return None


def _never_called() -> Tensor:
    raise RuntimeError("a replayed step has no closure")
