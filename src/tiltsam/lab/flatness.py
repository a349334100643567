"""Measure the flatness of models and of trained runs, save the measurements, and print them as a table.

    flats = [measure(name, model, loss_fn, batches) for name, model in models.items()]
    print(format_markdown(flatness_cells(flats)))  # from tiltsam.lab.console
    write_figures(flats, "figures")  # from tiltsam.lab.flatness_plots

All models see the same data, the same noise and the same probes, so their differences have smaller errors than their
values. :func:`measure_runs` does this for runs of the lab; ``RUN/flatness.json`` keeps the result for
the report.
"""

from __future__ import annotations

import json
import math
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tiltsam.curvature import Density, Eigenpairs, Trace, spectral_density, top_eigenvalues, trace
from tiltsam.flatness.loss_surface import Batches, LossFn, ProgressCallback, trainable
from tiltsam.flatness.objectives import CrossEntry, CrossTable, Objective, cross_objectives
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.data import Data, data_key, data_loader
from tiltsam.lab.data.loader import normalise
from tiltsam.lab.devices import resolve_device, torch_settings
from tiltsam.lab.display import QUIET, Display
from tiltsam.lab.errors import ConfigError, RecordError
from tiltsam.lab.evaluate import task_loss
from tiltsam.lab.files import drafted, file_digest, finite_json
from tiltsam.lab.models import load_model
from tiltsam.lab.records import Record
from tiltsam.lab.report.runs import RunRecord, find_run_folders, typed_entries
from tiltsam.lab.report.summary import summarize
from tiltsam.lab.stats import Mean, format_mean, mean_of
from tiltsam.landscape import Slice1D, random_direction, slice_1d
from tiltsam.sharpness import Neighborhood, Rounding, WorstCase, m_sharpness, neighborhood, rounding

__all__ = [
    "PAPER_STDS",
    "Flatness",
    "FlatnessPlan",
    "cross_runs",
    "find_runs",
    "flatness_cells",
    "is_measured",
    "measure",
    "measure_runs",
    "save_flatness",
]

PAPER_STDS = (0.005, 0.0075, 0.01, 0.015, 0.02, 0.035, 0.05, 0.075, 0.1)
"""The noise levels of the paper's Figure 2."""

BATCH_SIZE = 250  # examples per batch of a measurement
ASCENT_BATCH_SIZE = 64  # examples per ascent of an objective, as in the paper's training


@dataclass(frozen=True)
class FlatnessPlan:
    """What to measure and with which settings; a count of 0 skips that measurement (except the neighbourhood).

    Attributes:
        std: Noise levels of the neighbourhood.
        num_samples: Draws per noise level (500 in the paper).
        t: Tilt of the t-weighted numbers.
        rho: Radius of worst-case sharpness.
        adaptive_rho: Radius of adaptive worst-case sharpness.
        num_ascent_steps: Ascent steps of both.
        bits: Numbers of bits that the weights are rounded to; empty to skip it.
        num_eigenvalues: Number of largest eigenvalues of the Hessian.
        num_trace_samples: Probes for its trace.
        num_density_probes: Probes for its spectral density.
        num_density_steps: Lanczos steps per probe.
        num_points: Points of each slice.
        span: Half the length of the slices along random directions, relative to the weights.
        eigen_span: Half the length of the slice along the top eigenvector, a unit vector.
        seed: Seed of everything.
    """

    std: Sequence[float] = PAPER_STDS
    num_samples: int = 50
    t: float = 1.0
    rho: float = 0.05
    adaptive_rho: float = 0.5
    num_ascent_steps: int = 5
    bits: Sequence[int] = (8, 4)
    num_eigenvalues: int = 5
    num_trace_samples: int = 30
    num_density_probes: int = 1
    num_density_steps: int = 30
    num_points: int = 21
    span: float = 1.0
    eigen_span: float = 0.5
    seed: int = 0


@dataclass(frozen=True)
class Flatness:
    """All measurements of one model; None for those the plan skips."""

    name: str
    loss: float
    neighborhood: Neighborhood
    worst_case: WorstCase | None = None
    adaptive: WorstCase | None = None
    rounding: Rounding | None = None
    eigenpairs: Eigenpairs | None = None
    trace: Trace | None = None
    density: Density | None = None
    slices: tuple[Slice1D, ...] = ()


