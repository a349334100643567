"""The statements of the paper (arXiv:2410.22656, section 3 and its appendix) by quadrature."""

import math

import pytest
import torch

from tiltsam.lab.theory import statements
from tiltsam.tilting import tilted_loss
from tiltsam.toys import (
    COUNTEREXAMPLE,
    HMC_TEST,
    TOY1,
    WAVE,
    Ball,
    Normal,
    Problem,
    lemma_derivatives,
    linear,
    quadratic,
    tsam,
)

F64 = {"dtype": torch.float64}
CASES = [
    (TOY1, 0.9, Ball(0.2)),
    (TOY1, 0.9, Normal(0.2)),
    (HMC_TEST, 0.3, Ball(1.0)),
    (WAVE, 0.1, Normal(0.4)),
]
STRONGLY_CONVEX = Problem("bumpy bowl", lambda x: x * x + 0.2 * (3 * x).sin(), -2.0, 2.0)


@pytest.mark.parametrize(("problem", "theta", "noise"), CASES)
@pytest.mark.parametrize("t", [0.1, 1.0, 7.0])
def test_slope_in_t_equals_divergence(problem, theta, noise, t):
    found, divergence = statements.slope_in_t(problem, theta, t, noise)
    assert found == pytest.approx(divergence, rel=1e-6, abs=1e-6)
    assert divergence > 0


@pytest.mark.parametrize(("problem", "theta", "noise"), CASES)
def test_objective_never_decreases_in_t(problem, theta, noise):
    values = [float(tsam(problem, theta, t, noise).value) for t in (0, 1e-4, 0.01, 0.1, 1, 3, 10, 30)]
    assert values == sorted(values)


def test_limits_in_t():
    ends = statements.limits(HMC_TEST, 0.0, Ball(1.0))
    assert ends.mean == pytest.approx(math.sin(2) / 2, abs=1e-12)
    assert ends.small == pytest.approx(ends.mean, abs=1e-8)
    assert ends.large == pytest.approx(ends.maximum, abs=1e-5)
    assert ends.large < ends.maximum


@pytest.mark.parametrize(("problem", "theta", "noise"), [c for c in CASES if c[0] is not TOY1 or c[2] == Ball(0.2)])
def test_small_t_expansion(problem, theta, noise):
    found, third = statements.small_t(problem, theta, noise)
    assert found == pytest.approx(third, abs=1e-8)
    assert abs(third) > 1e-4  # so o(t^2), as printed, would be wrong


@pytest.mark.parametrize("num", [1, 2, 50])
@pytest.mark.parametrize("t", [0.1, 5.0, 1e3])
def test_tilted_loss_of_finite_samples_is_close_to_maximum(num, t):
    losses = torch.randn(num, generator=torch.Generator().manual_seed(num), **F64)
    value, maximum = float(tilted_loss(losses, t)), float(losses.max())
    assert maximum - math.log(num) / t - 1e-12 <= value <= maximum + 1e-12


@pytest.mark.parametrize(("problem", "theta", "noise"), CASES)
def test_constant_shifts_value_only(problem, theta, noise):
    shifted = Problem("shifted", lambda x: problem.loss(x) + 7.0, problem.lo, problem.hi)
    before, after = tsam(problem, theta, 2.0, noise), tsam(shifted, theta, 2.0, noise)
    assert float(after.value - before.value) == pytest.approx(7.0, abs=1e-8)
    assert float(after.grad) == pytest.approx(float(before.grad), abs=1e-8)


@pytest.mark.parametrize(("problem", "theta", "noise"), CASES)
@pytest.mark.parametrize("t", [0.0, 2.0])
def test_lemma_3_2(problem, theta, noise, t):
    grad, hess = lemma_derivatives(problem, theta, t, noise)
    exact = tsam(problem, theta, t, noise)
    assert float(grad) == pytest.approx(float(exact.grad), rel=1e-8, abs=1e-8)
    assert float(hess) == pytest.approx(float(exact.hess), rel=1e-8, abs=1e-8)


