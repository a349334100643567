"""Lanes: the samples of a captured step drawn beside each other, where one pass alone does not fill the GPU.

A sample stands at weights of its own, so samples that are drawn at the same time need as many copies of the weights. A
lane has one, and a stream; while the kernels of its sample are recorded, the parameters are that copy. θ stays where
it is: nothing has to be backed up, and nothing put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from tiltsam import vectors
from tiltsam.branches import Branch
from tiltsam.buffers import to_the_end
from tiltsam.fused import FusedVectors
from tiltsam.parameters import ParameterSpace
from tiltsam.samplers import Draw, Sampler, drawn

__all__ = ["Lane", "Lanes", "Room", "draws", "fits", "rooms_for"]


class Room(NamedTuple):
    """What a lane takes up: memory for its weights, and on a GPU a stream.

    Lanes that are never at work at the same time may share it, and should: torch lends memory out again on the stream
    that it was used on, so graphs whose lanes have other streams cannot share the memory of their passes.
    """

    point: list[Tensor]
    stream: torch.cuda.Stream | None


class Lane(ParameterSpace):
    """A space like another one and over the same parameters, but for all that drawing a sample writes.

    Args:
        space: The other one. What it is later told of settings a lane does not hear: it serves one capture.
        point: The memory of the lane's weights.
    """

    def __init__(self, space: ParameterSpace, point: list[Tensor]) -> None:
        vars(self).update(vars(space))
        self.point = point
        self._fused = None if space._fused is None else FusedVectors(point)
        self._scratch, self._scales = {}, {}
        self._gradient, self._table = [], None
        self.branch = Branch(self.device)
        self.num_forwards = self.num_backwards = self.num_ascents = 0

    @contextmanager
    def entered(self, sample: int) -> Iterator[None]:
        """Inside, the parameters are the lane's, in the turn of that sample."""
        self._backed_up, self._at_center, self._moved = True, False, None
        self.turn = sample
        theta = [p.data for p in self.params]
        self._center = [vectors.real(x) for x in theta]

        def leave() -> None:
            for p, there in zip(self.params, theta, strict=True):
                p.data = there

        try:
            for p, mine in zip(self.params, self.point, strict=True):
                p.data = torch.view_as_complex(mine) if p.is_complex() else mine
            yield
        finally:
            to_the_end(leave)


class Lanes:
    """A lane for each sample of a step.

    Args:
        space: The space of the step.
        rooms: One for each lane, see :func:`rooms_for`.
    """

    def __init__(self, space: ParameterSpace, rooms: Sequence[Room]) -> None:
        self._space = space
        self._lanes = [Lane(space, room.point) for room in rooms]
        self._streams = [room.stream for room in rooms]

    @contextmanager
    def of_a_graph(self, num_passes: int) -> Iterator[list[object]]:
        """Around the capture of a step of so many passes; afterwards the list holds what the graph needs kept."""
        kept: list[object] = [self]
        fused = [lane._fused for lane in self._lanes if lane._fused is not None]
        for kernels in fused:
            kernels.reserve(num_passes + 2)  # one for each gradient; point, center
        try:
            yield kept
        finally:
            for kernels in fused:
                kept += kernels.release()
            for lane in self._lanes:
                lane._gradient.clear()
                lane._scratch.clear()

    def draw(self, sampler: Sampler, samples: Sequence[int]) -> list[tuple[ParameterSpace, Draw, Tensor]]:
        """Draw samples beside each other: where each stands, what it saw, and how far from θ."""
        found: list[tuple[ParameterSpace, Draw, Tensor]] = []
        with ExitStack() as ends:
            for j, lane, stream in zip(samples, self._lanes, self._streams, strict=True):
                with _beside(stream, ends), lane.entered(j), lane.passes.at_once():
                    draw, _ = drawn(sampler, lane, j, sampler.begin(lane))
                    found.append((lane, draw, lane.displacement()))
        for name in ("num_forwards", "num_backwards", "num_ascents"):
            setattr(self._space, name, sum(getattr(lane, name) for lane in self._lanes))
        return found


def draws(
    sampler: Sampler, space: ParameterSpace, samples: Sequence[int], lanes: Lanes | None
) -> Iterator[tuple[ParameterSpace, Draw, Tensor]]:
    """Samples, each with the space it was drawn in and its distance from θ: one by one, or first all in their lanes."""
    if lanes is not None:
        yield from lanes.draw(sampler, samples)
        return
    state = sampler.begin(space) if samples else None
    for j in samples:
        space.turn = j
        draw, state = drawn(sampler, space, j, state)
        yield space, draw, space.displacement()


def fits(sampler: Sampler) -> bool:
    """Whether its samples can be drawn beside each other: none needs another one, or an ascent that they share."""
    return sampler.independent and not getattr(sampler, "shared", False)


def rooms_for(space: ParameterSpace, number: int) -> list[Room]:
    """Room for some lanes."""
    on_gpu = space.device.type == "cuda"
    points = [vectors.allocate(space.point)[0] for _ in range(number)]
    return [Room(point, torch.cuda.Stream(space.device) if on_gpu else None) for point in points]


def _beside(stream: torch.cuda.Stream | None, ends: ExitStack) -> AbstractContextManager[object]:
    """Inside, work goes to a stream that begins where the present one is now; which waits for it when ``ends`` end."""
    if stream is None:
        return nullcontext()
    present = torch.cuda.current_stream()
    stream.wait_stream(present)
    ends.callback(present.wait_stream, stream)
    return torch.cuda.stream(stream)
