"""The contract that every method keeps with torch: one table of tests, run for all of them."""

import copy
import inspect
import io
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import tiltsam
from helpers import friendly
from helpers.cases import BAD_ARGUMENTS, METHODS, Problem, assert_same, quadratic_problem, sgd
from tiltsam.fused import FusedLedger
from tiltsam.info import row_of, with_numbers
from tiltsam.integrations.gathering import gather
from tiltsam.tilting import linear_up

every_method = pytest.mark.parametrize("method", METHODS, ids=repr)


def train(problem, optimizer, steps, scheduler=None):
    for _ in range(steps):
        optimizer.step(problem.closure)
        if scheduler is not None:
            scheduler.step()


@every_method
def test_a_step_returns_a_detached_finite_loss_and_fills_info(method):
    problem = Problem()
    optimizer = method(sgd(problem.model.parameters()), model=problem.model)
    loss = optimizer.step(problem.closure)
    info = optimizer.info
    samples = len(info.losses)
    assert loss.shape == ()
    assert not loss.requires_grad
    assert loss.isfinite()
    assert torch.equal(loss, info.loss)
    for value in (info.weights, info.start_losses, info.perturbation_norms, info.gradient_norms):
        assert value.shape == (samples,)
        assert value.isfinite().all()
    torch.testing.assert_close(info.weights.sum(), torch.ones((), dtype=torch.float64))
    assert 1 - 1e-9 <= info.effective_sample_size <= samples + 1e-9
    assert info.num_nonfinite == 0
    assert (info.num_forwards, info.num_backwards) == (method.forwards, method.backwards)


@every_method
def test_cost_in_passes_is_what_the_closure_sees(method):
    problem, calls = Problem(), [0]
    problem.model.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    optimizer = method(sgd(problem.model.parameters()))
    optimizer.step(problem.closure)
    assert calls[0] == method.forwards


@every_method
def test_training_lowers_the_loss(method):
    problem = Problem(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)))
    before = problem.loss().item()
    train(problem, method(sgd(problem.model.parameters())), 60)
    assert problem.loss().item() < 0.7 * before


@every_method
def test_resumed_is_bitwise_unbroken(method):
    """Through a file, with a scheduler, momentum, dropout and BatchNorm, into fresh objects."""

    def fresh():
        problem = Problem()
        optimizer = method(sgd(problem.model.parameters()), model=problem.model, seed=9)
        return problem, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)

    unbroken, optimizer, scheduler = fresh()
    train(unbroken, optimizer, 5, scheduler)
    file = io.BytesIO()
    torch.save(
        {
            "model": unbroken.model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "rng": torch.get_rng_state(),
        },
        file,
    )
    train(unbroken, optimizer, 5, scheduler)

    resumed, optimizer, scheduler = fresh()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed.model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    torch.set_rng_state(saved["rng"])
    train(resumed, optimizer, 5, scheduler)
    assert_same(unbroken.weights(), resumed.weights())


@every_method
def test_the_noise_is_the_seeds_alone(method):
    """Other random numbers drawn in between change nothing; another seed does."""
    runs = []
    for seed, disturb in ((1, False), (1, True), (2, False)):
        problem = Problem(dropout=0.0)
        optimizer = method(sgd(problem.model.parameters()), seed=seed)
        for _ in range(3):
            if disturb:
                torch.randn(7)
            optimizer.step(problem.closure)
        runs.append(problem.weights())
    assert_same(runs[0], runs[1])
    if method.name.startswith(("tsam", "rsam")):
        assert any(not torch.equal(runs[0][k], runs[2][k]) for k in runs[0])


def test_every_step_and_every_sample_draws_other_noise():
    theta = nn.Parameter(torch.zeros(50, dtype=torch.float64))
    seen = []

    def closure():
        seen.append(theta.detach().clone())
        return _backward((theta * 0).sum())

    optimizer = tiltsam.TSAM(sgd([theta], lr=0.0), rho=0.0, radius=1.0, num_samples=3)
    for _ in range(3):
        optimizer.step(closure)
    cosines = torch.corrcoef(torch.stack(seen)).triu(1)
    assert len(seen) == 9
    assert cosines.abs().max() < 0.6


def _backward(loss):
    loss.backward()
    return loss


