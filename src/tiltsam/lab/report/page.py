"""Render the HTML page: one file with its style, script and numbers inside, which needs no network.

The plots are drawn by ``assets/plot.js`` and not by a plotting library, because an embedded library adds megabytes to
every report.

Text from records never becomes markup: it is escaped here and set as text by the script. JSON inside the page has
``<``, ``>`` and ``&`` escaped, so no string can close its element. A content security policy allows only the page's own
style and script.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from importlib.resources import files
from typing import Any

import tiltsam
from tiltsam.lab.files import is_number
from tiltsam.lab.flags import format_value
from tiltsam.lab.palette import METHOD_COLORS, METHOD_COLORS_ON_DARK, OTHER_COLOR
from tiltsam.lab.report.plots import Plot, plot_data
from tiltsam.lab.report.runs import RunProblem
from tiltsam.lab.report.summary import SettingSummary, TaskSummary
from tiltsam.lab.report.tables import ReportTable, TableCell
from tiltsam.lab.stats import (
    confidence_interval,
    count_of,
    format_interval,
    format_mean,
    is_significant,
    mean_of,
    paired_difference,
)

__all__ = ["TaskSection", "headline", "html_table", "render_page", "task_facts"]

HOW_TO_READ = (
    "Curves are means over seeds with a band of one standard error, and thinner where a seed is missing. Click a name "
    "to hide or show its curve. To read values, point at a curve, tap it, or use the arrow keys on a plot."
)
MAX_NAMED = 3  # settings that a sentence lists
LONG_WORD = 24  # characters; longer words, such as paths, may break anywhere


@dataclass(frozen=True)
class TaskSection:
    """What the page shows about one task."""

    task: TaskSummary
    headline: str
    methods: ReportTable
    results: ReportTable
    examples: ReportTable | None
    runs: ReportTable
    plots: list[Plot]
    flatness: ReportTable | None
    flatness_plots: list[Plot]
    problems: list[RunProblem]

    @property
    def tables(self) -> list[ReportTable]:
        """All tables of the section."""
        tables = (self.methods, self.results, self.examples, self.flatness, self.runs)
        return [table for table in tables if table is not None]


def render_page(
    sections: Sequence[TaskSection], overview: ReportTable | None, problems: Sequence[RunProblem], written: datetime
) -> str:
    """Return the page.

    Args:
        sections: One per task.
        overview: Methods by tasks, if there are several tasks.
        problems: Problems that belong to no task.
        written: The time on the page.
    """
    plots: list[Plot] = []
    titled = len(sections) > 1
    body = "\n".join(_section(section, number, plots, titled=titled) for number, section in enumerate(sections))
    names = [section.task.name for section in sections]
    title = names[0] if len(names) == 1 else count_of(len(names), "task")
    num_runs = sum(len(section.task.runs) for section in sections)
    num_settings = sum(len(section.task.settings) for section in sections)
    meta = [count_of(num_runs, "run"), count_of(num_settings, "setting"), f"{written:%d %B %Y, %H:%M}"]
    links = "".join(f'<a href="#task-{i}">{escape(name)}</a>' for i, name in enumerate(names))
    style, script = _style(), _asset("plot.js") + "\n" + _asset("page.js")
    front = f"<h2>All tasks</h2>\n{html_table(overview)}" if overview is not None else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy(style, script)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} – tiltsam report</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<header>
<p class="eyebrow">tiltsam report</p>
<h1>{escape(title)}</h1>
<p class="meta">{escape(" · ".join(meta))}</p>
{f'<nav aria-label="tasks">{links}</nav>' if len(names) > 1 else ""}
</header>
<main>
<noscript><p>The plots need JavaScript, which is disabled here. The folder figures next to this page has them as
files.</p></noscript>
{_problems(problems)}
{front}
{body}
</main>
<footer>
<p>Written by tiltsam {escape(tiltsam.__version__)}. This file contains everything on this page.</p>
</footer>
<script type="application/json" id="report-data">{_safe_json(plot_data(plots))}</script>
<script>{script}</script>
</body>
</html>
"""


# -------------------------------------------------------------------------------- a task


