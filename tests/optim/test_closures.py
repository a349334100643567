"""Closures of a step: one for the ascent, or one for each sample."""

from functools import partial

import pytest
import torch
from torch import nn

import tiltsam
from helpers import reference
from helpers.cases import METHODS, Problem, assert_same, sgd


def test_ascent_closure_on_part_of_the_batch():
    """SAM's point is θ + ρ n(gradient of the first rows); the descent uses all rows."""
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


def test_closure_per_sample():
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
    assert (optimizer.info.num_backwards, optimizer.info.num_parts) == (8, 4)


def test_closure_per_sample_is_tilted():
    problem = Problem()
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), t=5.0, delta=0.0, num_samples=2, model=problem.model)
    optimizer.step(closures(losses_of_parts(problem, 2)))
    info = optimizer.info
    torch.testing.assert_close(info.weights, torch.softmax(5.0 * info.losses, 0))
    assert info.weights[0] != info.weights[1]


@pytest.mark.parametrize(
    ("make", "number", "message"),
    [
        (partial(tiltsam.TSAM, num_samples=3), 2, "TSAM .*3 samples.* 2"),
        (tiltsam.TSAM, 0, "TSAM .*3 samples.* 0"),
        (tiltsam.SAM, 2, "SAM takes one closure; got 2"),
        (tiltsam.PGN, 2, "PGN .*one closure.* 2"),
        (partial(tiltsam.TSAM, num_samples=2, share_ascent=True), 2, "ascent_closure"),
    ],
)
def test_wrong_number_of_closures(make, number, message):
    problem = Problem()
    optimizer = make(sgd(problem.model.parameters()))
    with pytest.raises(ValueError, match=message):
        optimizer.step([problem.closure] * number)
    optimizer.step(problem.closure)  # the next step works


def test_shared_ascent_with_closure_per_sample():
    problem = Problem()
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), num_samples=2, share_ascent=True, model=problem.model)
    optimizer.step(closures(losses_of_parts(problem, 2)), ascent_closure=problem.closure)
    assert (optimizer.info.num_backwards, optimizer.info.num_ascents) == (3, 1)


@pytest.mark.parametrize(
    "method", [m for m in METHODS if m.name.startswith("tsam") and "shared" not in m.name], ids=repr
)
def test_closure_per_sample_is_used_for_all_passes_of_the_sample(method):
    problem, calls = Problem(), []
    optimizer = method(sgd(problem.model.parameters()), model=problem.model)
    number = optimizer.num_samples
    optimizer.step([lambda j=j: calls.append(j) or problem.closure() for j in range(number)])
    assert calls == [j for j in range(number) for _ in range(method.forwards // number)]


@pytest.mark.filterwarnings("ignore:Profiler")
@pytest.mark.parametrize("make", [tiltsam.SAM, tiltsam.TSAM, tiltsam.LookSAM], ids=lambda make: make.__name__)
def test_compiled_train_step_equals_the_eager_one(make):
    torch._dynamo.reset()
    eager, compiled = Problem(), Problem()

    def trainer(problem):
        optimizer = make(sgd(problem.model.parameters()), rho=0.5, model=problem.model)
        return lambda: optimizer.step(problem.closure)

    steps = trainer(eager), torch.compile(trainer(compiled), backend="eager")
    for seed in range(3):
        for step in steps:
            torch.manual_seed(seed)
            step()
    assert_same(eager.weights(), compiled.weights())