class NoSync(TorchDispatchMode):
    """Raises when a value is read back to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            raise AssertionError(f"{func} reads a value back to the host")
        return func(*args, **(kwargs or {}))


@every_method
def test_no_host_synchronisation_in_a_step(method):
    problem = Problem()
    optimizer = method(sgd(problem.model.parameters()), model=problem.model)
    optimizer.step(problem.closure)
    with NoSync():
        optimizer.step(problem.closure)
        with pytest.raises(AssertionError, match="reads a value"):  # the mode works: reading info is what waits
            _ = optimizer.info


@every_method
def test_buffers_stay_in_place_from_step_to_step(method):
    problem = Problem()
    optimizer = method(sgd(problem.model.parameters()), model=problem.model)
    addresses = []
    for _ in range(3):
        optimizer.step(problem.closure)
        space = optimizer._space
        addresses.append(
            [p.grad.data_ptr() for p in space.params if p.grad is not None] + [c.data_ptr() for c in space.center]
        )
    assert addresses[0] == addresses[1] == addresses[2]


@every_method
def test_schedulers_hooks_and_isinstance(method):
    problem = Problem()
    base = sgd(problem.model.parameters(), lr=1.0)
    optimizer = method(base)
    assert isinstance(optimizer, torch.optim.Optimizer)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    base.register_step_pre_hook(lambda *_: calls.append("base"))
    on_wrapper = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step(problem.closure)
    on_wrapper.step()  # a warning would be an error here
    assert calls == ["pre", "base", "post"]
    assert optimizer.param_groups is base.param_groups
    assert optimizer.state is base.state
    assert base.param_groups[0]["lr"] == 0.5
    on_base = torch.optim.lr_scheduler.LambdaLR(base, lambda k: 0.1)
    optimizer.step(problem.closure)
    on_base.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_global_hooks_are_told_whose_step_it_is():
    problem, seen = Problem(), []
    optimizer = tiltsam.SAM(sgd(problem.model.parameters()))
    hooks = [
        register(lambda whose, *_: seen.append(type(whose).__name__))
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    ]
    try:
        optimizer.step(problem.closure)
    finally:
        for hook in hooks:
            hook.remove()
    assert seen == ["SAM", "SGD", "SGD", "SAM"]


@every_method
def test_one_cycle_and_clipping_through_a_hook(method):
    problem = Problem()
    base = sgd(problem.model.parameters())
    optimizer = method(base)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5)
    norms = []
    base.register_step_pre_hook(lambda *_: norms.append(nn.utils.clip_grad_norm_(problem.model.parameters(), 1e-3)))
    for _ in range(3):
        optimizer.step(problem.closure)
        scheduler.step()
    total = nn.utils.get_total_norm([p.grad for p in problem.model.parameters() if p.grad is not None])
    assert total == pytest.approx(1e-3, rel=1e-3)
    assert len(norms) == 3


@every_method
def test_add_param_group_and_groups_added_behind_our_back(method):
    first, second, third = (nn.Linear(2, 2) for _ in range(3))
    optimizer = method(sgd(first.parameters()))
    optimizer.add_param_group({"params": second.parameters(), "lr": 0.5})
    optimizer.base.add_param_group({"params": third.parameters()})
    before = [p.detach().clone() for m in (first, second, third) for p in m.parameters()]
    x = torch.randn(4, 2)
    optimizer.step(lambda: _backward(third(second(first(x))).square().mean()))
    after = [p for m in (first, second, third) for p in m.parameters()]
    assert len(optimizer.param_groups) == 3
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.filterwarnings("ignore:the checkpoint holds no mean")  # one of the base, which does not know of it
@every_method
def test_a_group_added_to_the_base_is_filled_before_anyone_looks(method):
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)

    def fresh():
        optimizer = method(sgd(first.parameters()))
        optimizer.step(lambda: _backward(first(torch.ones(3, 2)).square().mean()))
        optimizer.base.add_param_group({"params": second.parameters()})
        return optimizer

    assert "every=1" in repr(fresh())
    whole, partial = fresh().state_dict(), fresh().base.state_dict()
    assert whole["param_groups"][1].keys() == whole["param_groups"][0].keys()
    assert {k for k, v in whole["param_groups"][1].items() if v != whole["param_groups"][0][k]} == {"params"}
    assert "every" not in partial["param_groups"][1]  # the base does not ask us before it gives out its groups
    for state in (whole, partial):
        optimizer = fresh()
        optimizer.param_groups[0]["steps_taken"] = 7
        optimizer.load_state_dict(state)
        assert [g["steps_taken"] for g in optimizer.param_groups] == [1, 1]
        optimizer.step(lambda: _backward(second(first(torch.ones(3, 2))).square().mean()))


@pytest.mark.parametrize("bad", [{"rho": -1.0}, {"t": 3.0}], ids=str)
def test_a_group_with_a_bad_setting_is_not_added(bad):
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = tiltsam.TSAM(sgd(first.parameters()), num_samples=3, t=1.0)
    with pytest.raises(ValueError, match=r"rho must be .*>= 0, got -1.0|t is one number for the whole step"):
        optimizer.add_param_group({"params": second.parameters(), **bad})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": second.parameters()})
    optimizer.step(lambda: _backward(second(first(torch.ones(3, 2))).square().mean()))


@every_method
@pytest.mark.parametrize("where", [0, 1])
def test_a_group_that_was_taken_out_for_a_while_counts_the_steps_of_the_others(method, where):
    problem = Problem()
    params = [p for p in problem.model.parameters() if p.requires_grad]
    optimizer = method(sgd([{"params": params[:2]}, {"params": params[2:]}]))
    optimizer.step(problem.closure)
    group = optimizer.param_groups.pop(0)
    optimizer.step(problem.closure)
    optimizer.param_groups.insert(where, group)
    optimizer.step(problem.closure)
    assert [group["steps_taken"] for group in optimizer.param_groups] == [3, 3]


def test_groups_may_be_empty():
    problem = Problem()
    optimizer = tiltsam.SAM(sgd(problem.model.parameters()))
    optimizer.step(problem.closure)
    optimizer.add_param_group({"params": []})
    assert optimizer.step(problem.closure).isfinite()


@every_method
def test_a_layer_frozen_while_training_stays_where_it_is(method):
    problem = Problem()
    optimizer = method(sgd(problem.model.parameters()), model=problem.model)
    optimizer.step(problem.closure)
    layer = problem.model.first.requires_grad_(False)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    train(problem, optimizer, 3)
    assert_same(before, layer.state_dict())
    assert all(p.grad is None for p in layer.parameters())
    layer.requires_grad_(True)
    train(problem, optimizer, 1)
    assert not torch.equal(before["weight"], layer.weight)


@every_method
def test_step_without_closure_shows_what_to_write(method):
    optimizer = method(sgd(Problem().model.parameters()))
    with pytest.raises(
        TypeError, match=r"(?s)needs a closure.*def closure\(\):.*optimizer.step\(closure\).*micro-batches"
    ):
        optimizer.step()


def test_a_step_that_changes_nothing_makes_the_bases_state():
    """So torch.distributed.checkpoint calls it before it loads."""
    problem = Problem()
    optimizer = tiltsam.SAM(torch.optim.AdamW(problem.model.parameters(), lr=0.1))
    params = [p for p in problem.model.parameters() if p.requires_grad]
    before = {name: value.clone() for name, value in problem.model.state_dict().items()}
    for lr, gradient in ((0.1, 0.0), (0.0, 1.0)):
        optimizer.param_groups[0]["lr"] = lr
        for p in params:
            p.grad = torch.full_like(p, gradient)
        with pytest.raises(TypeError, match="needs a closure"):
            optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert optimizer.step().isnan()  # no loss was evaluated
    assert_same(before, problem.model.state_dict())
    assert len(optimizer.state) == len(params)
    assert optimizer.param_groups[0]["steps_taken"] == 0


@every_method
def test_closures_may_clear_gradients(method):
    a, b = Problem(dropout=0.0), Problem(dropout=0.0)
    one, two = method(sgd(a.model.parameters()), model=a.model), method(sgd(b.model.parameters()), model=b.model)

    def clearing(set_to_none):
        def closure():
            two.zero_grad(set_to_none)
            return b.closure()

        return closure

    for k in range(4):
        one.step(a.closure)
        two.step(clearing(set_to_none=k % 2 == 0))
    assert_same(a.weights(), b.weights())


@every_method
def test_copies_and_pickles(method):
    problem = Problem()
    optimizer = method(sgd(problem.model.parameters()), model=problem.model)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # patches optimizer.step
    calls = []
    for hooked in (optimizer, optimizer.base):  # torch leaves hooks out of copies: few could be pickled
        hooked.register_step_pre_hook(lambda *_: calls.append("before"))
        hooked.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    optimizer.step(problem.closure)
    calls.clear()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(other) is type(optimizer)
        assert other.param_groups is other.base.param_groups
        assert other.param_groups[0]["steps_taken"] == 1
        p, q = (next(p for p in o.param_groups[0]["params"] if p.requires_grad) for o in (other, optimizer))
        assert p is not q
        assert torch.equal(p, q)
        other.step(lambda p=p: _backward(p.square().sum()))
        other.state_dict()
        assert not calls
    assert type(optimizer).__name__ in repr(optimizer)


@every_method
def test_state_dict_hooks_and_bare_checkpoints(method):
    problem = Problem()
    optimizer = method(sgd(problem.model.parameters()))
    optimizer.step(problem.closure)
    seen = []
    optimizer.register_state_dict_post_hook(lambda _, state: seen.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append("loading"))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["saved", "loading", "loaded"]
    bare = sgd(Problem().model.parameters(), lr=0.123)
    optimizer.load_state_dict(bare.state_dict())  # a run that began without us goes on with us
    assert optimizer.param_groups[0]["lr"] == 0.123
    assert optimizer.param_groups[0]["steps_taken"] == 1
    optimizer.step(problem.closure)


def test_settings_live_in_the_groups():
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
    with pytest.raises(ValueError, match=r"t must be .*>= 0, got -1.0"):
        optimizer.step(problem.closure)


def test_settings_from_numpy_are_plain_numbers_that_any_checkpoint_may_hold():
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


def test_settings_from_numpy_may_be_written_into_the_groups():
    problem = Problem()
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), num_samples=3)
    edited = {"rho": np.float32(0.5), "t": np.float64(3.0), "num_samples": np.int64(2)}
    optimizer.param_groups[0].update(edited)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    group = torch.load(file, weights_only=True)["param_groups"][0]
    assert {name: group[name] for name in edited} == edited
    optimizer.param_groups[0].update(edited)
    optimizer.step(problem.closure)
    assert optimizer.info.num_backwards == 4


def _watched(theta):
    """Where each pass finds the parameters, and the closure that notes it."""
    seen = []

    def closure():
        seen.append([t.item() for t in theta])
        return _backward(sum(t.square().sum() for t in theta))

    return seen, closure


def test_rho_per_group():
    theta = [nn.Parameter(torch.tensor([3.0], dtype=torch.float64)) for _ in range(2)]
    base = sgd([{"params": [theta[0]], "rho": 0.0}, {"params": [theta[1]]}], lr=0.0)
    optimizer = tiltsam.SAM(base, rho=0.5)
    seen, closure = _watched(theta)
    optimizer.step(closure)
    # The direction is the global one: each coordinate of n(g) is 1/√2.
    assert seen[1] == pytest.approx([3.0, 3.0 + 0.5 / 2**0.5])


def test_a_parameter_that_changes_groups_gets_the_rho_of_its_new_one():
    theta = [nn.Parameter(torch.tensor([3.0], dtype=torch.float64)) for _ in range(3)]
    base = sgd([{"params": theta[:2]}, {"params": theta[2:], "rho": 0.0}], lr=0.0)
    optimizer = tiltsam.SAM(base, rho=0.5)
    seen, closure = _watched(theta)
    optimizer.step(closure)
    base.param_groups[1]["params"].insert(0, base.param_groups[0]["params"].pop())
    optimizer.step(closure)
    assert [abs(x - 3.0) > 0.1 for x in seen[1]] == [True, True, False]
    assert [abs(x - 3.0) > 0.1 for x in seen[3]] == [True, False, False]


def test_a_schedule_leaves_a_groups_own_rho_alone():
    """Whoever brings the group and whenever, and after a resume, a copy or a pickle of the optimizer."""

    def fresh(own=0.0):
        theta = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        base = sgd([{"params": theta[:1], "rho": own}, {"params": theta[1:]}])
        return tiltsam.SAM(base, rho=_rising)

    def steps(optimizer):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.step(lambda: _backward(sum(p.square().sum() for p in params)))
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
    wrapped = tiltsam.SAM(resumed.base, rho=lambda k: 10.0 + k)  # the base brings what it was given before
    assert steps(wrapped) == [0.0, 12.0]
    resumed = fresh()
    resumed.load_state_dict(sgd([{"params": g["params"]} for g in resumed.param_groups]).state_dict())
    assert [steps(resumed), steps(resumed)] == [[0.0, 0.0], [0.0, 1.0]]


def test_a_base_that_is_wrapped_again_takes_the_new_settings():
    theta = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    base = sgd([{"params": theta[:1], "rho": 0.3}, {"params": theta[1:]}])
    tiltsam.TSAM(base, num_samples=3, t=20.0, rho=0.1, seed=5).step(
        lambda: _backward(sum(p.square().sum() for p in theta))
    )
    optimizer = tiltsam.TSAM(base, num_samples=3, t=3.0, rho=0.2)
    assert [(group["t"], group["rho"], group["seed"]) for group in base.param_groups] == [(3.0, 0.3, 0), (3.0, 0.2, 0)]
    assert optimizer.param_groups[0]["steps_taken"] == 1  # the noise goes on, it does not begin again
    tiltsam.ERM(base)
    tiltsam.SAM(base, rho=0.4)
    assert [group["rho"] for group in base.param_groups] == [0.3, 0.4]


def _rising(k):
    return float(k)


def test_a_tilt_without_samples_to_weigh_is_told():
    params = list(nn.Linear(2, 2).parameters())
    with pytest.warns(UserWarning, match="say num_samples=3, or leave t out") as caught:
        tiltsam.TSAM(sgd(params), t=20.0)
    assert caught[0].filename == __file__
    tiltsam.TSAM(sgd(params), t=5.0, num_samples=1)  # warnings are errors here
    tiltsam.TSAM(sgd(params), t=5.0, sampler="hmc")  # draws by it
    (group, *_) = tiltsam.TSAM(sgd(params)).param_groups
    assert (group["t"], group["num_samples"]) == (20.0, 1)


def test_one_t_for_the_whole_step():
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = tiltsam.TSAM(sgd([{"params": a.parameters()}, {"params": b.parameters()}]), num_samples=3, t=1.0)
    optimizer.param_groups[1]["t"] = 2.0
    with pytest.raises(ValueError, match=r"t is one number for the whole step.*1.0 and 2.0"):
        optimizer.step(lambda: _backward(b(a(torch.ones(1, 2))).sum()))


@pytest.mark.parametrize("which", [0, 1])
def test_a_t_of_one_group_is_not_that_of_the_others(which):
    groups = [{"params": nn.Linear(2, 2).parameters()} for _ in range(2)]
    groups[which]["t"] = 1.0
    with pytest.raises(ValueError, match=r"t is one number for the whole step, but .* have \d+.0 and \d+.0"):
        tiltsam.TSAM(sgd(groups), num_samples=3, t=20.0)


def test_schedules_follow_the_step_and_survive_a_resume():
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


def test_names_the_base_already_uses():
    """Adadelta has a rho and RMSprop an alpha of their own; ours must not overwrite them."""
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


@pytest.mark.parametrize(
    ("cls", "kwargs", "message"), [c[1:] for c in BAD_ARGUMENTS], ids=[c[0] for c in BAD_ARGUMENTS]
)
def test_bad_arguments_name_the_value_and_the_bound(cls, kwargs, message):
    with pytest.raises(ValueError, match=message):
        cls(sgd(Problem().model.parameters()), **kwargs)


def test_bad_bases_and_models():
    params = list(Problem().model.parameters())
    with pytest.raises(TypeError, match=r"wraps an instance, got the class SGD: write SAM\(SGD\(params"):
        tiltsam.SAM(torch.optim.SGD)
    with pytest.raises(TypeError, match=r"must be a torch.optim.Optimizer instance, got list"):
        tiltsam.SAM(params)
    with pytest.raises(TypeError, match="cannot wrap SAM, which is sharpness-aware itself"):
        tiltsam.TSAM(tiltsam.SAM(sgd(params)))
    with pytest.raises(TypeError, match="cannot wrap LBFGS"):
        tiltsam.SAM(torch.optim.LBFGS(params))
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got list"):
        tiltsam.SAM(sgd(params), model=params)
    with pytest.raises(TypeError, match=r"rho is a model \(Net\): write model="):
        tiltsam.SAM(sgd(params), Problem().model)
    with pytest.raises(TypeError, match="sampler must be a name or an instance"):
        tiltsam.TSAM(sgd(params), sampler=tiltsam.samplers.HMC)
    with pytest.raises(RuntimeError, match="no step was taken yet"):
        _ = tiltsam.SAM(sgd(params)).info


def test_a_base_that_maximizes_is_refused_by_all_that_look_around():
    """A worst neighbour is one of large loss: climbing that loss would seek the sharpest maximum there is."""
    theta, closure = quadratic_problem()
    with pytest.raises(ValueError, match=r"maximize=True.*negative of the objective"):
        tiltsam.SAM(sgd([theta], maximize=True))
    optimizer = tiltsam.TSAM(sgd([theta]))
    with pytest.raises(ValueError, match="maximize=True"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "maximize": True})
    optimizer.step(closure)
    before = theta.detach().norm()
    tiltsam.ERM(sgd([theta], maximize=True)).step(closure)  # as the base does
    assert theta.detach().norm() > before


@every_method
@pytest.mark.parametrize("more", [{}, {"lr": 0.1}, {"rho": 0.05, "adaptive": True, "lr": 0.1}])
def test_a_call_as_other_packages_want_it_shows_what_to_write(method, more):
    params, name = nn.Linear(2, 2).parameters(), method.cls.__name__
    right = rf"got generator: write {name}\(torch.optim.SGD\(model.parameters\(\), lr=0.1\), ...\)"
    with pytest.raises(TypeError, match=right):
        method.cls(params, torch.optim.SGD, **more)
    with pytest.raises(TypeError, match=right):
        method.cls(base=params, **more)


def test_a_method_of_ones_own_may_be_called_as_one_likes():
    class Mine(tiltsam.SAM):
        def __init__(self, params, base, **kwargs):
            super().__init__(base(params, **kwargs))

    optimizer = Mine(nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.5)
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(TypeError, match="got list: write Mine"):
        Mine([], list)


@every_method
def test_another_copy_of_the_model_is_noticed(method):
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.warns(RuntimeWarning, match="another copy"):
        method(sgd(one.parameters()), model=other)
    with warnings.catch_warnings(action="error"):
        method(sgd(one.parameters()), model=nn.Sequential(one, other))
        method(sgd(one.parameters()), model=other.requires_grad_(False))  # a frozen model, something before it trained


def test_bad_closures():
    problem = Problem()
    optimizer = tiltsam.SAM(sgd(problem.model.parameters()))
    for loss in (problem.closure(), [problem.closure()], 0.5):
        with pytest.raises(TypeError, match=r"SAM.step\(\) needs a closure"):
            optimizer.step(loss)
    with pytest.raises(RuntimeError, match="left no gradient on any trainable parameter"):
        optimizer.step(problem.loss)
    with pytest.raises(TypeError, match=r"ascent_closure must be a closure, got GradScaler: write scaler=scaler"):
        optimizer.step(problem.closure, torch.amp.GradScaler("cpu"))
    with pytest.raises(TypeError, match=r"ascent_closure must be a closure, got Tensor"):
        optimizer.step(problem.closure, problem.loss())
    with pytest.raises(RuntimeError, match=r"of the optimizer's own parameters, not of a copy \(fully_shard"):
        copy.deepcopy(optimizer).step(problem.closure)
    with pytest.raises(TypeError, match=r"must return the loss, .*got NoneType"):
        optimizer.step(lambda: problem.closure() and None)
    with pytest.raises(ValueError, match="must return one loss, got a tensor of shape"):
        optimizer.step(lambda: problem.closure().expand(2))


def test_the_methods_by_the_papers_names():
    assert list(tiltsam.METHODS) == ["erm", "sam", "asam", "esam2", "pgn", "rsam", "tsam"]
    for cls in tiltsam.METHODS.values():
        assert issubclass(cls, tiltsam.SharpnessAware)


def test_a_captured_step_cuts_what_has_a_row_for_each_example():
    """Numbers and class weights belong to all examples, and stay whole."""
    problem, seen = Problem(nn.Linear(6, 3)), []
    batch = problem.x, problem.y, torch.ones(3, dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64)

    def loss_fn(x, y, weights, smoothing):
        seen.append((len(x), len(y), len(weights), smoothing.dim()))
        return nn.functional.cross_entropy(problem.model(x), y, weights) * (1 - smoothing)

    step = tiltsam.capture(tiltsam.SAM(sgd(problem.model.parameters())), loss_fn, batch, ascent_fraction=0.3)
    step(*batch)
    assert seen == [(5, 5, 3, 0), (16, 16, 3, 0)]


def test_a_tilt_beyond_the_range_of_its_dtype_follows_the_worst_sample():
    problem = Problem(dtype=torch.float32)
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), num_samples=3, t=1e39, radius=0.5, model=problem.model)
    optimizer.step(problem.closure)
    assert optimizer.info.weights[optimizer.info.losses.argmax()] == 1


def lookahead(params):
    pytorch_optimizer = pytest.importorskip("pytorch_optimizer")
    return pytorch_optimizer.Lookahead(sgd(params), k=3)


def test_state_dict_of_a_base_without_state_makes_a_round_trip():
    """Lookahead's state dict has neither "state" nor "param_groups"."""

    def fresh():
        problem = Problem(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)))
        return problem, tiltsam.TSAM(lookahead(problem.model.parameters()), rho=0.1, seed=3)

    unbroken, optimizer = fresh()
    train(unbroken, optimizer, 4)
    saved = copy.deepcopy([unbroken.model.state_dict(), optimizer.state_dict()])
    train(unbroken, optimizer, 4)

    resumed, optimizer = fresh()
    resumed.model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert optimizer.setting("steps_taken") == 4
    train(resumed, optimizer, 4)
    assert_same(unbroken.weights(), resumed.weights())


