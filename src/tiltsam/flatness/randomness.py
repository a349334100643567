"""Where random numbers come from while data is walked and a loss is evaluated: pinned, and put back afterwards."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["RandomSources"]


class RandomSources:
    """The global generators of torch, numpy and the standard library, and those that a data set brings along.

    Workers of a loader draw their seeds from these when they start; persistent ones start once and are out of reach.

    Args:
        device: Whose global generator counts, beside the CPU's.
        batches: The data set; a loader's own generator is found, and those of its sampler and its data.
    """

    def __init__(self, device: torch.device, batches: object) -> None:
        generators = [torch.default_generator, *_generators(batches)]
        if device.type == "cuda":
            generators.append(torch.cuda.default_generators[device.index])
        self._generators = list({id(g): g for g in generators}.values())  # a loader shares its own with its sampler
        self._numpy: Any = sys.modules.get("numpy")  # who has not imported it draws nothing from it

    def seed(self, seed: int) -> None:
        """Start all of them anew."""
        for generator in self._generators:
            generator.manual_seed(seed)
        random.seed(seed)
        if self._numpy is not None:
            self._numpy.random.seed(seed % 2**32)  # all that it takes

    def state(self) -> tuple[Any, ...]:
        """Where they all are, for :meth:`restore`."""
        numbers = None if self._numpy is None else self._numpy.random.get_state()
        return [g.get_state() for g in self._generators], random.getstate(), numbers

    def restore(self, state: tuple[Any, ...]) -> None:
        """Put all of them back to where they were."""
        own, standard, numbers = state
        for generator, saved in zip(self._generators, own, strict=True):
            generator.set_state(saved)
        random.setstate(standard)
        if self._numpy is not None:
            self._numpy.random.set_state(numbers)


def _generators(source: object) -> Iterator[torch.Generator]:
    """The generators of a loader, of its sampler (which may be a sampler of samplers) and of its data."""
    if isinstance(own := getattr(source, "generator", None), torch.Generator):
        yield own
    for name in ("sampler", "batch_sampler", "dataset"):
        if (part := getattr(source, name, None)) is not None:
            yield from _generators(part)
