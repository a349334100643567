"""Whole trajectories: every method against its naive twin, and the limits in which methods coincide."""

import functools

import pytest
import torch
from torch import nn

import tiltsam
from helpers import reference
from helpers.cases import METHODS, Method, Problem, assert_same, sgd
from tiltsam import samplers
from tiltsam.accumulator import Accumulator
from tiltsam.parameters import ParameterSpace

STEPS = 50


def mlp() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


TWINS = [
    (Method("erm", tiltsam.ERM), reference.erm),
    (Method("sam", tiltsam.SAM, {"rho": 0.05}), reference.sam),
    (Method("asam", tiltsam.ASAM, {"rho": 0.5}), reference.asam),
    (Method("esam2", tiltsam.LineSearchSAM, {"rho": 0.05, "num_points": 4}), reference.esam2),
    (Method("pgn", tiltsam.PGN, {"rho": 0.05, "alpha": 0.7}), reference.pgn),
    (Method("rsam", tiltsam.RSAM, {"rho": 0.05, "gamma": 0.05}), reference.rsam),
    (Method("tsam", tiltsam.TSAM, {"t": 5.0, "rho": 0.05, "radius": 0.1, "num_samples": 3}), reference.tsam),
    (
        Method(
            "tsam-shared", tiltsam.TSAM, {"t": 5.0, "rho": 0.05, "radius": 0.1, "num_samples": 3, "share_ascent": True}
        ),
        functools.partial(reference.tsam, shared=True),
    ),
    (
        Method("tsam-uniform", tiltsam.TSAM, {"t": 5.0, "radius": 0.1, "sampler": "uniform", "num_samples": 5}),
        functools.partial(reference.tsam, sampler="uniform", num_samples=5),
    ),
    (
        Method("tsam-gaussian", tiltsam.TSAM, {"t": 500.0, "radius": 0.1, "sampler": "gaussian", "num_samples": 3}),
        functools.partial(reference.tsam, t=500.0, sampler="gaussian"),
    ),
]


@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "loop"])
@pytest.mark.parametrize(("method", "twin"), TWINS, ids=[m.name for m, _ in TWINS])
def test_equals_its_naive_twin(method, twin, foreach):
    ours, theirs = Problem(mlp()), Problem(mlp())
    optimizer = method(sgd(ours.model.parameters()), foreach=foreach)
    base = sgd(theirs.model.parameters())
    params = list(theirs.model.parameters())

    def grad(at):
        outputs = torch.func.functional_call(
            theirs.model, dict(zip(dict(theirs.model.named_parameters()), at, strict=True)), (theirs.x,)
        )
        loss = nn.functional.cross_entropy(outputs, theirs.y)
        return loss.detach(), list(torch.autograd.grad(loss, at))

    for step in range(STEPS):
        optimizer.step(ours.closure)
        theta = [p.detach().clone() for p in params]
        gradient = twin(lambda at: grad([a.detach().requires_grad_() for a in at]), theta, step)
        for p, g in zip(params, gradient, strict=True):
            p.grad = g
        base.step()
    for p, q in zip(ours.model.parameters(), params, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-11)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_fused_and_plain_loop_give_the_same_numbers(method):
    a, b = Problem(dropout=0.0), Problem(dropout=0.0)
    one = method(sgd(a.model.parameters()), model=a.model, foreach=True)
    two = method(sgd(b.model.parameters()), model=b.model, foreach=False)
    for _ in range(5):
        assert torch.equal(one.step(a.closure), two.step(b.closure))
    assert_same(a.weights(), b.weights())


def third_party(params):
    import pytorch_optimizer

    return pytorch_optimizer.AdaBelief(params, lr=0.01)


