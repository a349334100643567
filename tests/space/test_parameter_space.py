"""The parameters as one vector: frozen, unused, tied, empty, complex, mixed in dtype or device; saved and restored."""

import pytest
import torch
from torch import nn

import tiltsam
from helpers.cases import METHODS, Problem, assert_same, quadratic_problem, sgd
from helpers.passes import perturbed
from tiltsam.space.model_state import ModelState
from tiltsam.space.parameter_space import ParameterSpace
from tiltsam.space.protocol import EPS, Spread
from tiltsam.space.randomness import derive_seed

every_method = pytest.mark.parametrize("method", METHODS, ids=repr)
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def backward(loss):
    loss.backward()
    return loss


@every_method
def test_frozen_unused_and_empty_parameters(method):
    """Frozen ones are never changed; unused ones get no gradient, hence no weight decay."""
    problem = Problem()
    optimizer = method(sgd(problem.model.parameters(), weight_decay=0.1), model=problem.model)
    watched = []
    problem.model.register_forward_pre_hook(lambda m, _: watched.append(m.frozen.detach().clone()))
    for _ in range(4):
        optimizer.step(problem.closure)
    model = problem.model
    assert torch.equal(model.frozen, torch.ones(3, dtype=torch.float64))
    assert all(torch.equal(w, model.frozen) for w in watched)
    assert torch.equal(model.unused, torch.ones(5, dtype=torch.float64))
    assert model.unused.grad is None
    assert model.frozen.grad is None


def test_thawing_and_freezing_between_steps():
    problem = Problem()
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), num_samples=3, model=problem.model)
    optimizer.step(problem.closure)
    problem.model.frozen.requires_grad_(True)
    problem.model.first.weight.requires_grad_(False)
    problem.model.first.weight.grad = None
    kept, moved = problem.model.first.weight.clone(), problem.model.frozen.detach().clone()
    optimizer.step(problem.closure)
    assert torch.equal(kept, problem.model.first.weight)
    assert not torch.equal(moved, problem.model.frozen)


@every_method
def test_gradient_missing_in_some_passes(method):
    """A missing gradient counts as zero, and the parameter is restored."""
    a, b = (nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64)) for _ in range(2))
    calls = [0]

    def closure():
        calls[0] += 1
        loss = a.square().sum()
        if calls[0] % 2:
            loss = loss + b.square().sum()
        return backward(loss)

    optimizer = method(sgd([a, b], lr=0.0))
    for _ in range(4):
        optimizer.step(closure)
        assert a.tolist() == [1.0, 2.0]
        assert b.tolist() == [1.0, 2.0]


def test_tied_weights_are_perturbed_once_and_aliases_refused():
    tied = nn.Linear(4, 4, bias=False)
    model = nn.Sequential(tied, nn.Tanh(), tied)
    optimizer = tiltsam.SAM(sgd(model.parameters(), lr=0.0), rho=0.3)
    seen = []
    x = torch.randn(3, 4)

    def closure():
        seen.append(tied.weight.detach().clone())
        return backward(model(x).square().mean())

    optimizer.step(closure)
    assert (seen[1] - seen[0]).norm() == pytest.approx(0.3, rel=1e-5)
    alias = nn.Parameter(tied.weight.data)
    optimizer = tiltsam.SAM(sgd([tied.weight, alias]))
    with pytest.raises(ValueError, match=r"\(4, 4\)"):
        optimizer.step(closure)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_parameter_listed_twice_is_perturbed_once():
    p = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
    seen = []

    def closure():
        seen.append(p.detach().clone())
        return backward(p.square().sum())

    optimizer = tiltsam.TSAM(sgd([p, p], lr=0.0), rho=0.5, radius=0.0, num_samples=2)
    optimizer.step(closure)
    assert optimizer._space.dim == 2
    torch.testing.assert_close(seen[1], torch.tensor([3.3, 4.4], dtype=torch.float64))
    torch.testing.assert_close(p.grad, torch.tensor([6.6, 8.8], dtype=torch.float64))


