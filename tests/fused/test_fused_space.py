"""The Triton kernels equal torch's operations: on a CUDA device, or on a CPU in Triton's interpreter."""

import copy
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from helpers.cases import METHODS, sgd
from helpers.passes import perturbed
from tiltsam.fused import fused_space, parameter_space
from tiltsam.fused.fused_space import FusedSpace, ReservedTables
from tiltsam.graphs import capture
from tiltsam.optim import sharpness_aware
from tiltsam.samplers import Draw, draw_at
from tiltsam.space.parameter_space import ParameterSpace
from tiltsam.space.protocol import Spread
from tiltsam.space.step_record import unpack
from tiltsam.tilting import StreamingTilt

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
cuda = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
BY_NAME = {method.name: method for method in METHODS}
SHAPES = [(64, 33), (64,), (8, 4, 3, 3), (9000,), (1,)]  # a program processes 4096 elements
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


@pytest.fixture(autouse=True)
def _interpreter():
    if DEVICE == "cuda":
        yield
        return
    from helpers.interpreter import interpreted  # needs Triton

    with interpreted():
        yield


def random_vectors(number, seed=0, device=DEVICE):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=generator).to(device) for shape in SHAPES] for _ in range(number)]


def scalar(value):
    return torch.tensor(value, device=DEVICE)


def with_value(gradient, value):
    """Return a copy of a gradient whose last element of the largest tensor is ``value``."""
    found = [g.clone() for g in gradient]
    found[3][-1] = value
    return found


def run(cls, action, passes):
    """Return ``action(space)`` in a space whose passes return the given losses and gradients."""
    params = [nn.Parameter(x) for x in random_vectors(1, seed=9)[0]]
    remaining = iter(passes)

    def closure():
        loss, gradient = next(remaining)
        for p, g in zip(params, gradient, strict=True):
            p.grad = None if g is None else g.clone()
        return scalar(loss)

    space = cls([params])
    with torch.no_grad(), perturbed(space, [closure]):
        return action(space)


def assert_spaces_agree(action, passes):
    found, expected = run(FusedSpace, action, passes), run(ParameterSpace, action, passes)
    torch.testing.assert_close(found, expected, equal_nan=True, **CLOSE)


def point_of(space):
    return [x.detach().clone() for x in space._point]


def move(space):
    """Move the point away from θ."""
    for x, offset in zip(space.point, random_vectors(1, seed=11)[0], strict=True):
        x.add_(offset, alpha=0.1)


def test_parameter_space_chooses_torch_on_a_cpu():
    assert type(parameter_space([[nn.Parameter(torch.ones(3))]])) is ParameterSpace


@cuda
@pytest.mark.slow
def test_kernels_count_beyond_32_bits():
    """Three billion weights: noise, ascent and their norms reach the last tensor, and noise does not repeat."""
    numbers = [2**30, 2**30, 2**30, 2**16]
    if torch.cuda.mem_get_info()[0] < 5 * 4 * sum(numbers):
        pytest.skip("needs 65 GB of GPU memory")
    params = [nn.Parameter(torch.zeros(n, device="cuda")) for n in numbers]
    assert FusedSpace.supports([params])

    def closure():
        for p in params:
            p.grad = torch.ones_like(p)
        return scalar(1.0)

    space = FusedSpace([params])
    with torch.no_grad(), perturbed(space, [closure]):
        space.generators.begin_step(0, 0)
        space.add_noise(0, Spread(radius=scalar(7.0)))
        distance = space.perturbation_norm()
        parts = torch.stack([torch.linalg.vector_norm(p) for p in params])
        torch.testing.assert_close(torch.linalg.vector_norm(parts), distance, rtol=1e-4, atol=0)
        share = parts.square() / parts.square().sum() * sum(numbers)
        torch.testing.assert_close(share, torch.tensor(numbers, device="cuda"), rtol=0.03, atol=0, check_dtype=False)
        tails = [p[:65536] for p in params]
        assert len({float(x.sum()) for x in tails}) == len(tails)
        space.reset_to_center()
        space.ascend(space.evaluate(ascent=True), scalar(3.0))
        torch.testing.assert_close(space.perturbation_norm(), scalar(3.0), rtol=1e-4, atol=0)
        assert all(float((p[-1] - params[0][0]).abs()) < 1e-9 for p in params)
        assert float(params[-1][-1]) > 0