def measure(
    name: str,
    model: nn.Module,
    loss_fn: LossFn,
    batches: Batches,
    plan: FlatnessPlan | None = None,
    *,
    size_of: Callable[[Any], float] | None = None,
    progress: Callable[[str], ProgressCallback | None] | None = None,
) -> Flatness:
    """Measure one model.

    Cost: see the functions of :mod:`tiltsam.sharpness`, :mod:`tiltsam.curvature` and :mod:`tiltsam.landscape`.

    Args:
        name: The name of the model.
        model: The model; restored.
        loss_fn: ``loss_fn(model, batch)``, the mean loss of a batch.
        batches: The data set, see :mod:`tiltsam.flatness.loss_surface`.
        plan: What to measure.
        size_of: Weight of a batch; its number of examples by default.
        progress: ``progress("NAME: trace")`` returns the callback for that measurement.

    Example:
        >>> import torch
        >>> from tiltsam.flatness.loss_surface import supervised
        >>> data = [(torch.randn(8, 2), torch.randn(8, 1))]
        >>> flat = measure("line", nn.Linear(2, 1), supervised(nn.functional.mse_loss), data, FlatnessPlan(std=[0.01]))
        >>> flat.eigenpairs.num_products
        3
    """
    plan = FlatnessPlan() if plan is None else plan
    given = (model, loss_fn, batches)

    def options(what: str, **more: Any) -> dict[str, Any]:
        callback = None if progress is None else progress(f"{name}: {what}")
        return {"seed": plan.seed, "size_of": size_of, "progress": callback, **more}

    around = neighborhood(*given, plan.std, plan.num_samples, plan.t, **options("neighbourhood"))
    worst = adaptive = rounded = eigenpairs = hessian_trace = density = None
    if steps := plan.num_ascent_steps:
        worst = m_sharpness(*given, **options("worst case", rho=plan.rho, num_steps=steps))
        ratio = options("adaptive worst case", rho=plan.adaptive_rho, num_steps=steps, adaptive=True)
        adaptive = m_sharpness(*given, **ratio)
    if plan.bits and any(p.ndim > 1 for p in trainable(model).values()):
        rounded = rounding(*given, plan.bits, size_of=size_of)
    if plan.num_eigenvalues:
        eigenpairs = top_eigenvalues(*given, plan.num_eigenvalues, **options("eigenvalues"))
    if plan.num_trace_samples:
        hessian_trace = trace(*given, plan.num_trace_samples, deflate=eigenpairs, **options("trace"))
    if probes := plan.num_density_probes:
        density = spectral_density(*given, probes, plan.num_density_steps, **options("spectral density"))
    slices = []
    if points := plan.num_points:
        span, top = (-plan.span, plan.span), (-plan.eigen_span, plan.eigen_span)
        line = options("random slice", span=span, num_points=points, label="random direction")
        slices.append(slice_1d(*given, random_direction(model, plan.seed), **line))
        if eigenpairs is not None:
            line = options("eigenvector slice", span=top, num_points=points, label="top eigenvector")
            slices.append(slice_1d(*given, eigenpairs.direction(0), **line))
    return Flatness(
        name, around.center, around, worst, adaptive, rounded, eigenpairs, hessian_trace, density, tuple(slices)
    )


# ------------------------------------------------------------------------------------------------- runs

# Errors that concern one run: it is unfinished, damaged, of another task's shape, or too sharp for its dtype.
_RUN_ERRORS = (RecordError, ConfigError, ValueError, RuntimeError, OSError)


def find_runs(
    paths: Sequence[Path], *, trials: bool = True, skip_errors: bool = False, display: Display = QUIET
) -> dict[str, Record]:
    """Return the runs in and below the folders, by unique names such as ``sam:rho=0.2 seed 0``.

    Args:
        paths: The folders.
        trials: Whether to include the trials of sweeps, see :func:`tiltsam.lab.report.runs.find_run_folders`.
        skip_errors: Whether damaged runs are skipped, each with a line; otherwise the first one raises.
        display: Prints the lines.

    Raises:
        RecordError: If a folder contains no run.
    """
    runs = []
    found = find_run_folders(paths, trials=trials)
    entries = typed_entries(found)
    for folder in found.runs:
        try:
            record = Record(folder)
            record.data_config()
            settings = record.settings()
        except _RUN_ERRORS as error:
            if not skip_errors:
                raise
            display.print(_skipped(folder, error))
        else:
            runs.append(RunRecord(folder, settings, entry=entries.get(folder.resolve(), "")))
    named = []
    for task in summarize(runs):
        for setting in task.settings:
            named += [(f"{task.label(setting)} seed {run.seed}", run.folder) for run in setting.runs]
    times = Counter(name for name, _ in named)  # one config and seed may have several records
    return {name if times[name] == 1 else f"{name} in {folder}": Record(folder) for name, folder in named}


