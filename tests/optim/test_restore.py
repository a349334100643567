"""Weights, buffers, gradients and counts are restored, whatever a step raises."""

import contextlib
import gc
from pathlib import Path

import pytest
import torch
from torch import nn

import tiltsam
from helpers.cases import METHODS, Problem, assert_same, sgd
from helpers.interrupting import CONTEXTS, Interrupter, interrupted_everywhere
from tiltsam.space.parameter_space import ParameterSpace

every_method = pytest.mark.parametrize("method", METHODS, ids=repr)


def presence(model):
    return [p.grad is not None for p in model.parameters()]


@every_method
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("warm", [False, True], ids=["first-step", "later-step"])
def test_closure_raises_at_any_pass(method, error, warm):
    problem = Problem()
    optimizer = method(sgd(problem.model.parameters()), model=problem.model)
    if warm:
        optimizer.step(problem.closure)
    weights, gradients, steps = problem.weights(), presence(problem.model), optimizer.param_groups[0]["steps_taken"]
    if optimizer.plan()[1] == 1:
        # That of the last step is released before the first pass, where it needs memory.
        gradients = [known and p.numel() == 0 for known, p in zip(gradients, problem.model.parameters(), strict=True)]
    for when in ("before", "after"):
        for fail_at in range(method.forwards_at(steps)):
            calls = [0]

            def closure(calls=calls, fail_at=fail_at, when=when):
                calls[0] += 1
                if calls[0] - 1 == fail_at and when == "before":
                    raise error("planted")
                loss = problem.closure()
                if calls[0] - 1 == fail_at:
                    raise error("planted")
                return loss

            with pytest.raises(error, match="planted"):
                optimizer.step(closure)
            assert_same(problem.weights(), weights)  # BatchNorm's buffers are in there too
            assert presence(problem.model) == gradients
            assert optimizer.param_groups[0]["steps_taken"] == steps
    optimizer.step(problem.closure)  # the next step works
    assert all(p.isfinite().all() for p in problem.model.parameters())


@every_method
def test_step_after_a_failed_step(method):
    a, b = Problem(dropout=0.0), Problem(dropout=0.0)
    one, two = method(sgd(a.model.parameters()), model=a.model), method(sgd(b.model.parameters()), model=b.model)

    def failing():
        b.closure()
        raise RuntimeError("planted")

    for _ in range(3):
        one.step(a.closure)
        with pytest.raises(RuntimeError, match="planted"):
            two.step(failing)
        two.step(b.closure)
    assert_same(a.weights(), b.weights())


@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("warm", [False, True], ids=["first-step", "later-step"])
def test_failed_step_keeps_gradients(num_samples, warm):
    """Those that the caller has computed; the gradient of the last step is the base's no more."""
    problem = Problem()
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), num_samples=num_samples, model=problem.model)
    if warm:
        optimizer.step(problem.closure)
        optimizer.zero_grad()
    problem.closure()
    before = {name: p.grad.clone() for name, p in problem.model.named_parameters() if p.grad is not None}

    def failing():
        problem.closure()
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        optimizer.step(failing)
    after = {name: p.grad for name, p in problem.model.named_parameters() if p.grad is not None}
    assert_same(before, after)


def test_failed_step_leaves_no_partial_mean():
    """The last gradient lies in the memory of the mean: a partial mean must not be taken for a gradient."""
    problem, calls = Problem(), []
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), model=problem.model, num_samples=3)
    optimizer.step(problem.closure)

    def failing(at):
        def closure():
            calls.append(1)
            if len(calls) == at:
                raise RuntimeError("planted")
            return problem.closure()

        return closure

    before = {k: p.grad.clone() for k, p in problem.model.named_parameters() if p.grad is not None}
    for at, factor in ((2, 1), (5, 0)):  # in the first sample, in the third
        calls.clear()
        with pytest.raises(RuntimeError, match="planted"):
            optimizer.step(failing(at))
        after = {k: p.grad for k, p in problem.model.named_parameters() if p.grad is not None}
        assert_same({k: factor * v for k, v in before.items()}, after)


