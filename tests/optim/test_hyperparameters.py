"""Settings in the parameter groups: schedules, rho per group, names that the base uses, checkpoints."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import tiltsam
from helpers.cases import METHODS, Problem, backward, sgd
from tiltsam.schedules import linear_up

every_method = pytest.mark.parametrize("method", METHODS, ids=repr)


def test_settings_are_entries_of_param_groups():
    problem = Problem()
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), t=3.0, rho=0.2, radius=0.1, num_samples=2, delta=1.0)
    group = optimizer.param_groups[0]
    assert {k: group[k] for k in ("t", "rho", "radius", "num_samples", "delta")} == {
        "t": 3.0, "rho": 0.2, "radius": 0.1, "num_samples": 2, "delta": 1.0,
    }  # fmt: skip
    group["num_samples"] = 4
    group["rho"] = 0.0
    optimizer.step(problem.closure)
    assert optimizer.info.num_backwards == 4
    group["t"] = -1.0
    with pytest.raises(ValueError, match=r"t .*-1.0"):
        optimizer.step(problem.closure)


def test_numpy_settings_are_saved_as_python_numbers():
    problem = Problem()
    rho, num_samples = np.linspace(0.1, 0.2, 2, dtype=np.float32), np.arange(1, 3)
    optimizer = tiltsam.TSAM(
        sgd(problem.model.parameters()), t=lambda k: np.exp(-k), rho=rho[0], num_samples=num_samples[1]
    )
    optimizer.step(problem.closure)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    group = torch.load(file, weights_only=True)["param_groups"][0]
    assert (group["t"], group["rho"], group["num_samples"]) == (1.0, float(rho[0]), 2)
    optimizer.param_groups[0].update(rho=rho[1], num_samples=num_samples[0])
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "rho": rho[0]})
    optimizer.step(problem.closure)
    first, second = optimizer.param_groups
    assert [type(value) for value in (first["rho"], second["rho"], first["num_samples"])] == [float, float, int]
    assert (first["rho"], second["rho"], first["num_samples"]) == (float(rho[1]), float(rho[0]), 1)


@pytest.mark.filterwarnings("ignore:the checkpoint has no")  # that of the base
@every_method
def test_group_added_to_the_base_gets_settings(method):
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)

    def fresh():
        optimizer = method(sgd(first.parameters()))
        optimizer.step(lambda: backward(first(torch.ones(3, 2)).square().mean()))
        optimizer.base.add_param_group({"params": second.parameters()})
        return optimizer

    assert "seed=0" in repr(fresh())
    whole, partial = fresh().state_dict(), fresh().base.state_dict()
    assert whole["param_groups"][1].keys() == whole["param_groups"][0].keys()
    assert {k for k, v in whole["param_groups"][1].items() if v != whole["param_groups"][0][k]} == {"params"}
    assert "seed" not in partial["param_groups"][1]
    for state in (whole, partial):
        optimizer = fresh()
        optimizer.param_groups[0]["steps_taken"] = 7
        optimizer.load_state_dict(state)
        assert [g["steps_taken"] for g in optimizer.param_groups] == [1, 1]
        optimizer.step(lambda: backward(second(first(torch.ones(3, 2))).square().mean()))


@pytest.mark.parametrize("bad", [{"rho": -1.0}, {"t": 3.0}], ids=str)
def test_add_param_group_refuses_bad_settings(bad):
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = tiltsam.TSAM(sgd(first.parameters()), num_samples=3, t=1.0)
    with pytest.raises(ValueError, match=r"rho .*-1.0|t .*1.0 .*3.0"):
        optimizer.add_param_group({"params": second.parameters(), **bad})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": second.parameters()})
    optimizer.step(lambda: backward(second(first(torch.ones(3, 2))).square().mean()))


@every_method
@pytest.mark.parametrize("where", [0, 1])
def test_steps_taken_of_a_group_removed_for_a_while(method, where):
    problem = Problem()
    params = [p for p in problem.model.parameters() if p.requires_grad]
    optimizer = method(sgd([{"params": params[:2]}, {"params": params[2:]}]))
    optimizer.step(problem.closure)
    group = optimizer.param_groups.pop(0)
    optimizer.step(problem.closure)
    optimizer.param_groups.insert(where, group)
    optimizer.step(problem.closure)
    assert [group["steps_taken"] for group in optimizer.param_groups] == [3, 3]


def _watched(theta):
    """Return a list of the values of ``theta`` at each pass, and the closure that records them."""
    seen = []

    def closure():
        seen.append([t.item() for t in theta])
        return backward(sum(t.square().sum() for t in theta))

    return seen, closure


@pytest.mark.parametrize(
    ("rho", "moved"),
    [
        (0.2, [0.2 / 2**0.5, 0.5 / 2**0.5]),  # the direction is the global one: each coordinate of n(g) is 1/√2
        (0.0, [0.0, 0.5]),  # without perturbation the group does not count in the norm
    ],
)
def test_rho_per_group(rho, moved):
    theta = [nn.Parameter(torch.tensor([3.0], dtype=torch.float64)) for _ in range(2)]
    base = sgd([{"params": [theta[0]], "rho": rho}, {"params": [theta[1]]}], lr=0.0)
    optimizer = tiltsam.SAM(base, rho=0.5)
    seen, closure = _watched(theta)
    optimizer.step(closure)
    assert seen[1] == pytest.approx([3.0 + move for move in moved])


def test_rho_follows_a_parameter_to_another_group():
    theta = [nn.Parameter(torch.tensor([3.0], dtype=torch.float64)) for _ in range(3)]
    base = sgd([{"params": theta[:2]}, {"params": theta[2:], "rho": 0.0}], lr=0.0)
    optimizer = tiltsam.SAM(base, rho=0.5)
    seen, closure = _watched(theta)
    for _ in range(2):
        optimizer.step(closure)
    base.param_groups[1]["params"].insert(0, base.param_groups[0]["params"].pop())  # the order stays
    for _ in range(2):
        optimizer.step(closure)
    moved = [[abs(x - 3.0) > 0.1 for x in at] for at in seen[1::2]]
    assert moved == [[True, True, False]] * 2 + [[True, False, False]] * 2


def _rising(k):
    return float(k)


def test_schedule_keeps_rho_of_groups_that_brought_one():
    """Also for groups added later, and after a resume, a copy or a pickle."""

    def fresh(own=0.0):
        theta = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        base = sgd([{"params": theta[:1], "rho": own}, {"params": theta[1:]}])
        return tiltsam.SAM(base, rho=_rising)

    def steps(optimizer):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.step(lambda: backward(sum(p.square().sum() for p in params)))
        return [group["rho"] for group in optimizer.param_groups]

    optimizer = fresh()
    assert steps(optimizer) == [0.0, 0.0]
    assert steps(optimizer) == [0.0, 1.0]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "rho": 2.0})
    optimizer.base.add_param_group({"params": [nn.Parameter(torch.ones(2))], "rho": 2.0})  # the schedule's next value
    optimizer.base.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert steps(optimizer) == [0.0, 2.0, 2.0, 2.0, 2.0]
    assert steps(optimizer) == [0.0, 3.0, 2.0, 2.0, 3.0]
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert steps(other) == [0.0, 4.0, 2.0, 2.0, 4.0]

    optimizer = fresh()
    steps(optimizer)
    resumed = fresh(own=5.0)
    resumed.load_state_dict(optimizer.state_dict())
    assert steps(resumed) == [0.0, 1.0]
    resumed = fresh()
    resumed.base.load_state_dict(optimizer.state_dict())
    assert steps(resumed) == [0.0, 1.0]
    resumed = fresh()
    resumed.load_state_dict(sgd([{"params": g["params"]} for g in resumed.param_groups]).state_dict())
    assert [steps(resumed), steps(resumed)] == [[0.0, 0.0], [0.0, 1.0]]


def test_schedules_follow_steps_taken_and_resume():
    problem = Problem()
    optimizer = tiltsam.TSAM(
        sgd(problem.model.parameters()), num_samples=3, t=linear_up(10.0, 5), rho=lambda k: 0.01 * k
    )
    seen = []
    for _ in range(3):
        optimizer.step(problem.closure)
        seen.append((optimizer.param_groups[0]["t"], optimizer.param_groups[0]["rho"]))
    assert seen == [(0.0, 0.0), (2.0, 0.01), (4.0, 0.02)]
    other = Problem()
    again = tiltsam.TSAM(sgd(other.model.parameters()), num_samples=3, t=linear_up(10.0, 5), rho=lambda k: 0.01 * k)
    again.load_state_dict(optimizer.state_dict())
    again.step(other.closure)
    assert (again.param_groups[0]["t"], again.param_groups[0]["rho"]) == (6.0, 0.03)


def test_step_refuses_different_t_per_group():
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = tiltsam.TSAM(sgd([{"params": a.parameters()}, {"params": b.parameters()}]), num_samples=3, t=1.0)
    optimizer.param_groups[1]["t"] = 2.0
    with pytest.raises(ValueError, match=r"t .*1.0 and 2.0"):
        optimizer.step(lambda: backward(b(a(torch.ones(1, 2))).sum()))


@pytest.mark.parametrize("which", [0, 1])
def test_init_refuses_different_t_per_group(which):
    groups = [{"params": nn.Linear(2, 2).parameters()} for _ in range(2)]
    groups[which]["t"] = 1.0
    with pytest.raises(ValueError, match=r"t .*(1.0 and 20.0|20.0 and 1.0)"):
        tiltsam.TSAM(sgd(groups), num_samples=3, t=20.0)


def test_wrapping_a_base_again_replaces_settings():
    """As when a notebook cell runs again. The step count stays."""
    problem = Problem()
    base = sgd(problem.model.parameters())
    optimizer = tiltsam.SAM(base, rho=0.05, seed=1)
    optimizer.step(problem.closure)
    loaded = sgd(problem.model.parameters())
    loaded.load_state_dict(optimizer.state_dict())
    for wrapped in (base, torch.optim.SGD(base.param_groups), loaded):
        group = tiltsam.SAM(wrapped, rho=0.5, seed=7).param_groups[0]
        assert (group["rho"], group["seed"], group["steps_taken"]) == (0.5, 7, 1)
    group = tiltsam.TSAM(base, rho=0.1, t=3.0).param_groups[0]
    assert (group["rho"], group["t"], group["seed"], group["steps_taken"]) == (0.1, 3.0, 0, 1)


def test_wrapping_a_base_again_keeps_rho_that_groups_brought():
    groups = [{"params": nn.Linear(2, 2).parameters(), "rho": 0.3, "seed": 4}, {"params": nn.Linear(2, 2).parameters()}]
    base = sgd(groups)
    base.param_groups[1]["seed"] = 4
    for rho in (0.05, 0.07):
        tiltsam.SAM(base, rho=rho, seed=4)
        assert [group["rho"] for group in base.param_groups] == [0.3, rho]
    tiltsam.ERM(base)
    tiltsam.SAM(base, rho=0.09)
    assert [group["rho"] for group in base.param_groups] == [0.3, 0.09]


def test_checkpoint_of_another_method_loads_rho_seed_and_steps():
    """RSAM's gamma is not WSAM's. A checkpoint that names no method loads all settings."""
    problem = Problem()
    rsam = tiltsam.RSAM(sgd(problem.model.parameters(), lr=0.2), rho=0.3, gamma=0.6, seed=3)
    rsam.step(problem.closure)
    saved = rsam.state_dict()
    wsam = tiltsam.WSAM(sgd(problem.model.parameters()), rho=0.05, gamma=0.9)
    with pytest.warns(RuntimeWarning, match="RSAM.*WSAM"):
        wsam.load_state_dict(saved)
    group = wsam.param_groups[0]
    assert {name: group[name] for name in ("lr", "rho", "gamma", "seed", "steps_taken")} == {
        "lr": 0.2, "rho": 0.3, "gamma": 0.9, "seed": 3, "steps_taken": 1,
    }  # fmt: skip
    assert "RSAM" not in group.values()
    del saved["param_groups"][0]["tilt_method"]
    wsam.load_state_dict(saved)  # warnings are errors
    assert wsam.param_groups[0]["gamma"] == 0.6


def test_settings_named_like_those_of_the_base():
    """Adadelta has a rho, RMSprop an alpha; ours must not overwrite them."""
    problem = Problem()
    base = torch.optim.Adadelta(problem.model.parameters(), rho=0.9)
    optimizer = tiltsam.SAM(base, rho=0.05)
    assert base.param_groups[0]["rho"] == 0.9
    assert base.param_groups[0]["tilt_rho"] == 0.05
    optimizer.step(problem.closure)
    assert optimizer.info.perturbation_norms.item() == pytest.approx(0.05)
    base = torch.optim.RMSprop(problem.model.parameters(), alpha=0.99)
    optimizer = tiltsam.PGN(base, rho=0.05, alpha=0.3)
    optimizer.step(problem.closure)
    assert base.param_groups[0]["alpha"] == 0.99
    assert optimizer.info.weights.tolist() == pytest.approx([0.7, 0.3])


@every_method
def test_repr_omits_internal_entries_and_keeps_them_in_param_groups(method):
    problem = Problem(nn.Linear(6, 3))
    optimizer = method(sgd([problem.model.weight]))
    optimizer.base.add_param_group({"params": [problem.model.bias], "lr": np.float64(0.5)})
    before = [dict(group) for group in optimizer.param_groups]
    text = repr(optimizer)
    assert text.startswith(type(optimizer).__name__)
    assert "weight_decay: " in text
    assert "own_rho" not in text
    assert "steps_taken" not in text
    assert "tilt_method" not in text
    assert [dict(group) for group in optimizer.param_groups] == before
