import pytest

import tiltsam
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.records import Record
from tiltsam.lab.schedules import rate_factor
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
