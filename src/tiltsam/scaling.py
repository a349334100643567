"""Loss scaling: what a scaler has multiplied the gradients of a step by, and where that is taken back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from tiltsam.accumulator import Accumulator

__all__ = ["LossScaling"]


class LossScaling:
    """The scaler of a step, if it has one.

    Args:
        dtype: Of the scale.
        device: Where it is wanted.

    Attributes:
        scaler: The closure scales its loss by it; ``None`` where that is left as it is.
        free: Whether the sampler asks for directions alone: its gradients then stay scaled.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.scaler: torch.amp.GradScaler | None = None
        self.free = True
        self._dtype, self._device = dtype, device

    def factor(self) -> Tensor:
        """What the scaler multiplies losses by."""
        assert self.scaler is not None
        return self.scaler.scale(torch.ones((), dtype=self._dtype, device=self._device))

    def scale_mean(self, mean: Accumulator) -> None:
        """Make the mean as scaled as a scaler expects a gradient to be: some samplers had it unscaled."""
        if not self.free:
            mean.scale_(self.factor())

    def step(self, base: Optimizer, mean: Accumulator, weights: Tensor, num_nonfinite: Tensor) -> None:
        """Unscale the mean and let ``base`` step, unless nothing has weight; tell the scaler of any overflow."""
        scaler = self.scaler
        assert scaler is not None
        self.scale_mean(mean)
        scaler.unscale_(base)
        overflows = scaler._found_inf_per_device(base).values()
        for found in overflows:
            found.add_((weights == 0).all().to(found))
        scaler.step(base)
        for found in overflows:
            found.add_((num_nonfinite > 0).to(found))
