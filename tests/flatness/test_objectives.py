"""The losses of ERM, SAM and TSAM against their definitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.measuring import Slope, call, convnet, cross_entropy, images, unequal_batches
from tiltsam.flatness.objectives import ErmLoss, SamLoss, TsamLoss, cross_objectives

ONE = [torch.ones(1)]


def test_sam_loss_matches_definition() -> None:
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
def test_objectives_reject_bad_arguments(objective: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        objective()


@pytest.mark.parametrize("given", [{"models": {}}, {"splits": {}}, {"objectives": {}}], ids=str)
def test_cross_objectives_rejects_empty_arguments(given: dict[str, Any]) -> None:
    whole = {"models": {"m": convnet()}, "splits": [images()], "objectives": {"ERM": ErmLoss()}}
    with pytest.raises(ValueError, match=next(iter(given))):
        cross_objectives(loss_fn=cross_entropy, **whole | given)


def test_tsam_loss_of_linear_loss() -> None:
    """One dimension, uniform noise: L + log(sinh z / z)/t with z = t R |a|; the ascent adds rho |a|."""
    a, radius, t = 2.0, 0.5, 3.0
    slope, z = Slope([a], [1.0]), t * radius * a
    exact = a + math.log(math.sinh(z) / z) / t
    for rho in (0.0, 0.1):
        objective = TsamLoss(t=t, rho=rho, radius=radius, num_samples=3000)
        found = cross_objectives({"m": slope}, call, ONE, {"TSAM": objective}).entry("m", "TSAM").loss
        assert found == pytest.approx(exact + rho * a, abs=0.02)


def test_tsam_loss_limits() -> None:
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
    with pytest.raises(ValueError, match="models"):
        cross_objectives({}, cross_entropy, data)
