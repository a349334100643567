"""Progress and tables on the console: live bars and drawn tables on a terminal, plain lines and Markdown elsewhere."""

from __future__ import annotations

import math
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from tiltsam.flatness.loss_surface import ProgressCallback
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.display import Display, Progress, SweepStatus
from tiltsam.lab.errors import TrainError
from tiltsam.lab.files import is_number
from tiltsam.lab.records import Record
from tiltsam.lab.schedules import passes_per_step
from tiltsam.lab.stats import count_of, format_score

__all__ = [
    "LiveDisplay",
    "RunDisplay",
    "SweepDisplay",
    "format_markdown",
    "print_suspects",
    "print_table",
]

LINE_SECONDS = 5.0  # between plain lines; the last line of a run or file is always printed


class LiveDisplay(Display):
    """A progress bar on a terminal, with permanent lines above it. A context manager.

    Measurements have bars of their own on standard error, which end with the context.
    """

    def __init__(self) -> None:
        self._live: Any = _bar() if sys.stdout.isatty() else None
        self._bars: Any = _measurement_bars() if sys.stderr.isatty() else None
        self._measured = ""
        self._task: Any = None
        self._name = ""
        self._last_line = 0.0
        self._start: tuple[float, float] | None = None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        for live in (self._live, self._bars):
            if live is not None:
                live.stop()

    def print(self, line: str) -> None:
        """Print a line that stays above the live display."""
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False)
        else:
            print(line, flush=True)

    def loading(self, what: str, done: int, total: int | None) -> None:
        """Show the progress of a download, of unpacking or of decoding."""
        size = _bytes if what.startswith("downloading") else str
        note = size(done) if total is None else f"{size(done)} of {size(total)}"
        if self._live is None:
            self._line(f"{what}: {note}", last=done == total)
        else:
            self._draw(what, done, total, note)

    def measuring(self, what: str) -> ProgressCallback:
        """Show the progress of a measurement: a bar on a terminal, a line per model elsewhere."""
        if self._bars is None:
            model = what.partition(": ")[0]
            if model != self._measured:
                print(f"measuring {model}", file=sys.stderr, flush=True)
                self._measured = model
            return super().measuring(what)
        if self._live is not None:
            self._live.stop()  # two live displays would overwrite each other
        self._bars.start()
        task = self._bars.add_task(what, total=None)
        return lambda done, total: self._bars.update(task, completed=done, total=total, visible=done < total)

    def _draw(self, name: str, done: float, total: float | None, note: str) -> None:
        """Draw the bar; another name starts a new one in its place."""
        if self._name != name:
            if self._task is not None:
                self._live.remove_task(self._task)
            self._task = self._live.add_task(name, total=total, note=note)
            self._name = name
        self._live.update(self._task, completed=done, total=total, note=note)

    def _time_left(self, done: float, total: float) -> str:
        """Return the time left by the progress since the first call, as in ``1:30 left``; empty if it is not known."""
        now = time.monotonic()
        if self._start is None:
            self._start = now, done
        done_since = done - self._start[1]
        if not (done_since > 0 and done < total):
            return ""
        return f"{_clock((now - self._start[0]) * (total - done) / done_since)} left"

    def _line(self, text: str, *, last: bool) -> None:
        if last or time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            print(text, flush=True)


class RunDisplay(LiveDisplay):
    """Shows the progress of runs. A context manager.

    Args:
        names: Names of runs by the key of their config; by default the method's name.
        runs: The runs that will be trained; if there are several, their number and the time left for all are shown.
    """

    def __init__(self, names: Mapping[str, str] | None = None, runs: Sequence[TrainConfig] = ()) -> None:
        super().__init__()
        self._names = names or {}
        self._costs = {run: _relative_cost(run) for run in runs}
        self._begun: list[TrainConfig] = []
        self._setups = set[str]()

    def name(self, config: TrainConfig) -> str:
        """Return the displayed name of a run."""
        return f"{self._names.get(config.key(), config.method)} seed {config.seed}"

    def setup(self, config: TrainConfig, setup: dict[str, Any]) -> None:
        """Print the sizes of the splits, classes, label noise and model, unless an earlier run had the same."""
        line = f"{config.task}: {_describe_setup(setup)}"
        if setup and line not in self._setups:
            self._setups.add(line)
            self.print(line)

    def skip(self, config: TrainConfig) -> None:
        """Leave a run that another process trains out of the number of runs and the time left."""
        self._costs.pop(config, None)

    def failed(self, config: TrainConfig, error: TrainError) -> None:
        """Print why a run failed."""
        self.print(f"{config.task} {self.name(config)}: {error}")

    def report(self, config: TrainConfig, progress: Progress) -> None:
        """Show the progress of a run."""
        notes = []
        if row := progress.row:
            metric = next(name for name in row if name.startswith("test_"))
            score = format_score({"metric": metric.removeprefix("test_"), "score": row[metric]})
            notes = [f"loss {row['train_loss']:.3f}", f"test {score}"]
        speed = progress.passes / max(progress.seconds, 1e-9)
        notes.append(f"{speed:.3g} passes/s" if speed < 1000 else f"{speed:,.0f} passes/s")
        if len(self._costs) > 1 and config in self._costs:
            notes.append(self._describe_total(config, min(progress.done, 1.0)))
        elif 0 < progress.done < 1:
            notes.append(f"{_clock(progress.seconds * (1 / progress.done - 1))} left")
        name, note = self.name(config), "  ".join(notes)
        if self._live is None:
            percent = math.floor(100 * min(progress.done, 1))  # 100 only once the run has ended
            self._line(f"{config.task} {name}  {percent:3}%  {note}", last=progress.done >= 1)
        else:
            self._draw(name, min(progress.done, 1.0), 1.0, "  ".join(notes[::-1]))  # a narrow terminal cuts off the end
            if progress.done >= 1:  # the next run replaces the bar
                self.print(f"{name}  {note}")

    def _describe_total(self, config: TrainConfig, done: float) -> str:
        """Return which of the runs this is, and about how long all of them still take."""
        if config not in self._begun:
            self._begun.append(config)
        before = sum(self._costs.get(run, 0.0) for run in self._begun if run != config)
        left = self._time_left(before + done * self._costs[config], sum(self._costs.values()))
        return f"run {len(self._begun)} of {len(self._costs)}" + (f", about {left}" if left else "")


