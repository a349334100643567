"""Schedules of the tilt and of rho, and several ascents to a sample of TSAM."""

import dataclasses

import pytest
import torch

import tiltsam
from tiltsam.lab.config import _SAYS_NOTHING, ConfigError, TrainConfig
from tiltsam.lab.flags import parse_method
from tiltsam.lab.record import Record
from tiltsam.lab.train import train


def watch(monkeypatch, method, name):
    """A list that gets a setting's value at every step."""
    seen = []
    aggregate = method.aggregate

    def watched(self, step):
        seen.append(self.param_groups[0][name])
        return aggregate(self, step)

    monkeypatch.setattr(method, "aggregate", watched)
    return seen


@pytest.mark.parametrize("way", ["constant", "up", "down"])
def test_a_schedule_of_the_tilt(way, tmp_path, monkeypatch):
    seen = watch(monkeypatch, tiltsam.TSAM, "t")
    config = TrainConfig("digits", "tsam", epochs=2, t=8.0, num_samples=1, t_schedule=way, batch_size=200, device="cpu")
    train(config, Record.of(tmp_path, config))
    steps = len(seen)
    assert steps == 10
    expected = {"constant": [8.0] * steps, "up": [8 * k / steps for k in range(steps)]}
    expected["down"] = [8 * (1 - k / steps) for k in range(steps)]
    assert seen == pytest.approx(expected[way])


@pytest.mark.parametrize("way", ["constant", "up", "down"])
@pytest.mark.parametrize("given", [0.4, None])
def test_a_schedule_of_rho(way, given, tmp_path, monkeypatch):
    seen = watch(monkeypatch, tiltsam.SAM, "rho")
    config = TrainConfig("digits", "sam", epochs=2, rho=given, rho_schedule=way, batch_size=200, device="cpu")
    train(config, Record.of(tmp_path, config), until=0.5)
    train(config, Record.of(tmp_path, config))  # goes on where it paused, not from a rho already on its way
    rho, steps = given or 0.05, len(seen)
    assert steps == 10
    shares = {"constant": [1.0] * steps, "up": [k / steps for k in range(steps)]}
    shares["down"] = [1 - k / steps for k in range(steps)]
    assert seen == pytest.approx([rho * share for share in shares[way]])


def test_later_fields_leave_the_names_of_runs_alone():
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


def test_another_default_radius_makes_another_run():
    config = TrainConfig("digits", "tsam", num_samples=3)
    assert config.key() != "tsam-3cb7600238"  # the same when no radius meant 0.006 √d
    assert dataclasses.replace(config, radius=2.0).key() == "tsam-707545efcd"


def test_fields_missing_in_old_configs_have_the_default_they_had():
    """A config.json holds all fields of its version; the fields added later are read as their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    assert {name: defaults[name] for name in _SAYS_NOTHING} == _SAYS_NOTHING


def test_lab_has_the_defaults_of_the_library():
    weight = torch.nn.Parameter(torch.ones(2))
    (group,) = tiltsam.TSAM(torch.optim.SGD([weight], lr=0.1)).param_groups
    own = ("t", "radius", "num_samples", "delta")
    assert {name: getattr(TrainConfig(), name) for name in own} == {name: group[name] for name in own}


def test_several_ascents_to_a_sample():
    """N ascents of ρ/N, each along the gradient where it begins: followed by hand on a quadratic."""
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    scale = torch.tensor([1.0, 3.0], dtype=torch.float64)

    def closure():
        loss = (scale * weight.square()).sum() / 2
        loss.backward()
        return loss

    sampler = tiltsam.samplers.Ascent(num_steps=3)
    base = torch.optim.SGD([weight], lr=1.0)
    point = weight.detach().clone()
    for _ in range(3):
        gradient = scale * point
        point = point + 0.2 / 3 * gradient / gradient.norm()
    expected = weight.detach() - scale * point
    optimizer = tiltsam.TSAM(base, rho=0.2, radius=0.0, num_samples=1, sampler=sampler)
    optimizer.step(closure)
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-12)
    assert optimizer.info.num_backwards == 4
    assert 0.19 < float(optimizer.info.perturbation_norms[0]) <= 0.2
    with pytest.raises(ValueError, match="shared"):
        tiltsam.TSAM(base, sampler=sampler, share_ascent=True)
    with pytest.raises(ValueError, match="num_steps"):
        tiltsam.samplers.Ascent(num_steps=0)


def test_a_radius_that_is_none_is_the_default_for_one_method_too():
    assert parse_method("tsam:radius=none,t=5") == {"method": "tsam", "radius": None, "t": 5.0}
