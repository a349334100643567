"""Tasks to train on, and their data.

Public data sets are read from the files that their authors publish, in folders below the data root (:func:`data_root`).
The splits are:

- ``train`` and ``validation``: the published training set, divided at random by the seed. Label noise, if any, is in
  both. DTD publishes a validation set, which is used. Long-tailed tasks keep fewer examples of each class than of the
  one before, the same ones for every seed.
- ``test``: the published test set. The labels of GLUE's and Tiny ImageNet's test sets are not public, so that their
  development sets are the test sets here; they are never used for model selection. Data without a test set (``digits``,
  the user's own) is split once, in the same way for every seed.

The modules: ``vision``, ``glue`` and ``user`` read the tasks; ``images``, ``text`` and ``download`` are about their
files; ``dataset`` turns examples into splits; ``loader`` makes batches of them.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from tiltsam.lab import pretrained
from tiltsam.lab.config import DATA_FIELDS, TrainConfig
from tiltsam.lab.data import user, vision
from tiltsam.lab.data.dataset import Data, LoadingCallback, Request, Split
from tiltsam.lab.data.glue import GLUE, glue
from tiltsam.lab.data.user import fingerprint
from tiltsam.lab.errors import ConfigError, DataError

__all__ = [
    "GLUE",
    "TASKS",
    "Data",
    "LoadingCallback",
    "Split",
    "Task",
    "data_key",
    "data_loader",
    "data_root",
    "find_task",
    "fingerprint",
    "load",
]

PAPER_NOISE = 0.2  # the paper's fraction of noisy labels
DIGITS_IMBALANCE = 15.0  # from 127 examples to 9, so that the rarest class has at least 5 after the validation split
CIFAR_IMBALANCE = 100.0  # from 500 examples to 5, the strongest of Cao et al. 2019


@dataclass(frozen=True)
class Task:
    """A data set to train on."""

    name: str
    description: str
    """One line."""
    files: str
    """The files it needs, one line."""
    read: Callable[[Request], Data]
    noise: float = 0.0
    """Default fraction of noisy labels in training and validation."""
    imbalance: float = 1.0
    """Examples of the first class per example of the last, in training and validation; above 1 a long-tailed task."""
    image_size: int | None = None
    """Default height and width of image files; None if the task has no image files, whose size could be chosen."""


def load(
    config: TrainConfig,
    root: Path | None = None,
    *,
    download: bool = False,
    progress: LoadingCallback | None = None,
) -> Data:
    """Load the data of a config's task, on the CPU. Texts are split by the tokenizer of the config's model.

    Args:
        config: The run: ``task``, ``seed``, ``validation``, ``noise``, ``model``, ``max_length`` and ``image_size``
            determine its data.
        root: Folder of the public data sets; see :func:`data_root`.
        download: Whether to download missing files.
        progress: Called with the progress of downloads and of decoding images.

    Raises:
        DataError: If files are missing or damaged. The message is one line: which file, and what to do.
        ConfigError: If a setting does not fit the task.

    Example:
        >>> data = load(TrainConfig("digits", seed=1))
        >>> len(data.train), len(data.validation), len(data.test), data.num_classes
        (1078, 120, 599, 10)
    """
    task = find_task(config.task)
    if config.image_size is not None:
        if task.image_size is None:
            raise ConfigError(f"image_size must be None for {config.task}: it reads no image files")
        if config.image_size > 4096:
            raise ConfigError(f"image_size must be at most 4096, got {config.image_size}")
    if download and (source := pretrained.source_of(config.model)):
        pretrained.fetch(source)
    _, _, path = config.task.partition(":")
    digest = fingerprint(config.task) if path else ""  # before reading: the files may be edited meanwhile
    data = task.read(
        Request(
            config,
            path=Path(path).expanduser() if path else data_root(root),
            files=task.files,
            noise=task.noise if config.noise is None else config.noise,
            imbalance=task.imbalance,
            image_size=config.image_size or task.image_size or 0,
            download=download,
            progress=progress,
        )
    )
    return replace(data, fingerprint=digest)


def data_loader(
    root: Path | None = None, *, download: bool = False, progress: LoadingCallback | None = None
) -> Callable[[TrainConfig], Data]:
    """Return a :func:`load` that caches the last data set, because decoding images is slow.

    One is enough: runs are ordered by seed, and the seed determines the validation split and the label noise.
    """

    @lru_cache(1)
    def cached(key: TrainConfig) -> Data:
        return load(key, root, download=download, progress=progress)

    return lambda config: cached(data_key(config))


def data_key(config: TrainConfig) -> TrainConfig:
    """Return the part of a config that determines its data: it is equal for configs with the same data."""
    needs_model = config.task.startswith(("glue/", "text:")) or config.model.startswith("hf:")  # for its tokenizer
    values = {name: getattr(config, name) for name in DATA_FIELDS}
    return TrainConfig(model=config.model if needs_model else "auto", **values)


def data_root(root: Path | None = None) -> Path:
    """Return the folder of the public data sets: the argument, else ``$TILTSAM_DATA``, else ``data``."""
    return Path(root or os.environ.get("TILTSAM_DATA") or "data")


def find_task(name: str) -> Task:
    """Return a task by its name in :data:`TASKS`, or by ``images:PATH``, ``text:PATH`` or ``npz:PATH``.

    Raises:
        DataError: If there is no such task.
    """
    kind, colon, path = name.partition(":")
    task = TASKS.get(f"{kind}:PATH") if colon and path else TASKS.get(name)
    if task is None or name.endswith(":PATH"):
        kinds = {".npz": "npz", ".csv": "text", ".tsv": "text"}
        own = [f"{kind}:{name}" for suffix, kind in kinds.items() if name.endswith(suffix) and not colon]
        if not colon and Path(name).is_dir():
            own = [f"images:{name}"]
        close = own or difflib.get_close_matches(name, TASKS, 1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise DataError(f"unknown task {name!r}: {hint}tasks are {', '.join(TASKS)}")
    return task


_CIFAR100 = ("cifar-100-binary/train.bin and test.bin", partial(vision.cifar, num_classes=100))

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "digits",
            "8x8 handwritten digits, 10 classes; by default 20% noisy labels",
            "none: the data comes with scikit-learn",
            vision.digits,
            noise=PAPER_NOISE,
        ),
        Task(
            "digits-lt",
            "the digits, long-tailed: 127 training examples of the 0, 9 of the 9",
            "none: the data comes with scikit-learn",
            vision.digits,
            imbalance=DIGITS_IMBALANCE,
        ),
        Task(
            "fashion-mnist",
            "28x28 greyscale images of clothes, 10 classes",
            "fashion-mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz",
            vision.fashion_mnist,
        ),
        Task(
            "cifar10",
            "32x32 photographs, 10 classes",
            "cifar-10-batches-bin/data_batch_1.bin … data_batch_5.bin and test_batch.bin",
            partial(vision.cifar, num_classes=10),
        ),
        Task("cifar100", "32x32 photographs, 100 classes", *_CIFAR100),
        Task("cifar100-noisy", "CIFAR-100, by default with 20% noisy labels", *_CIFAR100, noise=PAPER_NOISE),
        Task(
            "cifar100-lt",
            "CIFAR-100, long-tailed: 500 training examples of the first class, 5 of the last",
            *_CIFAR100,
            imbalance=CIFAR_IMBALANCE,
        ),
        Task(
            "tiny-imagenet",
            "64x64 photographs, 200 classes",
            "tiny-imagenet-200/wnids.txt, train/<class>/images/*.JPEG, val/images/*.JPEG and val/val_annotations.txt",
            vision.tiny_imagenet,
            image_size=64,
        ),
        Task(
            "dtd",
            "photographs of textures, 47 classes, resized to 224x224",
            "dtd/images/<class>/*.jpg and dtd/labels/train1.txt, val1.txt, test1.txt",
            vision.dtd,
            image_size=224,  # the paper's ViT was pretrained at this size
        ),
        *(
            Task(
                f"glue/{name}",
                f"GLUE: {task.description} ({', '.join(task.metrics)})",
                f"glue/{task.folder}/{task.train} and {task.dev[0]}",
                partial(glue, name=name),
            )
            for name, task in GLUE.items()
        ),
        Task(
            "images:PATH",
            "your images, resized to 64x64",
            "PATH/<class>/*.jpg|png|…, or PATH/train/<class>/… and PATH/test/<class>/…",
            user.load_images,
            image_size=64,
        ),
        Task(
            "text:PATH",
            "your sentences, or pairs of sentences (with --model hf:… or minilm)",
            "PATH: a .csv or .tsv file with columns text[,text2],label (score instead of label for a regression), or a "
            "folder with train.csv and test.csv",
            user.load_text,
        ),
        Task(
            "npz:PATH",
            "your arrays: uint8 images or rows of features",
            "PATH: an .npz file with x and y, or x_train, y_train, x_test and y_test; integers in y are classes, "
            "floats a regression",
            user.load_arrays,
        ),
    )
}
"""Tasks by name; ``PATH`` is replaced by the path of the user's data."""
