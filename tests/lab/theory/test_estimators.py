"""Gradient estimators of the optimizer against the exact gradient."""

import pytest
import torch

from tiltsam.lab.theory import estimators
from tiltsam.lab.theory.estimators import ESTIMATORS
from tiltsam.samplers import HMC, Uniform
from tiltsam.tilting import tilted_weights
from tiltsam.toys import HMC_TEST, Ball, tsam
from tiltsam.toys.chain_space import ChainSpace, sample_chains

MANY = 300
CONSISTENT = ["uniform", "Gaussian", "HMC leapfrog", "HMC Euler, corrected"]


@pytest.mark.parametrize("t", [1.0, 5.0])
@pytest.mark.parametrize("name", CONSISTENT)
def test_consistent_estimators_converge_to_exact_gradient(name, t):
    few, many = estimators.measure(ESTIMATORS[name], t, (3, MANY), num_draws=15_000)
    # At most .035 to .06; most inconsistent ones below have .085 and more.
    assert abs(many.bias) < 4 * many.bias_error + 0.02 * few.std
    assert many.std < few.std / 3


@pytest.mark.parametrize(
    ("name", "t", "least"),
    [
        ("Algorithm 2, δ = t/2", 1.0, 0.05),
        ("Algorithm 2, δ = t/2", 5.0, 0.2),
        ("Algorithm 2, δ = 0", 1.0, 0.01),
        ("HMC Euler, as printed", 1.0, 0.07),
        ("HMC Euler, as printed", 5.0, 0.07),
        ("HMC leapfrog, 1 proposal", 5.0, 0.1),
    ],
)
def test_inconsistent_estimators_are_biased(name, t, least):
    assert name not in CONSISTENT
    (many,) = estimators.measure(ESTIMATORS[name], t, [MANY], num_draws=60_000 if least < 0.02 else 9_000)
    assert abs(many.bias) > max(least, 3 * many.bias_error)


def test_bias_of_normalised_weights_decreases_like_one_over_s():
    some, more = estimators.measure(ESTIMATORS["uniform"], 5.0, (50, 200), num_draws=400_000)
    assert some.bias > 10 * some.bias_error
    assert some.bias / more.bias == pytest.approx(4, rel=0.5)
    assert some.std / more.std == pytest.approx(2, rel=0.2)


def test_measure_equals_sampling_step_by_step():
    space = ChainSpace(
        lambda x: HMC_TEST.loss(x[:, 0]), torch.tensor([-1.0], dtype=torch.float64), 4000, radius=1.0, seed=1
    )
    draws, _ = sample_chains(Uniform(), space, num_samples=5)
    losses, gradients = (torch.stack(x, 1) for x in zip(*((d.loss, d.gradient[:, 0]) for d in draws), strict=True))
    weights = torch.stack([tilted_weights(row, 1.0) for row in losses])
    stepwise = (weights * gradients).sum(1)
    (grouped,) = estimators.measure(ESTIMATORS["uniform"], 1.0, [5], num_draws=20_000)
    exact = float(tsam(HMC_TEST, -1.0, 1.0, Ball(1.0)).grad)
    assert float(stepwise.mean()) - exact == pytest.approx(grouped.bias, abs=5 * grouped.bias_error)
    assert float(stepwise.std()) == pytest.approx(grouped.std, rel=0.1)


def test_gaussian_draws_miss_the_weight_at_large_tilt():
    """By Stein's identity the mean of the tilted noise is t sigma^2 times the gradient, here 8.3 sigma."""
    (many,) = estimators.measure(ESTIMATORS["Gaussian"], 20.0, [300], num_draws=9_000)
    assert 20.0 * 0.5 * many.exact == pytest.approx(8.27, abs=0.01)
    assert abs(many.bias) > 0.4


def test_measure_refuses_too_few_draws():
    with pytest.raises(ValueError, match=r"num_draws .*200.*150"):
        estimators.measure(ESTIMATORS["uniform"], 1.0, [100], num_draws=150)


def test_ks_distance():
    eps, height, exact = estimators.exact_density(HMC_TEST, 1.0)
    assert float(torch.trapezoid(height, eps)) == pytest.approx(1, abs=1e-9)
    uniform = (torch.arange(5000, dtype=torch.float64) + 0.5) / 5000
    right = torch.searchsorted(exact, uniform)
    perfect = eps[right]  # quantiles of the exact distribution
    assert estimators.ks_distance(perfect, HMC_TEST, 1.0) < 1e-3
    assert estimators.ks_distance(perfect, HMC_TEST, 2.0) > 0.05
    assert estimators.ks_distance(2 * uniform - 1, HMC_TEST, 0.0) < 1e-3


@pytest.mark.parametrize("integrator", ["leapfrog", "euler-corrected"])
def test_exact_hmc_draws_from_tilted_density(integrator):
    sampler = HMC(1, 0.8, 1.0, integrator, "reflect", num_proposals=12)
    draws = estimators.draw_perturbations(sampler, delta=1.0, num_draws=150_000, seed=5)
    assert estimators.ks_distance(draws, HMC_TEST, 1.0) < 0.005


def test_printed_hmc_is_biased():
    sampler = HMC(1, 0.5, 1.0, "euler", "reflect", num_proposals=12)
    draws = estimators.draw_perturbations(sampler, delta=1.0, num_draws=30_000, seed=5)
    assert estimators.ks_distance(draws, HMC_TEST, 1.0) > 0.03


def test_study_and_table_cover_all_estimators():
    found = estimators.study(tilts=(1.0, 5.0), num_samples=(1, 3), num_draws=64)
    assert len(found) == 2 * len(ESTIMATORS) * 2
    assert {q.name for q in found} == set(ESTIMATORS)
    lines = estimators.render(found).splitlines()
    assert len(lines) == 1 + 2 * len(ESTIMATORS)
    assert lines[0].split()[-3:] == ["s", "=", "3"]
    assert f"{found[0].bias:+.3f} ({found[0].bias_error:.3f}) {found[0].std:.3f}" in lines[1]
