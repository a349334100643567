"""The page: one HTML file with its style, its script and its numbers inside, which asks the network for nothing.

The figures are drawn by our own script (assets/plot.js) rather than a plotting library: an embedded library weighs
megabytes, which every report would carry and every reader's browser would have to start before the first curve.

Nothing from a record becomes markup. Texts are escaped here and set as text there; numbers travel as JSON in which
``<``, ``>`` and ``&`` are written as escapes, so that no string can end its element; and a content security policy lets
the browser run this page's own script and no other, whatever else might get in.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import tiltsam
from tiltsam.lab.palette import METHOD_COLORS, METHOD_COLORS_ON_DARK, OTHER_COLOR
from tiltsam.lab.report.figures import Figure, Series
from tiltsam.lab.report.runs import Problem
from tiltsam.lab.report.settings import Setting, Task, shown
from tiltsam.lab.report.tables import Table
from tiltsam.lab.report.writing import html_table, method_class
from tiltsam.lab.stats import best_of

__all__ = ["DASHES", "Chapter", "files_of", "render"]

DASHES: tuple[tuple[float, ...], ...] = ((), (7, 4), (2, 4), (9, 4, 2, 4), (15, 5), (9, 4, 2, 4, 2, 4))
"""Line styles, in pixels on and off; the first is a whole line."""

READING = (
    "Curves are means over seeds, with a band of one standard error; thinner where a seed is missing. Click a name to "
    "hide or show its curve; point at a curve, or use the arrow keys on a figure, to read its values."
)
FILES = '<script type="application/json" id="report-files">'
DIGITS = 7  # of a number behind a curve: more than float32 holds


@dataclass(frozen=True)
class Chapter:
    """What the page says about one task."""

    task: Task
    results: Table
    runs: Table
    figures: list[Figure]
    flatness: Table | None
    flatness_figures: list[Figure]
    problems: list[Problem]


def render(
    chapters: Sequence[Chapter],
    overview: Table | None,
    problems: Sequence[Problem],
    written: datetime,
    beside: Sequence[str] = (),
) -> str:
    """The whole page.

    Args:
        chapters: One per task.
        overview: Methods against tasks, where there are several.
        problems: What is wrong and belongs to no task.
        written: The time to put on it.
        beside: The files that are written with it, for :func:`files_of`.
    """
    figures: list[Figure] = []
    titled = len(chapters) > 1
    body = "\n".join(_chapter(chapter, number, figures, titled=titled) for number, chapter in enumerate(chapters))
    names = [chapter.task.name for chapter in chapters]
    title = names[0] if len(names) == 1 else f"{len(names)} tasks"
    num_runs = sum(len(chapter.task.runs) for chapter in chapters)
    num_settings = sum(len(chapter.task.settings) for chapter in chapters)
    meta = [_count(num_runs, "run"), _count(num_settings, "setting"), f"{written:%d %B %Y, %H:%M}"]
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
<noscript><p>The figures are drawn by this page's script, which does not run here: look for them beside the page, in
the folder figures.</p></noscript>
{_missing(problems)}
{front}
{body}
</main>
<footer>
<p>Written by tiltsam {escape(tiltsam.__version__)}. Everything on this page is in this file.</p>
</footer>
{FILES}{_inside(list(beside))}</script>
<script type="application/json" id="report-data">{_data(figures)}</script>
<script>{script}</script>
</body>
</html>
"""


def files_of(page: Path) -> set[str]:
    """Which files were written with a page that is there, as ``tables/results.md``; none if it tells none."""
    try:
        _, found, rest = page.read_text(encoding="utf-8", errors="replace").partition(FILES)
        return {str(name) for name in json.loads(rest.partition("<")[0])} if found else set()
    except (OSError, ValueError, TypeError):  # no page, or none of ours
        return set()


# -------------------------------------------------------------------------------- a task


def _chapter(chapter: Chapter, number: int, figures: list[Figure], *, titled: bool) -> str:
    task = chapter.task
    settings = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(shown(v))}</dd></div>" for k, v in task.shared.items())
    parts = [
        f'<section id="task-{number}">',
        f"<h2>{escape(task.name)}</h2>" if titled else "",
        f'<p class="lead">{escape(headline(task))}</p>',
        _missing(chapter.problems),
        html_table(chapter.results),
        f"<details><summary>Settings shared by all that have them</summary><dl>{settings}</dl></details>"
        if settings
        else "",
        f'<p class="note">{READING}</p>' if chapter.figures else "",
        _grid(chapter.figures, figures),
        "<h3>Flatness</h3>",
    ]
    if chapter.flatness is not None:
        parts += [html_table(chapter.flatness), _grid(chapter.flatness_figures, figures)]
    else:
        parts.append('<p class="note">Not measured yet: <code>tiltsam sharpness</code> on these runs adds it.</p>')
    parts += [f"<details><summary>Every run</summary>{html_table(chapter.runs)}</details>", "</section>"]
    return "\n".join(part for part in parts if part)


