"""Several methods on one task: train missing runs, and reuse finished ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiltsam.lab.config import TrainConfig
from tiltsam.lab.data import Data, data_loader
from tiltsam.lab.display import QUIET, Display
from tiltsam.lab.errors import ConfigError, TrainError
from tiltsam.lab.flags import check_distinct, method_configs
from tiltsam.lab.records import Record
from tiltsam.lab.stats import count_of
from tiltsam.lab.tracking import TrackerName
from tiltsam.lab.train import train

__all__ = ["compare", "runs_by_method"]

POLL_SECONDS = 1.0  # between checks of runs that other processes train


def runs_by_method(
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
        >>> methods = runs_by_method(TrainConfig("digits"), ["erm", "tsam:t=5"], seeds=1, settings={"rho": 0.2})
        >>> [(name, run.options) for name, runs in methods.items() for run in runs]
        [('erm', {}), ('tsam:t=5', {'rho': 0.2, 't': 5.0})]
    """
    if seeds < 1:
        raise ConfigError(f"seeds must be at least 1, got {seeds}")
    configs = method_configs(config, methods, settings)
    check_distinct({name: one.key() for name, one in configs.items()})
    return {name: [replace(one, seed=seed) for seed in range(seeds)] for name, one in configs.items()}


def compare(
    runs: Mapping[str, Sequence[TrainConfig]],
    out: Path = Path("runs"),
    *,
    data: Callable[[TrainConfig], Data] | None = None,
    log: TrackerName | None = None,
    display: Display = QUIET,
) -> dict[TrainConfig, TrainError]:
    """Train every run that has no result yet, seed by seed, and return the errors of those that failed.

    Several processes may work on one folder. Each run is locked by one of them; the others go on to the next run, and
    wait for locked runs at the end.

    Args:
        runs: The runs by method, one per seed; see :func:`runs_by_method`.
        out: Folder of the records.
        data: Returns the data of a config; by default a :func:`tiltsam.lab.data.data_loader`.
        log: Also write the metrics to this tracker.
        display: Shows the progress of each run.

    Raises:
        ConfigError: If a setting is out of bounds, before anything is trained.

    Example:
        >>> runs = runs_by_method(TrainConfig("digits", epochs=20), ["erm", "tsam:t=5"], seeds=3)
        >>> failed = compare(runs)  # doctest: +SKIP
    """
    for configs in runs.values():
        configs[0].check_options()

    data = data or data_loader()
    pending = list(dict.fromkeys(config for seed in zip(*runs.values(), strict=True) for config in seed))
    failures: dict[TrainConfig, TrainError] = {}
    waiting_for = 0
    while pending:
        elsewhere = []
        for config in pending:
            record = Record.of(out, config)
            with record.lock() as locked:
                if not locked:
                    elsewhere.append(config)
                    display.skip(config)
                    continue
                try:
                    train(config, record, data=data, log=log, display=display)
                except TrainError as error:
                    failures[config] = error
                    display.failed(config, error)
        pending = [c for c in elsewhere if Record.of(out, c).result() is None]
        if pending:
            if len(pending) != waiting_for:
                waiting_for = len(pending)
                display.print(f"waiting for {count_of(waiting_for, 'run')} that other processes train")
            time.sleep(POLL_SECONDS)
    return failures
