from functools import partial

import pytest
from torch import nn

import tiltsam
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.errors import ConfigError
from tiltsam.lab.records import Record
from tiltsam.lab.schedules import passes_per_step, rate_factor
from tiltsam.lab.train import train


def watch(monkeypatch, method, name):
    """Return a list to which every step appends the value of a setting."""
    seen = []
    aggregate = method._aggregate

    def watched(self, step):
        seen.append(self.param_groups[0][name])
        return aggregate(self, step)

    monkeypatch.setattr(method, "_aggregate", watched)
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


@pytest.mark.parametrize("direction", ["constant", "up"])
def test_rho_is_zero_before_rho_from(direction, tmp_path, monkeypatch):
    seen = watch(monkeypatch, tiltsam.GSAM, "rho")
    config = TrainConfig(
        "digits", "gsam", options={"rho": 0.4}, epochs=2, rho_from=0.7, rho_schedule=direction, batch_size=200
    )
    result = train(config, Record.of(tmp_path, config))
    assert len(seen) == 10
    late = [0.4, 0.4, 0.4] if direction == "constant" else [0.4 * 0.7, 0.4 * 0.8, 0.4 * 0.9]
    assert seen == pytest.approx([0.0] * 7 + late)
    assert result["passes"] == 7 + 3 * 2  # one pass a step while rho is 0


def test_rho_schedule_leaves_other_layers_alone(tmp_path, monkeypatch):
    """With perturb="norm" all parameters but those of normalisation layers have a rho of 0."""
    seen = []
    aggregate = tiltsam.SAM._aggregate

    def watched(self, step):
        seen.append([group["rho"] for group in self.param_groups])
        return aggregate(self, step)

    monkeypatch.setattr(tiltsam.SAM, "_aggregate", watched)
    config = TrainConfig(
        "digits", "sam", "cnn", options={"rho": 0.4}, epochs=1, rho_from=0.5, perturb="norm", batch_size=200
    )
    train(config, Record.of(tmp_path, config))
    assert seen == [[0.0, 0.0]] * 3 + [[0.4, 0.0]] * 2


def test_perturb_norm_needs_normalisation_layers(tmp_path, monkeypatch):
    monkeypatch.setattr("tiltsam.lab.train.build", lambda *_: nn.Linear(2, 2))
    config = TrainConfig("digits", "sam", perturb="norm")
    with pytest.raises(ConfigError, match=r"perturb='norm'.*normalisation"):
        train(config, Record.of(tmp_path, config))


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
        ("gsam", {}, 2),
        ("looksam", {}, 1.2),
        ("looksam", {"k": 2, "every": 3}, 7 / 6),
        ("friendlysam", {}, 2),
        ("wsam", {}, 2),
        ("usam", {}, 2),
        ("momentumsam", {}, 1),
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
