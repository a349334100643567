"""Several methods on one task: run what is missing, reuse what is done, and put the numbers side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tiltsam.lab.config import TrainConfig
from tiltsam.lab.data import Data, LoadingCallback, data_loader
from tiltsam.lab.errors import TrainError
from tiltsam.lab.records import Record
from tiltsam.lab.stats import Mean, format_mean, mean_of
from tiltsam.lab.train import Progress, train

__all__ = ["Row", "compare", "format_rows", "summarise"]


@dataclass(frozen=True)
class Row:
    """A method's runs, averaged."""

    method: str
    """Or what it is called, if there are several of it."""
    runs: int
    """Seeds that finished."""
    failed: int
    metric: str
    mean: float
    """Of the final test score, in percent (of a correlation: times 100)."""
    error: float
    """Its standard error over seeds; NaN with one seed."""
    at_best: float
    """Mean of the test score at the epoch that was best on the validation split."""
    seconds: float
    passes: float


def compare(
    configs: Sequence[TrainConfig],
    out: Path,
    *,
    root: Path | None = None,
    download: bool = False,
    loading: LoadingCallback | None = None,
    data: Callable[[TrainConfig], Data] | None = None,
    tensorboard: bool = False,
    report: Callable[[TrainConfig, Progress], None] = lambda config, progress: None,
    tick: Callable[[TrainConfig, Progress], None] = lambda config, progress: None,
    failed: Callable[[TrainConfig, TrainError], None] = lambda config, error: None,
    names: Mapping[str, str] | None = None,
    poll_seconds: float = 1.0,
) -> list[Row]:
    """Train every config that has no result yet, and summarise.

    Several processes may work on one folder: each run is held by one of them, the others go on to the next and wait for
    it at the end.

    Args:
        configs: The cells: methods times seeds.
        out: Folder of the records.
        root: Where data sets lie.
        download: Fetch what is missing.
        loading: Told how far downloads and the decoding of images are.
        data: Returns the data of a config; by default a :func:`tiltsam.lab.data.data_loader` of the three above.
        tensorboard: Write the metrics for TensorBoard, too.
        report: Called after every epoch.
        tick: Called about twice a second within one.
        failed: Called when a run diverges; the others go on.
        names: What rows are called, by the key of their configs; others by their method.
        poll_seconds: Time between looks at runs that other processes hold.

    Raises:
        ConfigError: A setting that a method does not take, before anything is trained.
    """
    for config in configs:
        config.wrap(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=config.lr))

    data = data or data_loader(root, download=download, progress=loading)
    pending = list(configs)
    broken: list[TrainConfig] = []
    while pending:
        elsewhere = []
        for config in pending:
            record = Record.of(out, config)
            with record.lock() as mine:
                if not mine:
                    elsewhere.append(config)
                    continue
                try:
                    train(
                        config,
                        record,
                        data=data,
                        tensorboard=tensorboard,
                        report=partial(report, config),
                        tick=partial(tick, config),
                    )
                except TrainError as error:
                    broken.append(config)
                    failed(config, error)
        pending = [c for c in elsewhere if Record.of(out, c).result() is None]
        if pending:
            time.sleep(poll_seconds)
    return summarise(configs, out, broken, names)


def summarise(
    configs: Sequence[TrainConfig],
    out: Path,
    broken: Sequence[TrainConfig] = (),
    names: Mapping[str, str] | None = None,
) -> list[Row]:
    """Average over seeds what is finished."""
    groups: dict[str, list[TrainConfig]] = {}
    for config in configs:
        groups.setdefault(config.key(), []).append(config)
    return [
        _row(
            (names or {}).get(key, members[0].method),
            [r for c in members if (r := Record.of(out, c).result())],
            sum(c in broken for c in members),
        )
        for key, members in groups.items()
    ]


def _row(method: str, results: list[dict[str, Any]], failed: int) -> Row:
    score = mean_of([100 * r["score"] for r in results])

    def mean(key: str, scale: float = 1.0) -> float:
        return mean_of([scale * r.get(key, math.nan) for r in results]).value

    return Row(
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


def format_rows(rows: Sequence[Row]) -> list[list[str]]:
    """Cells of a table, a heading first."""
    metric = next((row.metric for row in rows if row.metric), "score")
    table = [["method", f"test {metric} ×100", "at best validation", "seconds", "passes", "runs"]]
    for row in rows:
        runs = f"{row.runs}" + (f", {row.failed} diverged" if row.failed else "")
        at_best = "–" if math.isnan(row.at_best) else f"{row.at_best:.2f}"  # no validation split
        score = format_mean(Mean(row.mean, row.error, row.runs), 2)
        numbers = [score, at_best, f"{row.seconds:.1f}", f"{row.passes:.0f}"]
        table.append([row.method, *(numbers if row.runs else ["–"] * 4), runs])
    return table
