"""The HMC kernel against exact densities (SPEC §4), run as it ships on many chains at once."""

import pytest
import torch
from torch import Tensor

from tiltsam.chains import ChainSpace, sample_chains
from tiltsam.parameters import ParameterSpace
from tiltsam.samplers import HMC
from tiltsam.samplers.hmc import bounce

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
    ("integrator", "boundary", "num_steps"),
    [
        ("leapfrog", "reflect", 1),
        ("leapfrog", "reflect", 3),
        ("leapfrog", "reject", 1),
        ("euler-corrected", "reflect", 1),
        ("euler-corrected", "reject", 2),
    ],
)
def test_exact_integrators_follow_the_tilted_density(integrator, boundary, num_steps):
    sampler = HMC(num_steps, 0.8 / num_steps, 1.0, integrator, boundary, num_proposals=12)
    eps, info = run(sampler)
    assert sup_cdf(eps) < 0.005
    assert eps.abs().max() <= 1 + 1e-9
    assert 0.3 < info["acceptance"].mean() <= 1
    assert info["divergence"].sum() == 0


def test_the_printed_scheme_is_biased():
    eps, _ = run(HMC(1, 0.5, 1.0, "euler", "reflect", num_proposals=12), chains=40_000)
    assert sup_cdf(eps) > 0.03


def test_the_printed_scheme_tends_to_twice_the_tilt():
    """At N = 1 and small steps it follows exp(2δL), not exp(δL)."""
    eps, _ = run(HMC(1, 0.2, 1.0, "euler", "reflect", num_proposals=150), chains=20_000)
    assert sup_cdf(eps, tilt=2.0) < 0.025
    assert sup_cdf(eps, tilt=1.0) > 0.05


@pytest.mark.parametrize("dim", [1, 2, 5, 300])
@pytest.mark.parametrize("time", [0.1, 2.0, 20.0])
def test_bounce_equals_following_every_reflection(dim, time):
    space = ParameterSpace([[torch.nn.Parameter(torch.zeros(dim, dtype=torch.float64))]])
    space.set_radius(1.0)
    start = torch.randn(dim, dtype=torch.float64)
    start *= 0.9 / start.norm()
    velocity = torch.randn(dim, dtype=torch.float64)
    x, p = [start.clone()], [velocity.clone()]
    bounce(space, x, p, torch.tensor(time, dtype=torch.float64))
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
    bounce(space, x, p, torch.tensor(time, dtype=torch.float64))  # time runs backwards: the flow is reversible
    torch.testing.assert_close(x[0], start, rtol=0, atol=1e-8)


def test_energy_is_conserved_to_second_order():
    errors = []
    for step in (0.2, 0.1):
        # Smooth paths only: a turn at the sphere falls between two kicks and costs an order.
        _, info = run(HMC(round(0.4 / step), step, 1.0, boundary="reject"), chains=4000)
        errors.append(info["energy_error"].abs().mean().item())
    assert errors[1] < errors[0] / 3  # halving β quarters the leapfrog's error


def test_a_nan_energy_is_a_rejection():
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
        ({"num_steps": 0}, "num_steps must be at least 1, got 0"),
        ({"num_proposals": 0}, "num_proposals must be at least 1, got 0"),
        ({"step_size": 0.0}, "step_size must be > 0, got 0.0"),
        ({"sigma": -1.0}, "sigma must be > 0, got -1.0"),
        ({"integrator": "verlet"}, "integrator must be one of leapfrog, .*got 'verlet'"),
        ({"boundary": "project"}, "boundary must be one of reflect, reject; got 'project'"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        HMC(**kwargs)
