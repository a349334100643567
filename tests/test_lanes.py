"""Samples that are drawn beside each other, each on weights of its own: numbers as if one after the other."""

import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import tiltsam
from tiltsam.lanes import Lanes, rooms_for
from tiltsam.samplers.kernel import after_ascent


class Counting(nn.Module):
    """Counts its passes in a buffer, or replaces that buffer at every pass."""

    def __init__(self, replaces):
        super().__init__()
        self.replaces = replaces
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if self.replaces:
            self.count = self.count + 1
        else:
            self.count += 1
        return x


class Doubled(tiltsam.samplers.Uniform):
    """Somebody's own kernel: it begins with a number that its samples need."""

    def begin(self, space):
        return 2 * space.rho

    def sample(self, space, index, state):
        self.move(space, index)
        first = space.evaluate(ascent=True)
        space.climb(first, state)
        return after_ascent(first, space.evaluate(after=first)), state


def build(dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(96, 4)
    ).to(dtype=dtype, memory_format=torch.channels_last)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, tiltsam.TSAM(base, **{"t": 5.0, "rho": 0.3, "radius": 0.5, "num_samples": 4} | options, model=model)


def run(model, optimizer, *, in_lanes, split=False, steps=4, raises_at=None, streams=(None,) * 4):
    torch.manual_seed(1)
    inputs, targets = torch.randn(16, 3, 6, 6), torch.randint(4, (16,))
    dtype = next(model.parameters()).dtype
    calls = 0

    def on(begin, end):
        def closure():
            nonlocal calls
            calls += 1
            if calls == raises_at:
                raise RuntimeError("stop")
            loss = nn.functional.cross_entropy(model(inputs[begin:end].to(dtype)).float(), targets[begin:end])
            loss.backward()
            return loss

        return closure

    def execute(space):
        rooms = [room._replace(stream=stream) for room, stream in zip(rooms_for(space, 4), streams, strict=True)]
        lanes = Lanes(space, rooms) if in_lanes else None
        with optimizer.drawing_in(lanes):
            return optimizer.execute(space)

    for _ in range(steps):
        with optimizer.executing(execute):
            optimizer.step([on(4 * j, 4 * j + 4) for j in range(4)] if split else on(0, 16))
    return optimizer.info


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float64, {"radius": 0.0}),
        (torch.float32, {"rho": 0.0}),
        (torch.float64, {"sampler": "uniform"}),
        (torch.float32, {"sampler": tiltsam.samplers.Ascent(num_steps=2)}),
        (torch.float32, {"sampler": Doubled()}),
    ],
    ids=["ascent", "from_the_centre", "noise_alone", "uniform", "two_ascents", "own_sampler"],
)
def test_lanes_change_nothing(split, dtype, options):
    (one, first), (other, second) = (build(dtype, **options) for _ in range(2))
    before = [p.data_ptr() for p in other.parameters()]
    infos = run(one, first, in_lanes=False, split=split), run(other, second, in_lanes=True, split=split)
    for name in ("losses", "weights", "perturbation_norms", "gradient_norms", "start_losses", "loss"):
        assert torch.equal(getattr(infos[0], name), getattr(infos[1], name)), name
    assert infos[0].cost() == infos[1].cost()
    for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert [p.data_ptr() for p in other.parameters()] == before


def test_a_pass_that_raises_leaves_the_weights_where_they_were():
    model, optimizer = build()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    places = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="stop"):
        run(model, optimizer, in_lanes=True, steps=1, raises_at=5)
    assert [p.data_ptr() for p in model.parameters()] == places
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


class Stream:
    """As much of a stream as lanes ask for: which others it waited for."""

    def __init__(self):
        self.waited_for = []

    def wait_stream(self, other):
        self.waited_for.append(other)


@pytest.mark.parametrize(("raises_at", "begun"), [(None, 4), (5, 3)])
def test_all_that_began_beside_the_step_is_waited_for(monkeypatch, raises_at, begun):
    """A capture could not end otherwise, nor say what was raised in it. It cannot wait for what is no part of it."""
    model, optimizer = build()
    main, streams = Stream(), [Stream() for _ in range(4)]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    with nullcontext() if raises_at is None else pytest.raises(RuntimeError, match="stop"):
        run(model, optimizer, in_lanes=True, steps=1, raises_at=raises_at, streams=streams)
    assert set(main.waited_for) == set(streams[:begun])
    assert [stream.waited_for for stream in streams] == [[main]] * begun + [[]] * (4 - begun)


class Interrupted(nn.Parameter):
    """Ctrl-C falls on it when some parameter changes places for the n-th time."""

    left = -1

    @property
    def data(self):
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value):
        torch.Tensor.data.__set__(self, value)
        Interrupted.left -= 1
        if Interrupted.left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("moment", range(1, 7))
