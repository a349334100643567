"""torch.compile beside us: a compiled model keeps its speed in a step, and our tensor work can be compiled whole."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

import tiltsam
from tiltsam import vectors


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def batch_norm_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


@pytest.mark.parametrize("method", ["erm", "sam", "tsam", "esam2", "pgn"])
def test_a_compiled_model_is_compiled_twice_at_most_and_never_broken(method):
    """Once as it is, once with BatchNorm's statistics at rest (esam2: each of them without gradients too)."""
    model = batch_norm_net()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    optimizer = tiltsam.METHODS[method](torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    x = torch.randn(16, 5)

    def closure():
        loss = compiled(x).square().mean()
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)
    assert not counters["graph_break"]
    assert counter.frame_count == {"erm": 1, "esam2": 3}.get(method, 2)


def test_a_compiled_model_trains_as_the_model_does():
    ends = []
    for compile_it in (False, True):
        model = batch_norm_net()
        call = torch.compile(model, backend="aot_eager") if compile_it else model
        optimizer = tiltsam.TSAM(torch.optim.SGD(model.parameters(), lr=0.1), num_samples=3, model=model, radius=0.1)
        torch.manual_seed(1)
        x = torch.randn(16, 5)

        def closure(call=call, x=x):
            loss = call(x).square().mean()
            loss.backward()
            return loss

        for _ in range(5):
            optimizer.step(closure)
        ends.append(torch.cat([v.flatten().float() for v in model.state_dict().values()]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("foreach", [True, False])
def test_the_work_on_vectors_compiles_without_a_break(foreach):
    x, y, z = ([torch.randn(n) for n in (3, 4)] for _ in range(3))
    scale, yes = torch.tensor(0.5), torch.tensor(True)

    def stages(point, gradient, mean):
        vectors.scale_(point, scale, foreach=foreach)
        length = vectors.norm(gradient, torch.float32, foreach=foreach)
        vectors.keep_(gradient, yes, foreach=foreach)
        vectors.add_scaled_(point, gradient, scale, foreach=foreach)
        vectors.lerp_(mean, gradient, scale, foreach=foreach)
        vectors.copy_(gradient, point, foreach=foreach)
        return length, vectors.dot(point, mean, torch.float32)

    copies = [[a.clone() for a in v] for v in (x, y, z)]
    expected = stages(*copies)
    found = torch.compile(stages, backend="eager", fullgraph=True)(x, y, z)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close([x, y, z], copies)