BASES = {
    "sgd": sgd,
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adadelta": lambda params: torch.optim.Adadelta(params, rho=0.8),
    "third-party": third_party,
}
PLAIN = [
    Method("tsam", tiltsam.TSAM, {"rho": 0.0, "radius": 0.0, "num_samples": 1}),
    Method("sam", tiltsam.SAM, {"rho": 0.0}),
    Method("erm", tiltsam.ERM),
    Method("rsam", tiltsam.RSAM, {"rho": 0.0}),
]


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
@pytest.mark.parametrize("method", PLAIN, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_perturbation_it_is_the_base_bit_for_bit(method, base, dtype):
    ours, plain = Problem(dtype=dtype), Problem(dtype=dtype)
    wrapped, bare = method(base(ours.model.parameters())), base(plain.model.parameters())
    for problem, step in ((ours, lambda: wrapped.step(ours.closure)), (plain, lambda: bare.step())):
        torch.manual_seed(3)  # both runs draw the same dropout masks
        for _ in range(STEPS):
            if problem is plain:
                bare.zero_grad()
                plain.closure()
            step()
    assert_same(ours.weights(), plain.weights())


def test_one_sample_without_noise_is_sam_bit_for_bit():
    a, b = Problem(dropout=0.0), Problem(dropout=0.0)
    one = tiltsam.TSAM(sgd(a.model.parameters()), t=7.0, rho=0.05, radius=0.0, num_samples=1, model=a.model)
    two = tiltsam.SAM(sgd(b.model.parameters()), rho=0.05, model=b.model)
    for _ in range(STEPS):
        assert torch.equal(one.step(a.closure), two.step(b.closure))
    assert_same(a.weights(), b.weights())


@pytest.mark.filterwarnings("ignore:weights in")
def test_the_metric_of_asam_does_not_underflow():
    """T² g is below all that float16 can hold where weights and gradients are small; ρ T² g/‖Tg‖ is not."""
    theta, seen = nn.Parameter(torch.full((4,), 0.02, dtype=torch.float16)), []
    optimizer = tiltsam.ASAM(sgd([theta]), rho=0.5)

    def closure():
        seen.append(theta[0].item())
        loss = 1e-5 * theta.float().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert seen[1] - seen[0] == pytest.approx(0.5 * 0.03 / 4**0.5, rel=0.02)  # T = 0.02 + 0.01


@pytest.mark.filterwarnings("ignore:weights in")
def test_each_point_of_a_line_search_is_a_step_from_the_weights_themselves():
    """Summed up from one to the next, steps below the spacing of the numbers would lead nowhere: 1 + 2⁻⁸ is 1."""
    theta, seen = nn.Parameter(torch.ones(4, dtype=torch.bfloat16)), []
    optimizer = tiltsam.LineSearchSAM(sgd([theta]), rho=2**-2, num_points=32)

    def closure():
        seen.append(theta[0].item())
        loss = theta.float().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.testing.assert_close(torch.tensor(seen[1:-1]), 1 + 2**-8 * torch.arange(1.0, 33.0), rtol=0, atol=2**-8)
    assert seen[-1] == 1 + 2**-3  # the worst


def test_t_zero_averages_and_large_t_follows_the_worst():
    problem = Problem(mlp())
    grads = {}
    for t in (0.0, 1e6):
        optimizer = tiltsam.TSAM(sgd(problem.model.parameters(), lr=0.0), t=t, radius=0.5, num_samples=4, seed=11)
        loss = optimizer.step(problem.closure)
        losses, weights = optimizer.info.losses, optimizer.info.weights
        grads[t] = [p.grad.clone() for p in problem.model.parameters()]
        if t == 0:
            torch.testing.assert_close(loss, losses.mean())
            assert weights.tolist() == [0.25] * 4
            assert optimizer.info.effective_sample_size == 4
        else:
            assert weights.tolist() == [float(i == losses.argmax()) for i in range(4)]
            torch.testing.assert_close(loss, losses.max(), rtol=0, atol=1e-5)
    assert any(not torch.allclose(a, b) for a, b in zip(*grads.values(), strict=True))


def test_delta_moves_the_tilt_between_sampler_and_weights():
    """t with δ = t/2 weighs as t/2 with δ = 0: the authors' convention against the paper's."""
    a, b = Problem(dropout=0.0), Problem(dropout=0.0)
    one = tiltsam.TSAM(sgd(a.model.parameters()), num_samples=3, t=20.0, model=a.model)
    two = tiltsam.TSAM(sgd(b.model.parameters()), num_samples=3, t=10.0, delta=0.0, model=b.model)
    for _ in range(5):
        assert torch.equal(one.step(a.closure), two.step(b.closure))
    assert_same(a.weights(), b.weights())


@pytest.mark.parametrize("start", [samplers.Uniform(), samplers.Gaussian(clip=True)], ids=["uniform", "gaussian"])
def test_perturbations_stay_in_the_ball(start):
    problem = Problem(mlp())
    optimizer = tiltsam.TSAM(
        sgd(problem.model.parameters()), rho=0.1, radius=0.3, num_samples=20, sampler=samplers.Ascent(start)
    )
    optimizer.step(problem.closure)
    norms = optimizer.info.perturbation_norms
    assert (norms <= 0.4 + 1e-9).all()
    assert norms.min() > 0.15
    assert norms.unique().numel() == 20


@pytest.mark.parametrize("wrap", [lambda start: start, samplers.Ascent], ids=["naive", "start"])
def test_an_explicit_std_needs_no_radius(wrap):
    """The radius matters to a Gaussian only as its default spread and where it clips."""
    lengths = {}
    for start in (samplers.Gaussian(0.1), samplers.Gaussian(0.1, clip=True), samplers.Gaussian()):
        problem = Problem(mlp())
        base = sgd(problem.model.parameters())
        optimizer = tiltsam.TSAM(base, rho=0.0, radius=0.0, num_samples=20, sampler=wrap(start))
        optimizer.step(problem.closure)
        lengths[start] = optimizer.info.perturbation_norms
    drawn, clipped, default = lengths.values()
    assert drawn.square().mean().sqrt() == pytest.approx(0.1 * 83**0.5, rel=0.1)
    assert clipped.tolist() == default.tolist() == [0.0] * 20


@pytest.mark.parametrize(
    ("sampler", "method"),
    [
        (samplers.AdaptiveAscent(), tiltsam.ASAM),
        (samplers.RandomAscent(), tiltsam.RSAM),
        (samplers.CenterThenAscent(), tiltsam.PGN),
    ],
    ids=lambda x: getattr(x, "__name__", type(x).__name__),
)
def test_the_kernels_of_other_methods_are_refused(sampler, method):
    params = list(mlp().parameters())
    with pytest.raises(ValueError, match=rf"{type(sampler).__name__}\(\) .*use {method.__name__}"):
        tiltsam.TSAM(sgd(params), sampler=sampler)
    assert type(method(sgd(params)).sampler) is type(sampler)


@pytest.mark.parametrize(
    "sampler", [samplers.Center(), samplers.LineSearch(), samplers.Ascent(samplers.Center())], ids=repr
)
def test_tsam_refuses_several_samples_that_are_the_same(sampler):
    params = list(mlp().parameters())
    with pytest.raises(ValueError, match=r"num_samples .*got 3"):
        tiltsam.TSAM(sgd(params), sampler=sampler, num_samples=3)
    optimizer = tiltsam.TSAM(sgd(params), sampler=sampler, num_samples=1)
    optimizer.param_groups[0]["num_samples"] = 2
    with pytest.raises(ValueError, match=r"num_samples .*got 2"):
        optimizer.step(lambda: torch.zeros(()))


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_gradient_is_not_read_after_it_was_accumulated(method, monkeypatch):
    """Unless it is declared kept: the aggregate may overwrite the others."""

    def weights():
        problem = Problem(mlp())
        optimizer = method(sgd(problem.model.parameters()))
        for _ in range(3):
            optimizer.step(problem.closure)
        return problem.weights()

    expected = weights()
    add = Accumulator.add

    def add_and_overwrite(self, gradient, *args, keep=False, **kwargs):
        add(self, gradient, *args, keep=keep, **kwargs)
        for g in () if keep else gradient:
            g.fill_(torch.nan)

    monkeypatch.setattr(Accumulator, "add", add_and_overwrite)
    assert_same(weights(), expected)


def test_accumulator_leaves_a_kept_gradient_as_it_is():
    space = ParameterSpace([[nn.Parameter(torch.zeros(3))]])
    one, yes, no = torch.ones(()), torch.tensor(True), torch.tensor(False)
    space.accumulate([torch.ones(3)], one, yes, first=True)
    gradient = [torch.full((3,), torch.nan)]
    space.accumulate(gradient, 0 * one, no, first=False, keep=True)
    assert gradient[0].isnan().all()
    space.mean.hand_over()
    assert torch.equal(space.params[0].grad, torch.ones(3))


def test_default_radius_grows_with_the_dimension():
    model = nn.Linear(100, 100)
    optimizer = tiltsam.TSAM(sgd(model.parameters()), rho=0.0, num_samples=1)
    optimizer.step(lambda: _backward(model(torch.ones(2, 100)).square().mean()))
    assert optimizer.info.perturbation_norms.item() == pytest.approx(0.003 * 10100**0.5, rel=2e-3)


def _backward(loss):
    loss.backward()
    return loss


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_accumulating_micro_batches_equals_the_full_batch(method):
    """With a model that treats examples alike (no BatchNorm, no dropout)."""
    full, split = Problem(mlp()), Problem(mlp())
    one, two = method(sgd(full.model.parameters())), method(sgd(split.model.parameters()))

    def closure():
        total = 0.0
        for x, y in zip(split.x.chunk(4), split.y.chunk(4), strict=True):
            loss = nn.functional.cross_entropy(split.model(x), y) / 4
            loss.backward()
            total = total + loss.detach()
        return total

    for _ in range(10):
        one.step(full.closure)
        two.step(closure)
    for p, q in zip(full.model.parameters(), split.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-11)
