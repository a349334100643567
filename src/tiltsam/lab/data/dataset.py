"""Data of a task as tensors, and what turns raw examples into it: long tails, label noise, splits, statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tiltsam.lab.config import TrainConfig
from tiltsam.lab.errors import DataError

__all__ = [
    "Augmentation",
    "Data",
    "LoadingCallback",
    "Request",
    "Split",
    "assemble",
    "long_tail",
    "noisy_labels",
    "split_at_random",
]

Augmentation = Callable[[Tensor, torch.Generator], Tensor]
"""``augmentation(images, generator)``, such as :func:`tiltsam.lab.data.loader.crop`."""
LoadingCallback = Callable[[str, int, int | None], None]
"""``callback("downloading a.zip", done, total)``; the total is None if it is not known."""


@dataclass(frozen=True)
class Split:
    """Examples as tensors on one device."""

    inputs: dict[str, Tensor]
    """Inputs by name, in the order in which the model takes them: ``image`` (n, channels, height, width) uint8;
    ``x`` (n, features) float32, standardised; ``input_ids``, ``attention_mask`` and ``token_type_ids`` (n, length)
    int64."""
    targets: Tensor
    """Classes (n,) int64, or values (n,) float32 for a regression."""

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, rows: Tensor | slice) -> Split:
        """Return some of the examples."""
        return Split({name: x[rows] for name, x in self.inputs.items()}, self.targets[rows])

    def fixed_permutation(self) -> Tensor:
        """Return a random order of the examples that is the same in every call: files are often sorted by class."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(0))
        return order.to(self.targets.device)

    def to(self, device: torch.device | str) -> Split:
        """Return a copy on a device."""
        return Split({name: x.to(device) for name, x in self.inputs.items()}, self.targets.to(device))


@dataclass(frozen=True)
class Data:
    """The data of a task."""

    name: str
    """Name of the task."""
    train: Split
    validation: Split
    """Held out of the training examples for model selection. Its labels are as noisy as those of ``train``."""
    test: Split
    num_classes: int
    """Number of classes; 1 for a regression."""
    metrics: tuple[str, ...] = ("accuracy",)
    """Names of :data:`tiltsam.lab.evaluate.METRICS`; the first one is the score."""
    mean: tuple[float, ...] = ()
    """Mean of each channel of the training images, in [0, 1]; empty if the inputs are not images."""
    std: tuple[float, ...] = ()
    """Standard deviation of each channel, as ``mean``."""
    augment: tuple[Augmentation, ...] = ()
    """Applied to training images, one after the other."""
    fingerprint: str = ""
    """Digest of the user's files when they were read; empty for a public data set."""
    mislabelled: Tensor | None = None
    """Which training examples have a label that was replaced by a wrong one, (n,) bool; None without label noise."""
    test_split_off: float = 0.0
    """Fraction of the user's examples that was split off as the test set; 0 if the data has its own test set."""
    rows: Tensor | None = None
    """Row of each training example among the examples that were read, (n,) int64, on the CPU; None if unknown."""
    sources: tuple[str, ...] = ()
    """What identifies each row to the user: the path of an image, or a text. Empty for other data."""
    class_names: tuple[str, ...] = ()
    """Names of the classes; empty if they are numbers."""

    def to(self, device: torch.device | str) -> Data:
        """Return a copy on a device."""
        moved = {name: getattr(self, name).to(device) for name in ("train", "validation", "test")}
        return replace(self, **moved, mislabelled=None if self.mislabelled is None else self.mislabelled.to(device))


@dataclass(frozen=True)
class Request:
    """What to load: the argument of every task's reader."""

    config: TrainConfig
    """The run: its task, seed, validation fraction, model and maximum number of tokens."""
    path: Path
    """The data root, or the path of the user's data."""
    files: str
    """Description of the files that the task needs, for error messages."""
    noise: float
    """Fraction of training and validation labels replaced with wrong ones."""
    imbalance: float
    """Examples of the largest class per example of the smallest, in training and validation; 1 keeps all examples."""
    image_size: int
    """Height and width to which image files are resized."""
    download: bool
    """Whether to download missing files."""
    progress: LoadingCallback | None
    """Called with the progress of downloads and of decoding images."""


def noisy_labels(labels: Tensor, fraction: float, num_classes: int, generator: torch.Generator) -> Tensor:
    """Return a copy of the labels in which a fraction is replaced, uniformly by one of the *other* classes.

    Exactly round(fraction · n) labels are replaced.

    Note:
        This follows the paper's text. Its code draws from all classes, so that some "wrong" labels are right.
    """
    wrong = torch.randperm(len(labels), generator=generator)[: round(fraction * len(labels))]
    shift = torch.randint(1, max(2, num_classes), wrong.shape, generator=generator)
    out = labels.clone()
    out[wrong] = (labels[wrong] + shift) % num_classes
    return out


def long_tail(labels: Tensor, imbalance: float, num_classes: int, generator: torch.Generator) -> Tensor:
    """Return the rows to keep so that the sizes of the classes fall exponentially (Cao et al. 2019).

    Class c of C keeps round(n_max · imbalance^(-c / (C - 1))) examples, or all if it has fewer, where n_max is the size
    of the largest class. The rows are sorted.
    """
    order = torch.randperm(len(labels), generator=generator)
    most = int(labels.bincount().max())
    kept = [
        order[labels[order] == c][: round(most * imbalance ** (-c / (num_classes - 1)))] for c in range(num_classes)
    ]
    return torch.cat(kept).sort().values