def test_sampler_state_needs_a_base_with_state():
    problem = Problem(nn.Linear(6, 3))
    with pytest.raises(TypeError, match=r"Lookahead .*mean"):
        friendly.FriendlySAM(lookahead(problem.model.parameters()))


@pytest.mark.parametrize("steps", [0, 1])
def test_attributes_can_be_inspected(steps):
    problem = Problem(nn.Linear(6, 3))
    optimizer = tiltsam.SAM(sgd(problem.model.parameters()))
    train(problem, optimizer, steps)
    hasattr(optimizer, "_step_supports_amp_scaling")
    names = dict(inspect.getmembers(optimizer))
    assert ("last" in names) == ("info" in names) == bool(steps)


@pytest.mark.parametrize("with_closure", [False, True])
def test_scaler_step_is_refused(with_closure):
    problem = Problem(nn.Linear(6, 3), dtype=torch.float32)
    optimizer = tiltsam.SAM(sgd(problem.model.parameters()))
    scaler = torch.amp.GradScaler("cpu")
    before = problem.weights()
    scaler.scale(problem.loss()).backward()
    with pytest.raises(RuntimeError, match=r"(?s)SAM.*scaler=scaler"):
        scaler.step(optimizer, *[problem.closure] * with_closure)
    assert_same(problem.weights(), before)


