"""How flat are trained runs? The measurements of flatness, on records of the lab.

RUN/flatness.json       what was measured, on which examples; ``tiltsam report`` reads it
"""

from __future__ import annotations

import json
import math
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tiltsam.flatness.loss_surface import ProgressCallback
from tiltsam.flatness.objectives import CrossEntry, CrossTable, Objective, cross_objectives
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.data import Data, data_key, data_loader
from tiltsam.lab.data.loader import normalise
from tiltsam.lab.devices import resolve_device, torch_settings
from tiltsam.lab.errors import ConfigError, RecordError
from tiltsam.lab.evaluate import task_loss
from tiltsam.lab.files import drafted
from tiltsam.lab.flatness import Flatness, FlatnessPlan, measure
from tiltsam.lab.models import load_model
from tiltsam.lab.records import Record
from tiltsam.lab.report.runs import RunRecord
from tiltsam.lab.report.summary import summarize
from tiltsam.lab.run_folders import find_run_folders

__all__ = ["cross_runs", "find_runs", "measure_runs", "save_flatness"]


# What a single run may be the cause of: it is unfinished, damaged, of another task's shape, too sharp for its dtype.
_UNFIT = (RecordError, ConfigError, ValueError, RuntimeError, OSError)


def find_runs(paths: Sequence[Path], *, left_out: Callable[[str], Any] | None = None) -> dict[str, Record]:
    """Runs by a name that tells them apart, such as ``sam rho=0.2 seed 0``: the folders given, or all below them.

    Args:
        paths: The folders.
        left_out: Told of each run that is damaged; without it such a run raises.

    Raises:
        RecordError: If a folder holds no run.
    """
    runs = []
    for place in find_run_folders(paths):
        try:
            config = Record(place).config()
        except _UNFIT as error:
            if left_out is None:
                raise
            left_out(_why(place, error))
        else:
            runs.append(RunRecord(place, asdict(config)))
    settings = [setting for task in summarize(runs) for setting in task.settings]
    named = [(f"{setting.name} seed {run.seed}", run.folder) for setting in settings for run in setting.runs]
    times = Counter(name for name, _ in named)  # of one config and seed there may be several records
    return {name if times[name] == 1 else f"{name} in {place}": Record(place) for name, place in named}


def measure_runs(
    runs: dict[str, Record],
    *,
    task: str | None = None,
    split: Literal["train", "test"] = "train",
    examples: int = 1000,
    batch_size: int = 250,
    device: str = "auto",
    root: Path | None = None,
    data: Callable[[TrainConfig], Data] | None = None,
    plan: FlatnessPlan | None = None,
    progress: Callable[[str], Any] | None = None,
    left_out: Callable[[str], Any] | None = None,
) -> Iterator[tuple[Flatness, dict[str, Any]]]:
    """Measure every run's model on examples of one task, with the labels that it was trained on, one after the other.

    Runs of one seed are measured on the same examples. Another seed means another validation split and, on a noisy
    task, other wrong labels, so its runs are measured on theirs.

    Args:
        runs: What :func:`find_runs` found.
        task: The task; by default the runs' own, which must be one.
        split: Which examples.
        examples: How many of them, drawn at random from the split, always the same ones.
        batch_size: Examples at a time.
        device: Where.
        root: Folder of the data sets.
        data: Returns the data of a config; by default it is loaded from ``root``.
        plan: What to measure.
        progress: ``progress("what is measured")`` gives a callback.
        left_out: Told of each run that cannot be measured, and why; without it such a run raises.

    Yields:
        What was measured of a run, under its name, and on what: what :func:`save_flatness` takes. Runs of one seed come
        together. One that has not finished is measured at its newest checkpoint, with a warning and ``finished`` false.
    """
    plan = FlatnessPlan() if plan is None else plan
    settings: dict[str, Any] = {"num_samples": plan.num_samples, "t": plan.t}
    if plan.num_ascent_steps:
        settings |= {"rho": plan.rho, "adaptive_rho": plan.adaptive_rho}
    for loaded, names, where in _by_data(runs, task, device, data or data_loader(root)):
        batches = _batches(loaded, split, examples, batch_size, where)
        measured_on = sum(len(targets) for _, targets in batches)
        for name in names:
            finished = (runs[name].folder / "model.safetensors").exists()
            try:
                model = load_model(runs[name], loaded).to(where)
                if not finished:
                    warnings.warn(f"{name}: training has not finished: the newest checkpoint is measured", stacklevel=2)
                with torch_settings(where, model):
                    flat = measure(name, model, _loss_fn(loaded), batches, plan, progress=progress)
            except _UNFIT as error:
                if left_out is None:
                    raise
                left_out(_why(runs[name].folder, error))
            else:
                about = {"task": loaded.name, "split": split, "examples": measured_on, **settings}
                yield flat, about if finished else about | {"finished": False}


