import dataclasses
import json
import math
from dataclasses import replace
from functools import partial
from typing import Literal

import pytest
import torch

import tiltsam
from helpers.vasso import VaSSO
from tiltsam.lab.config import TrainConfig, allowed_types, has_setting, method_options
from tiltsam.lab.errors import ConfigError


class BareSAM(tiltsam.SharpnessAware):
    """Takes neither a model nor a seed nor processes."""

    def __init__(self, base, *, rho=0.05):
        super().__init__(base, tiltsam.samplers.Ascent(), {"rho": rho})


class PickySAM(tiltsam.SAM):
    """Has options of all types, one of them required."""

    def __init__(
        self,
        base,
        *,
        size: int,
        norm: Literal["l1", "l2"] = "l2",
        bound: float | None = 0.5,
        plain=None,
        start=tiltsam.samplers.Uniform(),  # noqa: B008
        hook: tiltsam.samplers.Sampler | None = None,
        lr: float = 0.1,
        **options,
    ):
        super().__init__(base, **options)


@pytest.fixture
def own_methods(monkeypatch):
    made = {"bare": BareSAM, "vasso": VaSSO, "slow": partial(VaSSO, rate=0.01), "picky": PickySAM}
    made["function"] = lambda base, rho: tiltsam.SAM(base, rho=rho)
    for name, method in made.items():
        monkeypatch.setitem(tiltsam.METHODS, name, method)


def test_options_are_those_of_the_constructor(own_methods):
    assert list(method_options("erm")) == []
    assert list(method_options("rsam")) == ["rho", "gamma", "lam"]
    assert list(method_options("vasso")) == ["rho", "rate"]
    assert method_options("slow")["rate"].default == 0.01
    assert list(method_options("function")) == ["rho"]
    assert list(method_options("picky")) == ["size", "norm", "bound", "plain", "start"]
    assert TrainConfig(method="picky", options={"size": 2}).all_options() == {
        "size": 2,
        "norm": "l2",
        "bound": 0.5,
        "plain": None,
    }


def test_unknown_and_missing_options_are_refused(own_methods):
    with pytest.raises(ConfigError, match="vasso has no eta; its options: rho, rate"):
        TrainConfig(method="vasso", options={"eta": 1.0})
    with pytest.raises(ConfigError, match="erm has no rho; its options: none"):
        TrainConfig(method="erm", options={"rho": 1.0})
    with pytest.raises(ConfigError, match="picky needs size"):
        TrainConfig(method="picky")
    with pytest.raises(ConfigError, match="unknown method 'lookahead'"):
        TrainConfig(method="lookahead")
    with pytest.raises(ConfigError, match="sam has no t_schedule"):
        TrainConfig(method="sam", t_schedule="up")


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("sam", {"rho": "0.1"}),
        ("sam", {"rho": True}),
        ("sam", {"rho": abs}),
        ("tsam", {"num_samples": 2.0}),
        ("tsam", {"sampler": "best"}),
        ("tsam", {"share_ascent": 1}),
        ("sam", ["rho"]),
        ("bare", {"rho": [0.1]}),
    ],
)
def test_options_of_another_type_are_refused(method, options, own_methods):
    with pytest.raises(ConfigError, match=r"must be .*, got"):
        TrainConfig(method=method, options=options)


def test_kinds_of_annotations():
    assert allowed_types(float | tiltsam.optim.Schedule) == [float]
    assert allowed_types(Literal["a", 1] | None) == ["a", 1, type(None)]
    assert not allowed_types(tiltsam.samplers.Sampler)


def test_options_at_their_default_are_left_out(own_methods):
    assert TrainConfig(method="sam", options={"rho": 0.05}) == TrainConfig(method="sam")
    assert TrainConfig(method="slow", options={"rate": 0.01, "rho": 1}).options == {"rho": 1.0}
    assert hash(TrainConfig(method="sam", options={"rho": 0.3})) == hash(TrainConfig(method="sam"))


def test_config_survives_json(own_methods):
    for config in (TrainConfig(), TrainConfig("digits", "vasso", options={"rate": 0.6}, rho_schedule="up", seed=3)):
        assert TrainConfig(**json.loads(json.dumps(config.to_json()))) == config


def test_negative_tilt_has_a_floor_and_a_warmup_by_default():
    def of(config):
        return config.example_ess, config.example_tilt_warmup

    tilted = TrainConfig(example_tilt=-1.0)
    assert of(TrainConfig()) == of(TrainConfig(example_tilt=1.0)) == (0.0, 0.0)
    assert of(tilted) == (0.3, 0.3)
    assert of(TrainConfig(example_tilt=-1.0, class_tilt=2.0)) == (0.0, 0.3)
    bare = tilted.with_settings({"example_ess": 0.0, "example_tilt_warmup": 0.0})
    assert of(bare) == of(bare.with_settings({"lr": 0.3})) == (0.0, 0.0)
    assert tilted.with_settings({"example_tilt": 0.0}) == TrainConfig()
    assert tilted.settings() == {"example_tilt": -1.0}
    assert TrainConfig(**tilted.to_json()) == tilted
    assert TrainConfig(**bare.to_json()) == bare
    # Runs keep their names: the record of 2026-11-17 has one without and one with both.
    base = {"method": "sam", "epochs": math.inf, "passes": 1560.0, "evaluate_every": 3, "validation": 0.3, "lr": 0.01}
    base |= {"model": "mlp", "rho": 0.2, "noise": 0.4, "example_tilt": -1.0, "example_ess": 0.3}
    for warmup, key in {0.0: "sam-efd82b5952", 0.3: "sam-fb76e8cfee"}.items():
        assert TrainConfig.from_settings({**base, "example_tilt_warmup": warmup}).key() == key


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "gce", "label_smoothing": 0.1}, "label_smoothing must be 0 with loss gce, got 0.1"),
        ({"optimizer": "adamw", "momentum": 0.5}, "momentum needs optimizer sgd, got adamw"),
        ({"gce_q": 0.5}, "gce_q needs loss gce, got cross-entropy"),
        ({"loss": "gce", "gce_q": 0.0}, r"gce_q must be in \(0, 1\], got 0"),
        ({"loss": "gce", "gce_q": 1.5}, r"gce_q must be in \(0, 1\], got 1.5"),
        ({"loss": "gce", "logit_tau": 2.0}, "logit_tau needs loss logit-adjusted, got gce"),
        ({"loss": "logit-adjusted", "logit_tau": -1.0}, "logit_tau .* got -1"),
        ({"loss": "hinge"}, "loss must be .*'hinge'"),
    ],
    ids=str,
)
def test_config_checks_the_loss(settings, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**settings)


