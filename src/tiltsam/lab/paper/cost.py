"""The cost of a recipe: training passes, exactly, and hours, from a short timing of each model on this device."""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn

import tiltsam
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.console import print_table
from tiltsam.lab.data import find_task
from tiltsam.lab.devices import resolve_device, torch_settings
from tiltsam.lab.flatness import PAPER_STDS
from tiltsam.lab.models import MODELS
from tiltsam.lab.paper.reproduce import ReproductionPlan
from tiltsam.lab.paper.settings import COLUMNS, DISTILBERT, VIT, training_examples
from tiltsam.lab.schedules import passes_per_step

__all__ = ["measuring_passes", "num_passes", "num_steps", "print_costs", "seconds_per_pass"]

CPU_EXAMPLES = 4  # a whole batch of images takes a minute on some CPUs
# Pretrained models are timed with random weights of the same shape, so that nothing is downloaded.
_PRETRAINED = {
    VIT: ("ViTConfig", "ViTForImageClassification"),
    DISTILBERT: ("DistilBertConfig", "DistilBertForSequenceClassification"),
}


def num_steps(config: TrainConfig, examples: int) -> int:
    """Return the steps of a run whose budget is in epochs, on so many training examples."""
    per_epoch = examples // min(config.batch_size, examples)
    return math.ceil(config.epochs * per_epoch - 1e-9)


def num_passes(config: TrainConfig, examples: int | None = None) -> float:
    """Return the forward+backward passes of a run; a forward pass alone counts a third.

    Args:
        config: The run; its budget is in epochs.
        examples: Training examples; by default those of the published data set.

    Example:
        >>> from tiltsam.lab.paper.settings import column_config
        >>> num_passes(column_config("cifar100-resnet18", "tsam"))  # 200 epochs of 703 steps of 2·5 passes
        1406000.0
    """
    return passes_per_step(config) * num_steps(config, training_examples(config) if examples is None else examples)


def measuring_passes(plan: ReproductionPlan, config: TrainConfig) -> float:
    """Return about how many passes it takes to measure one trained run, on batches of training's size."""
    batches = plan.num_examples / config.batch_size
    if plan.recipe.kind == "neighborhood":
        return (len(PAPER_STDS) * plan.num_draws + 1) * batches / 3
    if plan.recipe.kind == "eigenvalues":
        return 50 * 2 * batches  # about ten Hessian-vector products of two passes per eigenvalue
    if plan.recipe.kind == "losses":
        # ERM takes a forward pass (1/3), SAM and each of TSAM's samples an ascent and a forward pass (4/3). CIFAR's
        # test set is a fifth of its training set.
        s = COLUMNS["cifar100-resnet18"].num_samples
        return (1 / 3 + (1 + s) * 4 / 3) * 1.2 * training_examples(config) / config.batch_size
    return 0.0


def seconds_per_pass(config: TrainConfig, device: str = "auto") -> float:
    """Return the seconds of a forward+backward pass and an update of a config's model, timed once per process.

    On a GPU a whole batch is timed, captured as in training; on a CPU a few examples, scaled to a batch. NaN if the
    model needs ``transformers`` and it is not installed.
    """
    shape: tuple[int, ...] = (config.max_length,)
    if not config.task.startswith("glue/"):
        pixels = config.image_size or find_task(config.task).image_size or 32
        shape = (3, pixels, pixels)
    return _time_pass(config.model, shape, config.batch_size, config.precision, resolve_device(device))


@lru_cache
def _time_pass(name: str, shape: tuple[int, ...], batch_size: int, precision: str, device: torch.device) -> float:
    print(f"timing {name} with inputs of {'×'.join(map(str, shape))} on {device}", file=sys.stderr, flush=True)
    try:
        model = _build(name, shape).to(device)
    except ImportError:
        return math.nan
    on_gpu = device.type == "cuda"
    if on_gpu:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    batch, repeats = (batch_size, 10) if on_gpu else (min(batch_size, CPU_EXAMPLES), 1)
    random = torch.Generator().manual_seed(0)
    images = len(shape) == 3
    inputs = torch.rand(batch, *shape, generator=random) if images else torch.randint(1000, (batch, *shape))
    inputs, targets = inputs.to(device), torch.zeros(batch, dtype=torch.int64, device=device)

    def loss_fn(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            outputs = model(inputs)
        logits: Tensor = getattr(outputs, "logits", outputs)
        return nn.functional.cross_entropy(logits.float(), targets)

    base = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    step = tiltsam.capture(tiltsam.ERM(base, model=model), loss_fn, (inputs, targets))
    times = []
    with torch_settings(device, model):
        for _ in range(3 if on_gpu else 2):  # the first round captures, or fills caches
            start = time.perf_counter()
            for _ in range(repeats):
                loss = step(inputs, targets)
            loss.item()  # wait for the device
            times.append((time.perf_counter() - start) / repeats)
    return min(times) * batch_size / batch


def _build(name: str, shape: tuple[int, ...]) -> nn.Module:
    if name not in _PRETRAINED:
        return MODELS[name](100, image_size=shape[-1])
    transformers = importlib.import_module("transformers")
    config, model_class = (getattr(transformers, part) for part in _PRETRAINED[name])
    model: nn.Module = model_class(config())
    return model


def print_costs(plans: Sequence[ReproductionPlan]) -> None:
    """Print what each recipe shows, then the runs, passes and hours of the recipes and their columns."""
    width = max(len(plan.recipe.name) for plan in plans)
    for plan in plans:
        print(f"{plan.recipe.name:{width}}  {plan.recipe.description[0]} ({plan.recipe.source})")
    rows = [["name", "runs", "training passes", "measuring passes, about", "hours"]]
    for plan in plans:
        rows.append([plan.recipe.name, *_costs(plan)])
        if len(plan.recipe.columns) > 1:
            for column in plan.recipe.columns:
                part = replace(plan, recipe=plan.recipe.select(columns=[column]))
                rows.append([f"  {part.recipe.name}", *_costs(part)])
    first = plans[0]
    print_table(f"seeds {first.seeds}, scale {first.scale:g}, {first.precision}", rows)
    print(
        "\nA pass is a forward and a backward pass over a batch. Training passes are exact. Hours are estimated for "
        f"{resolve_device(first.device)} from a short timing of each model, without evaluation. Recipes share runs: a "
        "finished run is not trained again."
    )
    if any(row[-1] == "?" for row in rows):
        print("?: timing this model needs transformers: pip install '.[text]'")


def _costs(plan: ReproductionPlan) -> list[str]:
    """Return the runs, training passes, measuring passes and hours of a plan."""
    configs = list(dict.fromkeys(config for cell in plan.recipe.cells for config in plan.configs(cell)))
    training = [num_passes(config) for config in configs]
    measuring = [measuring_passes(plan, config) for config in configs]
    hours = math.fsum(
        (train + measure) * seconds_per_pass(config, plan.device) / 3600
        for config, train, measure in zip(configs, training, measuring, strict=True)
    )
    return [
        str(len(configs)),
        f"{math.fsum(training):,.0f}",
        f"{math.fsum(measuring):,.0f}" if plan.recipe.measured else "",
        "?" if math.isnan(hours) else f"{hours:.3g}" if hours < 1000 else f"{hours:,.0f}",
    ]
