"""Image files: list them by class and decode them into one tensor."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tiltsam.lab.data.dataset import LoadingCallback, Request, Split
from tiltsam.lab.errors import DataError, reading

if TYPE_CHECKING:
    import PIL.Image

__all__ = ["class_folders", "image_split", "read_images", "visible_folders"]

_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}


def visible_folders(folder: Path) -> list[Path]:
    """Return the folders in a folder, sorted, without hidden ones."""
    return [entry for entry in sorted(folder.iterdir()) if entry.is_dir() and not _is_hidden(entry.relative_to(folder))]


def class_folders(folder: Path) -> dict[str, list[Path]]:
    """Return the image files of each class, sorted by class and path.

    Args:
        folder: Contains one folder per class; images may be in subfolders of these.

    Raises:
        DataError: If there is no such folder, it has fewer than two classes, or a class has no images.
    """
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "is missing"
        raise DataError(f"{folder} {what}: it must be a folder with one folder of images per class")
    classes = {}
    for entry in visible_folders(folder):
        files = sorted(p for p in entry.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file())
        classes[entry.name] = [p for p in files if not _is_hidden(p.relative_to(entry))]
        if not classes[entry.name]:
            raise DataError(f"{entry} has no images ({', '.join(sorted(_SUFFIXES))}): add some or remove the folder")
    if len(classes) < 2:
        raise DataError(f"{folder} must have at least 2 classes, one folder of images each, got {len(classes)}")
    return classes


def image_split(request: Request, files: Sequence[tuple[Path, int]], what: str) -> Split:
    """Decode image files and return them with their classes; ``what`` describes them in progress reports."""
    paths = [path for path, _ in files]
    images = read_images(paths, request.image_size, what=what, progress=request.progress)
    return Split({"image": images}, torch.tensor([label for _, label in files]))


def read_images(
    paths: Sequence[Path], size: int, *, what: str = "images", progress: LoadingCallback | None = None
) -> Tensor:
    """Decode image files in parallel.

    Each image is rotated as its EXIF data say, composed onto white if it is transparent, converted to RGB, resized so
    that its shorter side is ``size``, and cropped to the square at its center.

    Args:
        paths: The files.
        size: Height and width of the result.
        what: Description for ``progress``.
        progress: Called with the number of decoded images.

    Returns:
        uint8 (n, 3, size, size).

    Raises:
        DataError: If a file is missing or cannot be decoded.
    """
    images = torch.empty(len(paths), 3, size, size, dtype=torch.uint8)

    def decode(job: tuple[int, Path]) -> None:
        index, path = job
        images[index] = torch.from_numpy(_decode(path, size)).permute(2, 0, 1)

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:  # Pillow releases the GIL while it decodes
        try:
            for done, _ in enumerate(pool.map(decode, enumerate(paths)), 1):
                if progress is not None and (done % 256 == 0 or done == len(paths)):
                    progress(f"reading {what}", done, len(paths))
        except BaseException:
            pool.shutdown(cancel_futures=True)  # otherwise Ctrl-C waits for all remaining images
            raise
    return images


def _decode(path: Path, size: int) -> np.ndarray:
    """Return one image, (size, size, 3)."""
    try:
        from PIL import Image, ImageOps
    except ModuleNotFoundError as error:
        raise DataError("image files need Pillow: pip install pillow") from error
    try:
        with reading(path), Image.open(path) as opened:
            opened.draft("RGB", (size, size))  # decodes a JPEG at a fraction of its size
            opened.load()
            with suppress(SyntaxError, ValueError, TypeError, struct.error):  # damaged EXIF data, intact image
                ImageOps.exif_transpose(opened, in_place=True)
            image = _to_rgb(path, opened)
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError) as error:
        raise DataError(f"{path} is damaged: it cannot be decoded as an image ({type(error).__name__})") from error
    if image.size != (size, size):
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    return np.asarray(image).copy()


def _to_rgb(path: Path, image: PIL.Image.Image) -> PIL.Image.Image:
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):  # Pillow scales PGM to 16 bits
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))  # Pillow would clip at 255
    elif image.mode in ("I", "F"):
        raise DataError(f"{path} must have 8 or 16 bits per channel, got mode {image.mode!r}")
    if "transparency" not in image.info and not image.mode.endswith(("A", "a")):
        return image.convert("RGB")
    rgba = image.convert("RGBA")  # a plain conversion would show the hidden colour of transparent pixels
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
