"""The user's own data: a folder of images, a table of sentences, or arrays in an ``.npz``. Nothing is unpickled."""

from __future__ import annotations

import csv
import hashlib
import os
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tiltsam.lab.data.dataset import Augmentation, Data, Request, Split, assemble
from tiltsam.lab.data.images import class_folders, image_split, visible_folders
from tiltsam.lab.data.loader import crop
from tiltsam.lab.data.text import TextTable, column_index, read_lines, tokenize
from tiltsam.lab.errors import DataError, reading
from tiltsam.lab.files import file_digest

__all__ = ["fingerprint", "load_arrays", "load_images", "load_text", "read_npz", "read_table"]

INPUTS = "numbers (n, features), or uint8 images (n, channels, height, width) or (n, height, width[, channels])"
MAX_CLASSES = 1 << 16  # more classes than this, and than examples: the labels are something else
MAX_FLOAT_CLASSES = 100  # floats with at most this many values, all of them whole, are probably classes
NUMBERED = "number classes by np.unique(y, return_inverse=True)[1], those of train and test together"
LARGE_TARGETS = 4.0  # root mean square; at 5 an MLP diverges with the default learning rate
MAX_LISTED = 8  # names of classes in a warning
TEST_FRACTION = 0.2  # of the examples, if the user has no test set
VALIDATION_NAMES = {"val", "valid", "validation", "dev"}
SPLIT_NAMES = {"train", "training", "test", "testing", *VALIDATION_NAMES}


def fingerprint(task: str) -> str:
    """Return a digest of the user's files, which changes if they are edited; empty for a public data set or no files.

    Arrays and tables are digested byte by byte; images, which may be many, by their names and sizes.
    """
    kind, _, name = task.partition(":")
    path = Path(name).expanduser()
    if not name or not path.exists():
        return ""
    if kind == "images":
        classes = [class_folders(part) for part in _image_folders(path)]
        files = [file for part in classes for paths in part.values() for file in paths]
        parts = [f"{file.relative_to(path)} {file.stat().st_size}" for file in files]
    else:
        tables = _table_files(path) if kind == "text" else [path]
        parts = [_cached_digest(table) for table in tables if table.is_file()]
    return hashlib.sha256(os.fsencode("\n".join(parts))).hexdigest()


def _cached_digest(path: Path) -> str:
    with reading(path):
        state = path.stat()
        return _digest_of_state(path, state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)


@lru_cache(64)  # a file is read once per process unless it changes
def _digest_of_state(path: Path, *_: int) -> str:
    return file_digest(path)


def _assemble(
    request: Request,
    splits: Sequence[Split],
    num_classes: int,
    *,
    augment: tuple[Augmentation, ...] = (),
    sources: Sequence[str] = (),
    class_names: Sequence[str] = (),
) -> Data:
    """Assemble the data from training and test examples; without the latter, split off a test set.

    Warn of labels that are replaced, and of classes in the test set without training examples.
    """
    pool, *test = splits
    data = assemble(
        request,
        pool,
        test[0] if test else None,
        num_classes,
        test_fraction=TEST_FRACTION,
        metrics=("pearson", "spearman") if num_classes == 1 else ("accuracy",),
        augment=augment,
        sources=sources,
        class_names=class_names,
    )
    if request.noise:
        warnings.warn(
            f"noise {request.noise:g} replaces {request.noise:.0%} of your training and validation labels by wrong "
            "ones, for experiments: leave it out to train on your labels as they are",
            stacklevel=2,
        )
    if num_classes > 1:
        _warn_of_untrained_classes(data)
    elif len(data.test.targets.unique()) < 2:
        warnings.warn(
            f"the test set of {request.config.task} has a single value: its correlation counts as 0", stacklevel=2
        )
    return data if test else replace(data, test_split_off=TEST_FRACTION)


