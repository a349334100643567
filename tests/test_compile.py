"""Compiled models in a step."""

import pytest
import torch
from torch import nn

import tiltsam

# Importing Inductor warns of torch's own use of TorchScript on some versions.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:`torch\.jit\.:DeprecationWarning", r"ignore:`torch\.jit\.:FutureWarning"
)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def batch_norm_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


@pytest.mark.parametrize("method", ["erm", "sam", "tsam", "esam2", "pgn"])
def test_compiled_model_has_no_graph_breaks(method):
    """It is compiled once as it is, once with paused statistics, and for esam2 once without gradients."""
    from torch._dynamo.testing import CompileCounter

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
    assert not torch._dynamo.utils.counters["graph_break"]
    assert counter.frame_count == {"erm": 1, "esam2": 3}.get(method, 2)


def test_compiled_model_trains_as_the_model_does():
    ends = []
    for compiled in (False, True):
        model = batch_norm_net()
        call = torch.compile(model, backend="aot_eager") if compiled else model
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