@every_method
def test_complex_parameters_are_pairs_of_reals(method):
    """A complex parameter and its real twin follow the same trajectory."""
    torch.manual_seed(4)
    z = nn.Parameter(torch.randn(6, 1, dtype=torch.complex128))
    r = nn.Parameter(torch.view_as_real(z.detach()).clone())
    target = torch.randn(6, 1, 2, dtype=torch.float64)
    one, two = method(sgd([z])), method(sgd([r]))
    for _ in range(5):
        one.step(lambda: backward((torch.view_as_real(z) - target).pow(4).sum()))
        two.step(lambda: backward((r - target).pow(4).sum()))
    torch.testing.assert_close(torch.view_as_real(z.detach()), r.detach(), rtol=0, atol=1e-12)
    assert one._space.dim == 12


def test_complex_bias_is_one_filter():
    bias = nn.Parameter(torch.tensor([3.0 + 0.0j, 0.0j, 0.0 + 4.0j]))
    seen = []

    def closure():
        seen.append(bias.detach().clone())
        return backward(bias.abs().square().sum())

    tiltsam.RSAM(sgd([bias], lr=0.0), gamma=1e-3).step(closure)
    noise = torch.view_as_real(seen[0] - bias.detach())
    z = torch.randn(3, 2, generator=torch.Generator().manual_seed(derive_seed(0, 0, 0, 0)))
    torch.testing.assert_close(noise, 1e-3 * 5.0 * z, rtol=1e-3, atol=1e-6)  # sized by the norm of the whole: 5


@pytest.mark.filterwarnings("ignore:weights are")
def test_mixed_precision_parameters_share_one_norm():
    a = nn.Parameter(torch.full((3,), 2.0, dtype=torch.bfloat16))
    b = nn.Parameter(torch.full((4,), 2.0, dtype=torch.float64))
    seen = []

    def closure():
        seen.append((a.detach().double(), b.detach().clone()))
        return backward(a.square().sum().double() + b.square().sum())

    optimizer = tiltsam.SAM(sgd([a, b], lr=0.0), rho=1.0)
    optimizer.step(closure)
    step = 1 / 7**0.5
    torch.testing.assert_close(seen[1][1], b.detach() + step)
    torch.testing.assert_close(seen[1][0], torch.full((3,), 2 + step, dtype=torch.float64), rtol=0, atol=2**-7)
    assert a.tolist() == [2.0] * 3


@cuda
@every_method
def test_groups_on_several_devices(method):
    a = nn.Parameter(torch.linspace(1, 2, 5, dtype=torch.float64))
    b = nn.Parameter(torch.linspace(1, 2, 7, dtype=torch.float64, device="cuda"))
    both = nn.Parameter(torch.cat([a.detach(), b.detach().cpu()]))
    split = method(sgd([{"params": [a]}, {"params": [b]}]))
    split.step(lambda: backward(a.pow(4).sum() + b.pow(4).sum().cpu()))
    assert a.isfinite().all()
    assert b.isfinite().all()
    if method.name in ("erm", "sam", "asam", "esam2", "pgn"):  # no noise: must equal one device
        whole = method(sgd([both]))
        whole.step(lambda: backward(both.pow(4).sum()))
        torch.testing.assert_close(torch.cat([a, b.cpu()]), both, rtol=0, atol=1e-12)


@cuda
@every_method
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_step_does_not_synchronise(method):
    problem = Problem(dtype=torch.float32)
    problem.model.cuda()
    problem.x, problem.y = problem.x.cuda(), problem.y.cuda()
    optimizer = method(sgd(problem.model.parameters()), model=problem.model)
    optimizer.step(problem.closure)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step(problem.closure)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(p.isfinite().all() for p in problem.model.parameters())


