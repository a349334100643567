"""What a recipe costs: passes, counted exactly from its configs, and hours, from a short timing on this device."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

import tiltsam
from tiltsam.lab.budget import passes_of
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.data import GLUE, Data, Split, find_task
from tiltsam.lab.devices import resolve_device, suited_to
from tiltsam.lab.models import build
from tiltsam.lab.recipes.settings import DISTILBERT, VIT

__all__ = [
    "EXAMPLES",
    "hours",
    "num_passes",
    "num_steps",
    "other_data",
    "passes_per_step",
    "seconds_per_pass",
    "training_examples",
]

EXAMPLES = {
    "cifar100": 50_000,
    "cifar100-noisy": 50_000,
    "tiny-imagenet": 100_000,
    "dtd": 1_880,
    "glue/cola": 8_551,
    "glue/sst2": 67_349,
    "glue/mrpc": 3_668,
    "glue/stsb": 5_749,
    "glue/qqp": 363_846,
    "glue/mnli": 392_702,
    "glue/qnli": 104_743,
    "glue/rte": 2_490,
    "glue/wnli": 635,
}
"""Training examples of each task as published, those held out for choosing among them (but for DTD, which publishes
them apart)."""

ENOUGH_SECONDS = 0.5  # a timed pass on a CPU is at least this long, or of the whole batch
LONG_SECONDS = 4.0  # after which it is not timed again
_CLASSES = {"cifar100": 100, "cifar100-noisy": 100, "tiny-imagenet": 200, "dtd": 47}
# Pretrained models: what makes one of the same shape, whose weights need not be here to be timed.
_SHAPES = {
    VIT: ("ViTConfig", "ViTForImageClassification"),
    DISTILBERT: ("DistilBertConfig", "DistilBertForSequenceClassification"),
}


def training_examples(config: TrainConfig) -> int:
    """Examples that a run of a published data set trains on."""
    published = EXAMPLES[config.task]
    if config.task == "dtd" or not config.validation:
        return published
    return published - max(1, round(config.validation * published))


def other_data(config: TrainConfig, sizes: Mapping[str, int]) -> str:
    """What tells a run's data from the published data set, in words; nothing if its size is the published one.

    Args:
        config: The run.
        sizes: Its numbers of ``classes`` and of training ``examples``.
    """
    published = {"classes": _CLASSES.get(config.task, sizes["classes"]), "examples": training_examples(config)}
    words = {"classes": "classes", "examples": "training examples"}
    found = [f"{sizes[k]:,} {words[k]} of {n:,}" for k, n in published.items() if sizes[k] != n]
    return f"not the paper's data: {', '.join(found)}" if found else ""


def num_steps(config: TrainConfig, examples: int) -> int:
    """Steps of a run whose budget is in epochs."""
    per_epoch = examples // min(config.batch_size, examples)
    # ESAM1 spends 2s passes for every step that it would have; its own steps cost two.
    epochs = config.epochs * (config.num_samples if config.method == "esam1" else 1)
    return math.ceil(epochs * per_epoch - 1e-9)


@lru_cache(256)
def passes_per_step(config: TrainConfig) -> float:
    """Forward+backward passes of a step, a forward pass alone being a third: taken with two weights, and counted."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = config.wrap(torch.optim.SGD([weight], lr=0.1))

    def closure() -> Tensor:
        loss = weight.square().sum()
        if loss.requires_grad:
            loss.backward()
        return loss

    costs = []
    for _ in range(config.every):  # all but one of these are plain steps
        optimizer.step([closure] * config.num_samples if config.splits() else closure)
        costs.append(passes_of(optimizer.info, config.ascent_fraction))
    return sum(costs) / len(costs)


def num_passes(config: TrainConfig, examples: int | None = None) -> float:
    """Forward+backward passes of a run.

    Args:
        config: The run; its budget is in epochs.
        examples: Examples that it trains on; by default what :func:`training_examples` says.

    Example:
        >>> from tiltsam.lab.recipes.settings import column_config
        >>> num_passes(column_config("cifar100-resnet18", "tsam"))  # 200 epochs of 703 steps of 2·5 passes
        1406000.0
    """
    return passes_per_step(config) * num_steps(config, training_examples(config) if examples is None else examples)


