"""The contract between every method and torch: one table of tests, run for all methods."""

import copy
import inspect
import io
import pickle
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import tiltsam
from helpers.cases import METHODS, Problem, assert_same, backward, lookahead, sgd, train
from tiltsam.space import tensor_lists
from tiltsam.space.parameter_space import ParameterSpace
from tiltsam.space.step_record import StepRecord
from tiltsam.tilting import StreamingTilt

every_method = pytest.mark.parametrize("method", METHODS, ids=repr)
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@every_method
def test_step_returns_detached_loss_and_fills_info(method):
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
    smallest = 1 - 1e-9 if (info.weights >= 0).all() else 0  # WSAM extrapolates
    assert smallest <= info.effective_sample_size <= samples + 1e-9
    assert info.num_nonfinite == 0
    assert (info.num_forwards, info.num_backwards) == (method.forwards, method.backwards)


@every_method
def test_num_forwards_is_number_of_forward_calls(method):
    problem, calls = Problem(), [0]
    problem.model.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    optimizer = method(sgd(problem.model.parameters()))
    optimizer.step(problem.closure)
    assert calls[0] == method.forwards


@every_method
def test_training_lowers_the_loss(method):
    problem = Problem(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)))
    before = problem.loss().item()
    train(problem, method(sgd(problem.model.parameters())), 30)
    assert problem.loss().item() < 0.7 * before


@every_method
def test_resume_is_bitwise(method):
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


def test_resume_with_a_base_that_has_no_state():

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


@every_method
def test_noise_depends_on_seed_only(method):
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


def test_noise_differs_between_steps_and_samples():
    theta = nn.Parameter(torch.zeros(50, dtype=torch.float64))
    seen = []

    def closure():
        seen.append(theta.detach().clone())
        return backward((theta * 0).sum())

    optimizer = tiltsam.TSAM(sgd([theta], lr=0.0), rho=0.0, radius=1.0, num_samples=3)
    for _ in range(3):
        optimizer.step(closure)
    cosines = torch.corrcoef(torch.stack(seen)).triu(1)
    assert len(seen) == 9
    assert cosines.abs().max() < 0.6


