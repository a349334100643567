"""The loss and the metrics of a task, the evaluation of a model, and BatchNorm statistics for it.

Outputs are logits (n, classes) for a classification, and values (n, 1) for a regression, a task with one class.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tiltsam.lab.data.dataset import Data, Split
from tiltsam.optim import WeightAverage
from tiltsam.space.model_state import restored_buffers
from tiltsam.tilting import ExampleTilt

__all__ = [
    "METRICS",
    "SilencedExamples",
    "class_accuracies",
    "evaluate",
    "evaluated_weights",
    "few_shot_accuracy",
    "prior_shift",
    "reestimate_batchnorm",
    "silenced_examples",
    "silenced_scores",
    "split_outputs",
    "suspects_table",
    "task_loss",
]

EVAL_BATCH = 512
BATCHNORM_BATCHES = 40  # enough for BatchNorm's statistics to settle, far less than an epoch of CIFAR
CALIBRATION_BINS = 15  # as in Guo et al.

OutputsOf = Callable[[Split], Tensor]
LossFunction = Callable[..., Tensor]
"""``loss_fn(outputs, targets, tilt=tilt)``: :func:`task_loss` with the settings of a run."""


def task_loss(
    outputs: Tensor,
    targets: Tensor,
    num_classes: int,
    label_smoothing: float = 0.0,
    tilt: ExampleTilt | None = None,
    *,
    gce_q: float | None = None,
    logit_shift: Tensor | None = None,
) -> Tensor:
    """Return the mean squared error of a regression, otherwise the cross-entropy or the loss that replaces it.

    Args:
        outputs: The model's outputs, (n, classes).
        targets: The targets, (n,).
        num_classes: The classes of the task; 1 for a regression.
        label_smoothing: The fraction of the target spread over all classes.
        tilt: Replaces the mean over the examples; its groups are the classes.
        gce_q: Use the generalized cross-entropy (1 - p^q) / q of the probability p of the label (Zhang and Sabuncu
            2018): the cross-entropy as q goes to 0, 1 - p at q = 1. Needs ``label_smoothing=0``.
        logit_shift: Added to the logits of each class, as in :func:`prior_shift`.
    """
    reduction = "mean" if tilt is None else "none"
    if num_classes == 1:
        loss = nn.functional.mse_loss(outputs.squeeze(1), targets, reduction=reduction)
        return loss if tilt is None else tilt(loss)
    if logit_shift is not None:
        outputs = outputs + logit_shift
    if gce_q is None:
        loss = nn.functional.cross_entropy(outputs, targets, label_smoothing=label_smoothing, reduction=reduction)
    else:
        log_p = -nn.functional.cross_entropy(outputs, targets, reduction="none")
        losses = -torch.expm1(gce_q * log_p) / gce_q
        loss = losses.mean() if tilt is None else losses
    return loss if tilt is None else tilt(loss, None if tilt.num_groups is None else targets)


def prior_shift(targets: Tensor, num_classes: int, tau: float) -> Tensor:
    """Return ``tau log pi_y`` of each class: what logit adjustment adds to the logits in training.

    Menon et al. 2021, "Long-tail learning via logit adjustment". ``pi_y`` is the frequency of class y among the
    training labels. A model trained with shifted logits and tested without the shift minimises the balanced error.

    Args:
        targets: Classes of the training examples.
        num_classes: Number of classes; one without examples is counted as if it had one.
        tau: Strength; 1 is consistent for the balanced error, 0 the plain cross-entropy.
    """
    counts = targets.bincount(minlength=num_classes).clamp_min(1).float()
    return tau * (counts / counts.sum()).log()


def evaluated_weights(model: nn.Module, average: WeightAverage | None) -> AbstractContextManager[object]:
    """Return a context in which the model has its averaged weights, if any; changes to its buffers are undone."""
    return restored_buffers(model) if average is None else average.applied()


@torch.no_grad()
def evaluate(outputs_of: OutputsOf, data: Data, split: Split) -> dict[str, float]:
    """Return the task's metrics and its loss, without label smoothing, on all examples of a split.

    For a classification also ``ece``, ``worst_class_accuracy`` and ``balanced_accuracy``, which are never the score.

    Args:
        outputs_of: Returns the model's outputs for some examples, in eval mode.
        data: The task.
        split: The examples; the result is empty if there are none.
    """
    if not len(split):
        return {}
    outputs, targets = split_outputs(outputs_of, split), split.targets
    metrics = {name: METRICS[name](outputs, targets) for name in data.metrics}
    metrics["loss"] = task_loss(outputs, targets, data.num_classes).item()
    if data.num_classes > 1:
        accuracies = class_accuracies(outputs, targets)
        metrics["ece"] = calibration_error(outputs, targets)
        metrics["worst_class_accuracy"] = accuracies[~accuracies.isnan()].min().item()
        metrics["balanced_accuracy"] = accuracies.nanmean().item()
    return metrics


@torch.no_grad()
def split_outputs(outputs_of: OutputsOf, split: Split) -> Tensor:
    """Return the model's outputs for all examples of a split."""
    return torch.cat([outputs_of(split[i : i + EVAL_BATCH]) for i in range(0, len(split), EVAL_BATCH)])


