"""Readers of the published data sets, one function each: from their authors' files to a task's data."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from tiltsam.lab import readers, tables
from tiltsam.lab.data import Data, Split
from tiltsam.lab.download import SOURCES, fetch
from tiltsam.lab.errors import DataError
from tiltsam.lab.splits import Request, assemble, encoded

__all__ = ["cifar", "digits", "dtd", "fashion_mnist", "glue", "tiny_imagenet"]

CUSTOMARY = ("crop", "flip")  # augmentation of small photographs


def digits(request: Request) -> Data:
    """Scikit-learn's 1797 handwritten digits of 8 by 8 pixels; a third is the test set."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("digits come with scikit-learn: pip install '.[lab]'") from error
    found = load_digits()
    images = torch.tensor(found.images * 15, dtype=torch.uint8)[:, None]  # grey levels 0…16 to 0…240
    pool = Split({"image": images}, torch.tensor(found.target, dtype=torch.int64))
    return assemble(request, pool, None, 10)


def cifar(request: Request, *, fine: bool) -> Data:
    """CIFAR-100 (``fine``: by its hundred fine labels) or CIFAR-10, in the binary version."""
    source, folder = ("cifar100", "cifar-100-binary") if fine else ("cifar10", "cifar-10-batches-bin")
    train = ["train.bin"] if fine else [f"data_batch_{i}.bin" for i in range(1, 6)]
    paths = [request.path / folder / name for name in (*train, "test.bin" if fine else "test_batch.bin")]
    _need(request, source, paths, request.path)
    classes = 100 if fine else 10
    splits = []
    for files in (paths[:-1], paths[-1:]):
        images, labels = readers.read_cifar(files, 2 if fine else 1, classes)
        splits.append(Split({"image": images}, labels))
    return assemble(request, splits[0], splits[1], classes, augment=CUSTOMARY)


