"""The methods: signatures, trajectories against naive twins, and limits in which methods coincide."""

import functools
import inspect

import pytest
import torch
from torch import nn

import tiltsam
from helpers import reference
from helpers.cases import METHODS, Method, Problem, assert_same, backward, sgd
from tiltsam import samplers
from tiltsam.space.parameter_space import ParameterSpace

STEPS = 50
VARIANTS = ["gsam", "looksam", "friendlysam", "wsam", "usam", "momentumsam"]


def test_methods_by_name():
    papers = ["erm", "sam", "asam", "esam2", "pgn", "rsam", "tsam"]
    assert list(tiltsam.METHODS) == papers + VARIANTS
    for cls in tiltsam.METHODS.values():
        assert issubclass(cls, tiltsam.SharpnessAware)


# ---------------------------------------------------------------- signatures


class Custom(tiltsam.SAM):
    """A method of a user."""

    def __init__(self, base, *, strength=1.0, **options):
        super().__init__(base, **options)


@pytest.mark.parametrize("cls", [tiltsam.SharpnessAware, *tiltsam.METHODS.values(), Custom])
def test_signature_of_a_class_is_that_of_its_constructor(cls):
    assert list(inspect.signature(cls).parameters) == list(inspect.signature(cls.__init__).parameters)[1:]
    assert "base" in inspect.signature(cls).parameters


OPTIONS = ("model", "seed", "buffers_once", "same_dropout", "parallel", "skip_nonfinite")


@pytest.mark.parametrize("cls", tiltsam.METHODS.values(), ids=tiltsam.METHODS)
def test_arguments_after_base_are_keyword_only(cls):
    base, *others = inspect.signature(cls).parameters.values()
    assert base.name == "base"
    assert base.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert {p.kind for p in others} == {inspect.Parameter.KEYWORD_ONLY}  # no *args, no **kwargs
    assert tuple(p.name for p in others)[-len(OPTIONS) :] == OPTIONS
    params = list(mlp().parameters())
    with pytest.raises(TypeError, match=r"must be given by name, as in \w+\(base, "):
        cls(sgd(params), 0.1)
    with pytest.raises(TypeError, match="'lr'"):
        cls(sgd(params), lr=0.1)


def test_tsam_defaults():
    model = mlp()
    optimizer = tiltsam.TSAM(sgd(model.parameters()))
    group = optimizer.param_groups[0]
    assert {name: group[name] for name in ("t", "rho", "radius", "num_samples", "delta", "seed")} == {
        "t": 20.0, "rho": 0.1, "radius": None, "num_samples": 3, "delta": None, "seed": 0,
    }  # fmt: skip
    assert optimizer.sampler == samplers.Ascent()
    optimizer.step(lambda: backward(model(torch.ones(2, 6)).square().mean()))
    scalars, dim = optimizer.current_space().scalars, sum(p.numel() for p in model.parameters())
    assert scalars.tensors["sample_weight_tilt"] == scalars.tensors["delta"] == 10.0
    assert scalars.tensors["radius"].item() == pytest.approx(0.003 * dim**0.5)


# ---------------------------------------------------------------- trajectories


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
    (Method("gsam", tiltsam.GSAM, {"alpha": 0.4}), reference.gsam),
    (Method("looksam", tiltsam.LookSAM, {"rho": 0.5, "k": 3}), reference.LookSAM(rho=0.5)),
    (Method("looksam-k1", tiltsam.LookSAM, {"k": 1}), reference.sam),
    (Method("friendlysam", tiltsam.FriendlySAM), reference.FriendlySAM()),
    (Method("friendlysam-sigma0", tiltsam.FriendlySAM, {"sigma": 0.0}), reference.sam),
    (Method("wsam", tiltsam.WSAM, {"gamma": 0.7}), reference.wsam),
    (Method("wsam-half", tiltsam.WSAM, {"gamma": 0.5}), reference.sam),
    (Method("usam", tiltsam.USAM), reference.usam),
    (Method("usam-power0", tiltsam.USAM, {"power": 0.0}), reference.sam),
    (Method("usam-power2", tiltsam.USAM, {"power": 2.0}), functools.partial(reference.usam, power=2.0)),
    (Method("momentumsam", tiltsam.MomentumSAM, {"rho": 0.05}), reference.MomentumSAM()),
]


@pytest.mark.parametrize(("method", "twin"), TWINS, ids=[m.name for m, _ in TWINS])
def test_trajectory_equals_naive_twin(method, twin):
    ours, theirs = Problem(mlp()), Problem(mlp())
    optimizer = method(sgd(ours.model.parameters()))
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


