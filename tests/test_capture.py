"""The captured step: the eager one, replayed. The GPU part is skipped where there is none."""

import copy
import threading
import warnings
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tiltsam
from helpers.cases import METHODS, Net, Problem, sgd
from tiltsam.bases import arrange_state
from tiltsam.capture import CapturedStep, _Seen, capture
from tiltsam.lanes import Lanes
from tiltsam.parameters import ParameterSpace
from tiltsam.passes import CapturedRandom

every_method = pytest.mark.parametrize("method", METHODS, ids=repr)
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Pair:
    """The same problem twice, one to step eagerly and one captured, on batches that change from step to step."""

    def __init__(
        self, method, device="cuda", model=None, base=sgd, autocast=False, split=False, concurrent=False, **options
    ):
        self.models, self.optimizers = [], []
        torch.manual_seed(1)
        first = (Net(dropout=0.3) if model is None else model).to(device)
        if isinstance(first, Net):
            del first.empty, first.unused
            first.register_buffer("empty", torch.zeros(1, device=device))
        for m in (first, copy.deepcopy(first)):
            self.models.append(m)
            self.optimizers.append(method(base(m.parameters()), model=m, **options))
        self.autocast, self.split = autocast, split
        how = {"split": split, "concurrent": concurrent}
        self.step = capture(self.optimizers[1], lambda x, y: self.loss(1, x, y), self.batch(0), **how)
        self.device = device

    def batch(self, k):
        generator = torch.Generator().manual_seed(100 + k)
        x = torch.randn(16, 6, generator=generator)
        return x.cuda(), torch.randint(3, (16,), generator=generator).cuda()

    def loss(self, i, x, y):
        with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
            return nn.functional.cross_entropy(self.models[i](x).float(), y)

    def run(self, steps, between=lambda k, optimizer: None):
        losses = []
        for k in range(steps):
            row = []
            for i in (0, 1):
                torch.cuda.manual_seed(k)
                between(k, self.optimizers[i])
                x, y = self.batch(k)

                def closure(i=i, x=x, y=y):
                    loss = self.loss(i, x, y)
                    loss.backward()
                    return loss

                parts = [partial(closure, x=x[a:b], y=y[a:b]) for a, b in ((0, 5), (5, 10), (10, 16))]
                by_hand = parts if self.split else closure
                row.append(self.optimizers[0].step(by_hand) if i == 0 else self.step(x, y))
            losses.append(torch.stack(row))
        return torch.stack(losses)

    def distance(self):
        both = [torch.cat([v.flatten().float() for v in m.state_dict().values()]) for m in self.models]
        return ((both[0] - both[1]).norm() / both[0].norm()).item()


# Eager and captured launch the same kernels on the same numbers, except the base's update: eager SGD is a multiply and
# an add, the captured one a fused kernel with one rounding less. That is an ulp (6e-8) a step and weight, which twenty
# steps of training at this rate amplify to a few 1e-6.
TOLERANCE = 2e-5


@cuda
@every_method
def test_captured_equals_eager(method):
    pair = Pair(method)
    losses = pair.run(20)
    assert pair.step.reason is None
    assert len(pair.step._graphs) == 1
    torch.testing.assert_close(losses[:, 0], losses[:, 1], rtol=0, atol=1e-4)
    assert pair.distance() < TOLERANCE
    for a, b in zip(vars(pair.optimizers[0].info).values(), vars(pair.optimizers[1].info).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, check_dtype=False)


@cuda
def test_rates_t_and_rho_change_between_replays():
    def between(k, optimizer):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + k)
            group["t"] = 2.0 * k
            group["rho"] = 0.01 * (1 + k)
            group["radius"] = 0.1 + 0.01 * k

    pair = Pair(METHODS[6], radius=0.1)
    pair.run(15, between)
    assert len(pair.step._graphs) == 1
    assert pair.distance() < TOLERANCE


@cuda
def test_schedulers_hooks_and_step_counts_work_through_the_graph():
    pair = Pair(METHODS[6])
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
def test_what_a_graph_cannot_hold_is_captured_anew():
    def between(k, optimizer):
        for group in optimizer.param_groups:
            group["num_samples"] = 3 if k < 8 else 2
            group["weight_decay"] = 0.0 if k < 16 else 0.1

    pair = Pair(METHODS[6])
    pair.run(24, between)
    assert len(pair.step._graphs) == 3
    assert pair.distance() < TOLERANCE


