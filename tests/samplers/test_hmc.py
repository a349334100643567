"""HMC against exact densities, on many chains at once."""

import pytest
import torch
from torch import Tensor

import tiltsam
from helpers.cases import Problem, sgd
from tiltsam.samplers import HMC
from tiltsam.samplers.hmc import drift_and_reflect
from tiltsam.space.parameter_space import ParameterSpace
from tiltsam.toys.chain_space import ChainSpace, sample_chains

CHAINS = 150_000


def wavy(x: Tensor) -> Tensor:
    return (torch.cos(2 * x) + 0.8 * x).sum(1)


def sup_cdf(draws: Tensor, tilt: float = 1.0) -> float:
    """Largest distance between the empirical distribution and exp(tilt L) on [-1, 1], by a fine grid."""
    grid = torch.linspace(-1, 1, 100_001, dtype=torch.float64)
    cdf = torch.cumsum(torch.exp(tilt * wavy(grid[:, None])), 0)
    cdf = cdf / cdf[-1]
    draws = draws.flatten().sort().values
    empirical = torch.arange(1, len(draws) + 1, dtype=torch.float64) / len(draws)
    return (empirical - cdf[torch.searchsorted(grid, draws).clamp_max(len(grid) - 1)]).abs().max().item()


def run(sampler: HMC, chains: int = CHAINS) -> tuple[Tensor, dict[str, Tensor]]:
    space = ChainSpace(wavy, torch.zeros(1, dtype=torch.float64), chains, radius=1.0, delta=1.0, seed=3)
    draws, eps = sample_chains(sampler, space)
    return eps[0], dict(draws[0].info)


@pytest.mark.parametrize(
    ("integrator", "boundary", "num_steps", "sigma"),
    [
        ("leapfrog", "reflect", 1, 1.0),
        ("leapfrog", "reflect", 1, 0.5),
        ("leapfrog", "reflect", 3, 1.0),
        ("leapfrog", "reject", 1, 1.0),
        ("euler-corrected", "reflect", 1, 1.0),
        ("euler-corrected", "reject", 2, 1.0),
    ],
)
def test_exact_integrators_follow_the_tilted_density(integrator, boundary, num_steps, sigma):
    sampler = HMC(num_steps, 0.8 * sigma / num_steps, sigma, integrator, boundary, num_proposals=12)
    eps, info = run(sampler)
    assert sup_cdf(eps) < 0.005
    assert eps.abs().max() <= 1 + 1e-9
    assert 0.3 < info["acceptance"].mean() <= 1
    assert info["divergence"].sum() == 0


def test_printed_scheme_is_biased():
    eps, _ = run(HMC(1, 0.5, 1.0, "euler", "reflect", num_proposals=12), chains=40_000)
    assert sup_cdf(eps) > 0.03


def test_printed_scheme_tends_to_twice_the_tilt():
    """At N = 1 and small steps it follows exp(2δL), not exp(δL)."""
    eps, _ = run(HMC(1, 0.2, 1.0, "euler", "reflect", num_proposals=150), chains=20_000)
    assert sup_cdf(eps, tilt=2.0) < 0.025
    assert sup_cdf(eps, tilt=1.0) > 0.05


@pytest.mark.parametrize("dim", [1, 2, 5, 300])
@pytest.mark.parametrize("time", [0.1, 2.0, 20.0])
def test_drift_and_reflect_follows_every_reflection(dim, time):
    space = ParameterSpace([[torch.nn.Parameter(torch.zeros(dim, dtype=torch.float64))]])
    space.scalars.set("radius", 1.0)
    start = torch.randn(dim, dtype=torch.float64)
    start *= 0.9 / start.norm()
    velocity = torch.randn(dim, dtype=torch.float64)
    x, p = [start.clone()], [velocity.clone()]
    drift_and_reflect(space, x, p, torch.tensor(time, dtype=torch.float64))
    y, v, left = start.clone(), velocity.clone(), time
    while True:
        a, b, c = v @ v, y @ v, y @ y - 1
        hit = (-b + (b * b - a * c).clamp_min(0).sqrt()) / a
        y = y + min(hit, left) * v
        if hit >= left:
            break
        left -= hit
        y = y / y.norm()
        v = v - 2 * (v @ y) * y
    torch.testing.assert_close(x[0], y, rtol=0, atol=1e-9)
    torch.testing.assert_close(p[0], v, rtol=0, atol=1e-8)
    p[0].neg_()
    drift_and_reflect(space, x, p, torch.tensor(time, dtype=torch.float64))  # the flow is reversible
    torch.testing.assert_close(x[0], start, rtol=0, atol=1e-8)


def test_drift_and_reflect_from_slightly_outside_the_ball():
    space = ParameterSpace([[torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))]])
    space.scalars.set("radius", 1.0)
    x, p = ([torch.tensor(v, dtype=torch.float64)] for v in ([1 + 1e-6, 0.0], [2e-4, 1.0]))
    speed = p[0].norm()
    drift_and_reflect(space, x, p, torch.tensor(3.0, dtype=torch.float64))
    torch.testing.assert_close(p[0].norm(), speed, rtol=0, atol=1e-10)
    assert 0.999 < x[0].norm() <= 1 + 1.001e-6


