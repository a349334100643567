"""Reading published files into tensors: CIFAR's records, MNIST's idx, folders of images, ``.npz``.

Nothing here unpickles. A file that is missing or damaged is named in a :class:`~tiltsam.lab.errors.DataError`.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tiltsam.lab.download import Progress
from tiltsam.lab.errors import DataError

if TYPE_CHECKING:
    import PIL.Image

__all__ = ["class_folders", "file_digest", "read_cifar", "read_idx", "read_images", "read_lines", "read_npz"]

_IDX_BYTES = 0x08  # the type byte of an idx file: unsigned bytes
_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}


def read_cifar(paths: Sequence[Path], label_bytes: int, num_classes: int) -> tuple[Tensor, Tensor]:
    """Images and labels of CIFAR's binary version.

    A record is the label (CIFAR-100: coarse, then fine) and 3072 bytes: red, green, blue, row by row.

    Args:
        paths: Files, read one after the other.
        label_bytes: 1 for CIFAR-10, 2 for CIFAR-100, whose last, the fine label, is kept.
        num_classes: Labels are below it.

    Returns:
        uint8 (n, 3, 32, 32) and int64 (n,).

    Raises:
        DataError: A file cannot be read, is not a whole number of records, or holds a label that does not exist.
    """
    record = label_bytes + 3072
    parts = []
    for path in paths:
        with _reading(path):
            raw = np.fromfile(path, dtype=np.uint8)
        if not len(raw) or len(raw) % record:
            raise DataError(f"{path} is damaged: {len(raw)} bytes are no whole number of records of {record} bytes")
        rows = raw.reshape(-1, record)
        _check_labels(path, rows[:, label_bytes - 1], num_classes)
        parts.append(rows)
    rows = np.concatenate(parts)
    images = torch.from_numpy(rows[:, label_bytes:].copy()).view(-1, 3, 32, 32)
    return images, torch.from_numpy(rows[:, label_bytes - 1].astype(np.int64))


def read_idx(path: Path, dimensions: int) -> Tensor:
    """An idx file of unsigned bytes, gzipped or not: MNIST's format.

    Args:
        path: The file.
        dimensions: 3 for images, 1 for labels.

    Returns:
        A uint8 tensor.

    Raises:
        DataError: The file cannot be read, is truncated, or is no idx file of that many dimensions.
    """
    try:
        with _reading(path), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            header = file.read(4 + 4 * dimensions)
            if len(header) < 4 + 4 * dimensions or header[:4] != bytes([0, 0, _IDX_BYTES, dimensions]):
                wanted = f"0x{_IDX_BYTES << 8 | dimensions:08x}"
                raise DataError(f"{path} is damaged: it starts with 0x{header[:4].hex()}, not with {wanted}")
            shape = struct.unpack(f">{dimensions}I", header[4:])
            size = math.prod(shape)
            raw = file.read(size + 1) if size < 1 << 33 else b""
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged: {error}") from error
    if len(raw) != size or not size:
        raise DataError(f"{path} is damaged: its header promises {size} bytes of data, and it holds another number")
    return torch.from_numpy(np.frombuffer(raw, dtype=np.uint8).reshape(shape).copy())


def read_images(paths: Sequence[Path], size: int, *, what: str = "images", progress: Progress | None = None) -> Tensor:
    """Decode image files to one tensor, several at a time.

    Each is turned as its EXIF data tell, put on white where it is transparent, brought to RGB, resized so that its
    shorter side is ``size``, and cut to the square in its middle.

    Args:
        paths: The files.
        size: Height and width of the result.
        what: Told to ``progress``.
        progress: Told how many are done.

    Returns:
        uint8 (n, 3, size, size).

    Raises:
        DataError: A file is missing or cannot be decoded.
    """
    images = torch.empty(len(paths), 3, size, size, dtype=torch.uint8)

    def decode(job: tuple[int, Path]) -> None:
        index, path = job
        images[index] = torch.from_numpy(_decode(path, size)).permute(2, 0, 1)

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:  # Pillow lets go of the interpreter while decoding
        try:
            for done, _ in enumerate(pool.map(decode, enumerate(paths)), 1):
                if progress is not None and (done % 256 == 0 or done == len(paths)):
                    progress(f"reading {what}", done, len(paths))
        except BaseException:
            pool.shutdown(cancel_futures=True)  # or a Ctrl-C would wait for all that are left
            raise
    return images


def class_folders(folder: Path) -> dict[str, list[Path]]:
    """The image files of each class: every subfolder is a class, files may lie deeper in it.

    Args:
        folder: Holds one folder per class.

    Returns:
        Files by class, both in alphabetical order.

    Raises:
        DataError: There is no such folder, no class in it, or a class without an image.
    """
    if not folder.exists():
        raise DataError(f"{folder} is missing: make it a folder with one folder of images per class")
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder: make it one with one folder of images per class")
    found = {}
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.name.startswith("."):
            files = sorted(p for p in entry.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file())
            found[entry.name] = [p for p in files if not p.name.startswith(".")]
            if not found[entry.name]:
                raise DataError(f"{entry} holds no image ({', '.join(sorted(_SUFFIXES))}); fill or remove the folder")
    if len(found) < 2:
        raise DataError(f"{folder} holds {len(found)} classes: it needs at least two folders of images, one per class")
    return found


def read_npz(path: Path) -> Mapping[str, np.ndarray]:
    """The arrays of an ``.npz``; one that holds Python objects is refused, for it would have to be unpickled.

    Args:
        path: The file.

    Returns:
        Arrays by name.

    Raises:
        DataError: The file is missing, a folder, damaged, no ``.npz``, or holds objects.
    """
    if path.is_dir():
        raise DataError(f"{path} is a folder: name the .npz file itself, as numpy.savez(path, x=…, y=…) writes it")
    if not path.is_file():
        raise DataError(f"{path} is missing: write it with numpy.savez(path, x=…, y=…)")
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} is damaged or no .npz file: write it with numpy.savez(path, x=…, y=…)")
    most = 1100 * path.stat().st_size  # deflate shrinks data by a factor of 1032 at most
    found = {}
    try:
        with _reading(path), zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith(".npy"):
                    with archive.open(name) as member:
                        _check_header(member, most)
                    with archive.open(name) as member:
                        found[name.removesuffix(".npy")] = np.lib.format.read_array(member, allow_pickle=False)
    except DataError:
        raise
    except Exception as error:  # zipfile, numpy and the parser of its headers raise many types on damaged files
        raise DataError(f"{path} cannot be read: {error or type(error).__name__}") from error
    return found


def _check_header(member: IO[bytes], most: int) -> None:
    """Raise ``ValueError`` unless a file of the archive is an array of at most ``most`` bytes, before one is made."""
    version = np.lib.format.read_magic(member)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"version {version} of the .npy format is not supported")
    shape, _, dtype = read(member)
    if math.prod(shape) * dtype.itemsize > most:
        raise ValueError(f"an array of shape {shape} does not fit into the file")


def read_lines(path: Path) -> list[str]:
    r"""The lines of a text file, without the empty ones at its end.

    Only ``\n`` ends a line: sentences may hold the other characters that Unicode calls line ends.

    Args:
        path: The file, UTF-8 with or without a byte order mark.

    Returns:
        The lines.

    Raises:
        DataError: The file cannot be read, or is no UTF-8.
    """
    with _reading(path):
        raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is damaged: byte {error.start} is no UTF-8; if it has another encoding, save it as UTF-8"
        ) from error
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    return lines


def file_digest(path: Path) -> str:
    """The SHA-256 digest of a file, which is read once a process unless it changes.

    Args:
        path: The file.

    Returns:
        Hexadecimal.

    Raises:
        DataError: The file cannot be read.
    """
    with _reading(path):
        state = path.stat()
        return _digest_of_state(path, state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)


@lru_cache(64)
def _digest_of_state(path: Path, *_: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _decode(path: Path, size: int) -> np.ndarray:
    """One image, (size, size, 3)."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise DataError("reading image files needs Pillow: pip install pillow") from error
    try:
        with _reading(path), Image.open(path) as opened:
            opened.draft("RGB", (size, size))  # lets a JPEG be decoded at a fraction of its size
            opened.load()
            with suppress(SyntaxError, ValueError, TypeError, struct.error):  # the note is damaged, the picture is not
                ImageOps.exif_transpose(opened, in_place=True)
            image = _on_white(_eight_bits(path, opened))
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError) as error:
        raise DataError(f"{path} is damaged: it cannot be decoded as an image ({type(error).__name__})") from error
    if image.size != (size, size):
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    return np.asarray(image).copy()


