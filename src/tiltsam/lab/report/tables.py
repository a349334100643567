"""Build the tables of a report, and write them as Markdown and LaTeX. Text from records is never markup."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tiltsam.lab.flags import format_values
from tiltsam.lab.report.runs import RunProblem, RunRecord, measured
from tiltsam.lab.report.summary import SettingSummary, TaskSummary
from tiltsam.lab.stats import Mean, best_of, count_of, format_interval, format_mean, mean_of, paired_difference

__all__ = [
    "FLATTER",
    "ReportTable",
    "TableCell",
    "comparable_flatness",
    "examples_table",
    "flatness_table",
    "latex_table",
    "markdown_table",
    "methods_table",
    "overview_table",
    "printed_cells",
    "results_table",
    "runs_table",
]

NOISE = 0.01  # standard deviation of the noise on the weights in the table of flatness
MEANS = "mean ± standard error over seeds"
FLATTER = (
    "Lower is flatter, but curvature cannot compare models whose training losses differ much: a network that has "
    "memorised its labels has a small Hessian."
)
DETAILS = ("test loss", "ECE", "worst class", "train loss", "mean rise", "variance", "adaptive", "8 bits", "4 bits")
"""Prefixes of the headings of columns that are on the page and in files, but that commands do not print."""
IN_UNITS = " A heading with (1e-3) has numbers in units of 0.001, and so on."
BOLD = "Bold: significantly ahead of the next (the 95% interval of the paired difference excludes 0)."


@dataclass(frozen=True)
class TableCell:
    """A cell: its text, and the number it sorts by."""

    text: str
    value: float | None = None
    """The number behind the text, in full precision."""
    error: float | None = None
    best: bool = False
    method: str = ""
    """The method whose colour marks the cell."""
    interval: str = ""
    """A confidence interval to show after the text."""

    @property
    def full_text(self) -> str:
        """The text and the interval."""
        return f"{self.text} {self.interval}".rstrip()


@dataclass(frozen=True)
class ReportTable:
    """A table: a name for its files, headings and rows."""

    name: str
    caption: str
    headings: list[str]
    rows: list[list[TableCell]]
    numeric: list[bool]
    """Which columns contain numbers and are right-aligned."""
    folded: int | None = None
    """The column that the page shows below the text of the first one."""
    names: list[str] = field(default_factory=list)
    """The setting of each row, by which a printed table names it."""


@dataclass(frozen=True)
class NumberColumn:
    """A column of means over seeds."""

    heading: str
    values: Callable[[SettingSummary], dict[str, float]]
    """The numbers of a setting by seed."""
    digits: int | None = 2
    """Digits after the point; None chooses a common scale and precision for the column."""
    highest: bool | None = True
    """Whether higher is better; None if neither is."""

    def mean(self, setting: SettingSummary) -> Mean:
        """Return the mean of a setting."""
        return mean_of(self.values(setting).values())


def methods_table(task: TaskSummary) -> ReportTable:
    """Return one row per setting: the values of the method's own settings, and how they were selected."""
    rows = [
        [
            TableCell(s.method, method=s.method),
            TableCell(format_values(s.method_values) or "–"),
            TableCell(f"{s.values['lr']:g}" if isinstance(s.values.get("lr"), float) else "–"),
            TableCell(task.tuning(s)),
        ]
        for s in task.settings
    ]
    caption = f"{task.name}: settings of each method. Defaults are replaced by the values they stand for."
    return ReportTable("methods", caption, ["method", "settings", "lr", "selection"], rows, [False] * 4)


