"""The device of a run, and torch's settings for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from tiltsam.lab.errors import ConfigError

__all__ = ["RunAheadLimit", "one_thread", "resolve_device", "torch_settings"]

SMALL_MODEL = 500_000  # parameters
SYNC_STEPS = 16  # steps between events on the GPU


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
    the GPU has hardly started, and a budget in seconds would be overspent before the host's clock shows it.

    Args:
        device: The device of the steps; on a CPU nothing is limited.
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