@every_method
@pytest.mark.parametrize(
    "odd_defaults",
    [("meta", torch.float64), pytest.param(("cuda", torch.float64), marks=cuda)],
    ids=["cpu", "cuda"],
    indirect=True,
)
def test_step_ignores_default_device_and_dtype(method, odd_defaults):
    """The parameters determine device and dtype. A tensor made on ``meta`` by mistake would have no values."""
    found = []
    for odd in (False, True):
        problem = Problem(dtype=torch.float32)
        if odd_defaults[0] == "cuda":
            problem.model.cuda()
            problem.x, problem.y = problem.x.cuda(), problem.y.cuda()
        if odd:
            torch.set_default_device(odd_defaults[0])
            torch.set_default_dtype(odd_defaults[1])
        optimizer = method(sgd(problem.model.parameters()), model=problem.model)
        losses = [optimizer.step(problem.closure) for _ in range(2)]
        optimizer.load_state_dict(optimizer.state_dict())
        losses.append(optimizer.step(lambda problem=problem: problem.closure().item()))  # a float is allowed
        assert {loss.dtype for loss in losses} == {torch.float32}
        assert not optimizer.info.num_nonfinite
        found.append(problem.weights())
    assert_same(*found)


def test_no_trainable_parameters():
    theta = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = tiltsam.SAM(sgd([theta]))
    with pytest.raises(ValueError, match="requires_grad=False"):
        optimizer.step(lambda: torch.ones(()))


def test_parameters_replaced_between_steps():
    model = nn.Conv2d(4, 8, 3)
    optimizer = tiltsam.TSAM(sgd(model.parameters()), num_samples=3)
    x = torch.randn(2, 4, 8, 8)
    optimizer.step(lambda: backward(model(x).square().mean()))
    model.to(memory_format=torch.channels_last)
    optimizer.step(lambda: backward(model(x).square().mean()))
    model.weight.data = model.weight.data.clone()  # another tensor of the same shape
    before = model.weight.detach().clone()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step(lambda: backward(model(x).square().mean()))
    assert torch.equal(model.weight, before)


def test_sam_on_a_quadratic():
    """SAM on ½θᵀΛθ: the gradient at θ + ρ n(Λθ) is Λ(θ + ρ Λθ/‖Λθ‖)."""
    theta, closure = quadratic_problem()
    curvature = torch.arange(1.0, 6.0, dtype=torch.float64)
    start = theta.detach().clone()
    optimizer = tiltsam.SAM(torch.optim.SGD([theta], lr=0.1), rho=0.3)
    loss = optimizer.step(closure)
    g = curvature * start
    moved = start + 0.3 * g / g.norm()
    torch.testing.assert_close(theta.detach(), start - 0.1 * curvature * moved)
    torch.testing.assert_close(loss, 0.5 * (curvature * moved**2).sum())


class Perturbation:
    """A space over a network, and what a step may change."""

    def __init__(self):
        self.problem = Problem()
        self.model = self.problem.model
        self.space = ParameterSpace([list(self.model.parameters())], model_state=ModelState(self.model))
        self.problem.closure()  # gradients from before the step
        self.before = self.problem.weights()
        self.gradients = [p.grad for p in self.model.parameters()]
        self.values = [None if g is None else g.clone() for g in self.gradients]

    def perturb(self):
        self.space.add_noise(0, Spread(radius=torch.tensor(0.5, dtype=torch.float64)))
        self.space.ascend(self.space.evaluate(), torch.tensor(0.3, dtype=torch.float64))
        assert not torch.equal(self.model.first.weight, self.before["first.weight"])
        assert self.model.norm.num_batches_tracked == self.before["norm.num_batches_tracked"] + 1

    def assert_weights_restored(self, *, buffers):
        after = self.problem.weights()
        names = [name for name in after if buffers or name in dict(self.model.named_parameters())]
        assert_same({name: after[name] for name in names}, {name: self.before[name] for name in names})
        assert self.model.norm.track_running_stats

    def assert_gradients_restored(self):
        for p, grad, value in zip(self.model.parameters(), self.gradients, self.values, strict=True):
            assert p.grad is grad
            assert grad is None or torch.equal(grad, value)