def test_ctrl_c_leaves_no_weight_in_a_lane(moment):
    model = nn.ParameterList([Interrupted(torch.ones(2)) for _ in range(3)])
    optimizer = tiltsam.TSAM(torch.optim.SGD(model.parameters(), lr=0.1), num_samples=2, model=model)
    places = [p.data_ptr() for p in model]

    def closure():
        loss = sum(p.square().sum() for p in model)
        loss.backward()
        return loss

    def execute(space):
        Interrupted.left = moment
        with optimizer.drawing_in(Lanes(space, rooms_for(space, 2))):
            return optimizer.execute(space)

    with pytest.raises(KeyboardInterrupt), optimizer.executing(execute):
        optimizer.step(closure)
    assert [p.data_ptr() for p in model] == places
    assert all(p.tolist() == [1.0, 1.0] for p in model)


def test_after_a_capture_lanes_hold_no_vectors_but_their_weights():
    """A graph keeps its lanes; memory of one pass is for the next graph to use too."""
    model, optimizer = build(sampler="hmc")

    def execute(space):
        lanes = Lanes(space, rooms_for(space, 4))
        with lanes.of_a_graph(8) as kept, optimizer.drawing_in(lanes):
            info = optimizer.execute(space)
        assert kept == [lanes]
        assert not any(lane._gradient or lane._scratch for lane in lanes._lanes)
        return info

    with optimizer.executing(execute):
        optimizer.step(lambda: model(torch.ones(2, 3, 6, 6)).square().mean().backward() or 1.0)


def test_graphs_of_one_step_share_weights_and_streams_of_lanes(monkeypatch):
    model, optimizer = build()

    def with_streams(space, number):
        return [room._replace(stream=Stream()) for room in rooms_for(space, number)]

    step = tiltsam.capture(optimizer, model, (torch.ones(2, 3, 6, 6),), concurrent=True)
    monkeypatch.setattr(sys.modules[type(step).__module__], "rooms_for", with_streams)
    space = optimizer.current_space()
    one, other = step._lanes(space), step._lanes(space)
    assert one is not other
    assert one._streams == other._streams
    assert all(a.point is b.point for a, b in zip(one._lanes, other._lanes, strict=True))
    optimizer.param_groups[0]["num_samples"] = 3
    assert len(step._lanes(space)._streams) == 3


def test_which_steps_have_lanes():
    assert build()[1].num_lanes() == 4
    assert build(num_samples=1)[1].num_lanes() == 0
    assert build(share_ascent=True)[1].num_lanes() == 0
    model, optimizer = build(every=2)
    run(model, optimizer, in_lanes=False, steps=1)
    assert optimizer.num_lanes() == 0  # the plain step between
    assert tiltsam.PGN(torch.optim.SGD(model.parameters(), lr=0.1)).num_lanes() == 0


def test_buffers_that_no_pass_changes_are_not_written():
    """Not even with what they hold: others read them meanwhile, and what a lane put back could be of the last step."""
    model, optimizer = build()
    model.register_buffer("constant", torch.ones(3))
    run(model, optimizer, in_lanes=False, steps=1)
    before = model.constant._version
    run(model, optimizer, in_lanes=True, steps=1)
    assert model.constant._version == before
    assert not optimizer.current_space().passes.moves_other_buffers()
    run(model, optimizer, in_lanes=False, steps=1)
    assert model.constant._version > before


@pytest.mark.parametrize("replaces", [False, True])
def test_models_that_change_buffers_are_known(replaces):
    for layer, moves in ((nn.BatchNorm1d(4), False), (Counting(replaces), True)):
        model = nn.Sequential(nn.Linear(4, 4), layer)
        model.register_buffer("constant", torch.ones(3))
        optimizer = tiltsam.TSAM(torch.optim.SGD(model.parameters(), lr=0.1), num_samples=3, model=model)

        def closure(model=model):
            loss = model(torch.ones(8, 4)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        assert optimizer.current_space().passes.moves_other_buffers() is moves


def test_concurrent_samples_need_the_model():
    weight = nn.Parameter(torch.ones(3))
    optimizer = tiltsam.TSAM(torch.optim.SGD([weight], lr=0.1), num_samples=3)
    with pytest.raises(ValueError, match="model="):
        tiltsam.capture(optimizer, lambda x: (weight * x).sum(), (torch.ones(3),), concurrent=True)


@pytest.mark.parametrize("method", ["pgn", "tsam"])
def test_samples_that_share_an_ascent_are_not_concurrent(method):
    model, options = nn.Linear(3, 1), {"share_ascent": True} if method == "tsam" else {}
    optimizer = tiltsam.METHODS[method](torch.optim.SGD(model.parameters(), lr=0.1), model=model, **options)
    with pytest.raises(ValueError, match=f"the samples of this {method.upper()} share an ascent"):
        tiltsam.capture(optimizer, lambda x: model(x).sum(), (torch.ones(2, 3),), concurrent=True)