def results_table(task: TaskSummary) -> ReportTable:
    """Return one row per setting: the final numbers, mean ± standard error over seeds."""
    optional = [
        NumberColumn("ECE (%)", lambda s: s.finals("test_ece", 100), 1, highest=False),
        NumberColumn("worst class (%)", lambda s: s.finals("test_worst_class_accuracy", 100), 1),
    ]
    columns = [
        NumberColumn(f"test {task.metric} ({task.unit})", lambda s: s.finals("score", 100)),
        NumberColumn("at best validation", lambda s: s.finals("score_at_best_validation", 100)),
        NumberColumn("test loss", lambda s: s.finals("test_loss"), 3, highest=False),
        *_present(optional, task.settings),
        NumberColumn("train loss", lambda s: s.finals("train_loss"), 3, highest=None),
        NumberColumn("passes", lambda s: s.finals("passes"), 0, highest=None),
        NumberColumn("seconds", lambda s: s.finals("seconds"), 1, highest=None),
    ]
    caption = f"{task.name}: numbers at the end of training, {MEANS}; losses in {task.loss_unit}. {BOLD}"
    caption += " At best validation: the test score after the epoch with the best validation score (early stopping)."
    if any(column.heading == "ECE (%)" for column in columns):
        caption += " ECE: expected calibration error on test; worst class: the lowest test accuracy of a class."
    table = _settings_table("results", caption, task, task.settings, columns)
    for row, setting in zip(table.rows, task.settings, strict=True):
        done, total = len(setting.finished), len(setting.runs)
        row.append(TableCell(f"{done}" if done == total else f"{done} of {total}", done))
    table = replace(table, headings=[*table.headings, "runs"], numeric=[*table.numeric, True])
    return _with_differences(table, task, table.headings.index(columns[0].heading) + 1)


def _with_differences(table: ReportTable, task: TaskSummary, place: int) -> ReportTable:
    """Return the table with a column of paired differences in the score to the task's reference."""
    reference = task.reference
    scores = reference.finals("score", 100)
    differences = [paired_difference(s.finals("score", 100), scores) for s in task.settings]
    cells = [
        TableCell("") if setting is reference else difference_cell(difference)
        for setting, difference in zip(task.settings, differences, strict=True)
    ]
    if all(cell.value is None for cell in cells):
        return table
    heading, caption = f"minus {reference.name}", f"{table.caption} Minus {reference.name}: paired by seed"
    if any(difference.runs > 1 for s, difference in zip(task.settings, differences, strict=True) if s is not reference):
        heading += " [95% interval]"
        caption += ", with the 95% interval"
    if len({frozenset(setting.finals("score")) for setting in task.settings}) > 1:
        caption += ", over the seeds that both have"
    return replace(
        table,
        caption=f"{caption}.",
        headings=[*table.headings[:place], heading, *table.headings[place:]],
        rows=[[*row[:place], cell, *row[place:]] for row, cell in zip(table.rows, cells, strict=True)],
        numeric=[*table.numeric[:place], True, *table.numeric[place:]],
    )


def examples_table(task: TaskSummary) -> ReportTable | None:
    """Return one row per setting with final numbers about some of the examples; None if no run has such numbers."""
    columns = [
        NumberColumn("balanced accuracy (%)", _balanced_accuracy),
        NumberColumn("few-shot accuracy (%)", lambda s: s.finals("test_few_shot_accuracy", 100)),
        NumberColumn("silenced precision (%)", lambda s: s.finals("silenced_precision", 100), 1),
        NumberColumn("silenced recall (%)", lambda s: s.finals("silenced_recall", 100), 1),
    ]
    columns = _present(columns, task.settings)
    settings = [s for s in task.settings if any(math.isfinite(c.mean(s).value) for c in columns)]
    if not settings:
        return None
    caption = f"{task.name}: numbers at the end of training, {MEANS}. {BOLD}"
    headings = [column.heading for column in columns]
    if "few-shot accuracy (%)" in headings:
        caption += (
            " Balanced accuracy: mean test accuracy of the classes; few-shot accuracy: that of the third of the "
            "classes with the fewest training examples."
        )
    if "silenced recall (%)" in headings:
        caption += (
            " Silenced: training examples with less than half of the mean weight of their batch. Precision: fraction "
            "of the silenced that are mislabelled; recall: fraction of the mislabelled that are silenced."
        )
    return _settings_table("examples", caption, task, settings, columns)


