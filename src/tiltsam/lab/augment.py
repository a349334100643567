"""Augmentation of whole batches on the device they live on: one call a batch, no loop over images.

Images are (n, channels, height, width), uint8 in 0…255 or floating point; what comes back has the same type and shape.
Random numbers come from the generator given, drawn on the generator's device: one on the CPU gives the same images on
every device, one on the GPU saves a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["AUGMENTATIONS", "augment", "crop", "cutout", "flip", "normalise"]


def crop(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Shift each image by up to ``padding`` pixels in each direction; what comes in from outside is black.

    The same as padding and cropping back to size at random, the customary augmentation of CIFAR.

    Args:
        images: The batch.
        generator: Of the two shifts of each image, uniform over -padding…padding.
        padding: Largest shift.

    Returns:
        The shifted batch.
    """
    _check(images)
    height, width = images.shape[2:]
    padded = F.pad(images, (padding,) * 4)
    # A view on every window, (n, channels, down, right, height, width): only the chosen one of each image is copied.
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)
    down, right = _integers(2 * padding + 1, (2, len(images)), images, generator)
    return windows[torch.arange(len(images), device=images.device), :, down, right].contiguous()


def flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each image left to right with probability one half.

    Args:
        images: The batch.
        generator: Of one coin per image.

    Returns:
        The batch, some of it mirrored.
    """
    _check(images)
    heads = _integers(2, (len(images), 1, 1, 1), images, generator).bool()
    return torch.where(heads, images.flip(3), images)


def cutout(images: Tensor, generator: torch.Generator, size: int | None = None) -> Tensor:
    """Black out one square in each image (DeVries and Taylor 2017).

    The centre is uniform over the pixels, so that a square may lie partly outside.

    Args:
        images: The batch.
        generator: Of the centres.
        size: Side of the square; a quarter of the height where None: 8 of 32 pixels, the authors' for CIFAR-100.

    Returns:
        The batch with zeros in the squares.
    """
    _check(images)
    height, width = images.shape[2:]
    size = max(1, height // 4) if size is None else size
    top = _integers(height, (len(images), 1), images, generator) - size // 2
    left = _integers(width, (len(images), 1), images, generator) - size // 2
    y, x = torch.arange(height, device=images.device), torch.arange(width, device=images.device)
    rows = (y >= top) & (y < top + size)
    columns = (x >= left) & (x < left + size)
    return images.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0)


AUGMENTATIONS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {"crop": crop, "flip": flip, "cutout": cutout}
"""By name, for tasks and the command line."""


def augment(images: Tensor, names: Sequence[str], generator: torch.Generator) -> Tensor:
    """Apply augmentations one after the other.

    Args:
        images: The batch.
        names: Of :data:`AUGMENTATIONS`, in order.
        generator: Of all random choices.

    Returns:
        The augmented batch.

    Raises:
        ValueError: A name is not known.

    Example:
        >>> images = torch.zeros(8, 3, 32, 32, dtype=torch.uint8)
        >>> augment(images, ("crop", "flip"), torch.Generator().manual_seed(0)).shape
        torch.Size([8, 3, 32, 32])
    """
    for name in names:
        if name not in AUGMENTATIONS:
            raise ValueError(f"no augmentation named {name!r}; there are {', '.join(AUGMENTATIONS)}")
        images = AUGMENTATIONS[name](images, generator)
    return images


def normalise(
    images: Tensor, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Centre and scale the channels: (x - mean) / std, where uint8 images are first brought to [0, 1].

    Args:
        images: The batch, uint8 or floating point.
        mean: Of each channel, in [0, 1]. A tensor on the device saves a copy per call.
        std: Likewise; positive.
        dtype: Of the result; the arithmetic is in float32 or, for float64, in float64.

    Returns:
        The normalised batch.

    Raises:
        ValueError: The number of channels is not that of ``mean`` and ``std``.
    """
    _check(images)
    if not len(mean) == len(std) == images.shape[1]:
        raise ValueError(f"images of {images.shape[1]} channels, got {len(mean)} means and {len(std)} deviations")
    work = torch.float64 if dtype == torch.float64 else torch.float32
    centre = torch.as_tensor(mean, dtype=work, device=images.device).view(1, -1, 1, 1)
    scale = torch.as_tensor(std, dtype=work, device=images.device).view(1, -1, 1, 1)
    unit = 255.0 if images.dtype == torch.uint8 else 1.0
    return ((images.to(work) - unit * centre) / (unit * scale)).to(dtype)


def _integers(high: int, shape: tuple[int, ...], images: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform over 0…high-1, drawn where the generator lives, wanted where the images live."""
    drawn = torch.randint(high, shape, generator=generator, device=generator.device)
    return drawn.to(images.device, non_blocking=True)


def _check(images: Tensor) -> None:
    if images.dim() != 4:
        raise ValueError(f"images are (n, channels, height, width), got shape {tuple(images.shape)}")
