"""Random numbers of a step, derived from (seed, step, sample) alone.

A resumed run draws what an uninterrupted one would have drawn, all ranks draw the same, nothing random is
checkpointed, and torch's global generators are never used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["NoiseGenerators", "derive_seed"]

_MASK = (1 << 64) - 1


def derive_seed(*words: int) -> int:
    """Mix integers into a 63-bit seed: splitmix64's finaliser after each word, so that neighbours are unrelated."""
    state = 0
    for word in words:
        state = (state + word + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


class NoiseGenerators:
    """A ``torch.Generator`` for each sample and device.

    Args:
        devices: Devices of the parameters. A device counts by its position in this list, not by its number: one process
            on ``cuda:0`` and another on ``cuda:1`` draw the same.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._positions = {device: i for i, device in enumerate(dict.fromkeys(devices))}
        self._seed, self._step = 0, 0
        self._generators: dict[tuple[torch.device, int], torch.Generator] = {}
        self._device_seed: Tensor | None = None

    def begin_step(self, seed: int, step: int) -> None:
        """Seed all generators for a step."""
        self._seed, self._step = seed, step
        for (device, sample), generator in self._generators.items():
            generator.manual_seed(derive_seed(seed, step, sample, self._positions[device]))
        if self._device_seed is not None:
            self._device_seed.fill_(self._derive(0, self._device_seed.device))

    def generator(self, sample: int, device: torch.device) -> torch.Generator:
        """Return the generator of a sample."""
        generator = self._generators.get((device, sample))
        if generator is None:
            generator = torch.Generator(device)
            generator.manual_seed(self._derive(sample, device))
            self._generators[device, sample] = generator
        return generator

    def device_seed(self, device: torch.device) -> Tensor:
        """Return the step's seed on the device, for kernels that count samples and elements themselves."""
        if self._device_seed is None:
            self._device_seed = torch.full((), self._derive(0, device), dtype=torch.int64, device=device)
        return self._device_seed

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Let a graph that is about to be captured draw from all existing generators."""
        for generator in self._generators.values():
            graph.register_generator_state(generator)

    def discard(self) -> None:
        """Drop all generators: a failed capture leaves them unusable. They are made again from their seeds."""
        self._generators.clear()

    def _derive(self, sample: int, device: torch.device) -> int:
        return derive_seed(self._seed, self._step, sample, self._positions[device])