def _warn_of_untrained_classes(data: Data) -> None:
    missing = sorted({*data.test.targets.tolist()} - {*data.train.targets.tolist()})
    if missing:
        listed = ", ".join(data.class_names[k] if data.class_names else str(k) for k in missing[:MAX_LISTED])
        rest = f", … ({len(missing)} in all)" if len(missing) > MAX_LISTED else ""
        warnings.warn(
            f"{data.name} has no training examples of some classes of the test set: {listed}{rest}", stacklevel=3
        )


def _warn_validation_ignored(places: Sequence[str]) -> None:
    if places:
        warnings.warn(f"ignoring {min(places)}: validation examples are taken from the training set", stacklevel=3)


# ------------------------------------------------------------------------------------------------------------ images:


def load_images(request: Request) -> Data:
    """Load a folder with one folder of images per class, or with folders ``train`` and ``test`` of that form."""
    folders = _image_folders(request.path)
    folder_classes = [class_folders(folder) for folder in folders]
    if len(folders) == 2:
        _warn_validation_ignored([str(p) for p in request.path.iterdir() if p.name in VALIDATION_NAMES])
    number = {name: i for i, name in enumerate(folder_classes[0])}
    splits, sources = [], []
    for folder, classes in zip(folders, folder_classes, strict=True):
        if unknown := sorted(set(classes) - set(number)):
            raise DataError(f"{folder / unknown[0]} is a class that {folders[0]} lacks")
        files = [(path, number[name]) for name, paths in classes.items() for path in paths]
        splits.append(image_split(request, files, f"images of {folder.name}"))
        sources.append([str(path) for path, _ in files])
    # No flip: a mirrored letter or traffic sign may be another one.
    return _assemble(request, splits, len(number), augment=(crop,), sources=sources[0], class_names=list(number))


def _check_no_splits(folder: Path) -> None:
    """Raise if folders named as parts of a data set would become classes: all of them, or one that has folders."""
    if not folder.is_dir():
        return
    classes = visible_folders(folder)
    parts = [p for p in classes if p.name.lower() in SPLIT_NAMES]
    if parts and (len(parts) == len(classes) or any(map(visible_folders, parts))):
        names = " and ".join(part.name for part in parts)
        raise DataError(
            f"{folder} must have folders named train and test, got {names} (a class of that name must have its images "
            "directly in it)"
        )


def _image_folders(folder: Path) -> list[Path]:
    """Return the folders ``train`` and ``test``, or the folder itself if its folders are classes."""
    parts = [folder / "train", folder / "test"]
    folders = parts if all(part.is_dir() for part in parts) else [folder]
    _check_no_splits(folders[0])
    return folders


# -------------------------------------------------------------------------------------------------------------- text:


def load_text(request: Request) -> Data:
    """Load a table with columns text[, text2] and label or score, or a folder with tables ``train`` and ``test``."""
    if request.path.is_dir():
        files = [p for p in request.path.iterdir() if p.suffix in (".csv", ".tsv")]
        _warn_validation_ignored([str(p) for p in files if p.stem in VALIDATION_NAMES])
    read = [read_table(path) for path in _table_files(request.path)]
    tables, is_regression = [table for table, _ in read], read[0][1]
    for table, has_scores in read[1:]:
        if has_scores != is_regression or (table.second is None) != (tables[0].second is None):
            raise DataError(f"{table.path} and {tables[0].path} must have the same columns")
    if len(set(tables[0].labels)) < 2:
        raise DataError(f"{tables[0].path} must have at least 2 different labels, got only {tables[0].labels[0]!r}")
    names: list[str] = []
    if is_regression:
        targets = [torch.tensor(table.values(), dtype=torch.float32) for table in tables]
        what = f"{tables[0].path}: score"
        _check_values_differ(what, targets[0])
        _warn_if_large(what, targets[0])
    else:
        names = _class_names(tables[0])
        targets = [torch.tensor(table.classes(names)) for table in tables]
    splits = tokenize(request, tables, targets)
    return _assemble(request, splits, len(names) or 1, sources=tables[0].sources(), class_names=names)


