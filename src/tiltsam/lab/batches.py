"""From examples that lie on the device to the batches that a step takes.

A batch of small images is little work for a GPU, and each of the dozen kernels that shuffle, shift, mirror and scale it
costs the host as much as one on a hundred batches. So many batches are prepared at once, and a step is given slices.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tiltsam.lab.augment import augment, normalise
from tiltsam.lab.config import ConfigError
from tiltsam.lab.data import Data, Split

__all__ = ["Batches"]

AT_ONCE = 1 << 24  # values of the inputs prepared together: 64 MiB of float32, 85 batches of 64 CIFAR images


class Batches:
    """The training examples of a task, in batches.

    Args:
        data: The task, on its device.
        batch_size: Examples a batch; fewer if the task has fewer.

    Attributes:
        size: Examples a batch.
        per_epoch: Batches an epoch; a rest too small for a batch waits for another epoch's order.
    """

    def __init__(self, data: Data, batch_size: int) -> None:
        self._data = data
        self._device = data.train.targets.device
        self._mean, self._std = (torch.tensor(x, device=self._device) for x in (data.mean, data.std))
        self.size = min(batch_size, len(data.train))
        self.per_epoch = len(data.train) // self.size
        values = self.size * sum(x[0].numel() for x in data.train.inputs.values())
        # By shapes alone: how the random choices are drawn must not depend on the machine.
        self._at_once = self.size * max(1, AT_ONCE // values)

    @torch.no_grad()
    def check(self, model: nn.Module, rows: int) -> None:
        """Raise if BatchNorm would see a single value of a channel, which has no spread.

        Args:
            model: The model.
            rows: The fewest examples that a pass sees.

        Raises:
            ConfigError: If these are too few.
        """
        if rows > 1 or not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
            return
        trial = copy.deepcopy(model).eval()
        for layer in trial.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.train()
        try:
            trial(*self.inputs(self._data.train[slice(0, 1)]))
        except ValueError:
            raise ConfigError(
                f"BatchNorm needs more than one example, and a pass sees {rows} of {len(self._data.train)} training "
                "examples: raise batch_size, or choose a model without BatchNorm"
            ) from None

    def epoch(self, seed: int, epoch: int) -> Iterator[tuple[Tensor, ...]]:
        """The batches of one epoch, inputs by name, then targets; their order and augmentation follow from the key."""
        train = self._data.train
        order = torch.randperm(len(train), generator=_generator("cpu", seed, epoch)).to(self._device)
        choices = _generator(self._device, seed, epoch)
        for rows in order[: self.per_epoch * self.size].split(self._at_once):
            part = train[rows]
            tensors = (*self.inputs(part, choices), part.targets)
            yield from zip(*(x.split(self.size) for x in tensors), strict=True)

    def inputs(self, part: Split, choices: torch.Generator | None = None) -> list[Tensor]:
        """What the model takes: images normalised, and augmented if a generator is given."""
        found = dict(part.inputs)
        if "image" in found:
            images = found["image"]
            if choices is not None:
                images = augment(images, self._data.augment, choices)
            images = normalise(images, self._mean, self._std)
            found["image"] = images.contiguous(memory_format=torch.channels_last) if images.is_cuda else images
        return list(found.values())


def _generator(device: torch.device | str, seed: int, epoch: int) -> torch.Generator:
    return torch.Generator(device).manual_seed((1_000_003 * seed + epoch) % 2**63)
