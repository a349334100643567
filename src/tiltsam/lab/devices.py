"""Where a run is trained: device, versions, torch's settings, and the ranks that ``torchrun`` starts.

    torchrun --nproc-per-node 4 -m tiltsam train cifar100 --method tsam
    torchrun --nproc-per-node 3 -m tiltsam train cifar100 --method tsam --num-samples 3 --parallel samples

The batch size is that of all ranks together, so a run has the same name and the same results for any number of ranks:
it may be started by one process and finished by four. (BatchNorm sees each rank's part of a batch, and dropout draws
other masks there, as always in data-parallel training.) Passes are counted on rank 0, so a budget of passes cannot be
used when ranks divide samples. Rank 0 alone writes the record; all ranks read checkpoints from it, so hosts must share
the folder. If a rank dies, the others fail within the timeout, and ``torchrun --max-restarts`` starts all of them again
from the last checkpoint.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib
import os
import platform
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

import tiltsam
from tiltsam.lab.errors import ConfigError
from tiltsam.lab.stats import count_of

__all__ = [
    "DistributedContext",
    "ParallelMode",
    "RunAheadLimit",
    "code_digest",
    "connect_ranks",
    "describe_environment",
    "digest_of",
    "one_thread",
    "resolve_device",
    "torch_settings",
]

SMALL_MODEL = 500_000  # parameters
SYNC_STEPS = 16  # steps between events on the GPU
TIMEOUT = 300.0  # seconds after which a silent rank counts as dead

ParallelMode = Literal["data", "samples"]
"""What ranks divide: each batch, or the samples of each step."""


def resolve_device(name: str) -> torch.device:
    """Return the device of that name; ``auto`` is a GPU if there is one.

    Raises:
        ConfigError: If there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"unknown device {name!r}") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"no CUDA device {device.index or 0} is available: use --device cpu")
    if device.type not in ("cpu", "cuda"):
        try:
            torch.zeros((), device=device).item()
        except Exception:  # each kind of device has its own error
            raise ConfigError(f"device {name!r} is not available here: use --device cpu") from None
    return device


class RunAheadLimit:
    """Keeps the host at most 32 steps ahead of the GPU, without making the GPU wait.

    A captured step is launched in a fraction of the time it takes. Without a limit, the host would finish an epoch that
    the GPU has hardly started, and a budget in seconds would be overspent before the host's clock shows it. On a CPU
    nothing is limited.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._steps = 0
        self._marks: deque[torch.cuda.Event] = deque()

    def step(self) -> None:
        """Count a launched step, and wait if the host is too far ahead."""
        self._steps += 1
        if self._on_gpu and self._steps % SYNC_STEPS == 0:
            mark = torch.cuda.Event(blocking=True)
            mark.record()
            self._marks.append(mark)
            if len(self._marks) > 1:
                self._marks.popleft().synchronize()


@contextmanager
def torch_settings(device: torch.device, model: nn.Module) -> Iterator[None]:
    """Set up torch for training or measuring the model on the device, inside the context.

    On a CPU, a small model gets one thread: its kernels are too small to be parallelised. On a GPU, cuDNN benchmarks
    its convolutions, because shapes do not change.
    """
    small = device.type == "cpu" and sum(p.numel() for p in model.parameters()) < SMALL_MODEL
    search = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = device.type == "cuda" or search
    try:
        with one_thread() if small else nullcontext():
            yield
    finally:
        torch.backends.cudnn.benchmark = search


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's CPU kernels on one thread inside the context: small ones do not gain from more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class DistributedContext:
    """One of the ranks that train a run together; by default the only one."""

    rank: int = 0
    world_size: int = 1
    mode: ParallelMode = "data"
    device: str | None = None
    """The device of this rank; None leaves the choice to the config."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes the record and prints."""
        return self.rank == 0

    @property
    def divides_batches(self) -> bool:
        """Whether each rank sees its own part of a batch."""
        return self.world_size > 1 and self.mode == "data"

    def check_config(self, batch_size: int, passes: float | None = None) -> None:
        """Raise a ConfigError if ranks cannot divide the batch, or if passes are limited while they divide samples."""
        if passes is not None and self.mode == "samples" and self.world_size > 1:
            raise ConfigError(
                f"passes must be None with --parallel samples, got {passes:g}: each rank computes only some of them; "
                "pass --epochs or --seconds instead"
            )
        if self.mode == "data" and batch_size % self.world_size:
            raise ConfigError(f"batch size must be divisible by {self.world_size} processes, got {batch_size}")

    def idle_ranks_warning(self, num_samples: int) -> str | None:
        """Return a warning if samples cannot be divided, or some ranks have none to work on."""
        if self.mode == "samples" and self.world_size == 1:
            return "--parallel samples has no effect in one process: start it with torchrun"
        if self.mode == "data" or num_samples >= self.world_size:
            return None
        count = count_of(num_samples, "sample")
        return (
            f"{self.world_size} processes share {count}: --parallel samples needs tsam with at least "
            f"--num-samples {self.world_size}"
        )

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model to train: inside DistributedDataParallel if ranks divide batches."""
        return DistributedDataParallel(model) if self.divides_batches else model

    def parallel(self) -> tiltsam.Parallel | None:
        """Return the optimizer's ``parallel`` argument."""
        if self.world_size == 1:
            return None
        return tiltsam.Parallel(samples=dist.group.WORLD if self.mode == "samples" else None)

    def local_batch(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return this rank's part of a batch."""
        return tuple(x[self.rank :: self.world_size] for x in batch) if self.divides_batches else batch

    def seed_dropout(self, seed: int, epoch: int) -> None:
        """Seed torch differently on each rank that has its own examples; a resumed epoch is seeded the same."""
        if self.rank and self.mode == "data":
            torch.manual_seed(((1_000_003 * seed + epoch) * 1_000_003 + self.rank) % 2**63)

    def broadcast(self, value: float) -> float:
        """Return rank 0's value on all ranks."""
        if self.world_size == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64, device=self.device or "cpu")
        dist.broadcast(shared, 0)
        return float(shared.item())

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's object on all ranks. Also a barrier."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, 0, device=torch.device(self.device or "cpu"))
        return box[0]