def read_table(path: Path) -> tuple[TextTable, bool]:
    """Read a table with a header: ``text``, optionally ``text2``, and ``label`` (classes) or ``score`` (numbers).

    A ``.csv`` file has commas and quotes, a ``.tsv`` file tabs and no quotes.

    Returns:
        The table, and whether its labels are scores.

    Raises:
        DataError: If the file is missing, lacks a column, or has a row without a label or with too many cells.
    """
    if not path.exists():
        raise DataError(f"{path} is missing: it must be a .csv or .tsv file with columns text[,text2],label")
    if path.suffix.lower() not in (".csv", ".tsv"):
        raise DataError(f"{path} must be .csv or .tsv, with columns text[,text2],label")
    lines, is_csv = read_lines(path), path.suffix.lower() == ".csv"
    try:
        rows = [line.split("\t") for line in lines] if not is_csv else _csv_rows(lines)
    except csv.Error as error:
        raise DataError(f"{path} is damaged: {error}") from error
    if len(rows) < 2:
        raise DataError(f"{path} has no examples: it must have a header (text,label) and one row per example")
    header = rows[0]
    is_regression = "score" in header and "label" not in header
    names = ["text", *(["text2"] if "text2" in header else []), "score" if is_regression else "label"]
    columns = [column_index(path, header, [name]) for name in names]
    for number, row in enumerate(rows[1:], 2):
        if not any(row):
            raise DataError(f"{path}: row {number} is empty: remove it")
        if len(row) <= max(columns):
            raise DataError(f"{path} is damaged: row {number} has fewer than {1 + max(columns)} columns")
        if any(row[len(header) :]):  # it is not clear which cell is the label
            hint = "quote texts that contain commas" if is_csv else "texts must not contain tabs"
            raise DataError(f"{path}: row {number} must have {len(header)} cells, got {len(row)}: {hint}")
        if not is_regression and not row[columns[-1]].strip():
            raise DataError(f"{path}: row {number} has no label")
    chosen = [[row[column] for column in columns] for row in rows[1:]]
    second = [row[1] for row in chosen] if len(columns) == 3 else None
    return TextTable(path, [row[0] for row in chosen], second, [row[-1].strip() for row in chosen]), is_regression


def _csv_rows(lines: Sequence[str]) -> list[list[str]]:
    limit = csv.field_size_limit(sum(len(line) + 1 for line in lines))  # by default 128 KiB per cell
    try:
        return list(csv.reader((line + "\n" for line in lines), strict=True))
    finally:
        csv.field_size_limit(limit)


def _table_files(path: Path) -> list[Path]:
    """Return the tables ``train`` and ``test`` of a folder, or the table itself."""
    if not path.is_dir():
        return [path]
    files = []
    for name in ("train", "test"):
        candidates = [path / f"{name}{suffix}" for suffix in (".csv", ".tsv") if (path / f"{name}{suffix}").exists()]
        if not candidates:
            raise DataError(f"{path / name}.csv (or .tsv) is missing: a folder must have tables train and test")
        files.append(candidates[0])
    return files


