"""Tune several methods with equal budgets on the validation split, then test each choice once: ``tiltsam sweep``.

Every entry (a method with settings of its own) is an Optuna study with the same number of trials. The best trial
on the validation split is trained again with several seeds and tested. Any number of processes may work on one sweep,
see :mod:`tiltsam.lab.studies`; numbers travel through the database, weights stay in the records.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

import tiltsam
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.data import data_loader, find_task, fingerprint, load
from tiltsam.lab.devices import DistributedContext
from tiltsam.lab.display import QUIET, Display, Progress, SweepStatus
from tiltsam.lab.errors import ConfigError, Diverged, RecordError
from tiltsam.lab.files import finite_json, json_digest, write_json
from tiltsam.lab.flags import format_values, parse_method
from tiltsam.lab.grids import ChoiceName, Entry, Grid, PrunerName, Range, TrialSamplerName, make_entries
from tiltsam.lab.processes import run_processes
from tiltsam.lab.records import Record, task_folder
from tiltsam.lab.schedules import budget_used
from tiltsam.lab.stats import (
    Mean,
    confidence_interval,
    format_interval,
    format_mean,
    format_score,
    mean_of,
    paired_difference,
)
from tiltsam.lab.studies import ENDED, SeededSampler, SharedStudy, hide_password, open_storage, sqlite_url
from tiltsam.lab.tracking import TrackerName, find_tracker
from tiltsam.lab.train import train

__all__ = ["EntryResult", "SweepResult", "format_results", "sweep"]

RUNGS = (0.25, 0.5, 1.0)  # fractions of the budget at which "halving" compares trials
REPORTS = 20  # reports of a trial to the database: each is a transaction
POLL_SECONDS = 0.5  # between queries of the database


@dataclass(frozen=True)
class SweepPlan:
    """Everything that a process needs to work on a sweep."""

    entries: tuple[Entry, ...]
    sampler: TrialSamplerName
    pruner: PrunerName
    choose_by: ChoiceName
    trial_seeds: int
    seeds: int
    final: dict[str, float | None]
    """Settings of the tests that replace those of the trials: the budget, the validation split."""
    out: Path
    storage: str
    root: Path | None
    download: bool
    heartbeat: int
    data: str
    """Fingerprint of the user's data."""
    log: TrackerName | None

    def study_name(self, entry: Entry) -> str:
        """Return the name of an entry's study: equal for equal trials, whatever the other entries and the tests."""
        space = {name: [v.low, v.high, "log"] if isinstance(v, Range) else v for name, v in entry.space.items()}
        body = [entry.config.key(), space, entry.trials, self.sampler, self.pruner, self.choose_by, self.trial_seeds]
        body.append(self.data)
        return f"{task_folder(entry.config.task)} {entry.name[:200]} {json_digest(body)[:10]}"

    @property
    def name(self) -> str:
        """The name of the sweep and of its folder."""
        body = [[self.study_name(entry) for entry in self.entries], self.seeds, self.final]
        return f"{task_folder(self.entries[0].config.task)}-{json_digest(body)[:10]}"

    @property
    def value_name(self) -> str:
        """The name of what trials are compared by."""
        names = {"loss": "validation loss", "score": "validation error", "balanced": "balanced validation error"}
        return names[self.choose_by]

    def value(self, row: Mapping[str, Any], metric: str) -> float:
        """Return what trials are compared by, the lower the better: validation loss, or 1 minus score or accuracy.

        Args:
            row: The numbers of an epoch, or a result.
            metric: The task's metric, which is its score.

        Raises:
            ConfigError: If the row has no validation numbers, or not those to choose by.
        """
        if "validation_loss" not in row:
            raise ConfigError(f"{self.entries[0].config.task} has no validation split to choose on")
        if self.choose_by == "loss":
            return float(row["validation_loss"])
        if self.choose_by == "balanced":
            if "validation_balanced_accuracy" not in row:
                raise ConfigError(f"choose_by='balanced' needs a classification, got {self.entries[0].config.task}")
            return 1 - float(row["validation_balanced_accuracy"])
        return 1 - float(row[f"validation_{metric}"])

    @property
    def folder(self) -> Path:
        """The folder of the sweep's own files."""
        return self.out / "sweeps" / self.name