def measure_runs(
    runs: dict[str, Record],
    *,
    task: str | None = None,
    split: Literal["train", "test"] = "train",
    examples: int = 1000,
    device: str = "auto",
    data: Callable[[TrainConfig], Data] | None = None,
    plan: FlatnessPlan | None = None,
    reuse: bool = False,
    skip_errors: bool = False,
    display: Display = QUIET,
) -> Iterator[tuple[Flatness, dict[str, Any]]]:
    """Measure the model of every run on examples of one task, with the labels that it was trained on.

    Runs of one seed are measured on the same examples. Another seed has another validation split and, on a noisy task,
    other noisy labels, so its runs are measured on its own examples.

    Args:
        runs: The result of :func:`find_runs`.
        task: The task; by default that of the runs, which must be the same for all.
        split: The examples to measure on.
        examples: The number of examples, a fixed random choice from the split.
        device: The device.
        data: Returns the data of a config; by default a :func:`tiltsam.lab.data.data_loader`.
        plan: What to measure.
        reuse: Whether to leave out the runs whose ``flatness.json`` has this very measurement of this very model.
        skip_errors: Whether runs that cannot be measured are skipped, each with a line; otherwise the first one raises.
        display: Shows the progress of measurements.

    Yields:
        The measurements of a run, and a description of them, both for :func:`save_flatness`. Runs of one seed follow
        each other. A run that has not finished is measured at its newest checkpoint, with a warning; its description
        has ``finished`` false.
    """
    plan = FlatnessPlan() if plan is None else plan
    for loaded, names, where in _by_data(runs, task, device, data or data_loader()):
        batches = _batches(loaded, split, examples, BATCH_SIZE, where)
        about = {"task": loaded.name, "split": split, "examples": sum(len(targets) for _, targets in batches)}
        about |= {"batch_size": BATCH_SIZE, **asdict(plan), "std": list(plan.std), "bits": list(plan.bits)}
        for name in names:
            weights = runs[name].folder / "model.safetensors"
            try:
                model = load_model(runs[name], loaded).to(where)
                mark = {"model": file_digest(weights)} if weights.exists() else {"finished": False}
                if reuse and "model" in mark and is_measured(runs[name], about | mark):
                    display.print(f"already measured: {name}")
                    continue
                if "model" not in mark:
                    warnings.warn(f"{name}: training has not finished: measuring its newest checkpoint", stacklevel=2)
                with torch_settings(where, model):
                    flat = measure(name, model, _loss_fn(loaded), batches, plan, progress=display.measuring)
            except _RUN_ERRORS as error:
                if not skip_errors:
                    raise
                display.print(_skipped(runs[name].folder, error))
            else:
                yield flat, about | mark


def cross_runs(
    runs: dict[str, Record],
    objectives: Mapping[str, Objective],
    *,
    device: str = "auto",
    data: Callable[[TrainConfig], Data] | None = None,
    progress: ProgressCallback | None = None,
) -> CrossTable:
    """Return the loss of every run's model under several objectives, on all training and all test examples.

    Args:
        runs: Runs of one task, by name.
        objectives: By name; see :func:`tiltsam.sharpness.cross_objectives`.
        device: The device.
        data: Returns the data of a config; by default a :func:`tiltsam.lab.data.data_loader`.
        progress: Called as ``progress(done, total)``.
    """
    entries: list[CrossEntry] = []
    for loaded, names, where in _by_data(runs, None, device, data or data_loader()):
        models = {name: load_model(runs[name], loaded).to(where) for name in names}
        splits = {
            split: _batches(loaded, split, len(getattr(loaded, split)), ASCENT_BATCH_SIZE, where)
            for split in ("train", "test")
        }
        with torch_settings(where, max(models.values(), key=lambda m: sum(p.numel() for p in m.parameters()))):
            entries += cross_objectives(models, _loss_fn(loaded), splits, objectives, progress=progress).entries
    return CrossTable(tuple(entries))


def _by_data(
    runs: dict[str, Record], task: str | None, device: str, load: Callable[[TrainConfig], Data]
) -> Iterator[tuple[Data, list[str], torch.device]]:
    """Yield each data set, the names of the runs that use it, and the device."""
    if not runs:
        return
    configs = {name: record.data_config() for name, record in runs.items()}
    tasks = {config.task for config in configs.values()} if task is None else {task}
    if len(tasks) > 1:
        raise ConfigError(f"the runs are of several tasks ({', '.join(sorted(tasks))}): pass the folders of one task")
    (task,) = tasks
    where = resolve_device(device)
    groups: dict[TrainConfig, list[str]] = {}
    for name, config in configs.items():
        groups.setdefault(data_key(replace(config, task=task)), []).append(name)
    for key, names in groups.items():
        yield load(key), names, where


def _skipped(folder: Path, error: Exception) -> str:
    """Return why a run is skipped, in one line with its folder."""
    message = str(error) if isinstance(error, RecordError) else f"{folder}: {error}"
    return textwrap.shorten(f"skipped: {message}", 300)