def fashion_mnist(request: Request) -> Data:
    """Fashion-MNIST: four idx files, gzipped or not."""
    folder = request.path / "fashion-mnist"
    names = [f"{part}-{kind}" for part in ("train", "t10k") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    paths = [folder / name if (folder / name).exists() else folder / f"{name}.gz" for name in names]
    _need(request, "fashion-mnist", paths, folder)
    splits = []
    for pixels, classes in (paths[:2], paths[2:]):
        images, labels = readers.read_idx(pixels, 3), readers.read_idx(classes, 1)
        if len(images) != len(labels):
            raise DataError(f"{pixels} has {len(images)} images, {classes} {len(labels)} labels: one is damaged")
        if int(labels.max()) > 9:
            raise DataError(f"{classes} is damaged: it has label {int(labels.max())}, and classes are 0…9")
        splits.append(Split({"image": images[:, None]}, labels.long()))
    return assemble(request, splits[0], splits[1], 10, augment=CUSTOMARY)


def tiny_imagenet(request: Request) -> Data:
    """Tiny ImageNet: 200 classes at 64 pixels; the annotated ``val`` is the test set."""
    folder = request.path / "tiny-imagenet-200"
    annotations, names = folder / "val" / "val_annotations.txt", folder / "wnids.txt"
    _need(request, "tiny-imagenet", [names, annotations, folder / "train"], request.path)
    number = {wnid: i for i, wnid in enumerate(sorted(line.strip() for line in readers.read_lines(names)))}
    files: tuple[list[Path], list[Path]] = ([], [])
    labels: tuple[list[int], list[int]] = ([], [])
    for wnid, found in readers.class_folders(folder / "train").items():
        if wnid not in number:
            raise DataError(f"{names} is damaged: it does not name {wnid}, a folder of {folder / 'train'}")
        files[0].extend(found)
        labels[0].extend([number[wnid]] * len(found))
    for row, line in enumerate(readers.read_lines(annotations), 1):
        file, wnid = [*line.split("\t"), "", ""][:2]
        if wnid not in number:
            raise DataError(f"{annotations} is damaged: line {row} names no class of {names}")
        files[1].append(_below(folder / "val" / "images", file, annotations))
        labels[1].append(number[wnid])
    splits = []
    for what, paths, classes in zip(("training images", "test images"), files, labels, strict=True):
        images = readers.read_images(paths, request.image_size, what=what, progress=request.progress)
        splits.append(Split({"image": images}, torch.tensor(classes)))
    return assemble(request, splits[0], splits[1], len(number), augment=CUSTOMARY)


def dtd(request: Request) -> Data:
    """Describable Textures, the first of its ten published splits; its own validation set is used."""
    folder = request.path / "dtd"
    lists = [folder / "labels" / f"{part}1.txt" for part in ("train", "val", "test")]
    _need(request, "dtd", [*lists, folder / "images"], request.path)
    lines = [[line.strip() for line in readers.read_lines(path)] for path in lists]
    for path, found in zip(lists, lines, strict=True):
        for row, line in enumerate(found, 1):
            if line.count("/") != 1:
                raise DataError(f"{path} is damaged: line {row} is {line!r}, not class/file")
        if not found:
            raise DataError(f"{path} is damaged: it is empty")
    classes = sorted({line.split("/")[0] for found in lines for line in found})
    number = {name: i for i, name in enumerate(classes)}
    parts = []
    for path, found in zip(lists, lines, strict=True):
        files = [_below(folder / "images", line, path) for line in found]
        what = f"images of {path.stem}"
        images = readers.read_images(files, request.image_size, what=what, progress=request.progress)
        parts.append(Split({"image": images}, torch.tensor([number[line.split("/")[0]] for line in found])))
    pool = Split(
        {"image": torch.cat([parts[0].inputs["image"], parts[1].inputs["image"]])},
        torch.cat([parts[0].targets, parts[1].targets]),
    )
    return assemble(request, pool, parts[2], len(classes), published=len(parts[1]), augment=CUSTOMARY)


def _below(folder: Path, name: str, source: Path) -> Path:
    """A file that a list names, if it lies in the folder."""
    if name.startswith("/") or ".." in Path(name).parts or not name:
        raise DataError(f"{source} is damaged: {name!r} lies outside {folder}")
    return folder / name


def glue(request: Request, *, task: str) -> Data:
    """A task of GLUE; the published development set is the test set, for labels of the test set are not public."""
    spec = tables.GLUE[task]
    home = request.path / "glue"
    folders = (home / spec.folder, home / task)
    folder = next((f for f in folders if f.is_dir() and not request.download), folders[0])
    folder = next((f for f in folders if any((f / name).exists() for name in spec.dev)), folder)
    train = folder / spec.train[0]
    dev = next((folder / name for name in spec.dev if (folder / name).exists()), folder / spec.dev[0])
    alone = train.exists() and not dev.exists() and not request.download
    _need(request, f"glue/{task}", [train] if alone else [train, dev], folder if task == "mrpc" else home)
    pool = tables.read_glue(train, spec)
    if alone:
        warnings.warn(
            f"{dev} is missing: a tenth of {train.name} stands in as the test set, and results do not compare with "
            "published ones",
            stacklevel=2,
        )
    parts = [pool] if alone else [pool, tables.read_glue(dev, spec)]
    if spec.classes:
        targets = [torch.tensor(part.classes(spec.classes)) for part in parts]
    else:
        targets = [torch.tensor(part.values(), dtype=torch.float32) / 5 for part in parts]  # STS-B's scores are 0…5
    splits = encoded(request, parts, targets)
    return assemble(
        request,
        splits[0],
        None if alone else splits[1],
        len(spec.classes) or 1,
        test_share=0.1,
        metrics=spec.metrics,
    )


def _need(request: Request, source: str, paths: Sequence[Path], folder: Path) -> None:
    """See to it that files are there: fetch them where that was asked for, else say what to put where."""
    missing = [path for path in paths if not path.exists()]
    if missing and request.download:
        fetch(SOURCES[source], folder, request.progress)
        if source == "glue/mrpc":
            tables.split_mrpc(folder)
        missing = [path for path in paths if not path.exists()]
    if missing:
        home = SOURCES[source][0].url
        raise DataError(
            f"{missing[0]} is missing: put the files of {home} into {folder}, or let --download fetch them; "
            f"{request.name} needs {request.files}"
        )
