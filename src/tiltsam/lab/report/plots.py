"""Define the plots of a report: which curves, in which units. The page's script and matplotlib draw the same ones.

:func:`plot_data` is what ``assets/plot.js`` draws as SVG; :mod:`.figures` draws PNG and PDF files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tiltsam.lab.files import is_number
from tiltsam.lab.flags import format_value
from tiltsam.lab.palette import METHOD_COLORS
from tiltsam.lab.report.runs import measured
from tiltsam.lab.report.summary import SettingSummary, TaskSummary, entry_text
from tiltsam.lab.stats import Mean, mean_of

__all__ = ["DASHES", "MIN_RELATIVE_DENSITY", "Curve", "Plot", "flatness_plots", "plot_data", "task_plots"]

DASHES: tuple[tuple[float, ...], ...] = ((), (7, 4), (2, 4), (9, 4, 2, 4), (15, 5), (9, 4, 2, 4, 2, 4))
"""Line styles, as pixels on and off; the first is a solid line."""

MIN_RELATIVE_DENSITY = 1e-6
"""Below this fraction of its maximum, an estimated spectral density is noise."""

MAX_VISIBLE = 12  # curves; with more, a plot initially shows only the best of each method
PRECISION = 7  # significant digits of the numbers in the page: more than float32 has

X_LABELS = {"epoch": "epoch", "passes": "forward+backward passes", "seconds": "training time (s)"}
BUDGET_NOTES = {
    "passes": "All runs are limited by passes: a method with two per step, such as SAM, makes half as many epochs.",
    "seconds": "All runs are limited by training time: a method with slower steps makes fewer epochs.",
}
"""Why curves have no epochs on the x axis, by the budget of the runs."""


@dataclass(frozen=True)
class Curve:
    """One curve."""

    name: str
    method: str
    """The method whose colour it has."""
    dash: int
    """Index of the line style."""
    x: list[float]
    y: list[float]
    error: list[float]
    """Standard errors over seeds; NaN for a single run."""
    count: list[int]
    """Number of runs behind each point."""
    shade: float = 1.0
    """Strength of the colour, for plots about the settings of one method."""
    visible: bool = True
    """Whether it is visible initially."""
    gaps: Sequence[int] = ()
    """Indices of points that are not connected to the previous one."""


@dataclass(frozen=True)
class Plot:
    """A plot: axes with units, and curves."""

    name: str
    title: str
    x_label: str
    y_label: str
    curves: list[Curve]
    note: str = ""
    log_x: bool = False
    log_y: bool = False
    ticks: list[str] | None = None
    """Labels of the positions 0, 1, … on a categorical x axis."""
    y_bounds: tuple[float, float] | None = None
    """Values that the y axis must include."""
    points: bool = False
    """Whether to draw points with error bars instead of a curve with a band."""
    highest: bool | None = None
    """Whether higher values are better. If set, the y axis includes only the best value of each curve's first tenth,
    where the differences do not show yet."""


def task_plots(task: TaskSummary) -> list[Plot]:
    """Return the plots of convergence, cost, effective sample sizes, and the tilt if runs differ in it only."""
    score, loss = f"test {task.metric} ({task.unit})", f"train loss ({task.loss_unit})"
    test = f"test_{task.metric}"
    note = "The objective of each method: for SAM and TSAM, the loss at perturbed weights."
    plots: list[tuple[str, str, str, str, str, str]] = [
        ("convergence", "Convergence", score, task.budget, test, BUDGET_NOTES.get(task.budget, "")),
        ("train-loss", "Training loss", loss, task.budget, "train_loss", note),
    ]
    titles = {"passes": "Score against passes", "seconds": "Score against time"}
    plots += [(x, title, score, x, test, "") for x, title in titles.items() if x != task.budget]
    drawn = _drawn(
        [*(_metrics_plot(task, *arguments) for arguments in plots), _effective_samples(task), _example_ess(task)]
    )
    return [*(_limit_visible(plot, task) for plot in drawn), *_drawn(_tilt(task, score, test))]


def _drawn(plots: Sequence[Plot]) -> list[Plot]:
    """Return the plots without empty curves, and without plots that have no others."""
    plots = [replace(plot, curves=[curve for curve in plot.curves if curve.x]) for plot in plots]
    return [plot for plot in plots if plot.curves]


def _metrics_plot(task: TaskSummary, name: str, title: str, y_label: str, x: str, y: str, note: str) -> Plot:
    """Plot one metric against another, one curve per setting."""
    curves = [_metrics_curve(setting, x, y, 1 if y == "train_loss" else 100) for setting in task.settings]
    return Plot(name, title, X_LABELS[x], y_label, curves, note, highest=y != "train_loss")


def _metrics_curve(setting: SettingSummary, x: str, y: str, scale: float = 1.0) -> Curve:
    return _curve(setting, [mean.value for mean in setting.curve(x)], setting.curve(y, scale))


def _curve(setting: SettingSummary, x: Sequence[float], means: Sequence[Mean]) -> Curve:
    """Return a curve of the finite points."""
    rows = [(a, m) for a, m in zip(x, means, strict=True) if math.isfinite(a) and math.isfinite(m.value)]
    return Curve(
        setting.name,
        setting.method,
        setting.number,
        [a for a, _ in rows],
        [m.value for _, m in rows],
        [m.error for _, m in rows],
        [m.runs for _, m in rows],
    )


def _limit_visible(plot: Plot, task: TaskSummary) -> Plot:
    """With many curves, show only the best of each method on validation, or the first ones; the legend has the rest."""
    names = [curve.name for curve in plot.curves]
    if len(names) <= MAX_VISIBLE:
        return plot
    shown, what = {setting.name for setting in task.chosen}.intersection(names), task.selection
    if not shown:
        shown, what = set(names[:MAX_VISIBLE]), f"the first {MAX_VISIBLE} curves"
    curves = sorted((replace(c, visible=c.name in shown) for c in plot.curves), key=lambda c: not c.visible)
    hidden = sum(not c.visible for c in curves)
    return replace(plot, curves=curves, note=f"Initially shown: {what}; {hidden} more in the legend. {plot.note}")


def _effective_samples(task: TaskSummary) -> Plot:
    several = [s for s in task.settings if is_number(s.values.get("num_samples")) and s.values["num_samples"] > 1]
    return Plot(
        "effective-samples",
        "Effective sample size of the tilt",
        X_LABELS[task.budget],
        "effective samples per step",
        [_metrics_curve(setting, task.budget, "effective_sample_size") for setting in several],
        "At 1, one sample decides the step; at s, the number of samples, all count equally. If it stays near s, the "
        "tilt had almost no effect.",
        y_bounds=(1.0, max((s.values["num_samples"] for s in several), default=1.0)),
    )


def _example_ess(task: TaskSummary) -> Plot:
    return Plot(
        "example-ess",
        "Effective sample size of the batch",
        X_LABELS[task.budget],
        "effective examples (% of the batch)",
        [_metrics_curve(setting, task.budget, "example_ess", 100) for setting in task.settings],
        "At 100%, all examples of a batch count equally, as without a tilt. If it stays near 100%, the tilt had almost "
        "no effect.",
        y_bounds=(0.0, 100.0),
    )


def _tilt(task: TaskSummary, y_label: str, metric_key: str) -> list[Plot]:
    """Plot settings that differ in t only: final score against t, and the curves of the family best on validation."""
    families: dict[str, list[SettingSummary]] = {}
    for setting in task.settings:
        if setting.method == "tsam" and isinstance(setting.values.get("t"), float):
            rest = entry_text("tsam", {k: v for k, v in setting.differences.items() if k != "t"})
            families.setdefault(rest, []).append(setting)
    families = {rest: sorted(f, key=_t) for rest, f in families.items() if len({_t(s) for s in f}) > 1}
    if not families:
        return []
    tilts = sorted({_t(s) for family in families.values() for s in family})
    by_tilt = []
    for number, (rest, family) in enumerate(families.items()):
        means = [s.final("score", 100) for s in family]
        curve = _curve(replace(family[0], number=number), [float(tilts.index(_t(s))) for s in family], means)
        by_tilt.append(replace(curve, name=rest, visible=number < MAX_VISIBLE))
    final = Plot(
        "tilt",
        "Final score by tilt",
        "tilt t",
        y_label,
        by_tilt,
        "Settings that differ in t only. Bars: one standard error over seeds.",
        ticks=[format_value(t) for t in tilts],
        points=True,
    )
    chosen = {s.name for s in task.chosen}
    family = next((f for f in families.values() if any(s.name in chosen for s in f)), next(iter(families.values())))
    weakest = 0.55  # fraction of the method's colour that is still visible on white and on dark
    curves = [
        replace(
            _metrics_curve(setting, task.budget, metric_key, 100),
            name=f"t = {_t(setting):g}",
            dash=len(family) - 1 - i,
            shade=weakest + (1 - weakest) * i / (len(family) - 1),
        )
        for i, setting in enumerate(family)
    ]
    note = "Settings that differ in t only. A stronger colour means a larger t."
    x_label = X_LABELS[task.budget]
    convergence = Plot("tilt-curves", "Convergence by tilt", x_label, y_label, curves, note, highest=True)
    return [final, convergence]


def _t(setting: SettingSummary) -> float:
    return float(setting.values["t"])


# -------------------------------------------------------------------------------- flatness


def flatness_plots(settings: Sequence[SettingSummary], task: TaskSummary) -> list[Plot]:
    """Return the plots of loss under noise, Hessian spectrum and slices, averaged over runs."""
    unit = task.loss_unit
    noise = "noise on each weight (standard deviation)"
    around = [
        ("noise-mean", "Loss around the minimum", f"mean loss ({unit})", "mean"),
        ("noise-variance", "Variance around the minimum", f"variance of the loss ({unit}²)", "variance"),
    ]
    plots = [
        Plot(name, title, noise, label, _around(settings, statistic), log_x=True, log_y=True)
        for name, title, label, statistic in around
    ]
    plots += [_spectrum(settings, unit), _density(settings, unit), *_slices(settings, unit)]
    return [_limit_visible(plot, task) for plot in _drawn(plots)]


def _around(settings: Sequence[SettingSummary], statistic: str) -> list[Curve]:
    """Return a statistic of the neighbourhood against the noise level."""
    curves = []
    for setting in settings:
        levels = [m.value for m in _means([measured(run.flatness, "neighborhood", "std") for run in setting.runs])]
        means = _means([measured(run.flatness, "neighborhood", statistic) for run in setting.runs])
        # Both axes are logarithmic: drop what is not positive.
        pairs = [(a, m) for a, m in zip(levels, means, strict=False) if a > 0 and m.value > 0]
        curves.append(_curve(setting, [a for a, _ in pairs], [m for _, m in pairs]))
    return curves


def _means(lists: Sequence[Sequence[float]]) -> list[Mean]:
    """Return the elementwise means over runs, up to the length of the shortest list."""
    return [mean_of(column) for column in zip(*lists, strict=False)]


def _spectrum(settings: Sequence[SettingSummary], unit: str) -> Plot:
    curves = []
    for setting in settings:
        means = _means([measured(run.flatness, "eigenvalues", "values") for run in setting.runs])
        curves.append(_curve(setting, [float(i) for i in range(len(means))], means))
    most = max((len(curve.x) for curve in curves), default=0)
    return Plot(
        "spectrum",
        "Largest Hessian eigenvalues",
        "eigenvalue, largest first",
        f"eigenvalue ({unit} / weight²)",
        curves,
        "Bars: one standard error over seeds.",
        ticks=[f"λ{i}" for i in range(1, most + 1)],
        points=True,
    )


def _density(settings: Sequence[SettingSummary], unit: str) -> Plot:
    """Plot the spectral density of one run per setting; densities of different runs have different grids."""
    curves = []
    for setting in settings:
        for run in setting.runs:
            grid, values = (measured(run.flatness, "density", name) for name in ("grid", "values"))
            least = max(values, default=0.0) * MIN_RELATIVE_DENSITY
            kept = [k for k, (_, v) in enumerate(zip(grid, values, strict=False)) if v > least]
            if kept:
                curve = _curve(setting, [grid[k] for k in kept], [Mean(values[k], math.nan, 1) for k in kept])
                curves.append(replace(curve, gaps=[i for i in range(1, len(kept)) if kept[i] > kept[i - 1] + 1]))
                break
    return Plot(
        "density",
        "Hessian spectral density",
        f"eigenvalue ({unit} / weight²)",
        "density (fraction of eigenvalues per unit)",
        curves,
        "One run per setting, estimated by Lanczos: each Ritz value is smoothed by a narrow Gaussian.",
        log_y=True,
    )


def _slices(settings: Sequence[SettingSummary], unit: str) -> list[Plot]:
    """Return one plot per kind of direction."""
    curves: dict[str, list[Curve]] = {}
    for setting in settings:
        by_label: dict[str, list[tuple[list[float], list[float]]]] = {}
        for run in setting.runs:
            entries = (run.flatness or {}).get("slices")
            for number, entry in enumerate(entries if isinstance(entries, list) else ()):
                label = str(entry.get("label") or f"direction {number}") if isinstance(entry, dict) else "?"
                by_label.setdefault(label, []).append((measured(entry, "positions"), measured(entry, "losses")))
        for label, slices in by_label.items():
            positions = slices[0][0]
            means = _means([losses for others, losses in slices if others == positions])
            curve = _curve(setting, positions[: len(means)], means[: len(positions)])
            if curve.x:
                curves.setdefault(label, []).append(curve)
    scale = {"random direction": "relative to the weights", "top eigenvector": "distance in weight space"}
    return [
        Plot(
            f"slice-{number}",
            f"Slice along the {label}",
            f"position ({scale.get(label, 'in units of the direction')})",
            f"loss ({unit})",
            found_curves,
            "0 is the trained model.",
        )
        for number, (label, found_curves) in enumerate(curves.items())
    ]


# -------------------------------------------------------------------------------- for the page


def plot_data(plots: Sequence[Plot]) -> dict[str, Any]:
    """Return the plots as ``assets/plot.js`` reads them: JSON values, with each column of numbers stored once."""
    columns: dict[tuple[float | None, ...], int] = {}

    def column(values: Sequence[float]) -> int:
        rounded = tuple(float(f"{v:.{PRECISION}g}") if math.isfinite(v) else None for v in values)
        return columns.setdefault(rounded, len(columns))

    def curve(c: Curve) -> dict[str, Any]:
        method = c.method if c.method in METHOD_COLORS else "other"
        style = {"name": c.name, "method": method, "dash": c.dash, "shade": c.shade}
        style |= {"visible": c.visible, "gaps": list(c.gaps)}
        return style | {name: column(getattr(c, name)) for name in ("x", "y", "error", "count")}

    def plot(p: Plot) -> dict[str, Any]:
        names = ("title", "x_label", "y_label", "log_x", "log_y", "ticks", "y_bounds", "points", "highest")
        return {name: getattr(p, name) for name in names} | {"curves": [curve(c) for c in p.curves]}

    body = [plot(p) for p in plots]
    dashes = [" ".join(f"{x:g}" for x in dash) for dash in DASHES]
    return {"plots": body, "columns": list(columns), "dashes": dashes}