@cuda
def test_a_layer_frozen_for_a_while():
    def between(k, optimizer):
        first = optimizer.param_groups[0]["params"][0]
        if k in (8, 16):
            first.requires_grad_(k == 16)
            first.grad = None

    pair = Pair(METHODS[6])
    pair.run(28, between)
    assert pair.step.reason is None
    assert len(pair.step._graphs) == 1  # those of before are gone
    assert pair.distance() < TOLERANCE


@cuda
def test_a_group_added_between_replays():
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

    step = capture(optimizers[1], lambda x, y: loss(1, x, y), (x, y))
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
def test_a_state_loaded_between_replays():
    kept = {}

    def between(k, optimizer):
        if k == 6:
            kept[id(optimizer)] = copy.deepcopy(optimizer.state_dict())
        if k == 12:
            optimizer.load_state_dict(kept[id(optimizer)])

    pair = Pair(METHODS[6])
    pair.run(24, between)
    assert pair.step.reason is None
    assert pair.optimizers[1].param_groups[0]["steps_taken"] == 18
    assert pair.distance() < TOLERANCE


def images(model, base, device, steps=1):
    """Some eager steps of a convolution that lies in memory channels last."""
    model.to(device, memory_format=torch.channels_last)
    optimizer = tiltsam.SAM(base(model.parameters()), model=model)
    x = torch.randn(4, 3, 8, 8, device=device)

    def loss(x):
        return model(x).square().mean()

    for _ in range(steps):
        optimizer.step(lambda: loss(x).backward() or loss(x))
    return optimizer, loss, x


def test_a_loaded_state_is_laid_out_as_the_parameters_are():
    optimizer, _, _ = images(nn.Conv2d(3, 5, 3), torch.optim.Adam, "cpu")
    weight = optimizer.param_groups[0]["params"][0]
    state = optimizer.base.state[weight]
    before = state["exp_avg"].clone()
    state["exp_avg"] = before.contiguous()
    assert state["exp_avg"].stride() != weight.stride()
    arrange_state(optimizer.base)
    assert state["exp_avg"].stride() == weight.stride()
    assert torch.equal(state["exp_avg"], before)
    assert state["step"].item() == 1


@cuda
@pytest.mark.parametrize("base", [sgd, torch.optim.AdamW])
def test_a_loaded_state_in_another_layout_is_captured(base):
    optimizer, loss, x = images(nn.Conv2d(3, 5, 3), base, "cuda", steps=3)
    state = copy.deepcopy(optimizer.state_dict())
    for entries in state["state"].values():
        entries.update({k: v.contiguous() if isinstance(v, torch.Tensor) else v for k, v in entries.items()})
    optimizer.load_state_dict(state)
    step = capture(optimizer, loss, (x,))
    for _ in range(6):
        step(x)
    assert step.reason is None
    assert len(step._graphs) == 1


@cuda
@pytest.mark.parametrize("name", ["sam", "pgn", "tsam"])
def test_looking_around_at_every_second_step(name):
    pair = Pair(tiltsam.METHODS[name], every=2)
    pair.run(20)
    assert len(pair.step._graphs) == 2
    assert pair.distance() < TOLERANCE


@cuda
def test_a_batch_that_is_split_among_the_samples():
    pair = Pair(METHODS[6], split=True)
    pair.run(15)
    assert pair.step.reason is None
    assert pair.distance() < TOLERANCE
    assert [optimizer.last.num_parts for optimizer in pair.optimizers] == [3, 3]


@cuda
@pytest.mark.parametrize("split", [False, True])
def test_samples_beside_each_other(split):
    """The same weights, buffers and masks as one after the other, through changes of the settings."""
    pair = Pair(METHODS[6], split=split, concurrent=True)
    pair.run(15, lambda k, o: o.param_groups[0].__setitem__("rho", 0.05 + 0.01 * k))
    assert pair.step.reason is None
    assert all(any(isinstance(x, Lanes) for x in graph.random.keep) for graph in pair.step._graphs.values())
    assert pair.distance() < TOLERANCE