def _eight_bits(path: Path, image: PIL.Image.Image) -> PIL.Image.Image:
    """The image; grey levels of 16 bits brought to 8, which Pillow would cut off at 255 to a white picture."""
    if not image.mode.startswith(("I", "F")):
        return image
    from PIL import Image

    # Levels of 32 bits may end anywhere; Pillow's mode for them is also that of 16 bits in a PNG or PGM.
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        raise DataError(f"{path} has grey levels of which none is known to be white: save it with 8 or 16 bits")
    levels = np.asarray(image)
    return Image.fromarray((levels >> 8).astype(np.uint8))


def _on_white(image: PIL.Image.Image) -> PIL.Image.Image:
    """The image in RGB; a transparent pixel may hide any colour, so that Pillow's own way to RGB would show it."""
    if "transparency" not in image.info and not image.mode.endswith(("A", "a")):
        return image.convert("RGB")
    from PIL import Image

    seen = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen).convert("RGB")


def _check_labels(path: Path, labels: np.ndarray, num_classes: int) -> None:
    if labels.max() >= num_classes:
        row = int((labels >= num_classes).argmax())
        raise DataError(f"{path} is damaged: record {row} has label {labels[row]}, and classes are 0…{num_classes - 1}")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what a file system can refuse into one line."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing") from error
    except OSError as error:
        if error.errno is None:  # a decoder's, not the disk's
            raise
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
