"""The bytes that a step needs above a plain step of its base, counted in torch's allocator."""

import gc

import pytest
import torch
from torch import nn

import tiltsam
from timing import allocated_peak

WIDTH = 256  # the weights of a layer have 256 times the bytes of its activations
# On a CPU the norm of a bfloat16 tensor needs a float32 copy of it: with 64 layers 1/32 of the weights' bytes.
DEPTH = 64


def peak(make_step, dtype):
    """Return the peak bytes of three steps above the model's, in copies of the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))).to(dtype)
    x = torch.randn(1, WIDTH, dtype=dtype)

    def closure():
        loss = model(x).square().mean()
        loss.backward()
        return loss

    def run():
        step = make_step(model, closure)
        for _ in range(3):
            step()

    gc.collect()
    return allocated_peak(run, torch.device("cpu")) / sum(p.nbytes for p in model.parameters())


def plain(model, closure):
    base = torch.optim.AdamW(model.parameters(), fused=True)  # fused: no temporary vectors

    def step():
        base.zero_grad()
        closure()
        base.step()

    return step


def wrapped(method, **options):
    def make(model, closure):
        base = torch.optim.AdamW(model.parameters(), fused=True)
        optimizer = tiltsam.METHODS[method](base, model=model, **options)
        return lambda: optimizer.step(closure)

    return make


@pytest.mark.filterwarnings("ignore:weights are bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("method", "options", "copies"),
    [
        ("erm", {}, 0),
        ("sam", {}, 1),  # the weights
        ("rsam", {}, 1),
        ("pgn", {}, 2),  # the weights and the mean of gradients
        ("tsam", {"num_samples": 1}, 1),
        ("tsam", {"num_samples": 3}, 2),
        ("tsam", {"num_samples": 8}, 2),
        ("tsam", {"num_samples": 3, "share_ascent": True}, 3),
    ],
    ids=lambda value: str(value).replace("'", ""),
)
def test_copies_above_the_base(method, options, copies, dtype):
    above = peak(wrapped(method, **options), dtype) - peak(plain, dtype)
    assert above == pytest.approx(copies, abs=0.05)
