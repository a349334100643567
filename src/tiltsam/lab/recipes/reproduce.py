"""Running a recipe: what is missing is trained, what is done is reused, what the table needs is measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tiltsam.lab.compare import compare
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.data import LoadingCallback
from tiltsam.lab.devices import resolve_device
from tiltsam.lab.errors import DataError
from tiltsam.lab.recipes.book import Cell, Recipe, RecipeError
from tiltsam.lab.recipes.cost import other_data
from tiltsam.lab.recipes.measures import Thoroughness, measure, trained_on
from tiltsam.lab.record import Record
from tiltsam.lab.train import Progress, TrainError

__all__ = ["Outcome", "Plan", "reproduce"]

MEASURED = ("losses", "neighborhood", "eigenvalues")


@dataclass(frozen=True)
class Plan:
    """A recipe, and how much of it."""

    recipe: Recipe
    seeds: int = 3
    """Runs of each cell."""
    scale: float = 1.0
    """Share of the epochs, and of what is measured; ``losses`` are of all examples."""
    device: str = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and 0 < self.scale <= 1):
            raise RecipeError(f"--scale must be in (0, 1], got {self.scale:g}")
        if self.seeds < 1:
            raise RecipeError(f"--seeds must be at least 1, got {self.seeds}")

    @property
    def much(self) -> Thoroughness:
        """How thoroughly trained runs are measured."""
        return Thoroughness() if self.scale == 1 else Thoroughness().scaled(self.scale)

    def configs(self, cell: Cell) -> list[TrainConfig]:
        """The runs of a cell, one a seed."""
        epochs = cell.config.epochs * self.scale
        if math.isclose(epochs, round(epochs), rel_tol=1e-12):  # or 200 · 0.07 would begin a fifteenth
            epochs = float(round(epochs))
        config = replace(cell.config, epochs=epochs, device=self.device, precision=self.precision)
        return [replace(config, seed=seed) for seed in range(self.seeds)]

    def names(self) -> dict[str, str]:
        """What runs are called, by their configs' keys: a recipe may have several of one method."""
        return {config.key(): cell.row for cell in self.recipe.cells for config in self.configs(cell)}

    def changes(self) -> list[str]:
        """What differs from the recipe as it stands, in words."""
        found = []
        if self.scale != 1:
            spans = {cell.config.epochs: cell.config.epochs * self.scale for cell in self.recipe.cells}
            told = ", ".join(f"{full:g} → {less:g}" for full, less in spans.items())
            found.append(f"scaled to {self.scale:g}: epochs {told}")
            full, less = Thoroughness(), self.much
            if self.recipe.kind in ("neighborhood", "eigenvalues"):
                found.append(f"scaled to {self.scale:g}: examples measured on {full.examples} → {less.examples}")
            if self.recipe.kind == "neighborhood":
                found.append(f"scaled to {self.scale:g}: draws at each std {full.draws} → {less.draws}")
            whole = ", examples measured on" if self.recipe.kind == "losses" else ""
            found.append(f"not scaled: training examples, batch size, learning rate, samples, model{whole}")
        if self.precision != "fp32":
            found.append(f"precision: {self.precision}, where the recipe has fp32")
        return found


@dataclass
class Outcome:
    """What came of it."""

    plan: Plan
    out: Path
    problems: dict[str, str] = field(default_factory=dict)
    """By column: why it was not run."""
    data: dict[str, str] = field(default_factory=dict)
    """By column: how the data differ from the paper's."""
    diverged: dict[TrainConfig, str] = field(default_factory=dict)
    measured: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    """A seed each: by method what :func:`tiltsam.lab.recipes.measures.measure` gave."""
    unmeasured: dict[int, str] = field(default_factory=dict)
    """By seed: why nothing was measured."""

    def records(self, cell: Cell) -> list[Record]:
        """The finished runs of a cell."""
        records = [Record.of(self.out, config) for config in self.plan.configs(cell)]
        return [record for record in records if record.result() is not None]

    def results(self, cell: Cell) -> list[dict[str, Any]]:
        """Their final numbers."""
        return [result for record in self.records(cell) if (result := record.result()) is not None]

    def folders(self) -> list[Path]:
        """Of everything that was run, finished or not: a folder holds the seeds of a config."""
        found = dict.fromkeys(
            Record.of(self.out, config).folder.parent
            for cell in self.plan.recipe.cells
            for config in self.plan.configs(cell)
        )
        return [folder for folder in found if any(folder.glob("*/config.json"))]


