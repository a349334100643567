"""Samples at scratch weights, drawn independently: the numbers of samples that run one after the other."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import tiltsam
from tiltsam.graphs.concurrent import (
    allocate_scratch,
    average_samples_concurrently,
    can_run_concurrently,
    weights_at,
)
from tiltsam.graphs.random_state import CapturedModelState
from tiltsam.optim.step_info import StepInfo
from tiltsam.samplers import HMC, Ascent, CenterThenAscent, Uniform, draw_after_ascent


class DoubleAscent(Uniform):
    """A user's sampler whose samples need what ``begin`` returns."""

    def begin(self, space):
        return 2 * space.rho

    def sample(self, space, index, common):
        self.move(space, index)
        first = space.evaluate(ascent=True)
        space.ascend(first, common)
        return draw_after_ascent(first, space.evaluate(after=first))


class SameRandom:
    """The random states of a graph, on a CPU: every pass starts from the same one."""

    def __init__(self):
        self._state = torch.get_rng_state()

    def begin_pass(self, number):
        torch.set_rng_state(self._state)


def build(dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(96, 4)
    ).to(dtype=dtype, memory_format=torch.channels_last)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, tiltsam.TSAM(base, **{"t": 5.0, "rho": 0.3, "radius": 0.5, "num_samples": 4} | options, model=model)


def closures_for(model, *, parts=1, raises_at=None):
    """One closure for the whole batch, or one for each part of it."""
    torch.manual_seed(1)
    inputs, targets = torch.randn(16, 3, 6, 6), torch.randint(4, (16,))
    dtype, size, calls = next(model.parameters()).dtype, 16 // parts, []

    def closure_on(begin):
        def closure():
            calls.append(begin)
            if len(calls) == raises_at:
                raise RuntimeError("planted")
            rows = slice(begin, begin + size)
            loss = nn.functional.cross_entropy(model(inputs[rows].to(dtype)).float(), targets[rows])
            loss.backward()
            return loss

        return closure

    return [closure_on(size * j) for j in range(parts)]


def make_replicas(step, scratch):
    """Return replicas as a capture makes them."""
    state = CapturedModelState(step.space.model_state, SameRandom(), concurrent=len(scratch) > 1)
    state.begin_step()
    step.space.gradient_mean.begin_step()
    replicas = [step.space.replica(memory.point) for memory in scratch]
    for replica in replicas:
        replica.model_state = replica.evaluator.model_state = state
        replica.evaluator.begin_step(step.closures, step.ascent_closure)
    return replicas


def take_captured_step(optimizer, closures, *, concurrent, streams=None):
    """Take a step as a graph would, without one."""
    with torch.no_grad():
        step = optimizer.begin(closures)
        scratch = allocate_scratch(step.space, step.num_samples if concurrent else 1)
        if streams is not None:
            scratch = [memory._replace(stream=stream) for memory, stream in zip(scratch, streams, strict=True)]
        replicas = make_replicas(step, scratch)
        try:
            if concurrent:
                record = average_samples_concurrently(optimizer, step, replicas, scratch)
            else:
                with weights_at(step.space.params, scratch[0].point):
                    record = optimizer.average_samples(replicas[0], step.sampler, step.num_samples)
        finally:
            replicas[0].model_state.end_step()
        loss = record.loss()
        replicas[-1].gradient_mean.assign()
        optimizer.base.step()
        passes = {
            name: sum(getattr(replica.evaluator, name) for replica in replicas)
            for name in ("num_forwards", "num_backwards", "num_ascents")
        }
        info = StepInfo(loss, record.table, record.sampler_info, valid=record.valid, **passes)
        optimizer._finish(info)
    return info