def _class_names(table: TextTable) -> list[str]:
    """Return the labels that occur: in numerical order if all are integers, else in alphabetical order."""
    names = set(table.labels)
    if all(name.removeprefix("-").isdecimal() for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


# --------------------------------------------------------------------------------------------------------------- npz:


def load_arrays(request: Request) -> Data:
    """Load uint8 images or rows of features: ``x`` and ``y``, or ``x_train``, ``y_train``, ``x_test``, ``y_test``."""
    path, arrays = request.path, read_npz(request.path)
    names = [("x_train", "y_train"), ("x_test", "y_test")] if "x_train" in arrays else [("x", "y")]
    if len(names) == 1 and "x_test" in arrays:
        raise DataError(f"{path} has x_test but no x_train: name the arrays x_train, y_train, x_test, y_test")
    if len(names) == 2:
        _warn_validation_ignored([f"{path}: {x}" for x in arrays if x.removeprefix("x_") in VALIDATION_NAMES])
    splits = [_array_split(path, arrays, x, y) for x, y in names]
    shapes = [{name: tuple(x.shape[1:]) for name, x in split.inputs.items()} for split in splits]
    is_regression = splits[0].targets.is_floating_point()
    if shapes[0] != shapes[-1] or is_regression != splits[-1].targets.is_floating_point():
        found = [f"{tuple(arrays[x].shape)} {arrays[x].dtype}, {arrays[y].dtype}" for x, y in names]
        raise DataError(
            f"{path}: x and y of train and test must have the same shape and type, got {' and '.join(found)}"
        )
    what = f"{path}: {names[0][1]}"
    _check_values_differ(what, splits[0].targets)
    num_classes = 1
    if is_regression:
        _warn_if_classes(what, splits[0].targets)
        _warn_if_large(what, splits[0].targets)
    else:
        targets = torch.cat([split.targets for split in splits])
        num_classes = 1 + int(targets.max())
        _check_gaps(what, targets)
        if targets.min() > 0:
            first = targets.min()
            warnings.warn(
                f"{what} has no class 0, but the model gets an output for it ({num_classes} in all): subtract {first} "
                f"from y if your classes start at {first}",
                stacklevel=2,
            )
    return _assemble(request, splits, num_classes)


def read_npz(path: Path) -> Mapping[str, np.ndarray]:
    """Read the arrays of an ``.npz`` file.

    Raises:
        DataError: If the file is missing, a folder, damaged or not an ``.npz``, or contains Python objects.
    """
    hint = "write it with numpy.savez(path, x=…, y=…)"
    if path.is_dir():
        raise DataError(f"{path} is a folder: pass the .npz file; {hint}")
    if not path.is_file():
        raise DataError(f"{path.absolute()} is missing: {hint}")
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} is damaged or not an .npz file: {hint}")
    arrays, name = {}, ""
    try:
        with reading(path), np.load(path, allow_pickle=False) as archive:
            for name in archive.files:
                if isinstance(x := archive[name], np.ndarray):  # not the bytes of another file
                    arrays[name] = x
    except DataError:
        raise
    except Exception as error:  # zipfile, numpy and its header parser raise many types for damaged files
        if "allow_pickle" in str(error):
            hint = NUMBERED if name.startswith("y") else f"save {INPUTS}"
            raise DataError(f"{path}: {name} has Python objects, which are not read: {hint}") from None
        raise DataError(f"{path} cannot be read: {error or type(error).__name__}") from error
    return arrays


def _array_split(path: Path, arrays: Mapping[str, np.ndarray], x_name: str, y_name: str) -> Split:
    """Check a pair of arrays and convert them to tensors."""
    _check_arrays(path, arrays, x_name, y_name)
    x, y = arrays[x_name], arrays[y_name]
    targets = torch.from_numpy(y.astype(np.float32 if y.dtype.kind == "f" else np.int64))
    if x.ndim == 2:  # float64 until it is standardised: in float32 a column may differ only by rounding
        return Split({"x": torch.from_numpy(x.astype(np.float32 if x.dtype == np.float32 else np.float64))}, targets)
    if x.dtype != np.uint8 or x.ndim > 4:
        hint = ': save (255 * x).astype("uint8") of values in [0, 1]' if x.dtype.kind == "f" else ""
        raise DataError(f"{path}: {x_name} must be {INPUTS}, got {x.dtype} of shape {x.shape}{hint}")
    if x.ndim == 3:
        x = x[:, None]
    elif _channels_are_last(x.shape):
        x = x.transpose(0, 3, 1, 2)
    return Split({"image": torch.from_numpy(np.ascontiguousarray(x))}, targets)


