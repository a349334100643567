"""Random numbers of a measurement: a generator for each draw, and the global generators pinned meanwhile."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import torch

from tiltsam.space.randomness import derive_seed

__all__ = ["Purpose", "RandomSources", "generator"]


class Purpose(IntEnum):
    """What a draw is for. The numbers exceed any step count: no draw repeats the noise of a training step."""

    NEIGHBORHOOD = 2**32
    WORST_CASE = 2**32 + 1
    OBJECTIVE = 2**32 + 2
    EIGENVALUES = 2**32 + 3
    TRACE = 2**32 + 4
    DENSITY = 2**32 + 5
    DIRECTION = 2**32 + 6


def generator(device: torch.device, purpose: Purpose, seed: int, index: int = 0, sample: int = 0) -> torch.Generator:
    """Return a generator whose draws depend on ``(seed, purpose, index, sample)`` alone."""
    return torch.Generator(device=device).manual_seed(derive_seed(seed, purpose, index, sample))


class RandomSources:
    """The global generators of torch, numpy and the standard library, and those of a data loader.

    The workers of a loader draw their seeds from these when they start. Persistent workers start only once, so they
    cannot be pinned.

    Args:
        device: The device of the model; its global generator is included.
        batches: The data set; generators of a loader, of its samplers and of its data set are found.
    """

    def __init__(self, device: torch.device, batches: object) -> None:
        generators = [torch.default_generator, *_generators(batches)]
        if device.type == "cuda":
            generators.append(torch.cuda.default_generators[device.index])
        self._generators = list({id(g): g for g in generators}.values())  # a loader shares its own with its sampler
        self._numpy: Any = sys.modules.get("numpy")  # if numpy was never imported, nothing draws from it

    def seed(self, seed: int) -> None:
        """Seed all of them."""
        for source in self._generators:
            source.manual_seed(seed)
        random.seed(seed)
        if self._numpy is not None:
            self._numpy.random.seed(seed % 2**32)  # numpy takes 32 bits

    def state(self) -> tuple[Any, ...]:
        """Return their states, for :meth:`restore`."""
        numbers = None if self._numpy is None else self._numpy.random.get_state()
        return [g.get_state() for g in self._generators], random.getstate(), numbers

    def restore(self, state: tuple[Any, ...]) -> None:
        """Restore the states that :meth:`state` returned."""
        own, standard, numbers = state
        for source, saved in zip(self._generators, own, strict=True):
            source.set_state(saved)
        random.setstate(standard)
        if self._numpy is not None:
            self._numpy.random.set_state(numbers)


def _generators(source: object) -> Iterator[torch.Generator]:
    """Yield the generators of a loader, of its samplers (which may be nested) and of its data set."""
    if isinstance(own := getattr(source, "generator", None), torch.Generator):
        yield own
    for name in ("sampler", "batch_sampler", "dataset"):
        if (part := getattr(source, name, None)) is not None:
            yield from _generators(part)