def _section(section: TaskSection, number: int, plots: list[Plot], *, titled: bool) -> str:
    task = section.task
    shared = _shared_settings(task)
    parts = [
        f'<section id="task-{number}">',
        f"<h2>{escape(task.name)}</h2>" if titled else "",
        f'<p class="lead">{escape(_with_minus(section.headline))}</p>',
        _problems(section.problems),
        _facts(task_facts(task)),
        html_table(section.results),
        f"<h3>Examples</h3>\n{html_table(section.examples)}" if section.examples is not None else "",
        "<h3>Methods</h3>",
        html_table(section.methods),
        f'<ul class="note">{_items(task.notes)}</ul>' if task.notes else "",
        f"<details><summary>Settings shared by all runs</summary>{_facts(shared)}</details>" if shared else "",
        "<h3>Training</h3>" if section.plots else "",
        f'<p class="note">{HOW_TO_READ}</p>' if section.plots else "",
        _grid(section.plots, plots),
        "<h3>Flatness</h3>",
    ]
    if section.flatness is not None:
        parts += [html_table(section.flatness), _grid(section.flatness_plots, plots)]
    else:
        parts.append('<p class="note">Not measured yet: run <code>tiltsam sharpness</code> on these runs.</p>')
    parts += [f"<details><summary>All runs</summary>{html_table(section.runs)}</details>", "</section>"]
    return "\n".join(part for part in parts if part)


def task_facts(task: TaskSummary) -> dict[str, str]:
    """Return the task, examples, classes, label noise, model and budget.

    Facts that differ between runs list all their values. Records of earlier versions lack some facts.
    """

    def values(name: str) -> list[Any]:
        entries = [run.setup.get(name, run.config.get(name)) for run in task.runs]
        found = {value for value in entries if isinstance(value, (str, float, int))}
        return sorted(found, key=lambda value: (isinstance(value, str), value))

    def sizes(name: str) -> list[int]:
        return [value for value in values(name) if isinstance(value, int) and value > 0]

    facts = {"task": " · ".join([task.name, *map(str, values("description"))])}
    splits = {split: sizes(f"num_{split}") for split in ("train", "validation", "test")}
    facts["examples"] = ", ".join(f"{_either(counts)} {split}" for split, counts in splits.items() if counts)
    if splits["test"] and max(map(len, splits.values())) == 1:
        facts["test share"] = f"{splits['test'][0] / sum(map(sum, splits.values())):.0%}"
    facts["classes"] = _either(sizes("num_classes"))
    if facts["classes"] == "1":
        facts["classes"] = "none (regression)"
    noise = [f"{value:.0%}" if value else "none added" for value in values("noise") if is_number(value)]
    facts["label noise"] = " or ".join(noise) + (
        " of training and validation labels" if noise and noise != ["none added"] else ""
    )
    facts["model"] = " or ".join(str(model) for model in values("model"))
    facts["parameters"] = _either(sizes("num_parameters"))
    facts["budget"] = ", ".join(
        " or ".join(f"{limit:g}" for limit in limits) + f" {unit}"
        for unit in ("passes", "seconds", "epochs")
        if (limits := [value for value in values(unit) if is_number(value) and math.isfinite(value)])
    )
    return {name: text for name, text in facts.items() if text}


def _shared_settings(task: TaskSummary) -> dict[str, str]:
    """Return the shared settings that are set and that neither the facts nor the table of methods contain."""
    elsewhere = {"model", "noise", "epochs", "passes", "seconds"}
    return {k: format_value(v) for k, v in task.shared.items() if v is not None and k not in elsewhere}


def _either(numbers: Sequence[int]) -> str:
    return " or ".join(f"{number:,}" for number in numbers)


def _facts(facts: dict[str, str]) -> str:
    return "<dl>" + "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items()) + "</dl>"


