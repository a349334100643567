"""The running mean of the samples' gradients."""

import math

import pytest
import torch
from torch import nn

import tiltsam
from helpers.cases import sgd
from tiltsam.space.parameter_space import ParameterSpace
from tiltsam.space.protocol import Draw


def space_of(number=3, size=2):
    return ParameterSpace([[nn.Parameter(torch.ones(size, dtype=torch.float64)) for _ in range(number)]])


def add(space, values, share, valid=True):
    gradient = [None if v is None else torch.full((2,), v, dtype=torch.float64) for v in values]
    share = torch.tensor(share, dtype=torch.float64)
    space.gradient_mean.add(gradient, share, torch.tensor(valid))


def mean_of(space):
    return [None if m is None else m[0].item() for m in space.gradient_mean.tensors]


def test_set_uses_the_gradient_itself():
    space = space_of()
    gradient = [torch.ones(2, dtype=torch.float64), None, torch.ones(2, dtype=torch.float64)]
    addresses = [None if g is None else g.data_ptr() for g in gradient]
    space.gradient_mean.set(gradient)
    space.gradient_mean.assign()
    assert [None if p.grad is None else p.grad.data_ptr() for p in space.params] == addresses
    assert space.gradient_mean.seen == (True, False, True)
    assert not space.gradient_mean._buffers  # no memory for a mean


def test_single_invalid_gradient_becomes_zero():
    space = space_of(1)
    gradient, number = [torch.full((2,), math.nan, dtype=torch.float64)], torch.tensor(1.0)
    space.add_to_mean(Draw(number, gradient, number, torch.tensor(False), number), number, single=True)
    assert mean_of(space) == [0.0]


def test_add_is_a_running_weighted_mean():
    space = space_of(1)
    for value, share in ((3.0, 1.0), (5.0, 0.5), (1.0, 0.25)):
        add(space, [value], share)
    assert mean_of(space) == [0.75 * 4.0 + 0.25 * 1.0]


def test_add_counts_missing_gradients_as_zero():
    """The second parameter has a gradient in the second sample only, the third in the first only, the last never."""
    space = space_of(4)
    for values, share in (
        ([3.0, None, 3.0, None], 1.0),
        ([3.0, 3.0, None, None], 1 / 2),
        ([3.0, None, None, None], 1 / 3),
    ):
        add(space, values, share)
    assert mean_of(space)[:3] == pytest.approx([3.0, 1.0, 1.0])
    assert mean_of(space)[3] is None


def test_scale_skips_missing_gradients():
    """Here all of one dtype are missing."""
    space = ParameterSpace([[nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.float64)]])
    space.gradient_mean.set([torch.full((2,), 3.0), None])
    space.gradient_mean.scale_(torch.tensor(2.0))
    assert mean_of(space) == [6.0, None]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_add_ignores_an_invalid_gradient(value):
    space = space_of(1)
    add(space, [2.0], 1.0)
    add(space, [value], 0.0, valid=False)
    add(space, [4.0], 0.5)
    assert mean_of(space) == [3.0]


@pytest.mark.parametrize("value", [math.nan, 7.0])
def test_add_without_weight_first(value):
    """The memory of the last step must not be left in the mean."""
    space = space_of(1)
    add(space, [9.0], 1.0)
    space.gradient_mean.begin_step()
    add(space, [value], 0.0, valid=False)
    assert mean_of(space) == [0.0]
    add(space, [4.0], 1.0)
    assert mean_of(space) == [4.0]


def test_first_gradient_is_copied():
    """PGN uses it again after it was added, even without weight."""
    space = space_of(1)
    gradient = [torch.full((2,), math.nan, dtype=torch.float64)]
    space.gradient_mean.add(gradient, torch.zeros((), dtype=torch.float64), torch.tensor(False))
    assert gradient[0].isnan().all()
    assert mean_of(space) == [0.0]


def test_mean_reuses_its_memory():
    space = space_of()
    add(space, [1.0, 1.0, 1.0], 1.0)
    addresses = [m.data_ptr() for m in space.gradient_mean.tensors]
    space.gradient_mean.begin_step()
    assert mean_of(space) == [None] * 3
    add(space, [2.0, 2.0, 2.0], 1.0)
    assert [m.data_ptr() for m in space.gradient_mean.tensors] == addresses


def test_discard_zeroes_gradients_that_alias_the_mean():
    space = space_of(2)
    add(space, [1.0, 1.0], 1.0)
    space.gradient_mean.assign()
    space.params[1].grad = torch.ones(2, dtype=torch.float64)
    space.gradient_mean.begin_step()
    add(space, [5.0, 5.0], 1.0)
    space.gradient_mean.discard()
    assert [p.grad[0].item() for p in space.params] == [0.0, 1.0]


def test_scale_multiplies_the_mean():
    space = space_of(2)
    add(space, [1.0, None], 1.0)
    space.gradient_mean.scale_(torch.tensor(8.0, dtype=torch.float64))
    assert mean_of(space) == [8.0, None]


def test_complex_parameters_get_complex_gradients():
    p = nn.Parameter(torch.tensor([1.0 + 2.0j]))
    space = ParameterSpace([[p]])
    space.gradient_mean.set([torch.tensor([[3.0, 4.0]])])
    space.gradient_mean.assign()
    assert p.grad.tolist() == [3.0 + 4.0j]


def test_step_counts_missing_gradients_as_zero():
    theta = [nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(3)]
    calls = [0]

    def closure():  # three samples without ascent
        j = calls[0]
        calls[0] += 1
        used = [theta[0]] + ([theta[1]] if j == 1 else []) + ([theta[2]] if j == 0 else [])
        for p in used:
            p.grad = torch.full_like(p, 3.0)
        return torch.ones(())

    optimizer = tiltsam.TSAM(sgd(theta, lr=0.0), t=0.0, rho=0.0, num_samples=3)
    optimizer.step(closure)
    assert [p.grad.item() for p in theta] == pytest.approx([3.0, 1.0, 1.0])
