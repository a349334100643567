"""The tasks of the lab: the paper's, and one's own data, each loaded into tensors by its name.

Data sets are read as their authors publish them, from folders below the data root: the argument, else the environment
variable ``TILTSAM_DATA``, else ``data``. What the splits are:

- ``train`` and ``validation`` come from the published training set, divided at random by the seed; label noise, where
  there is any, is in both, and only there. DTD publishes its own validation set, which is used.
- ``test`` is the published test set. GLUE and Tiny ImageNet do not publish the labels of theirs, so their published
  development set is the test set here, and is never chosen on. Data that comes in one piece (``digits``, one's own)
  has a test set cut from it that is the same for every seed.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tiltsam.lab import own, published
from tiltsam.lab.data import Data
from tiltsam.lab.download import Progress
from tiltsam.lab.errors import DataError
from tiltsam.lab.splits import Request
from tiltsam.lab.tables import GLUE

__all__ = ["TASKS", "DataError", "Task", "data_root", "find_task", "load"]

NOISE = 0.2  # the paper's share of wrong labels


@dataclass(frozen=True)
class Task:
    """Something to train on."""

    name: str
    description: str
    """One line."""
    files: str
    """What to put where."""
    read: Callable[[Request], Data]
    noise: float = 0.0
    """Share of wrong labels in training and validation, unless asked otherwise."""
    image_size: int | None = None
    """Pixels that image files are brought to, unless asked otherwise; None where there are no files of any size."""


def data_root(root: Path | None = None) -> Path:
    """Where data sets are: the argument, else ``TILTSAM_DATA``, else ``data``."""
    return Path(root or os.environ.get("TILTSAM_DATA") or "data")


def find_task(name: str) -> Task:
    """The task of that name.

    Args:
        name: Of :data:`TASKS`, or ``images:PATH``, ``text:PATH``, ``npz:PATH`` for one's own data.

    Raises:
        DataError: There is none.
    """
    kind, colon, path = name.partition(":")
    task = TASKS.get(f"{kind}:PATH") if colon and path else TASKS.get(name)
    if task is None or name.endswith(":PATH"):
        close = difflib.get_close_matches(name, TASKS, 1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise DataError(f"no task named {name!r}; {hint}tasks are {', '.join(TASKS)}")
    return task


def load(
    name: str,
    *,
    root: Path | None = None,
    seed: int = 0,
    validation: float = 0.1,
    noise: float | None = None,
    tokenizer: str | None = None,
    max_length: int = 64,
    image_size: int | None = None,
    download: bool = False,
    progress: Progress | None = None,
) -> Data:
    """Load a task.

    Args:
        name: Of :data:`TASKS`, or ``images:PATH``, ``text:PATH``, ``npz:PATH`` for one's own data.
        root: Where the data sets are; see :func:`data_root`.
        seed: Of the validation split and the label noise.
        validation: Share of the training examples held out for choosing.
        noise: Share of training and validation labels replaced by other ones; the task's own where None.
        tokenizer: For text: a folder or hub name for ``transformers``, or None for the built-in one.
        max_length: For text: tokens kept.
        image_size: For image files (``tiny-imagenet``, ``dtd``, ``images:PATH``): height and width they are brought to.
        download: Fetch what is missing from its authors.
        progress: Told how far downloads and decoding are.

    Returns:
        The task's data, on the CPU.

    Raises:
        DataError: One line for the user: what is missing and where to put it, which file is damaged, what is wrong.
        ValueError: A share outside its range.

    Example:
        >>> data = load("digits", seed=1)
        >>> len(data.train), len(data.validation), len(data.test), data.num_classes
        (1078, 120, 599, 10)
    """
    if not 0 <= validation < 1:
        raise ValueError(f"validation is a share of the training examples in [0, 1), got {validation}")
    if noise is not None and not 0 <= noise <= 1:
        raise ValueError(f"noise is a share of the labels in [0, 1], got {noise}")
    if image_size is not None and not 1 <= image_size <= 4096:
        raise ValueError(f"image_size is a number of pixels in 1…4096, got {image_size}")
    task = find_task(name)
    if image_size is not None and task.image_size is None:
        raise ValueError(f"image_size is for tasks that read image files of any size; {name} is none of them")
    _, _, path = name.partition(":")
    return task.read(
        Request(
            name=name,
            path=Path(path).expanduser() if path else data_root(root),
            files=task.files,
            seed=seed,
            validation=validation,
            noise=task.noise if noise is None else noise,
            tokenizer=tokenizer,
            max_length=max_length,
            image_size=image_size or task.image_size or 0,
            download=download,
            progress=progress,
        )
    )


_CIFAR100 = "cifar-100-binary/train.bin and test.bin"
_GLUE_ABOUT = {
    "cola": "is a sentence acceptable English? (Matthews correlation, accuracy)",
    "sst2": "is a film review positive? (accuracy)",
    "mrpc": "do two sentences of the news say the same? (accuracy, F1)",
    "stsb": "how similar are two sentences? score/5, a regression (Pearson, Spearman correlation)",
    "qqp": "do two questions on Quora ask the same? (accuracy, F1)",
    "mnli": "does a sentence follow from, contradict or not concern another? matched (accuracy)",
    "qnli": "does a sentence answer a question? (accuracy)",
    "rte": "does a sentence follow from another? (accuracy)",
    "wnli": "what does a pronoun refer to? (accuracy)",
}

_LIST = (
    Task(
        "digits",
        "8x8 handwritten digits, 20% of labels wrong",
        "nothing: scikit-learn has them",
        published.digits,
        NOISE,
    ),
    Task(
        "fashion-mnist",
        "28x28 grey clothes, 10 classes",
        "fashion-mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz",
        published.fashion_mnist,
    ),
    Task(
        "cifar10",
        "32x32 photographs, 10 classes",
        "cifar-10-batches-bin/data_batch_1.bin … data_batch_5.bin and test_batch.bin",
        partial(published.cifar, fine=False),
    ),
    Task("cifar100", "32x32 photographs, 100 classes", _CIFAR100, partial(published.cifar, fine=True)),
    Task(
        "cifar100-noisy",
        "CIFAR-100 with 20% of labels replaced by other ones",
        _CIFAR100,
        partial(published.cifar, fine=True),
        NOISE,
    ),
    Task(
        "tiny-imagenet",
        "64x64 photographs, 200 classes",
        "tiny-imagenet-200/wnids.txt, train/<class>/images/*.JPEG, val/images/*.JPEG and val/val_annotations.txt",
        published.tiny_imagenet,
        image_size=64,
    ),
    Task(
        "dtd",
        "photographs of textures, 47 classes, brought to 224 pixels",
        "dtd/images/<class>/*.jpg and dtd/labels/train1.txt, val1.txt, test1.txt",
        published.dtd,
        image_size=224,  # what the paper's ViT was pretrained at
    ),
    *(
        Task(
            f"glue/{name}",
            about,
            f"glue/{GLUE[name].folder}/{GLUE[name].train[0]} and {GLUE[name].dev[0]}",
            partial(published.glue, task=name),
        )
        for name, about in _GLUE_ABOUT.items()
    ),
    Task(
        "images:PATH",
        "your images, brought to 64 pixels",
        "PATH/<class>/*.jpg|png|…, or PATH/train/<class>/… and PATH/test/<class>/…",
        own.image_folder,
        image_size=64,
    ),
    Task(
        "text:PATH",
        "your sentences or pairs of them",
        "PATH: a .csv or .tsv with a header and columns text[,text2],label (score for a regression), or a folder with "
        "train.csv and test.csv",
        own.sentences,
    ),
    Task(
        "npz:PATH",
        "your arrays: uint8 images or rows of features",
        "PATH: an .npz with x and y, or x_train, y_train, x_test, y_test; y of integers are classes, of floats a "
        "regression",
        own.arrays,
    ),
)

TASKS: dict[str, Task] = {task.name: task for task in _LIST}
"""By name; ``PATH`` in a name stands for the path of one's own data."""
