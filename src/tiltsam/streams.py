"""Where a step's random numbers come from: streams that follow from (seed, step, sample) and nothing else.

So a resumed run draws what an unbroken one would have drawn, every rank of a distributed run draws the same, nothing
random is checkpointed, and the global generators are never touched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Streams", "stream_seed"]

_MASK = (1 << 64) - 1


class Streams:
    """The random streams of one set of parameters.

    Args:
        devices: Where the parameters live. Each device has streams of its own, told apart by its place in this list and
            not by its number: one process on ``cuda:0`` and another on ``cuda:1`` draw the same.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._places = {device: i for i, device in enumerate(dict.fromkeys(devices))}
        self._key = (0, 0)
        self._generators: dict[tuple[torch.device, int], torch.Generator] = {}
        self._number: Tensor | None = None

    def begin(self, seed: int, step: int) -> None:
        """Begin the streams of a step."""
        self._key = (seed, step)
        for (device, sample), generator in self._generators.items():
            generator.manual_seed(self._seed(sample, device))
        if self._number is not None:
            self._number.fill_(self._seed(0, self._number.device))

    def generator(self, sample: int, device: torch.device) -> torch.Generator:
        """The stream of a sample, as torch's own kernels take it."""
        generator = self._generators.get((device, sample))
        if generator is None:
            generator = torch.Generator(device)
            generator.manual_seed(self._seed(sample, device))
            self._generators[device, sample] = generator
        return generator

    def number(self, device: torch.device) -> Tensor:
        """The step's seed on the device, for kernels that count samples and elements themselves."""
        if self._number is None:
            self._number = torch.full((), self._seed(0, device), dtype=torch.int64, device=device)
        return self._number

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Before a capture: the graph may draw from all generators there are."""
        for generator in self._generators.values():
            graph.register_generator_state(generator)

    def forget(self) -> None:
        """After a capture that failed, which leaves generators unusable: they are made again from their seeds."""
        self._generators.clear()

    def _seed(self, sample: int, device: torch.device) -> int:
        return stream_seed(*self._key, sample, self._places[device])


def stream_seed(seed: int, step: int, sample: int, place: int = 0) -> int:
    """The 63-bit seed of a stream: splitmix64's finaliser after each word gives neighbours unrelated streams."""
    state = 0
    for word in (seed, step, sample, place):
        state = (state + word + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1
