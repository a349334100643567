"""Toy problems, exact objectives and what is built on them, against SPEC §8 and against independent computations."""

import math

import pytest
import torch
from scipy import integrate

from tiltsam import toys
from tiltsam.toys import COUNTEREXAMPLE, HMC_TEST, TOY1, TOY2, WAVE, Ball, Normal
from tiltsam.toys.quadrature import adaptive_nodes, gauss_hermite, gauss_legendre

F64 = {"dtype": torch.float64}
SMOOTH = [TOY1, HMC_TEST, WAVE, COUNTEREXAMPLE, toys.quadratic(3.0), toys.linear(-2.0)]
NOISES = [Ball(0.2), Ball(1.0), Normal(0.2)]


def slope(problem):
    return lambda x: toys.erm(problem, x).grad


def tsam_grad(problem, t, noise):
    return lambda x: toys.tsam(problem, x, t, noise).grad


def tsam_value(problem, t, noise):
    return lambda x: toys.tsam(problem, x, t, noise).value


# --- quadrature ---


@pytest.mark.parametrize("order", [2, 5, 16])
def test_gauss_rules_are_exact_to_their_degree(order):
    x, w = gauss_legendre(order)
    z, v = gauss_hermite(order)
    for k in range(2 * order):
        monomial = 0 if k % 2 else 2 / (k + 1)
        assert float((w * x**k).sum()) == pytest.approx(monomial, abs=1e-12)
    for k in range(0, min(2 * order, 12), 2):
        assert float((v * z**k).sum()) == pytest.approx(math.prod(range(1, k, 2)), rel=1e-10)


def test_adaptive_nodes_resolve_a_needle_and_a_jump():
    def integrand(row, x):
        needle = -(((x - 0.3) / 1e-5) ** 2) / 2
        step = (x > 1 / 3).double()
        return torch.where(row == 0, needle, torch.zeros_like(x)), torch.stack([torch.ones_like(x), step])

    nodes = adaptive_nodes(integrand, torch.linspace(0, 1, 9, **F64).expand(2, -1), num_judged=2)
    sums = [(nodes.weight * nodes.log_weight.exp() * f)[nodes.row == r].sum() for r, f in enumerate(nodes.factors)]
    assert float(sums[0]) == pytest.approx(1e-5 * math.sqrt(2 * math.pi), rel=1e-11)
    assert float(sums[1]) == pytest.approx(2 / 3, rel=1e-11)


def test_an_unresolvable_integrand_is_an_error():
    def noise(row, x):
        return torch.zeros_like(x), torch.stack([torch.ones_like(x), torch.rand_like(x)])

    with pytest.raises(ArithmeticError, match="not resolved"):
        adaptive_nodes(noise, torch.linspace(0, 1, 5, **F64)[None], num_judged=2)


# --- problems ---


def test_toy1_minima():
    found = toys.stationary_points(slope(TOY1), 0.2, 2.5)[::2]
    torch.testing.assert_close(found, torch.tensor(TOY1.minima, **F64), rtol=0, atol=1e-11)
    point = toys.erm(TOY1, found)
    assert [round(x, 4) for x in found.tolist()] == [0.3576, 0.8677, 1.3704, 1.8715, 2.3721]
    assert [round(x, 3) for x in point.value.tolist()] == [-2.728, -1.148, -0.728, -0.530, -0.412]
    assert [round(x) for x in point.hess.tolist()] == [431, 181, 115, 84, 67]


@pytest.mark.parametrize("problem", [TOY1, HMC_TEST, WAVE])
def test_known_peaks_are_peaks(problem):
    for place, height in problem.peaks:
        there = toys.erm(problem, place)
        assert float(there.value) == pytest.approx(height, abs=1e-11)
        assert abs(float(there.grad)) < 1e-8
        assert float(there.hess) < 0


