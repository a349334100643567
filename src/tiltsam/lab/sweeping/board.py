"""The board of a sweep: which runs wait, who works on which, and what came out, as trials of an Optuna study.

Any number of processes on any number of machines work from one board. Each job is finished once:

- A worker first takes the lock of the run's folder, which goes with the process however it ends, then writes a trial
  that is running: its ticket. Of two tickets for one job the one with the lower number counts, and a database hands
  numbers out one after another; so two machines that share the database and no files do not work on the same job.
- A ticket shows signs of life. One from the same folder on the same machine, whose lock is free, belongs to a dead
  process: it is taken over at once. One from elsewhere is taken over when its signs of life have ceased for a while.
- A trial that was given up or whose worker died is marked failed, and another ticket written. The run itself goes on
  from its last checkpoint where the folder is the same.

States: COMPLETE is a run with a result, PRUNED one that diverged, FAIL a ticket that came to nothing.
"""

from __future__ import annotations

import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.trial import FrozenTrial, TrialState

from tiltsam.lab.config import TrainConfig
from tiltsam.lab.records import Record
from tiltsam.lab.shutdown import defer_interrupt
from tiltsam.lab.sweeping.store import Store

__all__ = ["Board", "Entry", "Job", "Ticket"]

BEATS_TO_DEATH = 6  # signs of life that must be missing


@dataclass(frozen=True)
class Job:
    """A run to make."""

    config: TrainConfig
    params: dict[str, Any]
    """What Optuna is to show of it."""

    @property
    def key(self) -> str:
        """The run's name among all runs of its task."""
        return f"{self.config.key()}/seed-{self.config.seed}"


@dataclass(frozen=True)
class Entry:
    """Where a job stands."""

    state: Literal["waiting", "running", "done", "diverged"] = "waiting"
    result: dict[str, Any] = field(default_factory=dict)
    """Numbers, once done; the reason, under ``error``, once diverged."""
    owner: str = ""
    share: float = 0.0
    """How much of the budget a running one has used, when it last said so."""

    @property
    def finished(self) -> bool:
        """Whether nothing more is to be done."""
        return self.state in ("done", "diverged")


class Board:
    """Jobs and where they stand.

    Args:
        store: The database.
        name: Of the study.
        jobs: All jobs of the study. Of several that are the same run the first is made, and shown by Optuna.
        out: Folder of the records.
        heartbeat: Seconds between a ticket's signs of life.
    """

    def __init__(self, store: Store, name: str, jobs: Sequence[Job], out: Path, *, heartbeat: float = 10.0) -> None:
        self.store, self.name, self.out, self.heartbeat = store, name, out, heartbeat
        once: dict[str, Job] = {}
        for job in jobs:
            once.setdefault(job.key, job)
        self.jobs = list(once.values())
        self._study = store.study(name)
        self._study_id = store.insist(lambda: store.storage.get_study_id_from_name(name))
        self._distributions = _distributions(jobs)
        self._place = _place(out)
        self._signs: dict[int, tuple[Any, float]] = {}
        self._absences = store.absences

    # ---------------------------------------------------------------- reading

    def look(self) -> dict[str, Entry]:
        """Where every job stands, by its key."""
        entries = {job.key: Entry() for job in self.jobs}
        for trial in self._trials():
            entry = _entry(trial)
            key = trial.user_attrs.get("job")
            if key in entries and entry is not None and not entries[key].finished:
                entries[key] = entry
        return entries

    def _trials(self) -> list[FrozenTrial]:
        """All tickets, oldest first; notes when each last showed a new sign of life."""
        trials = self.store.insist(lambda: self._study.get_trials(deepcopy=False))
        now = time.monotonic()
        if self.store.absences != self._absences:  # nobody could give a sign of life
            self._absences = self.store.absences
            self._signs.clear()
        running = [t for t in trials if t.state == TrialState.RUNNING]
        before = self._signs
        self._signs = {}
        for trial in running:
            sign = trial.user_attrs.get("beat")
            known = before.get(trial._trial_id)
            self._signs[trial._trial_id] = known if known is not None and known[0] == sign else (sign, now)
        return trials

    # ---------------------------------------------------------------- taking a job

    @contextmanager
    def claim(self, job: Job) -> Iterator[Ticket | None]:
        """Take a job; yields ``None`` where it is done or another worker has it.

        Left without :meth:`Ticket.finish` or :meth:`Ticket.diverge`, the job waits again.
        """
        with Record.of(self.out, job.config).lock() as mine:
            ticket = self._ticket(job) if mine else None
            if ticket is None:
                yield None
                return
            with ticket:
                yield ticket

    def _ticket(self, job: Job) -> Ticket | None:
        """A ticket for a job whose folder we hold, or ``None``."""
        for trial in self._tickets(job):
            if trial.state != TrialState.RUNNING:
                return None  # finished
            if not self._dead(trial):
                return None
            self._end(trial._trial_id, TrialState.FAIL, ended="its worker died")
        template = optuna.trial.create_trial(
            state=TrialState.RUNNING,
            params=job.params,
            distributions={name: self._distributions[name] for name in job.params},
            user_attrs={
                "job": job.key,
                "owner": f"{platform.node()}:{os.getpid()}",
                "place": self._place,
                "beat": [uuid.uuid4().hex, 0.0],
            },
        )
        mine = self.store.insist(lambda: self.store.storage.create_new_trial(self._study_id, template))
        for trial in self._tickets(job):
            if trial._trial_id == mine:
                return Ticket(self, mine)
            # An older ticket of a living worker, or one that was finished since we looked.
            break
        self._end(mine, TrialState.FAIL, ended="another worker was first")
        return None

    def _tickets(self, job: Job) -> list[FrozenTrial]:
        """The tickets of a job that count, finished ones first, then by age."""
        found = [t for t in self._trials() if t.user_attrs.get("job") == job.key and t.state != TrialState.FAIL]
        return sorted(found, key=lambda t: (t.state == TrialState.RUNNING, t.number))

    def _dead(self, trial: FrozenTrial) -> bool:
        """Whether a ticket's worker is gone, given that we hold the lock of the run's folder."""
        if trial.user_attrs.get("place") == self._place:
            return True
        _, since = self._signs[trial._trial_id]
        return time.monotonic() - since > BEATS_TO_DEATH * self.heartbeat

    # ---------------------------------------------------------------- writing

    def _end(self, trial_id: int, state: TrialState, value: float | None = None, **notes: Any) -> bool:
        """Close a ticket; tells whether it was still open."""
        storage = self.store.storage

        def write() -> None:
            for key, note in notes.items():
                storage.set_trial_user_attr(trial_id, key, note)
            storage.set_trial_state_values(trial_id, state, None if value is None else [value])

        try:
            self.store.insist(write)
        except optuna.exceptions.UpdateFinishedTrialError:
            return False
        return True