@cuda
def test_noise_differs_at_every_replay():
    theta = nn.Parameter(torch.zeros(50, device="cuda"))
    optimizer = tiltsam.TSAM(sgd([theta], lr=0.0, weight_decay=0.0), rho=0.0, radius=1.0, num_samples=2)
    direction = torch.linspace(-1, 1, 50, device="cuda")
    step = capture(optimizer, lambda x: (theta * x).sum(), (direction,))
    seen = []
    for _ in range(10):
        step(direction)
        seen.extend(optimizer.info.losses.tolist())
    assert step.reason is None
    assert len(set(seen)) == 20


@cuda
@pytest.mark.parametrize("base", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam], ids=lambda b: b.__name__)
def test_other_bases(base):
    pair = Pair(METHODS[6], base=lambda params: base(params, lr=0.01))
    pair.run(15, lambda k, o: o.param_groups[0].__setitem__("lr", 0.01 / (1 + k)))
    assert pair.step.reason is None
    assert len(pair.step._graphs) == 1
    assert pair.distance() < 10 * TOLERANCE  # Adam divides by small second moments: an ulp grows faster


@cuda
def test_eager_resumes_captured_and_captured_resumes_eager():
    """One format of state: a run may change from one to the other and back."""
    pair = Pair(METHODS[6])
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
        pair = Pair(METHODS[6], model=net, autocast=True)
        if compiled:
            pair.models = [torch.compile(m) for m in pair.models]
        losses = pair.run(10)
        assert pair.step.reason is None
        torch.testing.assert_close(losses[:, 0], losses[:, 1], rtol=0, atol=2e-2)


@cuda
def test_another_thread_may_load_batches_meanwhile():
    theta, done = nn.Parameter(torch.ones(4, device="cuda")), threading.Event()

    def load():
        with torch.cuda.stream(torch.cuda.Stream()):
            while not done.is_set():
                torch.ones(1 << 16).pin_memory().to("cuda", non_blocking=True)

    loader = threading.Thread(target=load)
    loader.start()
    try:
        step = capture(tiltsam.SAM(sgd([theta])), lambda x: (theta * x).square().sum(), (torch.ones(4, device="cuda"),))
        for _ in range(6):
            step(torch.ones(4, device="cuda"))
    finally:
        done.set()
        loader.join()
    assert step.reason is None


@cuda
def test_where_capture_is_impossible_it_says_why_and_goes_on():
    theta = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = tiltsam.SAM(sgd([theta]))

    def loss_fn(x):
        loss = (theta * x).square().sum()
        return loss * (1.0 if loss.item() > 0 else 2.0)  # reads a value

    step = capture(optimizer, loss_fn, (torch.ones(4, device="cuda"),))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            assert step(torch.ones(4, device="cuda")).isfinite()
    assert step.reason.startswith("capturing failed")
    assert torch.rand(3, device="cuda").isfinite().all()  # the device's generator still works
    assert sum("steps run eagerly" in str(w.message) for w in caught) == 1
    assert optimizer.param_groups[0]["steps_taken"] == 6


@every_method
def test_on_a_cpu_it_is_the_eager_step(method):
    a, b = Problem(dropout=0.0), Problem(dropout=0.0)
    one, two = method(sgd(a.model.parameters()), model=a.model), method(sgd(b.model.parameters()), model=b.model)
    step = capture(two, lambda x, y: nn.functional.cross_entropy(b.model(x), y), (b.x, b.y))
    assert step.reason == "the parameters are on the cpu"
    for _ in range(3):
        assert torch.equal(one.step(a.closure), step(b.x, b.y))


def test_another_mode_of_any_layer_is_another_graph():
    problem = Problem()
    optimizer = tiltsam.SAM(sgd(problem.model.parameters()), model=problem.model)
    before = optimizer.frozen()
    problem.model.norm.eval()
    assert optimizer.frozen() != before
    problem.model.norm.train()
    assert optimizer.frozen() == before


class Generator:
    """As much of a device's generator as a replay asks for."""

    def __init__(self, offset=0):
        self.offset, self.seed = offset, 7

    def initial_seed(self):
        return self.seed

    def manual_seed(self, seed):
        self.seed, self.offset = seed, 0

    def get_offset(self):
        return self.offset

    def set_offset(self, offset):
        self.offset = offset


