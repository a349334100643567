"""A model's buffers, kept and put back: which tensor stands where, and what is in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tiltsam import vectors

__all__ = ["KeptBuffers", "buffers_of", "kept_buffers", "to_the_end"]


class KeptBuffers:
    """The buffers of some modules at one moment.

    Whether a pass changed a buffer cannot be seen from outside (BatchNorm's kernels do not raise the version counter),
    so all are kept, but for those that cannot be written at all. A module may also have put another tensor in a
    buffer's place (``self.mean = 0.9 * self.mean + …``): then the one that was there comes back.
    """

    def __init__(self) -> None:
        self._places: list[tuple[nn.Module, str, Tensor | None]] = []
        self._tensors: list[list[Tensor]] = []  # those that can be written, by device and dtype
        self._values: list[list[Tensor]] = []

    def keep(self, modules: Iterable[nn.Module]) -> None:
        """Keep what these modules hold (not their children), in the memory of the last time if it fits."""
        self._places = [(module, name, b) for module in modules for name, b in module._buffers.items()]
        self._tensors = _in_lists(b for _, _, b in self._places)
        if [[_kind(b) for b in part] for part in self._tensors] != [[_kind(b) for b in part] for part in self._values]:
            self._values = [[b.clone() for b in part] for part in self._tensors]
            return
        for kept, there in zip(self._values, self._tensors, strict=True):
            vectors.copy_(kept, there)

    def differs_from(self, other: KeptBuffers) -> bool:
        """Whether what is kept here is something else there; what only one of them kept does not count."""
        places = {(id(module), name): b for module, name, b in other._places}
        if any(places.get((id(module), name), b) is not b for module, name, b in self._places):
            return True
        values = other._by_address()
        pairs = [(value, values[at]) for at, value in self._by_address().items() if at in values]
        return not all(torch.equal(mine, its) for mine, its in pairs)

    def _by_address(self) -> dict[int, Tensor]:
        tensors = [b for part in self._tensors for b in part]
        return dict(zip([b.data_ptr() for b in tensors], [v for part in self._values for v in part], strict=True))

    def put_back(self) -> None:
        """Make all that was kept as it was; may be called again."""
        for module, name, b in self._places:
            if name not in module._buffers or module._buffers[name] is not b:  # a scripted module's know no get
                module._buffers[name] = b
        for there, kept in zip(self._tensors, self._values, strict=True):
            vectors.copy_(there, kept)


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Whatever is done to a model's buffers inside is undone, whatever is raised."""
    kept = KeptBuffers()
    kept.keep(model.modules())
    try:
        yield
    finally:
        to_the_end(kept.put_back)


def buffers_of(model: nn.Module | None) -> list[Tensor]:
    """The model's buffers that can be written, those of one device and dtype together."""
    return [b for part in _in_lists(model.buffers() if model is not None else ()) for b in part]


def to_the_end(action: Callable[[], None]) -> None:
    """Do what must not be left half done: a Ctrl-C that falls into it is held until it is complete."""
    interrupt: BaseException | None = None
    while True:
        try:
            action()
            break
        except (KeyboardInterrupt, SystemExit) as signal:
            interrupt = signal
    if interrupt is not None:
        raise interrupt


def _in_lists(buffers: Iterable[Tensor | None]) -> list[list[Tensor]]:
    """Buffers in lists that one kernel can copy, each of them once."""
    lists: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
    for b in buffers:
        if b is not None and b.numel() and _writable(b):
            lists.setdefault((b.device, b.dtype), {})[id(b)] = b.detach()
    return [list(part.values()) for part in lists.values()]


def _writable(b: Tensor) -> bool:
    """Whether values can be copied into it: not if it is sparse, expanded, or made in inference mode."""
    return b.layout == torch.strided and not b.is_inference() and not vectors.expanded(b)


def _kind(b: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return b.shape, b.dtype, b.device