class Ticket:
    """The right to work on a job. A context that shows signs of life; ``lost`` once the others have given it up."""

    def __init__(self, board: Board, trial_id: int) -> None:
        self.share = 0.0
        """How much of the run is done; shown to the others."""
        self.lost = False
        self._board, self._trial_id = board, trial_id
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)

    def finish(self, value: float, result: Mapping[str, Any]) -> None:
        """The run has a result."""
        self._end(TrialState.COMPLETE, value, result=dict(result))

    def diverge(self, reason: str) -> None:
        """The run came to no number; it is not tried again."""
        self._end(TrialState.PRUNED, None, result={"error": reason})

    def __enter__(self) -> Ticket:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if not self._over.is_set():
            self._end(TrialState.FAIL, None, ended="given up" if kind is None else f"given up: {kind.__name__}")

    def _end(self, state: TrialState, value: float | None, **notes: Any) -> None:
        with defer_interrupt():  # or the others would take us for running
            self._over.set()
            self._thread.join()
            self.lost = not self._board._end(self._trial_id, state, value, **notes)

    def _live(self) -> None:
        storage = self._board.store.storage
        while not self._over.wait(self._board.heartbeat):
            try:
                storage.set_trial_user_attr(self._trial_id, "beat", [uuid.uuid4().hex, self.share])
            except optuna.exceptions.UpdateFinishedTrialError:
                self.lost = True
                return
            except Exception:  # the server is away: the next beat may reach it
                continue


def _entry(trial: FrozenTrial) -> Entry | None:
    attributes = trial.user_attrs
    owner = str(attributes.get("owner", ""))
    if trial.state == TrialState.COMPLETE:
        return Entry("done", attributes["result"], owner, 1.0)
    if trial.state == TrialState.PRUNED:
        return Entry("diverged", attributes["result"], owner, 1.0)
    if trial.state == TrialState.RUNNING:
        return Entry("running", {}, owner, attributes["beat"][1])
    return None


def _place(out: Path) -> str:
    """A name for this folder on this machine: whoever has the same name sees the same locks."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        machine = platform.node()
    status = out.stat()
    return f"{machine}:{status.st_dev}:{status.st_ino}"


def _distributions(jobs: Sequence[Job]) -> dict[str, BaseDistribution]:
    """What Optuna must know of each setting: a range of numbers, or a choice."""
    values: dict[str, dict[Any, None]] = {}
    for job in jobs:
        for name, value in job.params.items():
            values.setdefault(name, {})[value] = None
    found: dict[str, BaseDistribution] = {}
    for name, choices in values.items():
        if all(isinstance(v, int | float) and not isinstance(v, bool) for v in choices):
            low, high = float(min(choices)), float(max(choices))
            found[name] = FloatDistribution(low, high, log=low > 0)
        else:
            found[name] = CategoricalDistribution(list(choices))
    return found
