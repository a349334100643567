"""Our numbers next to the paper's: the tables of a recipe, on the screen and as JSON."""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import tiltsam
from tiltsam.lab import files
from tiltsam.lab.console import print_table
from tiltsam.lab.data import GLUE
from tiltsam.lab.paper import numbers
from tiltsam.lab.paper.numbers import PaperNumber
from tiltsam.lab.paper.recipes import RecipeCell
from tiltsam.lab.paper.reproduce import Reproduction, ReproductionPlan
from tiltsam.lab.paper.settings import COLUMNS
from tiltsam.lab.stats import Mean, count_of, format_mean, mean_of

__all__ = ["comparison_tables", "our_scores", "print_header", "print_results", "write_numbers"]

NOT_RUN = "not run"
NO_NUMBER = "–"  # only a figure of the paper shows it, or we have none
FRACTIONS = (0.25, 0.5, 0.75, 1.0)  # of a run, at which curves are compared


Tables: TypeAlias = dict[str, list[list[str]]]
"""Rows of our numbers and the paper's, headings first, by the title of the table."""


def comparison_tables(reproduction: Reproduction) -> Tables:
    """Return the tables of a recipe."""
    return _KINDS[reproduction.plan.recipe.kind](reproduction)


def our_scores(reproduction: Reproduction, cell: RecipeCell) -> list[Mean]:
    """Return the final test scores of a cell's finished runs in percent, one mean per metric."""
    results = reproduction.results(cell)
    return [mean_of([100 * result[f"test_{metric}"] for result in results]) for metric in _metrics(cell)]


def _metrics(cell: RecipeCell) -> tuple[str, ...]:
    """Return as many metrics of the task as the paper prints, at least the first."""
    task = cell.config.task
    metrics = GLUE[task.removeprefix("glue/")].metrics if task.startswith("glue/") else ("accuracy",)
    return metrics[: max(1, len(cell.paper))]


# ------------------------------------------------------------------------------------------------- results of training


def _score_tables(reproduction: Reproduction) -> Tables:
    tables = {}
    for title, cells in _columns(reproduction):
        rows = [["", f"ours: test {' / '.join(_metrics(cells[0]))} ×100", "paper", "passes", "minutes", "runs"]]
        for cell in cells:
            scores = " / ".join(_ours(score, 2) for score in our_scores(reproduction, cell))
            passes = _ours(_passes(reproduction, cell), 0, error=False)
            minutes = _ours(_minutes(reproduction, cell), 1, error=False)
            rows.append([cell.row, scores, _paper(cell.paper), passes, minutes, _runs(reproduction, cell)])
        tables[title] = rows
    if reproduction.plan.recipe.name == "glue":
        rows = [["", "ours", "paper"]]
        for method, mean in _glue_averages(reproduction).items():
            rows.append([method.upper(), _ours(mean, 2), _paper(numbers.GLUE_AVERAGE[method])])
        tables[f"GLUE, mean of all numbers ({reproduction.plan.recipe.source})"] = rows
    return tables


def _glue_averages(reproduction: Reproduction) -> dict[str, Mean]:
    """Return the mean of all numbers in a method's row, by method; NaN until all of them exist."""
    averages = {}
    for method in dict.fromkeys(cell.method for cell in reproduction.plan.recipe.cells):
        cells = [cell for cell in reproduction.plan.recipe.cells if cell.method == method]
        means = [mean for cell in cells for mean in our_scores(reproduction, cell)]
        error = math.sqrt(math.fsum(mean.error**2 for mean in means)) / len(means)
        value = math.fsum(mean.value for mean in means) / len(means)
        averages[method] = Mean(value, error, min(mean.runs for mean in means))
    return averages


def _minute_tables(reproduction: Reproduction) -> Tables:
    tables = {}
    for title, cells in _columns(reproduction):
        means = {cell.row: _minutes(reproduction, cell) for cell in cells}
        erm, printed = means.get("ERM", mean_of([])), numbers.MINUTES[cells[0].column]["erm"][0].value
        rows = [["", "ours: minutes", "paper: minutes", "ours: times ERM", "paper: times ERM", "runs"]]
        for cell in cells:
            mean = means[cell.row]
            ratio = f"{mean.value / erm.value:.2f}" if erm.runs and mean.runs else NOT_RUN
            paper = _paper(cell.paper), f"{cell.paper[0].value / printed:.2f}"
            rows.append([cell.row, _ours(mean, 2), paper[0], ratio, paper[1], _runs(reproduction, cell)])
        tables[title] = rows
    return tables


