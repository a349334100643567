"""The captured step equals the eager one, replayed. The GPU part is skipped where there is none."""

import copy
import threading
import warnings
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn

import tiltsam
from helpers.cases import METHODS, Net, Problem, sgd
from tiltsam.graphs import capture, captured_step
from tiltsam.graphs.captured_step import CapturedStep, _arrange_state, _WarmUp

every_method = pytest.mark.parametrize("method", METHODS, ids=repr)
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BY_NAME = {method.name: method for method in METHODS}
PARTS = ((0, 5), (5, 10), (10, 16))  # rows of the batch for each of three samples


class Pair:
    """The same problem twice, one stepped eagerly and one captured, on batches that change from step to step.

    Args:
        method: The method.
        parts: Whether each sample has its own part of the batch.
        ascent_rows: Rows of the batch that give the direction of the ascent.
        concurrent: Whether captured samples run concurrently.
    """

    def __init__(
        self,
        method,
        *,
        model=None,
        base=sgd,
        autocast=False,
        parts=False,
        ascent_rows=None,
        concurrent=False,
        **options,
    ):
        self.models, self.optimizers = [], []
        torch.manual_seed(1)
        first = (Net(dropout=0.3) if model is None else model).to("cuda")
        if isinstance(first, Net):
            del first.empty, first.unused
            first.register_buffer("empty", torch.zeros(1, device="cuda"))
        for m in (first, copy.deepcopy(first)):
            self.models.append(m)
            self.optimizers.append(method(base(m.parameters()), model=m, **options))
        self.autocast, self.parts, self.ascent_rows = autocast, parts, ascent_rows
        losses, ascent = self.loss_fns(1)
        self.step = capture(self.optimizers[1], losses, ascent_loss_fn=ascent, concurrent=concurrent)

    def batch(self, k):
        generator = torch.Generator().manual_seed(100 + k)
        x = torch.randn(16, 6, generator=generator)
        return x.cuda(), torch.randint(3, (16,), generator=generator).cuda()

    def loss_fns(self, i):
        """Return the loss, or one loss for each sample, and the loss of the ascent."""

        def loss(x, y, begin=0, end=None):
            with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
                return nn.functional.cross_entropy(self.models[i](x[begin:end]).float(), y[begin:end])

        losses = [partial(loss, begin=begin, end=end) for begin, end in PARTS] if self.parts else loss
        return losses, None if self.ascent_rows is None else partial(loss, end=self.ascent_rows)

    def eager_step(self, batch):
        def closure(loss_fn):
            loss = loss_fn(*batch)
            loss.backward()
            return loss

        losses, ascent = self.loss_fns(0)
        closures = [partial(closure, loss) for loss in losses] if self.parts else partial(closure, losses)
        return self.optimizers[0].step(closures, None if ascent is None else partial(closure, ascent))

    def run(self, steps, between=lambda k, optimizer: None):
        losses = []
        for k in range(steps):
            row = []
            for i in (0, 1):
                torch.cuda.manual_seed(k)
                between(k, self.optimizers[i])
                batch = self.batch(k)
                row.append(self.eager_step(batch) if i == 0 else self.step(*batch))
            losses.append(torch.stack(row))
        return torch.stack(losses)

    def distance(self):
        both = [torch.cat([v.flatten().float() for v in m.state_dict().values()]) for m in self.models]
        return ((both[0] - both[1]).norm() / both[0].norm()).item()


# Eager and captured steps launch the same kernels on the same numbers, except the base's update: eager SGD is a
# multiply and an add, the captured one a fused kernel with one rounding less. That is an ulp (6e-8) a step and weight,
# which twenty steps of training at this rate amplify to a few 1e-6.
TOLERANCE = 2e-5
NUMBERS = ("loss", "losses", "weights", "start_losses", "perturbation_norms", "gradient_norms", "num_nonfinite")


