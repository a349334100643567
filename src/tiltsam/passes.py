"""The passes of one step, kept alike: buffers move once, and every pass draws the same random numbers.

A sharpness-aware step runs the model several times on one mini-batch. Left alone, BatchNorm's running statistics would
move at every pass, most of them at perturbed weights, and dropout would draw a new mask each time, so that losses
would differ by the mask and not by the perturbation alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from tiltsam import vectors

__all__ = ["CapturedRandom", "Passes", "WithoutBackward"]


class Passes:
    """What happens around each pass of a step.

    Args:
        model: The model whose buffers are watched; ``None`` leaves everything alone.
        buffers_once: The model's buffers (BatchNorm's statistics among them) keep what the first pass made of them.
        same_random: All passes start from the random state of the first, so dropout masks agree; after the step the
            global generators have moved on by one pass, as they would for the base optimizer.
        devices: Where the parameters live: the GPUs among them have random states of their own.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        *,
        buffers_once: bool = True,
        same_random: bool = True,
        devices: Sequence[torch.device] = (),
    ) -> None:
        self.model = model
        self.buffers_once = buffers_once and model is not None
        self.same_random = same_random and model is not None
        self.gpus = sorted({d.index for d in devices if d.type == "cuda" and d.index is not None})
        self._random: tuple[Tensor, list[Tensor]] | None = None
        self._live: list[list[Tensor]] = []  # the model's buffers, by device and dtype
        self._start: list[list[Tensor]] = []  # their values before the step
        self._tracking: list[_BatchNorm] = []  # layers whose statistics the first pass moved
        self._others: list[list[Tensor]] = []  # the buffers that are not theirs
        self._first: list[list[Tensor]] = []  # and the values of those after the first pass
        self._count = 0
        self._captured: CapturedRandom | None = None

    def buffers(self) -> list[Tensor]:
        """The model's buffers."""
        return [b for part in _buffers(self.model) for b in part]

    @contextmanager
    def of_one_step(self) -> Iterator[None]:
        """Around all passes of a step. If the body raises, buffers are as they were before."""
        self._count = 0
        if self._captured is not None:  # nothing has run if it fails, and all of it runs if it does not
            yield
            return
        self._live = _buffers(self.model)
        self._start = _save(self._live, self._start)
        try:
            yield
        except BaseException:
            _load(self._live, self._start)
            raise
        finally:
            self._random = None

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around one pass."""
        if self._captured is not None:
            self._captured.begin_pass(self._count)
        elif self.same_random:
            if self._random is None:
                self._random = (torch.get_rng_state(), [torch.cuda.get_rng_state(i) for i in self.gpus])
            else:
                torch.set_rng_state(self._random[0])
                for i, state in zip(self.gpus, self._random[1], strict=True):
                    torch.cuda.set_rng_state(state, i)
        first = self._count == 0
        self._count += 1
        if not self.buffers_once:
            yield
        elif first:
            yield
            self._tracking = _tracking(self.model)
            self._others = _buffers(self.model, besides=self._tracking)
            self._first = _save(self._others, self._first)
        else:
            # BatchNorm can be told not to touch its statistics, which is cheaper than putting them back.
            for module in self._tracking:
                module.track_running_stats = False
            try:
                yield
            finally:
                for module in self._tracking:
                    module.track_running_stats = True
            _load(self._others, self._first)

    @contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph, device: torch.device, num_passes: int) -> Iterator[CapturedRandom]:
        """Around the capture of a step: its passes draw from states that can be set before each replay."""
        self._captured = CapturedRandom(graph, device, num_passes if self.same_random else 0)
        try:
            yield self._captured
        finally:
            self._captured.end()
            self._captured = None


class CapturedRandom:
    """The random states of a captured step: one for each pass that is to draw the same numbers.

    A graph advances every generator it was captured with at each replay. Giving each pass a generator of its own, all
    set to the same place before a replay, makes them draw alike.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, device: torch.device, num_passes: int) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._device = torch.cuda.default_generators[index]
        self._own = self._device.graphsafe_get_state()
        # A capture takes hold of the state that the device's generator stands in: let that be one of ours, so that a
        # capture that fails does not leave the generator of everybody else unusable.
        self._whole = self._device.clone_state()
        self._passes = [self._device.clone_state() for _ in range(num_passes)]
        for generator in self._passes:
            graph.register_generator_state(generator)
        self._device.graphsafe_set_state(self._whole)
        self.keep: list[Any] = []
        """Memory that the graph reads and nobody else holds."""

    def begin_pass(self, number: int) -> None:
        """During the capture: the device's generator stands in the state of that pass."""
        if self._passes:
            self._device.graphsafe_set_state(self._passes[number])

    def end(self) -> None:
        """After the capture: the device's generator is itself again."""
        self._device.graphsafe_set_state(self._own)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Around a replay: all passes draw what the device's generator would draw next, and it moves on as it would."""
        states = self._passes or [self._whole]
        for generator in states:
            generator.manual_seed(self._device.initial_seed())
            generator.set_offset(self._device.get_offset())
        yield
        self._device.set_offset(states[0].get_offset())


class WithoutBackward(TorchFunctionMode):
    """Turns ``loss.backward()`` into nothing, so that a closure can be asked for its loss alone."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Skip ``Tensor.backward``, pass everything else on."""
        if func is torch.Tensor.backward:
            return None
        return func(*args, **(kwargs or {}))


def _tracking(model: torch.nn.Module | None) -> list[_BatchNorm]:
    """The layers of BatchNorm that move their statistics in a forward pass."""
    layers = model.modules() if model is not None else ()
    return [m for m in layers if isinstance(m, _BatchNorm) and m.training and m.track_running_stats]


def _buffers(model: torch.nn.Module | None, besides: Sequence[_BatchNorm] = ()) -> list[list[Tensor]]:
    """The model's buffers, in lists that one kernel can copy.

    Whether a pass changed a buffer cannot be seen from outside (BatchNorm's kernels do not raise the version counter),
    so all are kept, but for expanded ones, which cannot be written at all.
    """
    left_out = {id(b) for module in besides for b in module.buffers(recurse=False)}
    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for b in model.buffers() if model is not None else ():
        writable = not any(n > 1 and stride == 0 for n, stride in zip(b.shape, b.stride(), strict=True))
        if b.numel() and writable and id(b) not in left_out:
            lists.setdefault((b.device, b.dtype), []).append(b.detach())
    return list(lists.values())


def _save(live: list[list[Tensor]], into: list[list[Tensor]]) -> list[list[Tensor]]:
    """Copy the values, into the tensors of the last time if they fit."""
    if [[(b.shape, b.dtype, b.device) for b in part] for part in live] != [
        [(b.shape, b.dtype, b.device) for b in part] for part in into
    ]:
        return [[b.clone() for b in part] for part in live]
    _load(into, live)
    return into


def _load(x: list[list[Tensor]], y: list[list[Tensor]]) -> None:
    for a, b in zip(x, y, strict=True):
        vectors.copy_(a, b)