@pytest.mark.parametrize("problem", [TOY1, COUNTEREXAMPLE, linear(-2.0)], ids=lambda p: p.name)
@pytest.mark.parametrize("t", [0.0, 1.0, 20.0])
def test_lipschitz(problem, t):
    steepest, bound = statements.lipschitz(problem, t, Ball(0.2))
    assert steepest <= bound + 1e-8
    assert steepest > 0.2 * bound


@pytest.mark.parametrize("t", [0.0, 1.0, 20.0])
def test_strong_convexity(t):
    for problem, mu in ((STRONGLY_CONVEX, 0.2), (quadratic(3.0), 3.0)):
        least, reference = statements.strong_convexity(problem, t, Ball(0.5))
        assert reference == pytest.approx(mu, abs=1e-3)
        assert least >= reference - 1e-8


@pytest.mark.parametrize("t", [0.0, 0.5, 2.0, 7.9])
@pytest.mark.parametrize("theta", [0.0, 0.7, -1.5])
def test_quadratic_under_gaussian_noise(t, theta):
    closed = statements.quadratic_under_normal(torch.tensor([3.0], **F64), torch.tensor([theta], **F64), t, 0.2)
    here = tsam(quadratic(3.0), theta, t, Normal(0.2))
    left = 1 - t * 0.04 * 3
    assert float(here.value) == pytest.approx(closed, abs=1e-8)
    assert float(here.grad) == pytest.approx(3 * theta / left, rel=1e-8, abs=1e-8)
    assert float(here.hess) == pytest.approx(3 / left, rel=1e-7)


def test_quadratic_under_gaussian_noise_in_more_dimensions():
    curvatures, theta = torch.tensor([3.0, 1.0, -2.0], **F64), torch.tensor([0.1, 0.2, 0.3], **F64)
    parts = [statements.quadratic_under_normal(curvatures[k, None], theta[k, None], 2.0, 0.2) for k in range(3)]
    assert statements.quadratic_under_normal(curvatures, theta, 2.0, 0.2) == pytest.approx(sum(parts), abs=1e-12)
    for t in (1 / 0.12 + 1e-9, 20.0):  # t sigma^2 lambda >= 1
        assert statements.quadratic_under_normal(curvatures, theta, t, 0.2) == math.inf
        assert float(tsam(quadratic(3.0), 0.1, t, Normal(0.2)).value) == math.inf


@pytest.mark.parametrize("t", [0.0, 1e-5, 1e-3, 1.0, 50.0, 1e5])
@pytest.mark.parametrize("slope", [2.0, -0.3])
def test_linear_under_uniform_noise(t, slope):
    here = tsam(linear(slope), 0.4, t, Ball(0.5))
    assert float(here.value) - 0.4 * slope == pytest.approx(statements.linear_under_ball(slope, 0.5, t), abs=1e-8)
    assert float(here.grad) == pytest.approx(slope, abs=1e-8)


@pytest.mark.parametrize("t", [0.0, 1.0, 100.0, 1000.0])
@pytest.mark.parametrize("theta", [0.0, 0.4])
def test_smoothness_bound(t, theta):
    found, bound = statements.smoothness(quadratic(3.0), theta, t, Ball(0.5), 3.0)
    assert found <= bound + 1e-8


def test_smoothness_rate_of_a_quadratic():
    found, bound = statements.smoothness(quadratic(3.0), 0.0, 1000.0, Ball(0.5), 3.0)
    assert found / 1000 == pytest.approx(2.247, abs=5e-4)
    assert bound / 1000 == pytest.approx(2.25, abs=5e-3)


def test_smoothness_lemma_fails_for_linear_losses():
    assert statements.smoothness(linear(2.0), 0.0, 1000.0, Ball(0.5), 0.0).found == pytest.approx(0, abs=1e-8)


def test_theorem_3_6_counterexample():
    pair = statements.prefers_flatter(COUNTEREXAMPLE, 0.0, -10.0, 0.3, Ball(1.0))
    assert pair.var1 == pytest.approx(0.282, abs=5e-4)
    assert pair.var2 == pytest.approx(0.266, abs=5e-4)
    assert pair.slope == pytest.approx(-0.0122, abs=5e-5)
    assert pair.integral == pytest.approx(pair.slope, abs=1e-8)
    theta = torch.linspace(-12, 2, 2001, **F64)
    assert (COUNTEREXAMPLE.derivatives(theta).hess >= -1e-9).all()  # convex, as the theorem assumes


