"""Losses and gradients that are not finite: no weight, counted, and reported by check_nonfinite."""

import math

import pytest
import torch
from torch import nn

import tiltsam
from helpers.cases import METHODS, Problem, sgd

every_method = pytest.mark.parametrize("method", METHODS, ids=repr)


class Planted:
    """A closure with a nonfinite loss or gradient at chosen passes."""

    def __init__(self, problem, bad_passes, value=math.nan, where="loss"):
        self.problem, self.bad, self.value, self.where, self.calls = problem, bad_passes, value, where, 0

    def __call__(self):
        loss = self.problem.closure()
        bad = self.calls in self.bad
        self.calls += 1
        if bad and self.where == "loss":
            return loss.detach() * self.value
        if bad:
            for p in self.problem.model.parameters():
                if p.grad is not None and p.numel():
                    p.grad.view(-1)[0] = self.value
                    break
        return loss


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("bad", [{0}, {1}, {2}, {3}, {5}, {0, 3}, {1, 2, 4}], ids=str)
def test_nonfinite_samples_have_no_weight(bad, value, where):
    """The gradient is the aggregate of the finite samples, whichever pass of a sample was not finite."""
    problem = Problem(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    grads = {}

    class Recording(Planted):
        def __call__(self):
            loss = super().__call__()
            if self.calls % 2 == 0:
                grads[self.calls // 2 - 1] = (
                    loss.detach().clone(),
                    [p.grad.clone() for p in problem.model.parameters()],
                )
            return loss

    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), num_samples=3, t=4.0, radius=0.1)
    loss = optimizer.step(Recording(problem, bad, value, where))
    good = [j for j in range(3) if not {2 * j, 2 * j + 1} & bad]
    info = optimizer.info
    with pytest.warns(RuntimeWarning, match=f"^{3 - len(good)} samples? had"):
        optimizer.check_nonfinite()
    assert info.num_nonfinite == 3 - len(good)
    assert [j for j in range(3) if info.weights[j] > 0] == good
    assert all(p.isfinite().all() for p in problem.model.parameters())
    if good:
        weights = torch.softmax(2.0 * torch.stack([grads[j][0] for j in good]), 0)
        for i, p in enumerate(problem.model.parameters()):
            expected = sum(w * grads[j][1][i] for w, j in zip(weights, good, strict=True))
            torch.testing.assert_close(p.grad, expected, rtol=0, atol=1e-12)
        assert loss.isfinite()
    else:
        assert loss.isnan()
        assert all(p.grad.eq(0).all() for p in problem.model.parameters())


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("bad", range(8))
def test_any_nonfinite_pass_of_a_sample_counts(bad, where):
    """Three ascents and a descent a sample: passes 0 to 3, and 4 to 7."""
    problem = Problem(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    sampler = tiltsam.samplers.Ascent(num_steps=3)
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), num_samples=2, sampler=sampler)
    optimizer.step(Planted(problem, {bad}, where=where))
    with pytest.warns(RuntimeWarning, match=r"^1 sample had"):
        optimizer.check_nonfinite()
    assert optimizer.info.weights.tolist() == ([0.0, 1.0] if bad < 4 else [1.0, 0.0])


@every_method
@pytest.mark.parametrize("skip", [False, True], ids=["zero-gradient", "skip"])
def test_no_finite_sample(method, skip):
    problem = Problem()
    optimizer = method(sgd(problem.model.parameters()), model=problem.model, skip_nonfinite=skip)
    optimizer.step(problem.closure)
    before = problem.weights()
    loss = optimizer.step(lambda: problem.closure() * math.nan)
    after = problem.weights()
    with pytest.warns(RuntimeWarning, match="not finite"):
        optimizer.check_nonfinite()
    assert loss.isnan()
    assert all(value.isfinite().all() for value in after.values())
    moved = any(not torch.equal(before[k], after[k]) for k, _ in problem.model.named_parameters())
    assert moved is not skip  # momentum carries the base on, unless it is not stepped
    optimizer.step(problem.closure)
    assert all(value.isfinite().all() for value in problem.weights().values())


@pytest.mark.parametrize("skip", [False, True], ids=["zero-gradient", "skip"])
def test_sample_without_weight_is_not_descended(skip):
    """PGN with alpha=1 is SAM: the gradient at θ has no weight, even if the perturbed one is not finite."""
    theta, calls = nn.Parameter(torch.tensor([3.0, -2.0])), []

    def closure():
        calls.append(1)
        loss = theta.square().sum()
        loss.backward()
        return loss * (torch.nan if len(calls) == 2 else 1.0)

    base = sgd([theta], momentum=0.0, weight_decay=0.0)
    hits = []
    base.register_step_pre_hook(lambda *_: hits.append(1))
    optimizer = tiltsam.PGN(base, alpha=1.0, rho=0.1, skip_nonfinite=skip)
    assert optimizer.step(closure).isnan()
    assert optimizer.info.weights.tolist() == [0.0, 0.0]
    assert theta.tolist() == [3.0, -2.0]
    assert len(hits) == (0 if skip else 1)
    optimizer.step(closure)
    assert (theta.abs() < torch.tensor([3.0, 2.0])).all()


@every_method
def test_infinite_gradients_do_not_reach_the_weights(method):
    problem = Problem()
    optimizer = method(sgd(problem.model.parameters()), model=problem.model)

    def closure():
        loss = problem.closure()
        for p in problem.model.parameters():
            if p.grad is not None:
                p.grad.fill_(math.inf)
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert all(value.isfinite().all() for value in problem.weights().values())


def test_no_pass_runs_at_nonfinite_weights():
    """An ascent gradient of NaN does not move the weights."""
    problem = Problem(dropout=0.0)
    seen = []
    problem.model.register_forward_pre_hook(
        lambda model, _: seen.append(all(p.isfinite().all() for p in model.parameters()))
    )
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), num_samples=3)
    optimizer.step(Planted(problem, {0, 2, 4}, where="gradient"))
    assert len(seen) == 6
    assert all(seen)


def test_check_nonfinite_warns_once():
    problem = Problem()
    optimizer = tiltsam.SAM(sgd(problem.model.parameters()))
    optimizer.step(Planted(problem, {1}))
    _ = optimizer.info.losses  # does not warn: a warning would be an error
    with pytest.warns(RuntimeWarning, match=r"^1 sample had") as caught:
        optimizer.check_nonfinite()
    assert [w.filename for w in caught] == [__file__]
    optimizer.check_nonfinite()  # nothing new
    optimizer.step(Planted(problem, {0}))
    optimizer.step(Planted(problem, {1}))
    with pytest.warns(RuntimeWarning, match=r"^2 samples had"):
        optimizer.check_nonfinite()


@pytest.mark.parametrize("t", [0.0, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_tilts_and_losses(t, scale, dtype):
    problem = Problem(dtype=dtype)

    def closure():
        loss = problem.loss() * scale
        loss.backward()
        return loss

    optimizer = tiltsam.TSAM(sgd(problem.model.parameters(), lr=1e-6), t=t, radius=0.5, num_samples=5)
    for _ in range(3):
        assert optimizer.step(closure).isfinite()
    assert optimizer.info.num_nonfinite == 0
    assert optimizer.info.weights.sum() == pytest.approx(1.0, abs=1e-5)
    assert all(value.isfinite().all() for value in problem.weights().values())
