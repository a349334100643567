"""Our numbers beside the paper's: the tables of a recipe that was run, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tiltsam
from tiltsam.lab import files
from tiltsam.lab.data import GLUE
from tiltsam.lab.recipes import paper
from tiltsam.lab.recipes.book import Cell
from tiltsam.lab.recipes.paper import Number
from tiltsam.lab.recipes.reproduce import MEASURED, Outcome
from tiltsam.lab.recipes.settings import COLUMNS
from tiltsam.lab.report.settings import Mean, mean_of
from tiltsam.lab.report.tables import number_cell

__all__ = ["Table", "ours", "tables", "write_json"]

NOT_RUN = "not run"
NO_NUMBER = "–"  # only a figure of the paper shows it; or we have none
SHARES = (0.25, 0.5, 0.75, 1.0)  # of a run, at which curves are compared


@dataclass(frozen=True)
class Table:
    """A table, ready to print: its heading is its first row."""

    title: str
    rows: list[list[str]]


def metrics_of(cell: Cell) -> tuple[str, ...]:
    """The metrics that a cell shows: as many as the paper does, or the one that counts."""
    task = cell.config.task
    named = GLUE[task.removeprefix("glue/")].metrics if task.startswith("glue/") else ("accuracy",)
    return named[: max(1, len(cell.paper))]


def ours(outcome: Outcome, cell: Cell) -> list[Mean]:
    """Our final test scores of a cell in percent, one for each of its metrics, over the runs that are finished."""
    results = outcome.results(cell)
    return [mean_of([100 * result[f"test_{metric}"] for result in results]) for metric in metrics_of(cell)]


def tables(outcome: Outcome) -> list[Table]:
    """All tables of a recipe."""
    return _KINDS[outcome.plan.recipe.kind](outcome)


# ------------------------------------------------------------------------------------------------- trained


def _scores(outcome: Outcome) -> list[Table]:
    found = []
    for column, cells in _by_column(outcome):
        metrics = " / ".join(metrics_of(cells[0]))
        rows = [["", f"ours: test {metrics} ×100", "paper", "passes", "minutes", "runs"]]
        for cell in cells:
            results = outcome.results(cell)
            passes, minutes = mean_of([r["passes"] for r in results]), mean_of([r["seconds"] / 60 for r in results])
            rows.append(
                [
                    cell.row,
                    " / ".join(_mean(m, 2) for m in ours(outcome, cell)),
                    _printed(cell.paper),
                    _mean(passes, 0, spread=False),
                    _mean(minutes, 1, spread=False),
                    _runs(outcome, cell),
                ]
            )
        found.append(Table(_title(outcome, column), rows))
    if outcome.plan.recipe.name == "glue":
        found.append(_glue_average(outcome))
    return found


def _glue_average(outcome: Outcome) -> Table:
    """The mean of all numbers in a method's row, once there are all."""
    rows = [["", "ours", "paper"]]
    for method, mean in _glue_averages(outcome).items():
        rows.append([method.upper(), _mean(mean, 2), _printed(paper.GLUE_AVERAGE[method])])
    return Table(f"GLUE, the mean of all numbers ({outcome.plan.recipe.source})", rows)


def _glue_averages(outcome: Outcome) -> dict[str, Mean]:
    found = {}
    for method in dict.fromkeys(cell.config.method for cell in outcome.plan.recipe.cells):
        cells = [cell for cell in outcome.plan.recipe.cells if cell.config.method == method]
        means = [mean for cell in cells for mean in ours(outcome, cell)]
        error = math.sqrt(math.fsum(m.error**2 for m in means)) / len(means)
        found[method] = Mean(math.fsum(m.value for m in means) / len(means), error, min(m.runs for m in means))
    return found


def _minutes(outcome: Outcome) -> list[Table]:
    found = []
    for column, cells in _by_column(outcome):
        means = {c.row: mean_of([r["seconds"] / 60 for r in outcome.results(c)]) for c in cells}
        rows = [["", "ours: minutes", "paper: minutes", "ours: times ERM", "paper: times ERM", "runs"]]
        for cell in cells:
            mean, base = means[cell.row], means.get("ERM", mean_of([]))
            ratio = _mean(Mean(mean.value / base.value, math.nan, 1), 2) if base.runs and mean.runs else NOT_RUN
            rows.append(
                [
                    cell.row,
                    _mean(mean, 2),
                    _printed(cell.paper),
                    ratio,
                    f"{cell.paper[0].value / paper.MINUTES[column]['erm'][0].value:.2f}",
                    _runs(outcome, cell),
                ]
            )
        found.append(Table(_title(outcome, column), rows))
    return found


