"""compute_gradient: the passes of a step, for trainers that step the base themselves."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch

import tiltsam
from helpers.cases import METHODS, Problem, assert_same, backward, sgd
from tiltsam import samplers

BY_NAME = {method.name: method for method in METHODS}


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_compute_gradient_and_base_step_equal_step(method):
    """The returned loss is that of the first pass."""
    halves, whole = Problem(), Problem()
    a, b = (method(sgd(problem.model.parameters()), model=problem.model) for problem in (halves, whole))
    for seed in range(5):
        losses = []
        torch.manual_seed(seed)
        first = a.compute_gradient(lambda losses=losses: losses.append(halves.closure()) or losses[-1])
        a.base.step()
        torch.manual_seed(seed)
        b.step(whole.closure)
        assert torch.equal(first, losses[0])
    assert_same(halves.weights(), whole.weights())
    assert a.state_dict()["param_groups"] == b.state_dict()["param_groups"]


def test_compute_gradient_returns_the_first_loss_of_a_closure_that_writes_to_its_own():
    weight, own = torch.nn.Parameter(torch.tensor([3.0])), torch.zeros(())

    def closure():
        loss = (weight**2 / 2).sum()
        loss.backward()
        return own.copy_(loss.detach())

    sam = tiltsam.SAM(torch.optim.SGD([weight], lr=0.1), rho=1.0)
    assert sam.compute_gradient(closure).item() == 4.5


@dataclass(frozen=True)
class ForwardFirst(samplers.Sampler):
    """Evaluates the loss at θ, then the gradient."""

    def sample(self, space, index, common):
        space.reset_to_center()
        space.forward()
        return samplers.draw_at(space.evaluate())


def test_compute_gradient_with_a_forward_pass_first():
    problem = Problem()
    optimizer = tiltsam.SharpnessAware(sgd(problem.model.parameters()), ForwardFirst(), {}, model=problem.model)
    torch.manual_seed(0)
    first = optimizer.compute_gradient(problem.closure)
    torch.testing.assert_close(first, optimizer.info.losses[0].to(first.dtype))
    assert optimizer.info.num_forwards == 2


@pytest.mark.parametrize("name", ["sam", "pgn", "rsam", "tsam-hmc"])
def test_compute_gradient_leaves_the_gradient_scaled(name):
    method = BY_NAME[name]
    problem, plain = Problem(), Problem()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def closure():
        loss = problem.loss()
        scaler.scale(loss).backward()
        return loss

    for p, c, s in ((problem, closure, scaler), (plain, plain.closure, None)):
        torch.manual_seed(0)
        method(sgd(p.model.parameters()), model=p.model).compute_gradient(c, scaler=s)
    for p, q in zip(problem.model.parameters(), plain.model.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad, 256 * q.grad, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("skip", "norm"), [(False, 0.0), (True, None)])
def test_compute_gradient_without_a_finite_sample(skip, norm):
    """The gradient is zero, or None with skip_nonfinite."""
    problem = Problem()
    optimizer = BY_NAME["sam"](sgd(problem.model.parameters()), model=problem.model, skip_nonfinite=skip)

    def closure():
        loss = problem.loss() * torch.nan
        loss.backward()
        return loss

    assert optimizer.compute_gradient(closure).isnan()
    gradient = problem.model.last.weight.grad
    assert (None if gradient is None else gradient.norm().item()) == norm


def test_compute_gradient_reports_overflow_to_the_scaler():
    """One sample of three overflows: the aggregate is finite, but the scale must fall."""
    problem, passes = Problem(), []
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = BY_NAME["tsam"](sgd(problem.model.parameters()), model=problem.model)

    def closure():
        loss = problem.loss()
        scaler.scale(loss).backward()
        passes.append(loss)
        if len(passes) == 3:
            problem.model.last.weight.grad[0, 0] = torch.inf
        return loss

    before = problem.model.last.weight.detach().clone()
    optimizer.compute_gradient(closure, scaler=scaler)
    scaler.step(optimizer.base)
    scaler.update()
    assert torch.equal(problem.model.last.weight, before)
    assert scaler.get_scale() == 128.0


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_compute_gradient_rolls_back_when_the_closure_raises(method):
    problem = Problem()
    optimizer = method(sgd(problem.model.parameters()), model=problem.model)
    optimizer.step(problem.closure)
    weights, calls = problem.weights(), []

    def failing():
        calls.append(problem.closure())
        if len(calls) == method.forwards_at(1):
            raise RuntimeError("planted")
        return calls[-1]

    with pytest.raises(RuntimeError, match="planted"):
        optimizer.compute_gradient(failing)
    assert_same(problem.weights(), weights)
    assert optimizer.param_groups[0]["steps_taken"] == 1


def test_compute_gradient_replaces_the_gradient():
    problem = Problem()
    optimizer = BY_NAME["sam"](sgd(problem.model.parameters()), model=problem.model)
    for p in problem.model.parameters():
        p.grad = torch.ones_like(p)
    gradients = []
    for _ in range(2):
        torch.manual_seed(0)
        optimizer.compute_gradient(problem.closure)
        gradients.append([p.grad for p in problem.model.parameters() if p.grad is not None])
    assert all(torch.equal(g, h) for g, h in zip(*gradients, strict=True))


def test_compute_gradient_with_an_ascent_closure_equals_step():
    """The first pass is then one of the ascent closure."""
    halves, whole = Problem(), Problem()
    a, b = (BY_NAME["tsam"](sgd(problem.model.parameters()), model=problem.model) for problem in (halves, whole))

    def doubled(problem, losses):
        losses.append(backward(2 * problem.loss()))
        return losses[-1]

    for seed in range(3):
        losses = []
        torch.manual_seed(seed)
        first = a.compute_gradient(halves.closure, partial(doubled, halves, losses))
        a.base.step()
        assert torch.equal(first, losses[0])
        torch.manual_seed(seed)
        b.step(whole.closure, partial(doubled, whole, []))
    assert_same(halves.weights(), whole.weights())
    assert a.info.num_ascents == len(losses) == 3


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_compute_gradient_returns_a_scalar(shape):
    w = torch.nn.Parameter(torch.tensor([3.0]))
    loss = BY_NAME["sam"](sgd([w])).compute_gradient(lambda: backward((w**2).sum()).view(shape))
    assert (loss.shape, loss.requires_grad, loss.item()) == ((), False, 9.0)


def test_compute_gradient_needs_a_closure():
    optimizer = BY_NAME["sam"](sgd(Problem().model.parameters()))
    with pytest.raises(TypeError, match="closure"):
        optimizer.compute_gradient(None)


@pytest.mark.parametrize("returned", [torch.Tensor.detach, torch.Tensor.item], ids=["tensor", "number"])
def test_loss_is_on_the_device_of_the_model(returned):
    problem = Problem()
    optimizer = BY_NAME["sam"](sgd(problem.model.parameters()), model=problem.model)
    torch.set_default_device("meta")
    try:
        loss = optimizer.compute_gradient(lambda: returned(problem.closure()))
    finally:
        torch.set_default_device(None)
    assert loss.device.type == "cpu"