def test_perturbed_restores_weights_and_keeps_buffers():
    step = Perturbation()
    with torch.no_grad(), perturbed(step.space, [step.problem.closure]):
        step.perturb()
    step.assert_weights_restored(buffers=False)
    assert step.model.norm.num_batches_tracked == step.before["norm.num_batches_tracked"] + 1
    step.space.roll_back()  # the step was not taken
    step.assert_weights_restored(buffers=True)
    step.assert_gradients_restored()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, torch.OutOfMemoryError])
def test_perturbed_restores_everything_on_error(error):
    step = Perturbation()

    def run():
        with torch.no_grad(), perturbed(step.space, [step.problem.closure]):
            step.perturb()
            raise error("planted")

    for _ in range(2):  # the space can be used again
        with pytest.raises(error, match="planted"):
            run()
        step.assert_weights_restored(buffers=True)
        step.assert_gradients_restored()


def test_perturbed_restores_everything_if_the_closure_raises():
    step, calls = Perturbation(), []

    def closure():
        calls.append(step.problem.closure())
        if len(calls) == 2:
            raise ZeroDivisionError
        return calls[-1]

    def run():
        with torch.no_grad(), perturbed(step.space, [closure]):
            step.perturb()
            step.space.evaluate()

    with pytest.raises(ZeroDivisionError):
        run()
    step.assert_weights_restored(buffers=True)
    step.assert_gradients_restored()


def test_assigned_gradients_survive_roll_back():
    step = Perturbation()
    with torch.no_grad(), perturbed(step.space, [step.problem.closure]):
        at = step.space.evaluate()
        step.space.gradient_mean.set(at.gradient)
    step.space.assign_gradients()
    assigned = [p.grad for p in step.space.params]
    step.space.roll_back()
    assert all(p.grad is grad for p, grad in zip(step.space.params, assigned, strict=True))
    step.assert_weights_restored(buffers=True)


@pytest.mark.parametrize("moves", [True, False])
def test_point_moves_only_during_passes(moves):
    step = Perturbation()
    with pytest.raises(RuntimeError, match="begin_passes"):
        _ = step.space.point
    with torch.no_grad(), perturbed(step.space, [step.problem.closure], moves=moves):
        if moves:
            assert any(x is step.model.first.weight for x in step.space.point)
        else:
            with pytest.raises(RuntimeError, match="begin_passes"):
                _ = step.space.point
    with pytest.raises(RuntimeError, match="begin_passes"):
        step.space.add_noise(0, Spread(radius=torch.tensor(0.5, dtype=torch.float64)))
    step.assert_weights_restored(buffers=False)


def test_closure_outside_perturbed_raises():
    step = Perturbation()
    with torch.no_grad(), perturbed(step.space, [step.problem.closure]):
        step.space.evaluate()
    with pytest.raises(RuntimeError, match="closure"):
        step.space.evaluate()


def test_unknown_setting_is_refused():
    with pytest.raises(LookupError, match="'gamma'"):
        Perturbation().space.setting("gamma")


def filter_norm(w):
    """Return the norm of each filter by a loop over slices."""
    if w.dim() < 2:
        return w.norm()
    return torch.stack([row.norm() for row in w]).view(-1, *[1] * (w.dim() - 1))


def vectors_of(*shapes):
    """Return parameters of these shapes, and a gradient."""
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes * 2]
    return [nn.Parameter(v) for v in values[: len(shapes)]], values[len(shapes) :]


