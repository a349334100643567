"""The command ``tiltsam report``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

__all__ = ["add_report", "report"]

MOST_PROBLEMS = 8  # on the screen; the page has all


def add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the others."""
    parser = commands.add_parser(
        "report",
        help="a page of tables and curves from runs",
        description="Write one self-contained HTML page from runs, finished or not; its figures as PNG and PDF and its "
        "tables as Markdown and LaTeX beside it.",
        epilog="example: tiltsam report runs/digits",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="runs, or folders that hold some")
    parser.add_argument("--out", type=Path, help="folder to write to (default: report, in the first DIR)")
    parser.add_argument("--no-figures", action="store_true", help="no figures beside the page")
    parser.set_defaults(run=lambda args: report(args.folders, args.out, figures=not args.no_figures))


def report(folders: Sequence[Path], out: Path | None = None, *, figures: bool = True) -> None:
    """Write the report and tell where, and what is missing."""
    from tiltsam.lab.report.write import write_report

    done = write_report(folders, folders[0] / "report" if out is None else out, figures=figures)
    for problem in done.problems[:MOST_PROBLEMS]:
        print(problem)
    if len(done.problems) > MOST_PROBLEMS:
        print(f"and {len(done.problems) - MOST_PROBLEMS} more, all on the page")
    if figures and done.no_figures:
        print(f"no figures beside the page: {done.no_figures}")
    if done.removed:
        print(f"removed {len(done.removed)} files of the report before, which this one does not have")
    print(f"report: {done.page}")