def test_interrupt_during_restore_waits(monkeypatch):
    problem = Problem()
    optimizer = tiltsam.SAM(sgd(problem.model.parameters()))
    optimizer.step(problem.closure)
    weights = problem.weights()
    space, copy = optimizer._space, ParameterSpace.copy_
    armed = [True]

    def interrupted(self, x, y):
        if x is self._point and armed[0]:
            armed[0] = False
            x[0].copy_(y[0])
            raise KeyboardInterrupt
        copy(self, x, y)

    monkeypatch.setattr(ParameterSpace, "copy_", interrupted)
    optimizer.base.param_groups[0]["lr"] = 0.0
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(problem.closure)
    assert space is optimizer._space
    assert_same(
        {k: v for k, v in problem.weights().items() if "running" not in k and "tracked" not in k},
        {k: v for k, v in weights.items() if "running" not in k and "tracked" not in k},
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@every_method
@pytest.mark.filterwarnings("ignore:weights are")
def test_restore_is_exact_in_every_precision(method, dtype):
    """With lr=0 the weights do not change by a bit."""
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    problem = Problem(model, dtype=dtype)
    optimizer = method(sgd(model.parameters(), lr=0.0))
    weights = problem.weights()
    for _ in range(3):
        assert optimizer.step(problem.closure).isfinite()
    assert_same(problem.weights(), weights)


@pytest.mark.parametrize("sampler", ["ascent", "uniform", "hmc"])
def test_memory_does_not_grow_with_the_number_of_samples(sampler):
    """Count the vectors of the size of the parameters that are alive during a pass."""
    peaks = []
    gc.collect()
    gc.freeze()  # what is there already is none of these vectors
    for num_samples in (2, 3, 8):
        theta = nn.Parameter(torch.zeros(4097))
        alive, warm = [], []

        def closure(theta=theta, alive=alive, warm=warm):
            loss = theta.square().sum()
            loss.backward()
            if warm:  # the first step may still be allocating
                vectors = [theta.grad, *(x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter))]
                blocks = {x.untyped_storage().data_ptr() for x in vectors if x.numel() == theta.numel()}
                alive.append(len(blocks))
            return loss

        optimizer = tiltsam.TSAM(sgd([theta], momentum=0.0), num_samples=num_samples, sampler=sampler)
        optimizer.step(closure)
        warm.append(True)
        optimizer.step(closure)
        peaks.append(max(alive))
        del optimizer, theta, closure
        gc.collect()
    assert len(set(peaks)) == 1, peaks
    if sampler != "hmc":  # the weights, their copy, the mean, the gradient just computed
        assert peaks[0] == 4, peaks


@pytest.mark.parametrize("method", [m for m in METHODS if m.name in ("erm", "tsam", "vasso")], ids=repr)
@pytest.mark.parametrize("warm", [False, True], ids=["first-step", "later-step"])
def test_step_rolls_back_when_a_pre_hook_raises(method, warm):
    problem, broken = Problem(), []
    base = sgd(problem.model.parameters())
    optimizer = method(base, model=problem.model)
    if warm:
        optimizer.step(problem.closure)
    base.register_step_pre_hook(lambda *_: 1 / 0 if broken else None)
    params = [p for p in problem.model.parameters() if p.requires_grad and p.numel()]
    optimizer._sampler_state.allocate(params)
    weights, steps = problem.weights(), optimizer.param_groups[0]["steps_taken"]
    kept = [v.clone() for v in optimizer._sampler_state.tensors(params)]
    broken.append(True)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(problem.closure)
    assert_same(problem.weights(), weights)
    assert all(torch.equal(a, b) for a, b in zip(optimizer._sampler_state.tensors(params), kept, strict=True))
    assert optimizer.param_groups[0]["steps_taken"] == steps
    broken.clear()
    optimizer.step(problem.closure)
    assert optimizer.param_groups[0]["steps_taken"] == steps + 1
    assert not torch.equal(problem.weights()["norm.running_mean"], weights["norm.running_mean"])