@cuda
@every_method
def test_captured_equals_eager(method):
    pair = Pair(method)
    losses = pair.run(20)
    assert pair.step.reason is None
    assert len(pair.step._graphs) == (1 if method.period == 1 else 2)
    torch.testing.assert_close(losses[:, 0], losses[:, 1], rtol=0, atol=1e-4)
    assert pair.distance() < TOLERANCE
    eager, captured = (optimizer.info for optimizer in pair.optimizers)
    for name in NUMBERS:
        a, b = getattr(eager, name), getattr(captured, name)
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, check_dtype=False, msg=name)
    for name in ("num_forwards", "num_backwards", "num_ascents", "num_parts"):
        assert getattr(eager, name) == getattr(captured, name)
    assert eager.sampler.keys() == captured.sampler.keys()
    for name, value in eager.sampler.items():
        torch.testing.assert_close(value, captured.sampler[name], rtol=1e-2, atol=1e-3, msg=name)


@cuda
def test_settings_change_between_replays():
    def between(k, optimizer):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + k)
            group["t"] = 2.0 * k
            group["rho"] = 0.01 * (1 + k)
            group["radius"] = 0.1 + 0.01 * k

    pair = Pair(BY_NAME["tsam"], radius=0.1)
    pair.run(15, between)
    assert len(pair.step._graphs) == 1
    assert pair.distance() < TOLERANCE


@cuda
def test_replay_runs_schedulers_hooks_and_counts_steps():
    pair = Pair(BY_NAME["tsam"])
    seen = []
    optimizer = pair.optimizers[1]
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5) for o in pair.optimizers]
    for _ in range(8):
        pair.run(1)
        for scheduler in schedulers:
            scheduler.step()
    assert len(seen) == 8
    assert optimizer.param_groups[0]["steps_taken"] == 8
    assert pair.distance() < TOLERANCE


@cuda
def test_changed_structure_is_captured_again():
    def between(k, optimizer):
        for group in optimizer.param_groups:
            group["num_samples"] = 3 if k < 8 else 2
            group["weight_decay"] = 0.0 if k < 16 else 0.1

    pair = Pair(BY_NAME["tsam"])
    pair.run(24, between)
    assert len(pair.step._graphs) == 3
    assert pair.distance() < TOLERANCE


@cuda
def test_layer_frozen_between_replays():
    def between(k, optimizer):
        first = optimizer.param_groups[0]["params"][0]
        if k in (8, 16):
            first.requires_grad_(k == 16)
            first.grad = None

    pair = Pair(BY_NAME["tsam"])
    pair.run(28, between)
    assert pair.step.reason is None
    assert len(pair.step._graphs) == 1  # those of before are gone
    assert pair.distance() < TOLERANCE


@cuda
def test_group_added_between_replays():
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).cuda()
    first[2].requires_grad_(False)
    models = [first, copy.deepcopy(first)]
    optimizers = [tiltsam.TSAM(sgd(m[0].parameters()), num_samples=3, model=m, rho=0.1, radius=0.1) for m in models]
    x, y = torch.randn(16, 6, device="cuda"), torch.randint(3, (16,), device="cuda")

    def loss(i, x, y):
        return nn.functional.cross_entropy(models[i](x), y)

    def closure():
        value = loss(0, x, y)
        value.backward()
        return value

    step = capture(optimizers[1], lambda x, y: loss(1, x, y))
    for k in range(20):
        if k == 8:
            for m, optimizer in zip(models, optimizers, strict=True):
                m[2].requires_grad_(True)
                optimizer.add_param_group({"params": list(m[2].parameters()), "lr": 0.02})
        optimizers[0].step(closure)
        step(x, y)
    assert step.reason is None
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@cuda
def test_state_loaded_between_replays():
    kept = {}

    def between(k, optimizer):
        if k == 6:
            kept[id(optimizer)] = copy.deepcopy(optimizer.state_dict())
        if k == 12:
            optimizer.load_state_dict(kept[id(optimizer)])

    pair = Pair(BY_NAME["tsam"])
    pair.run(24, between)
    assert pair.step.reason is None
    assert pair.optimizers[1].param_groups[0]["steps_taken"] == 18
    assert pair.distance() < TOLERANCE


def channels_last_steps(model, base, device, steps=1):
    """Take eager steps with a channels-last convolution."""
    model.to(device, memory_format=torch.channels_last)
    optimizer = tiltsam.SAM(base(model.parameters()), model=model)
    x = torch.randn(4, 3, 8, 8, device=device)

    def loss(x):
        return model(x).square().mean()

    for _ in range(steps):
        optimizer.step(lambda: loss(x).backward() or loss(x))
    return optimizer, loss, x


