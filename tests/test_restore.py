"""Nothing is ever left perturbed, whatever the closure does."""

import gc

import pytest
import torch
from torch import nn

import tiltsam
from cases import METHODS, Problem, assert_same, sgd
from tiltsam.parameters import ParameterSpace

every_method = pytest.mark.parametrize("method", METHODS, ids=repr)


def presence(model):
    return [p.grad is not None for p in model.parameters()]


@every_method
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("warm", [False, True], ids=["first-step", "later-step"])
def test_a_closure_that_raises_at_any_pass(method, error, warm):
    problem = Problem()
    optimizer = method(sgd(problem.model.parameters()), model=problem.model)
    if warm:
        optimizer.step(problem.closure)
    weights, gradients, steps = problem.weights(), presence(problem.model), optimizer.param_groups[0]["steps_taken"]
    for when in ("before", "after"):
        for fail_at in range(method.forwards):
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
    optimizer.step(problem.closure)  # and it goes on
    assert all(p.isfinite().all() for p in problem.model.parameters())


@every_method
def test_after_a_failed_step_the_next_is_what_it_would_have_been(method):
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


def test_gradients_from_before_survive_a_failed_step():
    problem = Problem()
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), num_samples=3, model=problem.model)
    problem.closure()
    before = {name: p.grad.clone() for name, p in problem.model.named_parameters() if p.grad is not None}

    def failing():
        problem.closure()
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        optimizer.step(failing)
    after = {name: p.grad for name, p in problem.model.named_parameters() if p.grad is not None}
    assert_same(before, after)


def test_half_a_sum_is_not_left_for_a_gradient():
    """The last step's gradient lies where this one sums: whoever goes on with ``base.step()`` would descend a part."""
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


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("skip", [False, True], ids=["zero-gradient", "skip"])
def test_a_sample_without_weight_is_not_descended(foreach, skip):
    """PGN with alpha=1 is SAM: θ's own gradient counts nothing, even where the perturbed one is not finite."""
    theta, calls = nn.Parameter(torch.tensor([3.0, -2.0])), []

    def closure():
        calls.append(1)
        loss = theta.square().sum()
        loss.backward()
        return loss * (torch.nan if len(calls) == 2 else 1.0)

    base = sgd([theta], momentum=0.0, weight_decay=0.0)
    hits = []
    base.register_step_pre_hook(lambda *_: hits.append(1))
    optimizer = tiltsam.PGN(base, alpha=1.0, rho=0.1, foreach=foreach, skip_nonfinite=skip)
    assert optimizer.step(closure).isnan()
    assert optimizer.last.weights.tolist() == [0.0, 0.0]
    assert theta.tolist() == [3.0, -2.0]
    assert len(hits) == (0 if skip else 1)
    optimizer.step(closure)
    assert (theta.abs() < torch.tensor([3.0, 2.0])).all()


def test_ctrl_c_during_the_restore_is_held_until_it_is_complete(monkeypatch):
    problem = Problem()
    optimizer = tiltsam.SAM(sgd(problem.model.parameters()))
    optimizer.step(problem.closure)
    weights = problem.weights()
    space, copy = optimizer._space, ParameterSpace._copy
    armed = [True]

    def interrupted(self, x, y):
        if x is self.point and armed[0]:
            armed[0] = False
            x[0].copy_(y[0])
            raise KeyboardInterrupt
        copy(self, x, y)

    monkeypatch.setattr(ParameterSpace, "_copy", interrupted)
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
@pytest.mark.filterwarnings("ignore:weights in")
def test_restore_is_exact_in_every_precision(method, dtype):
    """lr = 0: after a step the weights are the bits they were, where adding and subtracting would drift."""
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    problem = Problem(model, dtype=dtype)
    optimizer = method(sgd(model.parameters(), lr=0.0))
    weights = problem.weights()
    for _ in range(3):
        assert optimizer.step(problem.closure).isfinite()
    assert_same(problem.weights(), weights)


def test_low_precision_weights_are_warned_about_once():
    model = nn.Linear(6, 3)
    problem = Problem(model, dtype=torch.bfloat16)
    optimizer = tiltsam.SAM(sgd(model.parameters()))
    with pytest.warns(RuntimeWarning, match=r"weights in bfloat16.*lost to rounding.*float32") as found:
        optimizer.step(problem.closure)
    assert found[0].filename == __file__  # where the step was taken
    optimizer.step(problem.closure)  # a second warning would be an error


@pytest.mark.parametrize("sampler", ["ascent", "uniform", "hmc"])
def test_memory_does_not_grow_with_the_number_of_samples(sampler):
    """Counts the vectors as large as the parameters that are alive while a pass runs."""
    peaks = []
    gc.collect()
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
    if sampler != "hmc":  # the weights, their copy, the accumulator, the gradient just computed
        assert peaks[0] == 4, peaks
