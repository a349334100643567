"""Samplers of the center, a ball and a Gaussian."""

import pytest
import torch
from torch import nn

from helpers.passes import perturbed
from tiltsam.samplers import Center, Gaussian, Uniform
from tiltsam.space.parameter_space import ParameterSpace
from tiltsam.toys.chain_space import ChainSpace, sample_chains

DIM = 5


def chains(**options):
    center = torch.linspace(-1, 1, DIM, dtype=torch.float64)
    return ChainSpace(lambda x: x.square().sum(1), center, 20_000, **options)


def perturbation(sampler, radius):
    """Return ε of one sample on the parameters of a model, and the draw."""
    theta = nn.Parameter(torch.linspace(-1, 1, DIM, dtype=torch.float64))
    space = ParameterSpace([[theta]])
    space.scalars.set("radius", radius)

    def closure():
        loss = theta.square().sum()
        loss.backward()
        return loss

    start = theta.detach().clone()
    with torch.no_grad(), perturbed(space, [closure]):
        draw = sampler.sample(space, 0, sampler.begin(space))
        epsilon = theta.detach() - start
    assert torch.equal(theta, start)
    return epsilon, draw


def test_center_evaluates_at_the_center():
    (draw,), epsilon = sample_chains(Center(), chains(radius=0.3))
    assert epsilon.count_nonzero() == 0
    assert torch.equal(draw.start_loss, draw.loss)


def test_uniform_is_uniform_in_the_ball():
    lengths = sample_chains(Uniform(), chains(radius=0.3))[1][0].norm(dim=1)
    assert lengths.max() <= 0.3
    quantiles = (lengths / 0.3).pow(DIM).sort().values
    expected = torch.linspace(0, 1, len(quantiles), dtype=torch.float64)
    torch.testing.assert_close(quantiles, expected, rtol=0, atol=0.02)  # 1.36/√20000 = 0.01 at 5 %


@pytest.mark.parametrize(("std", "expected"), [(None, 0.3 / DIM**0.5), (0.05, 0.05)])
def test_gaussian_has_its_standard_deviation(std, expected):
    epsilon = sample_chains(Gaussian(std=std), chains(radius=0.3))[1][0]
    assert epsilon.std().item() == pytest.approx(expected, rel=0.02)
    assert abs(epsilon.mean().item()) < 0.02 * expected


def test_clipped_gaussian_stays_in_the_ball():
    lengths = sample_chains(Gaussian(clip=True), chains(radius=0.3))[1][0].norm(dim=1)
    assert lengths.max() <= 0.3 + 1e-9
    assert 0.2 < (lengths > 0.3 - 1e-9).double().mean() < 0.8


@pytest.mark.parametrize("sampler", [Uniform(), Gaussian(), Gaussian(clip=True), Gaussian(std=0.0)], ids=repr)
def test_no_noise_at_radius_zero(sampler):
    epsilon, draw = perturbation(sampler, radius=0.0)
    assert epsilon.count_nonzero() == 0
    assert draw.valid


@pytest.mark.parametrize("sampler", [Uniform(), Gaussian(), Gaussian(std=0.1), Gaussian(clip=True)], ids=repr)
def test_noise_on_parameters_equals_the_gradient_there(sampler):
    epsilon, draw = perturbation(sampler, radius=0.3)
    assert epsilon.count_nonzero() == DIM
    point = torch.linspace(-1, 1, DIM, dtype=torch.float64) + epsilon
    torch.testing.assert_close(draw.loss, point.square().sum())
    torch.testing.assert_close(draw.gradient_norm, 2 * point.norm())


def test_gaussian_std_does_not_depend_on_radius():
    epsilon, _ = perturbation(Gaussian(std=0.1), radius=0.0)
    assert epsilon.count_nonzero() == DIM


@pytest.mark.parametrize(("sampler", "number"), [(Gaussian(), 0), (Gaussian(clip=True), 1), (Uniform(), 1)], ids=repr)
def test_norm_of_the_noise_is_computed_only_if_it_counts(monkeypatch, sampler, number):
    norms, space = [], chains(radius=0.3)
    monkeypatch.setattr(space, "norm", lambda x: norms.append(x) or x.norm(dim=1))
    sampler.move(space, 0)
    assert len(norms) == number


@pytest.mark.parametrize("std", [-1.0, float("nan"), float("inf"), True, "1"])
def test_gaussian_refuses_bad_std(std):
    with pytest.raises(ValueError, match=f"std .*got {std!r}"):
        Gaussian(std=std)