def test_arrange_state_uses_the_strides_of_the_parameters():
    optimizer, _, _ = channels_last_steps(nn.Conv2d(3, 5, 3), torch.optim.Adam, "cpu")
    weight = optimizer.param_groups[0]["params"][0]
    state = optimizer.base.state[weight]
    before = state["exp_avg"].clone()
    state["exp_avg"] = before.contiguous()
    assert state["exp_avg"].stride() != weight.stride()
    _arrange_state(optimizer.base)
    assert state["exp_avg"].stride() == weight.stride()
    assert torch.equal(state["exp_avg"], before)
    assert state["step"].item() == 1


@cuda
@pytest.mark.parametrize("base", [sgd, torch.optim.AdamW])
def test_loaded_state_with_other_strides_is_captured(base):
    optimizer, loss, x = channels_last_steps(nn.Conv2d(3, 5, 3), base, "cuda", steps=3)
    state = copy.deepcopy(optimizer.state_dict())
    for entries in state["state"].values():
        entries.update({k: v.contiguous() if isinstance(v, torch.Tensor) else v for k, v in entries.items()})
    optimizer.load_state_dict(state)
    step = capture(optimizer, loss)
    for _ in range(6):
        step(x)
    assert step.reason is None
    assert len(step._graphs) == 1


@cuda
@pytest.mark.parametrize("parts", [False, True])
def test_captured_step_without_a_finite_first_sample(parts):
    """The mean must not contain the gradient of the step before."""
    pair = Pair(BY_NAME["tsam"], parts=parts)
    pair.run(6)
    assert pair.step.reason is None
    for i in (0, 1):
        x, y = pair.batch(7)
        x[:5] = torch.nan  # the whole batch, or the part of the first sample
        torch.cuda.manual_seed(7)
        loss = pair.eager_step((x, y)) if i == 0 else pair.step(x, y)
        assert loss.isnan() != parts
        assert pair.optimizers[i].info.num_nonfinite == (1 if parts else 3)
    for a, b in zip(*(m.parameters() for m in pair.models), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5)


@cuda
@pytest.mark.parametrize("name", ["sam", "tsam", "tsam-shared", "asam"])
def test_captured_step_with_ascent_loss_fn(name):
    pair = Pair(BY_NAME[name], ascent_rows=5)
    pair.run(15)
    assert pair.step.reason is None
    assert pair.distance() < TOLERANCE
    ascents = [optimizer.info.num_ascents for optimizer in pair.optimizers]
    assert ascents[0] == ascents[1] > 0


@cuda
def test_captured_step_with_a_loss_for_each_sample():
    pair = Pair(BY_NAME["tsam"], parts=True)
    pair.run(15)
    assert pair.step.reason is None
    assert pair.distance() < TOLERANCE
    assert [optimizer.info.num_parts for optimizer in pair.optimizers] == [3, 3]


@cuda
@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("name", ["tsam", "tsam-uniform"])
def test_captured_concurrent_equals_eager(name, parts):
    """The same weights, buffers and masks as one after the other, while settings change."""
    pair = Pair(BY_NAME[name], parts=parts, concurrent=True)
    pair.run(15, lambda k, o: o.param_groups[0].__setitem__("rho", 0.05 + 0.01 * k))
    assert pair.step.reason is None
    assert len(pair.step._scratch) == 3
    assert pair.distance() < TOLERANCE


@cuda
def test_captured_concurrent_with_fewer_samples():
    """The new graph uses some of the scratch weights of the old one."""
    pair = Pair(BY_NAME["tsam"], concurrent=True)
    pair.run(16, lambda k, o: o.param_groups[0].__setitem__("num_samples", 3 if k < 8 else 2))
    assert pair.step.reason is None
    assert len(pair.step._graphs) == 2
    assert pair.distance() < TOLERANCE


