"""The processes that train one run together, as ``torchrun`` starts them.

    torchrun --nproc-per-node 4 -m tiltsam train cifar100 --method tsam
    torchrun --nproc-per-node 3 -m tiltsam train cifar100 --method tsam --num-samples 3 --parallel samples

The batch size is the whole team's, and so are the results: a run is the same run whoever trains it, and may be begun by
one process and ended by four. (BatchNorm sees each process's part of a batch, and dropout draws other masks there, as
always in data-parallel training.) Passes are counted on the first process, so a budget of them is not for a team that
divides samples. That process alone writes the record; all read checkpoints from it, so that on several hosts the folder
has to be one they share. A worker that dies takes the others down within the timeout, and ``torchrun --max-restarts``
starts all of them again from the last checkpoint.
"""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

import tiltsam
from tiltsam.lab.errors import ConfigError

__all__ = ["Split", "Team", "team_of_this_process"]

Split = Literal["data", "samples"]
"""What is divided: each batch, or the samples of each step."""


class Team:
    """One process of a team; by default the only one.

    Args:
        rank: Which one this is; the first is 0.
        size: How many there are.
        split: What they divide among them.
        device: Where this one computes, if the team says so.
    """

    def __init__(self, rank: int = 0, size: int = 1, split: Split = "data", device: str | None = None) -> None:
        self.rank, self.size, self.split, self.device = rank, size, split, device

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    def check(self, batch_size: int, passes: float | None = None) -> None:
        """Raise if a batch cannot be divided evenly, or a budget of passes not be kept."""
        if passes is not None and self.split == "samples" and self.size > 1:
            raise ConfigError(
                "--passes counts those of one process, which here has some of the samples: say --epochs or --seconds"
            )
        if self.split == "data" and batch_size % self.size:
            raise ConfigError(f"a batch of {batch_size} cannot be divided evenly among {self.size} processes")

    def remarks(self, num_samples: int) -> list[str]:
        """What is to be said of processes that have nothing to do."""
        if self.split == "data" or num_samples >= self.size:
            return []
        has = f"{num_samples} sample{'s' if num_samples > 1 else ''}"
        return [
            f"{self.size} processes share {has}: --parallel samples is for tsam with --num-samples {self.size}, or more"
        ]

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model that steps call: it averages gradients where the team divides batches."""
        if self.size == 1 or self.split == "samples":
            return model
        return DistributedDataParallel(model)

    def parallel(self) -> tiltsam.Parallel | None:
        """What the optimizer is told."""
        if self.size == 1:
            return None
        return tiltsam.Parallel(samples=dist.group.WORLD if self.split == "samples" else None)

    def part(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """This process's part of a batch."""
        if self.size == 1 or self.split == "samples":
            return batch
        return tuple(x[self.rank :: self.size] for x in batch)

    def draw_apart(self, seed: int, epoch: int) -> None:
        """Let processes with examples of their own draw masks of their own (dropout's), the same when resumed."""
        if self.rank and self.split == "data":
            torch.manual_seed(((1_000_003 * seed + epoch) * 1_000_003 + self.rank) % 2**63)

    def agree(self, value: float) -> float:
        """The first process's value, for all."""
        if self.size == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64, device=self.device or "cpu")
        dist.broadcast(shared, 0)
        return float(shared.item())

    def tell(self, value: Any) -> Any:
        """Anything the first process has, for all; also a point that none passes before all have reached it."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, 0, device=torch.device(self.device or "cpu"))
        return box[0]


@contextmanager
def team_of_this_process(split: Split, device: str, *, timeout: float = 300.0) -> Iterator[Team]:
    """The team that ``torchrun`` has put this process in, connected while the context lasts.

    Args:
        split: What the team divides.
        device: The config's device: on GPUs each process takes the one of its local rank.
        timeout: Seconds after which a silent team member counts as dead.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Team(split=split)
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", local + 1)), torch.cuda.device_count()
        if here > gpus:  # all of them find it, so that the one that speaks does
            raise ConfigError(f"{here} processes of this host need a GPU each, and it has {gpus}")
        torch.cuda.set_device(local)
    _connect("nccl" if on_gpu else "gloo", timeout)
    try:
        yield Team(dist.get_rank(), size, split, f"cuda:{local}" if on_gpu else "cpu")
    finally:
        # Whoever holds on to the group, as an optimizer in a cycle does, keeps gloo's threads alive, and now and again
        # one of them aborts the process on its way out.
        gc.collect()
        dist.destroy_process_group()


def _connect(backend: str, timeout: float) -> None:
    """Connect the processes.

    The store through which they find each other outlives them when ``torchrun`` starts them again. Under the old names
    they would find the addresses of the dead, and be refused or wait for ever.
    """
    importlib.import_module("torch._dynamo")  # loaded later, with the first optimizer, it holds on to the group
    store, rank, size = next(iter(rendezvous("env://")))
    own = PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
