"""A small problem, and the loop written by hand that every trainer is compared with."""

import os
import runpy
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from helpers.cases import METHODS
from helpers.jobs import flat

BY_NAME = {m.name: m for m in METHODS}
BATCH, STEPS = 12, 20
CLIP = 0.2  # small enough to clip at most steps


class Rows(Dataset):
    """Five batches of examples: 20 steps are four epochs, in the same order each."""

    def __init__(self, as_dict=False, dtype=torch.float64):
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(5 * BATCH, 6, generator=generator, dtype=dtype)
        self.y = torch.randint(3, (5 * BATCH,), generator=generator)
        self.as_dict = as_dict

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.y[i]} if self.as_dict else (self.x[i], self.y[i])


def loader(parts=1, **options):
    """Return batches of the problem, each divided into parts."""
    return DataLoader(Rows(**options), batch_size=BATCH // parts)


def net(dtype=torch.float64):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 3)).to(dtype)


def optimizer_for(model, method="tsam", **options):
    base = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=5e-4)
    return BY_NAME[method](base, model=model, **options)


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.5)


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def plain(
    method="tsam",
    steps=STEPS,
    clip=None,
    model=None,
    scheduled=True,
    autocast=False,
    dtype=torch.float64,
    after=lambda model: None,
):
    """Train by hand; return the weights, and the loss of the first pass of each step."""
    model = net(dtype) if model is None else model
    optimizer = optimizer_for(model, method)
    scheduler = halving(optimizer)
    if clip is not None:
        optimizer.base.register_step_pre_hook(lambda *_: clip_(model, clip))
    batches, firsts = list(loader(dtype=dtype)), []
    for step in range(steps):
        x, y = batches[step % len(batches)]
        losses = []

        def closure(x=x, y=y, losses=losses):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = loss_of(model, x, y)
            loss.backward()
            losses.append(loss.item())
            return loss

        optimizer.step(closure)
        firsts.append(losses[0])
        after(model)
        if scheduled:
            scheduler.step()
    return flat(model), firsts


def averages(power=8):
    """Return the averaged weights after each step of the loop by hand, starting with the initial weights."""
    found, seen = [flat(net())], []
    plain(after=lambda model: seen.append(flat(model)))
    for k, weights in enumerate(seen, 1):
        found.append(found[-1] + (power + 1) / (k + power) * (weights - found[-1]))
    return found


def clip_(model, norm):
    nn.utils.clip_grad_norm_(model.parameters(), norm)


def example(name):
    """Run an example and return what it defined."""
    path = Path(__file__).parents[2] / "examples" / name
    assert len(path.read_text().splitlines()) <= 30
    return runpy.run_path(str(path))


def accuracy(model):
    """Return the accuracy on digits."""
    from sklearn.datasets import load_digits

    device = next(model.parameters()).device  # trainers move a model to a GPU
    x, y = (torch.from_numpy(a).to(device) for a in load_digits(return_X_y=True))
    with torch.no_grad():
        return (model.eval()(x.float() / 16).argmax(1) == y).float().mean().item()


def assert_close(a, b):
    """Assert equality up to the order of sums."""
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


# ---------------------------------------------------------------- on two ranks, each with half of every batch


def as_rank(rank, size):
    """Set the environment that torchrun gives a process."""
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "TORCHELASTIC_RUN_ID": "t",
    }
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29511, "GROUP_RANK": 0, "ACCELERATE_USE_CPU": "true"}
    os.environ.update({name: str(value) for name, value in variables.items()})