def closure_leaving(params, gradient, loss=1.0):
    """Return a closure that leaves this gradient."""

    def closure():
        for p, g in zip(params, gradient, strict=True):
            p.grad = None if g is None else g.clone()
        return torch.tensor(loss)

    return closure


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("finite", [True, False])
def test_ascend_adaptive_equals_its_formula(missing, finite):
    params, gradient = vectors_of((4, 3), (5,), (2, 3, 2))
    if missing:
        gradient[1] = None
    rho, eta = 0.7, 0.01
    metric = [p.detach().abs() + eta for p in params]
    scaled = [torch.zeros_like(t) if g is None else t * g for t, g in zip(metric, gradient, strict=True)]
    length = torch.cat([x.flatten() for x in scaled]).norm() + EPS
    steps = [finite * rho * t * x / length for t, x in zip(metric, scaled, strict=True)]
    expected = [p.detach() + step for p, step in zip(params, steps, strict=True)]
    space = ParameterSpace([params])
    closure = closure_leaving(params, gradient, 1.0 if finite else torch.nan)
    with torch.no_grad(), perturbed(space, [closure]):
        space.reset_to_center()
        at = space.evaluate(ascent=True)
        space.ascend_adaptive(at, *(torch.tensor(x, dtype=torch.float64) for x in (rho, eta)))
        torch.testing.assert_close([x.detach() for x in space.point], expected, rtol=0, atol=1e-12)
        distance = torch.cat([x.flatten() for x in steps]).norm()
        torch.testing.assert_close(space.perturbation_norm(), distance, rtol=0, atol=1e-12)


def test_ascend_adaptive_with_rho_by_group():
    params, gradient = vectors_of((4, 3), (5,))
    rho, eta = torch.tensor([0.7, 0.2], dtype=torch.float64), torch.tensor(0.01, dtype=torch.float64)
    metric = [p.detach().abs() + 0.01 for p in params]
    length = torch.cat([(t * g).flatten() for t, g in zip(metric, gradient, strict=True)]).norm() + EPS
    expected = [p.detach() + r * t * t * g / length for p, r, t, g in zip(params, rho, metric, gradient, strict=True)]
    space = ParameterSpace([params[:1], params[1:]])
    with torch.no_grad(), perturbed(space, [closure_leaving(params, gradient)]):
        space.ascend_adaptive(space.evaluate(), rho, eta)
        torch.testing.assert_close([x.detach() for x in space.point], expected, rtol=0, atol=1e-12)


def test_add_filter_noise_equals_its_formula():
    params, _ = vectors_of((4, 3), (5,), (2, 3, 2, 2))
    space = ParameterSpace([params])
    space.generators.begin_step(seed=3, step=4)
    generator = torch.Generator().manual_seed(derive_seed(3, 4, 2, 0))
    expected = []
    for p in params:
        z = torch.empty_like(p).normal_(generator=generator)
        expected.append(p.detach() + 0.1 * filter_norm(p.detach()) * z)
    with torch.no_grad(), perturbed(space, [lambda: None]):
        space.add_filter_noise(2, torch.tensor(0.1, dtype=torch.float64))
        torch.testing.assert_close([x.detach() for x in space.point], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "spread", [{"radius": 0.3}, {"std": 0.2}, {"std": 0.2, "max_norm": 0.1}, {"std": 0.2, "max_norm": 100.0}], ids=str
)
def test_add_noise_equals_its_formula(spread):
    params, _ = vectors_of((4, 3), (5,))
    space = ParameterSpace([params])
    space.generators.begin_step(seed=3, step=4)
    generator = torch.Generator().manual_seed(derive_seed(3, 4, 1, 0))
    noise = [torch.empty_like(p).normal_(generator=generator) for p in params]
    norm = torch.cat([z.flatten() for z in noise]).norm()
    if "radius" in spread:
        scale = 0.3 * torch.rand((), generator=generator, dtype=torch.float64) ** (1 / 17) / norm
    else:
        scale = min(0.2, spread.get("max_norm", torch.inf) / norm)
    expected = [p.detach() + scale * z for p, z in zip(params, noise, strict=True)]
    with torch.no_grad(), perturbed(space, [lambda: None]):
        space.add_noise(1, Spread(**{name: torch.tensor(x, dtype=torch.float64) for name, x in spread.items()}))
        torch.testing.assert_close([x.detach() for x in space.point], expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(space.perturbation_norm(), scale * norm, rtol=0, atol=1e-12)