def _curves(outcome: Outcome) -> list[Table]:
    found = []
    for column, cells in _by_column(outcome):
        shares = [f"ours: at {100 * share:g}%" for share in SHARES]
        rows = [["test accuracy ×100", *shares, "ours: at best validation", "paper: at the end", "runs"]]
        for cell in cells:
            means = [_mean(mean, 2) for mean in (*_along(outcome, cell), _at_best(outcome, cell))]
            rows.append([cell.row, *means, _printed(cell.paper), _runs(outcome, cell)])
            if cell.stopped_early:
                known = _printed(cell.stopped_early)
                rows.append([f"{cell.row}, stopped early", *[""] * len(SHARES), means[-1], known, ""])
        found.append(Table(_title(outcome, column), rows))
    return found


def _along(outcome: Outcome, cell: Cell) -> list[Mean]:
    """Our test accuracy in percent at each of the shares of training."""
    lines = [rows for record in outcome.records(cell) if (rows := record.metrics()[0])]
    return [mean_of([100 * _at(line, share) for line in lines]) for share in SHARES]


def _at(rows: Sequence[dict[str, Any]], share: float) -> float:
    """The test accuracy when that share of a run was over: at the last epoch that had ended, NaN before the first."""
    last = share * rows[-1]["epoch"]
    return next((float(row["test_accuracy"]) for row in reversed(rows) if row["epoch"] <= last + 1e-9), math.nan)


def _at_best(outcome: Outcome, cell: Cell) -> Mean:
    """Our test accuracy in percent where the validation split was best."""
    return mean_of([100 * r.get("score_at_best_validation", math.nan) for r in outcome.results(cell)])


# ------------------------------------------------------------------------------------------------- measured


def _losses(outcome: Outcome) -> list[Table]:
    found = []
    for split in ("train", "test"):
        objectives = list(paper.LOSSES[split])
        rows = [["trained by", *(f"{o}: {who}" for o in objectives for who in ("ours", "paper")), "runs"]]
        for cell in outcome.plan.recipe.cells:
            row, method = [cell.row], cell.config.method
            for objective in objectives:
                mean = _measured(outcome, method, split, objective)
                row += [_mean(mean, 4), _printed(paper.LOSSES[split][objective][method])]
            rows.append([*row, _runs(outcome, cell)])
        found.append(Table(f"{split} losses under the objectives of ERM, SAM and TSAM ({_source(outcome)})", rows))
    return found


def _neighborhood(outcome: Outcome) -> list[Table]:
    stds: list[float] = next((n["std"] for seed in outcome.measured for n in seed.values()), [])
    cells = outcome.plan.recipe.cells
    found = []
    for what in ("mean", "variance"):
        rows = [["std of the noise", *(f"{cell.row}: ours" for cell in cells)]]
        for k, std in enumerate(stds):
            means = [_measured(outcome, cell.config.method, what, k) for cell in cells]
            rows.append([f"{std:g}", *(number_cell(m, None).text if m.runs else NOT_RUN for m in means)])
        rows.append(["runs", *(_runs(outcome, cell) for cell in cells)])
        title = f"{what} of the training loss around the minimum ({_source(outcome)}: a figure, no numbers printed)"
        found.append(Table(title, rows))
    return found


def _eigenvalues(outcome: Outcome) -> list[Table]:
    cells = outcome.plan.recipe.cells
    rows = [["", *(f"{cell.row}: {who}" for cell in cells for who in ("ours", "paper"))]]
    for k in range(5):
        row = [f"λ{k + 1}"]
        for cell in cells:
            row += [
                _mean(_measured(outcome, cell.config.method, "values", k), 2),
                _printed(cell.paper[k : k + 1]),
            ]
        rows.append(row)
    rows.append(["runs", *(text for cell in cells for text in (_runs(outcome, cell), ""))])
    return [Table(f"largest eigenvalues of the Hessian of the training loss ({_source(outcome)})", rows)]


