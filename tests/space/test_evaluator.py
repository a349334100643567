"""Closures of a step: gradients of every kind, and forward passes without backward."""

import sys
import threading

import pytest
import torch
from torch import nn
from torch.autograd import backward as imported_backward

import tiltsam
from helpers.cases import METHODS, Problem, quadratic_problem, sgd
from helpers.passes import perturbed
from tiltsam.space.evaluator import forward_only, needs_graph

every_method = pytest.mark.parametrize("method", METHODS, ids=repr)


def backward(loss):
    loss.backward()
    return loss


@every_method
def test_gradients_that_share_memory(method):
    """Autograd gives two parameters views of one buffer if they enter a sum reshaped."""

    def trained(apart):
        torch.manual_seed(4)
        a, b = (nn.Parameter(torch.randn(6, dtype=torch.float64)) for _ in range(2))
        optimizer = method(sgd([a, b], lr=0.1))

        def closure():
            loss = backward((a.view(2, 3) + b.view(2, 3)).sin().square().sum())
            if a.grad is not None:  # a forward pass leaves none
                assert a.grad.data_ptr() == b.grad.data_ptr()
                a.grad = a.grad.clone() if apart else a.grad
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return torch.stack([a, b])

    torch.testing.assert_close(trained(apart=False), trained(apart=True), rtol=0, atol=1e-12)


@every_method
@pytest.mark.parametrize(
    "loss_of",
    [lambda w: 2 * w.sum(), lambda w: (torch.complex(torch.zeros_like(w), w).conj() + 3j).abs().square().sum()],
    ids=["expanded", "negative bit"],
)
def test_gradients_that_are_expanded_or_negated_views(method, loss_of):
    """``autograd.grad`` may return an expanded scalar, or a view with the negative bit."""
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64)) for _ in range(2))

    def by_hand():
        loss = loss_of(ours)
        (ours.grad,) = torch.autograd.grad(loss, ours)
        assert ours.grad.is_neg() or ours.grad.stride() == (0,)
        return loss.detach()

    one, two = method(sgd([ours])), method(sgd([theirs]))
    for _ in range(2):
        one.step(by_hand)
        two.step(lambda: backward(loss_of(theirs)))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_gradients_of_another_dtype_are_refused():
    theta = nn.Parameter(torch.ones(3))
    theta.grad_dtype = torch.float64
    with pytest.raises(TypeError, match=r"torch\.float32, got torch\.float64"):
        tiltsam.ERM(sgd([theta])).step(lambda: backward(theta.double().square().sum()))
    assert theta.tolist() == [1.0] * 3


def test_sparse_gradients_are_refused():
    table = nn.Embedding(10, 3, sparse=True)
    optimizer = tiltsam.SAM(sgd(table.parameters(), momentum=0.0, weight_decay=0.0))
    with pytest.raises(TypeError, match="sparse=False"):
        optimizer.step(lambda: backward(table(torch.tensor([1, 2])).sum()))


def test_line_search_with_a_loss_that_differentiates():
    def weights(method, **options):
        torch.manual_seed(0)
        problem = Problem(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))
        optimizer = method(sgd(problem.model.parameters()), rho=0.1, model=problem.model, **options)

        def closure():
            x = problem.x.detach().requires_grad_()
            loss = problem.model(x).square().mean()
            loss = loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        assert optimizer.info.num_forwards - optimizer.info.num_backwards == options.get("num_points", 0)
        return problem.weights()

    found, expected = weights(tiltsam.LineSearchSAM, num_points=1), weights(tiltsam.SAM)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def _tensor_backward(loss):
    loss.backward()


def _autograd_backward(loss):
    torch.autograd.backward(loss)


def _imported_backward(loss):
    imported_backward([loss])


def _scaled_backward(loss):
    torch.amp.GradScaler("cpu", init_scale=4.0).scale(loss).backward()


class Accelerator:
    """Runs backward for the closure, on part of the loss."""

    @staticmethod
    def backward(loss):
        (loss / 2).backward()


@pytest.mark.parametrize(
    "backward", [_tensor_backward, _autograd_backward, _imported_backward, _scaled_backward, Accelerator.backward]
)
@pytest.mark.parametrize("returns_float", [False, True])
def test_line_search_skips_backward_however_it_is_called(backward, returns_float):
    problem = Problem(nn.Linear(6, 3))
    optimizer = tiltsam.LineSearchSAM(sgd(problem.model.parameters()), num_points=10)
    ran = []
    problem.model.weight.register_post_accumulate_grad_hook(lambda p: ran.append(p))

    def closure():
        loss = problem.loss()
        backward(loss)
        return loss.item() if returns_float else loss

    optimizer.step(closure)
    assert (len(ran), optimizer.info.num_backwards, optimizer.info.num_forwards) == (2, 2, 12)


def test_line_search_raises_errors_of_the_closure_at_once():
    """Only a pass that needs a graph is repeated."""
    problem = Problem(nn.Linear(6, 3))
    optimizer = tiltsam.LineSearchSAM(sgd(problem.model.parameters()))
    calls = []

    def closure():
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("of the closure")
        return problem.closure()

    with pytest.raises(RuntimeError, match="of the closure"):
        optimizer.step(closure)
    assert len(calls) == 2


@pytest.mark.parametrize("use", [lambda h: h.retain_grad(), lambda h: h.register_hook(lambda g: None)])
def test_line_search_of_a_model_that_uses_the_graph(use):
    """Its forward passes alone are made with a graph, too."""
    problem = Problem(nn.Linear(6, 3))
    optimizer = tiltsam.LineSearchSAM(sgd(problem.model.parameters()))
    problem.model.register_forward_hook(lambda module, inputs, output: use(output) and None)
    optimizer.step(problem.closure)
    assert optimizer.info.num_backwards == 2