def split_at_random(n: int, fraction: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Divide 0…n-1 at random into two sorted parts.

    The second part has round(fraction · n) entries, at least 1 if the fraction is not 0, at most n - 1.
    """
    size = min(n - 1, max(1, round(fraction * n))) if fraction else 0
    order = torch.randperm(n, generator=generator)
    return order[size:].sort().values, order[:size].sort().values


def assemble(
    request: Request,
    pool: Split,
    test: Split | None,
    num_classes: int,
    *,
    num_validation: int | None = None,
    test_fraction: float = 1 / 3,
    metrics: Sequence[str] = ("accuracy",),
    augment: tuple[Augmentation, ...] = (),
    sources: Sequence[str] = (),
    class_names: Sequence[str] = (),
) -> Data:
    """Apply the imbalance, add label noise, split the examples, standardise features, compute statistics of images.

    Args:
        request: The run, noise and imbalance. An imbalance needs ``num_validation=None``.
        pool: The training and validation examples.
        test: The test set; None to take it from the pool, the same one for every seed.
        num_classes: Number of classes; 1 for a regression.
        num_validation: Size of a published validation set, at the end of the pool; None to split at random.
        test_fraction: Fraction of the pool to test on if ``test`` is None.
        metrics: As in :class:`Data`.
        augment: As in :class:`Data`.
        sources: As in :class:`Data`, of the pool.
        class_names: As in :class:`Data`.

    Raises:
        DataError: If there are too few examples, or label noise was requested for a regression.
    """
    name, seed = request.config.task, request.config.seed
    rows = torch.arange(len(pool))
    if test is None:
        if len(pool) < 4:
            raise DataError(f"{name} must have at least 4 examples to split off a test set, got {len(pool)}")
        rows, held_out = split_at_random(len(pool), test_fraction, _generator(0, 2))
        pool, test = pool[rows], pool[held_out]
    if request.imbalance > 1:  # the same examples for every seed, as in a published data set
        kept = long_tail(pool.targets, request.imbalance, num_classes, _generator(0, 3))
        pool, rows = pool[kept], rows[kept]
    wrong: Tensor | None = None
    if request.noise:
        if num_classes < 2:
            raise DataError(f"{name} is a regression: noise must be 0, got {request.noise:g}")
        labels = noisy_labels(pool.targets, request.noise, num_classes, _generator(seed, 1))
        wrong = labels != pool.targets
        pool = replace(pool, targets=labels)
    if num_validation is not None:
        first, second = torch.arange(len(pool)).split([len(pool) - num_validation, num_validation])
    else:
        first, second = split_at_random(len(pool), request.config.validation, _generator(seed, 0))
    train, validation = pool[first], pool[second]
    if "x" in train.inputs:
        train, validation, test = _standardised((train, validation, test))
    mean, std = _channel_statistics(train.inputs["image"]) if "image" in train.inputs else ((), ())
    return Data(
        name,
        train,
        validation,
        test,
        num_classes,
        tuple(metrics),
        mean,
        std,
        augment,
        mislabelled=None if wrong is None else wrong[first],
        rows=rows[first],
        sources=tuple(sources),
        class_names=tuple(class_names),
    )


def _generator(seed: int, purpose: int) -> torch.Generator:
    """Return a generator for a purpose: 0 the validation split, 1 label noise, 2 the test split, 3 the long tail."""
    return torch.Generator().manual_seed((seed * 4 + purpose) % 2**63)


def _standardised(splits: Sequence[Split]) -> list[Split]:
    """Return the splits with features of mean 0 and deviation 1 on the first; its constant features become 0."""
    train = splits[0].inputs["x"]
    low, high = train.amin(0).double(), train.amax(0).double()
    span = torch.where(high > low, high - low, torch.inf)

    def scaled(rows: Tensor) -> Tensor:  # to [0, 1] on the training examples: no square overflows, or becomes 0
        return (rows.double() - low) / span

    mean = sum((scaled(rows).sum(0) for rows in train.split(4096)), torch.zeros_like(low)) / len(train)
    squares = ((scaled(rows) - mean).square().sum(0) for rows in train.split(4096))
    deviation = (sum(squares, torch.zeros_like(low)) / len(train)).sqrt()
    deviation = torch.where(deviation > 0, deviation, 1.0)
    parts = [
        torch.cat([((scaled(rows) - mean) / deviation).float() for rows in split.inputs["x"].split(4096)])
        for split in splits
    ]
    return [Split({"x": x}, split.targets) for x, split in zip(parts, splits, strict=True)]


def _channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the exact mean and standard deviation of each channel, scaled to [0, 1], from its histogram."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in images.unbind(1):
        counts = sum(chunk.flatten().bincount(minlength=256) for chunk in channel.split(4096))
        weights = torch.as_tensor(counts, dtype=torch.float64) / channel.numel()
        mean = (weights * levels).sum()
        deviation = float((weights * (levels - mean).square()).sum().sqrt())
        means.append(float(mean))
        deviations.append(deviation or 1.0)  # a constant channel becomes zero
    return tuple(means), tuple(deviations)