def headline(task: TaskSummary) -> str:
    """Return the result in a few sentences, with no more than the numbers support."""
    compared = task.settings if task.compare_settings else task.chosen
    ranked = [(s, mean) for s in compared if math.isfinite((mean := s.final("score", 100)).value)]
    ranked.sort(key=lambda entry: -entry[1].value)
    if not ranked and all(run.diverged for run in task.runs):
        return "All runs diverged: there is nothing to compare."
    if not ranked:
        return "No run has finished yet. The curves show the progress so far."
    first, mean = ranked[0]
    tied = [s for s, other in ranked if mean.value - other.value < 0.005]
    unit = "%" if task.unit == "%" else " (×100)"
    score = f"{format_mean(mean, 2)}{unit}"
    if len(ranked) == 1:
        which = "best on validation" if task.has_validation(first) else "first (there is no validation score)"
        among = f"Of {len(task.settings)} settings, the {which}, " if len(task.settings) > len(compared) else ""
        text = f"{among}{first.full_name}{',' if among else ''} reaches a test {task.metric} of {score}."
    elif len(tied) > 1:
        if len({format_mean(s.final("score", 100), 2) for s in tied}) > 1:  # equal means, other standard errors
            score = f"{mean.value:.2f}{unit}"
        text = f"{_listed([s.full_name for s in tied])} have the highest test {task.metric}, {score}."
    else:
        second = ranked[1][0]
        behind = paired_difference(first.finals("score"), second.finals("score")).value < 0  # on the common seeds
        text = f"{first.full_name} has the highest test {task.metric}, {score}{', but is' if behind else ':'} "
        text += f"{_lead(first, second, second.full_name)}."
    if task.plain is not None and task.plain not in [*tied, *(s for s, _ in ranked[:2])]:
        subject = first.full_name if len(tied) > 1 else "It"
        text += f" {subject} is {_lead(first, task.plain, f'plain training ({task.plain.full_name})')}."
    text += _better_earlier(task, [s for s, _ in ranked]) + _diverged([s for s, _ in ranked])
    if len(ranked) == 1:
        return text
    if max(setting_mean.runs for _, setting_mean in ranked) == 1:
        text += " One seed gives no interval: use several."
    if len(task.settings) > len(compared):
        text += f" The comparison uses {task.selection}."
    return text + ("" if task.compare_settings else _uneven_tuning(task, [s for s, _ in ranked]))


def _listed(names: Sequence[str]) -> str:
    """Return names as in ``a, b and c``; of many, the first few and the number of the others."""
    if len(names) > MAX_NAMED:
        names = [*names[:MAX_NAMED], count_of(len(names) - MAX_NAMED, "other")]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _lead(first: SettingSummary, other: SettingSummary, name: str) -> str:
    """Return how far a setting is ahead of another over the seeds that both have, and whether that may be chance."""
    scores, other_scores = first.finals("score", 100), other.finals("score", 100)
    lead = paired_difference(scores, other_scores)
    if not lead.runs:
        lead = mean_of([first.final("score", 100).value - other.final("score", 100).value])
        return f"{lead.value:.2f} ahead of {name}, with no common seed"
    text = f"{abs(lead.value):.2f} {'behind' if lead.value < 0 else 'ahead of'} {name}"
    if lead.runs < max(len(scores), len(other_scores)):
        text += f" over {count_of(lead.runs, 'common seed')}"
    if lead.runs == 1 or math.isnan(confidence_interval(lead)[0]):
        return text
    verdict = "a significant difference" if is_significant(lead) else "not a significant difference"
    return f"{text}, 95% interval {format_interval(lead)}, {verdict}"


def _better_earlier(task: TaskSummary, compared: Sequence[SettingSummary]) -> str:
    """Return a sentence if settings lost significantly, and more than a point, after their best validation epoch."""
    early = []
    for setting in compared:
        best = setting.finals("score_at_best_validation", 100)
        loss = paired_difference(best, setting.finals("score", 100))
        if loss.value > 1 and is_significant(loss):
            early.append((loss.value, mean_of(best.values()).value, setting.full_name))
    if not early:
        return ""
    early.sort(reverse=True)
    unit = "%" if task.unit == "%" else ""
    reached = [f"{score:.2f}{unit} ({lost:.2f} more)" for lost, score, _ in early]
    if len(early) == 1:
        who = f"{early[0][2]} was"
    else:
        who = f"{'All' if len(early) == len(compared) else 'Some'} methods were"
        reached = [f"{name} {text}" for (_, _, name), text in zip(early, reached, strict=True)]
    return (
        f" {who} better at the best validation epoch than at the end: {_listed(reached)}. "
        "Train for less, lower lr, or tune."
    )


def _diverged(compared: Sequence[SettingSummary]) -> str:
    """Return a sentence if settings were ranked by the runs that are left because others diverged."""
    counts = [(s, sum(run.state == "diverged" for run in s.runs)) for s in compared]
    listed = [f"{s.full_name} {count} of {len(s.runs)}" for s, count in counts if count]
    return f" The means leave out diverged runs: {_listed(listed)}." if listed else ""


def _uneven_tuning(task: TaskSummary, compared: Sequence[SettingSummary]) -> str:
    """Return a sentence if some methods had more settings to choose from than others, which is an advantage."""
    counts = {m: number for m, number in task.num_settings.items() if m in {s.method for s in compared}}
    if len(set(counts.values())) < 2:
        return ""
    listed = ", ".join(f"{method} {number}" for method, number in counts.items())
    return f" The methods had different numbers of settings to choose from: {listed}."


