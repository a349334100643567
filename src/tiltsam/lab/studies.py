"""Optuna studies that several processes and machines work on: the database, and trials that outlive their process.

Optuna's storage records a heartbeat of every running trial. A trial without one is failed and queued again, by any
process that works on the study (:func:`retry`); one that was interrupted is queued again at once.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, Trial, TrialState

from tiltsam.lab.errors import ConfigError, LabError, UserError, find_cause, first_line
from tiltsam.lab.shutdown import defer_interrupt

__all__ = ["ENDED", "SeededSampler", "SharedStudy", "hide_password", "open_storage", "retry", "sqlite_url"]

ENDED = (TrialState.COMPLETE, TrialState.PRUNED)
"""The states of trials that are not run again."""
BEATS = 6  # missing heartbeats after which a trial is failed
CONNECT_SECONDS = 10
LOCK_SECONDS = 60.0  # how long SQLite waits for another process to finish writing
ENGINE_OPTIONS: dict[str, dict[str, Any]] = {
    "sqlite": {"connect_args": {"timeout": LOCK_SECONDS}},
    "postgresql": {"connect_args": {"connect_timeout": CONNECT_SECONDS}, "pool_pre_ping": True},
}
ATTEMPTS = 8  # to create tables that other processes create at the same time


# ---------------------------------------------------------------- the database


def sqlite_url(out: Path) -> str:
    """Return the default database of a folder of runs."""
    return sqlalchemy.URL.create("sqlite", database=str((out / "sweeps.db").resolve())).render_as_string()


def hide_password(url: str) -> str:
    """Return a database URL without its password.

    Raises:
        ConfigError: If it is not a URL. The message does not contain it.
    """
    try:
        return sqlalchemy.engine.make_url(url).render_as_string(hide_password=True)
    except sqlalchemy.exc.ArgumentError:
        raise ConfigError(
            "--storage must be a database URL, sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE"
        ) from None


@contextmanager
def open_storage(url: str, heartbeat: int = 10) -> Iterator[optuna.storages.RDBStorage]:
    """Open the database of a sweep; any number of processes may do so at once, also while it is empty.

    Args:
        url: An SQLAlchemy URL.
        heartbeat: Seconds between the heartbeats of a trial; after six missing ones it is failed.

    Raises:
        ConfigError: If the URL, its driver or its server cannot be used.
        UserError: If the server is lost inside the context.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("sqlalchemy").setLevel(logging.CRITICAL)  # it logs a Ctrl-C inside it with a traceback
    shown = hide_password(url)
    parsed = sqlalchemy.engine.make_url(url)
    if parsed.drivername == "postgresql":
        parsed = parsed.set(drivername=f"postgresql+{_postgresql_driver()}")
    if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise ConfigError(f"--storage must be a file, sqlite:///FILE, got {shown}")
    options = ENGINE_OPTIONS.get(parsed.get_backend_name(), {"pool_pre_ping": True})
    full = parsed.render_as_string(hide_password=False)
    try:
        engine = sqlalchemy.create_engine(full, **options)
        with engine.connect():
            pass
        engine.dispose()
    except (sqlalchemy.exc.SQLAlchemyError, ImportError) as error:
        raise ConfigError(f"cannot open {shown}: {_reason(error)}") from None
    storage = _create_storage(full, shown, options, heartbeat)
    others = threading.excepthook
    # The thread that records heartbeats also fails if the database is lost: the error is reported once, below.
    threading.excepthook = lambda args: None if _database_error(args.exc_value) else others(args)
    try:
        yield storage
    except Exception as error:
        lost = None if isinstance(error, LabError) else _database_error(error)
        if lost is None:
            raise
        raise UserError(f"lost {shown}: {_reason(lost.__cause__ or lost)}; the same command resumes") from None
    finally:
        threading.excepthook = others
        with defer_interrupt(), suppress(sqlalchemy.exc.SQLAlchemyError):
            storage.remove_session()
            storage.engine.dispose()


def _create_storage(url: str, shown: str, options: dict[str, Any], heartbeat: int) -> optuna.storages.RDBStorage:
    for attempt in range(ATTEMPTS):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                return optuna.storages.RDBStorage(
                    url,
                    engine_kwargs=dict(options),
                    heartbeat_interval=heartbeat,
                    grace_period=BEATS * heartbeat,
                    heartbeat_stale_trial_callback=retry,
                )
        except (sqlalchemy.exc.SQLAlchemyError, StorageInternalError, AssertionError) as error:
            last: Exception = error  # of several processes that create the tables, all but one fail once
            time.sleep((attempt + random.random()) / 4)
        except RuntimeError as error:  # the tables of another version of Optuna
            raise ConfigError(f"{shown}: {error}") from None
    raise ConfigError(f"cannot open {shown}: {_reason(last.__cause__ or last)}")


def _database_error(error: BaseException | None) -> BaseException | None:
    """Return the database error behind an exception; Optuna may raise another one while it handles it."""
    return find_cause(error, StorageInternalError, sqlalchemy.exc.SQLAlchemyError)


def _postgresql_driver() -> str:
    """Return the driver that is installed; which one a bare ``postgresql://`` means depends on SQLAlchemy's version."""
    for driver in ("psycopg", "psycopg2"):
        if importlib.util.find_spec(driver) is not None:
            return driver
    raise ConfigError('--storage postgresql://… needs a driver: pip install "psycopg[binary]"')


def _reason(error: BaseException) -> str:
    """Return the first line of the driver's message."""
    return first_line(getattr(error, "orig", None) or error)


