"""Random states of the passes of a captured step."""

import pytest
import torch

from tiltsam.graphs.random_state import CapturedModelState, CapturedRandom
from tiltsam.space.model_state import ModelState

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Generator:
    """What a replay uses of a generator."""

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


def test_replaying_advances_the_default_generator_by_the_last_pass():
    """As an eager step does. An ascent on part of the batch draws fewer numbers than the last pass."""
    random = object.__new__(CapturedRandom)
    random._default, random._whole, random._passes = Generator(100), Generator(), [Generator(), Generator()]
    with random.replaying():
        assert [generator.offset for generator in random._passes] == [100, 100]
        for generator, drawn in zip(random._passes, (4, 12), strict=True):
            generator.offset += drawn
    assert random._default.offset == 112


def test_replaying_without_passes_advances_by_the_whole_step():
    random = object.__new__(CapturedRandom)
    random._default, random._whole, random._passes = Generator(100), Generator(), []
    with random.replaying():
        random._whole.offset += 20
    assert random._default.offset == 120


class Passes:
    """Records for which passes the random state was set."""

    def __init__(self):
        self.numbers = []

    def begin_pass(self, number):
        self.numbers.append(number)


class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))


@pytest.mark.parametrize(("concurrent", "calls"), [(False, 1.0), (True, 3.0)])
def test_captured_model_state_restores_buffers_unless_concurrent(concurrent, calls):
    model, random = Counter(), Passes()
    state = CapturedModelState(ModelState(model), random, concurrent=concurrent)
    state.begin_step()
    for _ in range(3):
        state.begin_pass()
        model.calls += 1
        state.end_pass()
    state.end_step()
    assert random.numbers == [0, 1, 2]
    assert model.calls == calls


class SlowGraph(torch.cuda.CUDAGraph):
    """A graph whose capture has to wait on its own stream, as on a busy GPU."""

    def capture_begin(self, *args, **kwargs):
        torch.cuda._sleep(10**8)
        super().capture_begin(*args, **kwargs)


@cuda
@pytest.mark.parametrize("graph_type", [torch.cuda.CUDAGraph, SlowGraph])
def test_captured_passes_draw_alike_and_as_eager_ones(graph_type):
    x = torch.ones(64, device="cuda")
    graph = graph_type()
    torch.nn.functional.dropout(x)  # initialises the generator
    random = CapturedRandom(graph, x.device, 2)
    try:
        with torch.cuda.graph(graph):
            masks = []
            for number in range(2):
                random.begin_pass(number)
                masks.append(torch.nn.functional.dropout(x))
    finally:
        random.end_capture()
    seen = []
    for seed in (3, 4):
        torch.cuda.manual_seed(seed)
        with random.replaying():
            graph.replay()
        after = torch.cuda.get_rng_state()
        assert torch.equal(*masks)
        seen.append(masks[0].clone())
        torch.cuda.manual_seed(seed)
        assert torch.equal(torch.nn.functional.dropout(x), masks[0])
        assert torch.equal(torch.cuda.get_rng_state(), after)
    assert not torch.equal(*seen)


@cuda
def test_failed_capture_leaves_the_default_generator_usable():
    graph = torch.cuda.CUDAGraph()
    x = torch.ones(64, device="cuda")
    random = CapturedRandom(graph, x.device, 1)

    def fail():
        try:
            with torch.cuda.graph(graph):
                random.begin_pass(0)
                torch.nn.functional.dropout(x).sum().item()
        finally:
            random.end_capture()

    with pytest.raises(Exception):  # noqa: B017 (the type depends on torch)
        fail()
    torch.cuda.synchronize()
    assert torch.rand(3, device="cuda").isfinite().all()
