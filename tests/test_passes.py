"""BatchNorm's statistics move once a step, dropout keeps one mask; only with ``model=``, and both can be turned off."""

import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd import backward as imported_backward

import tiltsam
from helpers.cases import METHODS, Problem, sgd

every_method = pytest.mark.parametrize("method", METHODS, ids=repr)
SAM = tiltsam.SAM


@every_method
def test_batchnorm_moves_once_at_the_first_pass(method):
    problem, single = Problem(dropout=0.0), Problem(dropout=0.0)
    optimizer = method(sgd(problem.model.parameters()), model=problem.model)
    first = []

    def closure():
        loss = problem.closure()
        first.append((problem.model.norm.running_mean.clone(), problem.model.norm.running_var.clone()))
        return loss

    optimizer.step(closure)
    norm = problem.model.norm
    assert norm.num_batches_tracked == 1
    assert torch.equal(norm.running_mean, first[0][0])
    assert torch.equal(norm.running_var, first[0][1])
    if method.name in ("erm", "sam", "asam", "esam2", "pgn", "tsam-shared"):  # whose first pass is at θ
        single.closure()
        assert torch.equal(norm.running_mean, single.model.norm.running_mean)


@pytest.mark.parametrize("options", [{"model": None}, {"buffers_once": False}])
def test_left_alone_they_move_at_every_pass(options):
    problem = Problem()
    optimizer = SAM(sgd(problem.model.parameters()), **{"model": problem.model, **options})
    optimizer.step(problem.closure)
    assert problem.model.norm.num_batches_tracked == 2


def masks_of(problem, optimizer):
    masks = []
    problem.model.dropout.register_forward_hook(lambda _, x, y: masks.append((y == 0) & (x[0] != 0)))
    optimizer.step(problem.closure)
    return masks


@every_method
def test_dropout_draws_one_mask_a_step(method):
    problem = Problem()
    optimizer = method(sgd(problem.model.parameters()), model=problem.model)
    masks = masks_of(problem, optimizer)
    assert len(masks) == method.forwards
    assert all(torch.equal(m, masks[0]) for m in masks)
    assert not torch.equal(masks_of(problem, optimizer)[0], masks[0])  # and another one at the next step


@pytest.mark.parametrize("options", [{"model": None}, {"same_dropout": False}])
def test_left_alone_masks_differ(options):
    problem = Problem()
    optimizer = SAM(sgd(problem.model.parameters()), **{"model": problem.model, **options})
    masks = masks_of(problem, optimizer)
    assert not torch.equal(masks[0], masks[1])


@every_method
def test_the_global_random_state_moves_by_one_pass(method):
    problem = Problem()
    optimizer = method(sgd(problem.model.parameters()), model=problem.model)
    torch.manual_seed(8)
    optimizer.step(problem.closure)
    after = torch.get_rng_state()
    torch.manual_seed(8)
    problem.loss()
    assert torch.equal(after, torch.get_rng_state())


def test_buffers_of_any_kind():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("expanded", torch.zeros(1).expand(4))
            self.register_buffer("absent", None)

        def forward(self, x):
            self.calls += 1
            return self.layer(x)

    problem = Problem(Counter(), dtype=torch.float32)
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), num_samples=3, model=problem.model)
    for k in range(3):
        optimizer.step(problem.closure)
        assert problem.model.calls == k + 1


def test_a_model_in_eval_mode_stays_as_it_is():
    problem = Problem()
    problem.model.eval()
    before = {k: v.clone() for k, v in problem.model.named_buffers()}
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), num_samples=3, model=problem.model)
    optimizer.step(problem.closure)
    assert not problem.model.training
    assert all(torch.equal(v, before[k]) for k, v in problem.model.named_buffers())


class Tracking(nn.BatchNorm1d):
    """Moves its statistics whatever ``track_running_stats`` says."""

    def forward(self, x):
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


