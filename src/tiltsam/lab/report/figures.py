"""The figures of a report: which curves, in which units. The page and matplotlib draw the same ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tiltsam.lab.report.settings import Setting, Task, shown
from tiltsam.lab.report.tables import measured
from tiltsam.lab.stats import Mean, mean_of

__all__ = ["Figure", "Series", "flatness_figures", "task_figures"]

SMALLEST_DENSITY = 1e-6  # of the largest: below it a spectrum's estimate is noise
MANY = 12  # settings; with more of them a figure begins with each method's best


@dataclass(frozen=True)
class Series:
    """One curve."""

    name: str
    method: str
    """Whose colour it has."""
    dash: int
    """Which of the line styles; settings of one method differ in it."""
    x: list[float]
    y: list[float]
    error: list[float]
    """Standard errors over seeds; NaN where there is one run."""
    count: list[int]
    """Runs behind each point."""
    shade: float = 1.0
    """Strength of the colour, where a figure is about the settings of one method."""
    shown: bool = True
    """Whether it is there before anybody asks for it."""
    gaps: Sequence[int] = ()
    """Which points the line does not reach from the one before."""


@dataclass(frozen=True)
class Figure:
    """A figure: axes with their units, and curves."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: list[Series]
    note: str = ""
    log_x: bool = False
    log_y: bool = False
    ticks: list[str] | None = None
    """Names of the places 0, 1, … on the x axis, where it counts."""
    y_bounds: tuple[float, float] | None = None
    """What the y axis has to take in whatever the curves do."""
    points: bool = False
    """Whether the points count more than the line."""
    from_tenth: bool = False
    """Whether the y axis begins where the curves are after a tenth of their length: what follows is what differs."""


def task_figures(task: Task) -> list[Figure]:
    """Convergence, cost, effective sample size, and the tilt where runs differ in it alone."""
    score, loss = f"test {task.metric} ({task.unit})", f"train loss ({task.loss_unit})"
    test = f"test_{task.metric}"
    own = "Each method's own objective, as it was descended: for SAM and TSAM the loss at perturbed weights."
    curves = [
        ("convergence", "Convergence", "epoch", score, "epoch", test, ""),
        ("train-loss", "Training loss", "epoch", loss, "epoch", "train_loss", own),
        ("passes", "Against passes", "forward+backward passes", score, "passes", test, ""),
        ("seconds", "Against the clock", "training time (s)", score, "seconds", test, ""),
    ]
    found = [_curves(task, *words) for words in curves]
    found += [_effective_samples(task), *_tilt(task, score, test)]
    return [figure for figure in found if figure.series]


def _curves(task: Task, name: str, title: str, x_label: str, y_label: str, x: str, y: str, note: str) -> Figure:
    """A number of the lines of metrics against another, one curve per setting."""
    lines = [_line(setting, x, y, 1 if y == "train_loss" else 100) for setting in task.settings]
    figure = Figure(name, title, x_label, y_label, [s for s in lines if s.x], note, from_tenth=True)
    return _calm(figure, task)


def _line(setting: Setting, x: str, y: str, scale: float = 1.0) -> Series:
    means = setting.curve(y, scale)
    places = [mean.value for mean in setting.curve(x)]
    return _series(setting, places, means)


def _series(setting: Setting, x: Sequence[float], means: Sequence[Mean]) -> Series:
    """A curve of what is finite."""
    rows = [(a, m) for a, m in zip(x, means, strict=True) if math.isfinite(a) and math.isfinite(m.value)]
    return Series(
        setting.name,
        setting.method,
        setting.number,
        [a for a, _ in rows],
        [m.value for _, m in rows],
        [m.error for _, m in rows],
        [m.runs for _, m in rows],
    )


