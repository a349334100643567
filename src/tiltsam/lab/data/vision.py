"""Public image data sets, read from the files that their authors publish. Nothing is unpickled."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tiltsam.lab.data.dataset import Data, Request, Split, assemble
from tiltsam.lab.data.download import require
from tiltsam.lab.data.images import class_folders, image_split
from tiltsam.lab.data.loader import crop, flip
from tiltsam.lab.data.text import read_lines
from tiltsam.lab.errors import DataError, reading

__all__ = ["cifar", "digits", "dtd", "fashion_mnist", "read_cifar", "read_idx", "tiny_imagenet"]

PHOTOS = (crop, flip)  # the usual augmentation of small photographs


def digits(request: Request) -> Data:
    """Load the 1797 handwritten digits of scikit-learn, 8 by 8 pixels; a third of them is the test set."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise DataError("digits come with scikit-learn: pip install '.[lab]'") from error
    bunch = load_digits()
    images = torch.tensor(bunch.images * 15, dtype=torch.uint8)[:, None]  # grey levels 0…16 become 0…240
    pool = Split({"image": images}, torch.tensor(bunch.target, dtype=torch.int64))
    return assemble(request, pool, None, 10)


def fashion_mnist(request: Request) -> Data:
    """Load Fashion-MNIST from its four idx files, gzipped or not."""
    folder = request.path / "fashion-mnist"
    names = [f"{part}-{kind}" for part in ("train", "t10k") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    paths = [folder / name if (folder / name).exists() else folder / f"{name}.gz" for name in names]
    require(request, "fashion-mnist", paths, folder)
    splits = []
    for image_path, label_path in (paths[:2], paths[2:]):
        images, labels = read_idx(image_path, 3), read_idx(label_path, 1)
        if len(images) != len(labels):
            raise DataError(f"{image_path} has {len(images)} images but {label_path} has {len(labels)} labels")
        _check_labels(label_path, labels.numpy(), 10)
        splits.append(Split({"image": images[:, None]}, labels.long()))
    return assemble(request, splits[0], splits[1], 10, augment=PHOTOS)


def cifar(request: Request, *, num_classes: int) -> Data:
    """Load the binary version of CIFAR-10, or of CIFAR-100 with its fine labels."""
    if num_classes == 10:
        source, folder, test, label_bytes = "cifar10", "cifar-10-batches-bin", "test_batch.bin", 1
        train = [f"data_batch_{i}.bin" for i in range(1, 6)]
    else:
        source, folder, test, label_bytes = "cifar100", "cifar-100-binary", "test.bin", 2
        train = ["train.bin"]
    paths = [request.path / folder / name for name in (*train, test)]
    require(request, source, paths, request.path)
    splits = []
    for files in (paths[:-1], paths[-1:]):
        images, labels = read_cifar(files, label_bytes, num_classes)
        splits.append(Split({"image": images}, labels))
    return assemble(request, splits[0], splits[1], num_classes, augment=PHOTOS)


def tiny_imagenet(request: Request) -> Data:
    """Load Tiny ImageNet: 200 classes at 64 pixels. Its ``val`` folder is the test set."""
    folder = request.path / "tiny-imagenet-200"
    annotations, names = folder / "val" / "val_annotations.txt", folder / "wnids.txt"
    require(request, "tiny-imagenet", [names, annotations, folder / "train"], request.path)
    number = {wnid: i for i, wnid in enumerate(sorted(line.strip() for line in read_lines(names)))}
    train: list[tuple[Path, int]] = []
    for wnid, files in class_folders(folder / "train").items():
        if wnid not in number:
            raise DataError(f"{names} is damaged: it lacks {wnid}, a folder of {folder / 'train'}")
        train += [(file, number[wnid]) for file in files]
    test = []
    for row, line in enumerate(read_lines(annotations), 1):
        name, wnid = [*line.split("\t"), "", ""][:2]
        if wnid not in number:
            raise DataError(f"{annotations} is damaged: line {row} has class {wnid!r}, which {names} lacks")
        test.append((_listed_file(folder / "val" / "images", name, annotations), number[wnid]))
    splits = [image_split(request, files, f"{what} images") for what, files in (("training", train), ("test", test))]
    sources = [str(path) for path, _ in train]
    return assemble(
        request, splits[0], splits[1], len(number), augment=PHOTOS, sources=sources, class_names=list(number)
    )


def dtd(request: Request) -> Data:
    """Load the Describable Textures in the first of their ten published splits, with its validation set."""
    folder = request.path / "dtd"
    lists = [folder / "labels" / f"{part}1.txt" for part in ("train", "val", "test")]
    require(request, "dtd", [*lists, folder / "images"], request.path)
    lines = [[line.strip() for line in read_lines(path)] for path in lists]
    for path, listed in zip(lists, lines, strict=True):
        if not listed:
            raise DataError(f"{path} is damaged: it is empty")
        for row, line in enumerate(listed, 1):
            if line.count("/") != 1:
                raise DataError(f"{path} is damaged: line {row} must be class/file, got {line!r}")
    classes = sorted({line.split("/")[0] for listed in lines for line in listed})
    number = {name: i for i, name in enumerate(classes)}
    splits = []
    for path, listed in zip(lists, lines, strict=True):
        files = [(_listed_file(folder / "images", line, path), number[line.split("/")[0]]) for line in listed]
        splits.append(image_split(request, files, f"images of {path.stem}"))
    train, validation, test = splits
    pool = Split(
        {"image": torch.cat([train.inputs["image"], validation.inputs["image"]])},
        torch.cat([train.targets, validation.targets]),
    )
    return assemble(request, pool, test, len(classes), num_validation=len(validation), augment=PHOTOS)


def read_cifar(paths: Sequence[Path], label_bytes: int, num_classes: int) -> tuple[Tensor, Tensor]:
    """Read images and labels of CIFAR's binary version.

    A record is a label and 3072 bytes: red, green and blue, row by row. CIFAR-100 has two bytes of label, coarse and
    fine, of which the second one is used.

    Returns:
        uint8 (n, 3, 32, 32) and int64 (n,).

    Raises:
        DataError: If a file cannot be read, is not a whole number of records, or has a label out of range.
    """
    record = label_bytes + 3072
    parts = []
    for path in paths:
        with reading(path):
            raw = np.fromfile(path, dtype=np.uint8)
        if not len(raw) or len(raw) % record:
            raise DataError(f"{path} is damaged: its size must be a multiple of {record} bytes, got {len(raw)}")
        rows = raw.reshape(-1, record)
        _check_labels(path, rows[:, label_bytes - 1], num_classes)
        parts.append(rows)
    rows = np.concatenate(parts)
    images = torch.from_numpy(rows[:, label_bytes:].copy()).view(-1, 3, 32, 32)
    return images, torch.from_numpy(rows[:, label_bytes - 1].astype(np.int64))


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Read an idx file (MNIST's format) of unsigned bytes, gzipped or not; images have 3 dimensions, labels 1.

    Raises:
        DataError: If the file cannot be read, is truncated, or is not an idx file of that many dimensions.
    """
    magic = bytes([0, 0, 8, dimensions])  # 8: unsigned bytes
    try:
        with reading(path), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            header = file.read(4 + 4 * dimensions)
            if len(header) < 4 + 4 * dimensions or header[:4] != magic:
                raise DataError(f"{path} is damaged: it must start with 0x{magic.hex()}, got 0x{header[:4].hex()}")
            shape = struct.unpack(f">{dimensions}I", header[4:])
            size = math.prod(shape)
            raw = file.read(size + 1) if size < 1 << 33 else b""
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged: {error}") from error
    if len(raw) != size or not size:
        raise DataError(f"{path} is damaged: it must have {size} bytes after its header")
    return torch.from_numpy(np.frombuffer(raw, dtype=np.uint8).reshape(shape).copy())


def _listed_file(folder: Path, name: str, source: Path) -> Path:
    """Return the path of a file that the list ``source`` names; it must be inside the folder."""
    if name.startswith("/") or ".." in Path(name).parts or not name:
        raise DataError(f"{source} is damaged: it lists {name!r}, which is outside {folder}")
    return folder / name


def _check_labels(path: Path, labels: np.ndarray, num_classes: int) -> None:
    if labels.max() >= num_classes:
        row = int((labels >= num_classes).argmax())
        raise DataError(f"{path} is damaged: labels must be below {num_classes}, got {labels[row]} in record {row}")
