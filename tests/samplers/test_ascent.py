"""Samplers that ascend, against their formulas on a quadratic."""

import pytest
import torch
from torch import nn

import tiltsam
from helpers.cases import quadratic_problem, sgd
from tiltsam.samplers import AdaptiveAscent, Ascent, CenterThenAscent, Gaussian, LineSearch, RandomAscent, Uniform
from tiltsam.toys.chain_space import ChainSpace, sample_chains

CENTER = torch.tensor([0.5, -2.0, 1.0], dtype=torch.float64)
CURVATURE = torch.tensor([3.0, 1.0, 0.2], dtype=torch.float64)
SETTINGS = {"eta": 0.01, "gamma": 0.1, "lam": 0.5}


def bowl(chains=1000, **options):
    return ChainSpace(
        lambda x: (CURVATURE * x.square()).sum(1) / 2, CENTER, chains, settings=SETTINGS, **{"radius": 0.0, **options}
    )


def unit(v):
    return v / v.norm(dim=-1, keepdim=True)


def gradient(point):
    return CURVATURE * point


def test_ascent_without_noise_is_sam():
    (draw,), (epsilon,) = sample_chains(Ascent(), bowl(rho=0.2))
    torch.testing.assert_close(epsilon, (0.2 * unit(gradient(CENTER))).expand_as(epsilon))
    torch.testing.assert_close(draw.start_loss, ((CURVATURE * CENTER.square()).sum() / 2).expand(1000))


def test_ascent_from_noise_follows_algorithm_2():
    space = bowl(rho=0.2, radius=0.3, seed=3)
    epsilon = sample_chains(Ascent(), space)[1][0]
    delta = sample_chains(Uniform(), bowl(radius=0.3, seed=3))[1][0]  # the same numbers
    torch.testing.assert_close(epsilon, delta + 0.2 * unit(gradient(CENTER + delta)))
    assert epsilon.norm(dim=1).max() <= 0.5


def test_ascent_in_several_steps():
    epsilon = sample_chains(Ascent(num_steps=3), bowl(rho=0.3))[1][0]
    point = CENTER.clone()
    for _ in range(3):
        point = point + 0.1 * unit(gradient(point))
    torch.testing.assert_close(epsilon, (point - CENTER).expand_as(epsilon))


def test_shared_ascent_uses_the_gradient_at_the_center():
    draws, epsilon = sample_chains(Ascent(share_ascent=True), bowl(rho=0.2, radius=0.3, seed=3), num_samples=2)
    delta = sample_chains(Uniform(), bowl(radius=0.3, seed=3), num_samples=2)[1]
    torch.testing.assert_close(epsilon, delta + 0.2 * unit(gradient(CENTER)))
    assert torch.equal(draws[0].start_loss, draws[1].start_loss)


def test_line_search_takes_the_worst_point():
    def wave(x):
        return torch.sin(5 * x).sum(1)

    space = ChainSpace(wave, CENTER, 1, rho=1.0, radius=0.0)
    (draw,), (epsilon,) = sample_chains(LineSearch(10), space)
    direction = unit(5 * torch.cos(5 * CENTER))
    losses = torch.stack([wave((CENTER + k / 10 * direction)[None])[0] for k in range(1, 11)])
    assert 1 <= losses.argmax() + 1 < 10
    torch.testing.assert_close(epsilon[0], (losses.argmax() + 1) / 10 * direction)
    torch.testing.assert_close(draw.loss[0], losses.max())


def test_line_search_ignores_losses_that_are_not_finite():
    def cliff(x):
        return torch.where(x[:, 0] > 0.55, torch.inf, x.square().sum(1))

    space = ChainSpace(cliff, torch.tensor([0.5], dtype=torch.float64), 1, rho=0.1, radius=0.0)
    (draw,), (epsilon,) = sample_chains(LineSearch(10), space)
    assert draw.valid.all()
    assert epsilon.item() == pytest.approx(0.05)


def test_random_ascent_equals_its_formula():
    space = bowl(rho=0.2, seed=3)
    epsilon = sample_chains(RandomAscent(), space)[1][0]
    z = torch.empty(1000, 3, dtype=torch.float64).normal_(generator=torch.Generator().manual_seed(3))
    delta = 0.1 * CENTER.norm() * z
    torch.testing.assert_close(epsilon, 0.2 * unit(delta + 0.5 * gradient(CENTER + delta)))


def test_adaptive_ascent_equals_its_formula():
    epsilon = sample_chains(AdaptiveAscent(), bowl(rho=0.2))[1][0]
    metric = CENTER.abs() + 0.01
    expected = 0.2 * metric.square() * gradient(CENTER) / (metric * gradient(CENTER)).norm()
    torch.testing.assert_close(epsilon, expected.expand_as(epsilon))


def test_center_then_ascent_uses_one_gradient_twice():
    theta, closure = quadratic_problem()
    calls = []
    tiltsam.PGN(sgd([theta], lr=0.0), rho=0.3).step(lambda: calls.append(1) or closure())
    assert len(calls) == 2
    (center, ascended), epsilon = sample_chains(CenterThenAscent(), bowl(rho=0.2), num_samples=2)
    assert epsilon[0].count_nonzero() == 0
    torch.testing.assert_close(epsilon[1], (0.2 * unit(gradient(CENTER))).expand_as(epsilon[1]))
    assert torch.equal(ascended.start_loss, center.loss)


@pytest.mark.parametrize(
    "sampler",
    [Ascent(), Ascent(share_ascent=True), Ascent(num_steps=2), AdaptiveAscent(), LineSearch(), RandomAscent()],
    ids=repr,
)
def test_no_ascent_at_rho_zero(sampler):
    space = bowl(rho=0.0)
    evaluate, calls = space.evaluate, []
    space.evaluate = lambda **options: calls.append(options) or evaluate(**options)
    (draw,), (epsilon,) = sample_chains(sampler, space)
    assert calls == [{}]
    assert epsilon.count_nonzero() == 0
    assert torch.equal(draw.start_loss, draw.loss)


@pytest.mark.parametrize("sampler", [Ascent(), AdaptiveAscent(), LineSearch(), RandomAscent()], ids=repr)
def test_ascent_from_a_point_that_is_not_finite_is_invalid(sampler):
    theta = nn.Parameter(torch.ones(3, dtype=torch.float64))
    calls = []

    def closure():
        calls.append(1)
        loss = theta.square().sum()
        loss.backward()
        return loss * (torch.nan if len(calls) == 1 else 1.0)

    names = {AdaptiveAscent: tiltsam.ASAM, LineSearch: tiltsam.LineSearchSAM, RandomAscent: tiltsam.RSAM}
    optimizer = names.get(type(sampler), tiltsam.SAM)(sgd([theta], lr=0.0))
    assert optimizer.step(closure).isnan()
    assert optimizer.info.num_nonfinite == 1
    assert theta.tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda: Ascent(num_steps=0), "got 0"),
        (lambda: Ascent(share_ascent=True, num_steps=2), "got 2"),
        (lambda: Ascent(num_steps=2.0), r"num_steps .*got 2\.0"),
        (lambda: LineSearch(0), "got 0"),
        (lambda: LineSearch(2.5), r"num_points .*got 2\.5"),
    ],
)
def test_ascent_refuses_bad_arguments(make, value):
    with pytest.raises(ValueError, match=value):
        make()


def test_ascent_is_deterministic_if_its_start_is():
    assert Ascent(tiltsam.samplers.Center()).deterministic
    assert not Ascent(Gaussian(clip=True)).deterministic
