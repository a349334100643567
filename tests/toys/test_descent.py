"""Paths, stationary points and global minimisers of the toy problems of the paper (arXiv:2410.22656)."""

import math

import pytest
import torch

import tiltsam
from tiltsam import toys
from tiltsam.toys import TOY1, TOY2, Ball, Normal


def slope(problem):
    return lambda x: toys.erm(problem, x).grad


def tsam_grad(problem, t, noise):
    return lambda x: toys.tsam(problem, x, t, noise).grad


def tsam_value(problem, t, noise):
    return lambda x: toys.tsam(problem, x, t, noise).value


def test_descent_on_toy1_cycles_at_the_papers_learning_rate():
    fixed = toys.descend(slope(TOY1), 0.5, 0.005, 300)
    assert not fixed.converged
    assert sorted(round(x, 4) for x in fixed.theta[-2:].tolist()) == [0.3175, 0.4111]
    small = toys.descend(slope(TOY1), 0.5, 0.002, 300)
    assert small.converged
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
    minimisers = [found[0][1], *(after for _, _, after in found)]
    assert minimisers == pytest.approx([0.4211, 0.8987, 1.3904, 1.8861], abs=5e-5)


@pytest.mark.parametrize(("t", "end"), [(0.0, 0.9134), (0.5, 0.9925), (1.0, 1.4450), (2.0, 1.9394), (5.0, 2.4663)])
def test_gaussian_flow_matches_figure_1(t, end):
    path = toys.flow(tsam_grad(TOY1, t, Normal(0.2)), 0.5, 0.2, 2.5, 101)
    assert path.converged
    assert path.end == pytest.approx(end, abs=5e-5)
    assert (path.theta.diff() > 0).all()


def test_gaussian_flow_leaves_the_interval_at_large_t():
    path = toys.flow(tsam_grad(TOY1, 10.0, Normal(0.2)), 0.5, 0.2, 2.5, 51)
    assert not path.converged
    assert path.end == 2.5


def test_flow_matches_descent_with_small_steps():
    grad = tsam_grad(TOY1, 0.5, Ball(0.2))
    assert toys.descend(grad, 0.5, 0.002, 100).end == pytest.approx(toys.flow(grad, 0.5, 0.2, 2.5).end, abs=1e-7)


def test_flow_stays_at_stationary_point():
    assert toys.flow(slope(toys.quadratic(1.0)), 0.0, -1, 1).end == 0
    assert toys.flow(slope(toys.quadratic(1.0)), 1.5, -2, 2).end == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("lo", "hi"), [(0.6, 2.5), (2.5, 0.2)])
def test_flow_refuses_start_outside_interval(lo, hi):
    with pytest.raises(ValueError, match=r"start .*0\.5"):
        toys.flow(slope(TOY1), 0.5, lo, hi)


def test_descent_stops_outside_interval():
    path = toys.descend(slope(toys.linear(1.0)), 0.0, 0.5, 100, lo=-1, hi=1)
    assert path.theta.tolist() == [0.0, -0.5, -1.0, -1.5]
    assert not path.converged


@pytest.mark.parametrize("rho", [0.005, 0.0100, 0.0102, 0.1, 0.8])
def test_sam_global_minimiser_of_toy2(rho):
    found = toys.minimise(lambda x: toys.sam(TOY2, x, rho).value, 0, 4)
    threshold = (1 - math.sqrt(0.96)) / 2
    assert found.theta == pytest.approx(1.0 if rho < threshold else 3.0, abs=1e-7)
    assert found.value == pytest.approx(rho - 0.01 if rho < threshold else rho**2, abs=1e-9)


def test_sam_minimiser_jumps_on_toy2():
    ((rho, before, after),) = toys.jumps(
        lambda rho: toys.minimise(lambda x: toys.sam(TOY2, x, rho).value, 0, 4, 41).theta, 0.001, 0.8
    )
    assert rho == pytest.approx((1 - math.sqrt(0.96)) / 2, abs=1e-6)
    assert (before, after) == (pytest.approx(1), pytest.approx(3))


def test_tsam_minimiser_jumps_on_toy2():
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


def test_descent_with_2000_draws_stops_before_the_flow_at_t_2():
    """Few draws carry the weight where the flow goes on; docs/theory.md has 1.52."""
    generator = torch.Generator().manual_seed(0)

    def sampled_gradient(theta):
        at = TOY1.derivatives(theta + 0.2 * torch.randn(2000, generator=generator, dtype=torch.float64))
        return (tiltsam.tilted_weights(at.loss, 2.0) * at.grad).sum()

    visited = toys.descend(sampled_gradient, 0.5, 0.005, 3000).theta[2000:]
    assert visited.mean().item() == pytest.approx(1.52, abs=0.01)
