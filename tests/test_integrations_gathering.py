"""The first half of a step, that trainers build on."""

import ast
from pathlib import Path

import pytest
import torch

import tiltsam
from helpers.cases import METHODS, Problem, assert_same, sgd
from tiltsam.integrations.gathering import gather

ROOT = Path(tiltsam.__file__).parent


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_both_halves_are_the_step(method):
    """And the loss it tells is the first one the closure returned."""
    halves, whole = Problem(), Problem()
    a, b = (method(sgd(problem.model.parameters()), model=problem.model) for problem in (halves, whole))
    for seed in range(5):
        losses = []
        torch.manual_seed(seed)
        first = gather(a, lambda losses=losses: losses.append(halves.closure()) or losses[-1])
        a.base.step()
        torch.manual_seed(seed)
        b.step(whole.closure)
        assert torch.equal(first, losses[0])
    assert_same(halves.weights(), whole.weights())
    assert a.state_dict()["param_groups"] == b.state_dict()["param_groups"]


@pytest.mark.parametrize("name", ["sam", "pgn", "rsam", "tsam-hmc"])
def test_a_scaled_gradient_is_left_scaled(name):
    method = next(m for m in METHODS if m.name == name)
    problem, plain = Problem(), Problem()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def closure():
        loss = problem.loss()
        scaler.scale(loss).backward()
        return loss

    for p, c, s in ((problem, closure, scaler), (plain, plain.closure, None)):
        torch.manual_seed(0)
        gather(method(sgd(p.model.parameters()), model=p.model), c, s)
    for p, q in zip(problem.model.parameters(), plain.model.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad, 256 * q.grad, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("skip", "norm"), [(False, 0.0), (True, None)])
def test_a_step_without_a_finite_sample(skip, norm):
    """A gradient of zero, or none at all where the method is to skip such steps."""
    problem = Problem()
    optimizer = METHODS[1](sgd(problem.model.parameters()), model=problem.model, skip_nonfinite=skip)

    def closure():
        loss = problem.loss() * torch.nan
        loss.backward()
        return loss

    assert gather(optimizer, closure).isnan()
    gradient = problem.model.last.weight.grad
    assert (None if gradient is None else gradient.norm().item()) == norm


def test_nobody_imports_the_integrations():
    for path in ROOT.rglob("*.py"):
        if "integrations" not in path.relative_to(ROOT).parts:
            for node in ast.walk(ast.parse(path.read_text())):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                names += [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
                assert not any("integrations" in name for name in names), path
