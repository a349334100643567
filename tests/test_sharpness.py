"""Neighbourhoods against closed forms; worst cases against known maxima; the objectives against their definitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from measuring import Bowl, call, convnet, cross_entropy, images, mse, unequal_batches
from tiltsam.sharpness import (
    ErmLoss,
    Neighborhood,
    SamLoss,
    TsamLoss,
    cross_objectives,
    m_sharpness,
    neighborhood,
    t_sharper,
)
from tiltsam.tilting import tilted_mean, tilted_var

LAMBDAS, THETA = [3.0, 1.0, 0.5], [0.2, -1.0, 0.4]
ONE = [torch.ones(1)]


def tilted_gaussian(std: float, t: float) -> tuple[float, float]:
    """Mean and variance of 1/2 sum lambda x^2 with x ~ N(theta, std^2) tilted by exp(t loss): again Gaussians."""
    mean = variance = 0.0
    for lam, theta in zip(LAMBDAS, THETA, strict=True):
        shrink = 1 - t * std**2 * lam
        m, s2 = theta / shrink, std**2 / shrink
        mean += 0.5 * lam * (m**2 + s2)
        variance += lam**2 * (m**2 * s2 + 0.5 * s2**2)
    return mean, variance


@pytest.mark.parametrize("t", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_neighborhood_of_a_quadratic_is_the_tilted_gaussian(t: float, seed: int) -> None:
    stds = [0.05, 0.2]
    found = neighborhood(Bowl(LAMBDAS, THETA), call, ONE, stds, num_samples=1000, t=t, seed=seed)
    assert found.center == pytest.approx(tilted_gaussian(0.0, 0.0)[0], rel=1e-12)
    for i, std in enumerate(stds):
        for tilt, keys in [(0.0, ("mean", "variance")), (t, ("tilted_mean", "tilted_variance"))]:
            for key, exact in zip(keys, tilted_gaussian(std, tilt), strict=True):
                error = float(getattr(found, f"{key}_error")[i])
                assert abs(float(getattr(found, key)[i]) - exact) < 4 * error, key
                assert error < 0.25 * exact, key


def test_error_bars_are_as_long_as_they_say() -> None:
    """Over many seeds the deviation from the truth, in errors, must look like N(0, 1)."""
    bowl, std, t = Bowl(LAMBDAS, THETA), 0.1, 1.0
    runs = [neighborhood(bowl, call, ONE, std, num_samples=200, t=t, seed=seed) for seed in range(40)]
    plain, tilted = tilted_gaussian(std, 0.0), tilted_gaussian(std, t)
    for key, exact in [
        ("mean", plain[0]),
        ("variance", plain[1]),
        ("tilted_mean", tilted[0]),
        ("tilted_variance", tilted[1]),
    ]:
        scores = torch.stack([(getattr(r, key) - exact) / getattr(r, f"{key}_error") for r in runs]).flatten()
        assert 0.65 < scores.std() < 1.5, key
        assert abs(scores.mean()) < 0.6, key


@pytest.mark.parametrize(
    ("t", "share", "mean", "variance"),
    [(0.1, (0.9, 1.0), (0.9, 0.96), (0.71, 0.9)), (0.46, (0.3, 0.5), (0.56, 0.79), (0.23, 0.56))],
    ids=["nearly all", "below half"],
)
def test_the_share_of_effective_samples_tells_what_tilted_errors_are_worth(
    t: float, share: tuple[float, float], mean: tuple[float, float], variance: tuple[float, float]
) -> None:
    """How often two errors either way cover the truth, on a bowl under noise of std 1."""
    lambdas = torch.linspace(0.05, 1, 20, dtype=torch.float64)
    random = torch.Generator().manual_seed(0)
    losses = 0.5 * torch.randn(200, 50, 20, generator=random, dtype=torch.float64).square() @ lambdas
    found = Neighborhood.from_losses(torch.ones(200), losses, 0.0, t)
    spread = lambdas / (1 - t * lambdas)  # the tilted Gaussian's variance, times lambda
    close = (found.tilted_mean - spread.sum() / 2).abs() < 2 * found.tilted_mean_error
    close_too = (found.tilted_variance - spread.square().sum() / 2).abs() < 2 * found.tilted_variance_error
    assert share[0] < float(found.effective_samples.mean()) / 50 < share[1]
    assert mean[0] < float(close.double().mean()) < mean[1]
    assert variance[0] < float(close_too.double().mean()) < variance[1]


def test_more_samples_smaller_error_bars() -> None:
    few, many = (neighborhood(Bowl(LAMBDAS, THETA), call, ONE, 0.2, n, t=1.0) for n in (100, 1600))
    for key in ("mean", "variance", "tilted_mean", "tilted_variance"):
        ratio = float(getattr(few, f"{key}_error") / getattr(many, f"{key}_error"))
        assert 2.5 < ratio < 6.5, key  # sqrt(16) = 4


def test_statistics_are_those_of_the_losses() -> None:
    found = neighborhood(convnet(), cross_entropy, unequal_batches(), [0.05, 0.1], num_samples=6, t=3.0)
    for i, losses in enumerate(found.losses):
        torch.testing.assert_close(found.mean[i], losses.mean())
        torch.testing.assert_close(found.mean_error[i], losses.std() / math.sqrt(6))
        torch.testing.assert_close(found.variance[i], losses.var())
        torch.testing.assert_close(found.tilted_mean[i], tilted_mean(losses, 3.0))
        torch.testing.assert_close(found.tilted_variance[i], tilted_var(losses, 3.0))
        left_out = torch.stack([tilted_var(losses[torch.arange(6) != j], 3.0) for j in range(6)])
        jackknife = (5 / 6 * (left_out - left_out.mean()).square().sum()).sqrt()
        torch.testing.assert_close(found.tilted_variance_error[i], jackknife)
    again = found.at_tilt(0.0)
    torch.testing.assert_close(again.tilted_mean, found.mean)
    torch.testing.assert_close(again.tilted_variance, found.variance * 5 / 6)
    assert (found.at_tilt(1e6).effective_samples < 1.01).all()
    assert (found.at_tilt(1e6).tilted_mean_error > 0).all()  # one draw decides, and the error does not hide it


def test_draws_are_shared_between_stds_and_models_and_differ_between_samples() -> None:
    slope = nn.Linear(3, 1, bias=False).double()
    data = [torch.ones(1, 3, dtype=torch.float64)]

    def height(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).mean()

    found = neighborhood(slope, height, data, [0.1, 0.3], num_samples=50)
    rises = found.losses - found.center
    torch.testing.assert_close(rises[1], 3 * rises[0])  # the loss is linear
    assert len(rises[0].unique()) == 50
    assert found.variance[0] == pytest.approx(3 * 0.01, rel=0.6)  # three coordinates of variance .1^2
    other = neighborhood(nn.Linear(3, 1, bias=False).double(), height, data, [0.1, 0.3], num_samples=50)
    torch.testing.assert_close(other.losses - other.center, rises)
    assert not torch.equal(neighborhood(slope, height, data, 0.1, num_samples=50, seed=1).losses[0], found.losses[0])


def test_t_sharper_knows_the_steeper_bowl() -> None:
    flat, steep = Bowl([1.0, 1.0], [0.1, 0.1]), Bowl([1.3, 1.3], [0.1, 0.1])
    verdict = t_sharper(steep, flat, call, ONE, std=[0.1, 0.3], t=1.0, num_samples=200)
    assert verdict.sharper.all()
    assert verdict.sure.all()
    assert not t_sharper(flat, steep, call, ONE, std=0.1, num_samples=200).sharper.any()
    same = t_sharper(flat, flat, call, ONE, std=0.1)
    assert same.difference == 0
    assert not same.sure.any()
    # common draws: the error of the difference is well below that of two independent measurements
    a, b = (neighborhood(m, call, ONE, [0.1, 0.3], 200, t=1.0) for m in (steep, flat))
    apart = torch.hypot(a.tilted_variance_error, b.tilted_variance_error)
    assert (verdict.error < 0.7 * apart).all()
    torch.testing.assert_close(t_sharper(a, b, t=1.0).difference, verdict.difference)
    with pytest.raises(ValueError, match="differ in std"):
        t_sharper(a, neighborhood(flat, call, ONE, 0.1, 200), t=1.0)
    with pytest.raises(ValueError, match="needs loss_fn"):
        t_sharper(flat, steep)


def test_two_draws_say_nothing_about_the_error_of_a_variance() -> None:
    """Leaving one of them out leaves no variance at all."""
    flat, steep = Bowl([1.0, 1.0], [0.1, 0.1]), Bowl([1.3, 1.3], [0.1, 0.1])
    for t in (0.0, 1.0):
        found = neighborhood(flat, call, ONE, [0.1, 0.3], num_samples=2, t=t)
        assert found.variance_error.isnan().all()
        assert found.tilted_variance_error.isnan().all()
        torch.testing.assert_close(found.mean_error, found.losses.std(1) / math.sqrt(2))
        verdict = t_sharper(steep, flat, call, ONE, std=0.3, num_samples=2, t=t)
        assert verdict.error.isnan().all()
        assert not verdict.sure.any()
    assert neighborhood(flat, call, ONE, 0.1, num_samples=3).variance_error > 0


def test_bfloat16_weights_too_coarse_for_the_noise_warn() -> None:
    model = nn.Linear(16, 1).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    data = [(torch.ones(4, 16, dtype=torch.bfloat16), torch.ones(4, 1, dtype=torch.bfloat16))]
    with pytest.warns(UserWarning, match="unchanged"):
        neighborhood(model, mse, data, std=1e-4, num_samples=2)
    neighborhood(model, mse, data, std=0.5, num_samples=2)


@pytest.mark.parametrize("adaptive", [False, True])
def test_bfloat16_weights_too_coarse_for_a_climb_warn(adaptive: bool) -> None:
    """Else a model would seem flat whose weights just cannot move by so little."""
    model = nn.Linear(16, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    data = [(torch.ones(4, 16, dtype=torch.bfloat16), torch.ones(4, 1, dtype=torch.bfloat16))]

    def climb(rho: float) -> None:
        m_sharpness(model, mse, data, rho=rho, adaptive=adaptive)

    def objectives(rho: float) -> None:
        for objective in (SamLoss(rho), TsamLoss(rho=0.0, radius=rho)):
            cross_objectives({"": model}, mse, data, {"": objective})

    for measure in (climb, objectives):
        with pytest.warns(UserWarning, match=r"rounded .* float32 copy"):
            measure(1e-3)
        measure(1.0)


@pytest.mark.parametrize(
    "options",
    [{"std": 0.0}, {"std": []}, {"std": float("nan")}, {"std": 0.1, "num_samples": 1}, {"std": 0.1, "t": -1.0}],
    ids=str,
)
def test_neighborhood_rejects(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be"):
        neighborhood(Bowl([1.0], [1.0]), call, ONE, **options)


@pytest.mark.parametrize("std", [np.float32(0.5), torch.tensor(0.5), np.array([0.5]), (0.5,)], ids=repr)
def test_std_may_be_a_number_of_any_kind(std: Any) -> None:
    bowl = Bowl([1.0], [0.0])
    expected = neighborhood(bowl, call, ONE, 0.5, num_samples=3)
    assert torch.equal(neighborhood(bowl, call, ONE, std, num_samples=3).losses, expected.losses)


def test_from_losses_needs_two() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        Neighborhood.from_losses(torch.ones(1), torch.ones(1, 1), 0.0, 0.0)


# ---------------------------------------------------------------- worst case


class Slope(nn.Module):
    """``loss = a . theta``."""

    def __init__(self, a: list[float], theta: list[float]) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(theta, dtype=torch.float64))
        self.register_buffer("a", torch.tensor(a, dtype=torch.float64))

    def forward(self, _: Any) -> Tensor:
        return self.a @ self.theta


@pytest.mark.parametrize("num_steps", [1, 5])
def test_worst_case_of_a_slope(num_steps: int) -> None:
    slope, rho, eta = Slope([3.0, 4.0], [2.0, -0.5]), 0.1, 0.01
    plain = m_sharpness(slope, call, ONE, rho=rho, num_steps=num_steps)
    assert plain.value == pytest.approx(rho * 5.0, rel=1e-9)
    adaptive = m_sharpness(slope, call, ONE, rho=rho, adaptive=True, eta=eta, num_steps=num_steps)
    assert adaptive.value == pytest.approx(rho * math.hypot(3 * (2 + eta), 4 * (0.5 + eta)), rel=1e-9)


def test_worst_case_of_a_bowl_is_its_top_eigenvalue() -> None:
    bowl, rho = Bowl([4.0, 1.0, 0.5], [0.0, 0.0, 0.0]), 0.3
    assert m_sharpness(bowl, call, ONE, rho=rho).value == 0.0  # no gradient to climb from the very bottom
    found = m_sharpness(bowl, call, ONE, rho=rho, num_steps=20, random_start=True)
    assert found.value == pytest.approx(0.5 * 4.0 * rho**2, rel=1e-3)


def noisy(model: nn.Module, batch: Any) -> Tensor:
    """A loss that draws: the same at all weights, but for the noise."""
    return torch.randn((), dtype=torch.float64) + 0.0 * call(model, batch)


def test_a_loss_that_draws_is_no_sharper_for_its_noise() -> None:
    bowl, data = Bowl(LAMBDAS, THETA), ONE * 3
    assert m_sharpness(bowl, noisy, data, rho=0.3, random_start=True).rises.tolist() == [0.0] * 3
    objectives = {"ERM": ErmLoss(), "SAM": SamLoss(0.3), "TSAM": TsamLoss(rho=0.3)}
    table = cross_objectives({"bowl": bowl}, noisy, data, objectives)
    erm, sam, tsam = (table.entry("bowl", name).loss for name in objectives)
    assert sam == erm
    assert tsam == pytest.approx(erm, rel=1e-12)


class Sum(nn.Module):
    """Two parameters that count as their sum: autograd gives both the same tensor for their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.tensor(x, dtype=torch.float64)) for x in ([1.0, -2.0], [0.5, 0.5]))

    def forward(self, _: Any) -> Tensor:
        return (self.a + self.b).square().sum()