def _batches(data: Data, split: str, examples: int, batch_size: int, device: torch.device) -> list[Any]:
    """Return a fixed random choice of examples in batches, so that no batch has a single class in sorted data."""
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


# ------------------------------------------------------------------------------------------------- saved measurements


def save_flatness(record: Record, flat: Flatness, about: dict[str, Any]) -> Path:
    """Write the measurements of a run to its ``flatness.json``, and return the path.

    Eigenvectors and single probes are not saved.

    Args:
        record: The run.
        flat: Its measurements.
        about: What determines them: model, examples and plan, as :func:`measure_runs` yields it.
    """
    statistics = ("mean", "variance", "tilted_mean", "tilted_variance")
    saved = {
        "neighborhood": ("t", "std", *statistics, *(f"{name}_error" for name in statistics), "losses"),
        "worst_case": ("value", "error"),
        "adaptive": ("value", "error"),
        "trace": ("value", "error"),
        "rounding": ("bits", "losses", "distances"),
        "eigenvalues": ("values", "residuals"),
        "density": ("grid", "values", "error", "nodes", "weights", "width"),
    }
    content: dict[str, Any] = {"about": about, "loss": flat.loss}
    content["slices"] = [{"label": s.label, "positions": s.positions, "losses": s.losses} for s in flat.slices]
    for part, names in saved.items():
        measurement = getattr(flat, "eigenpairs" if part == "eigenvalues" else part)
        if measurement is not None:
            content[part] = {name: getattr(measurement, name) for name in names}
    path = record.folder / "flatness.json"
    with drafted(path) as draft:
        draft.write_text(json.dumps(finite_json(content), allow_nan=False) + "\n")
    return path


def is_measured(record: Record, about: dict[str, Any]) -> bool:
    """Return whether the ``flatness.json`` of a run has the measurements that ``about`` describes."""
    try:
        content = json.loads((record.folder / "flatness.json").read_text())
    except (OSError, ValueError):
        return False  # missing or damaged: measured again
    return isinstance(content, dict) and content.get("about") == about


# ------------------------------------------------------------------------------------------------- table


def flatness_cells(flats: Sequence[Flatness], std: float = 0.01) -> list[list[str]]:
    """Return the cells of a table, headings first: a column per model, a row per measurement.

    Models with the same name, such as the runs of several seeds, share a column: their mean ± its standard error. If
    all names differ, the errors are those of the measurements.

    Args:
        flats: The results of :func:`measure`.
        std: The noise level of the neighbourhood: the nearest measured one is used.
    """
    groups: dict[str, list[dict[str, Mean]]] = {}
    for flat in flats:
        groups.setdefault(flat.name, []).append(_measurements(flat, std))
    labels = dict.fromkeys(label for group in groups.values() for numbers in group for label in numbers)
    over_models = len(groups) < len(flats)

    def cell(group: list[dict[str, Mean]], label: str) -> str:
        numbers = [numbers[label] for numbers in group if label in numbers]
        return format_mean(mean_of([x.value for x in numbers]) if over_models or not numbers else numbers[0])

    return [["model", *groups], *([label, *(cell(group, label) for group in groups.values())] for label in labels)]


def _measurements(flat: Flatness, std: float) -> dict[str, Mean]:
    """Return the numbers of one model by label, each with the error of its measurement, NaN if there is none."""
    around = flat.neighborhood
    at = int((around.std.log() - math.log(std)).abs().argmin())
    numbers = {"loss": (flat.loss, math.nan)}
    for label, name, less in [
        ("mean rise", "mean", flat.loss),
        ("variance", "variance", 0.0),
        ("t-mean rise", "tilted_mean", flat.loss),
        ("t-variance", "tilted_variance", 0.0),
    ]:
        value, error = getattr(around, name)[at], getattr(around, f"{name}_error")[at]
        numbers[f"{label} at {float(around.std[at]):g}"] = float(value) - less, float(error)
    for label, worst in [("worst case", flat.worst_case), ("adaptive", flat.adaptive)]:
        if worst is not None:
            numbers[label] = worst.value, worst.error
    if flat.rounding is not None:
        for bits, loss in zip(flat.rounding.bits, flat.rounding.losses.tolist(), strict=True):
            numbers[f"{bits}-bit rise"] = loss - flat.rounding.center, math.nan
    if flat.eigenpairs is not None:
        for number, value in enumerate(flat.eigenpairs.values.tolist(), start=1):
            numbers[f"λ{number}"] = value, math.nan  # a residual is not a standard error
    if flat.trace is not None:
        numbers["trace"] = flat.trace.value, flat.trace.error
    return {label: Mean(value, error, 1) for label, (value, error) in numbers.items()}
