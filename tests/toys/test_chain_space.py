"""Samplers on many chains of a known function."""

import pytest
import torch

from tiltsam.samplers import HMC, AdaptiveAscent, Ascent, CenterThenAscent, Gaussian, LineSearch, RandomAscent, Uniform
from tiltsam.toys.chain_space import ChainSpace, sample_chains

CENTER = torch.tensor([0.5, -2.0], dtype=torch.float64)
CURVATURE = torch.tensor([3.0, 1.0], dtype=torch.float64)
SETTINGS = {"eta": 0.01, "gamma": 0.1, "lam": 0.5}


def bowl(**options):
    return ChainSpace(lambda x: (CURVATURE * x.square()).sum(1) / 2, CENTER, 1000, settings=SETTINGS, **options)


@pytest.mark.parametrize(
    "sampler", [Uniform(), Gaussian(std=0.1), Ascent(), LineSearch(), RandomAscent(), AdaptiveAscent(), HMC()], ids=repr
)
def test_draws_hold_loss_and_gradient_at_the_perturbed_point(sampler):
    (draw,), (eps,) = sample_chains(sampler, bowl(rho=0.2, radius=0.3, delta=1.0))
    point = CENTER + eps
    torch.testing.assert_close(draw.loss, (CURVATURE * point.square()).sum(1) / 2)
    torch.testing.assert_close(draw.gradient, CURVATURE * point)
    assert draw.valid.all()


def test_uniform_draws_fill_the_ball():
    eps = sample_chains(Uniform(), bowl(radius=0.3))[1][0]
    quantiles = (eps.norm(dim=1) / 0.3).square().sort().values  # uniform on [0, 1] in two dimensions
    torch.testing.assert_close(quantiles, torch.linspace(0, 1, 1000, dtype=torch.float64), rtol=0, atol=0.06)


def test_adaptive_ascent_scales_by_the_weights():
    eps = sample_chains(AdaptiveAscent(), bowl(rho=0.2))[1][0]
    scale, gradient = CENTER.abs() + SETTINGS["eta"], CURVATURE * CENTER
    want = 0.2 * scale.square() * gradient / (scale * gradient).norm()
    torch.testing.assert_close(eps, want.expand(1000, 2))


def test_samples_of_one_step_share_state():
    (center, ascended), eps = sample_chains(CenterThenAscent(), bowl(rho=0.2), num_samples=2)
    assert eps[0].count_nonzero() == 0
    torch.testing.assert_close(eps[1].norm(dim=1), torch.full((1000,), 0.2, dtype=torch.float64))
    assert (ascended.loss > center.loss).all()


def test_ascent_skips_chains_with_nonfinite_gradient():
    space = ChainSpace(lambda x: x.sum(1) / (torch.arange(4) % 2), torch.ones(2), 4, rho=0.1, radius=0.0)
    (draw,), (eps,) = sample_chains(Ascent(), space)
    assert draw.valid.tolist() == [False, True, False, True]
    assert eps.any(1).tolist() == [False, True, False, True]
