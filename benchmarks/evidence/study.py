"""A study: methods, the trials that each may make, and how the winners are compared.

Every method gets the same number of trials, and the same number of seconds for each of them. All trials of a method
begin; after a share of their seconds the worse ones on the validation split stay where they are, and the others go on
(the rungs). The one that is left trains to the end, and then other seeds do with its settings. As the learning rate is
constant, a run that was cut short is the beginning of the longer one, and nothing is trained twice.

What is left to do follows from the records alone, so any number of processes may work on one folder and may be killed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiltsam.lab.config import TrainConfig
from tiltsam.lab.record import Record

__all__ = ["Cell", "Study", "diverged", "rows_of"]


@dataclass(frozen=True)
class Cell:
    """A run, and how far it is to go."""

    label: str
    config: TrainConfig
    until: float


@dataclass(frozen=True)
class Study:
    """See the module.

    Args:
        name: Of the study.
        base: What all runs share; its ``epochs`` are those of the reference.
        reference: The label whose seconds everybody gets.
        trials: For each label the settings of its trials, ``method`` among them.
        rungs: At which share of the seconds how many trials go on.
        seeds: The first one is that of the trials.
        looks: Evaluations a run.
    """

    name: str
    base: TrainConfig
    reference: str
    trials: Mapping[str, Sequence[Mapping[str, Any]]]
    rungs: Sequence[tuple[float, int]]
    seeds: Sequence[int]
    looks: int = 20

    def configs(self, label: str, rates: Mapping[str, float]) -> list[TrainConfig]:
        """A label's trials.

        Args:
            label: Which.
            rates: Milliseconds of a step of every label.
        """
        epochs = math.floor(10 * self.base.epochs * rates[self.reference] / rates[label]) / 10
        looks = max(1, round(epochs / self.looks))
        return [
            replace(self.base, epochs=epochs, evaluate_every=looks, seed=self.seeds[0], **settings)
            for settings in self.trials[label]
        ]

    def left(self, out: Path, rates: Mapping[str, float], labels: Sequence[str] | None = None) -> list[Cell]:
        """What can be worked on now, most urgent first: the trials of all labels, then the winners, then their seeds."""
        cells = [cell for label in labels or self.trials for cell in self._left_of(label, out, rates)]
        order = list(self.seeds)
        return sorted(cells, key=lambda c: (order.index(c.config.seed), c.until))

    def _left_of(self, label: str, out: Path, rates: Mapping[str, float]) -> Iterator[Cell]:
        *_, (share, standing) = self.standings(label, out, rates)
        missing = [c for c in standing if score_at(out, c, share) is None]
        if share < 1 or missing:
            yield from (Cell(label, c, share) for c in missing)
            return
        for seed in self.seeds[1:]:
            config = replace(standing[0], seed=seed)
            if score_at(out, config, 1.0) is None:
                yield Cell(label, config, 1.0)

    def standings(self, label: str, out: Path, rates: Mapping[str, float]) -> Iterator[tuple[float, list[TrainConfig]]]:
        """Share by share, the trials that are to reach it; the last one is the first that not all have reached."""
        standing = self.configs(label, rates)
        for share, keep in (*self.rungs, (1.0, 1)):
            yield share, standing
            scores = [score_at(out, c, share) for c in standing]
            if None in scores:
                return
            ranked = sorted(zip(standing, scores, strict=True), key=lambda pair: -(pair[1] or 0.0))
            standing = [config for config, _ in ranked[:keep]]

    def winner(self, label: str, out: Path, rates: Mapping[str, float]) -> TrainConfig | None:
        """The settings that the trials chose, if they have."""
        *_, (share, standing) = self.standings(label, out, rates)
        return standing[0] if share == 1 else None


def score_at(out: Path, config: TrainConfig, share: float) -> float | None:
    """Validation score of a run when it had used up that share of its epochs; None if it is not that far."""
    if diverged(out, config):
        return -math.inf
    for row in rows_of(out, config):
        if row["epoch"] >= share * config.epochs - 1e-6:
            return float(next(value for name, value in row.items() if name.startswith("validation_")))
    return None


def rows_of(out: Path, config: TrainConfig) -> list[dict[str, Any]]:
    """The evaluations of a run."""
    rows, _ = Record.of(out, config).metrics()
    return sorted(rows, key=lambda row: float(row["epoch"]))


def diverged(out: Path, config: TrainConfig) -> bool:
    """Whether a run's loss ceased to be finite."""
    return (Record.of(out, config).folder / "diverged").exists()
