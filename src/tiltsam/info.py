"""What a step saw: its losses, weights, norms and passes, and how many samples were not finite so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tiltsam.warning import warn

__all__ = ["NonfiniteCount", "StepInfo", "row_of", "with_numbers"]


@dataclass(frozen=True)
class StepInfo:
    """What the last step saw. Tensors stay on the device: reading a number out of one is what waits for the GPU."""

    loss: Tensor
    """The aggregate loss whose gradient the base optimizer was given."""
    losses: Tensor
    """(s,) loss at each θ+ε_j."""
    weights: Tensor
    """(s,) weight of each sample's gradient; 0 where the sample was not finite."""
    effective_sample_size: Tensor
    """``(Σw)²/Σw²``: s where the tilt does nothing, 1 where a single sample decides."""
    start_losses: Tensor
    """(s,) loss where each sample began, before its ascent."""
    perturbation_norms: Tensor
    """(s,) ‖ε_j‖."""
    gradient_norms: Tensor
    """(s,) ‖∇L(θ+ε_j)‖; 0 where not finite."""
    num_nonfinite: Tensor
    """How many samples of this step were not finite, int64."""
    num_forwards: int
    """Forward passes of this step."""
    num_backwards: int
    """Backward passes of this step: its cost in gradient evaluations."""
    num_ascents: int = 0
    """Those among them whose gradient only pointed the way up."""
    num_parts: int = 1
    """How many parts the mini-batch was split into: a pass saw one of them."""
    sampler: Mapping[str, Tensor] = field(default_factory=dict)
    """(s,) each: what the kernel reports (HMC: ``acceptance``, ``energy_error``, ``divergence``), of this rank's."""

    def cost(self, ascent_fraction: float = 1.0) -> float:
        """Passes forward and backward through the batch: a forward pass alone counts a third, others what they saw."""
        forwards_alone = self.num_forwards - self.num_backwards
        passes = self.num_backwards - (1 - ascent_fraction) * self.num_ascents + forwards_alone / 3
        return passes / self.num_parts


def row_of(info: StepInfo) -> Tensor:
    """All numbers of an info side by side, to be copied out of a graph's memory at once."""
    return torch.cat([x.reshape(-1).to(info.losses.dtype) for x in _tensors(info)])


def with_numbers(info: StepInfo, row: Tensor) -> StepInfo:
    """The same fields, with the numbers of ``row``."""
    pieces = iter(row.split([x.numel() for x in _tensors(info)]))
    fields = {k: next(pieces).view(x.shape).to(x.dtype) for k, x in vars(info).items() if isinstance(x, Tensor)}
    sampler = {k: next(pieces).view(x.shape).to(x.dtype) for k, x in info.sampler.items()}
    return replace(info, **fields, sampler=sampler)


class NonfiniteCount:
    """How many samples were not finite since the start: counted on the device, read only when someone asks."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._told = 0

    def add(self, number: Tensor) -> None:
        """Count those of a step, without waiting for the device."""
        if self._total is None or self._total.device != number.device:
            self._total = torch.zeros((), dtype=torch.int64, device=number.device)
        self._total.add_(number.to(torch.int64))

    def warn(self) -> None:
        """Wait for the device, and warn the caller of those that were not told of yet."""
        total = 0 if self._total is None else int(self._total.item())
        if total > self._told:
            warn(
                f"{total - self._told} samples had a loss or gradient that is not finite and got weight zero "
                f"({total} since the start): lower rho, radius or the learning rate if this goes on",
                RuntimeWarning,
            )
            self._told = total


def _tensors(info: StepInfo) -> list[Tensor]:
    return [x for x in vars(info).values() if isinstance(x, Tensor)] + list(info.sampler.values())
