"""Reading runs for a report: whatever can be read, and a list of what cannot, each by its file and line.

A report is often wanted of runs that are not finished or that went wrong, so nothing here stops at the first mistake,
and nothing is dropped without a word. Only numbers and the few texts that a report shows leave this file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiltsam.lab.files import parse_json
from tiltsam.lab.records import check_result, is_number, read_metrics
from tiltsam.lab.sweeping.results import find_run_folders, tested_runs

__all__ = ["Problem", "Reading", "Run", "read_runs"]

Row = dict[str, float]
"""A line of metrics: its numbers by name."""


@dataclass(frozen=True)
class Problem:
    """Something that a reader of the report must know: what is wrong, and where."""

    where: str
    """A file, with its line where there is one, or a run."""
    what: str
    task: str = ""
    """The task it belongs to; empty if that cannot be told."""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True)
class Run:
    """One run as it was found."""

    folder: Path
    config: dict[str, Any]
    rows: list[Row]
    """Lines of metrics by epoch, without those of an attempt that was killed and begun again."""
    result: Row | None
    """The final numbers; None while there are none."""
    metric: str
    """What counts on the task, ``accuracy`` for example; empty as long as no line tells."""
    environment: dict[str, Any] = field(default_factory=dict)
    flatness: dict[str, Any] | None = None
    """What ``tiltsam sharpness`` measured."""
    diverged: str = ""
    """Why training could not go on; empty if it can."""
    notes: str = ""
    """What somebody wrote about it, in ``notes.txt``."""

    @property
    def task(self) -> str:
        """What was learnt."""
        return str(self.config.get("task", "?"))

    @property
    def method(self) -> str:
        """How."""
        return str(self.config.get("method", "?"))

    @property
    def seed(self) -> Any:
        """The seed, a number unless the config is odd."""
        return self.config.get("seed", "?")

    @property
    def finished(self) -> bool:
        """Whether it has its final numbers."""
        return self.result is not None

    @property
    def score(self) -> float:
        """The final test score; NaN while there is none."""
        return math.nan if self.result is None else self.result.get("score", math.nan)

    @property
    def state(self) -> str:
        """Whether it has finished, in a word or two."""
        return "finished" if self.finished else "diverged" if self.diverged else "not finished"

    def reached(self) -> str:
        """How far it is, in words."""
        epochs = self.config.get("epochs")
        of = f" of {epochs:g}" if is_number(epochs) else ""
        return f"epoch {self.rows[-1]['epoch']:g}{of}" if self.rows else f"no epoch{of} finished"


@dataclass(frozen=True)
class Reading:
    """What was found below some folders."""

    runs: list[Run]
    problems: list[Problem]


def read_runs(folders: Sequence[Path]) -> Reading:
    """Read every run in the folders and below them; a run that is reached twice counts once.

    Raises:
        RecordError: If a folder holds no run at all.
    """
    runs: list[Run] = []
    problems: list[Problem] = []
    for place in find_run_folders(folders):
        config = _read_object(place / "config.json", problems)
        if config is None:
            continue
        task = str(config.get("task", "?"))
        own: list[Problem] = []
        rows, metric = _read_metrics(place / "metrics.jsonl", own)
        result = _read_result(place / "result.json", own) if (place / "result.json").exists() else None
        if result is not None:
            metric = result["metric"]
        environment = place / "environment.json"
        flatness = place / "flatness.json"
        runs.append(
            Run(
                folder=place,
                config=config,
                rows=rows,
                result=None if result is None else _numbers(result),
                metric=metric,
                environment=(_read_object(environment, own) or {}) if environment.exists() else {},
                flatness=_read_object(flatness, own) if flatness.exists() else None,
                diverged=_read_text(place / "diverged.txt", own),
                notes=_read_text(place / "notes.txt", own),
            )
        )
        problems += [Problem(p.where, p.what, task) for p in own]
    problems += [problem for folder in folders if (folder / "sweep.json").exists() for problem in _not_here(folder)]
    return _without_twins(runs, problems)


def _not_here(sweep: Path) -> list[Problem]:
    """Tests of a sweep without a record: they have not begun, or are on another machine."""
    tests = tested_runs(sweep).items()
    gone = [told for run, told in tests if not (run / "config.json").exists()]
    return [Problem(name, f"no record here; by sweep.json it is {state}") for name, state in gone]


def _read_object(path: Path, problems: list[Problem]) -> dict[str, Any] | None:
    """A JSON object, or None and a problem."""
    try:
        content = parse_json(path.read_bytes())
    except OSError as error:
        problems.append(Problem(str(path), f"cannot be read ({error.strerror})"))
    except ValueError as error:  # no JSON, no UTF-8
        problems.append(Problem(str(path), f"damaged: {error}"))
    else:
        if isinstance(content, dict):
            return content
        problems.append(Problem(str(path), "damaged: not a JSON object"))
    return None


def _read_result(path: Path, problems: list[Problem]) -> dict[str, Any] | None:
    """The final numbers, or None and a problem."""
    found = _read_object(path, problems)
    try:
        return None if found is None else check_result(found)
    except ValueError as error:
        problems.append(Problem(str(path), f"damaged: {error}"))
        return None


def _read_metrics(path: Path, problems: list[Problem]) -> tuple[list[Row], str]:
    """The lines by epoch, and the metric that counts: the first of the test's. A damaged line becomes a problem."""
    try:
        found, damaged = read_metrics(path)
    except OSError as error:
        problems.append(Problem(str(path), f"cannot be read ({error.strerror})"))
        return [], ""
    for number, what in damaged.items():
        problems.append(Problem(f"{path}, line {number}", f"damaged, left out: {what}"))
    rows = [_numbers(row) for row in found]
    tested = (k[len("test_") :] for row in rows for k in row if k.startswith("test_") and k != "test_loss")
    return rows, next(tested, "")


def _read_text(path: Path, problems: list[Problem]) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() if path.exists() else ""
    except OSError as error:
        problems.append(Problem(str(path), f"cannot be read ({error.strerror})"))
        return ""


def _without_twins(runs: list[Run], problems: list[Problem]) -> Reading:
    """Of several records of one config and seed, which would count twice in a mean, keep one: a finished one first."""
    kept: dict[str, Run] = {}
    problems = list(problems)
    for run in sorted(runs, key=lambda r: not r.finished):
        same = {k: v for k, v in run.config.items() if k != "device"}
        first = kept.setdefault(json.dumps(same, sort_keys=True), run)
        if first is not run:
            what = f"left out: the same config and seed as {first.folder}"
            problems.append(Problem(str(run.folder), what, run.task))
    chosen = {id(run) for run in kept.values()}
    return Reading([run for run in runs if id(run) in chosen], problems)


def _numbers(row: dict[str, Any]) -> Row:
    return {k: float(v) for k, v in row.items() if is_number(v)}
