"""BatchNorm statistics and dropout masks across the passes of one step.

A sharpness-aware step runs the model several times on one mini-batch. Left alone, BatchNorm would update its running
statistics in every pass, mostly at perturbed weights, and dropout would draw a new mask each time, so losses would
differ by the mask and not by the perturbation alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tiltsam.space.tensor_lists import is_expanded

__all__ = ["BufferSnapshot", "ModelState", "restored_buffers", "uninterrupted"]

# Only these implementations of forward are known to respect track_running_stats = False.
_RESPECT_TRACKING = (_BatchNorm.forward, torch.nn.SyncBatchNorm.forward)


class ModelState:
    """What the passes of a step share, besides the weights.

    Args:
        model: The model; ``None`` leaves buffers alone.
        buffers_once: Buffers keep the values of the first pass.
        same_dropout: All passes start from the random state of the first, on CPU and CUDA devices. After the step the
            global generators have advanced by one pass, as with the base optimizer.
        devices: Devices of the parameters: each GPU among them has a random state.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        *,
        buffers_once: bool = True,
        same_dropout: bool = True,
        devices: Sequence[torch.device] = (),
    ) -> None:
        self.model = model
        self.buffers_once = buffers_once and model is not None
        self.same_dropout = same_dropout
        self.num_passes = 0
        self._gpus = sorted({d.index for d in devices if d.type == "cuda" and d.index is not None})
        self._module_list: list[torch.nn.Module] = []
        self._child_ids: list[int] = []
        self._random_state: tuple[Tensor, list[Tensor]] | None = None
        self._before_step = BufferSnapshot()
        self._after_first_pass = BufferSnapshot()  # without the layers in _tracking
        self._tracking: list[_BatchNorm] = []  # layers that updated their statistics in the first pass
        self._paused = False  # whether these have track_running_stats = False

    def buffers(self) -> list[Tensor]:
        """Return the model's buffers that can be written to."""
        buffers = self.model.buffers() if self.model is not None else ()
        return [b for part in _by_device_and_dtype(buffers) for b in part]

    def changes_other_buffers(self) -> bool:
        """Return whether the last step's first pass changed buffers that are not BatchNorm's. Waits for the device."""
        return self._after_first_pass.differs_from(self._before_step)

    def begin_step(self) -> None:
        """Save the buffers for :meth:`roll_back`."""
        self.num_passes = 0
        self._before_step.save(self._modules())

    def begin_pass(self) -> None:
        """Set the random state, and pause BatchNorm's statistics after the first pass."""
        torch.clear_autocast_cache()  # inside the caller's autocast it holds copies of weights that have moved since
        if self.same_dropout:
            self._set_random_state()
        if self.buffers_once and self.num_passes > 0:
            if self.num_passes == 1:  # not after the first pass: there may be no second
                layers = [m for m in self._modules() if isinstance(m, _BatchNorm) and m.training]
                self._tracking = [
                    m
                    for m in layers
                    if m.track_running_stats and getattr(m.forward, "__func__", None) in _RESPECT_TRACKING
                ]
                self._keep_other_buffers()
            # Cheaper than restoring the statistics after each pass.
            self._paused = True
            for layer in self._tracking:
                layer.track_running_stats = False
        self.num_passes += 1

    def end_pass(self) -> None:
        """Keep the buffers of the first pass."""
        if self.buffers_once and self.num_passes > 1:
            self._resume_tracking()
            self._after_first_pass.restore()

    def end_step(self) -> None:
        """Release what the passes share; safe to repeat."""
        self._resume_tracking()
        self._random_state = None
        torch.clear_autocast_cache()

    def roll_back(self) -> None:
        """Restore the buffers of :meth:`begin_step`; safe to repeat."""
        self._before_step.restore()

    def _keep_other_buffers(self) -> None:
        known = {id(layer) for layer in self._tracking}
        self._after_first_pass.save(m for m in self._modules() if id(m) not in known)

    def _set_random_state(self) -> None:
        if self._random_state is None:
            self._random_state = (torch.get_rng_state(), [torch.cuda.get_rng_state(i) for i in self._gpus])
            return
        torch.set_rng_state(self._random_state[0])
        for i, state in zip(self._gpus, self._random_state[1], strict=True):
            torch.cuda.set_rng_state(state, i)

    def _resume_tracking(self) -> None:
        if self._paused:
            for layer in self._tracking:
                layer.track_running_stats = True
            self._paused = False

    def _modules(self) -> list[torch.nn.Module]:
        """Return all modules of the model; the list is made again only if a module was added, removed or replaced."""
        if self.model is not None:
            children = [id(child) for module in self._module_list for child in module._modules.values()]
            if not self._module_list or children != self._child_ids:
                self._module_list = list(self.model.modules())
                self._child_ids = [id(child) for module in self._module_list for child in module._modules.values()]
        return self._module_list


# -------------------------------------------------------------------- copies of buffers


class BufferSnapshot:
    """The buffers of some modules at one moment.

    BatchNorm's kernels do not raise a tensor's version counter, so a changed buffer cannot be recognised: all are
    copied, except those that cannot be written to. A module may also have assigned another tensor to the buffer's name
    (``self.mean = 0.9 * self.mean + …``); restoring assigns the old tensor again. A buffer that was resized, as the
    observers of quantization-aware training do, gets its old shape back.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[nn.Module, str, Tensor | None]] = []
        self._identity: list[tuple[int, str, int, torch.Size]] = []
        self._tensors: list[list[Tensor]] = []  # those that can be written, by device and dtype
        self._values: list[list[Tensor]] = []

    def save(self, modules: Iterable[nn.Module]) -> None:
        """Copy the buffers of these modules, not of their children. Memory is reused if they are the same again."""
        entries = [(module, name, b) for module in modules for name, b in module._buffers.items()]
        identity = [(id(m), n, id(b), torch.Size() if b is None else b.shape) for m, n, b in entries]
        if identity == self._identity:
            for copies, buffers in zip(self._values, self._tensors, strict=True):
                torch._foreach_copy_(copies, buffers)
            return
        tensors = _by_device_and_dtype(b for _, _, b in entries)
        values = [[b.clone() for b in part] for part in tensors]
        # Last and together: if a copy raises, the earlier snapshot stays whole.
        self._entries, self._identity, self._tensors, self._values = entries, identity, tensors, values

    def restore(self) -> None:
        """Write all buffers back; safe to repeat."""
        for (module, name, b), (*_, shape) in zip(self._entries, self._identity, strict=True):
            if name not in module._buffers or module._buffers[name] is not b:  # a ScriptModule's buffers have no get
                module._buffers[name] = b
            if b is not None and b.shape != shape:
                b.resize_(shape)
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


def uninterrupted(action: Callable[[], None]) -> None:
    """Run an action to completion: repeat it after each interrupt, then raise the last one.

    The action must be safe to repeat.
    """
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
            # The buffer itself, not an alias: a module may replace its data.
            lists.setdefault((b.device, b.dtype), {})[id(b)] = b.detach() if b.requires_grad else b
    return [list(part.values()) for part in lists.values()]


def _is_writable(b: Tensor) -> bool:
    return b.layout == torch.strided and not b.is_inference() and not is_expanded(b)
