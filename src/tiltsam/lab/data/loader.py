"""Shuffled, augmented and normalised training batches, made on the device on which the examples are.

A batch of small images is little work for a GPU, and the host needs as long to launch the dozen kernels that shuffle,
shift, flip and normalise one batch as for a hundred. Therefore many batches are prepared at once, and sliced.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tiltsam.lab.data.dataset import Data, Split
from tiltsam.lab.errors import ConfigError

__all__ = ["TrainingBatches", "crop", "flip", "normalise"]

PREPARED_VALUES = 1 << 24  # input values prepared together: 64 MiB of float32, 85 batches of 64 CIFAR images


class TrainingBatches:
    """The training examples of a task in batches.

    Args:
        data: The task's data, on its device.
        batch_size: Examples per batch, or all of them if there are fewer.

    Attributes:
        size: Examples per batch.
        per_epoch: Batches per epoch. The last examples of an epoch's order are skipped if they do not fill a batch.
    """

    def __init__(self, data: Data, batch_size: int) -> None:
        self._data = data
        self._device = data.train.targets.device
        self._mean, self._std = (torch.tensor(x, device=self._device) for x in (data.mean, data.std))
        self.size = min(batch_size, len(data.train))
        self.per_epoch = len(data.train) // self.size
        values = self.size * sum(x[0].numel() for x in data.train.inputs.values())
        # Depends on shapes only, never on the machine: it decides how the random numbers are drawn.
        self._prepared = self.size * max(1, PREPARED_VALUES // values)

    @torch.no_grad()
    def check(self, model: nn.Module, rows: int) -> None:
        """Check that BatchNorm sees more than one value per channel.

        Args:
            model: The model.
            rows: The smallest number of examples in a forward pass.

        Raises:
            ConfigError: If a layer would see a single value, which has no variance.
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
                f"BatchNorm needs more than 1 example per pass, got {rows} of {len(self._data.train)} training "
                "examples: raise batch_size, or choose a model without BatchNorm"
            ) from None

    def epoch(self, seed: int, epoch: int) -> Iterator[tuple[Tensor, ...]]:
        """Yield the batches of one epoch: inputs, then targets. Seed and epoch decide their order and augmentation."""
        train = self._data.train
        order = torch.randperm(len(train), generator=_generator("cpu", seed, epoch)).to(self._device)
        generator = _generator(self._device, seed, epoch)
        for rows in order[: self.per_epoch * self.size].split(self._prepared):
            part = train[rows]
            tensors = (*self.inputs(part, generator), part.targets)
            yield from zip(*(x.split(self.size) for x in tensors), strict=True)

    def inputs(self, part: Split, generator: torch.Generator | None = None) -> list[Tensor]:
        """Return the arguments of the model: images are normalised, and augmented if a generator is given."""
        inputs = dict(part.inputs)
        if "image" in inputs:
            images = inputs["image"]
            if generator is not None:
                for augment in self._data.augment:
                    images = augment(images, generator)
            images = normalise(images, self._mean, self._std)
            inputs["image"] = images.contiguous(memory_format=torch.channels_last) if images.is_cuda else images
        return list(inputs.values())


# The functions below take images (n, channels, height, width), uint8 in 0…255 or floating point, and return a tensor of
# the same shape. The generator is on the device of the images.


def crop(images: Tensor, generator: torch.Generator) -> Tensor:
    """Pad each image with 4 black pixels on each side and crop it back to its size at random, as usual for CIFAR."""
    padding = 4
    height, width = images.shape[2:]
    padded = F.pad(images, (padding,) * 4)
    # A view of all windows (n, channels, down, right, height, width): only one window per image is copied.
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)
    down, right = torch.randint(2 * padding + 1, (2, len(images)), generator=generator, device=images.device)
    return windows[torch.arange(len(images), device=images.device), :, down, right].contiguous()


def flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each image left to right with probability one half."""
    heads = torch.randint(2, (len(images), 1, 1, 1), generator=generator, device=images.device).bool()
    return torch.where(heads, images.flip(3), images)


def normalise(images: Tensor, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor) -> Tensor:
    """Return (x - mean) / std for each channel in float32; uint8 images are scaled to [0, 1] first.

    Args:
        images: The batch, uint8 or floating point.
        mean: Mean of each channel, in [0, 1]. A tensor on the device saves a copy.
        std: Standard deviation of each channel, positive.
    """
    center = torch.as_tensor(mean, dtype=torch.float32, device=images.device).view(1, -1, 1, 1)
    scale = torch.as_tensor(std, dtype=torch.float32, device=images.device).view(1, -1, 1, 1)
    unit = 255.0 if images.dtype == torch.uint8 else 1.0
    return (images.float() - unit * center) / (unit * scale)


def _generator(device: torch.device | str, seed: int, epoch: int) -> torch.Generator:
    return torch.Generator(device).manual_seed((1_000_003 * seed + epoch) % 2**63)