@every_method
def test_repr_leaves_param_groups_as_they_are(method):
    problem = Problem(nn.Linear(6, 3))
    optimizer = method(sgd([problem.model.weight]))
    optimizer.base.add_param_group({"params": [problem.model.bias], "lr": np.float64(0.5)})
    before = [dict(group) for group in optimizer.param_groups]
    assert type(optimizer).__name__ in repr(optimizer)
    assert [dict(group) for group in optimizer.param_groups] == before


def test_num_nonfinite_is_an_integer_in_every_path():
    problem = Problem(nn.Linear(6, 3))
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), num_samples=2)
    train(problem, optimizer, 1)
    eager = optimizer.last
    replayed = with_numbers(eager, row_of(eager))
    assert {k: v.dtype for k, v in vars(replayed).items() if isinstance(v, torch.Tensor)} == {
        k: v.dtype for k, v in vars(eager).items() if isinstance(v, torch.Tensor)
    }
    fused = FusedLedger(torch.ones(()), 2).numbers()
    assert eager.num_nonfinite.dtype == replayed.num_nonfinite.dtype == fused["num_nonfinite"].dtype == torch.int64


@pytest.mark.parametrize("path", ["step", "frozen", "current_space", "gather", "hooked"])
def test_low_precision_warning_points_at_the_caller(path):
    problem = Problem(nn.Linear(6, 3), dtype=torch.bfloat16)
    optimizer = tiltsam.SAM(sgd(problem.model.parameters()))
    calls = {
        "step": lambda: optimizer.step(problem.closure),
        "frozen": optimizer.frozen,
        "current_space": optimizer.current_space,
        "gather": lambda: gather(optimizer, problem.closure),
        "hooked": lambda: torch.no_grad()(optimizer.step)(problem.closure),
    }
    with pytest.warns(RuntimeWarning, match="bfloat16") as caught:
        calls[path]()
    assert [w.filename for w in caught] == [__file__]


