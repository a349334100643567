"""Random states and buffers of the passes of a captured step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tiltsam.space.model_state import ModelState

__all__ = ["CapturedModelState", "CapturedRandom"]


class CapturedRandom:
    """The random states of a captured step: one for each pass that draws the same numbers.

    A graph advances every generator it was captured with at each replay. Each pass has its own generator; all are set
    to the same state before a replay, so that they draw alike.

    Args:
        graph: The graph.
        device: The GPU it runs on.
        num_passes: Number of passes that draw alike; 0 if passes draw nothing, or each draws its own numbers.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, device: torch.device, num_passes: int) -> None:
        self._device = device
        self._default = torch.cuda.default_generators[device.index]
        self._own_state = self._default.graphsafe_get_state()
        # A capture locks the state that the default generator is in. Let that be a copy, so that a capture that fails
        # does not leave the default generator unusable.
        self._whole = self._default.clone_state()
        self._passes = [self._default.clone_state() for _ in range(num_passes)]
        for generator in self._passes:
            graph.register_generator_state(generator)
        self._default.graphsafe_set_state(self._whole)

    def begin_pass(self, number: int) -> None:
        """Switch the default generator to the state of a pass, during the capture."""
        if self._passes:
            self._default.graphsafe_set_state(self._passes[number])

    def end_capture(self) -> None:
        """Switch the default generator back to its own state, and wait for the GPU.

        A capture writes the seeds on its own stream. On a busy GPU that could come after a replay has written its own.
        """
        self._default.graphsafe_set_state(self._own_state)
        torch.cuda.synchronize(self._device)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Let all passes draw what the default generator would draw next, and advance it by one pass."""
        states = self._passes or [self._whole]
        for generator in states:
            generator.manual_seed(self._default.initial_seed())
            generator.set_offset(self._default.get_offset())
        yield
        self._default.set_offset(states[-1].get_offset())  # the last: an ascent on part of the batch draws less


class CapturedModelState(ModelState):
    """The model state of a step that is being captured: nothing is rolled back, and passes use graph generators.

    Args:
        eager: The model state of eager steps.
        random: The random states of the graph.
        concurrent: Whether passes run concurrently. Then only BatchNorm's buffers may change: saving and restoring the
            others would be a race.
    """

    def __init__(self, eager: ModelState, random: CapturedRandom, *, concurrent: bool) -> None:
        super().__init__(eager.model, buffers_once=eager.buffers_once, same_dropout=eager.same_dropout)
        self._random, self._concurrent = random, concurrent

    def begin_step(self) -> None:
        """See :class:`ModelState`. A graph runs as a whole or not at all: there is nothing to save."""
        self.num_passes = 0

    def _set_random_state(self) -> None:
        self._random.begin_pass(self.num_passes)

    def _keep_other_buffers(self) -> None:
        if not self._concurrent:
            super()._keep_other_buffers()