@cuda
def test_noise_differs_at_every_replay():
    theta = nn.Parameter(torch.zeros(50, device="cuda"))
    optimizer = tiltsam.TSAM(sgd([theta], lr=0.0, weight_decay=0.0), rho=0.0, radius=1.0, num_samples=2)
    direction = torch.linspace(-1, 1, 50, device="cuda")
    step = capture(optimizer, lambda x: (theta * x).sum())
    seen = []
    for _ in range(10):
        step(direction)
        seen.extend(optimizer.info.losses.tolist())
    assert step.reason is None
    assert len(set(seen)) == 20


@cuda
@pytest.mark.parametrize("base", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam], ids=lambda b: b.__name__)
def test_captured_other_bases(base):
    pair = Pair(BY_NAME["tsam"], base=lambda params: base(params, lr=0.01))
    pair.run(15, lambda k, o: o.param_groups[0].__setitem__("lr", 0.01 / (1 + k)))
    assert pair.step.reason is None
    assert len(pair.step._graphs) == 1
    assert pair.distance() < 10 * TOLERANCE  # Adam divides by small second moments: an ulp grows faster


@cuda
def test_eager_resumes_captured_and_captured_resumes_eager():
    """The state has one format: a run may change from one to the other and back."""
    pair = Pair(BY_NAME["tsam"])
    pair.run(8)
    states = [copy.deepcopy(o.state_dict()) for o in pair.optimizers]
    assert states[0].keys() == states[1].keys()
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert states[0]["state"].keys() == states[1]["state"].keys()
    pair.optimizers[0].load_state_dict(states[1])
    pair.optimizers[1].load_state_dict(states[0])
    pair.run(8)
    assert pair.distance() < 2 * TOLERANCE


@cuda
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_autocast_and_a_compiled_model():
    for compiled in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
        pair = Pair(BY_NAME["tsam"], model=net, autocast=True)
        if compiled:
            pair.models = [torch.compile(m) for m in pair.models]
        losses = pair.run(10)
        assert pair.step.reason is None
        torch.testing.assert_close(losses[:, 0], losses[:, 1], rtol=0, atol=2e-2)


@cuda
def test_capture_while_another_thread_loads_batches():
    theta, done = nn.Parameter(torch.ones(4, device="cuda")), threading.Event()

    def load():
        with torch.cuda.stream(torch.cuda.Stream()):
            while not done.is_set():
                torch.ones(1 << 16).pin_memory().to("cuda", non_blocking=True)

    loader = threading.Thread(target=load)
    loader.start()
    try:
        step = capture(tiltsam.SAM(sgd([theta])), lambda x: (theta * x).square().sum())
        for _ in range(6):
            step(torch.ones(4, device="cuda"))
    finally:
        done.set()
        loader.join()
    assert step.reason is None


@cuda
def test_failed_capture_warns_and_runs_eagerly():
    theta = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = tiltsam.SAM(sgd([theta]))

    def loss_fn(x):
        loss = (theta * x).square().sum()
        return loss * (1.0 if loss.item() > 0 else 2.0)  # reads a value

    step = capture(optimizer, loss_fn)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            assert step(torch.ones(4, device="cuda")).isfinite()
    assert step.reason.startswith("capturing failed")
    assert torch.rand(3, device="cuda").isfinite().all()  # the device's generator still works
    assert sum("steps run eagerly" in str(w.message) for w in caught) == 1
    assert optimizer.param_groups[0]["steps_taken"] == 6


@every_method
def test_capture_on_a_cpu_equals_eager(method):
    a, b = Problem(dropout=0.0), Problem(dropout=0.0)
    one, two = method(sgd(a.model.parameters()), model=a.model), method(sgd(b.model.parameters()), model=b.model)
    step = capture(two, lambda x, y: nn.functional.cross_entropy(b.model(x), y))
    assert step.reason == "the parameters are on the cpu"
    for _ in range(3):
        assert torch.equal(one.step(a.closure), step(b.x, b.y))


