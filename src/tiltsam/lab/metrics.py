"""What counts on each task, in torch alone, so that outputs need not leave the device.

Outputs are logits (n, classes) for classes, and (n,) or (n, 1) values for a regression. Each metric is a scalar tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["METRICS", "accuracy", "f1", "matthews", "pearson", "spearman"]


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of examples whose largest logit is that of their class."""
    return (_classes(outputs, targets) == targets).double().mean()


def f1(outputs: Tensor, targets: Tensor) -> Tensor:
    """Harmonic mean of precision and recall of class 1 of two: 2TP / (2TP + FP + FN); zero where that is 0/0."""
    if outputs.shape[1] != 2:
        raise ValueError(f"f1 is of two classes, got logits of shape {tuple(outputs.shape)}")
    chosen, true = _classes(outputs, targets) == 1, targets == 1
    hits, total = (chosen & true).sum().double(), (chosen.sum() + true.sum()).double()
    return 2 * hits / total.clamp(min=1)


def matthews(outputs: Tensor, targets: Tensor) -> Tensor:
    """Matthews correlation of chosen and true classes, for any number of them (Gorodkin 2004).

    Zero where either side is constant: there is nothing to correlate.
    """
    classes, chosen = outputs.shape[1], _classes(outputs, targets)
    a = torch.nn.functional.one_hot(chosen, classes).double()
    b = torch.nn.functional.one_hot(targets, classes).double()
    a, b = a - a.mean(0), b - b.mean(0)
    return _ratio((a * b).sum(), ((a * a).sum() * (b * b).sum()).sqrt())


def pearson(outputs: Tensor, targets: Tensor) -> Tensor:
    """Linear correlation of outputs and targets; zero where either is constant."""
    return _correlation(*_values(outputs, targets))


def spearman(outputs: Tensor, targets: Tensor) -> Tensor:
    """Correlation of ranks, equal values sharing the mean of theirs; zero where either side is constant."""
    x, y = _values(outputs, targets)
    return _correlation(_ranks(x), _ranks(y))


METRICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}
"""By name: each takes outputs and targets of a whole split."""


def _classes(outputs: Tensor, targets: Tensor) -> Tensor:
    """The class of the largest logit."""
    if outputs.dim() != 2 or targets.dim() != 1 or len(outputs) != len(targets) or not len(targets):
        raise ValueError(
            f"logits are (n, classes) and targets (n,), n > 0; got {tuple(outputs.shape)} and {tuple(targets.shape)}"
        )
    return outputs.argmax(1)


def _values(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Both as float64 vectors."""
    x = outputs.squeeze(1) if outputs.dim() == 2 and outputs.shape[1] == 1 else outputs
    if x.dim() != 1 or x.shape != targets.shape or not len(targets):
        raise ValueError(
            f"values are (n,) or (n, 1) and targets (n,), n > 0; got {tuple(outputs.shape)} and {tuple(targets.shape)}"
        )
    return x.double(), targets.double()


def _correlation(x: Tensor, y: Tensor) -> Tensor:
    x, y = _centred(x), _centred(y)
    return _ratio((x * y).sum(), x.norm() * y.norm())


def _centred(x: Tensor) -> Tensor:
    """Minus the mean; exactly zero where all values are equal, which a rounded mean would not give."""
    return torch.where((x == x[0]).all(), torch.zeros_like(x), x - x.mean())


def _ratio(covariance: Tensor, deviation: Tensor) -> Tensor:
    """Covariance over deviation, 0 where nothing varies; NaN stays NaN."""
    return torch.where(deviation == 0, torch.zeros_like(covariance), covariance / deviation).clamp(-1, 1)


def _ranks(x: Tensor) -> Tensor:
    """1…n, ties sharing their mean: the last rank of a run of equals less half of (its length - 1)."""
    _, inverse, counts = x.unique(sorted=True, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0).double() - (counts.double() - 1) / 2)[inverse]
    return torch.where(x.isnan().any(), torch.full_like(ranks, torch.nan), ranks)  # NaN has no rank
