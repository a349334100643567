"""What a task hands to training: splits of tensors that live where the model lives."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["Data", "Split"]


@dataclass(frozen=True)
class Split:
    """Examples in one place: no loader stands between them and the device."""

    inputs: dict[str, Tensor]
    """By name, first dimension the examples: ``image`` (n, channels, height, width) uint8; ``x`` (n, features) float32;
    ``input_ids`` and ``attention_mask`` (n, length) int64."""
    targets: Tensor
    """(n,) int64 classes, or float32 values where the task is a regression."""

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, rows: Tensor | slice) -> Split:
        """Some of the examples."""
        return Split({name: x[rows] for name, x in self.inputs.items()}, self.targets[rows])

    def mixed(self) -> Tensor:
        """An order of the examples, always the same, in which those of one class do not lie together."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(0))
        return order.to(self.targets.device)

    def to(self, device: torch.device | str) -> Split:
        """The same on a device."""
        return Split({name: x.to(device) for name, x in self.inputs.items()}, self.targets.to(device))


@dataclass(frozen=True)
class Data:
    """A task, loaded."""

    name: str
    train: Split
    validation: Split
    """Held out of the training examples, for choosing; carries the training labels' noise if there is any."""
    test: Split
    """Never chosen on."""
    num_classes: int
    """Number of classes; 1 for a regression."""
    metrics: tuple[str, ...] = ("accuracy",)
    """Names of :data:`tiltsam.lab.metrics.METRICS`; the first is the one that counts."""
    mean: tuple[float, ...] = ()
    """Of the training images' channels, in [0, 1]; empty where inputs are no images."""
    std: tuple[float, ...] = ()
    """Likewise."""
    augment: tuple[str, ...] = ()
    """What training images go through: names of :data:`tiltsam.lab.augment.AUGMENTATIONS`."""
    fingerprint: str = ""
    """Of the files of one's own data as they were when read; empty for a published set."""

    def to(self, device: torch.device | str) -> Data:
        """The same on a device."""
        moved = {name: getattr(self, name).to(device) for name in ("train", "validation", "test")}
        return replace(self, **moved)