def test_worst_case_where_two_parameters_share_a_gradient() -> None:
    model, rho = Sum(), 0.3
    length = float((model.a + model.b).detach().norm())
    # along the gradient each of the two moves by rho/sqrt(2), so their sum by rho sqrt(2)
    found = m_sharpness(model, call, ONE, rho=rho, num_steps=1)
    assert found.value == pytest.approx((length + rho * math.sqrt(2)) ** 2 - length**2)


class Total(nn.Module):
    """The sum of its parameter: autograd's gradient is one number, spread out."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, _: Any) -> Tensor:
        return self.a.sum()


@pytest.mark.parametrize("adaptive", [False, True])
def test_worst_case_where_a_gradient_is_one_number_spread_out(adaptive: bool) -> None:
    found = m_sharpness(Total(), call, ONE, rho=0.3, num_steps=1, adaptive=adaptive, eta=1.0)
    assert found.value == pytest.approx(0.3 * 2)  # rho times the length of (1, 1, 1, 1)


def test_worst_case_where_a_gradient_is_sparse() -> None:
    table = nn.Embedding(5, 2, sparse=True, dtype=torch.float64)
    rows = torch.tensor([1, 3, 3])
    found = m_sharpness(table, lambda model, batch: model(batch).sum(), [rows], rho=0.3, num_steps=1)
    assert found.value == pytest.approx(0.3 * math.sqrt(10))  # the gradient is 1 in two places, 2 in two


@pytest.mark.parametrize("random_start", [False, True])
def test_weights_of_zero_stay_put_in_a_ball_relative_to_the_weights(random_start: bool) -> None:
    """With ``eta = 0`` they cannot move, and the rest is the ball of the others."""
    rho, lambdas, theta = 0.3, [1.0, 4.0], [0.5, -0.25]
    options = {"rho": rho, "adaptive": True, "eta": 0.0, "num_steps": 20, "random_start": random_start}
    with_zeros = m_sharpness(Bowl([*lambdas, 9.0, 9.0], [*theta, 0.0, 0.0]), call, ONE, **options)
    without = m_sharpness(Bowl(lambdas, theta), call, ONE, **options)
    assert without.value > 0.1
    assert with_zeros.value == pytest.approx(without.value, rel=1e-6)


def test_one_step_is_sam_and_more_steps_never_lose() -> None:
    model, data = convnet(), unequal_batches()
    one = m_sharpness(model, cross_entropy, data, rho=0.2, num_steps=1)
    table = cross_objectives({"m": model}, cross_entropy, data, {"ERM": ErmLoss(), "SAM": SamLoss(0.2)})
    erm, sam = table.entry("m", "ERM").loss, table.entry("m", "SAM").loss
    assert one.value == pytest.approx(sam - erm, rel=1e-9)
    assert one.loss == pytest.approx(erm, rel=1e-12)
    many = m_sharpness(model, cross_entropy, data, rho=0.2, num_steps=8)
    assert (many.rises >= one.rises - 1e-9).all()
    assert (many.rises > one.rises + 1e-6).any()


def test_chunks_of_m_examples() -> None:
    model, (x, y) = convnet(), images(10)
    found = m_sharpness(model, cross_entropy, [(x, y)], rho=0.1, m=4)
    assert found.sizes.tolist() == [4, 4, 2]
    by_hand = [
        m_sharpness(model, cross_entropy, [(x[i:j], y[i:j])], rho=0.1).value for i, j in [(0, 4), (4, 8), (8, 10)]
    ]
    torch.testing.assert_close(found.rises, torch.tensor(by_hand, dtype=torch.float64))
    assert found.value == pytest.approx((4 * by_hand[0] + 4 * by_hand[1] + 2 * by_hand[2]) / 10)
    # smaller chunks, each with a worst case of its own, are sharper than the whole
    assert found.value > m_sharpness(model, cross_entropy, [(x, y)], rho=0.1).value
    assert math.isnan(m_sharpness(model, cross_entropy, [(x, y)], rho=0.1).error)
    halves = m_sharpness(model, cross_entropy, [(x, y)], rho=0.1, m=5)
    assert halves.error == pytest.approx(float(halves.rises.std()) / math.sqrt(2))
    with pytest.raises(ValueError, match="more than the 10"):
        m_sharpness(model, cross_entropy, [(x, y)], rho=0.1, m=11)


@pytest.mark.parametrize("options", [{"rho": 0.0}, {"rho": 1.0, "num_steps": 0}, {"rho": 1.0, "m": 0}], ids=str)
def test_m_sharpness_rejects(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        m_sharpness(convnet(), cross_entropy, unequal_batches(), **options)


# ---------------------------------------------------------------- objectives


def test_sam_objective_is_its_definition() -> None:
    model, batch, rho = convnet().eval(), images(), 0.1
    grads = torch.autograd.grad(cross_entropy(model, batch), list(model.parameters()))
    norm = torch.cat([g.flatten() for g in grads]).norm()
    moved = convnet().eval()
    with torch.no_grad():
        for p, g in zip(moved.parameters(), grads, strict=True):
            p.add_(g, alpha=float(rho / norm))
        expected = float(cross_entropy(moved, batch))
    found = cross_objectives({"m": model}, cross_entropy, [batch], {"SAM": SamLoss(rho)})
    assert found.entry("m", "SAM").loss == pytest.approx(expected, rel=1e-9)
    assert math.isnan(found.entry("m", "SAM").error)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (lambda: SamLoss(rho=-1.0), "rho must be a finite number >= 0, got -1.0"),
        (lambda: TsamLoss(rho=math.nan), "rho must be a finite number >= 0, got nan"),
        (lambda: TsamLoss(t=-1.0), "t must be a finite number >= 0, got -1.0"),
        (lambda: TsamLoss(radius=-1.0), "radius must be a finite number >= 0, got -1.0"),
        (lambda: TsamLoss(num_samples=0), "num_samples must be an integer >= 1, got 0"),
    ],
)
def test_objectives_reject(objective: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        objective()


@pytest.mark.parametrize("given", [{"models": {}}, {"splits": {}}, {"objectives": {}}], ids=str)
def test_an_empty_table_is_a_clear_error(given: dict[str, Any]) -> None:
    whole = {"models": {"m": convnet()}, "splits": [images()], "objectives": {"ERM": ErmLoss()}}
    with pytest.raises(ValueError, match=f"{next(iter(given))} is empty"):
        cross_objectives(loss_fn=cross_entropy, **whole | given)


def test_tsam_objective_of_a_slope() -> None:
    """One dimension, uniform noise: L + log(sinh z / z)/t with z = t R |a|; the ascent adds rho |a|."""
    a, radius, t = 2.0, 0.5, 3.0
    slope, z = Slope([a], [1.0]), t * radius * a
    exact = a + math.log(math.sinh(z) / z) / t
    for rho in (0.0, 0.1):
        objective = TsamLoss(t=t, rho=rho, radius=radius, num_samples=3000)
        found = cross_objectives({"m": slope}, call, ONE, {"TSAM": objective}).entry("m", "TSAM").loss
        assert found == pytest.approx(exact + rho * a, abs=0.02)


def test_tsam_objective_in_the_limits() -> None:
    model, data = convnet(), unequal_batches()
    objectives = {
        "no noise": TsamLoss(t=5.0, rho=0.1, radius=0.0, num_samples=2),
        "SAM": SamLoss(0.1),
        "nothing": TsamLoss(t=5.0, rho=0.0, radius=0.0),
        "ERM": ErmLoss(),
        "t = 0": TsamLoss(t=0.0, rho=0.1, radius=1.0, num_samples=4),
        "t = 5": TsamLoss(t=5.0, rho=0.1, radius=1.0, num_samples=4),
        "t = 1e6": TsamLoss(t=1e6, rho=0.1, radius=1.0, num_samples=4),
    }
    table = cross_objectives({"m": model}, cross_entropy, {"train": data, "test": data[:1]}, objectives)
    loss = {name: table.entry("m", name, "train").loss for name in objectives}
    assert loss["no noise"] == pytest.approx(loss["SAM"], rel=1e-9)
    assert loss["nothing"] == pytest.approx(loss["ERM"], rel=1e-9)
    assert loss["t = 0"] < loss["t = 5"] < loss["t = 1e6"]
    with torch.no_grad():
        first, second = (float(cross_entropy(model.eval(), batch)) for batch in data)
    # batches of 7 and 5: the squared deviations are (5/12)^2 and (7/12)^2 of the difference, the shares 7/12 and 5/12
    squares = 2 * (35 / 144) ** 2 / (1 - 74 / 144)
    assert table.entry("m", "ERM", "train").error == pytest.approx(abs(first - second) * math.sqrt(squares))
    text = str(table)
    assert "train loss" in text
    assert "test loss" in text
    assert f"{loss['ERM']:.4f}" in text
    with pytest.raises(KeyError):
        table.entry("m", "ERM", "validation")
    with pytest.raises(ValueError, match="models is empty"):
        cross_objectives({}, cross_entropy, data)