def _relative_cost(config: TrainConfig) -> float:
    """Return the cost of a run relative to others: the same for all if passes or seconds limit them."""
    limited = config.passes is not None or config.seconds is not None
    return 1.0 if limited else config.epochs * passes_per_step(config)


def _describe_setup(setup: Mapping[str, Any]) -> str:
    """Return the content of ``setup.json`` as a line; what a damaged file lacks is left out."""
    numbers = {name: value for name, value in setup.items() if is_number(value)}
    splits = [f"{numbers[f'num_{s}']:,} {s}" for s in ("train", "validation", "test") if numbers.get(f"num_{s}")]
    names = ("num_classes", "test_split_off", "noise", "num_parameters")
    classes, split_off, noise, parameters = (numbers.get(name) for name in names)
    parts = [
        f"{', '.join(splits)} examples" if splits else "",
        f"test: {split_off:.0%} split off" if split_off else "",
        "" if classes is None else "regression" if classes == 1 else f"{classes} classes",
        f"{noise:.0%} of the train and validation labels replaced with wrong ones" if noise else "",
        f"{setup.get('model', '')}" + (f", {parameters:,} parameters" if parameters else ""),
    ]
    return "; ".join(part for part in parts if part)


class SweepDisplay(LiveDisplay):
    """Shows the progress of a sweep. A context manager."""

    def status(self, status: SweepStatus) -> None:
        """Show how many runs have ended, the last results and the time left."""
        done = status.ended + status.running
        note = self._time_left(done, status.total)
        if self._live is not None:
            for line in status.news:
                self.print(line)
            self._draw(f"run {min(status.ended + 1, status.total)} of {status.total}", done, status.total, note)
            return
        for k, line in enumerate(status.news, status.ended - len(status.news) + 1):
            print(f"run {k} of {status.total}  {line}  {note}".rstrip(), flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _bytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.table import Column

    # The text has the width that is left. Otherwise a long one would leave none to the bar and the percentage.
    text = TextColumn(
        "{task.description}  {task.fields[note]}", markup=False, table_column=Column(ratio=1, no_wrap=True)
    )
    # Its own console: the shared one may have been made while stdout was not a terminal.
    return Progress(TaskProgressColumn(), BarColumn(10), text, console=Console(), expand=True)


def _measurement_bars() -> Any:
    from rich.console import Console
    from rich.progress import Progress

    return Progress(console=Console(stderr=True), transient=True)


def print_suspects(records: Iterable[Record]) -> None:
    """Print where the training examples are listed whose labels look wrong: one line, of the first run that has any."""
    found = [(record, count) for record in records if (count := record.num_suspects())]
    if not found:
        return
    record, count = found[0]
    what = "1 training example whose label looks" if count == 1 else f"{count:,} training examples whose labels look"
    others = f" (and in {count_of(len(found) - 1, 'other run')})" if len(found) > 1 else ""
    print(f"{record.folder / 'suspects.csv'}: {what} wrong{others}")


def print_table(title: str, cells: Sequence[Sequence[str]]) -> None:
    """Print a table: drawn on a terminal, Markdown elsewhere.

    Columns that do not fit on the terminal are drawn below, next to the first column again.

    Args:
        title: The line above it.
        cells: Rows of cells, the headings first.
    """
    if not sys.stdout.isatty():
        print(f"\n{title}\n\n{format_markdown(cells)}\n", flush=True)
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    headings, *rows = cells
    # Headings break between words, numbers do not break.
    widths = [max(map(len, (*heading.split(), *(row[i] for row in rows)))) for i, heading in enumerate(headings)]
    parts: list[list[int]] = []
    for i in range(1, len(headings)):
        if not parts or 1 + sum(widths[k] + 3 for k in (*parts[-1], i)) > console.width:
            parts.append([0])
        parts[-1].append(i)
    for part in parts:
        table = Table(title=title)
        for i in part:
            heading = textwrap.fill(headings[i], widths[i], break_long_words=False, break_on_hyphens=False)
            table.add_column(heading, justify="right" if i else "left", overflow="fold")
        for row in rows:
            table.add_row(*(row[i] for i in part))
        console.print(table)


def format_markdown(cells: Sequence[Sequence[str]]) -> str:
    """Return rows of cells, the headings first, as a Markdown table with aligned columns."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = []
    for row in cells:
        padded = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("| " + " | ".join(padded) + " |")
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)
