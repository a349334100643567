"""Build the tables of a report, and write them as Markdown and LaTeX. Text from records is never markup."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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
    "TableColumn",
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
    under: str = ""
    """What the page shows below the text instead of a folded column."""

    @property
    def full_text(self) -> str:
        """The text and the interval."""
        return f"{self.text} {self.interval}".rstrip()


@dataclass(frozen=True)
class TableColumn:
    """A column: its heading and its cells."""

    heading: str
    cells: list[TableCell]
    numeric: bool = False
    """Whether it contains numbers and is right-aligned."""
    folded: bool = False
    """Whether the page leaves it out, because cells of another one show its texts below theirs."""


@dataclass(frozen=True)
class ReportTable:
    """A table: a name for its files, and columns."""

    name: str
    caption: str
    columns: list[TableColumn]
    names: list[str] = field(default_factory=list)
    """The setting of each row, by which a printed table names it."""

    @property
    def headings(self) -> list[str]:
        """The headings of the columns."""
        return [column.heading for column in self.columns]

    @property
    def rows(self) -> list[tuple[TableCell, ...]]:
        """The cells by row."""
        return list(zip(*(column.cells for column in self.columns), strict=True))


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
    rates = [s.values.get("lr") for s in task.settings]
    columns = [
        TableColumn("method", [TableCell(s.method, method=s.method) for s in task.settings]),
        TableColumn("settings", [TableCell(format_values(s.method_values) or "–") for s in task.settings]),
        TableColumn("lr", [TableCell(f"{lr:g}" if isinstance(lr, float) else "–") for lr in rates]),
        TableColumn("selection", [TableCell(task.tuning(s)) for s in task.settings]),
    ]
    caption = f"{task.name}: settings of each method. Defaults are replaced by the values they stand for."
    return ReportTable("methods", caption, columns)


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
    counts = [(sum(run.finished for run in setting.runs), len(setting.runs)) for setting in task.settings]
    cells = [TableCell(f"{done}" if done == total else f"{done} of {total}", done) for done, total in counts]
    table = replace(table, columns=[*table.columns, TableColumn("runs", cells, numeric=True)])
    return _with_differences(table, task, table.headings.index(columns[0].heading) + 1)


def _with_differences(table: ReportTable, task: TaskSummary, place: int) -> ReportTable:
    """Return the table with a column of paired differences in the score to the task's reference."""
    reference = task.reference
    scores = reference.finals("score", 100)
    differences = [paired_difference(s.finals("score", 100), scores) for s in task.settings]
    others = [s is not reference for s in task.settings]
    cells = [difference_cell(d) if other else TableCell("") for d, other in zip(differences, others, strict=True)]
    if all(cell.value is None for cell in cells):
        return table
    heading, caption = f"minus {reference.name}", f"{table.caption} Minus {reference.name}: paired by seed"
    if any(difference.runs > 1 for difference, other in zip(differences, others, strict=True) if other):
        heading += " [95% interval]"
        caption += ", with the 95% interval"
    if len({frozenset(setting.finals("score")) for setting in task.settings}) > 1:
        caption += ", over the seeds that both have"
    columns = [*table.columns[:place], TableColumn(heading, cells, numeric=True), *table.columns[place:]]
    return replace(table, caption=f"{caption}.", columns=columns)


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
    columns = [TableColumn("method", [TableCell(method, method=method) for method in methods])]
    counts: list[int] = []
    for task in tasks:
        chosen = {s.method: s.finals("score", 100) for s in task.chosen}
        scores = [chosen.get(method, {}) for method in methods]
        means = [mean_of(values.values()) for values in scores]
        counts += [mean.runs for mean in means]
        best = best_of(scores)
        cells = [number_cell(mean, format_mean(mean, 2), best=i == best) for i, mean in enumerate(means)]
        columns.append(TableColumn(f"{task.name}: {task.metric} ({task.unit})", cells, numeric=True))
    selection = max((task.selection for task in tasks), key=len)  # the longer one includes missing validation scores
    caption = f"Test scores of {selection}, {MEANS}{_run_counts(counts)}. {BOLD}"
    if any(len(set(task.num_settings.values())) > 1 for task in tasks):
        caption += " The methods had different numbers of settings to choose from."
    return ReportTable("overview", caption, columns)


