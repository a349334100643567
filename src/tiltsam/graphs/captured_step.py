"""Warm-up, capture, replay and invalidation of a step as a CUDA graph; see :func:`tiltsam.capture`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from tiltsam.fused.fused_space import FusedSpace, ReservedTables
from tiltsam.graphs.concurrent import (
    Scratch,
    allocate_scratch,
    average_samples_concurrently,
    can_run_concurrently,
    weights_at,
)
from tiltsam.graphs.random_state import CapturedModelState, CapturedRandom
from tiltsam.optim.sharpness_aware import SharpnessAware, Step
from tiltsam.optim.step_info import StepInfo
from tiltsam.space.evaluator import Closure
from tiltsam.space.parameter_space import ParameterSpace
from tiltsam.space.step_record import unpack
from tiltsam.space.validation import check_count, warn

__all__ = ["WARM_UP", "CapturedStep"]

WARM_UP = 3  # eager steps before a capture: cuDNN chooses its kernels, Triton compiles, the base creates its state
MAX_NEW_KEYS = 100  # in a row, before steps stay eager
FUSABLE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)  # their fused kernels read the rate from the device


class _WarmUp(NamedTuple):
    """Statistics of the eager steps with one key."""

    steps: int = 0
    passes: int = 0
    uses_random: bool = True  # whether its passes draw random numbers


class _Graph(NamedTuple):
    """A captured step, and the memory it reads and writes."""

    graph: torch.cuda.CUDAGraph
    packed: Tensor  # the record
    sampler: dict[str, Tensor]
    passes: dict[str, int]
    batch: tuple[Any, ...]
    gradient: list[Tensor | None]
    random: CapturedRandom
    state_addresses: tuple[int, ...]
    keep: list[object]  # whatever else must live as long as the graph


class CapturedStep:
    """A step that runs as one CUDA graph, made by :func:`tiltsam.capture`; its arguments are explained there."""

    def __init__(
        self,
        optimizer: SharpnessAware,
        loss_fn: Callable[..., Tensor] | Sequence[Callable[..., Tensor]],
        *,
        ascent_loss_fn: Callable[..., Tensor] | None = None,
        concurrent: bool = False,
        warm_up: int = WARM_UP,
    ) -> None:
        if not isinstance(optimizer, SharpnessAware):
            raise TypeError(
                f"optimizer must be a tiltsam optimizer, got {type(optimizer).__name__}: for plain training wrap it in "
                "tiltsam.ERM"
            )
        check_count("warm_up", warm_up)
        if concurrent and (optimizer.model is None or not optimizer.current_space().model_state.buffers_once):
            raise ValueError(
                "concurrent samples need model= and buffers_once=True: only one sample may update BatchNorm statistics"
            )
        if concurrent and not can_run_concurrently(optimizer.sampler):
            raise ValueError(f"the samples of {optimizer.sampler!r} depend on each other: leave out concurrent")
        self.optimizer = optimizer
        self.loss_fns = [loss_fn] if callable(loss_fn) else list(loss_fn)
        self.ascent_loss_fn = ascent_loss_fn
        self.reason: str | None = _obstacle(optimizer)
        """Why steps are eager, or ``None``."""
        self._concurrent, self._num_warm_up = concurrent, warm_up
        self._space: ParameterSpace | None = None  # the space of the captured steps
        self._warm_ups: dict[Any, _WarmUp] = {}
        self._num_new_keys = 0  # in a row
        self._graphs: dict[Any, _Graph] = {}
        self._scratch: list[Scratch] = []
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._rates: list[Tensor] = []  # learning rates on the device, where graphs read them
        self._rate_values: list[float] = []
        if self.reason is not None and "cuda" in _device_types(optimizer):
            warn(f"steps run eagerly, because {self.reason}")

    def __call__(self, *batch: Any) -> Tensor:
        """Take a step; return the aggregate loss, as ``optimizer.step`` does."""
        _check_batch(batch)
        closures, ascent_closure = self._closures(batch)
        if self.reason is not None:
            return self.optimizer.step(closures, ascent_closure)
        # For the key; an eager step begins again, which repeats the same writes.
        step = self.optimizer.begin(closures, ascent_closure)
        with step.space.on_device():
            key = self._key(batch, step)
            self._drop_if_stale(key, step.space)
            self._stop_if_no_key_repeats(key)
            if self.reason is not None:
                return self.optimizer.step(closures, ascent_closure)
            warm_up = self._warm_ups.get(key, _WarmUp())
            if key not in self._graphs and warm_up.steps >= self._num_warm_up:
                self._try_capture(key, batch, step, warm_up)
            if (graph := self._graphs.get(key)) is not None:
                return self.optimizer.replay(partial(self._replay, graph, batch))
            return self._warm_up_step(key, step, warm_up)

    def _closures(self, batch: tuple[Any, ...]) -> tuple[list[Closure], Closure | None]:
        """Return closures that run forward and backward on the batch."""

        def closure(loss_fn: Callable[..., Tensor]) -> Tensor:
            loss = loss_fn(*batch)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                got = f"Tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                raise TypeError(f"loss_fn must return the loss, a tensor with one element; got {got}")
            loss.backward()
            return loss

        ascent = partial(closure, self.ascent_loss_fn) if self.ascent_loss_fn is not None else None
        return [partial(closure, loss_fn) for loss_fn in self.loss_fns], ascent

    # ---------------------------------------------------------------- eager steps before the capture

    def _warm_up_step(self, key: Any, step: Step, warm_up: _WarmUp) -> Tensor:
        generator = torch.cuda.default_generators[step.space.device.index]
        offset = generator.get_offset()
        stream = self._own_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # autograd remembers the stream it first ran on: use that of the capture
            loss = self.optimizer.step(step.closures, step.ascent_closure)
        torch.cuda.current_stream().wait_stream(stream)
        draws = generator.get_offset() != offset
        self._warm_ups[key] = _WarmUp(warm_up.steps + 1, self.optimizer.info.num_forwards, draws)
        return loss

    # ---------------------------------------------------------------- replay

    def _replay(self, captured: _Graph, batch: tuple[Any, ...]) -> StepInfo:
        for static, given in zip(captured.batch, batch, strict=True):
            if isinstance(static, Tensor):
                static.copy_(given, non_blocking=True)
        self._write_rates()
        with captured.random.replaying():
            captured.graph.replay()
        assert self._space is not None
        for p, grad in zip(self._space.params, captured.gradient, strict=True):
            p.grad = grad
        loss, table = unpack(captured.packed.clone())  # the next replay overwrites the graph's
        sampler = {name: x.clone() for name, x in captured.sampler.items()}
        return StepInfo(loss, lambda: table, lambda: sampler, valid=table[5].unbind(), **captured.passes)

    def _write_rates(self) -> None:
        for i, group in enumerate(self.optimizer.param_groups if self._rates else ()):
            value = float(group["lr"])
            if value != self._rate_values[i]:
                self._rates[i].fill_(value)
                self._rate_values[i] = value

    # ---------------------------------------------------------------- capture

    def _key(self, batch: tuple[Any, ...], step: Step) -> Any:
        """Return everything that a graph cannot change."""
        shapes = tuple((x.shape, x.dtype, x.device, x.stride()) if isinstance(x, Tensor) else x for x in batch)
        changeable = {"lr", "initial_lr"} if _reads_rate_from_device(self.optimizer.base) else {"initial_lr"}
        addresses = tuple(p.data_ptr() for p in step.space.params)
        return shapes, addresses, self.optimizer.capture_key(step, frozenset(changeable))

    def _try_capture(self, key: Any, batch: tuple[Any, ...], step: Step, warm_up: _WarmUp) -> None:
        try:
            self._graphs[key] = self._capture(batch, step, warm_up)
        except Exception as error:  # whatever the model does that a graph cannot hold
            self.reason = f"capturing failed: {_format_error(error)}"
            self._release()
            step.space.generators.discard()
            warn(f"steps run eagerly, because {self.reason}")

    def _capture(self, batch: tuple[Any, ...], step: Step, warm_up: _WarmUp) -> _Graph:
        optimizer, space = self.optimizer, step.space
        if not _reads_rate_from_device(optimizer.base) and _has_host_state(optimizer.base):
            raise RuntimeError(f"{type(optimizer.base).__name__} keeps state on the host, which a graph cannot update")
        static = tuple(x.clone() if isinstance(x, Tensor) else x for x in batch)
        closures, ascent_closure = self._closures(static)
        graph = torch.cuda.CUDAGraph()
        space.generators.register(graph)
        random = CapturedRandom(
            graph, space.device, warm_up.passes if warm_up.uses_random and space.model_state.same_dropout else 0
        )
        concurrent = self._runs_concurrently(step)
        state = CapturedModelState(space.model_state, random, concurrent=concurrent)
        space.gradient_mean.begin_step()
        replicas = self._replicas(step, state, step.num_samples if concurrent else 1, warm_up.passes)
        for replica in replicas:
            replica.evaluator.begin_step(closures, ascent_closure)
        try:
            with (
                self._device_rates(),
                torch.no_grad(),
                torch.cuda.graph(
                    graph,
                    pool=self._shared_pool(),
                    stream=self._own_stream(),
                    capture_error_mode="thread_local",  # a loader's thread may pin memory meanwhile
                ),
            ):
                state.begin_step()
                if concurrent:
                    record = average_samples_concurrently(optimizer, step, replicas, self._scratch[: len(replicas)])
                else:
                    with weights_at(space.params, self._scratch[0].point):
                        record = optimizer.average_samples(replicas[0], step.sampler, step.num_samples)
                packed, sampler = record.pack(), record.sampler_info()
                space.gradient_mean.assign()
                optimizer.base.step()
        finally:
            state.end_step()
            random.end_capture()
        for replica in replicas:
            if isinstance(replica, FusedSpace) and isinstance(replica.tables, ReservedTables):
                replica.tables.fill()
            replica.evaluator.end_step()
            replica.release_vectors()  # the next graph may use their memory
        passes = {
            name: sum(getattr(replica.evaluator, name) for replica in replicas)
            for name in ("num_forwards", "num_backwards", "num_ascents")
        }
        passes["num_parts"] = len(closures)
        gradient = [p.grad for p in space.params]
        keep: list[object] = [space, *replicas, *self._scratch, state, record, *space.gradient_mean.tensors]
        return _Graph(graph, packed, sampler, passes, static, gradient, random, _state_addresses(optimizer.base), keep)

    def _replicas(self, step: Step, state: CapturedModelState, number: int, num_passes: int) -> list[ParameterSpace]:
        """Return spaces at scratch weights, one per concurrent sample."""
        space = step.space
        if len(self._scratch) < number:
            self._scratch = allocate_scratch(space, number)
        replicas = [space.replica(scratch.point) for scratch in self._scratch[:number]]
        for replica in replicas:
            replica.model_state = replica.evaluator.model_state = state
            if isinstance(replica, FusedSpace):
                # One table for each gradient; point, center, mean.
                replica.tables = ReservedTables(space.device, num_passes + 3, len(space.params))
        return replicas

    def _runs_concurrently(self, step: Step) -> bool:
        if not self._concurrent or step.num_samples == 1 or not can_run_concurrently(step.sampler):
            return False
        if step.space.model_state.changes_other_buffers():
            warn("samples run one after the other, because the model changes buffers other than BatchNorm's statistics")
            return False
        return True

    def _shared_pool(self) -> Any:
        """Return the memory pool that graphs share; it is released with the last of them."""
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def _drop_if_stale(self, key: Any, space: ParameterSpace) -> None:
        """Drop graphs whose tensors have moved: a frozen layer or a loaded state changes their addresses."""
        if self._space is not space:
            self._release()
            self._warm_ups.clear()
            self._space = space
        graph = self._graphs.get(key)
        if graph is not None and graph.state_addresses != _state_addresses(self.optimizer.base):
            del self._graphs[key], self._warm_ups[key]  # warm up again: the base may have to create its state

    def _stop_if_no_key_repeats(self, key: Any) -> None:
        """Take eager steps from now on, with a warning, if many steps in a row had a new key."""
        self._num_new_keys = 0 if key in self._warm_ups else self._num_new_keys + 1
        if self._num_new_keys < MAX_NEW_KEYS:
            return
        self._warm_ups.clear()
        self.reason = (
            f"{MAX_NEW_KEYS} steps in a row had new shapes or settings, such as a momentum with a schedule "
            "(pass cycle_momentum=False)"
        )
        warn(f"steps run eagerly, because {self.reason}")

    def _release(self) -> None:
        """Release graphs and their memory."""
        self._graphs.clear()
        self._scratch, self._rates, self._pool, self._stream = [], [], None, None

    @contextmanager
    def _device_rates(self) -> Iterator[None]:
        """Let the base read learning rates from the device while a graph is captured."""
        base = self.optimizer.base
        if not _reads_rate_from_device(base):
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
        _arrange_state(base)
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


def _check_batch(batch: tuple[Any, ...]) -> None:
    for x in batch:
        if not isinstance(x, Tensor | bool | int | float | str | None):
            got = type(x).__name__
            raise TypeError(f"parts of a batch must be tensors or constants, got {got}: pass its tensors separately")
    if not any(isinstance(x, Tensor) for x in batch):
        raise TypeError("a batch must hold at least one tensor; pass its parts separately: step(inputs, targets)")


def _device_types(optimizer: SharpnessAware) -> set[str]:
    return {p.device.type for group in optimizer.param_groups for p in group["params"] if p.requires_grad}


def _obstacle(optimizer: SharpnessAware) -> str | None:
    """Return why steps of this optimizer cannot be captured, or ``None``."""
    devices = _device_types(optimizer)
    if devices != {"cuda"}:
        return f"the parameters are on the {' and the '.join(sorted(devices - {'cuda'}))}"
    space = optimizer.current_space()
    if not space.ranks.alone or space.sharding.mesh is not None:
        return "several processes take the step together"
    if optimizer.skip_nonfinite:
        return "skip_nonfinite reads a value back to the host at every step"
    return None


def _format_error(error: BaseException) -> str:
    """Return an error in a line with its context: CUDA's error of a failed capture does not name the cause."""
    first = f"{type(error).__name__}: {error}".splitlines()[0]
    return first if error.__context__ is None else f"{first}, after {_format_error(error.__context__)}"