@dataclass(frozen=True)
class SilencedExamples:
    """The training examples that a tilt silences, the largest cross-entropy of the label first."""

    indices: Tensor
    """Their indices in the training split, (m,) int64."""
    predicted: Tensor
    """The class that the model predicts, (m,) int64."""
    losses: Tensor
    """The cross-entropy of the label, (m,)."""


@torch.no_grad()
def silenced_examples(
    outputs_of: OutputsOf, data: Data, tilt: ExampleTilt, batch_size: int, loss_fn: LossFunction
) -> SilencedExamples:
    """Return the training examples of a classification that a tilt silences.

    An example is silenced if its weight is below half of the mean weight of its batch. The batches are the same in
    every call; the last one may be smaller.

    Args:
        outputs_of: Returns the model's outputs for some examples, in eval mode.
        data: The task.
        tilt: The tilt over the examples of a batch, for one process.
        batch_size: Examples in a batch.
        loss_fn: The training loss of outputs and targets, which passes the losses of the examples to the tilt.
    """
    found = []
    for rows in data.train.fixed_permutation().split(batch_size):
        part = data.train[rows]
        outputs = outputs_of(part)
        loss_fn(outputs, part.targets, tilt=tilt)
        assert tilt.weights is not None
        silenced = tilt.weights < 0.5 * tilt.weights.mean()
        losses = nn.functional.cross_entropy(outputs, part.targets, reduction="none")
        found.append((rows[silenced], outputs.argmax(1)[silenced], losses[silenced]))
    indices, predicted, losses = (torch.cat(x) for x in zip(*found, strict=True))
    order = losses.argsort(descending=True, stable=True)
    return SilencedExamples(indices[order], predicted[order], losses[order])


def silenced_scores(silenced: SilencedExamples, mislabelled: Tensor) -> dict[str, float]:
    """Return the precision and the recall of the silenced examples as a detector of mislabelled ones.

    Args:
        silenced: The examples that a tilt silences.
        mislabelled: Which training examples are mislabelled, (n,) bool.

    Returns:
        ``silenced_precision``, the fraction of the silenced examples that are mislabelled, left out if none is
        silenced; and ``silenced_recall``, the fraction of the mislabelled examples that are silenced. Empty if none is
        mislabelled.
    """
    both, wrong = mislabelled[silenced.indices].sum().item(), mislabelled.sum().item()
    if not wrong:
        return {}
    chosen = len(silenced.indices)
    return ({"silenced_precision": both / chosen} if chosen else {}) | {"silenced_recall": both / wrong}


def suspects_table(silenced: SilencedExamples, data: Data) -> list[list[str]]:
    """Return the cells of ``suspects.csv``, headings first; the index is the row in the data that were read."""
    indices = silenced.indices.cpu()
    rows = indices if data.rows is None else data.rows[indices]
    labels, predicted = (
        [data.class_names[k] if data.class_names else str(k) for k in classes.tolist()]
        for classes in (data.train.targets.cpu()[indices], silenced.predicted)
    )
    table = [["index", *(["example"] if data.sources else []), "label", "predicted", "loss"]]
    for row, label, other, loss in zip(rows.tolist(), labels, predicted, silenced.losses.tolist(), strict=True):
        table.append([str(row), *([data.sources[row]] if data.sources else []), label, other, f"{loss:.4f}"])
    return table