def test_with_settings_sets_fields_and_options(own_methods):
    config = TrainConfig(lr=0.3, options={"rho": 0.2, "t": 5.0}, t_schedule="up", rho_schedule="down")
    assert config.with_settings({"t": 1.0, "lr": 0.1}).settings() == {
        "lr": 0.1,
        "rho_schedule": "down",
        "t_schedule": "up",
        "rho": 0.2,
        "t": 1.0,
    }
    own = config.with_settings({"method": "vasso", "rate": 0.6})
    assert own.options == {"rho": 0.2, "rate": 0.6}
    assert (own.lr, own.rho_schedule, own.t_schedule) == (0.3, "down", "constant")
    assert has_setting("vasso", "rho_schedule")
    for wrong in ({"eta": 1.0}, {"method": "sam", "t": 1.0}, {"rhoo": 1.0}):
        with pytest.raises(ConfigError, match=f"has no {list(wrong)[-1]}"):
            config.with_settings(wrong)


def test_key_is_of_what_differs_from_the_defaults(own_methods):
    plain = TrainConfig(method="sam")
    assert plain.key() == TrainConfig(method="sam", options={"rho": 0.05}, seed=3, device="cpu").key()
    assert plain.key().startswith("sam-")
    others = [{"rho": 0.1}, {"lr": 0.1}, {"rho_schedule": "up"}, {"average": True}, {"task": "dtd"}, {"epochs": 2}]
    assert len({plain.with_settings(other).key() for other in ({}, *others)}) == 7
    assert plain.with_settings({"epochs": 2}).key() == plain.with_settings({"epochs": 2.0}).key()
    assert plain.with_settings({"rho": 1}).key() == plain.with_settings({"rho": 1.0}).key()


def test_conflicting_settings_are_refused():
    with pytest.raises(ConfigError, match="delta"):
        TrainConfig(t_schedule="up", options={"delta": 1.0})
    base = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="ascent_steps"):
        TrainConfig(options={"ascent_steps": 2, "sampler": "uniform"}).wrap(base)


def test_every_field_has_a_default_and_a_type():
    assert dataclasses.replace(TrainConfig()) == TrainConfig()
    with pytest.raises(ConfigError, match=r"epochs must be float, got '2'"):
        TrainConfig(epochs="2")


def test_wrap_passes_only_arguments_of_the_constructor(own_methods):
    config = TrainConfig(method="bare", options={"rho": 0.3})
    model = torch.nn.Linear(2, 1)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = config.wrap(base, model=model, seed=7, parallel=None)
    assert optimizer.model is None
    assert optimizer.setting("rho") == 0.3
    with pytest.raises(ConfigError, match="bare has no option parallel"):
        config.wrap(base, model=model, seed=7, parallel=tiltsam.Parallel())


@pytest.mark.parametrize("method", ["pgn", "tsam", "slow"])
def test_every_takes_plain_steps_between(method, own_methods):
    model = torch.nn.Linear(2, 1)
    config = TrainConfig(method=method, every=3)
    optimizer = config.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model=model)

    def closure():
        loss = model(torch.ones(4, 2)).square().mean()
        loss.backward()
        return loss

    passes = []
    for _ in range(7):
        optimizer.step(closure)
        passes.append(optimizer.info.num_backwards)
    full = 6 if method == "tsam" else 2
    assert passes == [full, 1, 1, full, 1, 1, full]


def test_every_needs_a_class(monkeypatch):
    monkeypatch.setitem(tiltsam.METHODS, "made", lambda base, **options: tiltsam.SAM(base, **options))
    base = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    config = TrainConfig(method="made")
    assert isinstance(config.wrap(base, seed=1), tiltsam.SAM)
    with pytest.raises(ConfigError, match="every"):
        replace(config, every=2).wrap(base, seed=1)


def test_task_path_is_normalised():
    config = TrainConfig("images:photos/cats")
    for path in ("./photos/cats", "photos/cats/", "photos//./cats"):
        assert TrainConfig(f"images:{path}") == config
    for task in ("digits", "images:", "images:../cats", "images:a/../cats", "images:/photos/cats", "images:~/cats"):
        assert TrainConfig(task).task == task


@pytest.mark.parametrize(("typed", "meant"), [("samm", "sam"), ("SAM", "sam"), ("TSAM", "tsam"), ("asm", "asam")])
def test_unknown_method_suggests_the_nearest(typed, meant):
    with pytest.raises(ConfigError, match=rf"unknown method '{typed}': did you mean {meant}\? one of erm, "):
        TrainConfig(method=typed)
