"""The plan of a sweep, and the desk at which a worker follows it: search, choose, test."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any

from tiltsam.lab.config import TrainConfig
from tiltsam.lab.data import LoadingCallback, data_loader, fingerprint
from tiltsam.lab.errors import Diverged, SweepError
from tiltsam.lab.records import Record, task_folder
from tiltsam.lab.sweeping.board import Board, Job, Ticket
from tiltsam.lab.sweeping.grids import GridPoint
from tiltsam.lab.sweeping.standing import Standing, Trial, validation_numbers
from tiltsam.lab.sweeping.store import open_store
from tiltsam.lab.train import Progress, train

__all__ = ["Desk", "Plan", "in_turns"]

POLL_SECONDS = 0.5  # between looks at jobs that others hold


@dataclass(frozen=True)
class Plan:
    """Everything a worker must know."""

    points: dict[str, list[GridPoint]]
    """By row: by the text of the entry, a method or one with settings of its own; as many for each."""
    seeds: int
    """Tests of each row's choice."""
    final: dict[str, Any]
    """Settings of the tests that differ from those of the trials: their budget."""
    out: Path
    storage: str
    root: Path | None = None
    download: bool = False
    heartbeat: float = 10.0
    notes: list[str] = field(default_factory=list)
    data: str = ""
    """Fingerprint of one's own data."""

    @property
    def name(self) -> str:
        """Of the study: the task, and a digest of points and own data. Who asks for the same trials works on the same.

        Data that are edited make another study, for what the database knows is of the data as they were. So do rows
        that are not called by their methods, for Optuna holds a study to the names that it began with.
        """
        task = next(iter(self.points.values()))[0].config.task
        body: list[Any] = [job.key for job in in_turns(self.search_jobs())] + ([self.data] if self.data else [])
        if any(name != points[0].config.method for name, points in self.points.items()):
            body.append(list(self.points))
        digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()[:10]
        return f"{task_folder(task)}-{digest}"

    @property
    def folder(self) -> Path:
        """Of the sweep's own files."""
        return self.out / "sweeps" / self.name

    def search_jobs(self) -> dict[str, list[Job]]:
        """The trials, by row. Rows may have runs in common, here and in the tests."""
        return {
            name: [Job(point.config, {"method": name, **point.settings}) for point in points]
            for name, points in self.points.items()
        }

    def final_jobs(self, chosen: Mapping[str, GridPoint]) -> dict[str, list[Job]]:
        """The chosen configs with every seed, by row."""
        return {
            name: [
                Job(replace(point.config, **self.final, seed=seed), {"method": name, "seed": seed})
                for seed in range(self.seeds)
            ]
            for name, point in chosen.items()
        }


def in_turns(rows: Mapping[str, Sequence[Job]]) -> list[Job]:
    """All jobs, the rows taking turns, so that half a sweep is half of each."""
    return [job for turn in zip_longest(*rows.values()) for job in turn if job is not None]


class Desk:
    """A place to work on a plan, and to see how far it is. A context, which closes the database.

    Args:
        plan: The plan.
        device: Where to train, if not where the configs say.
        pause: Called often; what it raises ends the work, and the job at hand waits for another worker.
        report: Called after every epoch and every job.
        loading: Called with the progress of downloads and of decoding images.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        device: str | None = None,
        pause: Callable[[], None] = lambda: None,
        report: Callable[[], None] = lambda: None,
        loading: LoadingCallback | None = None,
    ) -> None:
        self.plan, self._device, self._pause, self._report = plan, device, pause, report
        self.store = open_store(plan.storage)
        self._search = self._board(plan.name, plan.search_jobs())
        self._data = data_loader(plan.root, download=plan.download, progress=loading)
        self._final: Board | None = None
        self._tests: dict[str, list[Job]] = {}

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.store.close()

    def _board(self, name: str, rows: Mapping[str, Sequence[Job]]) -> Board:
        return Board(self.store, name, in_turns(rows), self.plan.out, heartbeat=self.plan.heartbeat)

    def look(self) -> list[Standing]:
        """Where every row stands."""
        entries = self._search.look()
        standings = [
            Standing(name, [Trial(p, entries[_key(p.config)]) for p in points])
            for name, points in self.plan.points.items()
        ]
        if not all(entry.finished for entry in entries.values()) or not self.plan.seeds:
            return standings
        if self._final is None:
            chosen = {s.method: s.best.point for s in standings if s.best is not None}
            self._tests = self.plan.final_jobs(chosen)
            self._final = self._board(f"{self.plan.name}-test", self._tests)
        tests = self._final.look()
        return [replace(s, tests=[(j, tests[j.key]) for j in self._tests.get(s.method, [])]) for s in standings]

    def work(self) -> None:
        """Do whatever is to be done, and wait for what others do, until all is."""
        self._finish(self._search, self._try)
        self.look()  # all trials are done: this makes the choice
        if self._final is not None:
            self._finish(self._final, self._test)

    def _finish(self, board: Board, run: Callable[[Job, Ticket], None]) -> None:
        while True:
            self._pause()
            entries = board.look()
            waiting = [job for job in board.jobs if not entries[job.key].finished]
            if not waiting:
                return
            if not any(self._take(board, job, run) for job in waiting):
                self._report()
                time.sleep(POLL_SECONDS)

    def _take(self, board: Board, job: Job, run: Callable[[Job, Ticket], None]) -> bool:
        """Do a job if it can be had."""
        with board.claim(job) as ticket:
            if ticket is None:
                return False
            try:
                run(job, ticket)
            except Diverged as error:
                ticket.diverge(str(error))
            except _LostError:
                return False
        self._report()
        return True

    def _try(self, job: Job, ticket: Ticket) -> None:
        """A trial. From here on nobody sees what it did on the test set."""
        numbers = validation_numbers(self._train(job, ticket))
        score = numbers.get(f"validation_{numbers['metric']}")
        if score is None:
            raise SweepError(f"{job.config.task} has no validation split to choose on")
        if not math.isfinite(score):
            raise Diverged(f"the validation {numbers['metric']} is {score}")
        ticket.finish(score, numbers)

    def _test(self, job: Job, ticket: Ticket) -> None:
        result = self._train(job, ticket)
        if not math.isfinite(result["score"]):
            raise Diverged(f"the test {result['metric']} is {result['score']}")
        ticket.finish(result["score"], result)

    def _train(self, job: Job, ticket: Ticket) -> dict[str, Any]:
        def tick(progress: Progress) -> None:
            ticket.share = min(progress.done, 1.0)
            self._pause()
            if ticket.lost:
                raise _LostError

        def report(progress: Progress) -> None:
            tick(progress)
            self._report()

        config = replace(job.config, device=self._device) if self._device else job.config
        if fingerprint(config.task) != self.plan.data:
            raise SweepError(f"the data of {config.task} have changed since this sweep began: use another --out")
        record = Record.of(self.plan.out, config)
        return train(config, record, data=self._data, report=report, tick=tick)


class _LostError(Exception):
    """The others took us for dead and gave our job to another."""


def _key(config: TrainConfig) -> str:
    return Job(config, {}).key
