import pytest
import torch

import tiltsam
from tiltsam.lab.budget import passes_of, passes_per_step
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.errors import ConfigError


def counted(config):
    """Return the passes per step of real steps on two weights."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = config.wrap(torch.optim.SGD([weight], lr=0.1))

    def closure():
        loss = weight.square().sum()
        if loss.requires_grad:
            loss.backward()
        return loss

    costs = []
    for _ in range(config.every):
        optimizer.step([closure] * config.num_samples if config.splits() else closure)
        costs.append(passes_of(optimizer.info, config.ascent_fraction))
    return sum(costs) / len(costs)


@pytest.mark.parametrize(
    ("method", "options", "passes"),
    [
        ("erm", {}, 1),
        ("sam", {}, 2),
        ("asam", {}, 2),
        ("pgn", {}, 2),
        ("rsam", {}, 2),
        ("esam1", {"num_samples": 5}, 2),
        ("esam2", {"num_points": 12}, 6),
        ("tsam", {"num_samples": 5}, 10),
        ("tsam", {"num_samples": 3, "ascent_steps": 3}, 12),
        ("tsam", {"num_samples": 10, "sampler": "uniform"}, 10),
        ("tsam", {"num_samples": 4, "sampler": "gaussian"}, 4),
        ("tsam", {"num_samples": 4, "sampler": "hmc"}, 8),
        ("tsam", {"num_samples": 4, "share_ascent": True}, 5),
        ("tsam", {"num_samples": 4, "split": True}, 2),
        ("tsam", {"num_samples": 3, "ascent_fraction": 0.5, "every": 2}, 2.75),
        ("sam", {"split": True}, 2),
        ("sam", {"every": 4}, 1.25),
        ("sam", {"ascent_fraction": 0.25}, 1.25),
        ("asam", {"ascent_fraction": 0.25}, 1.25),
        ("rsam", {"ascent_fraction": 0.25}, 1.25),
        ("pgn", {"ascent_fraction": 0.25}, 2),
        ("esam2", {"num_points": 12, "ascent_fraction": 0.25}, 5.25),
    ],
)
def test_passes_per_step_equals_counted_steps(method, options, passes):
    config = TrainConfig(method=method, **options)
    assert passes_per_step(config) == pytest.approx(passes)
    assert counted(config) == pytest.approx(passes)


def test_passes_per_step_refuses_unknown_method(monkeypatch):
    monkeypatch.setitem(tiltsam.METHODS, "mine", tiltsam.SAM)
    with pytest.raises(ConfigError, match="mine"):
        passes_per_step(TrainConfig(method="mine"))