def _calm(figure: Figure, task: Task) -> Figure:
    """With many settings, begin with each method's best on validation; the others wait in the legend."""
    if len(task.settings) <= MANY:
        return figure
    best = {setting.name for setting in task.chosen}
    series = sorted((replace(s, shown=s.name in best) for s in figure.series), key=lambda s: not s.shown)
    hidden = len(series) - sum(s.shown for s in series)
    note = f"Shown at first: {task.pick}; {hidden} more in the legend. {figure.note}"
    return replace(figure, series=series, note=note)


def _effective_samples(task: Task) -> Figure:
    several = [s for s in task.settings if s.method == "tsam" and s.options.get("num_samples", 0) > 1]
    return _calm(
        Figure(
            "effective-samples",
            "Effective sample size of the tilt",
            "epoch",
            "effective samples a step",
            [s for s in (_line(setting, "epoch", "effective_sample_size") for setting in several) if s.x],
            "How many samples the tilted weights leave standing: s where all weigh the same, 1 where one decides.",
            y_bounds=(1.0, max((s.options["num_samples"] for s in several), default=1.0)),
        ),
        task,
    )


def _tilt(task: Task, score: str, test: str) -> list[Figure]:
    """Settings that differ in t alone: the final score against t, and the curves of the family best on validation."""
    families: dict[str, list[Setting]] = {}
    for setting in task.settings:
        if setting.method == "tsam" and isinstance(setting.options.get("t"), float):
            rest = " ".join(f"{k}={shown(v)}" for k, v in setting.differs.items() if k != "t")
            families.setdefault(rest, []).append(setting)
    families = {rest: sorted(f, key=_t) for rest, f in families.items() if len({_t(s) for s in f}) > 1}
    if not families:
        return []
    tilts = sorted({_t(s) for family in families.values() for s in family})
    lines = []
    for number, (rest, family) in enumerate(families.items()):
        means = [s.final("score", 100) for s in family]
        line = _series(replace(family[0], number=number), [float(tilts.index(_t(s))) for s in family], means)
        lines.append(replace(line, name=f"tsam {rest}".strip(), shown=number < MANY))
    against = Figure(
        "tilt",
        "Final score by tilt",
        "tilt t",
        score,
        [line for line in lines if line.x],
        "Settings that differ in t alone; bars are one standard error over seeds.",
        ticks=[shown(t) for t in tilts],
        points=True,
    )
    chosen = {s.name for s in task.chosen}
    family = next((f for f in families.values() if any(s.name in chosen for s in f)), next(iter(families.values())))
    weakest = 0.55  # of the method's colour: still seen on white and on dark
    curves = [
        replace(
            _line(setting, "epoch", test, 100),
            name=f"t = {_t(setting):g}",
            dash=len(family) - 1 - i,
            shade=weakest + (1 - weakest) * i / (len(family) - 1),
        )
        for i, setting in enumerate(family)
    ]
    note = "Settings that differ in t alone; the stronger the colour, the larger t."
    by_epoch = Figure("tilt-curves", "Convergence by tilt", "epoch", score, curves, note, from_tenth=True)
    return [against, by_epoch]


def _t(setting: Setting) -> float:
    return float(setting.options["t"])


# -------------------------------------------------------------------------------- flatness


def flatness_figures(settings: Sequence[Setting], task: Task) -> list[Figure]:
    """Loss under noise, top of the spectrum, slices: means over runs that were measured on the same examples."""
    unit = task.loss_unit
    noise = "noise on each weight (standard deviation)"
    around = [
        ("noise-mean", "Loss around the minimum", f"mean loss ({unit})", "mean"),
        ("noise-variance", "Variance around the minimum", f"variance of the loss ({unit}²)", "variance"),
    ]
    figures = [
        Figure(name, title, noise, label, _around(settings, statistic), log_x=True, log_y=True)
        for name, title, label, statistic in around
    ]
    figures += [_spectrum(settings, unit), _density(settings, unit), *_slices(settings, unit)]
    return [_calm(figure, task) for figure in figures if figure.series]


