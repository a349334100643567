"""Runs that differ in the seed alone are one setting: their numbers are averaged, with a standard error."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import Any

from tiltsam.lab.config import METHOD_SETTINGS, TrainConfig
from tiltsam.lab.palette import method_color
from tiltsam.lab.report.runs import Problem, Reading, Row, Run
from tiltsam.lab.stats import Mean, mean_of

__all__ = ["Setting", "Task", "arrange"]

NO_SETTING = ("task", "method", "seed", "device")  # what does not make another setting of a task and method
DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(TrainConfig) if f.default is not MISSING}


@dataclass(frozen=True)
class Setting:
    """A method with its settings on a task: one run per seed."""

    method: str
    options: dict[str, Any]
    """Every setting that this method heeds."""
    runs: list[Run]
    name: str
    """The method, and what tells it from the method's other settings on the task."""
    differs: dict[str, Any]
    """What the settings column shows: what is not the same throughout the task, and what some methods alone heed, if it
    is not the default."""
    number: int
    """Its place, from 0, among the settings that have its colour: those of its method, or of all that are not ours."""

    @property
    def told(self) -> str:
        """What :attr:`differs` holds, in words."""
        return " ".join(f"{name}={shown(value)}" for name, value in self.differs.items())

    @cached_property
    def finished(self) -> list[Run]:
        """The runs with final numbers."""
        return [run for run in self.runs if run.finished]

    def final(self, key: str, scale: float = 1.0) -> Mean:
        """A final number, averaged over the finished runs."""
        results = [run.result for run in self.runs if run.result is not None]
        return mean_of([scale * row.get(key, math.nan) for row in results])

    @cached_property
    def epochs(self) -> list[list[Row]]:
        """The lines of every run at each epoch; a last epoch that a budget cut short counts as that epoch."""
        found: dict[int, list[Row]] = {}
        for run in self.runs:
            for row in run.rows:
                found.setdefault(math.ceil(row["epoch"]), []).append(row)
        return [found[epoch] for epoch in sorted(found)]

    def curve(self, key: str, scale: float = 1.0) -> list[Mean]:
        """A number along the epochs, averaged over the runs that have got there."""
        if (key, scale) not in self._curves:  # several figures want the same
            means = [mean_of([scale * row.get(key, math.nan) for row in rows]) for rows in self.epochs]
            self._curves[key, scale] = means
        return self._curves[key, scale]

    @cached_property
    def _curves(self) -> dict[tuple[str, float], list[Mean]]:
        return {}


@dataclass(frozen=True)
class Task:
    """Everything about one task."""

    name: str
    metric: str
    settings: list[Setting]
    shared: dict[str, Any]
    """The other settings, each the same in all runs that heed it."""
    problems: list[Problem]

    @property
    def runs(self) -> list[Run]:
        """All of them."""
        return [run for setting in self.settings for run in setting.runs]

    @property
    def unit(self) -> str:
        """Of scores times 100."""
        return "%" if self.metric in ("accuracy", "f1") else "×100"

    @property
    def loss_unit(self) -> str:
        """Of a mean cross-entropy, or of a mean squared error."""
        return "squared error" if self.metric in ("pearson", "spearman") else "nats"

    @cached_property
    def chosen(self) -> list[Setting]:
        """Of each method the setting with the best final validation score; the test is not chosen on.

        Of equal ones it is that with the lower loss there, as in a sweep; without scores, the first.
        """
        best: dict[str, Setting] = {}
        for setting in self.settings:
            now = best.get(setting.method)
            if now is None or self._rank(setting) > self._rank(now):
                best[setting.method] = setting
        return list(best.values())

    @cached_property
    def tried(self) -> Counter[str]:
        """How many settings each method has."""
        return Counter(setting.method for setting in self.settings)

    @property
    def pick(self) -> str:
        """Which settings are :attr:`chosen`, in words."""
        blind = any(self.tried[setting.method] > 1 and not self.validated(setting) for setting in self.chosen)
        rest = ", or its first where none has a validation score" if blind else ""
        return f"each method's best setting on validation{rest}"

    def validated(self, setting: Setting) -> bool:
        """Whether it has a validation score at the end of training."""
        return self._rank(setting)[0] > -math.inf

    def _rank(self, setting: Setting) -> tuple[float, float]:
        score, loss = (setting.final(f"validation_{name}").value for name in (self.metric, "loss"))
        return score if math.isfinite(score) else -math.inf, -loss if math.isfinite(loss) else -math.inf


def arrange(reading: Reading) -> list[Task]:
    """Runs by task and setting, tasks by name and methods in the usual order; and what is missing where."""
    by_task: dict[str, list[Run]] = {}
    for run in reading.runs:
        by_task.setdefault(run.task, []).append(run)
    return [
        _task(name, runs, [p for p in reading.problems if p.task == name]) for name, runs in sorted(by_task.items())
    ]


