"""Parameters of every kind: frozen, unused, tied, empty, complex, mixed in dtype or device, coming and going."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tiltsam
from helpers import reference
from helpers.cases import METHODS, Problem, assert_same, quadratic_problem, sgd
from tiltsam import fused, vectors
from tiltsam.parameters import ParameterSpace
from tiltsam.samplers import Draw
from tiltsam.space import Evaluation, Spread
from tiltsam.streams import Streams, stream_seed

every_method = pytest.mark.parametrize("method", METHODS, ids=repr)
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def backward(loss):
    loss.backward()
    return loss


@every_method
def test_frozen_unused_and_empty_parameters(method):
    """Frozen ones are never touched; unused ones get no gradient, hence no weight decay; nothing is left behind."""
    problem = Problem()
    optimizer = method(sgd(problem.model.parameters(), weight_decay=0.1), model=problem.model)
    watched = []
    problem.model.register_forward_pre_hook(lambda m, _: watched.append(m.frozen.detach().clone()))
    for _ in range(50):
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
def test_a_gradient_in_one_pass_and_none_in_the_next(method):
    """The missing gradient counts as zero, and the parameter comes back to where it was."""
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


def test_missing_gradients_count_as_zero_in_the_mean():
    theta = [nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(3)]
    calls = [0]

    def closure():  # three samples without ascent: b joins in the second, c leaves after the first
        j = calls[0]
        calls[0] += 1
        used = [theta[0]] + ([theta[1]] if j == 1 else []) + ([theta[2]] if j == 0 else [])
        for p in used:
            p.grad = torch.full_like(p, 3.0)
        return torch.ones(())

    optimizer = tiltsam.TSAM(sgd(theta, lr=0.0), t=0.0, rho=0.0, num_samples=3)
    optimizer.step(closure)
    assert [p.grad.item() for p in theta] == pytest.approx([3.0, 1.0, 1.0])


def test_tied_weights_are_one_and_aliased_ones_are_refused():
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
    with pytest.raises(ValueError, match=r"two parameters of shape \(4, 4\) share memory"):
        optimizer.step(closure)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_is_listed_twice_is_perturbed_once():
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
def test_gradients_that_share_memory_count_as_they_are(method):
    """Autograd gives two parameters views of one buffer where they enter a sum reshaped."""

    def trained(apart):
        torch.manual_seed(4)
        a, b = (nn.Parameter(torch.randn(6, dtype=torch.float64)) for _ in range(2))
        optimizer = method(sgd([a, b], lr=0.1))

        def closure():
            loss = backward((a.view(2, 3) + b.view(2, 3)).sin().square().sum())
            if a.grad is not None:  # a forward pass alone leaves none
                assert a.grad.data_ptr() == b.grad.data_ptr()
                a.grad = a.grad.clone() if apart else a.grad
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return torch.stack([a, b])

    torch.testing.assert_close(trained(apart=False), trained(apart=True), rtol=0, atol=1e-12)


@every_method
def test_complex_parameters_are_pairs_of_reals(method):
    """A complex vector and its real twin follow the same path."""
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_half_precision_are_not_rounded_away(dtype):
    """1e-4 squared is below all that float16 can hold: HMC would take a path along the sphere for one at its centre."""
    x = [torch.full((1000,), 1e-4, dtype=dtype), torch.linspace(-1, 1, 64, dtype=dtype)]
    exact = sum(a.double().square().sum() for a in x)
    torch.testing.assert_close(vectors.dot(x[:1], x[:1], torch.float32), x[0][0].float().square() * 1000)
    torch.testing.assert_close(vectors.dot(x, x, torch.float32).double(), exact, rtol=1e-6, atol=0)


def test_a_complex_bias_is_one_filter():
    bias = nn.Parameter(torch.tensor([3.0 + 0.0j, 0.0j, 0.0 + 4.0j]))
    seen = []

    def closure():
        seen.append(bias.detach().clone())
        return backward(bias.abs().square().sum())

    tiltsam.RSAM(sgd([bias], lr=0.0), gamma=1e-3).step(closure)
    noise = torch.view_as_real(seen[0] - bias.detach())
    z = torch.randn(3, 2, generator=torch.Generator().manual_seed(stream_seed(0, 0, 0)))
    torch.testing.assert_close(noise, 1e-3 * 5.0 * z, rtol=1e-3, atol=1e-6)  # sized by the norm of the whole: 5


@pytest.mark.filterwarnings("ignore:weights in")
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
def test_no_synchronisation_on_a_gpu(method):
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
def test_torchs_defaults_for_new_tensors_change_nothing(method, odd_defaults):
    """Parameters say where numbers lie and how precise they are. What is made on ``meta`` by mistake has no values."""
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
        losses.append(optimizer.step(lambda problem=problem: problem.closure().item()))  # a number will do
        assert {loss.dtype for loss in losses} == {torch.float32}
        assert not optimizer.info.num_nonfinite
        found.append(problem.weights())
    assert_same(*found)


@pytest.mark.parametrize("odd_defaults", [("meta", torch.float64)], indirect=True)
def test_fused_kernels_get_float32_whatever_torchs_defaults(odd_defaults, monkeypatch):
    """They are compiled for what they get, and add up in float32; addresses come from the host."""
    given = []

    class Recorder:
        def __getattr__(self, name):
            return self

        def __getitem__(self, grid):
            return lambda *args, **options: given.extend(x for x in args if isinstance(x, torch.Tensor))

    monkeypatch.setattr(fused, "kernels", Recorder())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    like, loss, finite = torch.zeros(5), torch.zeros(()), torch.tensor(True)
    torch.set_default_device(odd_defaults[0])
    torch.set_default_dtype(odd_defaults[1])
    kernels = fused.FusedVectors([like])
    tables = kernels.named("point", [like]), kernels.named("center", [like])
    assert kernels.table([like]).tolist() == [like.data_ptr()]
    at = Evaluation(loss, [like], *kernels.evaluate(kernels.table([like]), loss, None))
    kernels.climb(*tables, kernels.table([like]), loss, at, backup=False)
    for spread in (Spread(radius=loss), Spread(std=loss), Spread(std=loss, longest=loss)):
        scale, _ = kernels.noise_scale(loss, 0, spread, ahead=False)
    kernels.noise_move(*tables, loss, 0, scale, backup=False)
    kernels.ledger(loss, 1).add(Draw(loss, [like], loss, finite, loss), loss)
    kernels.reserve(1)
    assert {x.dtype for x in given if x.is_floating_point()} == {torch.float32}
    assert {x.device.type for x in given} == {"cpu"}


def test_several_blocks_equal_one():
    """What several devices come down to: the vector cut into blocks gives the numbers of the whole."""
    whole = [torch.randn(n, dtype=torch.float64) for n in (3, 4, 5)]
    params = [nn.Parameter(w.clone()) for w in whole]
    one = ParameterSpace([params])
    many = ParameterSpace([params])
    many._blocks = many._group_blocks = [type(b)(b.device, (i,), 0) for b in one._blocks for i in b.indices]
    torch.testing.assert_close(one.norm(whole), many.norm(whole))
    torch.testing.assert_close(one.dot(whole, params), many.dot(whole, params))
    assert many.norm(whole) == pytest.approx(reference.norm(whole).item())


def test_a_stretch_takes_no_more_kernels_for_more_tensors():
    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    counts = []
    for number in (1, 20):
        space = ParameterSpace([[nn.Parameter(torch.full((2,), -3.0)) for _ in range(number)]], foreach=True)
        x = [torch.ones(2) for _ in range(number)]
        with torch.no_grad(), Counting() as kernels:
            space.stretch_(x, space.center, torch.tensor(0.5))
        assert torch.cat(x).eq(3.5).all()
        counts.append(kernels.count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "loop"])
@pytest.mark.parametrize("chosen", [True, False])
def test_choosing_between_vectors_with_missing_tensors(chosen, foreach):
    """What is missing on one side is zero there; what is missing on both stays missing."""
    space = ParameterSpace([[nn.Parameter(torch.ones(2)) for _ in range(4)]], foreach=foreach)
    x = [torch.full((2,), 3.0), None, torch.full((2,), torch.nan), None]
    y = [torch.full((2,), 5.0), torch.full((2,), 7.0), None, None]
    space.select_(x, y, torch.tensor(chosen))
    assert x[3] is None
    expected = [5.0, 7.0, 0.0] if chosen else [3.0, 0.0, torch.nan]
    for a, value in zip(x, expected, strict=False):
        torch.testing.assert_close(a, torch.full((2,), value), rtol=0, atol=0, equal_nan=True)


class OnGpu(torch.Tensor):
    """Says that it lies on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("kind", [torch.Tensor, OnGpu])
