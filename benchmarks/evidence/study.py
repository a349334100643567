"""A study: methods, the trials that each may make, and how the winners are compared.

Every method gets the same number of trials, and the same number of seconds for each of them (or of passes, where
seconds cannot be relied on). All trials of a method begin; after a share of their seconds the worse ones on the
validation split stay where they are, and the others go on (the rungs). Of those that reach the end the best one's
settings are run with other seeds. As the learning rate is constant, a run that was cut short is the beginning of the
longer one, and nothing is trained twice.

What is left to do follows from the records alone, so any number of processes may work on one folder and may be killed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tiltsam.lab.config import TrainConfig
from tiltsam.lab.records import Record

__all__ = ["Cell", "Rates", "Study", "Variants", "diverged", "rows_of", "score_at", "wanted"]

Rates = Mapping[str, float]
"""What a step of every label costs: milliseconds, with nothing else running, or passes."""


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
        title: Of its figures.
        family: Studies of one family share their rates.
        unit: Of a thousand times the cost of a step.
        same_steps: Labels whose steps are those of another label, by which they are timed.
    """

    name: str
    base: TrainConfig
    reference: str
    trials: Mapping[str, Sequence[Mapping[str, Any]]]
    rungs: Sequence[tuple[float, int]]
    seeds: Sequence[int]
    looks: int = 20
    title: str = ""
    family: str = ""
    unit: Literal["seconds", "thousand passes"] = "seconds"
    same_steps: Mapping[str, str] = field(default_factory=dict)

    def timed(self, labels: Sequence[str] | None = None) -> set[str]:
        """The labels whose rates are needed, for all of its labels or for some."""
        mine = wanted(labels, self.trials)
        return {self.reference, *(self.same_steps.get(label, label) for label in mine)}

    def rate(self, label: str, rates: Rates) -> float:
        """What a step of a label costs."""
        return rates[self.same_steps.get(label, label)]

    def epochs(self, label: str, rates: Rates) -> float:
        """As many as fit into the seconds of the reference, in tenths."""
        return math.floor(10 * self.base.epochs * rates[self.reference] / self.rate(label, rates) + 1e-6) / 10

    def configs(self, label: str, rates: Rates) -> list[TrainConfig]:
        """A label's trials."""
        epochs = self.epochs(label, rates)
        looks = max(1, round(epochs / self.looks))
        usual = replace(self.base, epochs=epochs, evaluate_every=looks, seed=self.seeds[0])
        return [usual.with_settings(settings) for settings in self.trials[label]]

    def left(self, out: Path, rates: Rates, labels: Sequence[str] | None = None) -> list[Cell]:
        """What can be worked on now, most urgent first: trials, in the order of labels, then the winners' seeds."""
        mine = wanted(labels, self.trials)
        cells = [cell for label in mine for cell in self._left_of(label, out, rates)]
        order = list(self.seeds)
        return sorted(cells, key=lambda cell: (order.index(cell.config.seed), cell.until))

    def _left_of(self, label: str, out: Path, rates: Rates) -> Iterator[Cell]:
        standing: list[TrainConfig] = []
        for share, standing in self.standings(label, out, rates):
            # Looked at once: what another process ends meanwhile counts as missing, and work goes on.
            if missing := [c for c in standing if score_at(out, c, share) is None]:
                yield from (Cell(label, c, share) for c in missing)
                if share < 1 or len(standing) > 1:
                    return
                # A single trial is already chosen: its other seeds can run at the same time.
        if chosen := _first(standing, out):
            others = [replace(chosen, seed=seed) for seed in self.seeds[1:]]
            yield from (Cell(label, c, 1.0) for c in others if score_at(out, c, 1.0) is None)

    def standings(self, label: str, out: Path, rates: Rates) -> Iterator[tuple[float, list[TrainConfig]]]:
        """Share by share, the trials that are to reach it; no more after a share that not all have reached."""
        standing = self.configs(label, rates)
        for share, keep in (*self.rungs, (1.0, 1)):
            yield share, standing
            if None in [score_at(out, c, share) for c in standing]:
                return
            standing = _best(standing, out, share)[:keep]

    def winner(self, label: str, out: Path, rates: Rates) -> TrainConfig | None:
        """The settings that the trials chose, once they have; None too if all of them diverged."""
        *_, (share, standing) = self.standings(label, out, rates)
        if share < 1 or None in [score_at(out, c, share) for c in standing]:
            return None
        return _first(standing, out)

    def settled(self, out: Path, rates: Rates, labels: Sequence[str] | None = None) -> dict[str, TrainConfig]:
        """By label, the settings that are run with every seed: its winner, where there is one."""
        chosen = {label: self.winner(label, out, rates) for label in wanted(labels, self.trials)}
        return {label: config for label, config in chosen.items() if config is not None}


