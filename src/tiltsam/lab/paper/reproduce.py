"""Run a recipe: train what is missing, reuse what is done, measure what the table needs.

RUN/reproduced.json     the measurements of a run, each under a key that describes it and the model; measuring can take
                        as long as training
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tiltsam.flatness.objectives import ErmLoss, Objective, SamLoss, TsamLoss
from tiltsam.lab.compare import compare
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.data import Data, data_key, data_loader
from tiltsam.lab.devices import resolve_device
from tiltsam.lab.display import QUIET, Display
from tiltsam.lab.errors import ConfigError, DataError, RecordError
from tiltsam.lab.files import file_digest, write_json
from tiltsam.lab.flags import format_value
from tiltsam.lab.flatness import PAPER_STDS, Flatness, FlatnessPlan, cross_runs, measure_runs, save_flatness
from tiltsam.lab.paper.recipes import Recipe, RecipeCell, cells_with, losses
from tiltsam.lab.paper.settings import training_examples
from tiltsam.lab.records import Record

__all__ = ["Reproduction", "ReproductionPlan", "check_size", "reproduce"]

NUM_EXAMPLES = 5000  # training examples that neighbourhoods and eigenvalues are measured on
NUM_DRAWS = 500  # perturbations per standard deviation, as in the authors' code

# Settings that changes cannot set, and what to use instead.
_USE_INSTEAD = {
    "task": "NAME/COLUMN",
    "method": "--methods",
    "seed": "--seeds",
    "device": "--device",
    "precision": "--precision",
    "epochs": "--scale",
    "passes": "--scale",
    "seconds": "--scale",
}


def check_size(seeds: int, scale: float) -> None:
    """Raise ConfigError unless there is a seed, and the scale is in (0, 1]."""
    if not 0 < scale <= 1:
        raise ConfigError(f"--scale must be in (0, 1], got {scale:g}")
    if seeds < 1:
        raise ConfigError(f"--seeds must be at least 1, got {seeds}")


@dataclass(frozen=True)
class ReproductionPlan:
    """A recipe, and how much of it to run."""

    recipe: Recipe
    seeds: int = 3
    """Runs per cell, with seeds 0, 1, …"""
    scale: float = 1.0
    """Fraction of the epochs, and of the examples and draws of a measurement; ``losses`` always uses all examples."""
    device: str = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    changes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """New values of settings: by ``NAME`` for all cells that have it; by ``METHOD:NAME`` for those of one method, which
    takes precedence."""

    def __post_init__(self) -> None:
        check_size(self.seeds, self.scale)
        for name in self.changes:
            self._check_change(name)
        for cell in self.recipe.cells if self.changes else ():
            self.configs(cell)

    def _check_change(self, name: str) -> None:
        setting = name.rpartition(":")[2]
        if setting in _USE_INSTEAD:
            raise ConfigError(f"--set cannot change {setting}: use {_USE_INSTEAD[setting]}")
        values: dict[tuple[str, str], Any] = {}
        for cell in cells_with([self.recipe], name):
            value = cell.value(name)
            if values.setdefault((cell.column, cell.method), value) != value:
                raise ConfigError(f"--set {name}: the rows of {cell.method} in {self.recipe.name} differ in {setting}")

    @property
    def num_examples(self) -> int:
        """Examples to measure on; at least 100."""
        return max(100, round(NUM_EXAMPLES * self.scale))

    @property
    def num_draws(self) -> int:
        """Perturbations per standard deviation; at least 2."""
        return max(2, round(NUM_DRAWS * self.scale))

    def configs(self, cell: RecipeCell) -> list[TrainConfig]:
        """Return the runs of a cell, one per seed."""
        epochs = cell.config.epochs * self.scale
        if math.isclose(epochs, round(epochs), rel_tol=1e-12):  # 200 · 0.07 is 14.000000000000002
            epochs = float(round(epochs))
        changes = sorted(self.changes.items(), key=lambda item: ":" in item[0])  # those of one method replace others
        config = cell.config.with_settings({k.rpartition(":")[2]: v for k, v in changes if cell.has(k)})
        config = replace(config, epochs=epochs, device=self.device, precision=self.precision)
        return [replace(config, seed=seed) for seed in range(self.seeds)]

    def names(self) -> dict[str, str]:
        """Return the row of each run by the key of its config; a method can have several rows."""
        return {config.key(): cell.row for cell in self.recipe.cells for config in self.configs(cell)}

    def deviations(self) -> list[str]:
        """Return how the plan deviates from the recipe, one line each."""
        lines = []
        if self.scale != 1:
            epochs = {cell.config.epochs: cell.config.epochs * self.scale for cell in self.recipe.cells}
            lines.append(f"scale {self.scale:g}: epochs " + ", ".join(f"{a:g} → {b:g}" for a, b in epochs.items()))
            if self.recipe.kind in ("neighborhood", "eigenvalues"):
                lines.append(f"scale {self.scale:g}: examples to measure on {NUM_EXAMPLES} → {self.num_examples}")
            if self.recipe.kind == "neighborhood":
                lines.append(f"scale {self.scale:g}: draws per noise level {NUM_DRAWS} → {self.num_draws}")
            measured = ", examples to measure on" if self.recipe.kind == "losses" else ""
            lines.append(f"not scaled: training examples, batch size, learning rate, samples, model{measured}")
        if self.precision != "fp32":
            lines.append(f"precision {self.precision} instead of fp32")
        for name, value in self.changes.items():
            cells = [c for c in self.recipe.cells if c.has(name) and f"{c.method}:{name}" not in self.changes]
            if old := dict.fromkeys(format_value(v) for cell in cells if (v := cell.value(name)) != value):
                lines.append(f"{name.replace(':', ': ')} {', '.join(old)} → {format_value(value)}")
        return lines


@dataclass
class Reproduction:
    """The results of a plan. Finished runs are read from their records."""

    plan: ReproductionPlan
    out: Path
    missing: dict[str, str] = field(default_factory=dict)
    """By column: why it was not run."""
    failed: dict[TrainConfig, str] = field(default_factory=dict)
    """By config: why training failed."""
    measured: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    """One entry per seed: measurements by method. ``losses``: by split, then objective; ``neighborhood``: lists
    ``std``, ``mean`` and ``variance``; ``eigenvalues``: a list ``values``."""
    unmeasured: dict[int, str] = field(default_factory=dict)
    """By seed: why it was not measured."""

    def _finished(self, cell: RecipeCell) -> list[tuple[Record, dict[str, Any]]]:
        records = [Record.of(self.out, config) for config in self.plan.configs(cell)]
        return [(record, result) for record in records if (result := record.result()) is not None]

    def records(self, cell: RecipeCell) -> list[Record]:
        """Return the finished runs of a cell."""
        return [record for record, _ in self._finished(cell)]

    @property
    def data_differences(self) -> dict[str, str]:
        """By column: how its data differ from the published data set, if the steps per epoch do."""
        differences: dict[str, str] = {}
        for cell in self.plan.recipe.cells:
            config = self.plan.configs(cell)[0]
            published = training_examples(config)
            expected = published // min(config.batch_size, published)
            for result in self.results(cell):
                if (steps := round(result["steps"] / result["epoch"])) != expected:
                    text = f"not the paper's data: steps per epoch {steps} instead of {expected}"
                    differences.setdefault(cell.column, text)
        return differences

    def results(self, cell: RecipeCell) -> list[dict[str, Any]]:
        """Return the final numbers of the finished runs of a cell."""
        return [result for _, result in self._finished(cell)]

    def folders(self) -> list[Path]:
        """Return the folders of all runs, finished or not; a folder holds the seeds of a config."""
        configs = [self.plan.configs(cell)[0] for cell in self.plan.recipe.cells]
        folders = dict.fromkeys(Record.of(self.out, config).folder.parent for config in configs)
        return [folder for folder in folders if any(folder.glob("*/config.json"))]


def reproduce(
    plan: ReproductionPlan,
    out: Path,
    *,
    root: Path | None = None,
    download: bool = False,
    display: Display = QUIET,
) -> Reproduction:
    """Run a recipe. A second call continues where the first stopped.

    A column whose data is missing is reported and skipped.

    Raises:
        DataError: If the data of all columns is missing.
        ConfigError: If the device does not exist.
    """
    resolve_device(plan.device)  # before a folder is created
    recipe, reproduction = plan.recipe, Reproduction(plan, out)
    load = data_loader(root, download=download, progress=display.loading)
    for columns in _columns_by_data(recipe):
        cells = [cell for cell in recipe.cells if cell.column in columns]
        configs = {f"{cell.column} {cell.row}": plan.configs(cell) for cell in cells}
        try:
            failures = compare(configs, out, data=load, display=display)
            reproduction.failed |= {config: str(error) for config, error in failures.items()}
        except DataError as error:
            reproduction.missing |= dict.fromkeys(columns, str(error))
            if len(reproduction.missing) == len(recipe.columns) == 1:
                raise
            for column in columns:  # now: the other columns may take days
                display.print(f"{column} is not run: {error}")
    if len(reproduction.missing) == len(recipe.columns):
        raise DataError(f"no column of {recipe.name} was run: the data of all of them is missing")
    if recipe.measured:
        _measure_seeds(reproduction, load, display)
    return reproduction


def _columns_by_data(recipe: Recipe) -> list[list[str]]:
    """Return the columns, those together that use the same data, so that it is loaded once."""
    keys = {cell.column: data_key(cell.config) for cell in recipe.cells}
    return [[column for column in keys if keys[column] == key] for key in dict.fromkeys(keys.values())]


# ------------------------------------------------------------------------------------------------- measuring


def _measure_seeds(reproduction: Reproduction, load: Callable[[TrainConfig], Data], display: Display) -> None:
    """Measure the trained models seed by seed: runs of a seed saw the same examples."""
    plan = reproduction.plan
    for seed in range(plan.seeds):
        records = {cell.method: Record.of(reproduction.out, plan.configs(cell)[seed]) for cell in plan.recipe.cells}
        finished = {method: record for method, record in records.items() if record.result() is not None}
        measured: dict[str, dict[str, Any]] = {}
        try:
            measured = _measure(plan, finished, load, display) if finished else {}
        except ValueError as error:  # a model so sharp that the loss around it is not finite
            reproduction.unmeasured[seed] = str(error)
            display.print(f"seed {seed} is not measured: {error}")
        reproduction.measured.append(measured)


def _measure(
    plan: ReproductionPlan, runs: dict[str, Record], load: Callable[[TrainConfig], Data], display: Display
) -> dict[str, dict[str, Any]]:
    """Return the measurements of the runs of one seed, by method, from their folders if they are there."""
    what: dict[str, Any] = {"kind": plan.recipe.kind, "examples": plan.num_examples, "draws": plan.num_draws}
    if plan.recipe.kind == "losses":
        what = {"kind": plan.recipe.kind, "objectives": repr(_objectives(plan))}
    digests = {method: file_digest(record.folder / "model.safetensors") for method, record in runs.items()}
    keys = {method: json.dumps(what | {"model": digest}) for method, digest in digests.items()}
    saved = {method: _read(record) for method, record in runs.items()}
    missing = {method: record for method, record in runs.items() if keys[method] not in saved[method]}
    for method, numbers in (_measure_now(plan, missing, load, display) if missing else {}).items():
        saved[method][keys[method]] = numbers
        write_json(runs[method].folder / "reproduced.json", saved[method])
    return {method: saved[method][keys[method]] for method in runs}


def _measure_now(
    plan: ReproductionPlan, runs: dict[str, Record], load: Callable[[TrainConfig], Data], display: Display
) -> dict[str, dict[str, Any]]:
    measured: dict[str, dict[str, Any]] = {}
    if plan.recipe.kind == "losses":
        progress = display.measuring("losses under all objectives")
        table = cross_runs(runs, _objectives(plan), device=plan.device, data=load, progress=progress)
        for entry in table.entries:
            measured.setdefault(entry.model, {}).setdefault(entry.split, {})[entry.objective] = entry.loss
        return measured
    options: dict[str, Any] = {"device": plan.device, "data": load, "display": display}
    for flat, about in measure_runs(runs, examples=plan.num_examples, plan=_flatness_plan(plan), **options):
        measured[flat.name] = _as_json(plan.recipe.kind, flat)
        # The report shows flatness.json; one that exists may hold more than a neighbourhood.
        if plan.recipe.kind == "neighborhood" and not (runs[flat.name].folder / "flatness.json").exists():
            save_flatness(runs[flat.name], flat, about)
    return measured


def _objectives(plan: ReproductionPlan) -> dict[str, Objective]:
    """Return the objectives that the three methods minimise, with the settings that the plan changes."""
    options = {cell.method: plan.configs(cell)[0].all_options() for cell in losses().cells}
    sam, tsam = options["sam"], options["tsam"]
    return {
        "ERM": ErmLoss(),
        "SAM": SamLoss(sam["rho"]),
        "TSAM": TsamLoss(tsam["t"], tsam["rho"], tsam["radius"], tsam["num_samples"]),
    }


def _flatness_plan(plan: ReproductionPlan) -> FlatnessPlan:
    counts = ("num_ascent_steps", "num_trace_samples", "num_density_probes", "num_points")
    off: dict[str, Any] = {**dict.fromkeys(counts, 0), "bits": ()}
    if plan.recipe.kind == "neighborhood":
        return FlatnessPlan(num_samples=plan.num_draws, num_eigenvalues=0, **off)
    return FlatnessPlan(std=PAPER_STDS[:1], num_samples=2, num_eigenvalues=5, **off)


def _as_json(kind: str, flat: Flatness) -> dict[str, Any]:
    if kind == "neighborhood":
        return {name: getattr(flat.neighborhood, name).tolist() for name in ("std", "mean", "variance")}
    assert flat.eigenpairs is not None
    return {"values": flat.eigenpairs.values.tolist()}


def _read(record: Record) -> dict[str, dict[str, Any]]:
    """Return the saved measurements of a run."""
    path = record.folder / "reproduced.json"
    try:
        measurements: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    except ValueError:
        raise RecordError(f"{path} is damaged: remove it to measure again") from None
    return measurements
