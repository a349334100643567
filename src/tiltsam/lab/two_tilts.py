"""Our own experiment with tilts over examples, small enough for a CPU: ``tiltsam reproduce two-tilts``.

Four sweeps on the 8x8 digits. Every row has the same number of trials on the validation split, the same number of
passes, and the same seeds. Settings that no grid has are fixed and not tuned: the tilts, GCE's q, the strength of the
logit adjustment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tiltsam.lab.config import TrainConfig
from tiltsam.lab.display import QUIET, Display
from tiltsam.lab.errors import ConfigError
from tiltsam.lab.flags import format_values, parse_method
from tiltsam.lab.grids import ChoiceName
from tiltsam.lab.paper.reproduce import check_size
from tiltsam.lab.stats import Mean, format_interval, format_mean, mean_of, paired_difference

if TYPE_CHECKING:  # they need Optuna
    from tiltsam.lab.sweep import EntryResult, SweepResult

__all__ = [
    "NAME",
    "PASSES",
    "SEEDS",
    "STUDIES",
    "TiltRow",
    "TiltStudy",
    "cost_rows",
    "num_runs",
    "restrict_methods",
    "result_rows",
    "run_study",
    "select_studies",
]

NAME = "two-tilts"
TILT = "example_tilt=-1"
PASSES = 520.0  # 43 epochs of SAM in batches of 128, 87 of ERM: enough to learn noisy labels
TRIALS = 4
SEEDS = 5  # by default
GRID: dict[str, tuple[float, ...]] = {"lr": (0.02, 0.08), "rho": (0.2, 0.5), "erm:lr": (0.001, 0.005, 0.02, 0.1)}
_BASE = TrainConfig(
    "digits", model="mlp", epochs=math.inf, passes=PASSES, batch_size=128, validation=0.3, evaluate_every=1000
)
_TWO = {"ERM": "erm", "SAM": "sam"}
_THREE = _TWO | {"TSAM s=1": "tsam:num_samples=1"}


@dataclass(frozen=True)
class TiltRow:
    """A row of a table."""

    name: str
    entry: str
    """The method and its own settings, as ``tiltsam sweep --methods`` takes them."""
    reference: str = ""
    """The name of the row that it is compared with, seed by seed."""

    @property
    def method(self) -> str:
        """The method of the entry."""
        return str(parse_method(self.entry)["method"])


@dataclass(frozen=True)
class TiltStudy:
    """One sweep, and how its results are shown."""

    name: str
    title: str
    base: TrainConfig
    rows: tuple[TiltRow, ...]
    choose_by: ChoiceName
    metric: str
    """The result that rows are compared by."""
    columns: Mapping[str, str]
    """Other results, by their headings."""


def _entry(method: str, *settings: str) -> str:
    name, _, own = method.partition(":")
    settings = tuple(filter(None, (own, *settings)))
    return f"{name}:{','.join(settings)}" if settings else name


def _noise_rows(methods: Mapping[str, str]) -> tuple[TiltRow, ...]:
    rows = []
    for label, method in methods.items():
        for suffix, average in (("", ()), (", averaged", ("average=true",))):
            rows.append(TiltRow(label + suffix, _entry(method, *average)))
            rows.append(TiltRow(f"{label}{suffix}, tilt", _entry(method, *average, TILT), label + suffix))
    return (*rows, *(TiltRow(f"{label}, GCE", _entry(method, "loss=gce"), label) for label, method in _TWO.items()))


def _noise_study(noise: float, title: str, methods: Mapping[str, str] = _TWO) -> TiltStudy:
    columns = {
        "worst class": "test_worst_class_accuracy",
        "ECE": "test_ece",
        "silenced precision": "silenced_precision",
        "recall": "silenced_recall",
    }
    return TiltStudy(
        f"noise-{noise:g}", title, replace(_BASE, noise=noise), _noise_rows(methods), "score", "test_accuracy", columns
    )


def _long_tail_study() -> TiltStudy:
    rows = []
    for label, method in _TWO.items():
        rows.append(TiltRow(label, method))
        rows.append(TiltRow(f"{label}, class tilt", _entry(method, "class_tilt=1"), label))
        rows.append(TiltRow(f"{label}, logit-adjusted", _entry(method, "loss=logit-adjusted"), label))
    columns = {
        "few-shot": "test_few_shot_accuracy",
        "worst class": "test_worst_class_accuracy",
        "ECE": "test_ece",
    }
    base = replace(_BASE, task="digits-lt")
    return TiltStudy(
        "long-tail", "long-tailed digits", base, tuple(rows), "balanced", "test_balanced_accuracy", columns
    )


STUDIES: dict[str, TiltStudy] = {
    study.name: study
    for study in (
        _noise_study(0.4, "digits, 40% noisy labels", _THREE),
        _noise_study(0.2, "digits, 20% noisy labels"),
        _noise_study(0.0, "digits, clean labels"),
        _long_tail_study(),
    )
}
"""The studies by the name that follows ``two-tilts/``."""


def select_studies(name: str, methods: Sequence[str] | None = None) -> list[TiltStudy]:
    """Return the studies of ``two-tilts``, or the one of ``two-tilts/NAME``, restricted to some methods.

    Raises:
        ConfigError: If there is no such study, or no row has one of the methods.
    """
    _, slash, study = name.partition("/")
    if slash and study not in STUDIES:
        raise ConfigError(f"{NAME} has no study {study!r}; choose from {', '.join(STUDIES)}")
    studies = [STUDIES[study]] if slash else list(STUDIES.values())
    known = {row.method for one in studies for row in one.rows}
    if unknown := [method for method in methods or () if method not in known]:
        raise ConfigError(f"{name} has no method {unknown[0]!r}; choose from {', '.join(sorted(known))}")
    return restrict_methods(studies, methods)


def restrict_methods(studies: Sequence[TiltStudy], methods: Sequence[str] | None) -> list[TiltStudy]:
    """Return the studies with the rows of some methods, or of all; those that lack all of them are left out."""
    if methods is None:
        return list(studies)
    kept = [replace(one, rows=tuple(row for row in one.rows if row.method in methods)) for one in studies]
    return [one for one in kept if one.rows]


def num_runs(study: TiltStudy, seeds: int) -> int:
    """Return the number of runs of a study: the trials and the tests of each row."""
    return len(study.rows) * (TRIALS + seeds)


def cost_rows(studies: Sequence[TiltStudy], seeds: int, scale: float) -> list[list[str]]:
    """Return the name, runs and training passes of each study."""
    runs = {f"{NAME}/{study.name}": num_runs(study, seeds) for study in studies}
    return [[name, f"{number}", f"{number * PASSES * scale:,.0f}"] for name, number in runs.items()]


def run_study(
    study: TiltStudy,
    out: Path,
    *,
    seeds: int = SEEDS,
    scale: float = 1.0,
    device: str = "cpu",
    precision: Literal["fp32", "bf16"] = "fp32",
    workers: int = 1,
    display: Display = QUIET,
) -> SweepResult:
    """Run a study, or what is left of it.

    Args:
        study: The study.
        out: Folder of the records and of the sweep.
        seeds: Tests of each row.
        scale: Fraction of the passes.
        device: The device to train on.
        precision: That of the model; ``"bf16"`` uses autocast.
        workers: Processes to start; 1 works in this one.
        display: Shows the progress.

    Raises:
        ConfigError: If ``seeds`` or ``scale`` is out of bounds.
    """
    from tiltsam.lab.sweep import sweep

    check_size(seeds, scale)
    methods = {row.method for row in study.rows}
    grid = dict(GRID)
    if methods == {"erm"}:
        del grid["rho"]
    if "erm" not in methods:
        del grid["erm:lr"]
    return sweep(
        replace(study.base, passes=PASSES * scale, device=device, precision=precision),
        [row.entry for row in study.rows],
        grid,
        out,
        trials=TRIALS,
        choose_by=study.choose_by,
        seeds=seeds,
        workers=workers,
        display=display,
    )


def result_rows(study: TiltStudy, result: SweepResult) -> list[list[str]]:
    """Return the table of a study, headings first: means ± standard errors over seeds, in percent.

    Differences are paired by seed, with the 95% interval of Student's t distribution.
    """
    entries = {row.name: entry for row, entry in zip(study.rows, result.entries, strict=True)}
    title = study.metric.removeprefix("test_").replace("_", " ")
    shown = {heading: key for heading, key in study.columns.items() if any(_results(e, key) for e in entries.values())}
    table = [["", "chosen", title, "difference", "95% interval", *shown, "seeds"]]
    for row in study.rows:
        entry = entries[row.name]
        scores = _results(entry, study.metric)
        difference, interval = "", ""
        if row.reference:
            mean = paired_difference(scores, _results(entries[row.reference], study.metric))
            difference, interval = f"{mean.value:+z.2f}" if mean.runs else "–", format_interval(mean)
        chosen = "–" if entry.best is None else format_values(entry.best.params)
        others = [_format(mean_of(_results(entry, key).values()), 1) for key in shown.values()]
        mean = mean_of(scores.values())
        table.append([row.name, chosen, _format(mean, 2), difference, interval, *others, f"{len(scores)}"])
    return table


def _results(entry: EntryResult, key: str) -> dict[int, float]:
    """Return a result of the tests in percent, by seed."""
    results: dict[int, Any] = {seed: test.user_attrs.get("result", {}) for seed, test in sorted(entry.tests.items())}
    return {seed: 100 * float(numbers[key]) for seed, numbers in results.items() if numbers.get(key) is not None}


def _format(mean: Mean, digits: int) -> str:
    return format_mean(mean, digits) if mean.runs else ""
