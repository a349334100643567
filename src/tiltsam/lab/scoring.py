"""A model's scores on a split, and BatchNorm's statistics for the weights that are scored."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from tiltsam.averaging import WeightAverage
from tiltsam.lab.data.dataset import Data, Split
from tiltsam.lab.metrics import METRICS
from tiltsam.space.model_state import restored_buffers

__all__ = ["as_tested", "reestimate_batchnorm", "score"]

EVAL_BATCH = 512
BATCHNORM_BATCHES = 40  # enough for BatchNorm's statistics to settle, far less than an epoch of CIFAR

Outputs = Callable[[Split], Tensor]


def as_tested(model: nn.Module, average: WeightAverage | None) -> AbstractContextManager[object]:
    """The model with its averaged weights, if it has some; whatever is done to its buffers is undone afterwards."""
    return restored_buffers(model) if average is None else average.applied()


@torch.no_grad()
def score(outputs_of: Outputs, data: Data, split: Split) -> dict[str, float]:
    """The task's metrics and the loss, without label smoothing, on all examples of a split.

    Args:
        outputs_of: The model's outputs for some examples; it is in eval mode.
        data: The task.
        split: Which examples; nothing comes out for none.
    """
    if not len(split):
        return {}
    outputs = torch.cat([outputs_of(split[i : i + EVAL_BATCH]) for i in range(0, len(split), EVAL_BATCH)])
    found = {name: METRICS[name](outputs, split.targets).item() for name in data.metrics}
    if data.num_classes == 1:
        return {**found, "loss": nn.functional.mse_loss(outputs.squeeze(1), split.targets).item()}
    return {**found, "loss": nn.functional.cross_entropy(outputs, split.targets).item()}


@torch.no_grad()
def reestimate_batchnorm(model: nn.Module, outputs_of: Outputs, split: Split) -> None:
    """BatchNorm's statistics anew: the average over batches, without augmentation, at the weights themselves.

    Batches are drawn from all of the examples, always the same ones: those of a class may lie one after the other.

    Args:
        model: Its BatchNorm layers get the statistics; nothing is done where there are none.
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
    model.train()
    size = min(EVAL_BATCH, len(split))
    order = split.fixed_permutation()
    for k in range(min(BATCHNORM_BATCHES, len(split) // size)):
        outputs_of(split[order[k * size : (k + 1) * size]])
    for m, momentum in zip(layers, momenta, strict=True):
        m.momentum = momentum