def _curve_tables(reproduction: Reproduction) -> Tables:
    tables = {}
    for title, cells in _columns(reproduction):
        at = [f"ours: at {100 * fraction:g}%" for fraction in FRACTIONS]
        rows = [["test accuracy ×100", *at, "ours: at best validation", "paper: at the end", "runs"]]
        for cell in cells:
            means = [_ours(mean, 2) for mean in (*_curve(reproduction, cell), _at_best_validation(reproduction, cell))]
            rows.append([cell.row, *means, _paper(cell.paper), _runs(reproduction, cell)])
            if cell.stopped_early:
                early = _paper(cell.stopped_early)
                rows.append([f"{cell.row}, stopped early", *[""] * len(FRACTIONS), means[-1], early, ""])
        tables[title] = rows
    return tables


def _curve(reproduction: Reproduction, cell: RecipeCell) -> list[Mean]:
    """Return our test accuracy in percent at each of the fractions of training."""
    runs = [rows for record in reproduction.records(cell) if (rows := record.metrics())]
    return [mean_of([100 * _accuracy_at(rows, fraction) for rows in runs]) for fraction in FRACTIONS]


def _accuracy_at(rows: Sequence[dict[str, Any]], fraction: float) -> float:
    """Return the test accuracy after the last epoch that ended by then; NaN before the first."""
    last = fraction * rows[-1]["epoch"]
    return next((float(row["test_accuracy"]) for row in reversed(rows) if row["epoch"] <= last + 1e-9), math.nan)


def _at_best_validation(reproduction: Reproduction, cell: RecipeCell) -> Mean:
    return mean_of([100 * r.get("score_at_best_validation", math.nan) for r in reproduction.results(cell)])


def _passes(reproduction: Reproduction, cell: RecipeCell) -> Mean:
    return mean_of([result["passes"] for result in reproduction.results(cell)])


def _minutes(reproduction: Reproduction, cell: RecipeCell) -> Mean:
    return mean_of([result["seconds"] / 60 for result in reproduction.results(cell)])


# ------------------------------------------------------------------------------------------------- measurements


def _loss_tables(reproduction: Reproduction) -> Tables:
    tables = {}
    for split, by_objective in numbers.LOSSES.items():
        rows = [["trained by", *(f"{name}: {who}" for name in by_objective for who in ("ours", "paper")), "runs"]]
        for cell in reproduction.plan.recipe.cells:
            method, row = cell.method, [cell.row]
            for objective, printed in by_objective.items():
                row += [_ours(_measured(reproduction, method, split, objective), 4), _paper(printed[method])]
            rows.append([*row, _runs(reproduction, cell)])
        title = f"{split} losses under the objectives of ERM, SAM and TSAM ({reproduction.plan.recipe.source})"
        tables[title] = rows
    return tables


def _neighborhood_tables(reproduction: Reproduction) -> Tables:
    recipe = reproduction.plan.recipe
    stds: list[float] = next((n["std"] for seed in reproduction.measured for n in seed.values()), [])
    tables = {}
    for statistic in ("mean", "variance"):
        rows = [["std of the noise", *(f"{cell.row}: ours" for cell in recipe.cells)]]
        for k, std in enumerate(stds):
            means = [_measured(reproduction, cell.method, statistic, k) for cell in recipe.cells]
            rows.append([f"{std:g}", *(_ours(mean, None) for mean in means)])
        rows.append(["runs", *(_runs(reproduction, cell) for cell in recipe.cells)])
        title = f"{statistic} of the training loss around the minimum ({recipe.source}: a figure without numbers)"
        tables[title] = rows
    return tables


def _eigenvalue_tables(reproduction: Reproduction) -> Tables:
    cells = reproduction.plan.recipe.cells
    rows = [["", *(f"{cell.row}: {who}" for cell in cells for who in ("ours", "paper"))]]
    for k in range(5):
        row = [f"λ{k + 1}"]
        for cell in cells:
            row += [_ours(_measured(reproduction, cell.method, "values", k), 2), _paper(cell.paper[k : k + 1])]
        rows.append(row)
    rows.append(["runs", *(text for cell in cells for text in (_runs(reproduction, cell), ""))])
    return {f"largest eigenvalues of the Hessian of the training loss ({reproduction.plan.recipe.source})": rows}


def _measured(reproduction: Reproduction, method: str, first: str, second: str | int) -> Mean:
    """Return the mean over seeds of one measured number; a short list has none at a late index."""
    values = []
    for seed in reproduction.measured:
        group: Any = seed[method][first] if method in seed else []
        if isinstance(second, str):
            values += [group[second]] if group else []
        else:
            values += group[second : second + 1]
    return mean_of([float(value) for value in values])


_KINDS: dict[str, Callable[[Reproduction], Tables]] = {
    "scores": _score_tables,
    "minutes": _minute_tables,
    "curves": _curve_tables,
    "losses": _loss_tables,
    "neighborhood": _neighborhood_tables,
    "eigenvalues": _eigenvalue_tables,
}


