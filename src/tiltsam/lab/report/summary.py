"""Group runs by task and setting, and average each setting over its seeds."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import tiltsam
from tiltsam.lab.config import DEFAULTS, NEEDED_LOSS, NEEDED_OPTION, method_options, tilt_defaults
from tiltsam.lab.files import is_number
from tiltsam.lab.flags import format_value
from tiltsam.lab.palette import METHOD_COLORS, OTHER_COLOR
from tiltsam.lab.report.runs import Group, MetricsRow, RunProblem, RunRecord
from tiltsam.lab.stats import Mean, mean_of

__all__ = ["SettingSummary", "TaskSummary", "entry_text", "summarize"]

_NEVER_PLAIN = ("average", "example_tilt", "class_tilt")
_NOT_PLAIN_IF_DIFFERING = ("loss", "label_smoothing")

NOT_A_SETTING = ("task", "method", "options", "seed", "device")
"""Config fields that do not distinguish the settings of a method on a task."""


@dataclass(frozen=True)
class SettingSummary:
    """The runs of one method with one setting on a task: they differ in the seed only."""

    method: str
    values: dict[str, Any]
    """The fields of the config and the options of the method, by name."""
    runs: list[RunRecord]
    name: str
    """The entry as typed at the command line, or the method and what distinguishes it from its other settings."""
    full_name: str
    """The entry as typed, or the method and its :attr:`differences` that are not at their default."""
    differences: dict[str, Any]
    """Values that vary within the task or that only some methods have, without what is switched off."""
    method_values: dict[str, Any]
    """Options of the method and what else differs, with defaults replaced by the values they stand for; without lr."""
    number: int
    """Index among the settings with the same colour."""

    @property
    def is_plain(self) -> bool:
        """Whether this is training without a method, an average, a tilt, or a loss that only some settings have."""
        differing = [name for name in _NOT_PLAIN_IF_DIFFERING if name in self.differences]
        is_default = all(self.values.get(name) == DEFAULTS[name] for name in (*_NEVER_PLAIN, *differing))
        return self.method == "erm" and is_default

    @cached_property
    def by_seed(self) -> dict[str, RunRecord]:
        """The runs by seed; of two records of a seed, the second by its folder."""
        runs: dict[str, RunRecord] = {}
        for run in self.runs:
            runs[str(run.folder) if str(run.seed) in runs else str(run.seed)] = run
        return runs

    def finals(self, key: str, scale: float = 1.0) -> dict[str, float]:
        """Return a final number of each finished run, by seed."""
        finished = {seed: run.result for seed, run in self.by_seed.items() if run.result is not None}
        return {seed: scale * row.get(key, math.nan) for seed, row in finished.items()}

    def final(self, key: str, scale: float = 1.0) -> Mean:
        """Return a final number, averaged over the finished runs."""
        return mean_of(self.finals(key, scale).values())

    @cached_property
    def epochs(self) -> list[list[MetricsRow]]:
        """The rows of all runs at each epoch; a last epoch that the budget cut short counts as a whole one."""
        by_epoch: dict[int, list[MetricsRow]] = {}
        for run in self.runs:
            for row in run.rows:
                by_epoch.setdefault(math.ceil(row["epoch"]), []).append(row)
        return [by_epoch[epoch] for epoch in sorted(by_epoch)]

    def curve(self, key: str, scale: float = 1.0) -> list[Mean]:
        """Return a number by epoch, averaged over the runs that reached it."""
        return [mean_of(scale * row.get(key, math.nan) for row in rows) for rows in self.epochs]


@dataclass(frozen=True)
class TaskSummary:
    """All runs of one task."""

    name: str
    metric: str
    settings: list[SettingSummary]
    shared: dict[str, Any]
    """Fields of the config that are the same in all runs, without those that only some methods have."""
    problems: list[RunProblem]
    notes: list[str]
    """What sweeps of these runs noted, such as choices at the edge of their grid."""
    compare_settings: bool = False
    """Whether all settings are compared, as entries of comparisons and sweeps are; else the best of each method."""

    @property
    def runs(self) -> list[RunRecord]:
        """All runs."""
        return [run for setting in self.settings for run in setting.runs]

    @property
    def unit(self) -> str:
        """The unit of scores times 100."""
        return "%" if self.metric in ("accuracy", "f1") else "×100"

    @property
    def loss_unit(self) -> str:
        """The unit of the loss: cross-entropy or squared error."""
        return "squared error" if self.metric in ("pearson", "spearman") else "nats"

    @cached_property
    def chosen(self) -> list[SettingSummary]:
        """For each method the setting with the best final validation score; the test score is not used.

        Ties are broken by the validation loss, as in a sweep. Without validation scores it is the first setting.
        """
        return [self._best([s for s in self.settings if s.method == method]) for method in self.num_settings]

    @cached_property
    def num_settings(self) -> Counter[str]:
        """The number of settings by method."""
        return Counter(setting.method for setting in self.settings)

    @cached_property
    def plain(self) -> SettingSummary | None:
        """The setting of plain training that has a score; of several, the best on validation."""
        plain = [s for s in self.settings if s.is_plain and math.isfinite(s.final("score").value)]
        return self._best(plain) if plain else None

    @cached_property
    def reference(self) -> SettingSummary:
        """The setting that others are compared with: plain training, or else the first entry."""
        first = min(self.settings, key=lambda setting: setting.runs[0].position)
        return first if self.plain is None else self.plain

    @cached_property
    def budget(self) -> Literal["epoch", "passes", "seconds"]:
        """What limits every run: the x axis on which all curves end at the same place."""
        for name in ("passes", "seconds"):
            limits = [setting.values.get(name) for setting in self.settings]
            if all(isinstance(limit, float) and math.isfinite(limit) for limit in limits):
                return name
        return "epoch"

    @property
    def selection(self) -> str:
        """How :attr:`chosen` was selected, as text."""
        several = [s for s in self.chosen if self.num_settings[s.method] > 1]
        rest = ", or its first setting if there is no validation score"
        return f"each method's best setting on validation{'' if all(map(self.has_validation, several)) else rest}"

    def label(self, setting: SettingSummary) -> str:
        """Return the name of a setting as one would type it: a method's only one has what is not at its default."""
        return setting.name if self.num_settings[setting.method] > 1 else setting.full_name

    def tuning(self, setting: SettingSummary) -> str:
        """Return how the setting was selected among those of its method; if all are compared, none was selected."""
        tried = self.num_settings[setting.method]
        if all(run.swept for run in setting.runs):
            return "tuned by a sweep on validation"
        if tried == 1 or self.compare_settings:
            return "not tuned"
        if not self.has_validation(setting):
            return f"not tuned: 1 of {tried} settings, no validation score"
        return f"{'best' if setting in self.chosen else 'not the best'} of {tried} settings on validation"

    def has_validation(self, setting: SettingSummary) -> bool:
        """Return whether the setting has a final validation score."""
        return bool(self._validation_scores(setting))

    def _validation_scores(self, setting: SettingSummary) -> dict[str, float]:
        """Return the final validation scores by seed."""
        return {seed: x for seed, x in setting.finals(f"validation_{self.metric}").items() if math.isfinite(x)}

    def _best(self, settings: Sequence[SettingSummary]) -> SettingSummary:
        """Return the best of some settings on validation, or the first one without validation scores.

        They are compared on their common seeds: those that test the choice of a sweep have more seeds than its trials.
        """
        seeds = [set(scores) for setting in settings if (scores := self._validation_scores(setting))]
        common = set.intersection(*seeds) if seeds else set()

        def rank(setting: SettingSummary) -> tuple[float, float]:
            scores, losses = self._validation_scores(setting), setting.finals("validation_loss")
            ranked = common or set(scores)
            score = mean_of([x for seed, x in scores.items() if seed in ranked]).value
            loss = mean_of([x for seed, x in losses.items() if seed in ranked]).value
            return score if math.isfinite(score) else -math.inf, -loss if math.isfinite(loss) else -math.inf

        return max(settings, key=rank)