def _measured(outcome: Outcome, method: str, *path: str | int) -> Mean:
    """A measured number, over seeds."""
    values = []
    for seed in outcome.measured:
        found: Any = seed.get(method)
        for key in path:
            if isinstance(found, list):
                found = found[key] if isinstance(key, int) and key < len(found) else None
            elif isinstance(found, dict):
                found = found[key]
        if found is not None:
            values.append(float(found))
    return mean_of(values)


_KINDS: dict[str, Callable[[Outcome], list[Table]]] = {
    "scores": _scores,
    "minutes": _minutes,
    "curves": _curves,
    "losses": _losses,
    "neighborhood": _neighborhood,
    "eigenvalues": _eigenvalues,
}


# ------------------------------------------------------------------------------------------------- writing


def _by_column(outcome: Outcome) -> list[tuple[str, list[Cell]]]:
    recipe = outcome.plan.recipe
    return [(column, [cell for cell in recipe.cells if cell.column == column]) for column in recipe.columns]


def _source(outcome: Outcome) -> str:
    return outcome.plan.recipe.source


def _title(outcome: Outcome, column: str) -> str:
    return f"{COLUMNS[column].title} ({_source(outcome)})"


def _mean(mean: Mean, digits: int, *, spread: bool = True) -> str:
    if not mean.runs:
        return NOT_RUN
    if math.isnan(mean.value):
        return NO_NUMBER  # there was no validation split, or nothing was evaluated by then
    error = f" ± {mean.error:.{digits}f}" if spread and math.isfinite(mean.error) else ""
    return f"{mean.value:.{digits}f}{error}"


def _printed(numbers: Sequence[Number]) -> str:
    if not numbers:
        return NO_NUMBER
    return " / ".join(f"{n.value:.{n.digits}f}" + ("" if n.error is None else f" ({n.error:g})") for n in numbers)


def _runs(outcome: Outcome, cell: Cell) -> str:
    """How many seeds came to a number, where not all did."""
    configs = outcome.plan.configs(cell)
    if outcome.plan.recipe.kind in MEASURED:
        done = sum(cell.config.method in seed for seed in outcome.measured)
    else:
        done = len(outcome.results(cell))
    lost = sum(config in outcome.diverged for config in configs)
    told = f"{done}" if done == len(configs) else f"{done} of {len(configs)}"
    return told + (f", {lost} diverged" if lost else "")


def write_json(outcome: Outcome, path: Path) -> None:
    """Everything that the tables show, as numbers: ours, the paper's with their source, and what was changed."""
    plan = outcome.plan
    recipe = plan.recipe
    cells = []
    for cell in recipe.cells:
        results = outcome.results(cell)
        more: dict[str, Any] = {}
        if recipe.kind == "curves":
            along = zip(SHARES, _along(outcome, cell), strict=True)
            more["along"] = {f"{share:g}": mean._asdict() for share, mean in along}
            more["at_best_validation"] = _at_best(outcome, cell)._asdict()
            more["stopped_early"] = [asdict(number) for number in cell.stopped_early]
        if recipe.kind == "losses":
            more["paper_losses"] = {
                split: {objective: by[cell.config.method][0].value for objective, by in table.items()}
                for split, table in paper.LOSSES.items()
            }
        cells.append(
            {
                "column": cell.column,
                "row": cell.row,
                "config": asdict(plan.configs(cell)[0]),
                "runs": [str(record.folder) for record in outcome.records(cell)],
                "ours": {m: mean._asdict() for m, mean in zip(metrics_of(cell), ours(outcome, cell), strict=True)},
                "passes": mean_of([r["passes"] for r in results])._asdict(),
                "minutes": mean_of([r["seconds"] / 60 for r in results])._asdict(),
                "paper": [asdict(number) for number in cell.paper],
                **more,
            }
        )
    content = {
        "tiltsam": tiltsam.__version__,
        "recipe": recipe.name,
        "source": recipe.source,
        "scale": plan.scale,
        "seeds": plan.seeds,
        "changes": plan.changes(),
        "data": outcome.data,
        "not_run": outcome.problems,
        "not_measured": outcome.unmeasured,
        "cells": cells,
        "measured": outcome.measured,
    }
    if recipe.name == "glue":
        content["average"] = {
            method: {"ours": mean._asdict(), "paper": asdict(paper.GLUE_AVERAGE[method][0])}
            for method, mean in _glue_averages(outcome).items()
        }
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, _finite(content))


def _finite(x: Any) -> Any:
    """The same with null for what is no number, which JSON has no word for."""
    if isinstance(x, dict):
        return {key: _finite(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x