@pytest.mark.parametrize("t", [0.3, 3.0])
@pytest.mark.parametrize(
    ("problem", "theta1", "theta2", "noise"),
    [(TOY1, 0.42, 0.9, Ball(0.2)), (WAVE, 0.0, 0.5, Normal(0.3)), (HMC_TEST, -0.5, 0.2, Ball(1.0))],
)
def test_theorem_3_6_identity(problem, theta1, theta2, noise, t):
    pair = statements.prefers_flatter(problem, theta1, theta2, t, noise)
    assert pair.integral == pytest.approx(pair.slope, abs=1e-8)


def test_theorem_3_6_holds_if_sharper_at_all_smaller_tilts():
    """On a quadratic, a point on the slope is sharper than the minimum at every s, so g grows."""
    for s in (0.0, 0.5, 1.0, 2.0):
        both = tsam(quadratic(1.0), torch.tensor([1.0, 0.0], **F64), s, Ball(0.3)).var
        assert both[0] > both[1]
    assert statements.prefers_flatter(quadratic(1.0), 1.0, 0.0, 2.0, Ball(0.3)).slope > 0


def test_theorem_3_6_identity_at_large_tilt():
    """Variances decrease like 1/s^2 at large s, so the integral needs short panels where s is small."""
    pair = statements.prefers_flatter(TOY1, 0.4, 0.9, 300.0, Ball(0.2))
    assert pair.integral == pytest.approx(pair.slope, rel=1e-6)


@pytest.mark.parametrize("t", [0.01, 0.5, 1.12, 5.0, 1000.0])  # at 1000 the upper bound overflows to inf
def test_jensen_gap_is_between_variance_terms(t):
    gap = float(tsam(WAVE, 0.0, t, Ball(1.0)).value - tsam(WAVE, 0.0, 0.0, Ball(1.0)).value)
    lower, upper = (statements.variance_term(WAVE, 0.0, t, Ball(1.0), maximum) for maximum in (1.0, 0.0))
    assert lower - 1e-12 <= gap <= upper + 1e-12


def test_best_tilt():
    best = statements.best_tilt(WAVE, 0.0, Ball(1.0), 1.0)
    assert best.theta == pytest.approx(1.122, abs=5e-4)
    assert best.value == pytest.approx(0.01626, abs=5e-6)
    bound = statements.generalisation_bound(WAVE, 0.0, 1.122, Ball(1.0), 1.0, num_data=1000, confidence=0.05)
    assert bound.risk == pytest.approx(0.5730, abs=5e-5)


def test_generalisation_bound():
    bound = statements.generalisation_bound(WAVE, 0.2, 1.12, Ball(1.0), 1.0, num_data=1000, confidence=0.05)
    losses = WAVE.loss(0.2 + torch.linspace(-1, 1, 200_001, **F64))
    term = (1.12 * losses).exp().var() / (2 * 1.12 * math.exp(2.24))
    assert bound.hoeffding == pytest.approx(math.sqrt(math.log(40) / 2000), abs=1e-12)
    assert bound.variance == pytest.approx(float(term), abs=1e-6)
    assert bound.smoothing == pytest.approx(float(WAVE.loss(torch.tensor(0.2, **F64)) - losses.mean()), abs=3e-6)
    assert bound.total == pytest.approx(bound.hoeffding - bound.variance + bound.smoothing, abs=1e-12)


def test_bound_on_risk_is_smallest_without_tilt():
    risks = [
        statements.generalisation_bound(WAVE, 0.2, t, Ball(1.0), 1.0, 1000, 0.05).risk for t in (1e-6, 0.1, 1, 5, 50)
    ]
    assert risks == sorted(risks)
    plain = float(WAVE.loss(torch.tensor(0.2, **F64))) + math.sqrt(math.log(40) / 2000)
    assert risks[0] == pytest.approx(plain, abs=1e-6)