def test_a_copy_that_counts_nothing_leaves_the_gradient_alone(kind):
    """PGN climbs along the gradient at θ after that was added to the mean, with weight 0 if ``alpha`` is 1."""
    mean, gradient = (torch.full((3,), x).as_subclass(kind) for x in (1.0, math.nan))
    for kept in (False, True):
        vectors.keep_copy_([mean], [gradient], torch.tensor(kept))
        assert gradient.isnan().all()
        assert mean.isnan().all() if kept else (mean == 0).all()


@every_method
@pytest.mark.parametrize(
    "loss_of",
    [lambda w: 2 * w.sum(), lambda w: (torch.complex(torch.zeros_like(w), w).conj() + 3j).abs().square().sum()],
    ids=["expanded", "negative bit"],
)
def test_gradients_that_autograd_did_not_write_itself_count_as_they_are(method, loss_of):
    """What ``autograd.grad`` returns may be one number seen in many places, or the negative of what lies in memory."""
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64)) for _ in range(2))

    def by_hand():
        loss = loss_of(ours)
        (ours.grad,) = torch.autograd.grad(loss, ours)
        assert ours.grad.is_neg() or ours.grad.stride() == (0,)
        return loss.detach()

    one, two = method(sgd([ours])), method(sgd([theirs]))
    for _ in range(2):
        one.step(by_hand)
        two.step(lambda: backward(loss_of(theirs)))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_gradients_of_another_dtype_are_refused():
    """They would be read bit by bit as what they are not."""
    theta = nn.Parameter(torch.ones(3))
    theta.grad_dtype = torch.float64
    with pytest.raises(
        TypeError, match=r"the dtype of its parameter, torch\.float32, got torch\.float64: .*grad_dtype"
    ):
        tiltsam.ERM(sgd([theta])).step(lambda: backward(theta.double().square().sum()))
    assert theta.tolist() == [1.0] * 3