@pytest.mark.parametrize("concurrent", [False, True])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float64, {"radius": 0.0}),
        (torch.float32, {"rho": 0.0}),
        (torch.float64, {"sampler": "uniform"}),
        (torch.float32, {"sampler": Ascent(num_steps=2)}),
        (torch.float32, {"sampler": HMC(num_steps=2, step_size=0.02)}),
        (torch.float32, {"sampler": DoubleAscent()}),
    ],
    ids=["ascent", "no_noise", "no_ascent", "uniform", "two_ascents", "hmc", "users_sampler"],
)
def test_steps_at_scratch_weights_equal_eager_steps(concurrent, parts, dtype, options):
    (one, first), (other, second) = (build(dtype, **options) for _ in range(2))
    addresses = [p.data_ptr() for p in other.parameters()]
    eager, captured = closures_for(one, parts=parts), closures_for(other, parts=parts)
    for seed in range(4):
        torch.manual_seed(seed)
        first.step(eager)
        torch.manual_seed(seed)
        info = take_captured_step(second, captured, concurrent=concurrent)
    for name in ("losses", "weights", "perturbation_norms", "gradient_norms", "start_losses", "loss"):
        torch.testing.assert_close(getattr(first.info, name), getattr(info, name), rtol=0, atol=0, msg=name)
    for name in ("num_forwards", "num_backwards", "num_ascents"):
        assert getattr(first.info, name) == getattr(info, name)
    for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert [p.data_ptr() for p in other.parameters()] == addresses


@pytest.mark.parametrize("sampler", ["ascent", "uniform", "gaussian", "hmc"])
def test_replica_leaves_the_weights_untouched(sampler):
    model, optimizer = build(sampler=sampler)
    step = optimizer.begin(closures_for(model))
    before = [p.detach().clone() for p in model.parameters()]
    versions = [p.detach()._version for p in model.parameters()]
    scratch = allocate_scratch(step.space, 1)
    (replica,) = make_replicas(step, scratch)
    theta = [p.data for p in model.parameters()]
    with torch.no_grad(), weights_at(step.space.params, scratch[0].point):
        for a, b in zip(replica.center, theta, strict=True):
            assert a.data_ptr() == b.data_ptr()  # not the memory that the parameters use now
        step.sampler.sample(replica, 0, step.sampler.begin(replica))
        for p, x, home in zip(model.parameters(), scratch[0].point, theta, strict=True):
            assert p.data_ptr() == x.data_ptr()
            assert not torch.equal(x, home)
    for p, home, version in zip(model.parameters(), before, versions, strict=True):
        assert torch.equal(p, home)
        assert p.detach()._version == version


def test_replicas_share_the_mean_of_gradients():
    model, optimizer = build()
    step = optimizer.begin(closures_for(model))
    replicas = make_replicas(step, allocate_scratch(step.space, 2))
    replicas[0].gradient_mean.begin_step()
    one, half = torch.ones(()), torch.tensor(0.5)
    with torch.no_grad():
        for replica, share, value in zip(replicas, (one, half), (1.0, 3.0), strict=True):
            gradient = [torch.full_like(p, value) for p in step.space.params]
            replica.gradient_mean.add(gradient, share, torch.tensor(True))
    assert all(replicas[0].gradient_mean.seen)
    assert all((mean == 2.0).all() for mean in replicas[-1].gradient_mean.tensors)


def test_release_vectors_keeps_only_the_weights():
    """A graph keeps its replicas; the next graph may use the memory of their passes."""
    model, optimizer = build(sampler="hmc")
    step = optimizer.begin(closures_for(model))
    scratch = allocate_scratch(step.space, 1)
    (replica,) = make_replicas(step, scratch)
    with torch.no_grad(), weights_at(step.space.params, scratch[0].point):
        step.sampler.sample(replica, 0, None)
    assert replica._gradient
    assert replica._scratch
    replica.release_vectors()
    assert not replica._gradient
    assert not replica._scratch
    assert replica._point is scratch[0].point


@pytest.mark.parametrize("concurrent", [False, True])
def test_error_in_a_pass_restores_the_memory_of_the_weights(concurrent):
    model, optimizer = build()
    before = [p.detach().clone() for p in model.parameters()]
    addresses = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="planted"):
        take_captured_step(optimizer, closures_for(model, raises_at=5), concurrent=concurrent)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert all(torch.equal(p, home) for p, home in zip(model.parameters(), before, strict=True))


class Stream:
    """Records which streams it waited for."""

    def __init__(self):
        self.waited_for = []

    def wait_stream(self, other):
        self.waited_for.append(other)