def _check_arrays(path: Path, arrays: Mapping[str, np.ndarray], x_name: str, y_name: str) -> None:
    """Check that two arrays exist, fit each other, and are finite numbers; and that classes are numbered from 0."""
    for name in (x_name, y_name):
        if name not in arrays:
            found = ", ".join(arrays)[:200] or "no arrays"
            needed = "it must have arrays x, y or x_train, y_train, x_test, y_test"
            raise DataError(f"{path}: {name} is missing; the file has {found}; {needed}")
    x, y = arrays[x_name], arrays[y_name]
    if y.ndim != 1 or x.ndim < 2 or len(x) != len(y) or not len(y) or not x[0].size:
        shapes = f"got {x.shape} and {y.shape}"
        if x.ndim >= 2 and y.ndim == 2 and len(x) == len(y) and y.shape[1]:
            remedy = f"{y_name}.argmax(1) of one-hot classes" if y.shape[1] > 1 else f"{y_name}.ravel()"
            shapes += f": save {remedy}"
        elif x.ndim == 1 and x.shape == y.shape:
            shapes += f": save {x_name}.reshape(-1, 1) of a single feature"
        raise DataError(f"{path}: {x_name} and {y_name} must have shapes (n, …) and (n,) with n > 0, {shapes}")
    if y.dtype.kind not in "iubf" or x.dtype.kind not in "iubf":
        hint = f": {NUMBERED}" if y.dtype.kind in "US" else ""
        raise DataError(f"{path}: {x_name} and {y_name} must be numbers, got {x.dtype} and {y.dtype}{hint}")
    for name, array in ((x_name, x), (y_name, y)):
        if array.dtype.kind == "f" and not (np.abs(array) <= np.finfo(np.float32).max).all():
            raise DataError(f"{path}: {name} must be finite in float32, got a NaN, an infinity or a larger number")
    if y.dtype.kind != "f":
        for label in (int(y.min()), int(y.max())):
            if not 0 <= label < max(MAX_CLASSES, len(y)):
                raise DataError(
                    f"{path}: classes in {y_name} must be numbered from 0 without large gaps, got {label}: {NUMBERED}"
                )


def _channels_are_last(shape: tuple[int, ...]) -> bool:
    """Return whether images are (n, height, width, channels); in doubt they are (n, channels, height, width).

    The axis of the channels has 1 or 3 entries; or the other two are equal; or it is the shortest one.
    """
    _, first, second, last = shape
    if first in (1, 3) or last in (1, 3):
        return first not in (1, 3)
    return first == second != last or last < min(first, second)


def _check_values_differ(what: str, targets: Tensor) -> None:
    if len(targets.unique()) < 2:
        raise DataError(f"{what} must have at least 2 different values, got only {targets[0]:g}")


def _warn_if_classes(what: str, targets: Tensor) -> None:
    """Warn if the targets of a regression are few whole numbers, as of classes that were saved as floats."""
    count = len(targets.unique())
    if count <= min(MAX_FLOAT_CLASSES, len(targets) // 10) and (targets == targets.round()).all():
        warnings.warn(
            f"{what} has {count} distinct whole numbers as floats: trained as a regression; for classes save "
            "y.astype(int)",
            stacklevel=3,
        )


def _warn_if_large(what: str, targets: Tensor) -> None:
    """Warn if the targets of a regression are so large that training is likely to diverge."""
    values = targets.double()
    if values.square().mean().sqrt() > LARGE_TARGETS:
        warnings.warn(
            f"{what} has mean {values.mean():.4g} and standard deviation {values.std():.4g}: scale it to about 0 and 1",
            stacklevel=3,
        )


def _check_gaps(what: str, targets: Tensor) -> None:
    """Check that at least half of the classes 0…max occur: labels with larger gaps are identifiers of something."""
    num_labels, largest = len(targets.unique()), int(targets.max())
    if largest + 1 > 2 * num_labels:
        raise DataError(
            f"{what} has {num_labels} different labels and the largest is {largest}: classes must be numbered from 0 "
            f"and at least half of them must occur: {NUMBERED}"
        )