@pytest.mark.parametrize("patched", [False, True])
def test_a_batchnorm_with_a_forward_of_its_own_moves_once(patched):
    norm = nn.BatchNorm1d(6) if patched else Tracking(6)
    if patched:
        norm.forward = Tracking.forward.__get__(norm)
    problem = Problem(nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 3)), dtype=torch.float32)
    means = []

    def closure():
        loss = problem.closure()
        means.append(norm.running_mean.clone())
        return loss

    SAM(sgd(problem.model.parameters()), model=problem.model).step(closure)
    assert not torch.equal(*means)
    assert torch.equal(norm.running_mean, means[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch.jit's, by version
def test_a_scripted_model():
    plain = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    problem = Problem(torch.jit.script(plain), dtype=torch.float32)
    optimizer = SAM(sgd(problem.model.parameters()), model=problem.model)
    for k in range(2):
        optimizer.step(problem.closure)
        assert problem.model.state_dict()["1.num_batches_tracked"] == k + 1


class Reassigning(nn.Module):
    """Puts another tensor in its buffer's place at each pass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("sparse", torch.eye(3).to_sparse_csr())

    def forward(self, x):
        self.calls = self.calls + 1
        return self.layer(x)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_buffers_that_are_replaced_move_once_and_come_back():
    problem = Problem(Reassigning(), dtype=torch.float32)
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), num_samples=3, model=problem.model)
    for k in range(3):
        optimizer.step(problem.closure)
        assert problem.model.calls == k + 1
    answers = iter([problem.closure, problem.closure, problem.loss])  # the third leaves no gradient
    with pytest.raises(RuntimeError, match="left no gradient"):
        optimizer.step(lambda: next(answers)())
    assert problem.model.calls == 3


class Interrupted(nn.BatchNorm1d):
    """Ctrl-C falls on it when its statistics are switched off or on for the n-th time."""

    left = -1

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "track_running_stats":
            Interrupted.left -= 1
            if Interrupted.left == 0:
                raise self.signal


@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("moment", range(1, 7))
def test_ctrl_c_leaves_no_layer_without_its_statistics(moment, signal):
    Interrupted.signal = signal
    layers = [layer for _ in range(3) for layer in (nn.Linear(6, 6), Interrupted(6))]
    problem = Problem(nn.Sequential(*layers, nn.Linear(6, 3)), dtype=torch.float32)
    optimizer = tiltsam.SAM(sgd(problem.model.parameters()), model=problem.model)
    Interrupted.left = moment
    with pytest.raises(signal):
        optimizer.step(problem.closure)
    assert Interrupted.left <= 0
    assert all(layer.track_running_stats for layer in layers[1::2])
    assert all(layer.num_batches_tracked == 0 for layer in layers[1::2])


def test_an_autocast_around_the_step_sees_the_weights_that_moved():
    def autocast(*, on):
        return torch.autocast("cpu", torch.bfloat16) if on else nullcontext()

    def losses(*, around):
        torch.manual_seed(0)
        problem = Problem(nn.Linear(6, 3), dtype=torch.float32)
        optimizer = tiltsam.SAM(sgd(problem.model.parameters()), rho=1.0)

        def closure():
            with autocast(on=not around):
                loss = problem.loss()
            loss.backward()
            return loss

        with autocast(on=around):
            optimizer.step(closure)
            again = problem.loss()
        return [*optimizer.last.start_losses, *optimizer.last.losses, again.detach()]

    outer, inner = losses(around=True), losses(around=False)
    assert outer[1] > 1.2 * outer[0]
    assert outer[:2] == inner[:2]
    torch.testing.assert_close(outer[2], inner[2], rtol=0.01, atol=0.0)


def test_a_line_search_over_a_loss_that_differentiates():
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
    """Errors that mention gradients, too: only a failed differentiation is tried again."""
    problem = Problem(nn.Linear(6, 3))
    optimizer = tiltsam.LineSearchSAM(sgd(problem.model.parameters()))
    calls = []

    def closure():
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("element 0 of tensors does not require grad")
        return problem.closure()

    with pytest.raises(RuntimeError, match="element 0"):
        optimizer.step(closure)
    assert len(calls) == 2


def test_interrupted_forward_pass_leaves_backward_on():
    """A KeyboardInterrupt is raised before every bytecode of the forward passes in turn."""
    problem = Problem(nn.Linear(6, 3))
    optimizer = tiltsam.LineSearchSAM(sgd(problem.model.parameters()), num_points=1)
    kept = []  # as a debugger keeps the last traceback, and the frames in it

    def interrupted(number):
        left = number

        def trace(frame, event, arg):
            nonlocal left
            if not frame.f_code.co_filename.endswith(("tiltsam/passes.py", "torch/overrides.py")):
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt
            return trace

        optimizer.step(problem.closure)
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