class NoRead(TorchDispatchMode):
    """Raises when a value is read back to the host, except in branches for tensors on a CPU."""

    with_cpu_branch = (
        ParameterSpace._norm_if_finite.__code__,
        ParameterSpace.zero_unless_.__code__,
        StepRecord.loss.__code__,
        StreamingTilt.add.__code__,
        StreamingTilt.loss.__code__,
        tensor_lists.zero_unless_.__code__,
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            frame = sys._getframe()
            while frame is not None and frame.f_code not in self.with_cpu_branch:
                frame = frame.f_back
            if frame is None:
                raise AssertionError(f"{func} reads a value back to the host")
        return func(*args, **(kwargs or {}))


@every_method
def test_step_reads_nothing_back(method):
    problem = Problem()
    optimizer = method(sgd(problem.model.parameters()), model=problem.model)
    optimizer.step(problem.closure)
    with NoRead():
        optimizer.step(problem.closure)
        _ = optimizer.info.losses
        with pytest.raises(AssertionError, match="reads a value"):  # the mode works
            optimizer.check_nonfinite()


@cuda
@every_method
def test_step_does_not_wait_for_the_gpu(method):
    problem = Problem(dtype=torch.float32)
    problem.model, problem.x, problem.y = problem.model.cuda(), problem.x.cuda(), problem.y.cuda()
    optimizer = method(sgd(problem.model.parameters()), model=problem.model)
    train(problem, optimizer, 2)
    with warnings.catch_warnings(action="ignore"):  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step(problem.closure)
        _ = optimizer.info.losses
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_method
def test_memory_is_reused_between_steps(method):
    problem = Problem()
    optimizer = method(sgd(problem.model.parameters()), model=problem.model)
    addresses = []
    for _ in range(3):
        optimizer.step(problem.closure)
        space = optimizer.current_space()
        tensors = [*space.center, *space.gradient_mean._buffers]
        if optimizer.num_samples > 1:
            tensors += [p.grad for p in space.params if p.grad is not None]
        addresses.append([x.data_ptr() for x in tensors])
    assert addresses[0] == addresses[1] == addresses[2]


@every_method
def test_single_sample_allocates_no_gradient_mean(method):
    problem = Problem()
    optimizer = method(sgd(problem.model.parameters()), model=problem.model)
    optimizer.step(problem.closure)
    assert (optimizer.current_space().gradient_mean._buffers == []) == (optimizer.num_samples == 1)


@every_method
def test_schedulers_and_step_hooks(method):
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
    on_wrapper.step()
    assert calls == ["pre", "base", "post"]
    assert optimizer.param_groups is base.param_groups
    assert optimizer.state is base.state
    assert base.param_groups[0]["lr"] == 0.5
    on_base = torch.optim.lr_scheduler.LambdaLR(base, lambda k: 0.1)
    optimizer.step(problem.closure)
    on_base.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_global_step_hooks_run_for_wrapper_and_base():
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
def test_one_cycle_lr_and_clipping_in_a_hook(method):
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
def test_add_param_group_to_wrapper_and_base(method):
    first, second, third = (nn.Linear(2, 2) for _ in range(3))
    optimizer = method(sgd(first.parameters()))
    optimizer.add_param_group({"params": second.parameters(), "lr": 0.5})
    optimizer.base.add_param_group({"params": third.parameters()})
    before = [p.detach().clone() for m in (first, second, third) for p in m.parameters()]
    x = torch.randn(4, 2)
    optimizer.step(lambda: backward(third(second(first(x))).square().mean()))
    after = [p for m in (first, second, third) for p in m.parameters()]
    assert len(optimizer.param_groups) == 3
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_empty_param_group():
    problem = Problem()
    optimizer = tiltsam.SAM(sgd(problem.model.parameters()))
    optimizer.step(problem.closure)
    optimizer.add_param_group({"params": []})
    assert optimizer.step(problem.closure).isfinite()


@every_method
def test_layer_frozen_during_training_stays(method):
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


def test_step_without_closure_creates_base_state():
    """torch.distributed.checkpoint calls it before it loads."""
    problem = Problem()
    optimizer = tiltsam.SAM(torch.optim.AdamW(problem.model.parameters(), lr=0.1))
    params = [p for p in problem.model.parameters() if p.requires_grad]
    before = {name: value.clone() for name, value in problem.model.state_dict().items()}
    for lr, gradient in ((0.1, 0.0), (0.0, 1.0)):
        optimizer.param_groups[0]["lr"] = lr
        for p in params:
            p.grad = torch.full_like(p, gradient)
        with pytest.raises(TypeError, match="closure"):
            optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert optimizer.step().isnan()  # no loss was evaluated
    assert_same(before, problem.model.state_dict())
    assert len(optimizer.state) == len(params)
    assert optimizer.param_groups[0]["steps_taken"] == 0


@every_method
def test_closure_may_clear_gradients(method):
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
def test_deepcopy_and_pickle(method):
    problem = Problem()
    optimizer = method(sgd(problem.model.parameters()), model=problem.model)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # patches optimizer.step
    calls = []
    for hooked in (optimizer, optimizer.base):  # like torch, copies have no hooks
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
        other.step(lambda p=p: backward(p.square().sum()))
        other.state_dict()
        assert not calls
    assert type(optimizer).__name__ in repr(optimizer)


@every_method
def test_state_dict_hooks_and_checkpoints_of_the_base(method):
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
    optimizer.load_state_dict(bare.state_dict())  # a run that began with the bare base
    assert optimizer.param_groups[0]["lr"] == 0.123
    assert optimizer.param_groups[0]["steps_taken"] == 1
    optimizer.step(problem.closure)


@pytest.mark.parametrize("steps", [0, 1])
def test_attributes_can_be_inspected(steps):
    problem = Problem(nn.Linear(6, 3))
    optimizer = tiltsam.SAM(sgd(problem.model.parameters()))
    train(problem, optimizer, steps)
    hasattr(optimizer, "_step_supports_amp_scaling")
    names = dict(inspect.getmembers(optimizer))
    assert ("info" in names) == bool(steps)