def _balanced_accuracy(setting: SettingSummary) -> dict[str, float]:
    """Return the mean test accuracy of the classes in percent, by seed, of a long-tailed task; nothing for others."""
    if math.isnan(setting.final("test_few_shot_accuracy").value):
        return {}
    return setting.finals("test_balanced_accuracy", 100)


def overview_table(tasks: Sequence[TaskSummary]) -> ReportTable:
    """Return methods by tasks, with the setting of each method that is best on validation."""
    methods = list(dict.fromkeys(s.method for task in tasks for s in task.settings))
    columns: list[list[TableCell]] = []
    counts: list[int] = []
    for task in tasks:
        chosen = {s.method: s.finals("score", 100) for s in task.chosen}
        scores = [chosen.get(method, {}) for method in methods]
        means = [mean_of(values.values()) for values in scores]
        counts += [mean.runs for mean in means]
        best = best_of(scores)
        columns.append([number_cell(mean, 2, best=i == best) for i, mean in enumerate(means)])
    rows = [[TableCell(method, method=method), *cells] for method, *cells in zip(methods, *columns, strict=True)]
    selection = max((task.selection for task in tasks), key=len)  # the longer one includes missing validation scores
    caption = f"Test scores of {selection}, {MEANS}{_run_counts(counts)}. {BOLD}"
    if any(len(set(task.num_settings.values())) > 1 for task in tasks):
        caption += " The methods had different numbers of settings to choose from."
    headings = ["method", *(f"{task.name}: {task.metric} ({task.unit})" for task in tasks)]
    return ReportTable("overview", caption, headings, rows, [False, *(True for _ in tasks)])


def runs_table(task: TaskSummary) -> ReportTable:
    """Return one row per run, as recorded."""
    with_notes = any(run.notes for run in task.runs)
    rows = []
    for setting in task.settings:
        for run in setting.runs:
            last = run.rows[-1] if run.rows else {}
            seed = float(run.seed) if isinstance(run.seed, int) else None
            cells = [
                TableCell(setting.name, method=setting.method),
                TableCell(str(run.seed), seed),
                number_cell(mean_of([100 * run.score] if run.finished else []), 2),
                number_cell(mean_of([last["epoch"]] if last else []), None),
                number_cell(mean_of([last["passes"]] if "passes" in last else []), 0),
                number_cell(mean_of([last["seconds"]] if "seconds" in last else []), 1),
                TableCell(run.state),
                TableCell(_machine(run)),
                TableCell(str(run.folder)),
            ]
            rows.append(cells + ([TableCell(run.notes)] if with_notes else []))
    headings = ["setting", "seed", f"test {task.metric} ({task.unit})", "epoch", "passes", "seconds", "state"]
    headings += ["machine", "folder", *(["notes"] if with_notes else [])]
    numeric = [False, True, True, True, True, True, False, False, False, *([False] if with_notes else [])]
    return ReportTable("runs", f"{task.name}: all runs.", headings, rows, numeric)


# -------------------------------------------------------------------------------- flatness


def comparable_flatness(task: TaskSummary) -> tuple[list[SettingSummary], list[RunProblem]]:
    """Return the settings with the runs whose flatness was measured on the same examples, and problems for the rest."""
    marks = Counter(_examples_mark(run) for run in task.runs if run.flatness is not None and not _outdated(run))
    mark = marks.most_common(1)[0][0] if marks else ""
    problems, kept = [], []
    for setting in task.settings:
        runs = []
        for run in setting.runs:
            if run.flatness is None:
                continue
            if not _outdated(run) and _examples_mark(run) == mark:
                runs.append(run)
                continue
            why = "before training finished; measure it again" if _outdated(run) else "on other examples than most runs"
            problems.append(RunProblem(str(run.folder / "flatness.json"), f"skipped: measured {why}"))
        if runs and len(runs) < len(setting.runs):
            what = f"flatness is measured for {len(runs)} of {len(setting.runs)} runs"
            problems.append(RunProblem(setting.name, what))
        if runs:
            kept.append(replace(setting, runs=runs))
    if kept and len(kept) < len(task.settings):
        what = f"not measured for {len(task.settings) - len(kept)} of {len(task.settings)} settings"
        problems.append(RunProblem("flatness", what))
    return kept, problems


