import dataclasses

import pytest
import torch

import tiltsam
from tiltsam.lab.config import _LATER_DEFAULTS, TrainConfig
from tiltsam.lab.errors import ConfigError


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
