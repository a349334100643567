"""From folders of runs to a report: the page, and its tables and figures as files for a paper."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

from tiltsam.lab.files import drafted
from tiltsam.lab.report.drawing import draw
from tiltsam.lab.report.figures import Figure, flatness_figures, task_figures
from tiltsam.lab.report.page import Chapter, files_of, render
from tiltsam.lab.report.runs import Problem, read_runs
from tiltsam.lab.report.settings import Task, arrange
from tiltsam.lab.report.tables import Table, comparable, flatness_table, overview_table, results_table, runs_table
from tiltsam.lab.report.writing import latex_table, markdown_table

__all__ = ["Report", "write_report"]


@dataclass(frozen=True)
class Report:
    """What was written."""

    page: Path
    tables: list[Path]
    figures: list[Path]
    problems: list[Problem]
    """What is missing or damaged, the same as on the page."""
    no_figures: str
    """Why there are no figures beside the page, if there are none."""
    removed: list[Path]
    """Files of the report that was there before, which this one does not have."""


def write_report(folders: Sequence[Path], out: Path, *, figures: bool = True, now: datetime | None = None) -> Report:
    """Write ``OUT/report.html``, ``OUT/tables/*.md|tex`` and ``OUT/figures/*.png|pdf`` from the runs in the folders.

    Files of an earlier report in ``OUT`` that this one does not have, of a task or figure that is no more, are removed.

    Args:
        folders: Runs, or folders that hold some.
        out: Where to write; made if need be.
        figures: Whether to write figures beside the page. The page has its own.
        now: The time to put on the page; by default the present.

    Raises:
        RecordError: If a folder holds no run.
    """
    reading = read_runs(folders)
    tasks = arrange(reading)
    chapters = [_chapter(task) for task in tasks]
    overview = overview_table(tasks) if len(tasks) > 1 else None
    homeless = [problem for problem in reading.problems if not problem.task]
    reason = "" if figures else "not asked for"
    if figures and find_spec("matplotlib") is None:
        reason = "matplotlib is not there: pip install '.[plots]'"
    tables = {} if overview is None else {overview.name: overview}
    drawings: dict[str, Figure] = {}
    for chapter, stem in zip(chapters, _stems(tasks), strict=True):
        found = filter(None, [chapter.results, chapter.flatness, chapter.runs])
        tables |= {f"{stem}{table.name}": table for table in found}
        if not reason:
            drawings |= {f"{stem}{figure.name}": figure for figure in [*chapter.figures, *chapter.flatness_figures]}
    names = [f"tables/{name}.{kind}" for name in tables for kind in ("md", "tex")]
    names += [f"figures/{name}.{kind}" for name in drawings for kind in ("png", "pdf")]

    out.mkdir(parents=True, exist_ok=True)
    page = out / "report.html"
    before = files_of(page)
    _write(page, render(chapters, overview, homeless, datetime.now() if now is None else now, names))
    removed = _remove(out, before - set(names))
    written = [path for name, table in tables.items() for path in _write_table(table, out / "tables" / name)]
    drawn: list[Path] = []
    for name, figure in drawings.items():
        (out / "figures").mkdir(exist_ok=True)
        drawn += draw(figure, out / "figures" / name)
    problems = [*homeless, *(problem for chapter in chapters for problem in chapter.problems)]
    return Report(page, written, drawn, problems, reason, removed)


def _remove(out: Path, names: Collection[str]) -> list[Path]:
    """Remove these files, as far as they are there; nothing but tables and figures, whatever the names say."""
    there = [path for folder in ("tables", "figures") for path in sorted((out / folder).glob("*"))]
    gone = [path for path in there if path.relative_to(out).as_posix() in names]
    for path in gone:
        path.unlink(missing_ok=True)
    return gone


def _chapter(task: Task) -> Chapter:
    measured, problems = comparable(task)
    return Chapter(
        task,
        results_table(task),
        runs_table(task),
        task_figures(task),
        flatness_table(measured, task) if measured else None,
        flatness_figures(measured, task) if measured else [],
        [*task.problems, *problems],
    )


def _write_table(table: Table, stem: Path) -> list[Path]:
    stem.parent.mkdir(exist_ok=True)
    written = []
    for kind, text in (("md", markdown_table(table)), ("tex", latex_table(table))):
        written.append(stem.with_name(f"{stem.name}.{kind}"))
        _write(written[-1], text)
    return written


def _write(path: Path, text: str) -> None:
    """Whole or not at all: two that compare on one folder may end at the same moment."""
    with drafted(path) as draft:
        draft.write_bytes(text.encode("utf-8", "replace"))  # half a surrogate pair in a record must not stop a report


def _stems(tasks: Sequence[Task]) -> list[str]:
    """How the files of each task begin: with its name where there are several, made fit for a file."""
    if len(tasks) == 1:
        return [""]
    stems: list[str] = []
    for task in tasks:
        safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in task.name).strip("-.")[:60] or "task"
        stem = f"{safe}-"
        while stem in stems:
            stem = f"{stem}again-"
        stems.append(stem)
    return stems
