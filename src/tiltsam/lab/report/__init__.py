"""Write reports about runs: an HTML page, tables as Markdown and LaTeX, figures as PNG and PDF.

runs       read the records
summary    group them by task and setting, average over seeds
tables     the tables, and their Markdown and LaTeX
plots      the plots, and their data for the page
figures    the plots as PNG and PDF files
page       the HTML page, with its style and scripts in assets/
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

from tiltsam.lab.files import drafted
from tiltsam.lab.report.figures import draw_figure
from tiltsam.lab.report.page import TaskSection, headline, render_page
from tiltsam.lab.report.plots import Plot, flatness_plots, task_plots
from tiltsam.lab.report.runs import RunProblem, read_runs
from tiltsam.lab.report.summary import TaskSummary, summarize
from tiltsam.lab.report.tables import (
    ReportTable,
    comparable_flatness,
    examples_table,
    flatness_table,
    latex_table,
    markdown_table,
    methods_table,
    overview_table,
    results_table,
    runs_table,
)

__all__ = ["Report", "write_report"]

MAX_PRINTED = 8  # problems that a command prints


@dataclass(frozen=True)
class Report:
    """The files of a report."""

    page: Path
    sections: list[TaskSection]
    """What the page shows about each task."""
    tables: list[Path]
    figures: list[Path]
    problems: list[RunProblem]
    """What is missing or damaged; the page lists it, too."""
    no_figures: str
    """Why requested figure files are missing; empty if they are not."""
    summary: str
    """The first sentences of the page, a line per task."""

    def message(self) -> str:
        """Return what a command prints: the first problems, and the path of the page."""
        lines = [str(problem) for problem in self.problems[:MAX_PRINTED]]
        if len(self.problems) > MAX_PRINTED:
            lines.append(f"and {len(self.problems) - MAX_PRINTED} more, listed on the page")
        if self.no_figures:
            lines.append(f"no figure files: {self.no_figures}")
        return "\n".join([*lines, f"report: {self.page}"])


def write_report(
    folders: Sequence[Path],
    out: Path,
    *,
    figures: bool = True,
    compare_settings: bool = False,
    trials: bool = False,
) -> Report:
    """Write ``OUT/report.html``, ``OUT/tables/*.md|tex`` and ``OUT/figures/*.png|pdf`` about the runs in the folders.

    Existing files with these names are overwritten; other files in ``OUT`` are left alone.

    Args:
        folders: Folders of runs, or folders that contain some.
        out: Folder to write to; created if necessary.
        figures: Whether to write figure files. The page draws its own plots.
        compare_settings: Whether the first sentence compares all settings. By default it does if they are the entries
            of comparisons and sweeps; else it compares the best setting of each method on validation.
        trials: Whether to include the trials of sweeps. By default only the runs that tested their choices are, unless
            a folder contains no other runs.

    Raises:
        RecordError: If a folder contains no run.
    """
    runs, problems, notes = read_runs(folders, trials=trials)
    tasks = summarize(runs, problems, notes)
    if compare_settings:
        tasks = [replace(task, compare_settings=True) for task in tasks]
    sections = [_section(task) for task in tasks]
    overview = overview_table(tasks) if len(tasks) > 1 else None
    other_problems = [problem for problem in problems if problem.group is None]
    no_figures = ""
    if figures and find_spec("matplotlib") is None:
        no_figures = "matplotlib is not installed: pip install '.[plots]'"

    out.mkdir(parents=True, exist_ok=True)
    page = out / "report.html"
    _write_text(page, render_page(sections, overview, other_problems, datetime.now()))
    tables: dict[str, ReportTable] = {} if overview is None else {overview.name: overview}
    plots: dict[str, Plot] = {}
    for section, prefix in zip(sections, _file_prefixes(tasks), strict=True):
        tables |= {f"{prefix}{table.name}": table for table in section.tables}
        plots |= {f"{prefix}{plot.name}": plot for plot in [*section.plots, *section.flatness_plots]}
    return Report(
        page=page,
        sections=sections,
        tables=[path for name, table in tables.items() for path in _write_table(table, out / "tables" / name)],
        figures=_write_figures(plots, out / "figures") if figures and not no_figures else [],
        problems=[*other_problems, *(problem for section in sections for problem in section.problems)],
        no_figures=no_figures,
        summary="\n".join(f"{s.task.name}: {s.headline}" if len(tasks) > 1 else s.headline for s in sections),
    )


def _section(task: TaskSummary) -> TaskSection:
    measured, problems = comparable_flatness(task)
    return TaskSection(
        task=task,
        headline=headline(task),
        methods=methods_table(task),
        results=results_table(task),
        examples=examples_table(task),
        runs=runs_table(task),
        plots=task_plots(task),
        flatness=flatness_table(measured, task) if measured else None,
        flatness_plots=flatness_plots(measured, task) if measured else [],
        problems=[*task.problems, *problems],
    )


def _write_table(table: ReportTable, stem: Path) -> list[Path]:
    stem.parent.mkdir(exist_ok=True)
    written = []
    for kind, text in (("md", markdown_table(table)), ("tex", latex_table(table))):
        written.append(stem.with_name(f"{stem.name}.{kind}"))
        _write_text(written[-1], text)
    return written


def _write_figures(plots: dict[str, Plot], folder: Path) -> list[Path]:
    if plots:
        folder.mkdir(exist_ok=True)
    return [path for name, plot in plots.items() for path in draw_figure(plot, folder / name)]


def _write_text(path: Path, text: str) -> None:
    """Write a file atomically, because two processes may write the same report."""
    with drafted(path) as draft:
        draft.write_bytes(text.encode("utf-8", "replace"))  # records may contain lone surrogates


def _file_prefixes(tasks: Sequence[TaskSummary]) -> list[str]:
    """Return a prefix per task for the names of its files; none if there is one task."""
    if len(tasks) == 1:
        return [""]
    prefixes: list[str] = []
    for task in tasks:
        safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in task.name).strip("-.")[:60] or "task"
        prefix = f"{safe}-"
        while prefix in prefixes:
            prefix = f"{prefix}again-"
        prefixes.append(prefix)
    return prefixes