@dataclass(frozen=True)
class Variants:
    """Runs that are compared with each other as they are: nothing is chosen.

    Args:
        name: Of the study.
        configs: By label: what was varied, a space, and its value.
        seeds: Of each.
        title: Of its figures.
        family: As of a study.
    """

    name: str
    configs: Mapping[str, TrainConfig]
    seeds: Sequence[int]
    title: str = ""
    family: str = ""

    def left(self, out: Path, rates: Rates, labels: Sequence[str] | None = None) -> list[Cell]:
        """What is not finished, seed by seed, in the order of labels."""
        del rates
        mine = wanted(labels, self.configs)
        cells = [Cell(label, replace(self.configs[label], seed=seed), 1.0) for seed in self.seeds for label in mine]
        return [cell for cell in cells if score_at(out, cell.config, 1.0) is None]

    def settled(self, out: Path, rates: Rates, labels: Sequence[str] | None = None) -> dict[str, TrainConfig]:
        """By label, the settings that are run with every seed: all of them, under the first of several labels."""
        del out, rates
        first: dict[TrainConfig, str] = {}
        for label in wanted(labels, self.configs):
            first.setdefault(replace(self.configs[label], seed=self.seeds[0]), label)
        return {label: config for config, label in first.items()}


def wanted(labels: Sequence[str] | None, known: Mapping[str, object]) -> list[str]:
    """Those of a study's labels that are asked for, in that order; without labels all of them."""
    return [label for label in labels or known if label in known]


def _first(configs: Sequence[TrainConfig], out: Path) -> TrainConfig | None:
    """The best at the end; None if all diverged."""
    first = _best(configs, out, 1.0)[0]
    return None if score_at(out, first, 1.0) == -math.inf else first


def _best(configs: Sequence[TrainConfig], out: Path, share: float) -> list[TrainConfig]:
    """Best first; of equals the one with the smaller validation loss."""

    def rank(config: TrainConfig) -> tuple[float, float]:
        row = _row_at(out, config, share) or {}
        return -(score_at(out, config, share) or 0.0), float(row.get("validation_loss", 0.0))

    return sorted(configs, key=rank)


def score_at(out: Path, config: TrainConfig, share: float) -> float | None:
    """Validation score of a run when it had used up that share of its epochs.

    None if it is not that far, or has not written its result; minus infinity if it diverged before.
    """
    row = _row_at(out, config, share)
    if row is None:
        return -math.inf if diverged(out, config) else None
    if share >= 1 and Record.of(out, config).result() is None:
        return None
    return float(next(value for name, value in row.items() if name.startswith("validation_")))


def _row_at(out: Path, config: TrainConfig, share: float) -> dict[str, Any] | None:
    return next((row for row in rows_of(out, config) if row["epoch"] >= share * config.epochs - 1e-6), None)


def rows_of(out: Path, config: TrainConfig) -> list[dict[str, Any]]:
    """The evaluations of a run."""
    rows, _ = Record.of(out, config).metrics()
    return sorted(rows, key=lambda row: float(row["epoch"]))


def diverged(out: Path, config: TrainConfig) -> bool:
    """Whether a run's loss ceased to be finite."""
    return Record.of(out, config).diverged()