def test_after_a_replay_the_generator_stands_where_the_last_pass_ended():
    """As after an eager step. An ascent on part of the batch draws fewer numbers for its masks than the last pass."""
    random = object.__new__(CapturedRandom)
    random._device, random._passes = Generator(100), [Generator(), Generator()]
    with random.replaying():
        for generator, drawn in zip(random._passes, (4, 12), strict=True):
            generator.offset += drawn
    assert random._device.offset == 112


def test_what_was_seen_and_captured_of_other_parameters_is_forgotten():
    """Their space is gone: nothing would be replayed again, and the new one has to be warmed up."""
    model, batch = nn.Linear(4, 1), (torch.ones(8, 4),)
    optimizer = tiltsam.TSAM(sgd(model.parameters()), num_samples=3, model=model)
    step = capture(optimizer, lambda x: model(x).square().mean(), batch, concurrent=True)

    def pass_by():
        space = optimizer.current_space()
        step._drop_if_stale(step._key(batch), space)
        return space

    space, key = pass_by(), step._key(batch)
    step._seen[key], step._graphs["of another shape"], step._rooms = _Seen(3, 6), object(), []
    assert pass_by() is space
    assert step._seen
    assert step._graphs
    for frozen in (True, False):
        model.bias.requires_grad_(not frozen)
        assert pass_by() is not space
    assert step._key(batch) == key
    assert not step._seen
    assert not step._graphs
    assert step._rooms is None


class Counting(nn.Linear):
    """Counts its passes in a buffer."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return super().forward(x)


@pytest.mark.parametrize("layer", [nn.Linear, Counting])
def test_a_capture_that_fails_holds_no_memory_and_warns_where_the_step_is_called(monkeypatch, layer):
    model, batch = layer(4, 1), (torch.ones(8, 4),)
    optimizer = tiltsam.TSAM(sgd(model.parameters()), num_samples=3, model=model)
    step = capture(optimizer, lambda x: model(x).square().mean(), batch, concurrent=True)
    step(*batch)
    step.reason, step._space, step._seen[step._key(batch)] = None, optimizer.current_space(), _Seen(3, 6)

    @contextmanager
    def fail(*_, **__):
        try:
            raise ValueError("no room")
        finally:
            raise RuntimeError("the capture is invalid\nfor a reason that was told before")

    monkeypatch.setattr(ParameterSpace, "capturing", lambda *_, **__: nullcontext(SimpleNamespace(keep=[])))
    monkeypatch.setattr(CapturedStep, "_side_stream", lambda _: nullcontext())
    monkeypatch.setattr(CapturedStep, "_own_stream", lambda _: None)
    monkeypatch.setattr(CapturedStep, "_living_pool", lambda _: None)
    monkeypatch.setattr(torch.cuda, "default_generators", {None: Generator()})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", fail)
    with pytest.warns(RuntimeWarning) as caught:
        assert step(*batch).isfinite()
    assert step.reason == "capturing failed: RuntimeError: the capture is invalid, after ValueError: no room"
    ours = ["samples run one after the other"] * (layer is Counting) + ["steps run eagerly"]
    assert [str(w.message).split(", ")[0] for w in caught] == ours
    assert [w.filename for w in caught] == [__file__] * len(ours)
    assert step._rooms is None


def test_bad_arguments():
    problem = Problem()
    base = sgd(problem.model.parameters())
    with pytest.raises(TypeError, match=r"must be one of tiltsam's, got SGD.*tiltsam.ERM"):
        capture(base, problem.loss, (problem.x,))
    with pytest.raises(ValueError, match="warm_up must be at least 1, got 0"):
        capture(tiltsam.SAM(base), problem.loss, (problem.x,), warm_up=0)
    with pytest.raises(TypeError, match="at least one tensor"):
        capture(tiltsam.SAM(base), problem.loss, ({"x": problem.x},))
    for bad, got in ((lambda x: (problem.loss(), x), "tuple"), (lambda x: 0.5, "float"), (problem.model, "Tensor")):
        with pytest.raises(TypeError, match=f"loss_fn must return the loss, a tensor with one element; got {got}"):
            capture(tiltsam.SAM(base), bad, (problem.x,))(problem.x)
