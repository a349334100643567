"""Generators by seed and purpose; global generators pinned."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from tiltsam.flatness.randomness import Purpose, RandomSources, generator
from tiltsam.space.randomness import derive_seed

CPU = torch.device("cpu")


def test_generators_are_independent() -> None:
    keys = [(Purpose.TRACE, 0, 1), (Purpose.TRACE, 1, 0), (Purpose.TRACE, 0, 0), (Purpose.DENSITY, 0, 0)]
    keys += [(Purpose.OBJECTIVE, 0, 0, 1), (Purpose.OBJECTIVE, 0, 1, 0)]
    draws = torch.stack([torch.randn(64, generator=generator(CPU, *key)) for key in keys])
    assert torch.corrcoef(draws).fill_diagonal_(0).abs().max() < 0.5
    assert torch.equal(torch.randn(64, generator=generator(CPU, *keys[0])), draws[0])


def test_generator_uses_the_seeds_of_the_optimizer() -> None:
    """And of no step that a training run takes."""
    expected = derive_seed(3, Purpose.NEIGHBORHOOD, 5, 0)
    assert generator(CPU, Purpose.NEIGHBORHOOD, 3, 5).initial_seed() == expected
    assert min(Purpose) >= 2**32


def test_random_sources_can_be_seeded_and_restored() -> None:
    own = torch.Generator()
    loader = DataLoader(TensorDataset(torch.arange(5)), shuffle=True, generator=own)
    sources = RandomSources(CPU, loader)

    def draw() -> list[float]:
        return [torch.rand(()).item(), torch.rand((), generator=own).item(), np.random.rand(), random.random()]

    sources.seed(7)
    first = draw()
    sources.seed(7)
    assert draw() == first
    state = sources.state()
    following = draw()
    draw()
    sources.restore(state)
    assert draw() == following
