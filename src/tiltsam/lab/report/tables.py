"""The tables of a report: what stands in each cell. How a table is written is the business of :mod:`.writing`."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tiltsam.lab.records import is_number
from tiltsam.lab.report.runs import Problem, Run
from tiltsam.lab.report.settings import Setting, Task
from tiltsam.lab.stats import Mean, best_of, format_mean, mean_of

__all__ = ["Cell", "Table", "flatness_table", "number_cell", "overview_table", "results_table", "runs_table"]

MEANS = "mean ± standard error over seeds"
BOLD = "Bold: ahead of the next by more than the standard error of their difference."


@dataclass(frozen=True)
class Cell:
    """A cell: what it shows and what it sorts by."""

    text: str
    value: float | None = None
    """The number behind the text, in full."""
    error: float | None = None
    best: bool = False
    method: str = ""
    """The method whose colour goes with it."""


@dataclass(frozen=True)
class Table:
    """A table: a name for its files, headings, rows of cells."""

    name: str
    caption: str
    headings: list[str]
    rows: list[list[Cell]]
    numeric: list[bool]
    """Which columns are numbers, right-aligned."""


@dataclass(frozen=True)
class _Column:
    heading: str
    of: Callable[[Setting], Mean]
    digits: int | None = 2
    """After the point; None takes as many as the error leaves standing."""
    highest: bool | None = True
    """Whether more is better; None where neither is."""


def results_table(task: Task) -> Table:
    """One row per setting: the final numbers, mean ± standard error over seeds."""
    metric, unit = task.metric, task.unit
    columns = [
        _Column(f"test {metric} ({unit})", lambda s: s.final("score", 100)),
        _Column("at best validation", lambda s: s.final("score_at_best_validation", 100)),
        _Column("test loss", lambda s: s.final("test_loss"), 3, highest=False),
        _Column("train loss", lambda s: s.final("train_loss"), 3, highest=None),
        _Column("passes", lambda s: s.final("passes"), 0, highest=None),
        _Column("seconds", lambda s: s.final("seconds"), 1, highest=None),
    ]
    caption = f"{task.name}: numbers at the end of training, {MEANS}; losses in {task.loss_unit}. {BOLD}"
    table = _of_settings("results", caption, task.settings, columns)
    for row, setting in zip(table.rows, task.settings, strict=True):
        done, all_ = len(setting.finished), len(setting.runs)
        row.append(Cell(f"{done}" if done == all_ else f"{done} of {all_}", done))
    return replace(table, headings=[*table.headings, "runs"], numeric=[*table.numeric, True])


def overview_table(tasks: Sequence[Task]) -> Table:
    """Methods against tasks: of each method the setting that was best on the validation split."""
    methods = list(dict.fromkeys(s.method for task in tasks for s in task.settings))
    columns: list[list[Cell]] = []
    counts: list[int] = []
    for task in tasks:
        chosen = {s.method: s.final("score", 100) for s in task.chosen}
        means = [chosen.get(method, mean_of([])) for method in methods]
        counts += [mean.runs for mean in means]
        best = best_of(means)
        columns.append([number_cell(mean, 2, best=i == best) for i, mean in enumerate(means)])
    rows = [[Cell(method, method=method), *cells] for method, *cells in zip(methods, *columns, strict=True)]
    pick = max((task.pick for task in tasks), key=len)  # the longer one tells of what has no validation score, too
    caption = f"Test scores of {pick}, {MEANS}{_of_runs(counts)}. {BOLD}"
    if any(len(set(task.tried.values())) > 1 for task in tasks):
        caption += " Not all had as many settings to choose from."
    headings = ["method", *(f"{task.name}: {task.metric} ({task.unit})" for task in tasks)]
    return Table("overview", caption, headings, rows, [False, *(True for _ in tasks)])


def runs_table(task: Task) -> Table:
    """Every run as it is in its record."""
    with_notes = any(run.notes for run in task.runs)
    rows = []
    for setting in task.settings:
        for run in setting.runs:
            last = run.rows[-1] if run.rows else {}
            seed = float(run.seed) if isinstance(run.seed, int) else None
            cells = [
                Cell(setting.name, method=setting.method),
                Cell(str(run.seed), seed),
                number_cell(mean_of([100 * run.score] if run.finished else []), 2),
                number_cell(mean_of([last["epoch"]] if last else []), None),
                number_cell(mean_of([last["passes"]] if "passes" in last else []), 0),
                number_cell(mean_of([last["seconds"]] if "seconds" in last else []), 1),
                Cell(run.state),
                Cell(_machine(run)),
                Cell(str(run.folder)),
            ]
            rows.append(cells + ([Cell(run.notes)] if with_notes else []))
    headings = ["setting", "seed", f"test {task.metric} ({task.unit})", "epoch", "passes", "seconds", "state"]
    headings += ["machine", "folder", *(["notes"] if with_notes else [])]
    numeric = [False, True, True, True, True, True, False, False, False, *([False] if with_notes else [])]
    return Table("runs", f"{task.name}: every run.", headings, rows, numeric)


# -------------------------------------------------------------------------------- flatness


def comparable(task: Task) -> tuple[list[Setting], list[Problem]]:
    """Settings with those runs whose flatness was measured on the same examples, and a word about the others."""
    marks = Counter(_mark(run) for run in task.runs if run.flatness is not None and not _outdated(run))
    mark = marks.most_common(1)[0][0] if marks else ""
    problems, kept = [], []
    for setting in task.settings:
        runs = []
        for run in setting.runs:
            if run.flatness is None:
                continue
            if not _outdated(run) and _mark(run) == mark:
                runs.append(run)
                continue
            why = (
                "before training had finished: measure it again"
                if _outdated(run)
                else "on other examples than most runs"
            )
            problems.append(Problem(str(run.folder / "flatness.json"), f"left out: measured {why}", task.name))
        if marks and len(runs) < len(setting.runs):
            what = f"flatness measured of {len(runs)} of {len(setting.runs)} runs"
            problems.append(Problem(setting.name, what, task.name))
        if runs:
            kept.append(replace(setting, runs=runs))
    return kept, problems


def _outdated(run: Run) -> bool:
    """Whether its flatness is that of a checkpoint, and it has finished since."""
    return run.finished and _about(run).get("finished") is False


def measured(run: Run, *path: str) -> list[float]:
    """A list of numbers, or one number as a list, out of what was measured; NaN where there is none."""
    found: Any = run.flatness
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    entries = found if isinstance(found, list) and found else [found]
    return [float(x) if is_number(x) else math.nan for x in entries]


def flatness_table(settings: Sequence[Setting], task: Task, std: float = 0.01) -> Table:
    """How flat the minima are, mean ± standard error over seeds; lower is flatter."""

    def scalar(*path: str) -> Callable[[Setting], Mean]:
        return lambda s: mean_of([measured(run, *path)[0] for run in s.runs])

    def around(name: str) -> Callable[[Setting], Mean]:
        return lambda s: mean_of([_at(run, name, std) for run in s.runs])

    def rise(setting: Setting) -> Mean:
        return mean_of([_at(run, "mean", std) - measured(run, "loss")[0] for run in setting.runs])

    columns = [
        _Column("loss", scalar("loss"), None, highest=None),
        _Column(f"mean rise at {std:g}", rise, None, highest=False),
        _Column(f"variance at {std:g}", around("variance"), None, highest=False),
        _Column("worst case", scalar("worst_case", "value"), None, highest=False),
        _Column("adaptive", scalar("adaptive", "value"), None, highest=False),
        _Column("λ1", scalar("eigenvalues", "values"), None, highest=False),
        _Column("trace", scalar("trace", "value"), None, highest=False),
    ]
    columns = [c for c in columns if any(math.isfinite(c.of(s).value) for s in settings)]
    runs = [run for setting in settings for run in setting.runs]
    about = _about(runs[0])
    where = f"{about.get('examples', '?')} {about.get('split', '?')} examples of {about.get('task', '?')}"
    means = MEANS + _of_runs([len(setting.runs) for setting in settings])
    caption = (
        f"Flatness at the trained weights on {where}, {means}; losses in {task.loss_unit}. Mean rise and "
        f"variance: of the loss under noise of standard deviation {std:g} on every weight; worst cases: its largest "
        f"rise {_nearby(runs)}; λ1 and trace: of the Hessian. {BOLD}"
    )
    return _of_settings("flatness", caption, settings, columns)


def _at(run: Run, name: str, std: float) -> float:
    """A statistic of the neighbourhood at a noise level; NaN if that was not measured."""
    levels, values = measured(run, "neighborhood", "std"), measured(run, "neighborhood", name)
    return next((v for s, v in zip(levels, values, strict=False) if math.isclose(s, std)), math.nan)


def _about(run: Run) -> dict[str, Any]:
    """What a run's flatness was measured on, and how."""
    about = (run.flatness or {}).get("about")
    return about if isinstance(about, dict) else {}


