"""Seeds and generators of the noise."""

import torch

from tiltsam.space.randomness import NoiseGenerators, derive_seed


def test_derived_seeds_differ():
    seeds = {
        derive_seed(seed, step, sample, device)
        for seed in range(4)
        for step in range(20)
        for sample in range(5)
        for device in range(2)
    }
    assert len(seeds) == 4 * 20 * 5 * 2
    assert all(0 <= s < 2**63 for s in seeds)


def test_derived_seed_depends_on_the_order_of_words():
    assert derive_seed(1, 2) != derive_seed(2, 1)


def test_seeds_do_not_depend_on_the_number_of_the_device():
    """Processes with one GPU each, of different numbers, must draw the same."""
    ranks = [NoiseGenerators([torch.device("cuda", i), torch.device("cpu")]) for i in range(2)]
    assert ranks[0]._derive(3, torch.device("cuda", 0)) == ranks[1]._derive(3, torch.device("cuda", 1))
    assert ranks[0]._derive(3, torch.device("cuda", 0)) != ranks[0]._derive(3, torch.device("cpu"))


def test_generators_are_seeded_at_every_step():
    device = torch.device("cpu")
    generators = NoiseGenerators([device])
    drawn = {}
    for step in (0, 1, 0):
        generators.begin_step(5, step)
        for sample in (1, 0):
            x = torch.rand((), generator=generators.generator(sample, device)).item()
            assert drawn.setdefault((step, sample), x) == x
    assert len(set(drawn.values())) == 4
    expected = torch.rand((), generator=torch.Generator().manual_seed(derive_seed(5, 1, 0, 0))).item()
    assert drawn[1, 0] == expected


def test_device_seed_is_updated_in_place():
    device = torch.device("cpu")
    generators = NoiseGenerators([device])
    generators.begin_step(5, 0)
    seed = generators.device_seed(device)
    assert seed.item() == derive_seed(5, 0, 0, 0)
    generators.begin_step(5, 1)
    assert generators.device_seed(device) is seed
    assert seed.item() == derive_seed(5, 1, 0, 0)


def test_discarded_generators_are_made_again():
    device = torch.device("cpu")
    generators = NoiseGenerators([device])
    generators.begin_step(5, 7)
    first = torch.rand((), generator=generators.generator(0, device))
    generators.discard()
    assert torch.equal(torch.rand((), generator=generators.generator(0, device)), first)
