"""Choosing settings: the same number of trials for every entry, a choice on the validation split, and one test.

The command is ``tiltsam sweep``; ``docs/sweep.md`` tells how to spread it over machines.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tiltsam
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.data import LoadingCallback, find_task, fingerprint, load
from tiltsam.lab.errors import SweepError
from tiltsam.lab.files import write_json
from tiltsam.lab.flags import parse_method
from tiltsam.lab.sweeping.grids import GridPoint, points
from tiltsam.lab.sweeping.plan import Desk, Plan
from tiltsam.lab.sweeping.standing import Standing, to_json
from tiltsam.lab.sweeping.store import sqlite_url
from tiltsam.lab.sweeping.workers import run_workers

__all__ = ["Outcome", "sweep"]

REPORT_SECONDS = 0.5
BUDGETS = ("epochs", "passes", "seconds")


@dataclass(frozen=True)
class Outcome:
    """What a sweep came to."""

    study: str
    """Name of the Optuna study."""
    path: Path
    """The file with everything in it."""
    standings: list[Standing]
    """An entry each, in the order asked for."""
    notes: list[str]
    """Which grids were left out, drawn from or made finer; what ends the tests; whether workers share a clock."""

    @property
    def best(self) -> dict[str, TrainConfig]:
        """The choice of each entry that has one, by the entry's text."""
        return {s.method: s.config for s in self.standings if s.config is not None}


