"""One's own data: a folder of images, a table of sentences, arrays in an ``.npz``."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tiltsam.lab import readers
from tiltsam.lab.data import Data, Split
from tiltsam.lab.errors import DataError
from tiltsam.lab.splits import Request, assemble, encoded
from tiltsam.lab.tables import Table, read_table

__all__ = ["arrays", "fingerprint", "image_folder", "sentences"]

TEST_SHARE = 0.2  # of data that comes in one piece
FEW = 20  # whole numbers, no more of which are likely names of classes
MANY = 1 << 16  # classes, more of which than examples are numbers of something else
LARGE = 4.0  # root mean square of numbers to predict, above which the default learning rate is too high for them
TABLES = (".csv", ".tsv")
OTHER_SPLITS = {"val", "valid", "validation", "dev"}  # beside train and test
SPLITS = {"train", "test", *OTHER_SPLITS}  # folders that hold classes, and are none


def fingerprint(task: str) -> str:
    """What tells one's own data from the same files once they are edited.

    It is the digest of the bytes of arrays and tables. Of images, which may be many, it is that of names and sizes.

    Args:
        task: A task's name.

    Returns:
        Hexadecimal; empty for a published data set, and where there is nothing.
    """
    kind, _, name = task.partition(":")
    path = Path(name).expanduser()
    if not name or not path.exists():
        return ""
    if kind == "images":
        classes = [readers.class_folders(part) for part in _image_parts(path)]
        files = [file for part in classes for paths in part.values() for file in paths]
        marks = [f"{file.relative_to(path)} {file.stat().st_size}" for file in files]
    else:
        parts = _table_parts(path) if kind == "text" else [path]
        marks = [readers.file_digest(part) for part in parts if part.is_file()]
    return hashlib.sha256(os.fsencode("\n".join(marks))).hexdigest()


def image_folder(request: Request) -> Data:
    """A folder per class, or folders ``train`` and ``test`` of these."""
    mark, parts = fingerprint(request.name), _image_parts(request.path)
    found = [readers.class_folders(part) for part in parts]
    if found[0].keys() <= SPLITS:
        raise DataError(
            f"{parts[0]} holds {' and '.join(found[0])}: name the folder to test on test, that to train on train"
        )
    if len(parts) == 2:
        _tell_of_others([str(p) for p in request.path.iterdir() if p.name in OTHER_SPLITS])
    number = {name: i for i, name in enumerate(found[0])}
    splits = []
    for part, classes in zip(parts, found, strict=True):
        if unknown := sorted(set(classes) - set(number)):
            raise DataError(f"{part / unknown[0]} is a class that {parts[0]} does not have")
        files = [path for paths in classes.values() for path in paths]
        what = f"images of {part.name}"
        images = readers.read_images(files, request.image_size, what=what, progress=request.progress)
        labels = [number[name] for name, paths in classes.items() for _ in paths]
        splits.append(Split({"image": images}, torch.tensor(labels)))
    test = splits[1] if len(splits) == 2 else None
    # No flip: what is mirrored may be something else (letters, traffic signs).
    data = assemble(request, splits[0], test, len(number), test_share=TEST_SHARE, augment=("crop",))
    return replace(data, fingerprint=mark)


def sentences(request: Request) -> Data:
    """A table with columns text, perhaps text2, and label or score; or a folder with one named train and one test."""
    mark = fingerprint(request.name)
    if request.path.is_dir():
        tables = [p for p in request.path.iterdir() if p.suffix in TABLES]
        _tell_of_others([str(p) for p in tables if p.stem in OTHER_SPLITS])
    read = [read_table(path) for path in _table_parts(request.path)]
    parts, scores = [table for table, _ in read], read[0][1]
    for table, is_score in read[1:]:
        if is_score != scores or (table.second is None) != (parts[0].second is None):
            raise DataError(f"{table.path} and {parts[0].path} do not have the same columns")
    if scores:
        classes: list[str] = []
        targets = [torch.tensor(part.values(), dtype=torch.float32) for part in parts]
        if len(targets[0].unique()) < 2:
            raise DataError(f"{parts[0].path} has one score, {targets[0][0]:g}: there is nothing to learn")
        _tell_if_large(f"{parts[0].path}: score", targets[0])
    else:
        classes = _class_names(parts[0])
        targets = [torch.tensor(part.classes(classes)) for part in parts]
    splits = encoded(request, parts, targets)
    data = assemble(
        request,
        splits[0],
        splits[1] if len(splits) == 2 else None,
        len(classes) or 1,
        test_share=TEST_SHARE,
        metrics=("pearson", "spearman") if scores else ("accuracy",),
    )
    return replace(data, fingerprint=mark)


def arrays(request: Request) -> Data:
    """``x`` and ``y``, or ``x_train``, ``y_train``, ``x_test``, ``y_test``, of images (uint8) or features (numbers)."""
    mark, found = fingerprint(request.name), readers.read_npz(request.path)
    names = [("x_train", "y_train"), ("x_test", "y_test")] if "x_train" in found else [("x", "y")]
    if len(names) == 1 and "x_test" in found:
        raise DataError(f"{request.path} has x_test and no x_train: name the arrays x_train, y_train, x_test, y_test")
    if len(names) == 2:
        _tell_of_others([f"{request.path}: {x}" for x in found if x.removeprefix("x_") in OTHER_SPLITS])
    splits = [_arrays(request.path, found, x, y) for x, y in names]
    shapes = [{name: tuple(x.shape[1:]) for name, x in split.inputs.items()} for split in splits]
    kinds = [split.targets.is_floating_point() for split in splits]
    if shapes[0] != shapes[-1] or kinds[0] != kinds[-1]:
        raise DataError(f"{request.path}: train and test differ in the shape or type of x or y")
    classes = 1 if kinds[0] else 1 + max(int(split.targets.max()) for split in splits)
    if not kinds[0]:
        _check_gaps(f"{request.path}: {names[0][1]}", torch.cat([split.targets for split in splits]))
    if len(splits[0].targets.unique()) < 2:
        what = "value" if kinds[0] else "class"
        raise DataError(f"{request.path}: {names[0][1]} holds one {what}; there is nothing to learn")
    if kinds[0] and _look_like_classes(splits[0].targets):
        what = f"{request.path}: {names[0][1]} is float: a regression; save integers for classes"
        warnings.warn(what, UserWarning, stacklevel=2)
    elif kinds[0]:
        _tell_if_large(f"{request.path}: {names[0][1]}", splits[0].targets)
    data = assemble(
        request,
        splits[0],
        splits[1] if len(splits) == 2 else None,
        classes,
        test_share=TEST_SHARE,
        metrics=("pearson", "spearman") if kinds[0] else ("accuracy",),
    )
    return replace(data, fingerprint=mark)


def _arrays(path: Path, found: Mapping[str, np.ndarray], x_name: str, y_name: str) -> Split:
    """One pair of arrays, checked."""
    for name in (x_name, y_name):
        if name not in found:
            raise DataError(f"{path} has no array {name}: it needs x, y or x_train, y_train, x_test, y_test")
    x, y = found[x_name], found[y_name]
    if y.ndim != 1 or x.ndim < 2 or len(x) != len(y) or not len(y) or not x[0].size:
        raise DataError(f"{path}: {x_name} is {x.shape} and {y_name} {y.shape}; they must be (n, …) and (n,), n > 0")
    if y.dtype.kind not in "iubf" or x.dtype.kind not in "iubf":
        raise DataError(f"{path}: {x_name} is {x.dtype} and {y_name} {y.dtype}; they must be numbers")
    for name, array in ((x_name, x), (y_name, y)):
        if array.dtype.kind == "f" and not (np.abs(array) <= np.finfo(np.float32).max).all():
            raise DataError(f"{path}: {name} holds a NaN, an infinity or a number beyond float32")
    if y.dtype.kind != "f":
        for label in (int(y.min()), int(y.max())):
            if not 0 <= label < max(MANY, len(y)):
                raise DataError(f"{path}: {y_name} holds {label}; classes are numbered from 0, without large gaps")
    targets = torch.from_numpy(y.astype(np.float32 if y.dtype.kind == "f" else np.int64))
    if x.ndim == 2:
        return Split({"x": torch.from_numpy(x.astype(np.float32))}, targets)
    if x.dtype != np.uint8 or x.ndim > 4:
        raise DataError(
            f"{path}: {x_name} is {x.dtype} of shape {x.shape}; images are uint8 (n, channels, height, width) or "
            "(n, height, width[, channels]), features numbers (n, features)"
        )
    if x.ndim == 3:
        x = x[:, None]
    elif x.shape[1] not in (1, 3) and x.shape[3] in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    return Split({"image": torch.from_numpy(np.ascontiguousarray(x))}, targets)


def _check_gaps(what: str, targets: Tensor) -> None:
    """Raise unless at least half of the classes 0…max occur: labels with larger gaps are identifiers.

    A few classes may lack examples, as in a part of a larger data set.
    """
    distinct, largest = len(targets.unique()), int(targets.max())
    if distinct > 1 and largest + 1 > 2 * distinct:
        raise DataError(
            f"{what} has {distinct} distinct labels and the largest is {largest}: classes are numbered from 0, and at "
            "least half of them must occur; number the labels by np.unique(targets, return_inverse=True)[1]"
        )


def _look_like_classes(targets: Tensor) -> bool:
    """Whether numbers are whole, and few that come again and again."""
    distinct = targets.unique()
    return len(distinct) <= min(FEW, len(targets) // 2) and bool((distinct == distinct.round()).all())


def _tell_of_others(places: Sequence[str]) -> None:
    """Warn of splits that are there beside train and test."""
    if places:
        warnings.warn(f"{min(places)} is not read: what is held out is cut from train", stacklevel=3)


def _tell_if_large(what: str, targets: Tensor) -> None:
    """Warn of numbers to predict that SGD runs away from, or learns nothing but the mean of."""
    values = targets.double()
    if values.square().mean().sqrt() > LARGE:
        warnings.warn(
            f"{what} has a mean of {values.mean():.2g} and a standard deviation of {values.std():.2g}: bring it to "
            "about 0 and 1, which changes no correlation, or choose a lower learning rate",
            UserWarning,
            stacklevel=3,
        )


def _image_parts(folder: Path) -> list[Path]:
    """Folders ``train`` and ``test``, or the one folder that is both."""
    parts = [folder / "train", folder / "test"]
    return parts if all(part.is_dir() for part in parts) else [folder]


def _table_parts(path: Path) -> list[Path]:
    """The tables ``train`` and ``test`` of a folder, or the one table."""
    return [_table_in(path, "train"), _table_in(path, "test")] if path.is_dir() else [path]


def _table_in(folder: Path, name: str) -> Path:
    for suffix in TABLES:
        if (folder / f"{name}{suffix}").exists():
            return folder / f"{name}{suffix}"
    raise DataError(f"{folder / name}.csv (or .tsv) is missing: a folder of text holds train and test tables")


def _class_names(table: Table) -> list[str]:
    """The labels that occur, by number where all are whole numbers, else by the alphabet."""
    names = set(table.labels)
    if len(names) < 2:
        raise DataError(f"{table.path} has one label, {table.labels[0]!r}: there is nothing to learn")
    if all(name.removeprefix("-").isdecimal() for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)