@torch.no_grad()
def reestimate_batchnorm(model: nn.Module, outputs_of: OutputsOf, split: Split) -> None:
    """Set BatchNorm's statistics to their average over batches without augmentation, at the current weights.

    The batches are the same in every call, and are drawn at random, because a data set may be sorted by class.
    :func:`torch.optim.swa_utils.update_bn` only takes models with one input, and runs over a whole loader.

    Args:
        model: The model; nothing is done if it has no BatchNorm layer.
        outputs_of: Runs the model on some examples.
        split: The training examples.
    """
    layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not layers:
        return
    momenta = [m.momentum for m in layers]
    for m in layers:
        m.reset_running_stats()
        m.momentum = None  # a plain average
    model.eval()  # dropout would draw from the random state that training continues from
    for m in layers:
        m.train()
    size = min(EVAL_BATCH, len(split))
    order = split.fixed_permutation()
    for k in range(min(BATCHNORM_BATCHES, len(split) // size)):
        outputs_of(split[order[k * size : (k + 1) * size]])
    for m, momentum in zip(layers, momenta, strict=True):
        m.momentum = momentum


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Return the fraction of examples whose largest logit is that of their class."""
    return (outputs.argmax(1) == targets).double().mean().item()


def f1(outputs: Tensor, targets: Tensor) -> float:
    """Return the F1 score of class 1 of two; 0 if it is neither predicted nor present."""
    from sklearn.metrics import f1_score

    return float(f1_score(targets.cpu().numpy(), outputs.argmax(1).cpu().numpy(), zero_division=0))


def matthews(outputs: Tensor, targets: Tensor) -> float:
    """Return the Matthews correlation of predicted and true classes; 0 if either is constant."""
    from sklearn.metrics import matthews_corrcoef

    predicted = outputs.argmax(1).cpu()
    if (predicted == predicted[0]).all() or (targets == targets[0]).all():  # scikit-learn: 0, or a warning
        return 0.0
    return float(matthews_corrcoef(targets.cpu().numpy(), predicted.numpy()))


def pearson(outputs: Tensor, targets: Tensor) -> float:
    """Return the linear correlation of outputs and targets; 0 if either is constant."""
    from scipy.stats import pearsonr

    return _correlation(pearsonr, outputs, targets)


def spearman(outputs: Tensor, targets: Tensor) -> float:
    """Return the rank correlation of outputs and targets; 0 if either is constant."""
    from scipy.stats import spearmanr

    return _correlation(spearmanr, outputs, targets)


def calibration_error(outputs: Tensor, targets: Tensor) -> float:
    """Return the expected calibration error of Guo et al. 2017, "On calibration of modern neural networks".

    The examples are divided into 15 bins of equal width by their confidence, the probability of the predicted class:

    .. code-block:: text

        ECE = sum_b (n_b / n) |accuracy of bin b - mean confidence of bin b|

    Note:
        It is biased upwards, most where a bin has few examples.
    """
    correct = outputs.argmax(1) == targets
    confidence = outputs.softmax(1).amax(1).double()
    inner_edges = torch.arange(1, CALIBRATION_BINS, device=outputs.device) / CALIBRATION_BINS
    bins = nn.functional.one_hot(torch.bucketize(confidence, inner_edges), CALIBRATION_BINS)
    gaps = (bins * (correct.double() - confidence)[:, None]).sum(0)  # n_b times the gap of each bin
    return gaps.abs().sum().item() / len(targets)


def class_accuracies(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the accuracy on the examples of each class, float64; NaN for a class without examples."""
    correct = outputs.argmax(1) == targets
    counts, hits = (x.bincount(minlength=outputs.shape[1]).double() for x in (targets, targets[correct]))
    return hits / counts


def few_shot_accuracy(accuracies: Tensor, targets: Tensor) -> float:
    """Return the mean accuracy of the third of the classes with the fewest training examples.

    Args:
        accuracies: Test accuracy of each class; a class with NaN does not count.
        targets: Classes of the training examples.
    """
    rarest = targets.bincount(minlength=len(accuracies)).argsort(stable=True)
    return accuracies[rarest[: max(1, len(rarest) // 3)]].nanmean().item()


METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}
"""Metrics by name. Each takes the outputs and the targets of a whole split."""


def _correlation(correlate: Callable[..., tuple[float, float]], outputs: Tensor, targets: Tensor) -> float:
    x = outputs.flatten()
    if (x == x[0]).all() or (targets == targets[0]).all():
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nearly constant outputs, as of a model at its start
        return float(correlate(x.double().cpu().numpy(), targets.double().cpu().numpy())[0])