def _task(name: str, runs: list[Run], problems: list[Problem]) -> Task:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        key = json.dumps([run.method, _options(run)], sort_keys=True, default=str)
        groups.setdefault(key, []).append(run)
    usual = {method: i for i, method in enumerate(METHOD_SETTINGS)}
    ordered = sorted(
        groups.values(), key=lambda g: (usual.get(g[0].method, 99), g[0].method, _sortable(_options(g[0])))
    )
    options = [_options(group[0]) for group in ordered]
    methods = [group[0].method for group in ordered]
    colors = [method_color(method) for method in methods]
    varying = _varying(options)
    everywhere = set.intersection(*(set(body) for body in options))
    own = {m: _varying([o for o, method in zip(options, methods, strict=True) if method == m]) for m in set(methods)}
    settings = []
    for i, group in enumerate(ordered):
        label = " ".join([methods[i], *(f"{k}={shown(v)}" for k, v in options[i].items() if k in own[methods[i]])])
        differs = {
            k: v for k, v in options[i].items() if k in varying or (k not in everywhere and v != DEFAULTS.get(k))
        }
        place = sum(color == colors[i] for color in colors[:i])
        settings.append(
            Setting(methods[i], options[i], sorted(group, key=lambda r: str(r.seed)), label, differs, place)
        )
    told = varying.union(*(setting.differs for setting in settings))
    shared = {k: v for body in options for k, v in body.items() if k not in told}
    metric = _most_common(run.metric for run in runs if run.metric)
    found = [*problems, *_missing(name, settings), *_other_metrics(name, metric, runs), *_other_data(name, runs)]
    return Task(name, metric or "score", settings, shared, found)


def _options(run: Run) -> dict[str, Any]:
    """What makes the run's setting: all but the seed and other methods' settings; older records get the defaults."""
    heeded = set(METHOD_SETTINGS.get(run.method, ())) | ({"num_samples"} if run.method == "esam1" else set())
    others = set().union(*METHOD_SETTINGS.values()) - heeded if run.method in METHOD_SETTINGS else set()
    body = {k: v for k, v in (DEFAULTS | run.config).items() if k not in NO_SETTING and k not in others}
    return {k: float(v) if isinstance(v, int) and not isinstance(v, bool) else v for k, v in body.items()}


def _varying(options: Sequence[dict[str, Any]]) -> set[str]:
    """The keys with more than one value among those that have them."""
    values: dict[str, set[str]] = {}
    for body in options:
        for key, value in body.items():
            values.setdefault(key, set()).add(json.dumps(value, sort_keys=True, default=str))
    return {key for key, found in values.items() if len(found) > 1}


def _sortable(options: dict[str, Any]) -> list[tuple[str, float, str]]:
    return [(k, v if isinstance(v, float) else -math.inf, str(v)) for k, v in sorted(options.items())]


def shown(value: Any) -> str:
    """A setting's value as a reader wants it."""
    if value is None:
        return "default"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _missing(task: str, settings: Sequence[Setting]) -> list[Problem]:
    """Runs that have not finished, and seeds that some settings have and others lack."""
    found = []
    for setting in settings:
        for run in setting.runs:
            if not run.finished:
                why = f"diverged: {run.diverged}" if run.diverged else f"not finished, at {run.reached()}"
                found.append(Problem(f"{setting.name}, seed {run.seed}", why, task))
    seeds = {str(run.seed): run.seed for setting in settings for run in setting.runs}
    for setting in settings:
        lacking = [seed for seed in seeds if seed not in {str(run.seed) for run in setting.runs}]
        if lacking:
            plural = "s" if len(lacking) > 1 else ""
            found.append(
                Problem(setting.name, f"no run with seed{plural} {', '.join(lacking)}, which others have", task)
            )
    return found


def _other_metrics(task: str, metric: str, runs: Iterable[Run]) -> list[Problem]:
    odd = [run for run in runs if run.metric and run.metric != metric]
    return [Problem(str(run.folder), f"scored by {run.metric}, the others by {metric}", task) for run in odd]


def _other_data(task: str, runs: Iterable[Run]) -> list[Problem]:
    """Runs on one's own data as they were before or after an edit: a mean over both is of nothing."""
    known = [(run, mark) for run in runs if isinstance(mark := run.environment.get("data"), str)]
    usual = _most_common(mark for _, mark in known)
    what = "the data were others than those of most runs"
    return [Problem(str(run.folder), what, task) for run, mark in known if mark != usual]


def _most_common(values: Iterable[str]) -> str:
    ranked = Counter(values).most_common(1)
    return ranked[0][0] if ranked else ""
