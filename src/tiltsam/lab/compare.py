"""Several methods on one task: train missing runs, reuse finished ones, and average over seeds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tiltsam.lab.config import TrainConfig
from tiltsam.lab.data import Data, data_loader
from tiltsam.lab.errors import ConfigError, TrainError
from tiltsam.lab.flags import method_configs
from tiltsam.lab.records import Record
from tiltsam.lab.stats import Mean, format_mean, mean_of
from tiltsam.lab.tracking import TrackerName
from tiltsam.lab.train import Progress, train

__all__ = ["ComparisonRow", "compare", "comparison_cells", "format_rows"]

POLL_SECONDS = 1.0  # between checks of runs that other processes train


@dataclass(frozen=True)
class ComparisonRow:
    """The averages over the runs of a method."""

    method: str
    """The name of the method, with its own settings."""
    runs: int
    """Finished runs."""
    failed: int
    """Failed runs."""
    metric: str
    mean: float
    """Mean of the final test score, times 100."""
    error: float
    """Standard error of the mean; NaN with one seed."""
    at_best: float
    """Mean of the test score at the best epoch on the validation split, times 100."""
    seconds: float
    passes: float


def comparison_cells(
    config: TrainConfig, methods: Sequence[str], seeds: int, settings: Mapping[str, Any] | None = None
) -> dict[str, list[TrainConfig]]:
    """Return the configs to compare, one per seed, by method.

    Args:
        config: The settings that all methods share; its method and seed are replaced.
        methods: Methods, optionally with settings, as in ``asam:rho=5`` or ``tsam:num_samples=3,t=100``.
        seeds: Runs per method, with seeds 0, 1, ….
        settings: Settings of all methods that have them, as in ``{"rho": 0.2}``; a method's own take precedence.

    Raises:
        ConfigError: If there is no such method or setting, two methods are the same runs, or ``seeds`` is less than 1.

    Example:
        >>> cells = comparison_cells(TrainConfig("digits"), ["erm", "tsam:t=5"], seeds=1, settings={"rho": 0.2})
        >>> [(name, run.options) for name, runs in cells.items() for run in runs]
        [('erm', {}), ('tsam:t=5', {'rho': 0.2, 't': 5.0})]
    """
    if seeds < 1:
        raise ConfigError(f"seeds must be at least 1, got {seeds}")
    first: dict[str, str] = {}
    configs = method_configs(config, methods, settings)
    for name, one in configs.items():
        if (other := first.setdefault(one.key(), name)) != name:
            raise ConfigError(f"{other} and {name} are the same runs: leave one out")
    return {name: [replace(one, seed=seed) for seed in range(seeds)] for name, one in configs.items()}


def compare(
    cells: Mapping[str, Sequence[TrainConfig]],
    out: Path = Path("runs"),
    *,
    data: Callable[[TrainConfig], Data] | None = None,
    log: TrackerName | None = None,
    setup: Callable[[TrainConfig, dict[str, Any]], None] = lambda config, setup: None,
    report: Callable[[TrainConfig, Progress], None] = lambda config, progress: None,
    failed: Callable[[TrainConfig, TrainError], None] = lambda config, error: None,
    skip: Callable[[TrainConfig], None] = lambda run: None,
    notify: Callable[[str], None] = lambda line: None,
) -> list[ComparisonRow]:
    """Train every run that has no result yet, seed by seed, and average over seeds.

    Several processes may work on one folder. Each run is locked by one of them; the others go on to the next run, and
    wait for locked runs at the end.

    Args:
        cells: The runs by the name of their row, one per seed; see :func:`comparison_cells`.
        out: Folder of the records.
        data: Returns the data of a config; by default a :func:`tiltsam.lab.data.data_loader`.
        log: Also write the metrics to this tracker.
        setup: Called before each run with the content of ``setup.json``; see :func:`tiltsam.lab.train.train`.
        report: Called after every epoch, and about twice a second within one.
        failed: Called when a run fails; the others continue.
        skip: Called with a run that another process trains.
        notify: Called with a line about runs of other processes that are waited for.

    Raises:
        ConfigError: If a setting is out of bounds, before anything is trained.

    Example:
        >>> cells = comparison_cells(TrainConfig("digits", epochs=20), ["erm", "tsam:t=5"], seeds=3)
        >>> rows = compare(cells)  # doctest: +SKIP
    """
    for configs in cells.values():
        configs[0].check_options()

    data = data or data_loader()
    pending = list(dict.fromkeys(config for seed in zip(*cells.values(), strict=True) for config in seed))
    failures: list[TrainConfig] = []
    waiting_for = 0
    while pending:
        elsewhere = []
        for config in pending:
            record = Record.of(out, config)
            with record.lock() as locked:
                if not locked:
                    elsewhere.append(config)
                    skip(config)
                    continue
                try:
                    train(
                        config,
                        record,
                        data=data,
                        log=log,
                        setup=partial(setup, config),
                        report=partial(report, config),
                    )
                except TrainError as error:
                    failures.append(config)
                    failed(config, error)
        pending = [c for c in elsewhere if Record.of(out, c).result() is None]
        if pending:
            if len(pending) != waiting_for:
                waiting_for = len(pending)
                runs = "1 run" if waiting_for == 1 else f"{waiting_for} runs"
                notify(f"waiting for {runs} that other processes train")
            time.sleep(POLL_SECONDS)
    return [
        _row(
            name,
            [r for config in configs if (r := Record.of(out, config).result())],
            sum(config in failures for config in configs),
        )
        for name, configs in cells.items()
    ]


def _row(method: str, results: list[dict[str, Any]], failed: int) -> ComparisonRow:
    score = mean_of([100 * r["score"] for r in results])

    def mean(key: str, scale: float = 1.0) -> float:
        return mean_of([scale * r.get(key, math.nan) for r in results]).value

    return ComparisonRow(
        method=method,
        runs=len(results),
        failed=failed,
        metric=results[0]["metric"] if results else "",
        mean=score.value,
        error=score.error,
        at_best=mean("score_at_best_validation", 100),
        seconds=mean("seconds"),
        passes=mean("passes"),
    )


def format_rows(rows: Sequence[ComparisonRow]) -> list[list[str]]:
    """Return the cells of a table, headings first."""
    metric = next((row.metric for row in rows if row.metric), "score")
    table = [["method", f"test {metric} ×100", "at best validation", "seconds", "passes", "runs"]]
    for row in rows:
        runs = f"{row.runs}" + (f", {row.failed} failed" if row.failed else "")
        at_best = "–" if math.isnan(row.at_best) else f"{row.at_best:.2f}"  # no validation split
        score = format_mean(Mean(row.mean, row.error, row.runs), 2)
        numbers = [score, at_best, f"{row.seconds:.1f}", f"{row.passes:.0f}"]
        table.append([row.method, *(numbers if row.runs else ["–"] * 4), runs])
    return table