@cuda
def test_parameter_space_chooses_the_kernels_if_they_fit():
    def choice(*tensors):
        return type(parameter_space([[nn.Parameter(x) for x in tensors]]))

    assert choice(torch.ones(3, device="cuda")) is FusedSpace
    assert choice(torch.ones(3, 4, 2, 2, device="cuda").to(memory_format=torch.channels_last)) is FusedSpace
    assert choice(torch.ones(3, device="cuda", dtype=torch.float64)) is ParameterSpace
    assert choice(torch.ones(3, device="cuda"), torch.ones(3)) is ParameterSpace
    assert choice(torch.ones(4, 6, device="cuda")[:, ::2]) is ParameterSpace
    assert choice(torch.ones(5, device="cuda")[1:]) is ParameterSpace  # not aligned


@pytest.mark.parametrize(
    ("loss", "value", "before"),
    [
        (1.0, 2.0, None),
        (1.0, torch.nan, None),
        (1.0, torch.inf, None),
        (torch.nan, 2.0, None),
        (-torch.inf, 2.0, None),
        (1.0, 2.0, 1.0),
        (1.0, 2.0, torch.nan),
    ],
)
def test_norm_if_finite(loss, value, before):
    (gradient,) = random_vectors(1)
    passes = [] if before is None else [(before, gradient)]
    passes.append((loss, with_value(gradient, value)))

    def action(space):
        after = None if before is None else space.evaluate()
        at = space.evaluate(after=after)
        assert not isinstance(space, FusedSpace) or space._gradient_table is not None
        return [at.loss, at.norm, at.finite]

    assert_spaces_agree(action, passes)


def test_norm_if_finite_with_missing_gradient():
    (gradient,) = random_vectors(1)
    gradient[1] = None

    def action(space):
        at = space.evaluate()
        return [at.norm, at.finite]

    assert_spaces_agree(action, [(1.0, gradient)])


@pytest.mark.parametrize("value", [2.0, torch.nan])
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("missing", [False, True])
def test_ascend(value, moved, missing):
    gradient = with_value(random_vectors(1)[0], value)
    if missing:
        gradient[1] = None

    def action(space):
        if moved:
            move(space)
        before = point_of(space)
        space.ascend(space.evaluate(), scalar(0.3))
        after = point_of(space)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) == (value != 2.0)
        return [*after, space.perturbation_norm()]

    assert_spaces_agree(action, [(1.0, gradient)])


@pytest.mark.parametrize("value", [2.0, torch.nan])
@pytest.mark.parametrize("moved", [False, True])
def test_ascend_adaptive(value, moved):
    gradient = with_value(random_vectors(1)[0], value)

    def action(space):
        if moved:
            move(space)
        before = point_of(space)
        space.ascend_adaptive(space.evaluate(), scalar(0.5), scalar(0.01))
        after = point_of(space)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) == (value != 2.0)
        return [*after, space.perturbation_norm()]

    assert_spaces_agree(action, [(1.0, gradient)])


@pytest.mark.parametrize(
    "shares",
    [(1.0, 0.5, 0.25), (1.0, 0.0, 0.4), (0.0, 1.0, 0.25), (0.0, 0.0, 1.0), (0.0, 0.0, 0.0)],
    ids=str,
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3.0])
def test_mean_with_nan_gradients_and_zero_shares(shares, value):
    """A gradient with share 0 is not finite, or finite and without weight."""
    gradients = random_vectors(4)
    passes = [(1.0, gradients[3])]
    passes += [(1.0, with_value(g, value if share == 0 else 2.0)) for g, share in zip(gradients, shares, strict=False)]

    def action(space):
        add = space.add_to_mean
        add(draw_at(space.evaluate()), scalar(1.0), single=False)  # the mean of an earlier step is in the memory
        space.gradient_mean.begin_step()
        for share in shares:
            add(draw_at(space.evaluate()), scalar(share), single=False)
        return [mean.clone() for mean in space.gradient_mean.tensors]

    assert_spaces_agree(action, passes)


