"""Where runs compute, and what suits that place."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from tiltsam.lab.errors import ConfigError

__all__ = ["Leash", "one_thread", "resolve_device", "suited_to"]

SMALL_MODEL = 500_000  # parameters
LEASH = 16  # steps between looks at how far a GPU is


def resolve_device(name: str) -> torch.device:
    """The device of that name; ``auto`` is a GPU if there is one.

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
        except Exception:  # each kind has an error of its own
            raise ConfigError(f"device {name!r} is not available here: use --device cpu") from None
    return device


class Leash:
    """Keeps the host within 32 steps of a GPU, without ever letting the GPU wait.

    A captured step is issued in a fraction of the time it takes. Unbound, the host would be done with an epoch that the
    GPU has hardly begun, and a budget in seconds would be spent long before the host's clock shows it.

    Args:
        device: Where steps run; on a CPU they are done when they return.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._steps = 0
        self._marks: deque[torch.cuda.Event] = deque()

    def pull(self) -> None:
        """A step was issued."""
        self._steps += 1
        if self._on_gpu and self._steps % LEASH == 0:
            mark = torch.cuda.Event(blocking=True)
            mark.record()
            self._marks.append(mark)
            if len(self._marks) > 1:
                self._marks.popleft().synchronize()


@contextmanager
def suited_to(device: torch.device, model: nn.Module) -> Iterator[None]:
    """Inside, torch is set up for training or measuring the model there.

    On a CPU, a small model gets one thread: its tiny kernels cost more to share out than to run. On a GPU, cuDNN looks
    for its fastest convolutions: shapes stay the same throughout.
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
    """Run torch's CPU kernels on one thread inside the context: small ones cost more to share out than to run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