def hours(
    configs: Iterable[TrainConfig], device: str = "auto", tell: Callable[[str], None] = lambda line: None
) -> float:
    """How long runs take here, evaluation not counted; NaN where a model cannot be made.

    Args:
        configs: The runs.
        device: Where.
        tell: Told before a model is timed.
    """
    return sum(num_passes(config) * seconds_per_pass(config, device, tell) for config in configs) / 3600


def seconds_per_pass(
    config: TrainConfig, device: str = "auto", tell: Callable[[str], None] = lambda line: None
) -> float:
    """Seconds of one forward+backward pass and update of the config's model here, timed once a process.

    On a GPU a whole batch, as training takes it; on a CPU as much of one as takes half a second, scaled up. NaN if the
    model needs ``transformers``, and that is not installed.
    """
    where = resolve_device(device)
    key = (config.model, _input_size(config), config.batch_size, config.precision, str(where))
    if key not in _TIMES:
        tell(f"timing {config.model} with inputs of {_input_size(config)} on {where}")
        try:
            _TIMES[key] = _timed(config, where)
        except ImportError:
            _TIMES[key] = math.nan
    return _TIMES[key]


_TIMES: dict[tuple[Any, ...], float] = {}


def _timed(config: TrainConfig, device: torch.device) -> float:
    batch = config.batch_size if device.type == "cuda" else 2
    while True:
        seconds = _seconds_of_a_step(config, device, batch)
        if batch >= config.batch_size or seconds >= ENOUGH_SECONDS:
            return seconds * config.batch_size / batch
        batch = min(2 * batch, config.batch_size)


def _seconds_of_a_step(config: TrainConfig, device: torch.device, batch: int) -> float:
    data = _made_data(config, batch)
    model = _model(config.model, data).to(device)
    if device.type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    inputs = [x.to(device) for x in data.train.inputs.values()]
    inputs = [x.float() / 255 if x.dtype == torch.uint8 else x for x in inputs]
    targets = data.train.targets.to(device)

    def loss_of(*given: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            outputs = model(*given[:-1])
        if data.num_classes == 1:
            return nn.functional.mse_loss(outputs.float().squeeze(1), given[-1])
        return nn.functional.cross_entropy(outputs.float(), given[-1])

    base = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=config.momentum)
    step = tiltsam.capture(tiltsam.ERM(base, model=model), loss_of, (*inputs, targets))
    repeats = 10 if device.type == "cuda" else 1
    times: list[float] = []
    with suited_to(device, model):
        while len(times) < 3 and sum(times) * repeats < LONG_SECONDS:  # the first ones capture, or fill caches
            _wait(device)
            start = time.perf_counter()
            for _ in range(repeats):
                step(*inputs, targets)
            _wait(device)
            times.append((time.perf_counter() - start) / repeats)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _input_size(config: TrainConfig) -> str:
    if config.task.startswith("glue/"):
        return f"{config.max_length} tokens"
    return f"{config.image_size or find_task(config.task).image_size or 32} pixels"


def _made_data(config: TrainConfig, examples: int) -> Data:
    """Examples of the task's shape that show nothing."""
    random = torch.Generator().manual_seed(0)
    if config.task.startswith("glue/"):
        classes = len(GLUE[config.task.removeprefix("glue/")].classes) or 1
        tokens = torch.randint(1000, (examples, config.max_length), generator=random)
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    else:
        classes, size = _CLASSES[config.task], int(_input_size(config).split()[0])
        inputs = {"image": torch.randint(256, (examples, 3, size, size), generator=random, dtype=torch.uint8)}
    targets = torch.zeros(examples, dtype=torch.float32 if classes == 1 else torch.int64)
    split = Split(inputs, targets)
    return Data(config.task, split, split, split, classes)


def _model(name: str, data: Data) -> nn.Module:
    if name not in _SHAPES:
        return build(name, data)
    transformers = importlib.import_module("transformers")
    config, kind = (getattr(transformers, part) for part in _SHAPES[name])
    return _Logits(kind(config(num_labels=data.num_classes)))


class _Logits(nn.Module):
    """A model of ``transformers`` that gives its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        logits: Tensor = self.model(*inputs).logits
        return logits