def cross_runs(
    runs: dict[str, Record],
    objectives: Mapping[str, Objective],
    *,
    batch_size: int = 64,
    device: str = "auto",
    root: Path | None = None,
    data: Callable[[TrainConfig], Data] | None = None,
    progress: ProgressCallback | None = None,
) -> CrossTable:
    """The losses of every run's model under several objectives, on all training and all test examples of its task.

    Args:
        runs: Runs of one task, by name.
        objectives: By name; see :func:`tiltsam.sharpness.cross_objectives`.
        batch_size: Examples that an objective looks for its worst case on; that of training.
        device: Where.
        root: Folder of the data sets.
        data: Returns the data of a config; by default it is loaded from ``root``.
        progress: Called as ``progress(done, total)``.
    """
    entries: list[CrossEntry] = []
    for loaded, names, where in _by_data(runs, None, device, data or data_loader(root)):
        models = {name: load_model(runs[name], loaded).to(where) for name in names}
        splits = {
            split: _batches(loaded, split, len(getattr(loaded, split)), batch_size, where)
            for split in ("train", "test")
        }
        with torch_settings(where, max(models.values(), key=lambda m: sum(p.numel() for p in m.parameters()))):
            entries += cross_objectives(models, _loss_fn(loaded), splits, objectives, progress=progress).entries
    return CrossTable(tuple(entries))


def _by_data(
    runs: dict[str, Record], task: str | None, device: str, load: Callable[[TrainConfig], Data]
) -> Iterator[tuple[Data, list[str], torch.device]]:
    """The runs that share a data set, one set after the other: the data, their names, and the device."""
    if not runs:
        return
    configs = {name: record.config() for name, record in runs.items()}
    tasks = {config.task for config in configs.values()} if task is None else {task}
    if len(tasks) > 1:
        raise ConfigError(f"the runs are of several tasks ({', '.join(sorted(tasks))}): choose one with --task")
    (task,) = tasks
    where = resolve_device(device)
    groups: dict[TrainConfig, list[str]] = {}
    for name, config in configs.items():
        groups.setdefault(data_key(replace(config, task=task)), []).append(name)
    for key, names in groups.items():
        yield load(key), names, where


def _why(place: Path, error: Exception) -> str:
    """Why a run cannot be measured, in one line that names it."""
    what = str(error) if isinstance(error, RecordError) else f"{place}: {error}"
    return textwrap.shorten(what, 300)


def save_flatness(record: Record, flat: Flatness, about: dict[str, Any]) -> Path:
    """Write a run's measurements into its folder as ``flatness.json``, in place of older ones.

    Args:
        record: The run.
        flat: What was measured of it.
        about: What it was measured on, and how: models measured on different examples cannot be compared.
    """
    around, pairs, density, plane = flat.neighborhood, flat.eigenpairs, flat.density, flat.plane
    statistics = ("mean", "variance", "tilted_mean", "tilted_variance")
    columns = ("std", *statistics, *(f"{name}_error" for name in statistics))
    content: dict[str, Any] = {
        "about": about,
        "loss": _plain(flat.loss),
        "neighborhood": {"t": around.t} | {name: _plain(getattr(around, name)) for name in columns},
        "slices": [
            {"label": s.label, "positions": _plain(s.positions), "losses": _plain(s.losses)} for s in flat.slices
        ],
    }
    for name, estimate in (("worst_case", flat.worst_case), ("adaptive", flat.adaptive), ("trace", flat.trace)):
        if estimate is not None:
            content[name] = {"value": _plain(estimate.value), "error": _plain(estimate.error)}
    if pairs is not None:
        content["eigenvalues"] = {"values": _plain(pairs.values), "residuals": _plain(pairs.residuals)}
    if density is not None:
        content["density"] = {"grid": _plain(density.grid), "values": _plain(density.values)}
    if plane is not None:
        content["plane"] = {name: _plain(getattr(plane, name)) for name in ("x", "y", "losses")}
    path = record.folder / "flatness.json"
    with drafted(path) as draft:
        draft.write_text(json.dumps(content, allow_nan=False) + "\n")
    return path


def _plain(x: Any) -> Any:
    """Numbers as JSON has them: lists for tensors, null for what is not finite."""
    if isinstance(x, Tensor):
        x = x.tolist()
    if isinstance(x, list):
        return [_plain(entry) for entry in x]
    return x if math.isfinite(x) else None


def _batches(data: Data, split: str, examples: int, batch_size: int, device: torch.device) -> list[Any]:
    """Some examples, mixed: the first ones, or those of a batch, may otherwise all be of one class."""
    whole = data.train if split == "train" else data.test
    part = whole[whole.fixed_permutation()[:examples]].to(device)
    inputs = dict(part.inputs)
    if "image" in inputs:
        inputs["image"] = normalise(inputs["image"], data.mean, data.std)
    rows = [slice(i, i + batch_size) for i in range(0, len(part), batch_size)]
    return [(tuple(x[r] for x in inputs.values()), part.targets[r]) for r in rows]


def _loss_fn(data: Data) -> Callable[[nn.Module, Any], Tensor]:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        return task_loss(model(*inputs).float(), targets, data.num_classes)

    return loss