def summarize(
    runs: Iterable[RunRecord], problems: Iterable[RunProblem] = (), notes: Mapping[Group, Sequence[str]] | None = None
) -> list[TaskSummary]:
    """Return a summary per task, sorted by name, with the problems of its runs and the notes of its sweeps.

    Runs with other label noise, or another share of validation examples, are a task of their own.
    """
    notes = notes or {}
    groups: dict[Group, list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    problems = list(problems)
    return [
        _summarize_task(
            _group_name(group, groups), members, [p for p in problems if p.group == group], notes.get(group, [])
        )
        for group, members in sorted(groups.items())
    ]


def _group_name(group: Group, groups: Iterable[Group]) -> str:
    """Return the name of a task, with its label noise and share of validation examples where these differ."""
    of_task = [other for other in groups if other.task == group.task]
    noise = f", noise {group.noise}" if len({other.noise for other in of_task}) > 1 else ""
    validation = f", validation {group.validation}" if len({other.validation for other in of_task}) > 1 else ""
    return f"{group.task}{noise}{validation}"


def _summarize_task(name: str, runs: list[RunRecord], problems: list[RunProblem], notes: Sequence[str]) -> TaskSummary:
    values, groups = zip(*_by_setting(runs), strict=True)
    varying, common = _varying(values), set.intersection(*map(set, values))
    entries = [group[0].entry if len({run.entry for run in group}) == 1 else "" for group in groups]
    typed = "" not in entries and len(set(entries)) == len(entries)
    settings: list[SettingSummary] = []
    not_shared = varying | set(NEEDED_OPTION)
    for group, body, entry in zip(groups, values, entries, strict=True):
        method, options, defaults = group[0].method, _options(group[0]), _defaults(group[0].method)
        differing = {k: v for k, v in body.items() if k in varying or (k not in common and v != defaults.get(k))}
        differences = _shown(method, differing)
        of_method = _varying([v for v, other in zip(values, groups, strict=True) if other[0].method == method])
        own = _shown(method, {k: v for k, v in body.items() if k in of_method})
        changed = {k: v for k, v in differences.items() if v != defaults.get(k)}
        color = METHOD_COLORS.get(method, OTHER_COLOR)
        settings.append(
            SettingSummary(
                method=method,
                values=body,
                runs=sorted(group, key=lambda r: str(r.seed)),
                name=entry if typed else entry_text(method, own),
                full_name=entry if typed else entry_text(method, changed),
                differences=differences,
                method_values=_method_values(method, body, options, differences),
                number=sum(METHOD_COLORS.get(s.method, OTHER_COLOR) == color for s in settings),
            )
        )
        not_shared |= {*options, *differing}
    shared = {k: v for k, v in values[0].items() if k in common and k not in not_shared}
    metric = _most_common(run.metric for run in runs if run.metric)
    problems = [*problems, *_unfinished_runs(settings), *_other_metrics(metric, runs), *_other_data(runs)]
    return TaskSummary(name, metric or "score", settings, shared, problems, list(notes), typed)


def _by_setting(runs: Iterable[RunRecord]) -> list[tuple[dict[str, Any], list[RunRecord]]]:
    """Return the values of each setting and its runs, in the order of the methods and of the values."""
    groups: dict[str, tuple[dict[str, Any], list[RunRecord]]] = {}
    for run in runs:
        values = _values(run)
        key = json.dumps([run.method, values], sort_keys=True, default=str)
        groups.setdefault(key, (values, []))[1].append(run)
    order = {method: i for i, method in enumerate(tiltsam.METHODS)}
    names = sorted({name for values, _ in groups.values() for name in values})

    def position(group: tuple[dict[str, Any], list[RunRecord]]) -> tuple[Any, ...]:
        method, own = group[1][0].method, [group[0].get(name) for name in names]
        return order.get(method, len(order)), method, [(v if isinstance(v, float) else -math.inf, str(v)) for v in own]

    return sorted(groups.values(), key=position)


def _values(run: RunRecord) -> dict[str, Any]:
    """Return what defines the run's setting: fields and options, by name. Missing fields are at their defaults."""
    options = _options(run)
    values = options | DEFAULTS | run.config | {"noise": run.noise}
    left_out = {*NOT_A_SETTING, *(name for name, needed in NEEDED_OPTION.items() if needed not in options)}
    left_out |= {name for name, loss in NEEDED_LOSS.items() if loss != values["loss"]}
    values = {k: v for k, v in values.items() if k not in left_out}
    if is_number(values["example_tilt"]):  # a default that follows from the tilt is not a difference of its own
        defaults = tilt_defaults(values["example_tilt"], values["class_tilt"])
        values |= {name: None for name, default in defaults.items() if values[name] == default}
    return {k: float(v) if isinstance(v, int) and not isinstance(v, bool) else v for k, v in values.items()}


def _defaults(method: str) -> dict[str, Any]:
    """Return the defaults of all values; of a method that is not registered here, those of the fields."""
    options = method_options(method) if method in tiltsam.METHODS else {}
    fields = DEFAULTS | dict.fromkeys(tilt_defaults(0.0, None))
    return fields | {name: parameter.default for name, parameter in options.items()}


def _options(run: RunRecord) -> dict[str, Any]:
    """Return the options of the run's method; empty if the config is damaged."""
    options = run.config.get("options")
    return options if isinstance(options, dict) else {}


def _method_values(
    method: str, values: dict[str, Any], options: Iterable[str], differences: Iterable[str]
) -> dict[str, Any]:
    """Return the options of a method, and the fields that differ or that only some methods have; without lr.

    For TSAM's None it is what None stands for.
    """
    fields = [name for name in NEEDED_OPTION if values.get(name, DEFAULTS[name]) != DEFAULTS[name]]
    names = dict.fromkeys((*options, *fields, *(name for name in differences if name != "lr")))
    # Switches, names and counts of one, as in share_ascent=False, are shown if they are not at their default.
    hidden = {
        name: v for name, v in _defaults(method).items() if isinstance(v, bool | str) or (isinstance(v, int) and v == 1)
    }
    shown = {name: values[name] for name in names}
    if method == "tsam" and shown.get("radius", 0) is None:
        shown["radius"] = "0.003√d"
    if method == "tsam" and shown.get("delta", 0) is None and values.get("sampler") in ("ascent", "hmc"):
        shown["delta"] = values["t"] / 2 if isinstance(values.get("t"), float) else "t/2"
    return {k: v for k, v in shown.items() if k not in hidden or v != hidden[k]}


def _varying(settings: Sequence[dict[str, Any]]) -> set[str]:
    """Return the names with more than one value."""
    texts: dict[str, set[str]] = {}
    for values in settings:
        for name, value in values.items():
            texts.setdefault(name, set()).add(json.dumps(value, sort_keys=True, default=str))
    return {name for name, different in texts.items() if len(different) > 1}


def _shown(method: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without those that switch something off: defaults that are no number, or 0 or 1."""
    defaults = _defaults(method)
    return {
        k: v
        for k, v in values.items()
        if v != defaults.get(k) or (isinstance(v, float) and v not in (0.0, 1.0))  # bools are no floats
    }


def entry_text(method: str, values: Mapping[str, Any]) -> str:
    """Return a method and its settings as ``tiltsam compare`` takes them, such as ``sam:rho=0.2,average=true``."""
    settings = ",".join(f"{k}={'none' if v is None else format_value(v)}" for k, v in values.items())
    return f"{method}:{settings}" if settings else method


def _unfinished_runs(settings: Sequence[SettingSummary]) -> list[RunProblem]:
    problems = []
    for setting in settings:
        for run in setting.runs:
            if not run.finished:
                why = f"diverged: {run.diverged}" if run.diverged else f"not finished, {run.progress}"
                problems.append(RunProblem(f"{setting.name}, seed {run.seed}", why))
    return problems


def _other_metrics(metric: str, runs: Iterable[RunRecord]) -> list[RunProblem]:
    odd = [run for run in runs if run.metric and run.metric != metric]
    return [RunProblem(str(run.folder), f"scored by {run.metric}, the others by {metric}") for run in odd]


def _other_data(runs: Iterable[RunRecord]) -> list[RunProblem]:
    """Return the runs on a user's data as they were before or after an edit: they should not be averaged."""
    known = [(run, mark) for run in runs if isinstance(mark := run.environment.get("data"), str)]
    usual = _most_common(mark for _, mark in known)
    what = "trained on other data than most runs"
    return [RunProblem(str(run.folder), what) for run, mark in known if mark != usual]


def _most_common(values: Iterable[str]) -> str:
    ranked = Counter(values).most_common(1)
    return ranked[0][0] if ranked else ""