def _problems(problems: Sequence[RunProblem]) -> str:
    if not problems:
        return ""
    count = count_of(len(problems), "item")
    opened = " open" if len(problems) <= 6 else ""
    head = f'<details class="missing"{opened}><summary>{count} missing or damaged</summary>'
    return f"{head}<ul>{_items(problems)}</ul></details>"


def _items(entries: Sequence[object]) -> str:
    return "".join(f"<li>{escape(str(entry))}</li>" for entry in entries)


def _grid(chosen: Sequence[Plot], plots: list[Plot]) -> str:
    """Return placeholders for plots, and append the plots to ``plots``."""
    places = []
    for plot in chosen:
        places.append(
            f'<figure data-plot="{len(plots)}" data-name="{escape(plot.name)}">'
            f'<figcaption>{escape(plot.title)}</figcaption><div class="plot"></div><div class="legend"></div>'
            + (f'<p class="note">{escape(plot.note)}</p></figure>' if plot.note else "</figure>")
        )
        plots.append(plot)
    return f'<div class="figures">{"".join(places)}</div>' if places else ""


# -------------------------------------------------------------------------------- tables


def html_table(table: ReportTable) -> str:
    """Return the table with a button in each heading, by which page.js sorts."""
    columns = [column for column in table.columns if not column.folded]
    heads = "".join(
        f'<th scope="col" aria-sort="none" class="{"number" if column.numeric else "text"}">'
        f'<button type="button">{escape(_unbroken(column.heading))}</button></th>'
        for column in columns
    )
    cells = [[_html_cell(cell, numeric=column.numeric) for cell in column.cells] for column in columns]
    rows = "\n".join(f"<tr>{''.join(row)}</tr>" for row in zip(*cells, strict=True))
    return (
        f'<div class="card"><div class="scroll" tabindex="0" role="region" aria-label="{escape(table.name)}">'
        f'<table data-table="{escape(table.name)}">\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>'
        f'</div><p class="caption">{escape(table.caption)}</p></div>'
    )


def _html_cell(cell: TableCell, *, numeric: bool) -> str:
    # In full precision, for sorting and for programs that parse the page.
    data = "" if cell.value is None else f' data-value="{cell.value!r}"'
    data += "" if cell.error is None else f' data-error="{cell.error!r}"'
    shown = escape(_with_minus(cell.text) if numeric else cell.text)
    text = f"<b>{shown}</b>" if cell.best else shown
    text += f' <span class="interval">{escape(_with_minus(cell.interval))}</span>' if cell.interval else ""
    if cell.method:
        text = f'<span class="method">{_dot(cell.method)}{text}</span>'
    text += f' <span class="under">{escape(cell.under)}</span>' if cell.under else ""
    long = not numeric and any(len(word) > LONG_WORD for word in cell.text.split())
    kind = "number" if numeric else "text long" if long else "text"
    return f'<td class="{kind}"{data}>{text}</td>'


def _with_minus(text: str) -> str:
    """Return a text with minus signs, as wide as digits, in front of numbers; names of settings keep their hyphens."""
    return re.sub(r"(^|[\[( ])-(?=[\d.])", "\\1\N{MINUS SIGN}", text)


def _unbroken(heading: str) -> str:
    """Return a heading with hyphens at which ``(1e-3)`` and ``t-variance`` do not break."""
    return re.sub(r"\b(1e|t)-", "\\1\N{NON-BREAKING HYPHEN}", heading)


def _dot(method: str) -> str:
    """Return a dot in the method's colour."""
    kind = method if method in METHOD_COLORS else "other"
    return f'<svg class="dot m-{kind}" viewBox="0 0 10 10" aria-hidden="true"><circle cx="5" cy="5" r="5"/></svg>'


# -------------------------------------------------------------------------------- data, style and script


def _safe_json(content: Any) -> str:
    """Return JSON that cannot close the element it is in."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _style() -> str:
    def colors(palette: dict[str, str]) -> str:
        return ":root{" + "".join(f"--m-{name}:{color};" for name, color in palette.items()) + "}"

    light = colors({**METHOD_COLORS, "other": OTHER_COLOR})
    dark = f"@media screen and (prefers-color-scheme: dark){{{colors(METHOD_COLORS_ON_DARK)}}}"
    classes = "".join(f".m-{name}{{color:var(--m-{name})}}" for name in (*METHOD_COLORS, "other"))
    return "\n".join([_asset("page.css"), light, dark, classes])


def _policy(style: str, script: str) -> str:
    """Return a content security policy that allows this style and this script only."""
    return f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return (files("tiltsam.lab.report") / "assets" / name).read_text(encoding="utf-8")