def _mark(run: Run) -> str:
    """Which examples: more draws there, say, do not make them others."""
    about = _about(run)
    return json.dumps([about.get(key) for key in ("task", "split", "examples")])


def _nearby(runs: Sequence[Run]) -> str:
    """How far worst cases are looked for, as far as that is known."""
    found = [
        dict.fromkeys(f"{r:g}" for run in runs if isinstance(r := _about(run).get(key), (int, float)))
        for key in ("rho", "adaptive_rho")
    ]
    plain, adaptive = (" or ".join(radii) for radii in found)
    if not plain:
        return "nearby"
    return f"within a radius of {plain}" + (f" (adaptive: {adaptive})" if adaptive else "")


# -------------------------------------------------------------------------------- cells


def _of_settings(name: str, caption: str, settings: Sequence[Setting], columns: Sequence[_Column]) -> Table:
    """A row per setting: its method, what tells it apart, and the columns."""
    differ = any(setting.differs for setting in settings)
    rows = [[Cell(s.method, method=s.method)] + ([Cell(s.told)] if differ else []) for s in settings]
    for column in columns:
        means = [column.of(setting) for setting in settings]
        best = None if column.highest is None else best_of(means, highest=column.highest)
        for i, (row, mean) in enumerate(zip(rows, means, strict=True)):
            row.append(number_cell(mean, column.digits, best=i == best))
    headings = ["method", *(["settings"] if differ else []), *(column.heading for column in columns)]
    return Table(name, caption, headings, rows, [False, *([False] if differ else []), *(True for _ in columns)])


def _of_runs(counts: Sequence[int]) -> str:
    """Of how many runs the means of a table are, which has no column that tells."""
    some = [count for count in counts if count]
    if not some:
        return ""
    few, most = min(some), max(some)
    told = f"{few} to {most} runs" if few < most else "1 run" if most == 1 else f"{most} runs"
    return f", of {told} each"


def number_cell(mean: Mean, digits: int | None, *, best: bool = False) -> Cell:
    """Return a cell that shows a mean; see :func:`tiltsam.lab.stats.format_mean`."""
    if not math.isfinite(mean.value):
        return Cell(format_mean(mean))
    return Cell(format_mean(mean, digits), mean.value, mean.error if math.isfinite(mean.error) else None, best)


def _machine(run: Run) -> str:
    environment = run.environment
    parts = [environment.get("gpu") or environment.get("device"), environment.get("torch")]
    return ", torch ".join(str(part) for part in parts if part)