@pytest.mark.parametrize("cls", [tiltsam.SAM, tiltsam.TSAM])
def test_model_warning_points_at_the_caller(cls):
    problem, other = Problem(nn.Linear(6, 3)), nn.Linear(6, 3)
    with pytest.warns(RuntimeWarning, match="another copy") as caught:
        cls(sgd(problem.model.parameters()), model=other)
    assert [w.filename for w in caught] == [__file__]


def batch_norm_net():
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def warnings_of(network, make, **options):
    problem = Problem(network)
    optimizer = make(sgd(problem.model.parameters()), **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(problem, optimizer, 2)
    return [(w.category, w.filename == __file__, "model=" in str(w.message)) for w in caught]


@pytest.mark.parametrize("make", [tiltsam.SAM, tiltsam.TSAM])
def test_batch_norm_without_model_warns_once(make):
    assert warnings_of(batch_norm_net(), make) == [(RuntimeWarning, True, True)]


@pytest.mark.parametrize("case", ["model", "buffers_once", "one pass", "eval", "no statistics", "none"])
def test_batch_norm_warning_needs_a_reason(case):
    model = batch_norm_net()
    other = batch_norm_net()  # of nobody
    make, options = tiltsam.SAM, {}
    if case == "model":
        options = {"model": model}
    elif case == "buffers_once":
        options = {"buffers_once": False}
    elif case == "one pass":
        make = tiltsam.ERM
    elif case == "eval":
        model.eval()
    elif case == "no statistics":
        model[1] = nn.BatchNorm1d(4, track_running_stats=False)
    else:
        model[1] = nn.LayerNorm(4)
    assert warnings_of(model, make, **options) == []
    assert other.training


@pytest.mark.parametrize("method", [tiltsam.SAM, tiltsam.ERM])
@pytest.mark.parametrize("returns_scaled", [False, True])
def test_scaled_closure_without_scaler_warns(method, returns_scaled):
    problem = Problem(nn.Linear(6, 3), dtype=torch.float32)
    optimizer = method(sgd(problem.model.parameters(), lr=1e-6))
    scaler = torch.amp.GradScaler("cpu")

    def closure():
        loss = problem.loss()
        scaled = scaler.scale(loss)
        scaled.backward()
        return scaled if returns_scaled else loss

    with pytest.warns(RuntimeWarning, match="scaler=") as caught:
        optimizer.step(closure)
    optimizer.step(closure)  # warns once: another would be an error
    assert [w.filename for w in caught] == [__file__]


@pytest.mark.parametrize("scaled", [False, True])
def test_large_gradients_do_not_warn_by_themselves(scaled):
    problem = Problem(nn.Linear(6, 3), dtype=torch.float32)
    optimizer = tiltsam.SAM(sgd(problem.model.parameters(), lr=1e-6))
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)

    def closure():
        loss = 1e5 * problem.loss()
        scaler.scale(loss).backward()
        return loss

    optimizer.step(closure, scaler=scaler if scaled else None)  # warnings are errors
