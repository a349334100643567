from functools import partial

import pytest

import tiltsam
from tiltsam.lab.budget import passes_per_step
from tiltsam.lab.config import TrainConfig


@pytest.mark.parametrize(
    ("method", "options", "passes"),
    [
        ("erm", {}, 1),
        ("sam", {}, 2),
        ("asam", {}, 2),
        ("pgn", {}, 2),
        ("rsam", {}, 2),
        ("esam2", {"num_points": 12}, 6),
        ("tsam", {"num_samples": 5}, 10),
        ("tsam", {"num_samples": 3, "ascent_steps": 3}, 12),
        ("tsam", {"num_samples": 10, "sampler": "uniform"}, 10),
        ("tsam", {"num_samples": 4, "sampler": "gaussian"}, 4),
        ("tsam", {"num_samples": 4, "sampler": "hmc"}, 8),
        ("tsam", {"num_samples": 4, "share_ascent": True}, 5),
        ("tsam", {"num_samples": 4, "split": True}, 2),
        ("tsam", {"num_samples": 3, "ascent_fraction": 0.5, "every": 2}, 2.75),
        ("sam", {"every": 4}, 1.25),
        ("sam", {"ascent_fraction": 0.25}, 1.25),
        ("asam", {"ascent_fraction": 0.25}, 1.25),
        ("rsam", {"ascent_fraction": 0.25}, 1.25),
        ("pgn", {"ascent_fraction": 0.25}, 2),
        ("esam2", {"num_points": 12, "ascent_fraction": 0.25}, 5.25),
    ],
)
def test_passes_per_step(method, options, passes):
    config = TrainConfig.from_settings({"method": method, **options})
    assert passes_per_step(config) == pytest.approx(passes)


def test_passes_per_step_of_a_users_method(monkeypatch):
    monkeypatch.setitem(tiltsam.METHODS, "mine", partial(tiltsam.TSAM, num_samples=2, share_ascent=True))
    assert passes_per_step(TrainConfig(method="mine")) == 3