# ---------------------------------------------------------------- trials


def retry(study: optuna.Study, trial: FrozenTrial) -> None:
    """Queue a trial again: same parameters, no results."""
    study.add_trial(
        optuna.create_trial(
            state=TrialState.WAITING,
            params=trial.params,
            distributions=trial.distributions,
            user_attrs={"retry_of": trial.number},
            system_attrs=trial.system_attrs,  # GridSampler stores the grid point there
        )
    )


class _Surplus(Exception):
    """Raised in a trial that exceeds the number of trials of its study."""


class SharedStudy:
    """A study of a fixed number of trials, worked on by any number of processes.

    Args:
        storage: The database.
        name: The name of the study; created if it does not exist.
        trials: Trials to run.
        sampler: Chooses their parameters.
        pruner: Stops trials early.
        grace: Seconds after which a trial that was created but does not run is considered dead.
    """

    def __init__(
        self,
        storage: optuna.storages.RDBStorage,
        name: str,
        trials: int,
        sampler: BaseSampler,
        pruner: optuna.pruners.BasePruner | None = None,
        grace: float = 60.0,
    ) -> None:
        self.num_trials = trials
        self.study = optuna.create_study(
            storage=storage,
            study_name=name,
            sampler=sampler,
            pruner=pruner or optuna.pruners.NopPruner(),
            load_if_exists=True,
        )
        self._storage, self._grace = storage, grace
        self._first_seen: dict[int, float] = {}

    def trials(self) -> list[FrozenTrial]:
        """Return the trials that were started or queued, without failed ones."""
        return [trial for trial in self._all_trials() if trial.state is not TrialState.FAIL]

    def _all_trials(self) -> list[FrozenTrial]:
        with defer_interrupt():
            return self.study.get_trials(deepcopy=False)

    def ended(self) -> bool:
        """Return whether all trials have ended."""
        return sum(trial.state in ENDED for trial in self.trials()) >= self.num_trials

    def startable(self) -> int:
        """Return how many trials can be started now."""
        trials = self._all_trials()
        waiting = sum(trial.state is TrialState.WAITING for trial in trials)
        return waiting + max(0, self.num_trials - sum(_is_first(trial) for trial in trials))

    def run_one(self, objective: Callable[[Trial], float]) -> None:
        """Run a queued or new trial. Unless it ends with a result or is pruned, it is queued again."""
        begun: list[int] = []
        deferred = ExitStack()

        def run(trial: Trial) -> float:
            begun.append(trial.number)
            try:
                deferred.close()
                trial.set_user_attr("worker", f"{platform.node()}:{os.getpid()}")
                # Processes that start trials at the same time may exceed the number; those numbered last are surplus.
                if _is_first(trial) and _index(self.study, trial.number) >= self.num_trials:
                    raise _Surplus
                return objective(trial)
            except (optuna.TrialPruned, _Surplus):
                raise
            except BaseException:
                self._requeue(trial.number)
                raise

        try:
            with deferred:
                deferred.enter_context(defer_interrupt())  # until run(): a trial that Optuna has created must be queued
                self.study.optimize(run, n_trials=1, catch=(_Surplus,))
        except ValueError:  # from Optuna, if another process has failed the trial because heartbeats were missing
            if not begun or self.study.trials[begun[0]].state is not TrialState.FAIL:
                raise

    def _requeue(self, number: int) -> None:
        with defer_interrupt():
            trial = self.study.trials[number]
            if trial.state is TrialState.RUNNING:
                retry(self.study, trial)

    def retry_dead(self) -> None:
        """Fail the trials of dead processes, and queue them again."""
        with defer_interrupt(), warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            optuna.storages.fail_stale_trials(self.study)
        # A process may die between the start of a trial and its first heartbeat; Optuna never calls such a trial stale.
        now = time.monotonic()
        for trial in self.trials():
            if trial.state is not TrialState.RUNNING or "worker" in trial.user_attrs:
                self._first_seen.pop(trial.number, None)
            elif now - self._first_seen.setdefault(trial.number, now) > self._grace:
                study = optuna.load_study(study_name=self.study.study_name, storage=self._storage)
                study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
                retry(study, trial)


def _is_first(trial: FrozenTrial | Trial) -> bool:
    return "retry_of" not in trial.user_attrs


def _index(study: optuna.Study, number: int) -> int:
    """Return the index of a trial among the first attempts; a retry has the index of the trial that it repeats."""
    trials = study.get_trials(deepcopy=False)
    while (repeated := trials[number].user_attrs.get("retry_of")) is not None:
        number = repeated
    return sum(_is_first(trial) for trial in trials[:number])


class SeededSampler(BaseSampler):
    """Samples with a seed derived from the trial's place in the study.

    Parallel processes draw different points, and the same sweep draws the same points, whatever the number of processes
    and of interruptions.

    Args:
        make: Returns the sampler for a seed.
    """

    def __init__(self, make: Callable[[int], BaseSampler]) -> None:
        self._make = make

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> Any:
        """Return the parameters that are sampled together."""
        return self._sampler(study, trial).infer_relative_search_space(study, trial)

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: Any) -> dict[str, Any]:
        """Sample parameters together."""
        return self._sampler(study, trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: Any
    ) -> Any:
        """Sample one parameter."""
        return self._sampler(study, trial, param_name).sample_independent(study, trial, param_name, param_distribution)

    def _sampler(self, study: optuna.Study, trial: FrozenTrial, name: str = "") -> BaseSampler:
        return self._make(random.Random(f"{_index(study, trial.number)} {name}").getrandbits(32))