def _outdated(run: RunRecord) -> bool:
    """Return whether flatness was measured at a checkpoint of a run that has finished since."""
    return run.finished and _about(run).get("finished") is False


def flatness_table(settings: Sequence[SettingSummary], task: TaskSummary) -> ReportTable:
    """Return the flatness at the trained weights, mean ± standard error over seeds; lower is flatter."""

    def of_runs(measure: Callable[[RunRecord], float]) -> Callable[[SettingSummary], dict[str, float]]:
        return lambda setting: {seed: measure(run) for seed, run in setting.by_seed.items()}

    def scalar(*path: str) -> Callable[[SettingSummary], dict[str, float]]:
        return of_runs(lambda run: measured(run.flatness, *path)[0])

    rise = of_runs(lambda run: _at_noise(run, "mean") - measured(run.flatness, "loss")[0])
    variance = of_runs(lambda run: _at_noise(run, "variance"))
    tilted = of_runs(lambda run: _at_noise(run, "tilted_variance"))

    columns = [
        NumberColumn("loss", scalar("loss"), None, highest=None),
        NumberColumn(f"mean rise at {NOISE:g}", rise, None, highest=False),
        NumberColumn(f"variance at {NOISE:g}", variance, None, highest=False),
        NumberColumn(f"t-variance at {NOISE:g}", tilted, None, highest=False),
        NumberColumn("worst case", scalar("worst_case", "value"), None, highest=False),
        NumberColumn("adaptive", scalar("adaptive", "value"), None, highest=False),
        NumberColumn("8 bits", of_runs(lambda run: _rise_at_bits(run, 8)), None, highest=False),
        NumberColumn("4 bits", of_runs(lambda run: _rise_at_bits(run, 4)), None, highest=False),
        NumberColumn("λ1", scalar("eigenvalues", "values"), None, highest=False),
        NumberColumn("trace", scalar("trace", "value"), None, highest=False),
    ]
    columns = _present(columns, settings)
    runs = [run for setting in settings for run in setting.runs]
    about = _about(runs[0])
    where = f"{about.get('examples', '?')} {about.get('split', '?')} examples of {about.get('task', '?')}"
    counts = _run_counts([len(setting.runs) for setting in settings])
    tilts = " or ".join(dict.fromkeys(f"{t:g}" for run in runs if isinstance(t := _about(run).get("t"), (int, float))))
    caption = (
        f"Flatness at the trained weights on {where}, {MEANS}{counts}; losses in {task.loss_unit}. {FLATTER} Mean "
        f"rise and variance: of the loss under noise of standard deviation {NOISE:g} on every weight; t-variance: with "
        f"weights exp(t·loss){f', t = {tilts}' if tilts else ''}; worst case and adaptive: its largest rise "
        f"{_radius(runs)}; bits: its rise when weights are rounded to as many; λ1 and trace: of the Hessian. {BOLD}"
    )
    return _settings_table("flatness", caption, task, settings, columns)


def _at_noise(run: RunRecord, name: str) -> float:
    """Return a statistic of the neighbourhood at the noise level of the table, or NaN."""
    levels, values = (measured(run.flatness, "neighborhood", key) for key in ("std", name))
    return next((v for s, v in zip(levels, values, strict=False) if math.isclose(s, NOISE)), math.nan)


