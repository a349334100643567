"""Cheaper steps: shared ascent, ascent on part of the batch, a part for each sample, plain steps between."""

import re
from functools import partial

import pytest
import torch
from torch import nn

import tiltsam
from helpers import reference
from helpers.cases import METHODS, Problem, assert_same, sgd
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


def losses_of_parts(problem, number):
    """The loss of each part of the batch, as functions."""
    size = len(problem.x) // number

    def on(rows):
        return lambda: nn.functional.cross_entropy(problem.model(problem.x[rows]), problem.y[rows])

    return [on(slice(i * size, (i + 1) * size)) for i in range(number)]


def closures(losses):
    def closure(loss):
        value = loss()
        value.backward()
        return value

    return [partial(closure, loss) for loss in losses]


def test_each_sample_may_have_a_part_of_the_batch():
    """Without noise and tilt: the mean over parts of SAM's gradient on each."""
    problem = Problem(nn.Linear(6, 3))
    params = list(problem.model.parameters())
    theta = [p.detach().clone() for p in params]
    expected = [torch.zeros_like(p) for p in params]
    for loss in losses_of_parts(problem, 4):
        gradient = torch.autograd.grad(loss(), params)
        length = torch.cat([g.flatten() for g in gradient]).norm()
        for p, home, g in zip(params, theta, gradient, strict=True):
            p.data = home + 0.1 * g / length
        for total, g in zip(expected, torch.autograd.grad(loss(), params), strict=True):
            total += g / 4
        for p, home in zip(params, theta, strict=True):
            p.data = home.clone()
    optimizer = tiltsam.TSAM(torch.optim.SGD(params, lr=1.0), t=0.0, rho=0.1, radius=0.0, num_samples=4)
    optimizer.step(closures(losses_of_parts(problem, 4)))
    for p, home, g in zip(params, theta, expected, strict=True):
        torch.testing.assert_close(p.detach(), home - g)
    assert (optimizer.last.num_backwards, optimizer.last.num_parts, optimizer.last.cost()) == (8, 4, 2.0)


def test_the_tilt_weighs_parts_by_their_loss():
    problem = Problem()
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), t=5.0, delta=0.0, num_samples=2, model=problem.model)
    optimizer.step(closures(losses_of_parts(problem, 2)))
    info = optimizer.info
    torch.testing.assert_close(info.weights, torch.softmax(5.0 * info.losses, 0))
    assert info.weights[0] != info.weights[1]


@pytest.mark.parametrize(
    "method", [m for m in METHODS if m.name.startswith("tsam") and "shared" not in m.name], ids=repr
)
def test_a_captured_step_splits_the_batch_by_itself(method):
    ours, twin = Problem(dropout=0.0), Problem(dropout=0.0)
    optimizer = method(sgd(ours.model.parameters()), model=ours.model)
    split = capture(
        optimizer,
        lambda x, y: nn.functional.cross_entropy(ours.model(x), y),
        (ours.x, ours.y),
        split=True,
    )
    by_hand = method(sgd(twin.model.parameters()), model=twin.model)
    number = optimizer.num_samples
    ours.x, ours.y, twin.x, twin.y = (x[: 16 // number * number] for x in (ours.x, ours.y, twin.x, twin.y))
    for _ in range(3):
        split(ours.x, ours.y)
        by_hand.step(closures(losses_of_parts(twin, number)))
    assert_same(ours.weights(), twin.weights())
    assert optimizer.last.cost() == by_hand.last.cost() == optimizer.last.num_backwards / number


@pytest.mark.parametrize(
    ("make", "number", "message"),
    [
        (partial(tiltsam.TSAM, num_samples=3), 2, "TSAM takes one, or one for each of its 3 samples; got 2 closures"),
        (tiltsam.SAM, 2, "SAM takes one, or one for each of its 1 samples; got 2 closures"),
        (tiltsam.PGN, 2, "PGN takes one; got 2 closures"),
        (partial(tiltsam.TSAM, num_samples=2, every=2), 2, "the plain steps of every=2 need one closure, got 2"),
        (partial(tiltsam.TSAM, num_samples=2, share_ascent=True), 2, "one ascent for all samples needs ascent_closure"),
        (tiltsam.TSAM, 0, "TSAM takes one, or one for each of its 1 samples; got 0 closures"),
    ],
)
def test_closures_that_do_not_fit_the_samples(make, number, message):
    problem = Problem()
    optimizer = make(sgd(problem.model.parameters()))
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizer.step([problem.closure] * number)
    optimizer.step(problem.closure)  # nothing is left behind


def test_a_split_that_cannot_be():
    problem = Problem(nn.Linear(6, 3))
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), num_samples=3)

    def loss_fn(x, y):
        return nn.functional.cross_entropy(problem.model(x), y)

    with pytest.raises(ValueError, match="leave out ascent_fraction"):
        capture(optimizer, loss_fn, (problem.x, problem.y), split=True, ascent_fraction=0.5)
    with pytest.raises(ValueError, match="a batch of 2 cannot be split among 3 samples"):
        capture(optimizer, loss_fn, (problem.x, problem.y), split=True)(problem.x[:2], problem.y[:2])