def test_sparse_gradients_are_refused():
    table = nn.Embedding(10, 3, sparse=True)
    optimizer = tiltsam.SAM(sgd(table.parameters(), momentum=0.0, weight_decay=0.0))
    with pytest.raises(TypeError, match=r"gradients must be dense.*sparse=False"):
        optimizer.step(lambda: backward(table(torch.tensor([1, 2])).sum()))


def test_nothing_trainable():
    theta = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = tiltsam.SAM(sgd([theta]))
    with pytest.raises(ValueError, match="no trainable parameters"):
        optimizer.step(lambda: torch.ones(()))


def test_moving_the_model_and_changing_its_layout_between_steps():
    model = nn.Conv2d(4, 8, 3)
    optimizer = tiltsam.TSAM(sgd(model.parameters()), num_samples=3)
    x = torch.randn(2, 4, 8, 8)
    optimizer.step(lambda: backward(model(x).square().mean()))
    model.to(memory_format=torch.channels_last)
    optimizer.step(lambda: backward(model(x).square().mean()))
    model.weight.data = model.weight.data.clone()  # swapped behind our back, same shape
    before = model.weight.detach().clone()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step(lambda: backward(model(x).square().mean()))
    assert torch.equal(model.weight, before)


def test_streams_of_noise_differ():
    seeds = {
        stream_seed(seed, step, sample, place)
        for seed in range(4)
        for step in range(20)
        for sample in range(5)
        for place in range(2)
    }
    assert len(seeds) == 4 * 20 * 5 * 2
    assert all(0 <= s < 2**63 for s in seeds)


def test_streams_do_not_depend_on_the_number_of_the_device():
    """One process a GPU, each on a device of another number: they have to draw the same."""
    ranks = [Streams([torch.device("cuda", i), torch.device("cpu")]) for i in range(2)]
    assert ranks[0]._seed(3, torch.device("cuda", 0)) == ranks[1]._seed(3, torch.device("cuda", 1))
    assert ranks[0]._seed(3, torch.device("cuda", 0)) != ranks[0]._seed(3, torch.device("cpu"))


def test_the_centre_outside_a_step_is_where_the_weights_are():
    theta, closure = quadratic_problem()
    optimizer = tiltsam.SAM(torch.optim.SGD([theta], lr=0.1), rho=0.3)
    optimizer.step(closure)
    assert torch.equal(optimizer.current_space().center[0], theta.detach())


def test_a_quadratic_by_hand():
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