@pytest.mark.parametrize("sigma", [1.0, 0.5])
def test_energy_is_conserved_to_second_order(sigma):
    errors = []
    for step in (0.2 * sigma, 0.1 * sigma):
        # Smooth paths only: a reflection between two kicks costs an order.
        _, info = run(HMC(round(0.4 * sigma / step), step, sigma, boundary="reject"), chains=4000)
        errors.append(info["energy_error"].abs().mean().item())
    assert errors[1] < errors[0] / 3  # halving β quarters the leapfrog's error


@pytest.mark.parametrize("integrator", ["leapfrog", "euler-corrected", "euler"])
def test_energy_error_is_that_of_the_hamiltonian(integrator):
    sigma, delta, losses, noise = 0.5, 1.5, [], []

    def watched(x: Tensor) -> Tensor:
        losses.append(wavy(x))
        return losses[-1]

    class Watched(ChainSpace):
        def normal_(self, x: Tensor, sample: int) -> None:
            super().normal_(x, sample)
            noise.append(x.clone())

    space = Watched(watched, torch.zeros(3, dtype=torch.float64), 100, radius=1.0, delta=delta)
    draws, _ = sample_chains(HMC(3, 0.3, sigma, integrator), space)
    before, after = (p.square().sum(1) / (2 * sigma**2) for p in (sigma * noise[1], space.vector("momentum")))
    error = (after - delta * losses[-1]) - (before - delta * losses[0])
    assert error.abs().mean() > 0.01
    torch.testing.assert_close(draws[0].info["energy_error"], error.detach(), rtol=0, atol=1e-10)


def test_acceptance_with_millions_of_float32_coordinates():
    """Without a force the energy is constant, although float32 cannot represent the kinetic energy exactly."""
    theta = torch.nn.Parameter(torch.zeros(2_000_000))

    def flat() -> Tensor:
        theta.grad = torch.zeros_like(theta)
        return torch.ones(())

    optimizer = tiltsam.TSAM(sgd([theta], lr=0.0), num_samples=1, sampler="hmc")
    optimizer.step(flat)
    assert optimizer.info.sampler["energy_error"].abs() < 1e-3
    assert optimizer.info.sampler["acceptance"] > 0.999
    torch.testing.assert_close(optimizer.info.perturbation_norms, torch.tensor([0.003 * 2e6**0.5]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("boundary", ["reflect", "reject"])
def test_acceptance_is_the_probability_to_move(boundary):
    space = ChainSpace(wavy, torch.zeros(1, dtype=torch.float64), 20_000, radius=1.0, delta=4.0)
    draws, _ = sample_chains(HMC(1, 0.8, boundary=boundary), space)
    moved = (draws[0].loss != draws[0].start_loss).double().mean()
    assert moved < 0.9
    assert draws[0].info["acceptance"].mean() == pytest.approx(moved.item(), abs=0.02)  # 4 standard errors: 0.014


@pytest.mark.parametrize("boundary", ["reflect", "reject"])
def test_hmc_without_radius_evaluates_at_the_center(boundary):
    problem, seen = Problem(dropout=0.0), []
    problem.model.register_forward_pre_hook(lambda model, _: seen.append(model.first.weight.detach().clone()))
    sampler = HMC(num_steps=2, boundary=boundary)
    optimizer = tiltsam.TSAM(
        sgd(problem.model.parameters(), lr=0.0), radius=lambda step: 0.1 * step, num_samples=2, sampler=sampler
    )
    home = problem.model.first.weight.detach().clone()
    optimizer.step(problem.closure)
    assert len(seen) == 2
    assert all(torch.equal(weight, home) for weight in seen)
    info = optimizer.info
    assert info.num_nonfinite == 0
    assert info.perturbation_norms.tolist() == [0.0, 0.0]
    calm = {"acceptance": [1.0, 1.0], "energy_error": [0.0, 0.0], "divergence": [0.0, 0.0]}
    assert {name: value.tolist() for name, value in info.sampler.items()} == calm
    optimizer.step(problem.closure)
    assert len(seen) == 2 + 2 * 3
    assert optimizer.info.sampler.keys() == calm.keys()


def test_nan_energy_is_rejected():
    def cliff(x: Tensor) -> Tensor:
        return torch.where(x[:, 0] > 0.2, torch.nan, x[:, 0])

    space = ChainSpace(cliff, torch.full((1,), -0.5, dtype=torch.float64), 5000, radius=0.6, delta=1.0)
    draws, eps = sample_chains(HMC(1, 0.7, 1.0, boundary="reject", num_proposals=5), space)
    assert draws[0].valid.all()
    assert draws[0].loss.isfinite().all()
    assert (eps[0] - 0.5 <= 0.2).all()
    assert draws[0].gradient.isfinite().all()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_steps": 0}, "num_steps.*got 0"),
        ({"num_steps": 1.5}, r"num_steps.*got 1\.5"),
        ({"num_proposals": 0}, "num_proposals.*got 0"),
        ({"step_size": 0.0}, "step_size.*got 0.0"),
        ({"step_size": float("inf")}, "step_size.*got inf"),
        ({"sigma": -1.0}, "sigma.*got -1.0"),
        ({"sigma": float("nan")}, "sigma.*got nan"),
        ({"integrator": "verlet"}, "integrator.*got 'verlet'"),
        ({"boundary": "project"}, "boundary.*got 'project'"),
    ],
)
def test_hmc_refuses_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        HMC(**kwargs)