def reproduce(
    plan: Plan,
    out: Path,
    *,
    root: Path | None = None,
    download: bool = False,
    loading: LoadingCallback | None = None,
    report: Callable[[TrainConfig, Progress], None] = lambda config, progress: None,
    say: Callable[[str], None] = lambda line: None,
    measuring: Callable[[str], Any] | None = None,
) -> Outcome:
    """Run a recipe; called again, it goes on where it was.

    A column whose data is missing is left out, with a word; the others are run.

    Args:
        plan: What.
        out: Folder of the records.
        root: Where data sets lie.
        download: Fetch what is missing.
        loading: Told how far downloads and the decoding of images are.
        report: Called about twice a second, and after every epoch.
        say: Told what goes wrong on the way.
        measuring: ``measuring("what is measured")`` gives a callback.

    Raises:
        DataError: The data of all columns is missing.
        ConfigError: There is no such device.
    """
    resolve_device(plan.device)  # before a folder is made
    outcome = Outcome(plan, out)
    names = plan.names()

    def failed(config: TrainConfig, error: TrainError) -> None:
        outcome.diverged[config] = str(error)
        say(f"{config.task} {names[config.key()]} seed {config.seed}: {error}")

    missing: DataError | None = None
    for column in plan.recipe.columns:
        cells = [plan.configs(cell) for cell in plan.recipe.cells if cell.column == column]
        # All cells of a seed, then those of the next: they share the data.
        configs = list(dict.fromkeys(config for seed in zip(*cells, strict=True) for config in seed))
        try:
            compare(
                configs,
                out,
                root=root,
                download=download,
                loading=loading,
                report=report,
                tick=report,
                failed=failed,
            )
        except DataError as error:
            missing = error
            outcome.problems[column] = str(error)
            if len(plan.recipe.columns) > 1:  # at once: the other columns may take days
                say(f"{column} is not run: {error}")
        else:
            _look_at_data(outcome, column, root, loading)
    if missing is not None and len(outcome.problems) == len(plan.recipe.columns):
        if len(outcome.problems) > 1:
            raise DataError(f"no column of {plan.recipe.name} was run: none has its data") from missing
        raise missing
    if plan.recipe.kind in MEASURED:
        _measure(outcome, root, say, measuring)
    return outcome


def _look_at_data(outcome: Outcome, column: str, root: Path | None, loading: LoadingCallback | None) -> None:
    """Whether a column's finished runs were trained on as much as the paper's."""
    cells = [cell for cell in outcome.plan.recipe.cells if cell.column == column]
    records = [record for cell in cells for record in outcome.records(cell)]
    try:
        told = [other_data(cells[0].config, sizes) for sizes in trained_on(records, root, loading)]
    except DataError as error:
        told = [f"not known whether this is the paper's data: {error}"]
    if differs := list(dict.fromkeys(filter(None, told))):
        outcome.data[column] = "; ".join(differs)


def _measure(
    outcome: Outcome, root: Path | None, say: Callable[[str], None], measuring: Callable[[str], Any] | None
) -> None:
    """Seed by seed: runs of one seed saw the same examples."""
    plan = outcome.plan
    for seed in range(plan.seeds):
        runs = {cell.config.method: Record.of(outcome.out, plan.configs(cell)[seed]) for cell in plan.recipe.cells}
        runs = {method: record for method, record in runs.items() if record.result() is not None}
        options: dict[str, Any] = {"device": plan.device, "root": root, "progress": measuring}
        try:
            outcome.measured.append(measure(plan.recipe.kind, runs, plan.much, **options) if runs else {})
        except ValueError as error:  # a model so sharp that the loss around it is not finite
            outcome.measured.append({})
            outcome.unmeasured[seed] = str(error)
            say(f"seed {seed} is not measured: {error}")