@contextmanager
def connect_ranks(mode: ParallelMode, device: str) -> Iterator[DistributedContext]:
    """Connect to the other processes that ``torchrun`` started, while the context lasts.

    On GPUs each process takes that of its local rank, unless the config's device is ``cpu``.

    Raises:
        ConfigError: If this host has fewer GPUs than processes.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield DistributedContext(mode=mode)
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", local + 1)), torch.cuda.device_count()
        if here > gpus:  # raised on all ranks, so that rank 0 prints it
            raise ConfigError(f"each process on this host needs a GPU, got {here} processes and {gpus} GPUs")
        torch.cuda.set_device(local)
    _init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield DistributedContext(dist.get_rank(), world_size, mode, f"cuda:{local}" if on_gpu else "cpu")
    finally:
        # A reference cycle that holds the group, such as an optimizer's, keeps gloo's threads alive, and one of them
        # sometimes aborts the process at its exit.
        gc.collect()
        dist.destroy_process_group()


def _init_process_group(backend: str) -> None:
    """Initialise the process group under names of this restart.

    The store through which ranks find each other survives a restart by ``torchrun``. Under the old names they would
    find the addresses of dead processes, and be refused or wait forever.
    """
    importlib.import_module("torch._dynamo")  # loaded later, with the first optimizer, it would hold the group
    store, rank, size = next(iter(rendezvous("env://")))
    own = PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT))


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Return the versions, the digest of the code, the device and the number of threads."""
    environment: dict[str, Any] = {
        "tiltsam": tiltsam.__version__,
        "code": code_digest(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": str(device),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        environment["gpu"] = torch.cuda.get_device_name(device)
    return environment


@functools.cache
def code_digest() -> str:
    """Return twelve hexadecimal digits that identify the source files of ``tiltsam``, lab included.

    Runs record it, because one version number covers many commits. The same sources have the same digest wherever they
    are installed. ``tiltsam --version`` prints it.
    """
    return digest_of(Path(__file__).parents[1])


def digest_of(package: Path) -> str:
    """Return the digest of the names and contents of the Python files in a folder."""
    digest = hashlib.sha256()
    sources = (path for path in package.rglob("*.py") if path.is_file())  # an editor's lock is a broken link
    for name, path in sorted((path.relative_to(package).as_posix(), path) for path in sources):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]
