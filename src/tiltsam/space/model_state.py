"""BatchNorm statistics and dropout masks across the passes of one step.

A sharpness-aware step runs the model several times on one mini-batch. Left alone, BatchNorm would update its running
statistics in every pass, mostly at perturbed weights, and dropout would draw a new mask each time, so losses would
differ by the mask and not by the perturbation alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from tiltsam.space.snapshot import BufferSnapshot, writable_buffers

__all__ = ["ModelState"]

# Only these implementations of forward are known to respect track_running_stats = False.
_RESPECT_TRACKING = (_BatchNorm.forward, torch.nn.SyncBatchNorm.forward)


class ModelState:
    """What the passes of a step share, besides the weights.

    Args:
        model: The model; ``None`` leaves buffers and random states alone.
        buffers_once: Buffers keep the values of the first pass.
        same_dropout: All passes start from the random state of the first. After the step the global generators have
            advanced by one pass, as with the base optimizer.
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
        self.same_dropout = same_dropout and model is not None
        self.num_passes = 0
        self._gpus = sorted({d.index for d in devices if d.type == "cuda" and d.index is not None})
        self._random_state: tuple[Tensor, list[Tensor]] | None = None
        self._before_step = BufferSnapshot()
        self._after_first_pass = BufferSnapshot()  # without the layers in _tracking
        self._tracking: list[_BatchNorm] = []  # layers that updated their statistics in the first pass
        self._paused = False  # whether these have track_running_stats = False

    def buffers(self) -> list[Tensor]:
        """Return the model's buffers that can be written to."""
        return writable_buffers(self.model)

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
                self._tracking = _tracking_layers(self._modules())
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
            self._restore_other_buffers()

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

    def _restore_other_buffers(self) -> None:
        self._after_first_pass.restore()

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
        """Return all modules of the model. ``model.modules()`` also builds their names, which takes longer."""
        found: dict[int, torch.nn.Module] = {}
        pending = [] if self.model is None else [self.model]
        while pending:
            module = pending.pop()
            if id(module) not in found:
                found[id(module)] = module
                pending += [child for child in module._modules.values() if child is not None]
        return list(found.values())


def _tracking_layers(modules: Sequence[torch.nn.Module]) -> list[_BatchNorm]:
    """Return the BatchNorm layers that update their statistics in a forward pass and can be told not to."""
    return [
        m
        for m in modules
        if isinstance(m, _BatchNorm)
        and m.training
        and m.track_running_stats
        and getattr(m.forward, "__func__", None) in _RESPECT_TRACKING
    ]