@pytest.mark.parametrize("method", [m for m in METHODS if m.name.startswith("tsam")], ids=repr)
def test_capture_on_a_cpu_with_loss_functions_by_part(method):
    """One loss function per sample, and one for the ascent, equal closures on the same rows."""
    a, b = Problem(dropout=0.0), Problem(dropout=0.0)
    one, two = (method(sgd(p.model.parameters()), model=p.model) for p in (a, b))
    number = one.num_samples

    def loss_on(problem, rows):
        return lambda x, y: nn.functional.cross_entropy(problem.model(x[rows]), y[rows])

    def closure_on(problem, rows):
        def closure():
            loss = loss_on(problem, rows)(problem.x, problem.y)
            loss.backward()
            return loss

        return closure

    rows = [slice(5 * j, 5 * j + 5) for j in range(number)]
    ascent = slice(0, 4)
    step = capture(two, [loss_on(b, r) for r in rows], ascent_loss_fn=loss_on(b, ascent))
    for _ in range(3):
        loss = one.step([closure_on(a, r) for r in rows], closure_on(a, ascent))
        assert torch.equal(loss, step(b.x, b.y))
    assert two.info.num_parts == number
    for name, value in a.weights().items():
        assert torch.equal(value, b.weights()[name])


def test_capture_key_depends_on_the_mode_of_every_layer():
    problem = Problem()
    optimizer = tiltsam.SAM(sgd(problem.model.parameters()), model=problem.model)

    def structure():
        return optimizer.capture_key(optimizer.begin([problem.closure]))

    before = structure()
    problem.model.norm.eval()
    assert structure() != before
    problem.model.norm.train()
    assert structure() == before


@pytest.mark.parametrize(
    ("setting", "same"), [("rho", True), ("t", True), ("seed", True), ("num_samples", False), ("momentum", False)]
)
def test_capture_key_depends_on_settings_that_a_graph_cannot_change(setting, same):
    problem = Problem()
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), model=problem.model)
    before = optimizer.capture_key(optimizer.begin([problem.closure]))
    optimizer.param_groups[0][setting] += 1
    assert (optimizer.capture_key(optimizer.begin([problem.closure])) == before) is same


