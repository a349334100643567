"""Copies of a model's buffers, and restoring without interruption."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tiltsam.space.tensor_lists import is_expanded

__all__ = ["BufferSnapshot", "restored_buffers", "uninterrupted", "writable_buffers"]


class BufferSnapshot:
    """The buffers of some modules at one moment.

    BatchNorm's kernels do not raise a tensor's version counter, so a changed buffer cannot be recognised: all are
    copied, except those that cannot be written to. A module may also have assigned another tensor to the buffer's name
    (``self.mean = 0.9 * self.mean + …``); restoring assigns the old tensor again.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[nn.Module, str, Tensor | None]] = []
        self._tensors: list[list[Tensor]] = []  # those that can be written, by device and dtype
        self._values: list[list[Tensor]] = []

    def save(self, modules: Iterable[nn.Module]) -> None:
        """Copy the buffers of these modules, not of their children. Memory is reused if they are the same again."""
        entries = [(module, name, b) for module in modules for name, b in module._buffers.items()]
        if _same_entries(entries, self._entries):
            for values, tensors in zip(self._values, self._tensors, strict=True):
                torch._foreach_copy_(values, tensors)
            return
        self._entries = entries
        self._tensors = _by_device_and_dtype(b for _, _, b in entries)
        self._values = [[b.clone() for b in part] for part in self._tensors]

    def restore(self) -> None:
        """Write all buffers back; safe to repeat."""
        for module, name, b in self._entries:
            if name not in module._buffers or module._buffers[name] is not b:  # a ScriptModule's buffers have no get
                module._buffers[name] = b
        for tensors, values in zip(self._tensors, self._values, strict=True):
            torch._foreach_copy_(tensors, values)

    def differs_from(self, other: BufferSnapshot) -> bool:
        """Return whether any buffer in both snapshots differs. Waits for the device."""
        entries = {(id(module), name): b for module, name, b in other._entries}
        if any(entries.get((id(module), name), b) is not b for module, name, b in self._entries):
            return True
        values = other._by_address()
        pairs = [(value, values[address]) for address, value in self._by_address().items() if address in values]
        return not all(torch.equal(a, b) for a, b in pairs)

    def _by_address(self) -> dict[int, Tensor]:
        tensors = [b for part in self._tensors for b in part]
        return dict(zip([b.data_ptr() for b in tensors], [v for part in self._values for v in part], strict=True))


@contextmanager
def restored_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers on exit, whatever is raised."""
    snapshot = BufferSnapshot()
    snapshot.save(model.modules())
    try:
        yield
    finally:
        uninterrupted(snapshot.restore)


def writable_buffers(model: nn.Module | None) -> list[Tensor]:
    """Return the model's buffers that can be written to, grouped by device and dtype."""
    return [b for part in _by_device_and_dtype(model.buffers() if model is not None else ()) for b in part]


def uninterrupted(action: Callable[[], None]) -> None:
    """Run an action that may be repeated until it completes; raise a KeyboardInterrupt only afterwards."""
    interrupt: BaseException | None = None
    while True:
        try:
            action()
            break
        except (KeyboardInterrupt, SystemExit) as signal:
            interrupt = signal
    if interrupt is not None:
        raise interrupt


def _by_device_and_dtype(buffers: Iterable[Tensor | None]) -> list[list[Tensor]]:
    lists: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
    for b in buffers:
        if b is not None and b.numel() and _is_writable(b):
            lists.setdefault((b.device, b.dtype), {})[id(b)] = b.detach()
    return [list(part.values()) for part in lists.values()]


def _is_writable(b: Tensor) -> bool:
    return b.layout == torch.strided and not b.is_inference() and not is_expanded(b)


def _same_entries(a: list[tuple[nn.Module, str, Tensor | None]], b: list[tuple[nn.Module, str, Tensor | None]]) -> bool:
    return len(a) == len(b) and all(x[2] is y[2] and x[0] is y[0] and x[1] == y[1] for x, y in zip(a, b, strict=True))