def test_mean_with_gradients_missing_in_some_samples():
    gradients = random_vectors(3)
    gradients[0][1] = gradients[1][0] = gradients[1][1] = None

    def action(space):
        for share in (1.0, 0.5, 1 / 3):
            space.add_to_mean(draw_at(space.evaluate()), scalar(share), single=False)
        return [mean.clone() for mean in space.gradient_mean.tensors]

    assert_spaces_agree(action, [(1.0, g) for g in gradients])


def test_mean_of_one_sample_is_the_gradient_itself():
    (gradient,) = random_vectors(1)

    def action(space):
        at = space.evaluate()
        addresses = [g.data_ptr() for g in at.gradient]
        space.add_to_mean(draw_at(at), scalar(1.0), single=True)
        assert [mean.data_ptr() for mean in space.gradient_mean.tensors] == addresses
        return list(space.gradient_mean.tensors)

    assert_spaces_agree(action, [(1.0, gradient)])


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("value", [2.0, torch.nan, torch.inf])
def test_zero_unless(mask, value):
    gradient = with_value(random_vectors(1)[0], value)

    def action(space):
        at = space.evaluate()
        space.zero_unless_(at.gradient, scalar(mask))
        assert mask or not any(g.any() for g in at.gradient)
        return [g.clone() for g in at.gradient]

    assert_spaces_agree(action, [(1.0, gradient)])


@pytest.mark.parametrize("tilt", [None, 0.0, 1e-4, 2.0, 20.0])
@pytest.mark.parametrize(
    "losses",
    [[1.0], [torch.nan], [1.0, 1.3, 0.9], [torch.nan, 1.3, 0.9], [1.0, torch.inf, 1.2], [torch.nan] * 3],
    ids=str,
)
def test_step_record(tilt, losses):
    if tilt is None and len(losses) > 1:
        pytest.skip("several samples have weights")

    def action(space):
        if tilt is None and isinstance(space, FusedSpace):
            space.tables = ReservedTables(space.device, 1, len(SHAPES))  # as in a capture: else torch's record is used
        record = space.step_record(None if tilt is None else StreamingTilt(scalar(tilt)), len(losses))
        assert isinstance(space, FusedSpace) == isinstance(record, fused_space._FusedRecord)
        shares = []
        for j, loss in enumerate(scalar(losses)):
            draw = Draw(loss, None, scalar(2.0 + j), torch.isfinite(loss), scalar(0.5 + j))
            shares.append(record.add(draw, scalar(0.1 + j)).float())
        loss, table = record.loss(), record.table()
        packed_loss, packed_table = unpack(record.pack())
        return [*shares, loss, packed_loss, table, packed_table]

    assert_spaces_agree(action, [])


@pytest.mark.parametrize("spread", [{"radius": 0.3}, {"std": 0.2}, {"std": 0.2, "max_norm": 1.0}], ids=str)
def test_add_noise_has_the_distance_it_reports(spread):
    def action(space):
        space.generators.begin_step(seed=3, step=4)
        space.add_noise(1, Spread(**{name: scalar(x) for name, x in spread.items()}))
        gap = torch.cat([(x - c).flatten() for x, c in zip(space._point, space._center, strict=True)])
        torch.testing.assert_close(space.perturbation_norm(), gap.norm(), rtol=1e-5, atol=1e-6)
        return gap.norm().item(), gap.std().item()

    norm, std = run(FusedSpace, action, [])
    if "radius" in spread:
        assert 0.299 < norm < 0.3001  # U^(1/d) is nearly 1
    elif "max_norm" in spread:
        assert norm == pytest.approx(1.0, rel=1e-4)
    else:
        assert std == pytest.approx(0.2, rel=0.03)