def test_closure_may_return_the_same_tensor_every_time():
    problem = Problem(nn.Linear(6, 3))
    total = torch.zeros(())

    def closure():
        total.zero_()
        loss = problem.closure()
        total.add_(loss.detach())
        return total

    steps = []
    for one in (problem.closure, closure):
        weights = [p.detach().clone() for p in problem.model.parameters()]
        optimizer = tiltsam.LineSearchSAM(sgd(problem.model.parameters()), rho=0.5, num_points=4)
        optimizer.step(one)
        steps.append((optimizer.info.losses, optimizer.info.perturbation_norms))
        for p, w in zip(problem.model.parameters(), weights, strict=True):
            p.data.copy_(w)
    torch.testing.assert_close(steps[0], steps[1])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # interrupted generators
def test_interrupted_forward_pass_leaves_backward_on():
    """A KeyboardInterrupt is raised before every bytecode of the forward passes in turn."""
    problem = Problem(nn.Linear(6, 3))
    optimizer = tiltsam.LineSearchSAM(sgd(problem.model.parameters()), num_points=1)
    kept = []  # as a debugger keeps the last traceback, and the frames in it

    def interrupted(number):
        left = number

        def trace(frame, event, arg):
            nonlocal left
            if not frame.f_code.co_filename.endswith(("space/evaluator.py", "torch/overrides.py")):
                return None
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
            if event == "opcode":
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt
            return trace

        optimizer.step(problem.closure)
        sys._getframe().f_trace_opcodes = True  # Python 3.12 traces opcodes only if a frame asked for it before
        sys.settrace(trace)
        try:
            optimizer.step(problem.closure)
        except KeyboardInterrupt as error:
            kept.append(error)
        finally:
            sys.settrace(None)
        return left <= 0

    number = 1
    while interrupted(number):
        number += 1
        torch.set_grad_enabled(True)  # what torch's own context managers leave is not ours to test
        problem.model.weight.grad = None
        problem.loss().backward()
        assert problem.model.weight.grad is not None, number
    assert number > 50


def test_forward_only_skips_backward():
    w = nn.Parameter(torch.ones(3))

    def closure():
        loss = w.square().sum()
        loss.backward()
        return loss

    for graph in (True, False):
        with torch.set_grad_enabled(graph):
            assert forward_only(closure) == 3
        assert w.grad is None
    closure()
    assert w.grad is not None


def test_forward_only_leaves_other_threads_alone():
    w, v = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def call():
        other = threading.Thread(target=lambda: v.square().sum().backward())
        other.start()
        other.join(60)
        w.square().sum().backward()

    forward_only(call)
    assert w.grad is None
    assert v.grad is not None


def test_forward_only_needs_graph_to_differentiate():
    w = nn.Parameter(torch.ones(3))

    def closure():
        (gradient,) = torch.autograd.grad(w.square().sum(), w, create_graph=True)
        loss = gradient.square().sum()
        loss.backward()
        return loss

    with torch.no_grad(), pytest.raises(RuntimeError) as raised:
        forward_only(closure)
    assert needs_graph(raised.value)
    assert forward_only(closure) == 12.0
    assert w.grad is None


def test_other_errors_of_autograd_need_no_graph():
    w = nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError) as raised:
        forward_only(lambda: torch.autograd.grad(w.sum(), torch.ones(2, requires_grad=True)))
    assert not needs_graph(raised.value)


@pytest.mark.parametrize("value", [None, "0.5", (torch.ones(()), 1)], ids=repr)
def test_closure_must_return_a_loss(value):
    theta, closure = quadratic_problem()
    with pytest.raises(TypeError, match=type(value).__name__):
        tiltsam.SAM(sgd([theta])).step(lambda: [closure(), value][1])


def test_closure_must_return_one_loss():
    theta, closure = quadratic_problem()
    with pytest.raises(ValueError, match=r"\(2,\)"):
        tiltsam.SAM(sgd([theta])).step(lambda: closure().expand(2))


@pytest.mark.parametrize("convert", [torch.Tensor.item, lambda loss: loss.reshape(1), lambda loss: loss.float()])
def test_closure_may_return_any_scalar(convert):
    theta, closure = quadratic_problem()
    loss = tiltsam.SAM(sgd([theta]), rho=0.1).step(lambda: convert(closure()))
    assert loss.shape == ()
    assert loss.dtype == torch.float64


def test_closure_must_leave_a_gradient():
    theta, _ = quadratic_problem()
    before = theta.detach().clone()
    with pytest.raises(RuntimeError, match="gradient"):
        tiltsam.SAM(sgd([theta])).step(lambda: theta.sum())
    assert torch.equal(theta, before)


def test_passes_are_counted():
    theta, closure = quadratic_problem()
    space = tiltsam.SAM(sgd([theta])).current_space()
    with torch.no_grad(), perturbed(space, [closure]):
        space.evaluate(ascent=True)
        space.evaluate()
        space.forward()
    evaluator = space.evaluator
    assert (evaluator.num_forwards, evaluator.num_backwards, evaluator.num_ascents) == (3, 2, 1)


def test_each_sample_uses_its_closure_and_ascents_use_theirs():
    theta, closure = quadratic_problem()
    space = tiltsam.SAM(sgd([theta])).current_space()
    calls = []

    def named(name):
        return lambda: calls.append(name) or closure()

    with torch.no_grad(), perturbed(space, [named(0), named(1)], named("ascent")):
        for sample in (0, 1):
            space.begin_sample(sample)
            space.evaluate(ascent=True)
            space.evaluate()
    assert calls == ["ascent", 0, "ascent", 1]
