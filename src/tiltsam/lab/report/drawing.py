"""The figures of a report for a paper: PNG and PDF, by matplotlib (``pip install '.[plots]'``)."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

from tiltsam.lab.palette import method_color
from tiltsam.lab.report.figures import Figure, Series
from tiltsam.lab.report.page import DASHES

__all__ = ["draw"]

MOST_NAMES = 12  # in a legend
LONGEST_LINE = 56  # letters in a legend
ROW = 0.19  # inches a row of the legend takes


def draw(figure: Figure, path: Path, *, dpi: int = 150) -> list[Path]:
    """Write ``PATH.png`` and ``PATH.pdf``: what the page shows when it opens."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    shown = [series for series in figure.series if series.shown]
    # A canvas of its own, not pyplot's: nothing global is touched and no window system is needed. The room for labels
    # is set by hand, since working it out costs as much time again as drawing.
    named = [_label(series.name) for series in shown] if len(shown) <= MOST_NAMES else []
    columns = max(1, min(4, 62 // (max(map(len, named), default=0) + 6)))
    lines = sum(name.count("\n") + 1 for name in named)  # as many as names, where there are several columns
    rows = math.ceil(lines / columns)
    height = 3.4 + ROW * rows
    canvas = Canvas(figsize=(5.2, height))
    FigureCanvasAgg(canvas)
    ax = canvas.add_axes((0.145, 0.53 / height, 0.83, (height - 0.65 - ROW * rows) / height))
    for series in shown:
        _draw(ax, series, figure)
    # Few ticks: calmer, and ticks are most of what drawing costs.
    for log, side, scale, values in (
        (figure.log_x, ax.xaxis, ax.set_xscale, [x for s in shown for x in s.x]),
        (figure.log_y, ax.yaxis, ax.set_yscale, [y for s in shown for y in s.y]),
    ):
        if log:
            scale("log")
            if values and max(values) <= 100 * min(values):
                side.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            side.set_major_formatter("{x:g}")
            side.set_minor_locator(NullLocator())
        else:
            counts = side is ax.xaxis and all(float(x).is_integer() for x in values)  # epochs, mostly
            side.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=counts))
    if figure.ticks is not None:
        ax.set_xticks(range(len(figure.ticks)), [_plain(name) for name in figure.ticks])
        ax.set_xlim(-0.5, len(figure.ticks) - 0.5)
    if (limits := _limits(figure, shown)) is not None:
        ax.set_ylim(*limits)
    ax.set_xlabel(_plain(figure.x_label))
    ax.set_ylabel(_plain(figure.y_label))
    # At the same place in every figure, which spares measuring the ticks: so many inches off the axes.
    ax.xaxis.set_label_coords(0.5, -0.27 / (height - 0.65 - ROW * rows))
    ax.yaxis.set_label_coords(-0.57 / (0.83 * 5.2), 0.5)
    ax.tick_params(labelsize=8.5)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#e3e5e8", linewidth=0.8)
    ax.set_axisbelow(True)
    if named:  # above the axes, where no curve can be
        canvas.legend(loc="upper center", ncols=columns, frameon=False, fontsize=8.5, handlelength=2.6, borderpad=0.2)
    written = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "pdf")]
    for file in written:
        # No dates inside: the same records give the same files.
        if file.suffix == ".pdf":
            canvas.savefig(file, metadata={"CreationDate": None})
        else:
            canvas.savefig(file, dpi=dpi, metadata={"Software": None}, pil_kwargs={"compress_level": 1})
    return written


def _draw(ax: Any, series: Series, figure: Figure) -> None:
    color = _shaded(method_color(series.method), series.shade)
    pattern = DASHES[series.dash % len(DASHES)]
    # The page's dashes are in pixels of a line two wide; matplotlib's are in widths of the line.
    style: Any = (0, tuple(x / 2 for x in pattern)) if pattern else "-"
    name = _label(series.name)
    x, y, most = series.x, series.y, max(series.count, default=0)
    if figure.points:
        error = [0.0 if math.isnan(e) else e for e in series.error]
        ax.errorbar(x, y, error, label=name, color=color, linestyle=style, linewidth=1.6, marker="o", markersize=4.5)
        return
    whole = [b if n == most else math.nan for b, n in zip(y, series.count, strict=True)]
    if min(series.count) < most:
        ax.plot(x, y, color=color, linewidth=0.7)  # thinner, not paler: a pale blue would be another method's
    broken = list(x)
    for k in reversed(series.gaps):
        broken.insert(k, math.nan)
        whole.insert(k, math.nan)
    ax.plot(broken, whole, label=name, color=color, linestyle=style, linewidth=1.6, marker="o" if len(x) == 1 else "")
    low = [b - e for b, e in zip(y, series.error, strict=True)]
    if figure.log_y:
        low = [max(a, b / 1e3) for a, b in zip(low, y, strict=True)]
    high = [b + e for b, e in zip(y, series.error, strict=True)]
    ax.fill_between(x, low, high, color=color, alpha=0.13, linewidth=0)


def _limits(figure: Figure, shown: list[Series]) -> tuple[float, float] | None:
    if not figure.from_tenth and figure.y_bounds is None:
        return None
    values = list(figure.y_bounds or ())
    values += [
        b + side * (0.0 if math.isnan(e) else e)
        for s in shown
        for b, e in list(zip(s.y, s.error, strict=True))[len(s.y) // 10 if figure.from_tenth else 0 :]
        for side in (-1, 1)
    ]
    low, high = min(values, default=0.0), max(values, default=1.0)
    air = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - air, high + air


def _shaded(color: str, shade: float) -> str:
    """The colour, mixed with white."""
    parts = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - shade * (255 - part)):02x}" for part in parts)


def _label(name: str) -> str:
    """A name as the legend has it, on several lines where it is longer than the figure is wide."""
    return "\n".join(map(_plain, textwrap.wrap(name, LONGEST_LINE)))


def _plain(text: str) -> str:
    """Text in which matplotlib finds no mathematics, and nothing that hides a name from a legend."""
    safe = text.replace("$", r"\$")
    return f" {safe}" if safe.startswith("_") else safe