# ------------------------------------------------------------------------------------------------- text


def _columns(reproduction: Reproduction) -> list[tuple[str, list[RecipeCell]]]:
    """Return the cells of each column, with the title of its table."""
    recipe = reproduction.plan.recipe
    cells = {column: [cell for cell in recipe.cells if cell.column == column] for column in recipe.columns}
    return [(f"{COLUMNS[column].title} ({recipe.source})", own) for column, own in cells.items()]


def _ours(mean: Mean, digits: int | None, *, error: bool = True) -> str:
    return format_mean(mean if error else mean._replace(error=math.nan), digits) if mean.runs else NOT_RUN


def _paper(printed: Sequence[PaperNumber]) -> str:
    if not printed:
        return NO_NUMBER
    return " / ".join(f"{n.value:.{n.digits}f}" + ("" if n.error is None else f" ({n.error:g})") for n in printed)


def _runs(reproduction: Reproduction, cell: RecipeCell) -> str:
    """Return how many seeds have a number, and how many failed."""
    configs = reproduction.plan.configs(cell)
    if reproduction.plan.recipe.measured:
        done = sum(cell.method in seed for seed in reproduction.measured)
    else:
        done = len(reproduction.results(cell))
    failed = sum(config in reproduction.failed for config in configs)
    text = f"{done}" if done == len(configs) else f"{done} of {len(configs)}"
    return text + (f", {failed} failed" if failed else "")


# ------------------------------------------------------------------------------------------------- output


def print_header(plan: ReproductionPlan) -> None:
    """Print what is run, what the paper leaves open, and how the plan deviates from the recipe."""
    recipe = plan.recipe
    print(f"{recipe.name} ({recipe.source}): {recipe.description[0]}")
    for paragraph in recipe.description[1:]:
        print(textwrap.fill(paragraph, 120))
    print("The paper does not state all settings, such as learning rates: docs/reproduce.md lists those chosen here.")
    for line in plan.deviations():
        print(line)
    sys.stdout.flush()


def print_results(reproduction: Reproduction) -> None:
    """Print the tables, then every deviation from the paper."""
    plan = reproduction.plan
    for title, rows in comparison_tables(reproduction).items():
        print_table(title, rows)
    ours = count_of(plan.seeds, "seed") + (", mean ± standard error" if plan.seeds > 1 else "")
    print(f"\nours: {ours}; paper: printed error in parentheses; {NO_NUMBER}: no number")
    for line in plan.deviations():
        print(line)
    for column, difference in reproduction.data_differences.items():
        print(f"{column}: {difference}")
    for column, reason in reproduction.missing.items():
        print(f"{column} was not run: {reason}")
    for seed, reason in reproduction.unmeasured.items():
        print(f"seed {seed} was not measured: {reason}")


def write_numbers(reproduction: Reproduction, path: Path) -> None:
    """Write everything that the tables show as JSON: our numbers, the paper's with their source, and the deviations."""
    plan, recipe = reproduction.plan, reproduction.plan.recipe
    cells = []
    for cell in recipe.cells:
        more: dict[str, Any] = {}
        if recipe.kind == "curves":
            curve = zip(FRACTIONS, _curve(reproduction, cell), strict=True)
            more["along"] = {f"{fraction:g}": mean._asdict() for fraction, mean in curve}
            more["at_best_validation"] = _at_best_validation(reproduction, cell)._asdict()
            more["stopped_early"] = [asdict(number) for number in cell.stopped_early]
        if recipe.kind == "losses":
            more["paper_losses"] = {
                split: {objective: by[cell.method][0].value for objective, by in table.items()}
                for split, table in numbers.LOSSES.items()
            }
        scores = zip(_metrics(cell), our_scores(reproduction, cell), strict=True)
        cells.append(
            {
                "column": cell.column,
                "row": cell.row,
                "config": plan.configs(cell)[0].to_json(),
                "runs": [str(record.folder) for record in reproduction.records(cell)],
                "ours": {metric: mean._asdict() for metric, mean in scores},
                "passes": _passes(reproduction, cell)._asdict(),
                "minutes": _minutes(reproduction, cell)._asdict(),
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
        "changes": plan.deviations(),
        "data": reproduction.data_differences,
        "not_run": reproduction.missing,
        "not_measured": reproduction.unmeasured,
        "cells": cells,
        "measured": reproduction.measured,
    }
    if recipe.name == "glue":
        content["average"] = {
            method: {"ours": mean._asdict(), "paper": asdict(numbers.GLUE_AVERAGE[method][0])}
            for method, mean in _glue_averages(reproduction).items()
        }
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, files.finite_json(content))
