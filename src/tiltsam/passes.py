"""The passes of one step, kept alike: buffers move once, and every pass draws the same random numbers.

A sharpness-aware step runs the model several times on one mini-batch. Left alone, BatchNorm's running statistics would
move at every pass, most of them at perturbed weights, and dropout would draw a new mask each time, so that losses
would differ by the mask and not by the perturbation alone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.nn.modules.batchnorm import _BatchNorm

from tiltsam.buffers import KeptBuffers, buffers_of

__all__ = ["CapturedRandom", "NeedsGraphError", "Passes", "forward_only"]

_HEEDING = (_BatchNorm.forward, torch.nn.SyncBatchNorm.forward)  # these ask track_running_stats; others may not


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
        self._start = KeptBuffers()  # before the step
        self._first = KeptBuffers()  # after the first pass, those of all layers but the following
        self._tracking: list[_BatchNorm] = []  # layers whose statistics the first pass moved
        self._pausing = False  # whether these are told to leave their statistics alone
        self._at_once = False  # whether passes may run at the same time
        self._count = 0
        self._captured: CapturedRandom | None = None

    def buffers(self) -> list[Tensor]:
        """The model's buffers."""
        return buffers_of(self.model)

    def moves_other_buffers(self) -> bool:
        """Whether the first pass of the last step changed buffers that are not BatchNorm's. Waits for the device."""
        return self._first.differs_from(self._start)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, passes may run at the same time, and no buffers but BatchNorm's are written: none may be moved.

        Keeping the others in one pass and putting them back in another would be a race.
        """
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def begin_step(self) -> None:
        """Save the buffers, for :meth:`roll_back`."""
        self._count = 0
        if self._captured is None:  # a graph runs as a whole or not at all
            self._start.keep(_modules(self.model))

    def end_step(self) -> None:
        """Release what the passes of a step share; safe to repeat."""
        self._resume()
        self._random = None
        if self._captured is None:
            torch.clear_autocast_cache()

    def roll_back(self) -> None:
        """Restore the buffers saved by :meth:`begin_step`; safe to repeat."""
        self._start.put_back()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around one pass."""
        torch.clear_autocast_cache()  # inside somebody's autocast it holds copies of weights that have moved since
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
            known = {id(layer) for layer in self._tracking}
            if not self._at_once:
                self._first.keep(module for module in _modules(self.model) if id(module) not in known)
        else:
            # BatchNorm can be told not to touch its statistics, which is cheaper than putting them back.
            self._pausing = True
            try:
                for layer in self._tracking:
                    layer.track_running_stats = False
                yield
            finally:
                self._resume()
            if not self._at_once:
                self._first.put_back()

    def _resume(self) -> None:
        """Let BatchNorm move its statistics again; may be called again."""
        if self._pausing:
            for layer in self._tracking:
                layer.track_running_stats = True
            self._pausing = False

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
        self._device.set_offset(states[-1].get_offset())  # an ascent on part of the batch draws less


class NeedsGraphError(RuntimeError):
    """Raised when a loss is differentiated in a pass that builds no graph."""


def forward_only(call: Callable[[], Any], *, graph: bool = False, skip_backward: bool = True) -> Any:
    """Return ``call()``, without building a graph and without running backward passes.

    A backward pass is skipped however it is written (``loss.backward()``, ``torch.autograd.backward(loss)``,
    ``scaler.scale(loss).backward()``); ``torch.autograd.grad`` runs.

    There is no switch that could be left on: :func:`_run_backward` looks for the frame of this function on the stack,
    and an interrupted call is no longer there.

    Args:
        call: Computes a loss.
        graph: Build the graph, for a ``call`` that differentiates inside.
        skip_backward: Skip backward passes.

    Raises:
        NeedsGraphError: If ``call`` fails to differentiate and ``graph`` is false: call again with ``graph=True``.
    """
    _install_run_backward()
    with torch.set_grad_enabled(graph):
        return call()


@functools.cache
def _install_run_backward() -> None:
    """Route ``backward`` and ``grad`` of :mod:`torch.autograd` through :func:`_run_backward`, from now on."""
    torch.autograd._engine_run_backward = _run_backward  # type: ignore[attr-defined, assignment]


def _run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Run torch's engine, unless the caller is inside :func:`forward_only` and asks for a backward pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not forward_only.__code__:
        frame = frame.f_back
    if frame is None:
        return _engine_run_backward(outputs, *args, **kwargs)
    options = frame.f_locals
    if options["skip_backward"] and kwargs.get("accumulate_grad"):
        return ()
    try:
        return _engine_run_backward(outputs, *args, **kwargs)
    except RuntimeError as error:
        if options["graph"]:
            raise
        raise NeedsGraphError(str(error)) from error


def _modules(model: torch.nn.Module | None) -> Iterator[torch.nn.Module]:
    return model.modules() if model is not None else iter(())


def _tracking(model: torch.nn.Module | None) -> list[_BatchNorm]:
    """The layers of BatchNorm that move their statistics in a forward pass, and would not if told so."""
    return [
        m
        for m in _modules(model)
        if isinstance(m, _BatchNorm)
        and m.training
        and m.track_running_stats
        and getattr(m.forward, "__func__", None) in _HEEDING
    ]