def test_step_keeps_buffers_when_a_post_hook_raises():
    problem = Problem()
    base = sgd(problem.model.parameters())
    optimizer = tiltsam.SAM(base, model=problem.model)
    base.register_step_post_hook(lambda *_: 1 / 0)
    before = problem.weights()
    with pytest.raises(ZeroDivisionError):
        optimizer.step(problem.closure)
    after = problem.weights()
    assert not torch.equal(after["first.weight"], before["first.weight"])
    assert not torch.equal(after["norm.running_mean"], before["norm.running_mean"])


def test_step_leaves_no_hook_on_the_base():
    problem = Problem()
    base = sgd(problem.model.parameters())
    optimizer = tiltsam.SAM(base, model=problem.model)
    optimizer.step(problem.closure)
    assert not base._optimizer_step_pre_hooks


@pytest.mark.parametrize("caught", [False, True])
def test_step_refuses_reentry(caught):
    problem, reference = Problem(dropout=0.0), Problem(dropout=0.0)
    optimizer = tiltsam.SAM(sgd(problem.model.parameters()), model=problem.model)
    weights = problem.weights()

    def closure():
        with contextlib.suppress(RuntimeError) if caught else contextlib.nullcontext():
            optimizer.step(problem.closure)
        return problem.closure()

    if caught:  # the outer step goes on undisturbed
        optimizer.step(closure)
        tiltsam.SAM(sgd(reference.model.parameters()), model=reference.model).step(reference.closure)
        assert_same(problem.weights(), reference.weights())
        return
    with pytest.raises(RuntimeError, match=r"SAM\.step"):
        optimizer.step(closure)
    assert_same(problem.weights(), weights)
    optimizer.step(problem.closure)


def test_restore_falls_back_to_single_copies(monkeypatch):
    """A foreach copy runs out of memory: single copies do the same."""
    problem, reference = Problem(dropout=0.0), Problem(dropout=0.0)
    optimizer = tiltsam.SAM(sgd(problem.model.parameters()), model=problem.model)
    copy_, failed = ParameterSpace.copy_, []

    def failing(self, x, y):
        if x is self._point:
            failed.append(x)
            raise torch.OutOfMemoryError("planted")
        copy_(self, x, y)

    monkeypatch.setattr(ParameterSpace, "copy_", failing)
    optimizer.step(problem.closure)
    assert failed
    monkeypatch.undo()
    tiltsam.SAM(sgd(reference.model.parameters()), model=reference.model).step(reference.closure)
    assert_same(problem.weights(), reference.weights())


@pytest.mark.parametrize("frozen_meanwhile", [False, True])
def test_restore_that_fails_is_retried_by_the_next_step(monkeypatch, frozen_meanwhile):
    problem, reference = Problem(dropout=0.0), Problem(dropout=0.0)
    optimizer = tiltsam.SAM(sgd(problem.model.parameters()), model=problem.model)
    weights, theta = problem.weights(), [p.detach().clone() for p in problem.model.parameters() if p.requires_grad]
    copy_, single, broken = ParameterSpace.copy_, torch.Tensor.copy_, [True]

    def failing(self, x, y):
        if broken and x is self._point:
            raise torch.OutOfMemoryError("planted")
        copy_(self, x, y)

    def failing_single(x, *args, **kwargs):
        if broken:
            raise torch.OutOfMemoryError("planted")
        return single(x, *args, **kwargs)

    monkeypatch.setattr(ParameterSpace, "copy_", failing)
    monkeypatch.setattr(torch.Tensor, "copy_", failing_single)
    with pytest.raises(RuntimeError, match="center") as found:
        optimizer.step(problem.closure)
    assert isinstance(found.value.__cause__, torch.OutOfMemoryError)
    assert not torch.equal(problem.weights()["first.weight"], weights["first.weight"])
    center = optimizer.current_space().center
    assert all(torch.equal(a, b) for a, b in zip(center, [p for p in theta if p.numel()], strict=True))
    for one in (problem, reference):
        one.model.first.bias.requires_grad_(not frozen_meanwhile)  # then the space is built again
    for _ in range(2):  # still failing
        with pytest.raises(RuntimeError, match="center"):
            optimizer.step(problem.closure)
    broken.clear()
    optimizer.step(problem.closure)
    assert all(p.requires_grad for p in optimizer.current_space().params)
    tiltsam.SAM(sgd(reference.model.parameters()), model=reference.model).step(reference.closure)
    assert_same(problem.weights(), reference.weights())