def _around(settings: Sequence[Setting], statistic: str) -> list[Series]:
    """A statistic of the neighbourhood against the noise."""
    lines = []
    for setting in settings:
        levels = [m.value for m in _over_runs([measured(run, "neighborhood", "std") for run in setting.runs])]
        means = _over_runs([measured(run, "neighborhood", statistic) for run in setting.runs])
        # Both axes are logarithmic, and have no place for what is not positive.
        pairs = [(a, m) for a, m in zip(levels, means, strict=False) if a > 0 and m.value > 0]
        lines.append(_series(setting, [a for a, _ in pairs], [m for _, m in pairs]))
    return [line for line in lines if line.x]


def _over_runs(lists: Sequence[Sequence[float]]) -> list[Mean]:
    """Means of the first entries, of the second, …: as many as every run has."""
    return [mean_of(list(column)) for column in zip(*lists, strict=False)]


def _spectrum(settings: Sequence[Setting], unit: str) -> Figure:
    lines = []
    for setting in settings:
        means = _over_runs([measured(run, "eigenvalues", "values") for run in setting.runs])
        lines.append(_series(setting, [float(i) for i in range(len(means))], means))
    most = max((len(line.x) for line in lines), default=0)
    return Figure(
        "spectrum",
        "Top of the Hessian's spectrum",
        "eigenvalue, largest first",
        f"eigenvalue ({unit} per squared unit of weight)",
        [line for line in lines if line.x],
        "Bars are one standard error.",
        ticks=[f"λ{i}" for i in range(1, most + 1)],
        points=True,
    )


def _density(settings: Sequence[Setting], unit: str) -> Figure:
    """The whole spectrum, of one run a setting: every run has eigenvalues, and so a grid, of its own."""
    lines = []
    for setting in settings:
        for run in setting.runs:
            grid, values = measured(run, "density", "grid"), measured(run, "density", "values")
            least = max(values, default=0.0) * SMALLEST_DENSITY
            kept = [k for k, (_, v) in enumerate(zip(grid, values, strict=False)) if v > least]
            if kept:
                line = _series(setting, [grid[k] for k in kept], [Mean(values[k], math.nan, 1) for k in kept])
                lines.append(replace(line, gaps=[i for i in range(1, len(kept)) if kept[i] > kept[i - 1] + 1]))
                break
    return Figure(
        "density",
        "Density of the Hessian's spectrum",
        f"eigenvalue ({unit} per squared unit of weight)",
        "density (share of eigenvalues per unit)",
        lines,
        "One run of each setting. Estimated by Lanczos: each eigenvalue found is smeared into a small bell.",
        log_y=True,
    )


def _slices(settings: Sequence[Setting], unit: str) -> list[Figure]:
    """One figure per kind of direction."""
    kinds: dict[str, list[Series]] = {}
    for setting in settings:
        found: dict[str, list[tuple[list[float], list[float]]]] = {}
        for run in setting.runs:
            entries = (run.flatness or {}).get("slices")
            for number, entry in enumerate(entries if isinstance(entries, list) else ()):
                label = str(entry.get("label") or f"direction {number}") if isinstance(entry, dict) else "?"
                inner = replace(run, flatness=entry if isinstance(entry, dict) else {})
                found.setdefault(label, []).append((measured(inner, "positions"), measured(inner, "losses")))
        for label, lines in found.items():
            same = [losses for positions, losses in lines if positions == lines[0][0]]
            means = _over_runs(same)
            series = _series(setting, lines[0][0][: len(means)], means[: len(lines[0][0])])
            if series.x:
                kinds.setdefault(label, []).append(series)
    scale = {"random direction": "relative to the weights", "top eigenvector": "distance in weight space"}
    return [
        Figure(
            f"slice-{number}",
            f"Slice along the {label}",
            f"position ({scale.get(label, 'in units of the direction')})",
            f"loss ({unit})",
            series,
            "0 is the trained model.",
        )
        for number, (label, series) in enumerate(kinds.items())
    ]