def third_party(params):
    pytorch_optimizer = pytest.importorskip("pytorch_optimizer")
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
    *(Method(name, tiltsam.METHODS[name], {"rho": 0.0}) for name in ("asam", "esam2", "pgn", "rsam", *VARIANTS)),
]


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
@pytest.mark.parametrize("method", PLAIN, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_perturbation_equals_base_bitwise(method, base, dtype):
    ours, plain = Problem(dtype=dtype), Problem(dtype=dtype)
    wrapped, bare = method(base(ours.model.parameters())), base(plain.model.parameters())
    for problem, step in ((ours, lambda: wrapped.step(ours.closure)), (plain, lambda: bare.step())):
        torch.manual_seed(3)  # both runs draw the same dropout masks
        for _ in range(6):
            if problem is plain:
                bare.zero_grad()
                plain.closure()
            step()
    assert_same(ours.weights(), plain.weights())


def test_tsam_with_one_sample_without_noise_equals_sam_bitwise():
    a, b = Problem(dropout=0.0), Problem(dropout=0.0)
    one = tiltsam.TSAM(sgd(a.model.parameters()), t=7.0, rho=0.05, radius=0.0, num_samples=1, model=a.model)
    two = tiltsam.SAM(sgd(b.model.parameters()), rho=0.05, model=b.model)
    for _ in range(STEPS):
        assert torch.equal(one.step(a.closure), two.step(b.closure))
    assert_same(a.weights(), b.weights())


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


def test_t_beyond_the_range_of_the_dtype():
    problem = Problem(dtype=torch.float32)
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), num_samples=3, t=1e39, radius=0.5, model=problem.model)
    optimizer.step(problem.closure)
    assert optimizer.info.weights[optimizer.info.losses.argmax()] == 1


def test_delta_is_subtracted_from_t():
    """t with δ = t/2 gives the weights of t/2 with δ = 0: the authors' convention and the paper's."""
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


def test_default_radius():
    model = nn.Linear(100, 100)
    optimizer = tiltsam.TSAM(sgd(model.parameters()), rho=0.0, num_samples=1)
    optimizer.step(lambda: backward(model(torch.ones(2, 100)).square().mean()))
    assert optimizer.info.perturbation_norms.item() == pytest.approx(0.003 * 10100**0.5, rel=2e-3)


@pytest.mark.parametrize("wrap", [lambda start: start, samplers.Ascent], ids=["naive", "start"])
def test_gaussian_std_needs_no_radius(wrap):
    """A Gaussian uses the radius only for its default std and for clipping."""
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


@pytest.mark.filterwarnings("ignore:weights are")
def test_asam_does_not_underflow_in_float16():
    """T²g is too small for float16 if weights and gradients are small; ρ T²g/‖Tg‖ is not."""
    theta, seen = nn.Parameter(torch.full((4,), 0.02, dtype=torch.float16)), []
    optimizer = tiltsam.ASAM(sgd([theta]), rho=0.5)

    def closure():
        seen.append(theta[0].item())
        loss = 1e-5 * theta.float().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert seen[1] - seen[0] == pytest.approx(0.5 * 0.03 / 4**0.5, rel=0.02)  # T = 0.02 + 0.01


@pytest.mark.filterwarnings("ignore:weights are")
def test_line_search_does_not_add_up_rounding():
    """Each point is one step from θ: in bfloat16 many steps of 2⁻⁸ from 1 would go nowhere."""
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


@pytest.mark.parametrize(
    ("sampler", "method"),
    [
        (samplers.AdaptiveAscent(), tiltsam.ASAM),
        (samplers.RandomAscent(), tiltsam.RSAM),
        (samplers.CenterThenAscent(), tiltsam.PGN),
        (samplers.CenterThenAscent(), tiltsam.WSAM),
        (samplers.SurrogateGap(), tiltsam.GSAM),
        (samplers.ReusedAscent(), tiltsam.LookSAM),
        (samplers.FriendlyAscent(), tiltsam.FriendlySAM),
        (samplers.PowerAscent(), tiltsam.USAM),
        (samplers.MomentumAscent(), tiltsam.MomentumSAM),
    ],
    ids=lambda x: getattr(x, "__name__", type(x).__name__),
)
def test_tsam_refuses_samplers_of_other_methods(sampler, method):
    params = list(mlp().parameters())
    with pytest.raises(ValueError, match=rf"{type(sampler).__name__}.*{method.__name__}"):
        tiltsam.TSAM(sgd(params), sampler=sampler)
    assert type(method(sgd(params)).sampler) is type(sampler)


@pytest.mark.parametrize(
    "sampler", [samplers.Center(), samplers.LineSearch(), samplers.Ascent(samplers.Center())], ids=repr
)
def test_tsam_refuses_several_deterministic_samples(sampler):
    params = list(mlp().parameters())
    with pytest.raises(ValueError, match=r"num_samples .*got 3"):
        tiltsam.TSAM(sgd(params), sampler=sampler, num_samples=3)
    optimizer = tiltsam.TSAM(sgd(params), sampler=sampler, num_samples=1)
    optimizer.param_groups[0]["num_samples"] = 2
    with pytest.raises(ValueError, match=r"num_samples .*got 2"):
        optimizer.step(lambda: torch.zeros(()))


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_gradient_is_not_read_after_it_was_added_to_the_mean(method, monkeypatch):
    """Except that of the first of several samples: the mean may overwrite the others."""

    def weights():
        problem = Problem(mlp())
        optimizer = method(sgd(problem.model.parameters()))
        for _ in range(3):
            optimizer.step(problem.closure)
        return problem.weights()

    expected = weights()
    add = ParameterSpace.add_to_mean

    def add_and_overwrite(self, draw, share, *, single):
        first = self.gradient_mean.is_empty
        add(self, draw, share, single=single)
        for g in () if single or first else draw.gradient:
            g.fill_(torch.nan)

    monkeypatch.setattr(ParameterSpace, "add_to_mean", add_and_overwrite)
    assert_same(weights(), expected)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_micro_batches_equal_the_full_batch(method):
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
