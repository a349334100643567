"""BatchNorm statistics and dropout masks across the passes of a step."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import tiltsam
from helpers.cases import METHODS, Problem, sgd
from tiltsam.space.model_state import ModelState

every_method = pytest.mark.parametrize("method", METHODS, ids=repr)
SAM = tiltsam.SAM


@every_method
def test_batchnorm_is_updated_once_at_the_first_pass(method):
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
    if method.name in ("erm", "sam", "asam", "esam2", "pgn", "tsam-shared"):  # their first pass is at θ
        single.closure()
        assert torch.equal(norm.running_mean, single.model.norm.running_mean)


@pytest.mark.parametrize("options", [{"model": None}, {"buffers_once": False}])
def test_batchnorm_is_updated_at_every_pass_without_model_or_by_option(options):
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
    assert not torch.equal(masks_of(problem, optimizer)[0], masks[0])  # a new one at the next step


@pytest.mark.parametrize("same", [True, False])
def test_same_dropout_needs_no_model(same):
    problem = Problem()
    optimizer = SAM(sgd(problem.model.parameters()), same_dropout=same)
    masks = masks_of(problem, optimizer)
    assert torch.equal(masks[0], masks[1]) == same


@every_method
def test_global_random_state_advances_by_one_pass(method):
    problem = Problem()
    optimizer = method(sgd(problem.model.parameters()), model=problem.model)
    torch.manual_seed(8)
    optimizer.step(problem.closure)
    after = torch.get_rng_state()
    torch.manual_seed(8)
    problem.loss()
    assert torch.equal(after, torch.get_rng_state())


def test_other_buffers_are_updated_once():
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


def test_model_in_eval_mode_is_not_changed():
    problem = Problem()
    problem.model.eval()
    before = {k: v.clone() for k, v in problem.model.named_buffers()}
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), num_samples=3, model=problem.model)
    optimizer.step(problem.closure)
    assert not problem.model.training
    assert all(torch.equal(v, before[k]) for k, v in problem.model.named_buffers())


class Tracking(nn.BatchNorm1d):
    """Updates its statistics whatever ``track_running_stats`` is."""

    def forward(self, x):
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


@pytest.mark.parametrize("patched", [False, True])
def test_batchnorm_with_its_own_forward_is_updated_once(patched):
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
def test_scripted_model_is_updated_once():
    plain = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    problem = Problem(torch.jit.script(plain), dtype=torch.float32)
    optimizer = SAM(sgd(problem.model.parameters()), model=problem.model)
    for k in range(2):
        optimizer.step(problem.closure)
        assert problem.model.state_dict()["1.num_batches_tracked"] == k + 1


class Reassigning(nn.Module):
    """Assigns another tensor to its buffer in each pass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("sparse", torch.eye(3).to_sparse_csr())

    def forward(self, x):
        self.calls = self.calls + 1
        return self.layer(x)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_reassigned_buffers_are_updated_once_and_restored():
    problem = Problem(Reassigning(), dtype=torch.float32)
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), num_samples=3, model=problem.model)
    for k in range(3):
        optimizer.step(problem.closure)
        assert problem.model.calls == k + 1
    answers = iter([problem.closure, problem.closure, problem.loss])  # the third leaves no gradient
    with pytest.raises(RuntimeError, match="gradient"):
        optimizer.step(lambda: next(answers)())
    assert problem.model.calls == 3


class Interrupted(nn.BatchNorm1d):
    """Raises when its statistics are paused or resumed for the n-th time."""

    left = -1

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "track_running_stats":
            Interrupted.left -= 1
            if Interrupted.left == 0:
                raise self.signal


@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("moment", range(1, 7))
def test_interrupt_leaves_no_layer_paused(moment, signal):
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


def test_autocast_around_the_step_uses_the_perturbed_weights():
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
        return [*optimizer.info.start_losses, *optimizer.info.losses, again.detach()]

    outer, inner = losses(around=True), losses(around=False)
    assert outer[1] > 1.2 * outer[0]
    assert outer[:2] == inner[:2]
    torch.testing.assert_close(outer[2], inner[2], rtol=0.01, atol=0.0)


class Counting(nn.Module):
    """Counts its passes in a buffer, or reassigns that buffer in each pass."""

    def __init__(self, reassigns):
        super().__init__()
        self.reassigns = reassigns
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if self.reassigns:
            self.count = self.count + 1
        else:
            self.count += 1
        return x


@pytest.mark.parametrize("reassigns", [False, True])
def test_changes_other_buffers(reassigns):
    for layer, changes in ((nn.BatchNorm1d(4), False), (Counting(reassigns), True)):
        model = nn.Sequential(nn.Linear(4, 4), layer)
        model.register_buffer("constant", torch.ones(3))
        optimizer = tiltsam.TSAM(torch.optim.SGD(model.parameters(), lr=0.1), num_samples=3, model=model)

        def closure(model=model):
            loss = model(torch.ones(8, 4)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        assert optimizer.current_space().model_state.changes_other_buffers() is changes


def test_roll_back_restores_buffers_and_may_be_repeated():
    layer = Counting(reassigns=True)
    before = layer.count
    state = ModelState(layer)
    state.begin_step()
    state.begin_pass()
    layer(torch.ones(1))
    state.end_pass()
    state.end_step()
    assert layer.count == 1
    for _ in range(2):
        state.roll_back()
        assert layer.count is before
        assert layer.count == 0


def test_buffer_whose_data_is_replaced_moves_once_a_step():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 1)
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            self.count.data = self.count.data + 1
            return self.linear(x)

    model = Counting()
    optimizer = tiltsam.SAM(sgd(model.parameters()), model=model)

    def closure():
        loss = model(torch.ones(3, 2)).square().mean()
        loss.backward()
        return loss

    for step in range(1, 4):
        optimizer.step(closure)
        assert model.count.item() == step
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: closure() / (1 if model.count.item() < 4 else 1 / 0))
    assert model.count.item() == 3