def runs_table(task: TaskSummary) -> ReportTable:
    """Return one row per run, as recorded."""
    runs, lasts = task.runs, [run.rows[-1] if run.rows else {} for run in task.runs]

    def numbers(heading: str, values: Iterable[float], digits: int | None) -> TableColumn:
        means = [Mean(value, math.nan, 1) for value in values]
        return TableColumn(heading, [number_cell(mean, format_mean(mean, digits)) for mean in means], numeric=True)

    seeds = [TableCell(str(run.seed), float(run.seed) if isinstance(run.seed, int) else None) for run in runs]
    columns = [
        TableColumn("setting", [TableCell(s.name, method=s.method) for s in task.settings for _ in s.runs]),
        TableColumn("seed", seeds, numeric=True),
        numbers(f"test {task.metric} ({task.unit})", [100 * run.score for run in runs], 2),
        *(
            numbers(name, [row.get(name, math.nan) for row in lasts], digits)
            for name, digits in (("epoch", None), ("passes", 0), ("seconds", 1))
        ),
        TableColumn("state", [TableCell(run.state) for run in runs]),
        TableColumn("machine", [TableCell(_machine(run)) for run in runs]),
        TableColumn("folder", [TableCell(str(run.folder)) for run in runs]),
    ]
    if any(run.notes for run in runs):
        columns.append(TableColumn("notes", [TableCell(run.notes) for run in runs]))
    return ReportTable("runs", f"{task.name}: all runs.", columns)


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
    runs = [run for setting in settings for run in setting.runs]
    numbers = {run.folder: _flatness_numbers(run) for run in runs}

    def column(heading: str) -> NumberColumn:
        highest = None if heading == "loss" else False
        return NumberColumn(
            heading, lambda s: {seed: numbers[run.folder][heading] for seed, run in s.by_seed.items()}, None, highest
        )

    columns = _present([column(heading) for heading in numbers[runs[0].folder]], settings)
    about = _about(runs[0])
    where = f"{about.get('examples', '?')} {about.get('split', '?')} examples of {about.get('task', '?')}"
    counts = _run_counts([len(setting.runs) for setting in settings])
    tilts = _recorded(runs, "t")
    caption = (
        f"Flatness at the trained weights on {where}, {MEANS}{counts}; losses in {task.loss_unit}. {FLATTER} Mean "
        f"rise and variance: of the loss under noise of standard deviation {NOISE:g} on every weight; t-variance: with "
        f"weights exp(t·loss){f', t = {tilts}' if tilts else ''}; worst case and adaptive: its largest rise "
        f"{_radius(runs)}; bits: its rise when weights are rounded to as many; λ1 and trace: of the Hessian. {BOLD}"
    )
    return _settings_table("flatness", caption, task, settings, columns)


def _flatness_numbers(run: RunRecord) -> dict[str, float]:
    """Return the numbers of a run in the table of flatness, by heading; NaN if not measured."""

    def number(*path: str) -> float:
        return measured(run.flatness, *path)[0]

    def at(part: str, axis: str, place: float, name: str) -> float:
        places, values = (measured(run.flatness, part, key) for key in (axis, name))
        return next((v for x, v in zip(places, values, strict=False) if math.isclose(x, place)), math.nan)

    loss = number("loss")
    return {
        "loss": loss,
        f"mean rise at {NOISE:g}": at("neighborhood", "std", NOISE, "mean") - loss,
        f"variance at {NOISE:g}": at("neighborhood", "std", NOISE, "variance"),
        f"t-variance at {NOISE:g}": at("neighborhood", "std", NOISE, "tilted_variance"),
        "worst case": number("worst_case", "value"),
        "adaptive": number("adaptive", "value"),
        "8 bits": at("rounding", "bits", 8, "losses") - loss,
        "4 bits": at("rounding", "bits", 4, "losses") - loss,
        "λ1": number("eigenvalues", "values"),
        "trace": number("trace", "value"),
    }


def _about(run: RunRecord) -> dict[str, Any]:
    """Return what a run's flatness was measured on, and how."""
    about = (run.flatness or {}).get("about")
    return about if isinstance(about, dict) else {}


def _examples_mark(run: RunRecord) -> str:
    """Return what identifies the examples; the number of draws does not matter."""
    about = _about(run)
    return json.dumps([about.get(key) for key in ("task", "split", "examples")])


def _recorded(runs: Sequence[RunRecord], key: str) -> str:
    """Return the values of a setting of the measurement as text; empty if no run has recorded it."""
    values = (_about(run).get(key) for run in runs)
    return " or ".join(dict.fromkeys(f"{value:g}" for value in values if isinstance(value, (int, float))))


def _radius(runs: Sequence[RunRecord]) -> str:
    """Return the radius of the worst case as text, if recorded."""
    plain, adaptive = _recorded(runs, "rho"), _recorded(runs, "adaptive_rho")
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
    differences = [format_values(s.differences) for s in settings]
    methods = [TableCell(s.method, method=s.method, under=text) for s, text in zip(settings, differences, strict=True)]
    shown = [TableColumn("method", methods)]
    if any(differences):
        shown.append(TableColumn("settings", [TableCell(text) for text in differences], folded=True))
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
        pairs = enumerate(zip(means, texts, strict=True))
        cells = [number_cell(mean, text, best=i == best) for i, (mean, text) in pairs]
        shown.append(TableColumn(heading, cells, numeric=True))
    return ReportTable(name, caption, shown, [task.label(setting) for setting in settings])


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


def number_cell(mean: Mean, text: str, *, best: bool = False) -> TableCell:
    """Return a cell that shows a mean as a text, and sorts by its value if that is finite."""
    if not math.isfinite(mean.value):
        return TableCell(text)
    return TableCell(text, mean.value, mean.error if math.isfinite(mean.error) else None, best)


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
    kept = [column for column in table.columns if column.numeric and not column.heading.startswith(DETAILS)]
    rows = zip(table.names, *([cell.full_text for cell in column.cells] for column in kept), strict=True)
    return [[table.headings[0], *(column.heading for column in kept)], *map(list, rows)]


def markdown_table(table: ReportTable) -> str:
    """Return the table in GitHub's Markdown, the best in bold."""
    rule = "|".join("--:" if column.numeric else ":--" for column in table.columns)
    lines = ["| " + " | ".join(map(_markdown, table.headings)) + " |", f"|{rule}|"]
    for row in table.rows:
        cells = (f"**{_markdown(c.full_text)}**" if c.best else _markdown(c.full_text) for c in row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", _markdown(table.caption), ""])


def _markdown(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|#&~])", r"\\\1", " ".join(text.split()))


_LATEX_ESCAPES = str.maketrans(
    {
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
)


def latex_table(table: ReportTable) -> str:
    """Return a LaTeX ``table`` that uses ``booktabs``, the best in bold."""
    columns = "".join("r" if column.numeric else "l" for column in table.columns)
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
    return " ".join(text.split()).translate(_LATEX_ESCAPES)