def filter_noise(params, *, seed, step, sample, gamma):
    """Return ε of add_filter_noise."""
    space = FusedSpace([params])
    space.generators.begin_step(seed, step)
    with torch.no_grad(), perturbed(space, [lambda: None]):
        space.add_filter_noise(sample, scalar(gamma))
        return [x.detach() - c for x, c in zip(space._point, space._center, strict=True)]


def test_add_filter_noise_has_its_standard_deviation():
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = [(3, 256, 8, 8), (4, 20_000), (20_000,)]
    values = [torch.randn(shape, generator=generator, device=DEVICE) for shape in shapes]
    values[0] = values[0].to(memory_format=torch.channels_last)
    values[1] *= torch.tensor([[0.1], [1.0], [3.0], [10.0]], device=DEVICE)
    params = [nn.Parameter(x) for x in values]
    options = {"seed": 7, "step": 3, "sample": 0, "gamma": 0.1}
    noise = filter_noise(params, **options)
    for w, z in zip(values, noise, strict=True):
        rows, norms = (z.flatten(1), w.flatten(1).norm(dim=1)) if w.dim() > 1 else (z[None], w.norm()[None])
        torch.testing.assert_close(rows.std(dim=1), 0.1 * norms, rtol=0.03, atol=0)
        assert (rows.mean(dim=1).abs() < 0.03 * 0.1 * norms).all()
    for a, b in zip(noise, filter_noise(params, **options), strict=True):
        assert torch.equal(a, b)
    for change in ({"sample": 1}, {"step": 4}, {"seed": 8}):
        for a, b in zip(noise, filter_noise(params, **{**options, **change}), strict=True):
            correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
            assert correlation.abs() < 0.03


def test_add_filter_noise_of_a_zero_filter_is_zero():
    value = torch.ones(3, 5, device=DEVICE)
    value[1] = 0
    (noise,) = filter_noise([nn.Parameter(value)], seed=0, step=0, sample=0, gamma=0.1)
    assert noise.any(dim=1).tolist() == [True, False, True]


def test_replica_has_its_own_scratch_memory():
    params = [nn.Parameter(x) for x in random_vectors(1)[0]]
    space = FusedSpace([params])
    with torch.no_grad(), perturbed(space, [lambda: None]):
        space.add_filter_noise(0, scalar(0.1))
        expected = point_of(space)
        space.reset_to_center()
        replica = space.replica([x.clone() for x in params])
        replica.add_filter_noise(0, scalar(0.1))
        for a, b in zip(expected, replica._point, strict=True):
            assert torch.equal(a, b)
    for name in ("_partial", "_counter", "_filter_norms"):
        assert getattr(space._launcher, name).data_ptr() != getattr(replica._launcher, name).data_ptr()
    assert space._launcher._filters is replica._launcher._filters


# -------------------------------------------------------------------- whole steps


class Model(nn.Module):
    def __init__(self, unused):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
        if unused:
            self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return self.layers(x)


def train(method, model, steps=10, captured=False):
    """Return the weights after some steps."""
    optimizer = method(sgd(model.parameters()), model=model)

    def loss_fn(x, y):
        return nn.functional.cross_entropy(model(x), y)

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(steps, 16, 6, generator=generator).to(DEVICE)
    y = torch.randint(3, (steps, 16), generator=generator).to(DEVICE)
    step = capture(optimizer, loss_fn) if captured else None
    for k in range(steps):

        def closure(k=k):
            loss = loss_fn(x[k], y[k])
            loss.backward()
            return loss

        loss = optimizer.step(closure) if step is None else step(x[k], y[k])
        assert loss.isfinite()
    if step is not None:
        assert step.reason is None
        assert len(step._graphs) == 1
    return optimizer, torch.cat([p.detach().flatten() for p in model.parameters()])