def _rise_at_bits(run: RunRecord, bits: int) -> float:
    """Return the rise of the loss when weights are rounded to so many bits, or NaN."""
    widths, losses = (measured(run.flatness, "rounding", key) for key in ("bits", "losses"))
    rounded = next((loss for width, loss in zip(widths, losses, strict=False) if width == bits), math.nan)
    return rounded - measured(run.flatness, "loss")[0]


def _about(run: RunRecord) -> dict[str, Any]:
    """Return what a run's flatness was measured on, and how."""
    about = (run.flatness or {}).get("about")
    return about if isinstance(about, dict) else {}


def _examples_mark(run: RunRecord) -> str:
    """Return what identifies the examples; the number of draws does not matter."""
    about = _about(run)
    return json.dumps([about.get(key) for key in ("task", "split", "examples")])


def _radius(runs: Sequence[RunRecord]) -> str:
    """Return the radius of the worst case as text, if recorded."""
    recorded = [
        dict.fromkeys(f"{r:g}" for run in runs if isinstance(r := _about(run).get(key), (int, float)))
        for key in ("rho", "adaptive_rho")
    ]
    plain, adaptive = (" or ".join(radii) for radii in recorded)
    if not plain:
        return "nearby"
    return f"within a radius of {plain}" + (f" (adaptive: {adaptive})" if adaptive else "")


# -------------------------------------------------------------------------------- cells


def _settings_table(
    name: str,
    caption: str,
    task: TaskSummary,
    settings: Sequence[SettingSummary],
    columns: Sequence[NumberColumn],
) -> ReportTable:
    """Return a row per setting: its method, what distinguishes it, and the columns."""
    differ = any(setting.differences for setting in settings)
    rows = [[TableCell(s.method, method=s.method)] for s in settings]
    if differ:
        rows = [[*row, TableCell(format_values(s.differences))] for row, s in zip(rows, settings, strict=True)]
    headings = ["method", *(["settings"] if differ else [])]
    for column in columns:
        values = [column.values(setting) for setting in settings]
        means = [mean_of(by_seed.values()) for by_seed in values]
        best = None if column.highest is None else best_of(values, highest=column.highest)
        heading, texts = column.heading, [format_mean(mean, column.digits) for mean in means]
        if column.digits is None:
            power, texts = _common_notation(means)
            if power:
                heading += f" (1e{power})"
                caption += "" if caption.endswith(IN_UNITS) else IN_UNITS
        headings.append(heading)
        for i, (row, mean, text) in enumerate(zip(rows, means, texts, strict=True)):
            row.append(replace(number_cell(mean, column.digits, best=i == best), text=text))
    numeric = [False, *([False] if differ else []), *(True for _ in columns)]
    names = [task.label(setting) for setting in settings]
    return ReportTable(name, caption, headings, rows, numeric, folded=1 if differ else None, names=names)


def _present(columns: Sequence[NumberColumn], settings: Sequence[SettingSummary]) -> list[NumberColumn]:
    """Return the columns in which some setting has a number."""
    return [c for c in columns if any(math.isfinite(c.mean(s).value) for s in settings)]


def _common_notation(means: Sequence[Mean]) -> tuple[int, list[str]]:
    """Return the numbers of a column in one notation: the exponent of a common power of ten, and the texts.

    All texts have the same number of digits after the point, so that they can be compared by eye. A column that spans
    more than four orders of magnitude is written with exponents instead.
    """
    sizes = [abs(m.value) for m in means if math.isfinite(m.value) and m.value]
    if not sizes:
        return 0, [format_mean(m) for m in means]
    low, high = min(sizes), max(sizes)
    if high > 1e4 * low:
        return 0, [_with_exponent(m) for m in means]
    # Two significant digits of the smallest error, or three of the smallest value if there is no error.
    errors = [m.error for m in means if math.isfinite(m.error) and m.error]
    smallest, significant = (min(errors), 2) if errors else (low, 3)
    digits = significant - 1 - math.floor(math.log10(smallest))
    power = 3 * math.floor(math.log10(high) / 3) if digits > 3 or high >= 1e5 else 0
    digits = min(max(digits + power, 0), 4)
    scaled = [Mean(m.value / 10.0**power, m.error / 10.0**power, m.runs) for m in means]
    return power, [format_mean(m, digits) for m in scaled]