@pytest.mark.parametrize(("raises_at", "forked"), [(None, 4), (5, 3)])
def test_all_forked_streams_are_joined(monkeypatch, raises_at, forked):
    """Otherwise a capture could not end, nor report what was raised in it. It must not wait for other streams."""
    model, optimizer = build()
    main, streams = Stream(), [Stream() for _ in range(4)]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    closures = closures_for(model, raises_at=raises_at)
    with nullcontext() if raises_at is None else pytest.raises(RuntimeError, match="planted"):
        take_captured_step(optimizer, closures, concurrent=True, streams=streams)
    assert set(main.waited_for) == set(streams[:forked])
    assert [stream.waited_for for stream in streams] == [[main]] * forked + [[]] * (4 - forked)


class InterruptedParameter(nn.Parameter):
    """Raises KeyboardInterrupt when the memory of some parameter is replaced for the n-th time."""

    left = -1

    @property
    def data(self):
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value):
        torch.Tensor.data.__set__(self, value)
        InterruptedParameter.left -= 1
        if InterruptedParameter.left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("moment", range(1, 7))
def test_weights_at_restores_after_keyboard_interrupt(moment):
    params = [InterruptedParameter(torch.ones(2)) for _ in range(3)]
    addresses = [p.data_ptr() for p in params]
    InterruptedParameter.left = moment
    with pytest.raises(KeyboardInterrupt), weights_at(params, [torch.zeros(2) for _ in params]):
        assert all(p.tolist() == [0.0, 0.0] for p in params)
    assert [p.data_ptr() for p in params] == addresses
    assert all(p.tolist() == [1.0, 1.0] for p in params)


def test_weights_at_complex_parameters():
    p = nn.Parameter(torch.tensor([1.0 + 2.0j]))
    with weights_at([p], [torch.tensor([[3.0, 4.0]])]):
        assert p.tolist() == [3.0 + 4.0j]
    assert p.tolist() == [1.0 + 2.0j]


def test_captured_steps_share_scratch_weights():
    model, optimizer = build()
    captured = tiltsam.capture(optimizer, model, concurrent=True)
    step = optimizer.begin(closures_for(model))
    state = step.space.model_state
    one, other = captured._replicas(step, state, 4, 8), captured._replicas(step, state, 3, 8)
    assert (len(one), len(other)) == (4, 3)
    assert all(a._point is b._point for a, b in zip(one, other, strict=False))
    assert len(captured._scratch) == 4


def test_can_run_concurrently():
    assert can_run_concurrently(Ascent())
    assert can_run_concurrently(Uniform())
    assert can_run_concurrently(HMC())
    assert not can_run_concurrently(Ascent(share_ascent=True))
    assert not can_run_concurrently(CenterThenAscent())


def test_one_sample_does_not_run_concurrently():
    for num_samples, expected in ((1, False), (4, True)):
        model, optimizer = build(num_samples=num_samples)
        captured = tiltsam.capture(optimizer, model, concurrent=True)
        optimizer.step(closures_for(model))
        assert captured._runs_concurrently(optimizer.begin(closures_for(model))) is expected


def test_concurrent_passes_do_not_write_constant_buffers():
    """Other passes read them meanwhile."""
    model, optimizer = build()
    model.register_buffer("constant", torch.ones(3))
    optimizer.step(closures_for(model))
    version = model.constant._version
    take_captured_step(optimizer, closures_for(model), concurrent=True)
    assert model.constant._version == version
    assert not optimizer.current_space().model_state.changes_other_buffers()
    optimizer.step(closures_for(model))
    assert model.constant._version > version


def test_capture_concurrent_requires_model():
    weight = nn.Parameter(torch.ones(3))
    optimizer = tiltsam.TSAM(torch.optim.SGD([weight], lr=0.1), num_samples=3)
    with pytest.raises(ValueError, match="model="):
        tiltsam.capture(optimizer, lambda x: (weight * x).sum(), concurrent=True)


@pytest.mark.parametrize(("method", "sampler"), [("pgn", "CenterThenAscent"), ("tsam", "share_ascent=True")])
def test_capture_concurrent_refuses_shared_ascent(method, sampler):
    model, options = nn.Linear(3, 1), {"share_ascent": True} if method == "tsam" else {}
    optimizer = tiltsam.METHODS[method](torch.optim.SGD(model.parameters(), lr=0.1), model=model, **options)
    with pytest.raises(ValueError, match=sampler):
        tiltsam.capture(optimizer, lambda x: model(x).sum(), concurrent=True)
