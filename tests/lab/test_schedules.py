from functools import partial

import pytest

import tiltsam
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.records import Record
from tiltsam.lab.schedules import passes_per_step, rate_factor
from tiltsam.lab.train import train


def watch(monkeypatch, method, name):
    """Return a list to which every step appends the value of a setting."""
    seen = []
    aggregate = method.aggregate

    def watched(self, step):
        seen.append(self.param_groups[0][name])
        return aggregate(self, step)

    monkeypatch.setattr(method, "aggregate", watched)
    return seen


@pytest.mark.parametrize("direction", ["constant", "up", "down"])
def test_t_schedule(direction, tmp_path, monkeypatch):
    seen = watch(monkeypatch, tiltsam.TSAM, "t")
    options = {"t": 8.0, "num_samples": 1}
    config = TrainConfig("digits", options=options, epochs=2, t_schedule=direction, batch_size=200, device="cpu")
    train(config, Record.of(tmp_path, config))
    steps = len(seen)
    assert steps == 10
    expected = {"constant": [8.0] * steps, "up": [8 * k / steps for k in range(steps)]}
    expected["down"] = [8 * (1 - k / steps) for k in range(steps)]
    assert seen == pytest.approx(expected[direction])


@pytest.mark.parametrize("direction", ["constant", "up", "down"])
@pytest.mark.parametrize("options", [{"rho": 0.4}, {}])
def test_rho_schedule(direction, options, tmp_path, monkeypatch):
    seen = watch(monkeypatch, tiltsam.SAM, "rho")
    config = TrainConfig("digits", "sam", options=options, epochs=2, rho_schedule=direction, batch_size=200)
    train(config, Record.of(tmp_path, config), until=0.5)
    train(config, Record.of(tmp_path, config))  # resumes from the initial rho, not from the scheduled one
    rho, steps = options.get("rho", 0.05), len(seen)
    assert steps == 10
    shares = {"constant": [1.0] * steps, "up": [k / steps for k in range(steps)]}
    shares["down"] = [1 - k / steps for k in range(steps)]
    assert seen == pytest.approx([rho * share for share in shares[direction]])


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize("warmup", [0.1, 0.5])
def test_learning_rate_decays_after_warmup(schedule, warmup):
    config = TrainConfig(schedule=schedule, warmup=warmup)
    before, at, half, end = (rate_factor(config, x) for x in (warmup - 1e-9, warmup, (1 + warmup) / 2, 1.0))
    assert (before, at, half, end) == pytest.approx((1, 1, 0.5, 0))


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
