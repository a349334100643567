"""Numbers of a step on the device."""

import pytest
import torch

from tiltsam.space.scalars import DeviceScalars


def scalars(num_groups=1):
    return DeviceScalars(num_groups, torch.float32, torch.device("cpu"))


def test_set_writes_in_place():
    """Captured graphs read the tensor at every replay."""
    numbers = scalars()
    numbers.set("t", 2.0)
    t = numbers.tensors["t"]
    numbers.set("t", 3.0)
    assert numbers.tensors["t"] is t
    assert t == 3.0


def test_set_clamps_to_the_range_of_the_dtype():
    numbers = scalars()
    numbers.set("t", 1e300)
    assert numbers.tensors["t"] == torch.finfo(torch.float32).max


@pytest.mark.parametrize(("radius", "noisy"), [(0.0, False), (0.1, True)])
def test_noisy_if_the_radius_is_not_zero(radius, noisy):
    numbers = scalars()
    numbers.set("radius", radius)
    assert numbers.noisy is noisy


@pytest.mark.parametrize(
    ("values", "shape", "ascending"), [([0.1, 0.1], (), True), ([0.1, 0.2], (2,), True), ([0.0, 0.0], (), False)]
)
def test_rho_has_one_entry_per_group_if_they_differ(values, shape, ascending):
    numbers = scalars(2)
    numbers.set_rho(values)
    assert numbers.rho.shape == shape
    assert numbers.ascending is ascending
    torch.testing.assert_close(numbers.rho.expand(2), torch.tensor(values))


def test_structure_is_what_the_host_decides_by():
    numbers = scalars(2)
    before = numbers.structure()
    numbers.set("t", 3.0)
    assert numbers.structure() == before
    for change in (
        lambda: numbers.set("radius", 0.1),
        lambda: numbers.set_rho([0.1, 0.1]),
        lambda: numbers.set_rho([0, 1]),
    ):
        change()
        assert numbers.structure() != before
        before = numbers.structure()
