"""What a sweep shows while it goes: a live table on a terminal, a line for each event elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from tiltsam.lab.console import LiveDisplay
from tiltsam.lab.sweeping.board import Entry
from tiltsam.lab.sweeping.standing import Standing, Trial, format_settings, format_standings

__all__ = ["SweepDisplay"]

MOST_ROWS = 8  # running trials shown; a large sweep has more than a screen holds


class SweepDisplay(LiveDisplay):
    """A context; ``report`` and ``say`` fit :func:`tiltsam.lab.sweep.sweep`."""

    def __init__(self) -> None:
        super().__init__(_table)
        self._told: set[tuple[str, str]] = set()
        self._first = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.update("")  # the final table is printed by the command
        super().__exit__(kind, error, tb)

    def report(self, standings: Sequence[Standing]) -> None:
        """Show where every row stands; no score on the test set before the choice is made."""
        if self._live is not None:
            self._live.update(_draw(standings))
            return
        for s in standings:
            for trial in s.trials:
                if trial.entry.finished:
                    self._tell(s.method, trial.point.config.key(), _trial_line(s, trial))
            for job, entry in s.tests:
                if entry.state == "done":
                    line = f"{s.method} seed {job.config.seed}: test {100 * entry.result['score']:.2f}"
                    self._tell(s.method, f"test {job.key}", line)
                elif entry.state == "diverged":
                    self._tell(
                        s.method, f"test {job.key}", f"{s.method} seed {job.config.seed}: {entry.result['error']}"
                    )
        self._first = False

    def _draw_loading(self, what: str, done: int, total: int | None, note: str) -> None:
        from rich.text import Text

        self._live.update(Text(f"{what}: {note}"))  # the next report replaces it

    def _tell(self, method: str, what: str, line: str) -> None:
        """Once; what was there when we came is in the final table."""
        if (method, what) not in self._told:
            self._told.add((method, what))
            if not self._first:
                print(line, flush=True)


def _table() -> Any:
    from rich.live import Live

    return Live(refresh_per_second=4)


def _trial_line(s: Standing, trial: Trial) -> str:
    done = s.count("done") + s.count("diverged")
    found = f"validation {100 * trial.score:.2f}" if trial.entry.state == "done" else trial.entry.result["error"]
    best = f" (best {100 * s.best.score:.2f})" if s.best else ""
    return f"{s.method} {done}/{len(s.trials)}  {format_settings(trial.point.settings)}: {found}{best}"


def _draw(standings: Sequence[Standing]) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table()
    cells = format_standings(standings)
    for i, heading in enumerate(cells[0]):
        table.add_column(heading, justify="left" if i in (0, 3) else "right")
    for row in cells[1:]:
        table.add_row(*(Text(cell) for cell in row))
    running: dict[str, str] = {}  # by the run: two rows may have it
    for s in standings:
        for t in s.trials:
            if t.entry.state == "running":
                running.setdefault(
                    t.point.config.key(), f"  {s.method} {format_settings(t.point.settings)}: {_share(t.entry)}"
                )
        for job, entry in s.tests:
            if entry.state == "running":
                running.setdefault(job.key, f"  test of {s.method}, seed {job.config.seed}: {_share(entry)}")
    more = [f"  and {len(running) - MOST_ROWS} more"] if len(running) > MOST_ROWS else []
    return Group(table, Text("\n".join([f"{len(running)} running", *list(running.values())[:MOST_ROWS], *more])))


def _share(entry: Entry) -> str:
    return f"{100 * entry.share:.0f}% on {entry.owner}"