def sweep(
    base: TrainConfig,
    methods: Sequence[str],
    grid: Mapping[str, Sequence[Any]],
    out: Path,
    *,
    trials: int | None = None,
    seeds: int = 3,
    final_epochs: float | None = None,
    final_seconds: float | None = None,
    final_passes: float | None = None,
    draw_seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    storage: str | None = None,
    workers: int = 1,
    root: Path | None = None,
    download: bool = False,
    loading: LoadingCallback | None = None,
    heartbeat: float = 10.0,
    begin: Callable[[Plan], None] = lambda plan: None,
    report: Callable[[Sequence[Standing]], None] = lambda standings: None,
    say: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Try settings, choose on the validation split, and test what was chosen.

    Every entry gets the same number of trials. Its choice is the trial with the highest validation score at the end of
    training (equal ones: with the lower validation loss); test scores of trials are never read. The choice is then
    trained with each seed and its test score returned.

    Called again with the same arguments, in this process or any other on any machine, it works on the same study: what
    is done is not done again, what another works on is left to it, and a run whose worker died is taken up, from its
    last checkpoint where the folder is the same. So it can be interrupted at any moment, and sped up by calling it more
    than once. Runs in ``out`` that ``tiltsam train`` or ``compare`` made are reused.

    Args:
        base: Everything that is not in the grid; its ``seed`` is that of the trials. ``device`` may be several, as
            ``"cuda:0,cuda:1"``: the workers are dealt out to them in turn.
        methods: The entries: methods, each bare or with settings of its own, ``["sam", "sam:average=true"]``. What an
            entry sets is fixed for it, whatever the grid holds. A run that two entries have in common is trained once.
        grid: Values by setting, ``{"lr": [0.01, 0.1], "rho": [0.05, 0.5]}``, or by ``"METHOD:SETTING"`` for the entries
            of one method; :data:`tiltsam.lab.sweeping.grids.PAPER` holds the paper's. A method takes the settings that
            are its own.
        out: Folder of the records, of the database, and of the result, ``OUT/sweeps/STUDY/sweep.json``.
        trials: Trials an entry; see :func:`tiltsam.lab.sweeping.grids.points` for grids that have more or fewer points.
            By default all points.
        seeds: Tests of each choice, with seeds 0, 1, …; 0 chooses and does not test.
        final_epochs: Epochs of the tests, if not those of the trials.
        final_seconds: Seconds of the tests, if not those of the trials.
        final_passes: Passes of the tests, if not those of the trials.
        draw_seed: Of the draw from grids with more points than trials.
        settings: Settings of all methods that have them, as in ``{"rho": 0.2}``; entries and grids go first.
        storage: URL of a database for Optuna; by default ``sqlite:///OUT/sweeps.db``.
        workers: Processes to work with; 1 works in this one.
        root: Where data sets lie.
        download: Fetch what is missing.
        loading: Called with the progress of downloads and of decoding images, in this process.
        heartbeat: Seconds between signs of life; a worker on another machine is taken for dead when six are missing.
        begin: Called with the plan before the work begins.
        report: Called as it goes with where every entry stands.
        say: Called with lines about workers.

    Raises:
        SweepError: An entry, a grid, a number or a database that cannot be.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> short = TrainConfig("digits", epochs=1)
        >>> outcome = sweep(short, ["erm", "sam"], {"lr": [0.01, 0.1]}, Path(folder.name), seeds=1)
        >>> [(s.method, len(s.trials), len(s.scores)) for s in outcome.standings]
        [('erm', 2, 1), ('sam', 2, 1)]
        >>> outcome.best["sam"].lr
        0.1
        >>> folder.cleanup()
    """
    if seeds < 0:
        raise SweepError(f"--seeds must be at least 0, got {seeds}")
    if workers < 1:
        raise SweepError(f"--workers must be at least 1, got {workers}")
    if not heartbeat > 0:
        raise SweepError(f"--heartbeat must be > 0, got {heartbeat}")
    if not base.validation > 0:
        raise SweepError(f"a sweep chooses on the validation split: --validation must be > 0, got {base.validation}")
    budgets = zip(BUDGETS, (final_epochs, final_passes, final_seconds), strict=True)
    final = {name: value for name, value in budgets if value is not None}
    for name, value in final.items():
        if not value > 0:
            raise SweepError(f"--final-{name} must be > 0, got {value}")
    find_task(base.task)  # before a folder is made for it
    first = replace(base, device=base.device.split(",")[0])
    found, notes = points(first, methods, grid, trials, draw_seed=draw_seed, settings=settings)
    _check_workers(workers, {row[0].config.method for row in found.values()})
    _check_final(final, methods, grid)
    plan = Plan(
        points=found,
        seeds=seeds,
        final=final,
        out=out,
        storage=storage or sqlite_url(out),
        root=root,
        download=download,
        heartbeat=heartbeat,
        notes=notes + (_what_ends_tests(base, final) if seeds else []) + _shared_clock(base, found, final, workers),
        data=fingerprint(base.task),
    )
    out.mkdir(parents=True, exist_ok=True)
    return _carry_out(plan, base, workers, begin, report, say, loading)


def _what_ends_tests(base: TrainConfig, final: Mapping[str, float]) -> list[str]:
    """A line, if the tests have a budget of their own and others of the trials hold for them, too."""
    rest = {name: value for name in BUDGETS if name not in final and (value := getattr(base, name)) is not None}
    if not final or not rest:
        return []
    own, trials = (" or ".join(f"{value:g} {name}" for name, value in each.items()) for each in (final, rest))
    return [f"the tests end after {own} or, as the trials, {trials}: whichever comes first"]


def _shared_clock(
    base: TrainConfig, found: Mapping[str, Sequence[GridPoint]], final: Collection[str], workers: int
) -> list[str]:
    """A line, if seconds are counted and workers share a device, so that they differ in what they get done in one."""
    timed = "seconds" in final or any(point.config.seconds is not None for row in found.values() for point in row)
    if not timed or workers <= len(set(base.device.split(","))):
        return []
    told = f"{workers} workers on {base.device} slow each other down, and the budget is in seconds"
    return [f"{told}: use one worker a device"]


def _check_workers(workers: int, methods: Collection[str]) -> None:
    strangers = {name for name in methods if not _is_shipped(tiltsam.METHODS[name])}
    if workers > 1 and strangers:
        told = f"--workers {workers} starts new processes, which do not know {', '.join(sorted(strangers))}"
        raise SweepError(f"{told}: start your script as often, side by side, each with one worker")


def _is_shipped(method: Any) -> bool:
    """Whether a new process knows the method."""
    return any(method is known for known in vars(tiltsam).values())


def _check_final(final: Collection[str], methods: Sequence[str], grid: Collection[str]) -> None:
    """Refuse a budget of the tests that would overwrite what an entry sets, or what a grid is to choose."""
    for name in final:
        for text in methods:
            if name in parse_method(text):
                raise SweepError(f"{text!r} has its own {name}, which --final-{name} would change")
        if name in {setting.rpartition(":")[2] for setting in grid}:
            raise SweepError(f"the grid's {name} would be chosen in vain: --final-{name} changes them")


def _carry_out(
    plan: Plan,
    base: TrainConfig,
    workers: int,
    begin: Callable[[Plan], None],
    report: Callable[[Sequence[Standing]], None],
    say: Callable[[str], None],
    loading: LoadingCallback | None,
) -> Outcome:
    devices = base.device.split(",")
    path = plan.folder / "sweep.json"

    def write() -> list[Standing]:
        standings = desk.look()
        path.parent.mkdir(parents=True, exist_ok=True)
        content = to_json(plan.name, desk.store.shown, plan.out, plan.notes, standings)
        write_json(path, content, allow_nan=False)
        report(standings)
        return standings

    often = _not_too_often(lambda: report(desk.look()))
    with Desk(plan, device=devices[0], report=often, loading=loading) as desk:
        standings = desk.look()
        begin(plan)
        report(standings)
        try:
            if all(s.finished for s in standings):
                pass
            elif workers == 1:
                desk.work()
            else:
                if plan.download:  # once, before several look for it
                    load(replace(base, device=devices[0]), plan.root, download=True, progress=loading)
                dealt = [devices[k % len(devices)] for k in range(workers)]
                run_workers(plan, dealt, lambda: report(desk.look()), say)
        except KeyboardInterrupt:
            write()
            raise
        return Outcome(plan.name, path, write(), plan.notes)


def _not_too_often(action: Callable[[], None]) -> Callable[[], None]:
    """Epochs may be shorter than a look at the database takes."""
    last = -math.inf

    def sometimes() -> None:
        nonlocal last
        if time.monotonic() - last >= REPORT_SECONDS:
            action()
            last = time.monotonic()

    return sometimes