# ---------------------------------------------------------------- the work


class _TrialDisplay(Display):
    """Passes the progress of a trial on to a function, which may stop it."""

    def __init__(self, report: Callable[[Progress], None]) -> None:
        self._report = report

    def report(self, config: TrainConfig, progress: Progress) -> None:
        self._report(progress)


class SweepWorker:
    """Runs the trials and tests of a plan, together with any number of other processes.

    ``check`` is called often; what it raises ends the work.
    """

    def __init__(
        self,
        plan: SweepPlan,
        storage: optuna.storages.RDBStorage,
        device: str,
        *,
        display: Display = QUIET,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.plan, self._storage, self._device = plan, storage, device
        self._display, self._check = display, check
        self._data = data_loader(plan.root, download=plan.download, progress=display.loading)
        self._reported_at, self._reported = -math.inf, set[str]()
        self._searches = {entry.name: self._make_study(entry) for entry in plan.entries}
        self._tests: SharedStudy | None = None

    def _make_study(self, entry: Entry) -> SharedStudy:
        sampler: optuna.samplers.BaseSampler
        if self.plan.sampler == "grid":
            axes = {name: values for name, values in entry.space.items() if not isinstance(values, Range)}
            sampler = optuna.samplers.GridSampler(axes, seed=0)
        elif self.plan.sampler == "tpe":
            sampler = SeededSampler(lambda seed: optuna.samplers.TPESampler(seed=seed))
        else:
            sampler = SeededSampler(lambda seed: optuna.samplers.RandomSampler(seed=seed))
        pruner = None
        if self.plan.pruner == "halving":  # at 25% and at 50% of the budget the better half of the trials continues
            pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=round(100 * RUNGS[0]), reduction_factor=2)
        return SharedStudy(self._storage, self.plan.study_name(entry), entry.trials, sampler, pruner)

    def run(self) -> None:
        """Run trials until all have ended, then tests."""
        self._run_all({self._searches[entry.name]: partial(self._run_trial, entry) for entry in self.plan.entries})
        if (tests := self.tests()) is not None:
            self._run_all({tests: self._run_test})

    def _run_all(self, objectives: Mapping[SharedStudy, Callable[[Trial], float]]) -> None:
        while left := [study for study in objectives if not study.ended()]:
            self._check()
            study = max(left, key=SharedStudy.startable)  # the entries take turns
            if study.startable():
                study.run_one(objectives[study])
            else:
                for other in left:
                    other.retry_dead()
                time.sleep(POLL_SECONDS)
            self.report_status()
        self.report_status(force=True)

    def _run_trial(self, entry: Entry, trial: Trial) -> float:
        """Return the mean of the final values over the trial's seeds. Test numbers are not used here."""
        for name, values in entry.space.items():
            if isinstance(values, Range):
                trial.suggest_float(name, values.low, values.high, log=True)
            else:
                trial.suggest_categorical(name, values)
        config = entry.config.with_settings(trial.params)
        final_values = []
        for seed in range(self.plan.trial_seeds):
            numbers = self._train(replace(config, seed=seed), trial, pruned=seed == 0)
            final_values.append(self.plan.value(numbers, numbers["metric"]))
            numbers = {name: numbers[name] for name in numbers if name.startswith("validation_")}
            trial.set_user_attr(f"seed {seed}", numbers)
        return mean_of(final_values).value

    def _run_test(self, trial: Trial) -> float:
        """Return the test score of an entry's choice with one seed."""
        chosen = self.chosen()
        name = trial.suggest_categorical("entry", list(chosen))
        seed = trial.suggest_categorical("seed", list(range(self.plan.seeds)))
        result = self._train(replace(chosen[name], seed=seed), trial)
        trial.set_user_attr("result", result)
        return float(result["score"])

    def _train(self, config: TrainConfig, trial: Trial, *, pruned: bool = False) -> dict[str, Any]:
        """Train a run, or return its result if it exists; raise TrialPruned if it diverges or is not promising."""
        if fingerprint(config.task) != self.plan.data:
            raise RecordError(f"the data of {config.task} changed since this sweep was started: pass another --out")
        config = replace(config, device=self._device)
        record = Record.of(self.plan.out, config)
        last_row: dict[str, Any] = {}
        last_step = 0

        def report(progress: Progress) -> None:
            nonlocal last_row
            self._check()
            if not progress.row or progress.row is last_row:  # within an epoch
                return
            last_row = progress.row
            report_value(progress.row, int(min(progress.done, 1.0) * REPORTS) * 100 // REPORTS)
            self.report_status()

        def report_value(row: Mapping[str, Any], step: int) -> None:
            """Report what trials are compared by at a step, in per cent of the budget."""
            nonlocal last_step
            if pruned and step > last_step:
                trial.report(self.plan.value(row, self._data(config).metrics[0]), step)  # the data are cached
                last_step = step

        stops = RUNGS if pruned and self.plan.pruner == "halving" else (1.0,)
        try:
            for until in stops:
                numbers = self._train_locked(config, record, report, until)
                if "score" in numbers:
                    break
                if last_step < 100 * until and (row := _row_at(config, record, until)):  # it resumed from a later step
                    report_value(row, round(100 * until))
                if trial.should_prune():
                    trial.set_user_attr("reason", f"pruned after {100 * until:.0f}% of its budget")
                    raise optuna.TrialPruned
        except Diverged as error:
            trial.set_user_attr("reason", str(error))
            raise optuna.TrialPruned from None
        return numbers

    def _train_locked(
        self, config: TrainConfig, record: Record, report: Callable[[Progress], None], until: float
    ) -> dict[str, Any]:
        while True:
            with record.lock() as locked:
                if locked:
                    display = _TrialDisplay(report)
                    return train(config, record, data=self._data, log=self.plan.log, display=display, until=until)
            self._check()  # another process trains the same run: an equal point, or a trial that was taken over
            time.sleep(POLL_SECONDS)

    # ---------------------------------------------------------------- results

    def chosen(self) -> dict[str, TrainConfig]:
        """Return the config to test of each entry that has one: that of its best trial."""
        configs = {}
        for entry in self.plan.entries:
            best = _best(self._searches[entry.name].trials())
            if best is not None:
                configs[entry.name] = entry.config.with_settings(best.params).with_settings(self.plan.final)
        return configs

    def _all_trials_ended(self) -> bool:
        return all(study.ended() for study in self._searches.values())

    def tests(self) -> SharedStudy | None:
        """Return the study of the tests, once all trials have ended."""
        if self._tests is None and self._all_trials_ended() and self.plan.seeds and (names := list(self.chosen())):
            grid: dict[str, list[Any]] = {"entry": names, "seed": list(range(self.plan.seeds))}
            sampler = optuna.samplers.GridSampler(grid, seed=0)
            number = len(names) * self.plan.seeds
            self._tests = SharedStudy(self._storage, f"{self.plan.name} test", number, sampler)
        return self._tests

    def report_status(self, *, force: bool = False) -> None:
        """Report the status, if it has not been reported lately."""
        if not force and time.monotonic() - self._reported_at < POLL_SECONDS:
            return
        trials = [
            (f"{entry.name} {format_values(trial.params)}".strip(), trial)
            for entry in self.plan.entries
            for trial in self._searches[entry.name].trials()
        ]
        num_tests = 0 if self._all_trials_ended() else len(self.plan.entries) * self.plan.seeds
        tests: list[FrozenTrial] = []
        if (study := self.tests()) is not None:
            tests, num_tests = study.trials(), study.num_trials
        trials += [(f"test of {t.params.get('entry')} seed {t.params.get('seed')}", t) for t in tests]
        ended = [(name, trial) for name, trial in trials if trial.state in ENDED]
        news = [(name, trial) for name, trial in ended if f"{name} {trial.number}" not in self._reported]
        first = self._reported_at == -math.inf  # what had ended before is not news
        self._reported |= {f"{name} {trial.number}" for name, trial in news}
        running = sum((t.last_step or 0) / 100 for _, t in trials if t.state is TrialState.RUNNING)
        total = sum(entry.trials for entry in self.plan.entries) + num_tests
        lines = [] if first else [f"{name}: {_outcome(trial, self.plan.value_name)}" for name, trial in news]
        self._display.status(SweepStatus(len(ended), total, running, lines))
        self._reported_at = time.monotonic()

    def results(self) -> list[EntryResult]:
        """Return the results so far."""
        tests = [] if (study := self.tests()) is None else study.trials()
        chosen = self.chosen()
        return [
            EntryResult(
                entry,
                [trial for trial in self._searches[entry.name].trials() if trial.state in ENDED],
                {t.params["seed"]: t for t in tests if t.state in ENDED and t.params["entry"] == entry.name},
                chosen.get(entry.name),
            )
            for entry in self.plan.entries
        ]


def run_worker(plan: SweepPlan, device: str, check: Callable[[], None]) -> None:
    """Work on a plan in a process of its own."""
    try:
        for entry in plan.entries:
            TrainConfig(method=entry.config.method)
    except ConfigError as error:  # a method that the user's script added to tiltsam.METHODS
        raise ConfigError(
            f"{error}; workers do not run your script: start it several times, with one worker each"
        ) from None
    with open_storage(plan.storage, plan.heartbeat) as storage:
        SweepWorker(plan, storage, device, check=check).run()


def _row_at(config: TrainConfig, record: Record, fraction: float) -> dict[str, Any]:
    """Return the metrics of the first evaluation after a fraction of the budget; empty if there is none."""
    for row in record.metrics():
        used = {name: row[name] for name in ("epoch", "passes", "seconds")}
        if budget_used(config, DistributedContext(), **used) >= fraction - 1e-6:  # the numbers are rounded
            return row
    return {}


def _best(trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """Return the trial with the lowest value; ties, which scores often have, are broken by the validation loss."""
    complete = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    return min(complete, key=lambda trial: (round(trial.values[0], 12), _loss(trial), trial.number), default=None)


def _loss(trial: FrozenTrial) -> float:
    """Return the validation loss of a trial, averaged over its seeds."""
    rows = [row for name, row in trial.user_attrs.items() if name.startswith("seed ")]
    loss = mean_of([row.get("validation_loss", math.nan) for row in rows]).value
    return loss if math.isfinite(loss) else math.inf


def _outcome(trial: FrozenTrial, value_name: str) -> str:
    if trial.state is TrialState.PRUNED:
        return _reason(trial)
    if "result" in trial.user_attrs:
        return format_score(trial.user_attrs["result"])
    return f"{value_name} {trial.value:.4f}"


def _reason(trial: FrozenTrial) -> str:
    """Return why a trial was stopped early: pruning, or a loss that was not finite."""
    return str(trial.user_attrs.get("reason", "pruned"))


# ---------------------------------------------------------------- results


@dataclass(frozen=True)
class EntryResult:
    """The trials of an entry, its choice and the tests of it."""

    entry: Entry
    trials: list[FrozenTrial]
    tests: dict[int, FrozenTrial]
    """By seed."""
    config: TrainConfig | None
    """The chosen config, with the budget of the tests; None if no trial has a finite loss."""

    @property
    def name(self) -> str:
        """The text of the entry."""
        return self.entry.name

    @property
    def best(self) -> FrozenTrial | None:
        """The chosen trial."""
        return _best(self.trials)

    @property
    def scores(self) -> dict[int, float]:
        """The test scores by seed."""
        return {seed: t.values[0] for seed, t in sorted(self.tests.items()) if t.state is TrialState.COMPLETE}

    def edges(self) -> dict[str, str]:
        """Return the settings whose chosen value is the ``smallest`` or ``largest`` of a grid; ranges are left out."""
        edges = {}
        for name, values in self.entry.space.items():
            if self.best is None or isinstance(values, Range) or not _is_axis(values):
                continue
            value = self.best.params[name]
            if value in (min(values), max(values)):
                edges[name] = "smallest" if value == min(values) else "largest"
        return edges


def _is_axis(values: Sequence[Any]) -> bool:
    """Return whether values are several floats: the ends of counts and of choices mean nothing."""
    return len(values) > 1 and all(isinstance(value, float) for value in values)


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep."""

    path: Path
    """``sweep.json``."""
    entries: list[EntryResult]
    value_name: str
    """What trials were compared by."""
    notes: list[str] = field(default_factory=list)
    """Lines about the fairness of the comparison: smaller grids, choices at the edge of a grid."""

    def difference(self, result: EntryResult) -> Mean:
        """Return the mean difference of an entry's test scores to the first entry's, seed by seed."""
        return paired_difference(result.scores, self.entries[0].scores)


def format_results(result: SweepResult) -> list[list[str]]:
    """Return the cells of a table, headings first; scores and differences are times 100."""
    first = result.entries[0].name
    table = [["method", "trials", "chosen", result.value_name, "test ×100", f"minus {first}", "95% interval", "seeds"]]
    for row in result.entries:
        reasons = [_reason(trial) for trial in row.trials if trial.state is TrialState.PRUNED]
        pruned = sum(reason.startswith("pruned") for reason in reasons)
        counts = {"pruned": pruned, "diverged": len(reasons) - pruned}
        trials = ", ".join([f"{len(row.trials)}", *(f"{count} {what}" for what, count in counts.items() if count)])
        best = row.best
        chosen = ["–", "–"] if best is None else [format_values(best.params) or "–", f"{best.value:.4f}"]
        score = format_mean(_times_100(mean_of(row.scores.values())), 2)
        difference, interval = "", ""
        if row.name != first and row.scores:
            mean = _times_100(result.difference(row))
            difference, interval = f"{mean.value:+z.2f}", format_interval(mean)
        table.append([row.name, trials, *chosen, score, difference, interval, f"{len(row.scores)}"])
    return table


def _times_100(mean: Mean) -> Mean:
    return Mean(100 * mean.value, 100 * mean.error, mean.runs)


def _to_json(plan: SweepPlan, result: SweepResult, *, finished: bool) -> dict[str, Any]:
    """Return the content of ``sweep.json``; ``docs/sweep.md`` describes it."""
    return {
        "format": 1,
        "tiltsam": tiltsam.__version__,
        "sweep": plan.name,
        "storage": hide_password(plan.storage),
        "task": plan.entries[0].config.task,
        "sampler": plan.sampler,
        "pruner": plan.pruner,
        "choose_by": plan.choose_by,
        "trial_seeds": plan.trial_seeds,
        "finished": finished,
        "notes": result.notes,
        "methods": {row.name: _entry_json(plan, row, result) for row in result.entries},
    }


def _entry_json(plan: SweepPlan, row: EntryResult, result: SweepResult) -> dict[str, Any]:
    def run(config: TrainConfig) -> str:
        return Record.of(plan.out, config).folder.relative_to(plan.out).as_posix()

    def state(trial: FrozenTrial) -> dict[str, Any]:
        if trial.state is TrialState.COMPLETE:
            return {"state": "done"}
        return {"state": "pruned", "reason": _reason(trial)}

    key = plan.value_name.replace(" ", "_")
    test, difference = mean_of(row.scores.values()), result.difference(row)
    return {
        "study": plan.study_name(row.entry),
        "settings": row.best.params if row.best else None,
        key: row.best.value if row.best else None,
        "edges": row.edges(),
        "test": {
            "mean": test.value,
            "error": test.error,
            "difference": difference.value,
            "interval": confidence_interval(difference),
            "runs": [
                {"seed": seed, "run": run(replace(row.config, seed=seed)), **state(t), **t.user_attrs.get("result", {})}
                for seed, t in sorted(row.tests.items())
                if row.config is not None
            ],
        },
        "trials": [
            {
                "settings": trial.params,
                key: trial.value if trial.state is TrialState.COMPLETE else None,
                "run": run(row.entry.config.with_settings(trial.params)),
                **state(trial),
            }
            for trial in row.trials
        ],
    }


# ---------------------------------------------------------------- the sweep


def sweep(
    base: TrainConfig,
    methods: Sequence[str],
    grid: Grid,
    out: Path,
    *,
    sampler: TrialSamplerName = "grid",
    trials: int | None = None,
    pruner: PrunerName = "none",
    choose_by: ChoiceName = "score",
    trial_seeds: int = 1,
    seeds: int = 3,
    final_epochs: float | None = None,
    final_passes: float | None = None,
    final_seconds: float | None = None,
    final_validation: float | None = None,
    settings: Mapping[str, Any] | None = None,
    storage: str | None = None,
    workers: int = 1,
    root: Path | None = None,
    download: bool = False,
    heartbeat: int = 10,
    log: TrackerName | None = None,
    display: Display = QUIET,
) -> SweepResult:
    """Tune each method with the same number of trials, choose on the validation split, and test the choices.

    The same call resumes an interrupted sweep, or joins one that other processes work on. Runs that exist in ``out``
    are not trained again.

    Args:
        base: The settings that all trials share; its method and seed are replaced. For equal passes or seconds, set
            ``epochs=math.inf``. ``device`` may name several, as in ``"cuda:0,cuda:1"``: workers use them in turn.
        methods: Methods, optionally with settings that no grid changes, as in ``"tsam:num_samples=1"``.
        grid: Values by name, ``{"lr": [0.01, 0.1]}``, or by ``"METHOD:NAME"`` for one method; a :class:`Range` with
            the samplers random and tpe. Each method uses the settings that it has.
        out: Folder of the records, of the database and of ``sweeps/NAME/sweep.json``.
        sampler: ``"grid"`` tries all points, or ``trials`` of them at random; ``"random"`` samples independently;
            ``"tpe"`` samples near good trials.
        trials: Trials per entry; by default the size of the largest grid.
        pruner: ``"halving"`` stops the worse half of the trials at 25% and again at 50% of the budget.
        choose_by: ``"score"`` chooses the highest validation score, and of equal ones the lowest validation loss;
            ``"loss"`` the lowest validation loss; ``"balanced"`` the highest mean accuracy of the classes, for
            long-tailed tasks. With noisy validation labels, the loss favours models that are unsure or untrained, and
            penalises negative tilts over examples.
        trial_seeds: Runs per trial, with seeds 0, 1, …; their losses or scores are averaged.
        seeds: Tests of each choice, with seeds 0, 1, …; 0 tests nothing.
        final_epochs: Epochs of the tests. A final budget replaces that of the trials.
        final_passes: Passes of the tests.
        final_seconds: Seconds of the tests.
        final_validation: Fraction held out in the tests; 0 trains each choice on all training examples.
        settings: Settings of all methods that have them, as in ``{"rho": 0.2}``; entries and grids take precedence.
        storage: URL of the database; by default ``sqlite:///OUT/sweeps.db``.
        workers: Processes to start; 1 works in this one.
        root: Folder of the data sets.
        download: Download missing data sets.
        heartbeat: Seconds between heartbeats. After six missing ones other processes take over a trial.
        log: Also write the metrics of all runs to this tracker.
        display: Shows notes, the status, and what is loaded.

    Raises:
        ConfigError: If an argument cannot be used, or the database cannot be opened.
        UserError: If the database is lost, or a worker fails.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> short = TrainConfig("digits", epochs=1)
        >>> result = sweep(short, ["erm", "sam"], {"lr": [0.01, 0.1]}, Path(folder.name), seeds=1)
        >>> [(row.name, len(row.trials), len(row.scores)) for row in result.entries]
        [('erm', 2, 1), ('sam', 2, 1)]
        >>> result.entries[1].config.lr
        0.1
        >>> folder.cleanup()
    """
    for name, number, least in (
        ("seeds", seeds, 0),
        ("trial_seeds", trial_seeds, 1),
        ("workers", workers, 1),
        ("heartbeat", heartbeat, 1),
    ):
        if number < least:
            raise ConfigError(f"{name} must be at least {least}, got {number}")
    if not base.validation > 0:
        raise ConfigError(f"validation must be > 0, because a sweep chooses on it, got {base.validation}")
    find_task(base.task)  # before a folder is created for it
    if log is not None:
        find_tracker(log)
    devices = [name.strip() for name in base.device.split(",")]
    entries, notes = make_entries(replace(base, device=devices[0], seed=0), methods, grid, trials, sampler, settings)
    final = _final_budget(final_epochs, final_passes, final_seconds, entries)
    if final_validation is not None:
        final["validation"] = final_validation
    for entry in entries:
        entry.config.with_settings(final)  # raises now, not after the trials
    plan = SweepPlan(
        entries=tuple(entries),
        sampler=sampler,
        pruner=pruner,
        choose_by=choose_by,
        trial_seeds=trial_seeds,
        seeds=seeds,
        final=final,
        out=out,
        storage=storage or sqlite_url(out),
        root=root,
        download=download,
        heartbeat=heartbeat,
        data=fingerprint(base.task),
        log=log,
    )
    timed = final.get("seconds") or any(entry.config.seconds for entry in entries)
    if timed and workers > len(set(devices)):
        notes.append(f"{workers} workers share {base.device}, and the budget is in seconds: use one worker per device")
    for note in notes:
        display.print(note)
    out.mkdir(parents=True, exist_ok=True)
    with open_storage(plan.storage, heartbeat) as database:
        worker = SweepWorker(plan, database, devices[0], display=display)
        try:
            worker.report_status()
            if workers == 1:
                worker.run()
            else:
                if download:  # once, before several processes look for it
                    load(entries[0].config, root, download=True, progress=display.loading)
                arguments = [(plan, devices[k % len(devices)]) for k in range(workers)]
                run_processes(run_worker, arguments, plan.folder, poll=worker.report_status, notify=display.print)
        except KeyboardInterrupt:
            _write_result(plan, worker, notes)
            raise
        worker.report_status(force=True)
        return _write_result(plan, worker, notes)


def _final_budget(
    epochs: float | None, passes: float | None, seconds: float | None, entries: Sequence[Entry]
) -> dict[str, float | None]:
    budget = {"epochs": epochs, "passes": passes, "seconds": seconds}
    given = {name: value for name, value in budget.items() if value is not None}
    for name, value in given.items():
        if not value > 0:
            raise ConfigError(f"final_{name} must be > 0, got {value:g}")
        for entry in entries:
            if own := budget.keys() & parse_method(entry.name):
                raise ConfigError(f"{entry.name}: sets {min(own)}, and final_{name} would change it")
    return {**budget, "epochs": epochs or math.inf} if given else {}


def _write_result(plan: SweepPlan, worker: SweepWorker, notes: Sequence[str]) -> SweepResult:
    result = SweepResult(plan.folder / "sweep.json", worker.results(), plan.value_name, list(notes))
    for row in result.entries:
        for name, edge in row.edges().items():
            assert row.best is not None
            chosen = format_values({name: row.best.params[name]})
            beyond = "a smaller one" if edge == "smallest" else "a larger one"
            result.notes.append(f"{row.name}: {chosen} is the {edge} value of its grid; {beyond} may be better")
    plan.folder.mkdir(parents=True, exist_ok=True)
    tested = sum(len(row.tests) for row in result.entries)
    expected = sum(row.config is not None for row in result.entries) * plan.seeds
    searched = all(len(row.trials) >= row.entry.trials for row in result.entries)
    finished = searched and tested >= expected
    write_json(result.path, finite_json(_to_json(plan, result, finished=finished)))
    return result
