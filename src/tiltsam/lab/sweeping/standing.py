"""Where the rows of a sweep stand: their trials, the choice among them, and the test of what was chosen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiltsam
from tiltsam.lab.config import TrainConfig, tilt_has_no_effect
from tiltsam.lab.records import Record
from tiltsam.lab.stats import format_mean, mean_of
from tiltsam.lab.sweeping.board import Entry, Job
from tiltsam.lab.sweeping.grids import GridPoint

__all__ = ["Standing", "Trial", "format_edges", "format_standings", "to_json", "validation_numbers"]

FORMAT = 1
ENDLESS = ("lr", "weight_decay", "rho", "radius", "t", "lam")  # settings of which a larger value, or a smaller, can be


def validation_numbers(result: Mapping[str, Any]) -> dict[str, Any]:
    """Of a run's final numbers those that a choice may look at: nothing that was measured on the test set."""
    cost = ("metric", "epoch", "passes", "seconds")
    return {k: v for k, v in result.items() if k in cost or k == "best_validation" or k.startswith("validation_")}


@dataclass(frozen=True)
class Trial:
    """A point of the grid and what became of it."""

    point: GridPoint
    entry: Entry

    @property
    def score(self) -> float:
        """On the validation split, at the end of training; NaN without one."""
        result = self.entry.result
        return float(result[f"validation_{result['metric']}"]) if self.entry.state == "done" else math.nan

    @property
    def loss(self) -> float:
        """On the validation split, at the end of training."""
        return float(self.entry.result.get("validation_loss", math.inf))


@dataclass(frozen=True)
class Standing:
    """A row of a sweep: a method, or one with settings of its own."""

    method: str
    """What the row is called: the text of its entry."""
    trials: list[Trial]
    tests: list[tuple[Job, Entry]] = dataclasses.field(default_factory=list)
    """The chosen config with each seed; none before every row's choice is made."""

    @property
    def best(self) -> Trial | None:
        """The choice: highest score on the validation split; where equal, lower loss there; where equal, first."""
        done = [trial for trial in self.trials if trial.entry.state == "done"]
        return min(done, key=lambda trial: (-trial.score, trial.loss)) if done else None

    @property
    def config(self) -> TrainConfig | None:
        """What was chosen, with the budget of the test."""
        if self.tests:
            return self.tests[0][0].config
        return self.best.point.config if self.best else None

    @property
    def edges(self) -> dict[str, str]:
        """Which of the choice's settings are the ``"smallest"`` or the ``"largest"`` tried: a better may lie beyond.

        Nothing is said of a setting whose default was tried, too (for a radius, say, it depends on the network), nor of
        a tilt where there is nothing to weigh.
        """
        found: dict[str, str] = {}
        if self.best is None:
            return found
        for name, value in self.best.point.settings.items():
            tried = {trial.point.settings[name] for trial in self.trials}
            if name not in ENDLESS or None in tried or len(tried) < 2:
                continue
            if name == "t" and tilt_has_no_effect(self.best.point.config.with_settings({"t": 1.0})):
                continue
            if value == max(tried):
                found[name] = "largest"
            elif value == min(tried) > 0:
                found[name] = "smallest"
        return found

    @property
    def finished(self) -> bool:
        """Whether every trial and every test is."""
        return all(t.entry.finished for t in self.trials) and all(entry.finished for _, entry in self.tests)

    @property
    def scores(self) -> list[float]:
        """On the test set, a seed each."""
        return [entry.result["score"] for _, entry in self.tests if entry.state == "done"]

    @property
    def mean(self) -> float:
        """Of the scores; NaN without any."""
        return mean_of(self.scores).value

    @property
    def error(self) -> float:
        """Standard error of the mean; NaN with one seed."""
        return mean_of(self.scores).error

    def count(self, state: str) -> int:
        """Trials in a state."""
        return sum(trial.entry.state == state for trial in self.trials)


def format_settings(settings: Mapping[str, Any]) -> str:
    """``lr=0.1 rho=0.05``."""
    return " ".join(
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in settings.items()
    )


def format_edges(s: Standing) -> list[str]:
    """A line for each setting whose choice lies at the edge of what was tried."""
    beyond = {"smallest": "smaller", "largest": "larger"}
    chosen = s.best.point.settings if s.best else {}
    return [
        f"{s.method}: {format_settings({name: chosen[name]})} is the {edge} that was tried: "
        f"a {beyond[edge]} one may do better"
        for name, edge in s.edges.items()
    ]


def format_standings(standings: Sequence[Standing]) -> list[list[str]]:
    """Cells of a table, a heading first."""
    table = [["method", "trials", "validation ×100", "with", "test ×100", "seeds"]]
    for s in standings:
        done = s.count("done") + s.count("diverged")
        trials = f"{done}/{len(s.trials)}" + (f", {s.count('diverged')} diverged" if s.count("diverged") else "")
        best = s.best
        chosen = [f"{100 * best.score:.2f}", format_settings(best.point.settings)] if best else ["–", "–"]
        test = format_mean(mean_of([100 * score for score in s.scores]), 2)
        broken = sum(entry.state == "diverged" for _, entry in s.tests)
        seeds = f"{len(s.scores)}/{len(s.tests)}" + (f", {broken} diverged" if broken else "")
        table.append([s.method, trials, *chosen, test, seeds if s.tests else "–"])
    return table


# ---------------------------------------------------------------- the file


def to_json(name: str, storage: str, out: Path, notes: Sequence[str], standings: Sequence[Standing]) -> dict[str, Any]:
    """What ``sweep.json`` holds; ``docs/sweep.md`` describes it."""
    first = standings[0].trials[0].point.config
    metrics = [t.entry.result["metric"] for s in standings for t in s.trials if t.entry.state == "done"]
    return {
        "format": FORMAT,
        "tiltsam": tiltsam.__version__,
        "study": name,
        "storage": storage,
        "task": first.task,
        "metric": metrics[0] if metrics else None,
        "seed": first.seed,
        "trials_per_method": len(standings[0].trials),
        "finished": all(s.finished for s in standings),
        "notes": list(notes),
        "methods": {s.method: _method_json(s, out) for s in standings},
    }


def _method_json(s: Standing, out: Path) -> dict[str, Any]:
    best = s.best
    return {
        "settings": best.point.settings if best else None,
        "config": s.config.to_json() if s.config else None,
        "edges": s.edges,
        "validation": best.score if best else None,
        "test": {
            "mean": _number(s.mean),
            "error": _number(s.error),
            "runs": [_run_json(job.config, entry, out, seed=job.config.seed) for job, entry in s.tests],
        },
        "trials": [_run_json(t.point.config, t.entry, out, settings=t.point.settings) for t in s.trials],
    }


def _run_json(config: TrainConfig, entry: Entry, out: Path, **what: Any) -> dict[str, Any]:
    numbers = {k: _number(v) if isinstance(v, float) else v for k, v in entry.result.items()}
    run = Record.of(out, config).folder.relative_to(out)
    return {**what, "state": entry.state, "run": run.as_posix(), **numbers}


def _number(value: float) -> float | None:
    """A number as JSON can hold it."""
    return value if math.isfinite(value) else None