def test_toy1_is_smooth_through_the_origin():
    theta = torch.tensor([-0.3 / (4 * math.pi), -1e-9, 0.0, 1e-4, 0.3 / (4 * math.pi)], **F64)
    loss, grad, hess = TOY1.derivatives(theta)
    z = 4 * math.pi * theta
    torch.testing.assert_close(loss, 4 * math.pi * torch.sinc(z / math.pi) + 0.005 * (theta - 1) ** 2)
    # sin(z)/theta = 4 pi (1 - z^2/6 + z^4/120 - ...)
    want_grad = (4 * math.pi) ** 2 * (-z / 3 + z**3 / 30 - z**5 / 840) + 0.01 * (theta - 1)
    want_hess = (4 * math.pi) ** 3 * (-1 / 3 + z**2 / 10 - z**4 / 168) + 0.01
    torch.testing.assert_close(grad, want_grad, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(hess, want_hess, rtol=1e-5, atol=0)


def test_toy2_is_the_printed_function():
    theta = torch.tensor([0.0, 1.0, 2.0, 2.0 + 1e-9, 3.0, 4.0], **F64)
    torch.testing.assert_close(TOY2.loss(theta), torch.tensor([0.99, -0.01, 0.99, 1.0, 0.0, 1.0], **F64))


# --- objectives ---


@pytest.mark.parametrize("t", [0.0, 1e-3, 0.5, 3.0, 30.0])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("problem", [TOY1, TOY2, HMC_TEST], ids=lambda p: p.name)
def test_tsam_value_against_scipy(problem, noise, t):
    theta = 0.9
    reach = noise.rho if isinstance(noise, Ball) else 14 * noise.sigma

    def prior(e):
        if isinstance(noise, Ball):
            return 1 / (2 * noise.rho)
        return math.exp(-((e / noise.sigma) ** 2) / 2) / (noise.sigma * math.sqrt(2 * math.pi))

    def loss(e):
        return float(problem.loss(torch.tensor(theta + e, **F64)))

    top = float(problem.loss(theta + torch.linspace(-reach, reach, 1001, **F64)).max())
    cuts = sorted(b - theta for b in (0.0, *problem.breaks) if abs(b - theta) < reach)

    def mean(f):
        return integrate.quad(f, -reach, reach, points=cuts or None, limit=400, epsabs=0, epsrel=1e-11)[0]

    want = mean(lambda e: prior(e) * loss(e)) if t == 0 else None
    if want is None:
        want = top + math.log(mean(lambda e: prior(e) * math.exp(t * (loss(e) - top)))) / t
    if problem is TOY2 and isinstance(noise, Normal) and 2 * t * noise.sigma**2 >= 1:
        want = math.inf  # of its quadratic, beyond what scipy was shown
    assert float(toys.tsam(problem, theta, t, noise).value) == pytest.approx(want, abs=2e-10)


def test_gaussian_objective_against_gauss_hermite():
    z, w = gauss_hermite(60)
    loss = HMC_TEST.loss(0.4 + 0.3 * z)
    want = (w * (2 * loss).exp()).sum().log() / 2
    assert float(toys.tsam(HMC_TEST, 0.4, 2.0, Normal(0.3)).value) == pytest.approx(float(want), abs=1e-12)


@pytest.mark.parametrize("t", [0.0, 1e-6, 0.7, 20.0])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("problem", SMOOTH, ids=lambda p: p.name)
def test_derivatives_agree_with_the_lemma_and_with_differences(problem, noise, t):
    if problem.name == "quadratic" and isinstance(noise, Normal):
        t = min(t, 7.0)  # infinite from 1/(3 * .2**2) = 8.3 on
    theta = torch.tensor([-0.4, 0.31, 0.9], **F64)
    here = toys.tsam(problem, theta, t, noise)
    grad, hess = toys.lemma_derivatives(problem, theta, t, noise)
    torch.testing.assert_close(here.grad, grad, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(here.hess, hess, rtol=1e-7, atol=1e-7)
    after, before = (toys.tsam(problem, theta + sign * 1e-5, t, noise) for sign in (1, -1))
    torch.testing.assert_close((after.value - before.value) / 2e-5, here.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("noise", [Ball(0.3), Normal(0.1)])
def test_derivatives_see_kinks_and_jumps(noise):
    """At toy 2's kink and jump the lemma's E_w[L'] misses the jump; the derivative through the density does not."""
    theta = torch.tensor([0.95, 1.9, 2.05], **F64)
    here = toys.tsam(TOY2, theta, 2.0, noise)
    after, before = (toys.tsam(TOY2, theta + sign * 1e-5, 2.0, noise) for sign in (1, -1))
    torch.testing.assert_close((after.value - before.value) / 2e-5, here.grad, rtol=0, atol=1e-6)
    torch.testing.assert_close((after.grad - before.grad) / 2e-5, here.hess, rtol=0, atol=1e-3)
    lemma = toys.lemma_derivatives(TOY2, theta, 2.0, noise)[0]
    assert (lemma - here.grad).abs().max() > 1e-3


def test_gaussian_noise_is_followed_to_where_the_tilt_puts_its_mass():
    # The high peak at 0 is 18 sigma away, with next to nothing on the way there.
    eps = torch.linspace(-2, 2, 400_001, dtype=torch.float64)
    height = 50 * TOY1.loss(0.9 + eps) - (eps / 0.05).square() / 2
    want = (height.logsumexp(0) + math.log(1e-5 / (0.05 * math.sqrt(2 * math.pi)))) / 50
    assert float(toys.tsam(TOY1, 0.9, 50.0, Normal(0.05)).value) == pytest.approx(float(want), abs=1e-10)
    # Linear: the mass moves by t sigma^2 slope, here 200 sigma.
    assert float(toys.tsam(toys.linear(2.0), 0.3, 2000.0, Normal(0.05)).value) == pytest.approx(10.6, abs=1e-9)


def test_a_mean_that_is_infinite_is_so_from_everywhere():
    # To the right toy 2 is a quadratic of curvature 2: infinite from t = 1/(2 sigma^2) on, if far from the centre.
    for theta in (-1.0, 0.3, 2.2):
        found = toys.tsam(TOY2, theta, 50.0, Normal(0.2))
        assert found.value.isinf()
        assert found.grad.isnan()
        assert all(x.isnan() for x in toys.lemma_derivatives(TOY2, theta, 50.0, Normal(0.2)))
    assert toys.tsam(TOY2, 0.3, 12.0, Normal(0.2)).value.isfinite()


def test_mass_too_far_away_to_be_followed_is_an_error():
    with pytest.raises(ArithmeticError, match="sigma"):
        toys.tsam(toys.linear(2.0), 0.3, 1e6, Normal(0.2))  # finite, 400000 sigma from the centre


def test_huge_tilts_and_losses_stay_finite():
    steep = toys.Problem("steep", lambda x: 1e4 * x.sin(), -1.0, 1.0)
    here = toys.tsam(steep, torch.tensor([-0.5, 0.3], **F64), 1e6, Ball(0.5))
    top = toys.sam(steep, torch.tensor([-0.5, 0.3], **F64), 0.5).value
    assert torch.isfinite(here.value).all()
    torch.testing.assert_close(here.value, top, rtol=0, atol=1e-4)


@pytest.mark.parametrize("speed", [20.0, 60.0])
def test_of_many_peaks_the_highest_is_found(speed):
    """At a large tilt each is a needle, and nodes that meet a lower one better must not hide it."""
    many = toys.Problem("many peaks", lambda x: (speed * x).cos() + 5e-4 * speed * x, -1.0, 1.0)
    eps, t = torch.linspace(-1, 1, 400_001, **F64), 1e4
    step = torch.full_like(eps, 1 / 400_000).index_fill(0, torch.tensor([0, 400_000]), 1 / 800_000)
    for theta in torch.linspace(-0.8, 0.8, 9).tolist():
        want = (t * many.loss(theta + eps) + step.log()).logsumexp(0) / t
        assert float(toys.tsam(many, theta, t, Ball(1.0)).value) == pytest.approx(float(want), abs=2e-6)


@pytest.mark.parametrize("problem", [TOY1, TOY2, HMC_TEST, WAVE], ids=lambda p: p.name)
@pytest.mark.parametrize("rho", [0.05, 0.3, 0.8])
def test_sam_is_the_maximum_over_a_fine_grid(problem, rho):
    theta = torch.linspace(problem.lo, problem.hi, 57, **F64)
    window = torch.linspace(-rho, rho, 20001, **F64)
    if problem is HMC_TEST or problem is WAVE:
        theta = theta[theta.abs() < 0.6]  # the known peaks serve this much
    brute = problem.loss(theta[:, None] + window).amax(1)
    exact = toys.sam(problem, theta, rho).value
    assert (exact >= brute - 1e-12).all()
    torch.testing.assert_close(exact, brute, rtol=0, atol=5e-3 if problem is TOY1 else 5e-4)


def test_sam_refuses_what_it_cannot_know():
    for problem, theta in ((TOY1, 3.1), (HMC_TEST, 3.3), (toys.quadratic(-3.0), 0.1)):
        with pytest.raises(ValueError, match="has a maximum near"):
            toys.sam(problem, theta, 0.4)
    for rho in (-0.2, math.inf, math.nan):
        with pytest.raises(ValueError, match="rho must be a finite number >= 0"):
            toys.sam(TOY1, 0.5, rho)
    assert float(toys.sam(TOY1, 0.5, 0.0).value) == float(toys.erm(TOY1, 0.5).value)


def test_sam_beside_a_jump():
    # To the right of 2 toy 2 begins at 1, which 2 itself does not have; 2.1 - .1 is 2 and 2.1 - 2 more than .1.
    assert float(toys.sam(TOY2, 2.1, 0.1).value) == 1
    assert float(toys.sam(TOY2, 1.9, 0.1).value) == pytest.approx(0.99)


def test_sam_of_toy1_is_flat_where_a_peak_is_the_worst_case():
    there = toys.sam(TOY1, 0.5, 0.2)
    assert float(there.grad) == 0
    assert float(there.value) == pytest.approx(1.613944, abs=1e-6)


@pytest.mark.parametrize("t", [-1.0, math.inf, math.nan])
def test_bad_tilts(t):
    with pytest.raises(ValueError, match="tilt t must be a finite number"):
        toys.tsam(TOY1, 0.5, t, Ball(0.2))


@pytest.mark.parametrize(("noise", "name"), [(Ball, "rho"), (Normal, "sigma")])
def test_noise_must_have_a_size(noise, name):
    for size in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"{name} must be positive and finite, got {size}"):
            noise(size)


def test_noise_is_a_measure_and_not_its_size():
    with pytest.raises(TypeError, match=r"Ball\(rho\) or Normal\(sigma\), got 0.2"):
        toys.tsam(TOY1, 0.5, 1.0, 0.2)


# --- descent ---


def test_erm_cycles_at_the_papers_learning_rate_and_rests_at_a_smaller_one():
    fixed = toys.descend(slope(TOY1), 0.5, 0.005, 300)
    assert not fixed.settled
    assert sorted(round(x, 4) for x in fixed.theta[-2:].tolist()) == [0.3175, 0.4111]
    small = toys.descend(slope(TOY1), 0.5, 0.002, 300)
    assert small.settled
    assert small.end == pytest.approx(0.357589, abs=1e-6)


@pytest.mark.parametrize("t", [0.0, 0.5, 5.0])
def test_uniform_stationary_points_do_not_depend_on_t(t):
    found = toys.stationary_points(tsam_grad(TOY1, t, Ball(0.2)), 0.4, 2.3)[::2]
    assert [round(x, 4) for x in found.tolist()] == [0.4211, 0.8987, 1.3904, 1.8861]
    torch.testing.assert_close(TOY1.loss(found + 0.2), TOY1.loss(found - 0.2), rtol=0, atol=1e-9)


def test_uniform_global_minimiser_jumps_with_t():
    found = toys.jumps(
        lambda t: toys.minimise(tsam_value(TOY1, t, Ball(0.2)), 0.4, 2.3, 41, 4).theta, 0.3, 1.3, 6, tol=4e-4
    )
    assert [round(t, 3) for t, _, _ in found] == [0.469, 0.776, 1.167]
    places = [found[0][1], *(after for _, _, after in found)]
    assert places == pytest.approx([0.4211, 0.8987, 1.3904, 1.8861], abs=5e-5)


@pytest.mark.parametrize(("t", "end"), [(0.0, 0.9134), (0.5, 0.9925), (1.0, 1.4450), (2.0, 1.9394), (5.0, 2.4663)])
def test_gaussian_flow_matches_the_papers_figure(t, end):
    went = toys.flow(tsam_grad(TOY1, t, Normal(0.2)), 0.5, 0.2, 2.5, 101)
    assert went.settled
    assert went.end == pytest.approx(end, abs=5e-5)
    assert (went.theta.diff() > 0).all()


def test_gaussian_flow_leaves_the_interval_at_large_t():
    went = toys.flow(tsam_grad(TOY1, 10.0, Normal(0.2)), 0.5, 0.2, 2.5, 51)
    assert not went.settled
    assert went.end == 2.5


def test_flow_is_the_limit_of_descent():
    grad = tsam_grad(TOY1, 0.5, Ball(0.2))
    assert toys.descend(grad, 0.5, 0.002, 100).end == pytest.approx(toys.flow(grad, 0.5, 0.2, 2.5).end, abs=1e-7)


def test_flow_rests_at_once_where_the_gradient_is_zero():
    assert toys.flow(slope(toys.quadratic(1.0)), 0.0, -1, 1).end == 0
    assert toys.flow(slope(toys.quadratic(1.0)), 1.5, -2, 2).end == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("lo", "hi"), [(0.6, 2.5), (2.5, 0.2)])
def test_flow_starts_inside(lo, hi):
    with pytest.raises(ValueError, match=r"start must be in .* got 0\.5"):
        toys.flow(slope(TOY1), 0.5, lo, hi)


def test_descent_that_leaves_stops():
    path = toys.descend(slope(toys.linear(1.0)), 0.0, 0.5, 100, lo=-1, hi=1)
    assert path.theta.tolist() == [0.0, -0.5, -1.0, -1.5]
    assert not path.settled


# --- toy 2 ---


@pytest.mark.parametrize("rho", [0.005, 0.0100, 0.0102, 0.1, 0.8])
def test_sams_global_minimiser_of_toy2(rho):
    found = toys.minimise(lambda x: toys.sam(TOY2, x, rho).value, 0, 4)
    threshold = (1 - math.sqrt(0.96)) / 2
    assert found.theta == pytest.approx(1.0 if rho < threshold else 3.0, abs=1e-7)
    assert found.value == pytest.approx(rho - 0.01 if rho < threshold else rho**2, abs=1e-9)


def test_sams_jump_on_toy2():
    ((rho, before, after),) = toys.jumps(
        lambda rho: toys.minimise(lambda x: toys.sam(TOY2, x, rho).value, 0, 4, 41).theta, 0.001, 0.8
    )
    assert rho == pytest.approx((1 - math.sqrt(0.96)) / 2, abs=1e-6)
    assert (before, after) == (pytest.approx(1), pytest.approx(3))


def test_tsams_jump_on_toy2():
    def minimiser(rho):
        return toys.minimise(tsam_value(TOY2, 0.01, Ball(rho)), 0, 4, 41).theta

    ((rho, _, _),) = toys.jumps(minimiser, 0.005, 0.1, 4, tol=1e-6)
    assert rho == pytest.approx(0.02027, abs=5e-6)
    for rho, value in ((0.1, 0.00333), (0.8, 0.2135)):
        found = toys.minimise(tsam_value(TOY2, 0.01, Ball(rho)), 0, 4, 41)
        assert found.theta == pytest.approx(3, abs=1e-6)
        assert found.value == pytest.approx(value, abs=5e-5 if rho == 0.8 else 5e-6)


def test_minimise_finds_ends_and_kinks():
    assert toys.minimise(lambda x: x, 0.25, 2.0) == (0.25, 0.25)
    assert toys.minimise(lambda x: (x - 1 / 3).abs(), 0.0, 1.0).theta == pytest.approx(1 / 3, abs=1e-7)
    two = toys.minimise(lambda x: torch.minimum((x + 1) ** 2, (x - 1) ** 2 - 1e-9), -2.0, 2.0)
    assert two.theta == pytest.approx(1, abs=1e-7)
