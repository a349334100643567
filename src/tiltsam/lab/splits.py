"""From what a reader found to a task's data: label noise, splits, statistics, tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tiltsam.lab.data import Data, Split
from tiltsam.lab.download import Progress
from tiltsam.lab.errors import DataError
from tiltsam.lab.tables import Table
from tiltsam.lab.text import encode

__all__ = ["Request", "assemble", "encoded", "noisy_labels", "split_at_random"]


@dataclass(frozen=True)
class Request:
    """What :func:`load` was asked for."""

    name: str
    path: Path
    """The data root, or the path of one's own data."""
    files: str = ""
    """What the task needs, for messages."""
    seed: int = 0
    validation: float = 0.1
    noise: float = 0.0
    tokenizer: str | None = None
    max_length: int = 64
    image_size: int = 0
    """Pixels that image files are brought to."""
    download: bool = False
    progress: Progress | None = None


def noisy_labels(labels: Tensor, share: float, num_classes: int, generator: torch.Generator) -> Tensor:
    """Replace a share of the labels by ones drawn uniformly from the *other* classes.

    Note:
        The paper's text; its code draws from all classes, so that some "wrong" labels are right.

    Args:
        labels: int64 (n,).
        share: round(share · n) labels are replaced.
        num_classes: Number of classes.
        generator: Of which are replaced, and by what.

    Returns:
        The labels, a copy.
    """
    wrong = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
    shift = torch.randint(1, max(2, num_classes), wrong.shape, generator=generator)
    out = labels.clone()
    out[wrong] = (labels[wrong] + shift) % num_classes
    return out


def split_at_random(n: int, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Divide 0…n-1 at random.

    Args:
        n: How many.
        share: Of the second part: round(share · n) of them, at least one where the share is not zero.
        generator: Of the choice.

    Returns:
        The rows of the first and of the second part, each in order; the first is never empty.
    """
    size = min(n - 1, max(1, round(share * n))) if share else 0
    order = torch.randperm(n, generator=generator)
    return order[size:].sort().values, order[:size].sort().values


def _generator(seed: int, stream: int) -> torch.Generator:
    """A stream of random numbers of its own for each use of a seed: 0 the validation split, 1 noise, 2 the test set."""
    return torch.Generator().manual_seed((seed * 4 + stream) % 2**63)


def assemble(
    request: Request,
    pool: Split,
    test: Split | None,
    num_classes: int,
    *,
    published: int | None = None,
    test_share: float = 1 / 3,
    metrics: Sequence[str] = ("accuracy",),
    augment: Sequence[str] = (),
) -> Data:
    """Noise, splits and statistics: the part that all tasks share.

    Args:
        request: What was asked for.
        pool: All that may be trained on or chosen by.
        test: The test set; None to cut one from the pool, the same for every seed.
        num_classes: 1 for a regression.
        published: Number of examples at the end of the pool that are the published validation set.
        test_share: How much to cut.
        metrics: As in :class:`Data`.
        augment: As in :class:`Data`.

    Returns:
        The task's data.

    Raises:
        DataError: There are too few examples, or noise was asked for where there are no classes.
    """
    if test is None:
        if len(pool) < 4:
            raise DataError(f"{request.name}: {len(pool)} examples are too few to hold some out for testing")
        kept, held = split_at_random(len(pool), test_share, _generator(0, 2))
        pool, test = pool[kept], pool[held]
    if request.noise:
        if num_classes < 2:
            raise DataError(f"{request.name} predicts a number, not a class: label noise does not apply to it")
        labels = noisy_labels(pool.targets, request.noise, num_classes, _generator(request.seed, 1))
        pool = replace(pool, targets=labels)
    if published is not None:
        rows = torch.arange(len(pool))
        first, second = rows[: len(pool) - published], rows[len(pool) - published :]
    else:
        first, second = split_at_random(len(pool), request.validation, _generator(request.seed, 0))
    train = pool[first]
    mean, std = _statistics(train.inputs["image"]) if "image" in train.inputs else ((), ())
    return Data(request.name, train, pool[second], test, num_classes, tuple(metrics), mean, std, tuple(augment))


def _statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel in [0, 1], exactly, from its 256 counts."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in images.unbind(1):
        counts = sum(chunk.flatten().bincount(minlength=256) for chunk in channel.split(4096))
        weights = torch.as_tensor(counts, dtype=torch.float64) / channel.numel()
        mean = (weights * levels).sum()
        deviation = float((weights * (levels - mean).square()).sum().sqrt())
        means.append(float(mean))
        deviations.append(deviation or 1.0)  # a channel that is constant stays zero after centring
    return tuple(means), tuple(deviations)


def encoded(request: Request, parts: Sequence[Table], targets: Sequence[Tensor]) -> list[Split]:
    """Tokens of several tables, all padded to one length.

    Args:
        request: Which tokenizer, and how many tokens.
        parts: The tables; either all of pairs or none.
        targets: Of each.

    Returns:
        A split for each.
    """
    first = [sentence for part in parts for sentence in part.first]
    second = None if parts[0].second is None else [sentence for part in parts for sentence in part.second or ()]
    tokens = encode(first, second, tokenizer=request.tokenizer, max_length=request.max_length)
    pieces = {name: x.split([len(part) for part in parts]) for name, x in tokens.items()}
    return [Split({name: x[i] for name, x in pieces.items()}, y) for i, y in enumerate(targets)]