def headline(task: Task) -> str:
    """What came out, in a sentence or two; no more than the numbers bear."""
    entries = [(s, s.final("score", 100)) for s in task.chosen]
    entries = sorted(((s, m) for s, m in entries if math.isfinite(m.value)), key=lambda e: -e[1].value)
    if not entries and all(run.diverged for run in task.runs):
        return "All runs diverged: there is no number to compare."
    if not entries:
        return "No run has finished yet: the curves show how far they are."
    (first, mean), *rest = entries
    name, *others = (f"{setting.method} {setting.told}".strip() for setting, _ in entries)
    score = f"test {task.metric} of {mean.value:.2f}" + ("" if math.isnan(mean.error) else f" ± {mean.error:.2f}")
    unit = " %" if task.unit == "%" else " (×100)"
    if not rest:
        which = "best on validation" if task.validated(first) else "first, as none has a validation score"
        among = f"Of {len(task.settings)} settings, the {which}, " if len(task.settings) > 1 else ""
        return f"{among}{name}{',' if among else ''} reaches a {score}{unit}."
    next_mean = rest[0][1]
    lead = f"{mean.value - next_mean.value:.2f}"
    margin = f"{lead} ahead of {others[0]}"
    if lead == "0.00":
        verdict = f"level with {others[0]}."
    elif best_of([mean, next_mean]) == 0:
        verdict = f"{margin}, more than the standard error of the difference."
    elif math.isnan(mean.error) or math.isnan(next_mean.error):
        verdict = f"{margin}; with one run of either, that says little."
    else:
        verdict = f"{margin}, which is within the error."
    among = f"Of {task.pick}, " if len(task.settings) > len(task.chosen) else ""
    return f"{among}{name} has the highest {score}{unit}, {verdict}{_uneven(task, [s for s, _ in entries])}"


def _uneven(task: Task, compared: Sequence[Setting]) -> str:
    """A sentence, if some methods had more settings than others to choose the compared one from: it is an advantage."""
    tried = {method: number for method, number in task.tried.items() if method in {s.method for s in compared}}
    if len(set(tried.values())) < 2:
        return ""
    told = ", ".join(f"{method} {number}" for method, number in tried.items())
    return f" Not all had as many settings to choose from: {told}."


def _missing(problems: Sequence[Problem]) -> str:
    if not problems:
        return ""
    items = "".join(f"<li>{escape(str(problem))}</li>" for problem in problems)
    count = _count(len(problems), "thing")
    opened = " open" if len(problems) <= 6 else ""
    return f'<details class="missing"{opened}><summary>{count} missing or damaged</summary><ul>{items}</ul></details>'


def _grid(chosen: Sequence[Figure], figures: list[Figure]) -> str:
    """Places for figures; their numbers go into ``figures``."""
    places = []
    for figure in chosen:
        places.append(
            f'<figure data-figure="{len(figures)}" data-name="{escape(figure.name)}">'
            f'<figcaption>{escape(figure.title)}</figcaption><div class="plot"></div><div class="legend"></div>'
            + (f'<p class="note">{escape(figure.note)}</p></figure>' if figure.note else "</figure>")
        )
        figures.append(figure)
    return f'<div class="figures">{"".join(places)}</div>' if places else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# -------------------------------------------------------------------------------- what is inside


def _data(figures: Sequence[Figure]) -> str:
    """The figures as JSON that is safe inside a script element. Curves share columns, epochs above all."""
    columns: dict[tuple[float | None, ...], int] = {}

    def column(values: Sequence[float]) -> int:
        rounded = tuple(float(f"{v:.{DIGITS}g}") if math.isfinite(v) else None for v in values)
        return columns.setdefault(rounded, len(columns))

    def series(s: Series) -> dict[str, Any]:
        look = {"name": s.name, "method": method_class(s.method), "dash": s.dash, "shade": s.shade, "shown": s.shown}
        look["gaps"] = list(s.gaps)
        return look | {name: column(getattr(s, name)) for name in ("x", "y", "error", "count")}

    def figure(f: Figure) -> dict[str, Any]:
        words = ("title", "x_label", "y_label", "log_x", "log_y", "ticks", "y_bounds", "points", "from_tenth")
        return {name: getattr(f, name) for name in words} | {"series": [series(s) for s in f.series]}

    body = [figure(f) for f in figures]
    dashes = [" ".join(f"{x:g}" for x in dash) for dash in DASHES]
    return _inside({"figures": body, "columns": list(columns), "dashes": dashes})


def _inside(content: Any) -> str:
    """JSON that cannot end the element it is in."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _style() -> str:
    def colors(palette: dict[str, str]) -> str:
        return ":root{" + "".join(f"--m-{name}:{color};" for name, color in palette.items()) + "}"

    light = colors({**METHOD_COLORS, "other": OTHER_COLOR})
    dark = f"@media (prefers-color-scheme: dark){{{colors(METHOD_COLORS_ON_DARK)}}}"
    classes = "".join(f".m-{name}{{color:var(--m-{name})}}" for name in (*METHOD_COLORS, "other"))
    return "\n".join([_asset("page.css"), light, dark, classes])


def _policy(style: str, script: str) -> str:
    """Nothing from anywhere, but this style and this script."""
    return f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return (files("tiltsam.lab.report") / "assets" / name).read_text(encoding="utf-8")
