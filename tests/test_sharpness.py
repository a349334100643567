"""Neighbourhoods against closed forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers.measuring import Bowl, call, convnet, cross_entropy, mse, unequal_batches
from tiltsam.sharpness import Neighborhood, neighborhood, rounding, t_sharper
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
def test_neighborhood_of_quadratic_matches_tilted_gaussian(t: float) -> None:
    stds = [0.05, 0.2]
    found = neighborhood(Bowl(LAMBDAS, THETA), call, ONE, stds, num_samples=1500, t=t)
    assert found.center == pytest.approx(tilted_gaussian(0.0, 0.0)[0], rel=1e-12)
    for i, std in enumerate(stds):
        for tilt, keys in [(0.0, ("mean", "variance")), (t, ("tilted_mean", "tilted_variance"))]:
            for key, exact in zip(keys, tilted_gaussian(std, tilt), strict=True):
                error = float(getattr(found, f"{key}_error")[i])
                assert abs(float(getattr(found, key)[i]) - exact) < 4 * error, key
                assert error < 0.25 * exact, key


def test_neighborhood_errors_are_calibrated() -> None:
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
def test_effective_samples_predict_coverage_of_tilted_errors(
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


def test_errors_shrink_with_num_samples() -> None:
    few, many = (neighborhood(Bowl(LAMBDAS, THETA), call, ONE, 0.05, n, t=1.0) for n in (200, 3200))
    for key in ("mean", "variance", "tilted_mean", "tilted_variance"):
        ratio = float(getattr(few, f"{key}_error") / getattr(many, f"{key}_error"))
        assert 2.5 < ratio < 6.5, key  # sqrt(16) = 4


def test_neighborhood_statistics_match_losses() -> None:
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


def test_draws_are_shared_between_stds_and_models() -> None:
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


def test_t_sharper_finds_the_steeper_bowl() -> None:
    steep, flat = (
        neighborhood(Bowl([c, c], [0.1, 0.1]), call, ONE, [0.1, 0.3], num_samples=200, t=t)
        for c, t in ((1.3, 1.0), (1.0, 0.0))
    )
    verdict = t_sharper(steep, flat, t=1.0)
    assert verdict.sharper.all()
    assert verdict.significant.all()
    assert not t_sharper(flat, steep).sharper.any()
    same = t_sharper(flat, flat)
    assert (same.difference == 0).all()
    assert not same.significant.any()
    # common draws: the error of the difference is well below that of two independent measurements
    apart = torch.hypot(steep.tilted_variance_error, flat.at_tilt(1.0).tilted_variance_error)
    assert (verdict.error < 0.7 * apart).all()
    for options in ({"std": 0.1, "num_samples": 200}, {"std": [0.1, 0.3], "num_samples": 100}):
        with pytest.raises(ValueError, match="std"):
            t_sharper(steep, neighborhood(Bowl([1.0, 1.0], [0.1, 0.1]), call, ONE, **options))


def test_two_draws_give_nan_error_of_variance() -> None:
    """Leaving one of them out leaves no variance at all."""
    flat, steep = Bowl([1.0, 1.0], [0.1, 0.1]), Bowl([1.3, 1.3], [0.1, 0.1])
    for t in (0.0, 1.0):
        found = neighborhood(flat, call, ONE, [0.1, 0.3], num_samples=2, t=t)
        assert found.variance_error.isnan().all()
        assert found.tilted_variance_error.isnan().all()
        torch.testing.assert_close(found.mean_error, found.losses.std(1) / math.sqrt(2))
        verdict = t_sharper(neighborhood(steep, call, ONE, [0.1, 0.3], num_samples=2), found, t)
        assert verdict.error.isnan().all()
        assert not verdict.significant.any()
    assert neighborhood(flat, call, ONE, 0.1, num_samples=3).variance_error > 0


def test_neighborhood_warns_if_bfloat16_rounds_noise_away() -> None:
    model = nn.Linear(16, 1).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    data = [(torch.ones(4, 16, dtype=torch.bfloat16), torch.ones(4, 1, dtype=torch.bfloat16))]
    with pytest.warns(UserWarning, match="low-precision"):
        neighborhood(model, mse, data, std=1e-4, num_samples=2)
    neighborhood(model, mse, data, std=0.5, num_samples=2)


@pytest.mark.parametrize(
    "options",
    [{"std": 0.0}, {"std": []}, {"std": float("nan")}, {"std": 0.1, "num_samples": 1}, {"std": 0.1, "t": -1.0}],
    ids=str,
)
def test_neighborhood_rejects_bad_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be"):
        neighborhood(Bowl([1.0], [1.0]), call, ONE, **options)


@pytest.mark.parametrize("std", [np.float32(0.5), torch.tensor(0.5), np.array([0.5]), (0.5,)], ids=repr)
def test_neighborhood_accepts_numpy_and_tensor_std(std: Any) -> None:
    bowl = Bowl([1.0], [0.0])
    expected = neighborhood(bowl, call, ONE, 0.5, num_samples=3)
    assert torch.equal(neighborhood(bowl, call, ONE, std, num_samples=3).losses, expected.losses)


@pytest.mark.parametrize("t", [-1.0, math.nan, math.inf])
def test_negative_tilt_is_rejected(t: float) -> None:
    found = neighborhood(Bowl(LAMBDAS, THETA), call, ONE, 0.1, num_samples=3)
    for measure in (found.at_tilt, lambda t: t_sharper(found, found, t=t)):
        with pytest.raises(ValueError, match=f"t .*got {t}"):
            measure(t)


def test_from_losses_rejects_one_sample() -> None:
    with pytest.raises(ValueError, match=r"num_samples .*got 1"):
        Neighborhood.from_losses(torch.ones(1), torch.ones(1, 1), 0.0, 0.0)


def quantized(model: nn.Module, bits: int) -> nn.Module:
    """Round each row of each weight with a loop, as integers."""
    levels = 2 ** (bits - 1) - 1
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2:
                for row in p:
                    integers = [round(float(x) * levels / float(row.abs().max())) for x in row.flatten()]
                    assert max(map(abs, integers)) <= levels
                    row.copy_(torch.tensor(integers).reshape(row.shape) * float(row.abs().max()) / levels)
    return model


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_rounding_equals_the_loss_of_a_rounded_copy(bits: int) -> None:
    model, batches = convnet(), unequal_batches()
    before = [p.detach().clone() for p in model.parameters()]
    found = rounding(model, cross_entropy, batches, bits)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    copy = quantized(convnet(), bits)
    copy.load_state_dict({**model.state_dict(), **dict(copy.named_parameters())})
    twin = rounding(copy, cross_entropy, batches, 16)
    assert found.losses[0] == pytest.approx(twin.center, rel=1e-5)
    moved = torch.cat([(p.detach() - b).flatten() for p, b in zip(copy.parameters(), before, strict=True)])
    assert found.distances[0] == pytest.approx(float(moved.norm()), rel=1e-4)


def test_rounding_changes_the_loss_less_with_more_bits() -> None:
    found = rounding(convnet(), cross_entropy, unequal_batches(), [3, 8, 16])
    changes = (found.losses - found.center).abs()
    assert changes[0] > changes[1] > changes[2]
    assert bool((found.distances[:-1] > found.distances[1:]).all())


def test_rounding_leaves_rows_of_zeros_alone() -> None:
    layer = nn.Linear(2, 2)
    nn.init.zeros_(layer.weight)
    found = rounding(layer, mse, [(torch.ones(3, 2), torch.ones(3, 2))], 4)
    assert found.losses[0] == found.center
    assert found.distances[0] == 0


@pytest.mark.parametrize("bits", [1, 17, [], [8, 1], 4.0])
def test_rounding_rejects_bits_out_of_range(bits: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        rounding(nn.Linear(2, 1), mse, [(torch.ones(3, 2), torch.ones(3, 1))], bits)


def test_rounding_needs_a_matrix() -> None:
    with pytest.raises(ValueError, match="two or more dimensions"):
        rounding(Bowl(LAMBDAS, THETA), call, ONE)