@pytest.mark.parametrize("repeats", [True, False])
def test_steps_with_a_new_momentum_each_stay_eager(monkeypatch, repeats):
    """OneCycleLR cycles the momentum: a graph for each value would never be replayed."""
    problem = Problem(dropout=0.0)
    optimizer = tiltsam.SAM(sgd(problem.model.parameters()), model=problem.model)
    step = capture(optimizer, lambda x, y: nn.functional.cross_entropy(problem.model(x), y))
    step.reason = None  # as on a GPU

    def warm_up(key, planned, _):
        step._warm_ups[key] = _WarmUp()
        return optimizer.step(planned.closures)

    monkeypatch.setattr(step, "_warm_up_step", warm_up)
    monkeypatch.setattr(captured_step, "MAX_NEW_KEYS", 5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(8):
            optimizer.param_groups[0]["momentum"] = 0.5 + 0.01 * (k // 2 if repeats else k)
            step(problem.x, problem.y)
    assert optimizer.param_groups[0]["steps_taken"] == 8
    assert (step.reason is None) is repeats
    assert ["cycle_momentum" in str(w.message) for w in caught] == ([] if repeats else [True])
    assert len(step._warm_ups) == (4 if repeats else 0)


def test_graphs_of_replaced_parameters_are_dropped():
    """Their space is gone: no graph would be replayed again, and the new space must be warmed up."""
    model, batch = nn.Linear(4, 1), (torch.ones(8, 4),)
    optimizer = tiltsam.TSAM(sgd(model.parameters()), num_samples=3, model=model)
    captured = capture(optimizer, lambda x: model(x).square().mean(), concurrent=True)

    def begin():
        step = optimizer.begin(captured._closures(batch)[0])
        key = captured._key(batch, step)
        captured._drop_if_stale(key, step.space)
        return step.space, key

    space, key = begin()
    captured._warm_ups[key], captured._graphs["of another shape"], captured._scratch = (
        _WarmUp(3, 6),
        object(),
        [object()],
    )
    assert begin() == (space, key)
    assert captured._warm_ups
    assert captured._graphs
    for frozen in (True, False):
        model.bias.requires_grad_(not frozen)
        assert begin()[0] is not space
    assert begin()[1] == key
    assert not captured._warm_ups
    assert not captured._graphs
    assert not captured._scratch


class Counting(nn.Linear):
    """Counts its passes in a buffer, which is not BatchNorm's."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return super().forward(x)


class FakeGraph:
    def register_generator_state(self, generator):
        pass


class FakeRandom:
    def __init__(self, *_):
        pass

    def begin_pass(self, number):
        pass

    def end_capture(self):
        pass


@pytest.mark.parametrize("layer", [nn.Linear, Counting])
def test_failed_capture_releases_memory_and_warns_at_the_call(monkeypatch, layer):
    model, batch = layer(4, 1), (torch.ones(8, 4),)
    optimizer = tiltsam.TSAM(sgd(model.parameters()), num_samples=3, model=model)
    captured = capture(optimizer, lambda x: model(x).square().mean(), concurrent=True)
    captured(*batch)
    step = optimizer.begin(captured._closures(batch)[0])
    captured.reason, captured._space = None, step.space
    captured._warm_ups[captured._key(batch, step)] = _WarmUp(3, 6)

    @contextmanager
    def fail(*_, **__):
        try:
            raise ValueError("no room")
        finally:
            raise RuntimeError("the capture is invalid\nfor a reason given before")

    def eager(self, key, step, seen):
        return self.optimizer.step(step.closures, step.ascent_closure)

    monkeypatch.setattr(captured_step, "CapturedRandom", FakeRandom)
    monkeypatch.setattr(CapturedStep, "_warm_up_step", eager)
    monkeypatch.setattr(CapturedStep, "_own_stream", lambda _: None)
    monkeypatch.setattr(CapturedStep, "_shared_pool", lambda _: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", fail)
    with pytest.warns(RuntimeWarning) as caught:
        assert captured(*batch).isfinite()
    assert captured.reason == "capturing failed: RuntimeError: the capture is invalid, after ValueError: no room"
    assert len(caught) == (2 if layer is Counting else 1)
    assert "capturing failed" in str(caught[-1].message)
    assert {w.filename for w in caught} == {__file__}
    assert not captured._scratch


def test_step_that_cannot_be_captured_on_a_gpu_warns(monkeypatch):
    problem = Problem()
    optimizer = tiltsam.SAM(sgd(problem.model.parameters()), skip_nonfinite=True)
    assert capture(optimizer, problem.model).reason == "the parameters are on the cpu"  # no warning
    monkeypatch.setattr(captured_step, "_device_types", lambda _: {"cuda"})
    with pytest.warns(RuntimeWarning, match="eagerly, because skip_nonfinite") as caught:
        assert "skip_nonfinite" in capture(optimizer, problem.model).reason
    assert {w.filename for w in caught} == {__file__}


def test_capture_returns_the_documented_class():
    problem = Problem()
    step = tiltsam.capture(tiltsam.SAM(sgd(problem.model.parameters())), problem.model)
    assert type(step) is tiltsam.CapturedStep


def test_capture_refuses_bad_arguments():
    problem = Problem()
    base = sgd(problem.model.parameters())
    with pytest.raises(TypeError, match="SGD"):
        capture(base, problem.loss)
    for warm_up in (0, 2.5):
        with pytest.raises(ValueError, match=f"warm_up .*got {warm_up}"):
            capture(tiltsam.SAM(base), problem.loss, warm_up=warm_up)
    with pytest.raises(TypeError, match="positional"):
        capture(tiltsam.SAM(base), problem.loss, (problem.x,))
    with pytest.raises(TypeError, match="tensor"):
        capture(tiltsam.SAM(base), lambda *_: problem.loss())(1.0)
    for nested in ({"x": problem.x}, (problem.x, problem.y), [problem.x]):
        with pytest.raises(TypeError, match=type(nested).__name__):
            capture(tiltsam.SAM(base), lambda *_: problem.loss())(problem.x, nested)
    capture(tiltsam.SAM(base), lambda *_: problem.loss())(problem.x, True, 1, 1.0, "a", None)
    with pytest.raises(ValueError, match="got 2"):
        capture(tiltsam.SAM(base), [lambda x: problem.loss()] * 2)(problem.x)
    for bad, got in ((lambda x: (problem.loss(), x), "tuple"), (lambda x: 0.5, "float"), (problem.model, "Tensor")):
        with pytest.raises(TypeError, match=f"got {got}"):
            capture(tiltsam.SAM(base), bad)(problem.x)
