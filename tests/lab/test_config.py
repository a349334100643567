import dataclasses
from dataclasses import replace
from functools import partial

import pytest
import torch

import tiltsam
from helpers.friendly import FriendlySAM
from tiltsam.lab.config import _LATER_DEFAULTS, TrainConfig
from tiltsam.lab.errors import ConfigError

SMALL = TrainConfig(epochs=2, batch_size=128, num_samples=2, num_points=2)


class BareSAM(tiltsam.SharpnessAware):
    """Takes neither a model nor a seed nor processes."""

    def __init__(self, base, *, rho=0.05):
        super().__init__(base, tiltsam.samplers.Ascent(), {"rho": rho})


def test_key_ignores_later_fields_at_their_defaults():
    plain = TrainConfig("digits", "tsam")
    assert plain.key() == dataclasses.replace(plain, t_schedule="constant", ascent_steps=1).key()
    keys = {dataclasses.replace(plain, **change).key() for change in ({}, {"t_schedule": "up"}, {"ascent_steps": 2})}
    assert len(keys) == 3
    other = TrainConfig("digits", "sam")
    assert other.key() == dataclasses.replace(other, rho_schedule="constant").key()
    assert other.key() != dataclasses.replace(other, rho_schedule="up").key()
    assert other.key() == dataclasses.replace(other, t_schedule="up", ascent_steps=2).key()
    with pytest.raises(ConfigError, match="delta"):
        TrainConfig(t_schedule="up", delta=1.0)
    with pytest.raises(ConfigError, match="ascent_steps"):
        TrainConfig(ascent_steps=2, sampler="uniform")


def test_key_changes_with_the_default_radius():
    config = TrainConfig("digits", "tsam", num_samples=3)
    assert config.key() != "tsam-3cb7600238"  # the key when None meant 0.006 √d
    assert dataclasses.replace(config, radius=2.0).key() == "tsam-707545efcd"


def test_later_fields_keep_their_defaults():
    """A config.json of an earlier version lacks the fields added since, which are read as their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    assert {name: defaults[name] for name in _LATER_DEFAULTS} == _LATER_DEFAULTS


def test_defaults_are_those_of_the_library():
    weight = torch.nn.Parameter(torch.ones(2))
    (group,) = tiltsam.TSAM(torch.optim.SGD([weight], lr=0.1)).param_groups
    own = ("t", "radius", "num_samples", "delta")
    assert {name: getattr(TrainConfig(), name) for name in own} == {name: group[name] for name in own}


def test_wrap_passes_only_options_of_the_constructor(monkeypatch):
    monkeypatch.setitem(tiltsam.METHODS, "bare", BareSAM)
    config = TrainConfig(method="bare", rho=0.3)
    model = torch.nn.Linear(2, 1)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = config.wrap(base, model=model, seed=7, parallel=None)
    assert optimizer.model is None
    assert optimizer.setting("rho") == 0.3
    with pytest.raises(ConfigError, match="bare has no option parallel"):
        config.wrap(base, model=model, seed=7, parallel=tiltsam.Parallel())


@pytest.mark.parametrize("method", ["pgn", "tsam", "slow"])
def test_every_takes_plain_steps_between(method, monkeypatch):
    monkeypatch.setitem(tiltsam.METHODS, "slow", partial(FriendlySAM, lam=0.99))
    model = torch.nn.Linear(2, 1)
    config = replace(SMALL, method=method, every=3)
    optimizer = config.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model=model)

    def closure():
        loss = model(torch.ones(4, 2)).square().mean()
        loss.backward()
        return loss

    passes = []
    for _ in range(7):
        optimizer.step(closure)
        passes.append(optimizer.info.num_backwards)
    full = 4 if method == "tsam" else 2
    assert passes == [full, 1, 1, full, 1, 1, full]


def test_every_needs_a_class(monkeypatch):
    monkeypatch.setitem(tiltsam.METHODS, "made", lambda base, **options: tiltsam.SAM(base, **options))
    base = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    assert isinstance(TrainConfig(method="made").wrap(base, seed=1), tiltsam.SAM)
    with pytest.raises(ConfigError, match="every"):
        TrainConfig(method="made", every=2).wrap(base, seed=1)


def test_keys_ignore_other_methods_settings():
    assert replace(SMALL, method="sam", t=1.0).key() == replace(SMALL, method="sam", t=2.0).key()
    assert replace(SMALL, method="tsam", t=1.0).key() != replace(SMALL, method="tsam", t=2.0).key()
    assert replace(SMALL, seed=1).key() == replace(SMALL, seed=2).key()
    with pytest.raises(ConfigError, match="unknown method"):
        replace(SMALL, method="lookahead")