def models(unused, number=2):
    torch.manual_seed(1)
    model = Model(unused).to(DEVICE)
    return [copy.deepcopy(model) for _ in range(number)]


@cuda
@pytest.mark.parametrize("unused", [False, True], ids=["all_used", "one_unused"])
@pytest.mark.parametrize("name", ["sam", "asam", "rsam", "tsam-s1", "tsam", "pgn", "esam2", "tsam-hmc"])
def test_captured_steps_equal_eager_steps(name, unused):
    one, other = models(unused)
    optimizer, eager = train(BY_NAME[name], one)
    _, captured = train(BY_NAME[name], other, captured=True)
    assert isinstance(optimizer.current_space(), FusedSpace)
    torch.testing.assert_close(captured, eager, rtol=0, atol=1e-5)
    start = torch.cat([p.detach().flatten() for p in models(unused, 1)[0].parameters()])
    assert (eager - start).norm() > 0.02
    if unused:
        assert other.unused.tolist() == [1.0] * 5
        assert other.unused.grad is None


@pytest.mark.parametrize("unused", [False, True], ids=["all_used", "one_unused"])
@pytest.mark.parametrize("name", [m.name for m in METHODS if not m.name.startswith(("tsam", "rsam"))])
def test_steps_without_noise_equal_those_of_torch(name, unused, monkeypatch):
    one, other = models(unused)
    for model, space in ((one, FusedSpace), (other, ParameterSpace)):
        monkeypatch.setattr(sharpness_aware, "parameter_space", space)
        optimizer, _ = train(BY_NAME[name], model)
        assert type(optimizer.current_space()) is space
    fused, plain = (torch.cat([p.detach().flatten() for p in model.parameters()]) for model in (one, other))
    torch.testing.assert_close(fused, plain, rtol=0, atol=1e-5)


# -------------------------------------------------------------------- without a GPU


class KernelRecorder:
    """Records the names of kernels and the tensors they are launched with."""

    def __init__(self):
        self.names, self.tensors = set(), []

    def __getattr__(self, name):
        self.names.add(name)
        return self

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **options):
        self.tensors += [x for x in (*args, *options.values()) if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("odd_defaults", [("meta", torch.float64)], indirect=True)
def test_kernels_get_float32_whatever_the_defaults_of_torch(odd_defaults, monkeypatch):
    """Kernels are compiled for the dtypes they get, and sum in float32; addresses come from the host."""
    recorder = KernelRecorder()
    monkeypatch.setattr(fused_space, "kernels", recorder)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    p, number = nn.Parameter(torch.zeros(5)), torch.zeros(())
    torch.set_default_device(odd_defaults[0])
    torch.set_default_dtype(odd_defaults[1])
    space = FusedSpace([[p]])

    def closure():
        p.grad = torch.zeros_like(p)
        return number

    with torch.no_grad(), perturbed(space, [closure]):
        for spread in (Spread(radius=number), Spread(std=number), Spread(std=number, max_norm=number)):
            space.add_noise(0, spread)
        space.add_filter_noise(0, number)
        at = space.evaluate()
        space.ascend(at, number)
        space.reset_to_center()
        at = space.evaluate(after=at)
        space.zero_unless_(at.gradient, at.finite)
        space.ascend_adaptive(at, number, number)
        record = space.step_record(StreamingTilt(number), 2)
        for _ in range(2):
            share = record.add(draw_at(at), space.perturbation_norm())
            space.add_to_mean(draw_at(at), share, single=False)
        assert space.tables.of([p]).tolist() == [p.data_ptr()]
    assert recorder.names == {
        *("noise_scale", "noise_move", "filter_norms", "filter_noise_move", "gradient_norm", "ascend"),
        *("adaptive_norm", "adaptive_ascend", "zero_unless", "mix", "weigh"),
    }
    assert {x.dtype for x in recorder.tensors if x.is_floating_point()} == {torch.float32}
    assert {x.device.type for x in recorder.tensors} == {"cpu"}
