"""Cheaper steps: shared ascent, ascent on part of the batch, looking around at every k-th step only."""

import pytest
import torch
from torch import nn

import reference
import tiltsam
from cases import METHODS, Problem, assert_same, sgd
from tiltsam.capture import capture

every_method = pytest.mark.parametrize("method", METHODS, ids=repr)


@every_method
def test_every_kth_step_looks_around_and_the_others_are_plain(method):
    ours, twin = Problem(dropout=0.0), Problem(dropout=0.0)
    optimizer = method(sgd(ours.model.parameters()), model=ours.model, every=3)
    always = method(sgd(twin.model.parameters()), model=twin.model)
    for k in range(7):
        optimizer.step(ours.closure)
        cost = (optimizer.last.num_forwards, optimizer.last.num_backwards)
        if k % 3 == 0:
            assert cost == (method.forwards, method.backwards)
            always.step(twin.closure)
        else:
            assert cost == (1, 1)
            assert optimizer.last.perturbation_norms.tolist() == [0.0]
            always.base.zero_grad()
            twin.closure()
            always.base.step()
            for group in always.param_groups:
                group["steps_taken"] += 1
    assert_same(ours.weights(), twin.weights())


def test_every_survives_a_resume():
    problem = Problem()
    optimizer = tiltsam.SAM(sgd(problem.model.parameters()), every=2)
    optimizer.step(problem.closure)
    again = tiltsam.SAM(sgd(Problem().model.parameters()))
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["every"] == 2
    with pytest.raises(ValueError, match="every must be an integer >= 1, got 0"):
        tiltsam.SAM(sgd(problem.model.parameters()), every=0)


def test_ascent_on_part_of_the_batch():
    """SAM's point is θ + ρ n(gradient on the first rows); the descent sees all of them."""
    model = nn.Linear(6, 3)
    problem = Problem(model)
    theta = [p.detach().clone() for p in model.parameters()]

    def part(rows):
        def closure():
            loss = nn.functional.cross_entropy(model(problem.x[:rows]), problem.y[:rows])
            loss.backward()
            return loss

        return closure

    def gradient(at, rows):
        at = [a.detach().requires_grad_() for a in at]
        logits = problem.x[:rows] @ at[0].T + at[1]
        return list(torch.autograd.grad(nn.functional.cross_entropy(logits, problem.y[:rows]), at))

    optimizer = tiltsam.SAM(sgd(model.parameters(), lr=0.0), rho=0.5)
    optimizer.step(part(16), ascent_closure=part(4))
    moved = reference.plus(theta, reference.unit(gradient(theta, 4)), 0.5)
    for p, g in zip(model.parameters(), gradient(moved, 16), strict=True):
        torch.testing.assert_close(p.grad, g)


@every_method
def test_a_captured_step_cuts_the_batch_by_itself(method):
    a, b = Problem(dropout=0.0), Problem(dropout=0.0)
    one, two = method(sgd(a.model.parameters()), model=a.model), method(sgd(b.model.parameters()), model=b.model)
    step = capture(two, lambda x, y: nn.functional.cross_entropy(b.model(x), y), (b.x, b.y), ascent_fraction=0.3)

    def small():
        loss = nn.functional.cross_entropy(a.model(a.x[:5]), a.y[:5])  # ⌈0.3 · 16⌉ rows
        loss.backward()
        return loss

    for _ in range(3):
        one.step(a.closure, ascent_closure=small)
        step(b.x, b.y)
    assert_same(a.weights(), b.weights())


def test_bad_fractions():
    problem = Problem()
    optimizer = tiltsam.SAM(sgd(problem.model.parameters()))
    for fraction in (0.0, 1.5):
        with pytest.raises(ValueError, match=r"ascent_fraction must be in \(0, 1\], got"):
            capture(optimizer, problem.loss, (problem.x,), ascent_fraction=fraction)
