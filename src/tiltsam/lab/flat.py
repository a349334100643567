"""How flat are trained runs? The measurements of flatness, on records of the lab."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tiltsam.flatness.comparison import Flatness, Plan, compare
from tiltsam.lab.augment import normalise
from tiltsam.lab.config import ConfigError
from tiltsam.lab.data import Data
from tiltsam.lab.record import Record, RecordError
from tiltsam.lab.train import load_data, load_model, resolve_device

__all__ = ["find_runs", "measure_runs"]


def find_runs(paths: Sequence[Path]) -> dict[str, Record]:
    """Runs by a name that tells them apart: the folders given, or all below them.

    Raises:
        RecordError: If a folder holds no run.
    """
    found: dict[str, Record] = {}
    for path in paths:
        places = [path] if (path / "config.json").exists() else sorted(p.parent for p in path.rglob("config.json"))
        if not places:
            raise RecordError(f"no run in {path}: a run is a folder with config.json, as tiltsam train writes it")
        for place in places:
            config = Record(place).config()
            name = f"{config.method} seed {config.seed}"
            while name in found:
                name += "'"
            found[name] = Record(place)
    return found


def measure_runs(
    runs: dict[str, Record],
    *,
    task: str | None = None,
    split: Literal["train", "test"] = "train",
    examples: int = 1000,
    batch_size: int = 250,
    device: str = "auto",
    root: Path | None = None,
    plan: Plan | None = None,
    progress: Callable[[str], Any] | None = None,
) -> list[Flatness]:
    """Measure every run's model on the same examples of one task.

    Args:
        runs: What :func:`find_runs` found.
        task: The task; by default the runs' own, which must be one.
        split: Which examples; the labels are those that were trained on.
        examples: How many of them, the first ones of the split.
        batch_size: Examples at a time.
        device: Where.
        root: Where data sets lie.
        plan: What to measure.
        progress: ``progress("what is measured")`` gives a callback.
    """
    configs = [record.config() for record in runs.values()]
    tasks = {config.task for config in configs} if task is None else {task}
    if len(tasks) > 1:
        raise ConfigError(f"the runs are of several tasks ({', '.join(sorted(tasks))}): choose one with --task")
    # One data set for all: the split and the label noise follow the first run's seed.
    data = load_data(replace(configs[0], task=tasks.pop()), root)
    where = resolve_device(device)
    models = {name: load_model(record, data).to(where) for name, record in runs.items()}
    batches = _batches(data, split, examples, batch_size, where)
    return compare(models, _loss_fn(data), batches, plan, progress=progress)


def _batches(data: Data, split: str, examples: int, batch_size: int, device: torch.device) -> list[Any]:
    part = (data.train if split == "train" else data.test)[slice(0, examples)].to(device)
    inputs = dict(part.inputs)
    if "image" in inputs:
        inputs["image"] = normalise(inputs["image"], data.mean, data.std)
    rows = [slice(i, i + batch_size) for i in range(0, len(part), batch_size)]
    return [(tuple(x[r] for x in inputs.values()), part.targets[r]) for r in rows]


def _loss_fn(data: Data) -> Callable[[nn.Module, Any], Tensor]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        outputs = model(*inputs).float()
        if data.num_classes == 1:
            return nn.functional.mse_loss(outputs.squeeze(1), targets)
        return nn.functional.cross_entropy(outputs, targets)

    return loss


class Bars:
    """A bar for each measurement on a terminal, a line elsewhere."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._live = sys.stderr.isatty()

    def __enter__(self) -> Bars:
        if self._live:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, what: str) -> Callable[[int, int], None] | None:
        """The callback for one measurement."""
        if self._bar is None:
            print(f"measuring {what}", file=sys.stderr, flush=True)
            return None
        task = self._bar.add_task(what, total=None)
        return lambda done, total: self._bar.update(task, completed=done, total=total, visible=done < total)