def _with_exponent(mean: Mean) -> str:
    if not math.isfinite(mean.value):
        return format_mean(mean)
    return f"{mean.value:.1e}" + (f" ± {mean.error:.1e}" if math.isfinite(mean.error) else "")


def _run_counts(counts: Sequence[int]) -> str:
    """Return how many runs the means of a table are over, for tables without such a column."""
    some = [count for count in counts if count]
    if not some:
        return ""
    few, most = min(some), max(some)
    text = f"{few} to {most} runs" if few < most else count_of(most, "run")
    return f", of {text} each"


def number_cell(mean: Mean, digits: int | None, *, best: bool = False) -> TableCell:
    """Return a cell that shows a mean; see :func:`tiltsam.lab.stats.format_mean`."""
    if not math.isfinite(mean.value):
        return TableCell(format_mean(mean))
    return TableCell(format_mean(mean, digits), mean.value, mean.error if math.isfinite(mean.error) else None, best)


def difference_cell(difference: Mean) -> TableCell:
    """Return a cell that shows a paired difference and its 95% interval."""
    if not math.isfinite(difference.value):
        return TableCell("–")
    interval = format_interval(difference) if difference.runs > 1 else ""
    return TableCell(f"{difference.value:+z.2f}", difference.value, interval=interval)


def _machine(run: RunRecord) -> str:
    environment = run.environment
    parts = [environment.get("gpu") or environment.get("device"), environment.get("torch")]
    return ", torch ".join(str(part) for part in parts if part)


# -------------------------------------------------------------------------------- printed, Markdown and LaTeX


def printed_cells(table: ReportTable) -> list[list[str]]:
    """Return the cells that a command prints, headings first: the names of the settings and the main numbers."""
    kept = [k for k, heading in enumerate(table.headings) if table.numeric[k] and not heading.startswith(DETAILS)]
    rows = [[name, *(row[k].full_text for k in kept)] for name, row in zip(table.names, table.rows, strict=True)]
    return [[table.headings[0], *(table.headings[k] for k in kept)], *rows]


def markdown_table(table: ReportTable) -> str:
    """Return the table in GitHub's Markdown, the best in bold."""
    rule = "|".join("--:" if numeric else ":--" for numeric in table.numeric)
    lines = ["| " + " | ".join(map(_markdown, table.headings)) + " |", f"|{rule}|"]
    for row in table.rows:
        cells = (f"**{_markdown(c.full_text)}**" if c.best else _markdown(c.full_text) for c in row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", _markdown(table.caption), ""])


def _markdown(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|#&~])", r"\\\1", " ".join(text.split()))


_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "%": r"\%",
    "#": r"\#",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "λ": r"$\lambda$",
    "√": r"$\surd$",
    "–": "--",
    "²": r"$^2$",
}


def latex_table(table: ReportTable) -> str:
    """Return a LaTeX ``table`` that uses ``booktabs``, the best in bold."""
    columns = "".join("r" if numeric else "l" for numeric in table.numeric)
    rows = [
        " & ".join(rf"\textbf{{{_latex(c.full_text)}}}" if c.best else _latex(c.full_text) for c in row) + r" \\"
        for row in table.rows
    ]
    return "\n".join(
        [
            "% needs \\usepackage{booktabs}",
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_latex(table.caption)}}}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            " & ".join(map(_latex, table.headings)) + r" \\",
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in " ".join(text.split()))