PACKAGE = Path(tiltsam.__file__).parent
MODULES = tuple(  # those that move, save or restore something
    str(PACKAGE / name)
    for name in (
        "optim/sharpness_aware.py",
        "optim/hyperparameters.py",
        "space/evaluator.py",
        "space/gradient_mean.py",
        "space/model_state.py",
        "space/parameter_space.py",
        "space/sampler_state.py",
        "space/model_state.py",
    )
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # interrupted generators
def test_step_can_be_interrupted_at_every_bytecode():
    assert all(Path(name).exists() for name in MODULES)
    method = next(m for m in METHODS if m.name == "vasso")  # which keeps a vector
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)).double()
    base = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[1:].parameters()}], lr=0.1)
    optimizer = method(base, model=model)
    x = torch.randn(4, 2, dtype=torch.float64)

    def closure():
        loss = model(x).square().mean()
        loss.backward()
        return loss

    def tensors():  # those of the model, and what the sampler keeps
        return {**model.state_dict(), **dict(enumerate(optimizer._sampler_state.tensors(list(model.parameters()))))}

    def snapshot():
        return {k: v.clone() for k, v in tensors().items()}

    def reset():
        for k, v in tensors().items():
            v.copy_(before[k])
        for group in optimizer.param_groups:
            group["steps_taken"] = 0

    optimizer._sampler_state.allocate(list(model.parameters()))
    before, after = snapshot(), None
    weights = [k for k, _ in model.named_parameters()]
    for number, place in enumerate(interrupted_everywhere(lambda: optimizer.step(closure), MODULES + CONTEXTS)):
        found = snapshot()
        after = found if after is None else after
        taken = not all(torch.equal(found[k], before[k]) for k in weights)
        wanted = dict(after if taken else before)
        if place is not None and not taken and (place[0].co_name == "commit" or place[0].co_filename in CONTEXTS):
            # The base's step has begun, and its update has not.
            wanted |= {k: v for k, v in after.items() if k not in weights and torch.equal(found[k], v)}
        try:
            assert_same(found, wanted)
            assert torch.is_grad_enabled()
            assert model[1].track_running_stats
            assert not any(p.grad is not None and not p.grad.isfinite().all() for p in model.parameters())
            reset()
            if number % 20 == 0:  # the next interrupted step shows as well that steps go on
                optimizer.step(closure)
                assert_same(snapshot(), after)
                reset()
        except BaseException as error:
            error.add_note(f"interrupted at {place}")
            raise


@pytest.mark.parametrize("rebuild", [False, True], ids=["first-step", "later-step"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # interrupted generators
def test_step_after_an_interrupt_while_the_space_is_built(rebuild):
    method = next(m for m in METHODS if m.name == "vasso")  # which has a state vector

    def fresh():
        problem = Problem(dropout=0.0)
        optimizer = method(sgd(problem.model.parameters()), model=problem.model)
        if rebuild:
            optimizer.step(problem.closure)
            problem.model.first.requires_grad_(False)
        return problem, optimizer

    def finished(problem, optimizer):
        if optimizer.param_groups[0]["steps_taken"] == rebuild:
            optimizer.step(problem.closure)
        return problem.weights()

    problem, optimizer = fresh()
    files = tuple(name for name in MODULES if name.endswith(("sharpness_aware.py", "sampler_state.py")))
    first = Interrupter(files)
    first.run(lambda: optimizer.step(problem.closure))
    expected = finished(problem, optimizer)
    places = [place for place in first.seen if place[0].co_name in ("begin", "current_space", "allocate")]
    if not first.seen:
        pytest.skip("this Python does not trace opcodes")
    assert len(places) > 100
    for place in places:
        problem, optimizer = fresh()
        with contextlib.suppress(KeyboardInterrupt):
            Interrupter(files, place).run(lambda: optimizer.step(problem.closure))  # noqa: B023
        assert_same(finished(problem, optimizer), expected)
