"""BatchNorm's statistics move once a step, dropout keeps one mask; only with ``model=``, and both can be turned off."""

import pytest
import torch
from torch import nn

import tiltsam
from cases import METHODS, Problem, sgd

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
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), model=problem.model)
    for k in range(3):
        optimizer.step(problem.closure)
        assert problem.model.calls == k + 1


def test_a_model_in_eval_mode_stays_as_it_is():
    problem = Problem()
    problem.model.eval()
    before = {k: v.clone() for k, v in problem.model.named_buffers()}
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), model=problem.model)
    optimizer.step(problem.closure)
    assert not problem.model.training
    assert all(torch.equal(v, before[k]) for k, v in problem.model.named_buffers())