# -------------------------------------------------------------------- the base optimizer in a graph


def _reads_rate_from_device(base: Optimizer) -> bool:
    """Return whether the base can read its learning rate from the device; otherwise a new rate needs a new graph."""
    return type(base) in FUSABLE or "capturable" in base.defaults


def _has_host_state(base: Optimizer) -> bool:
    """Return whether the base counts steps, or keeps other numbers, on the host."""
    values = (value for state in base.state.values() for value in state.values())
    return any(isinstance(v, int | float) or (isinstance(v, Tensor) and not v.is_cuda) for v in values)


def _arrange_state(base: Optimizer) -> None:
    """Move counters to the device and give state tensors the strides of their parameters, as fused kernels need.

    A loaded state has the strides it was saved with.
    """
    for p, state in base.state.items():
        for name, value in state.items():
            if not isinstance(value, Tensor):
                continue
            if value.dim() == 0:
                state[name] = value.to(p.device)
            elif value.shape == p.shape:
                like = torch.empty_like(p, dtype=value.dtype, requires_grad=False)
                if value.stride() != like.stride():
                    state[name] = like.copy_(value)


def _state_addresses(base: Optimizer) -> tuple[int, ...]:
    """Return the addresses of the base's state tensors, except counters, which may move when a step is captured."""
    values = (value for state in base.state.values() for value in state.values())
    return tuple(value.data_ptr() for value in values if isinstance(value, Tensor) and value.dim())
