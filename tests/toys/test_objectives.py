"""ERM, SAM and TSAM objectives against scipy, fixed quadrature rules and brute force."""

import math

import numpy as np
import pytest
import torch

from helpers.lazy import Lazy
from tiltsam import toys
from tiltsam.toys import COUNTEREXAMPLE, HMC_TEST, TOY1, TOY2, WAVE, Ball, Normal

integrate = Lazy("scipy.integrate")

F64 = {"dtype": torch.float64}
SMOOTH = [TOY1, HMC_TEST, WAVE, COUNTEREXAMPLE, toys.quadratic(3.0), toys.linear(-2.0)]
NOISES = [Ball(0.2), Ball(1.0), Normal(0.2)]


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
        want = math.inf  # scipy does not integrate far enough to see it
    assert float(toys.tsam(problem, theta, t, noise).value) == pytest.approx(want, abs=2e-10)


def test_gaussian_objective_against_gauss_hermite():
    z, w = (torch.from_numpy(x) for x in np.polynomial.hermite_e.hermegauss(60))
    loss = HMC_TEST.loss(0.4 + 0.3 * z)
    want = (w / math.sqrt(2 * math.pi) * (2 * loss).exp()).sum().log() / 2
    assert float(toys.tsam(HMC_TEST, 0.4, 2.0, Normal(0.3)).value) == pytest.approx(float(want), abs=1e-12)


@pytest.mark.parametrize("t", [0.0, 1e-6, 0.7, 20.0])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("problem", SMOOTH, ids=lambda p: p.name)
def test_derivatives_match_lemma_and_finite_differences(problem, noise, t):
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
def test_derivatives_at_kinks_and_jumps(noise):
    """The lemma's E_w[L'] misses the jump of toy 2; the derivative through the density does not."""
    theta = torch.tensor([0.95, 1.9, 2.05], **F64)
    here = toys.tsam(TOY2, theta, 2.0, noise)
    after, before = (toys.tsam(TOY2, theta + sign * 1e-5, 2.0, noise) for sign in (1, -1))
    torch.testing.assert_close((after.value - before.value) / 2e-5, here.grad, rtol=0, atol=1e-6)
    torch.testing.assert_close((after.grad - before.grad) / 2e-5, here.hess, rtol=0, atol=1e-3)
    lemma = toys.lemma_derivatives(TOY2, theta, 2.0, noise)[0]
    assert (lemma - here.grad).abs().max() > 1e-3


def test_gaussian_mass_far_from_center():
    # The high peak at 0 is 18 sigma away, with almost no mass in between.
    eps = torch.linspace(-2, 2, 400_001, dtype=torch.float64)
    height = 50 * TOY1.loss(0.9 + eps) - (eps / 0.05).square() / 2
    want = (height.logsumexp(0) + math.log(1e-5 / (0.05 * math.sqrt(2 * math.pi)))) / 50
    assert float(toys.tsam(TOY1, 0.9, 50.0, Normal(0.05)).value) == pytest.approx(float(want), abs=1e-10)
    # Linear: the mass moves by t sigma^2 slope, here 200 sigma.
    assert float(toys.tsam(toys.linear(2.0), 0.3, 2000.0, Normal(0.05)).value) == pytest.approx(10.6, abs=1e-9)


def test_infinite_mean_gives_inf_and_nan():
    # To the right toy 2 is a quadratic of curvature 2: infinite from t = 1/(2 sigma^2) on, from any theta.
    for theta in (-1.0, 0.3, 2.2):
        found = toys.tsam(TOY2, theta, 50.0, Normal(0.2))
        assert found.value.isinf()
        assert found.grad.isnan()
        assert all(x.isnan() for x in toys.lemma_derivatives(TOY2, theta, 50.0, Normal(0.2)))
    assert toys.tsam(TOY2, 0.3, 12.0, Normal(0.2)).value.isfinite()


def test_tsam_raises_if_mass_is_too_far():
    with pytest.raises(ArithmeticError, match="got 399360 sigma"):
        toys.tsam(toys.linear(2.0), 0.3, 1e6, Normal(0.2))  # finite, but too far from the center


def test_tsam_is_finite_at_huge_tilt_and_loss():
    steep = toys.Problem("steep", lambda x: 1e4 * x.sin(), -1.0, 1.0)
    here = toys.tsam(steep, torch.tensor([-0.5, 0.3], **F64), 1e6, Ball(0.5))
    top = toys.sam(steep, torch.tensor([-0.5, 0.3], **F64), 0.5).value
    assert torch.isfinite(here.value).all()
    torch.testing.assert_close(here.value, top, rtol=0, atol=1e-4)


@pytest.mark.parametrize("speed", [20.0, 60.0])
def test_tsam_finds_highest_of_many_peaks(speed):
    """At a large tilt each peak is a needle; one that lies close to a node must not hide a higher one."""
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
        theta = theta[theta.abs() < 0.6]  # beyond, peaks are missing
    brute = problem.loss(theta[:, None] + window).amax(1)
    exact = toys.sam(problem, theta, rho).value
    assert (exact >= brute - 1e-12).all()
    torch.testing.assert_close(exact, brute, rtol=0, atol=5e-3 if problem is TOY1 else 5e-4)


def test_sam_raises_on_missing_peaks_and_bad_rho():
    for problem, theta in ((TOY1, 3.1), (HMC_TEST, 3.3), (toys.quadratic(-3.0), 0.1)):
        with pytest.raises(ValueError, match="peaks of"):
            toys.sam(problem, theta, 0.4)
    for rho in (-0.2, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"rho .*{rho}"):
            toys.sam(TOY1, 0.5, rho)
    assert float(toys.sam(TOY1, 0.5, 0.0).value) == float(toys.erm(TOY1, 0.5).value)


def test_sam_next_to_jump():
    # Right of 2 the supremum of toy 2 is 1, which it does not attain at 2. In float64 2.1 - .1 is 2, but 2.1 - 2 > .1.
    assert float(toys.sam(TOY2, 2.1, 0.1).value) == 1
    assert float(toys.sam(TOY2, 1.9, 0.1).value) == pytest.approx(0.99)


def test_sam_is_flat_where_a_peak_is_the_worst_case():
    point = toys.sam(TOY1, 0.5, 0.2)
    assert float(point.grad) == 0
    assert float(point.value) == pytest.approx(1.613944, abs=1e-6)


@pytest.mark.parametrize("t", [-1.0, math.inf, math.nan])
def test_tsam_refuses_bad_tilt(t):
    with pytest.raises(ValueError, match=f"t must .*{t}"):
        toys.tsam(TOY1, 0.5, t, Ball(0.2))


@pytest.mark.parametrize(("noise", "name"), [(Ball, "rho"), (Normal, "sigma")])
def test_noise_refuses_bad_size(noise, name):
    for size in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"{name} .*{size}"):
            noise(size)


def test_tsam_refuses_number_as_noise():
    with pytest.raises(TypeError, match=r"0\.2"):
        toys.tsam(TOY1, 0.5, 1.0, 0.2)
