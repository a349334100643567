"""Draw the plots of a report with matplotlib, as PNG and PDF files for a paper."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from tiltsam.lab.palette import METHOD_COLORS, OTHER_COLOR
from tiltsam.lab.report.plots import DASHES, Curve, Plot

__all__ = ["draw_figure"]

WIDTH = 5.2  # inches
MAX_LEGEND_ENTRIES = 12
MAX_LINE_LENGTH = 56  # characters in a legend
LEGEND_ROW = 0.19  # inches


def draw_figure(plot: Plot, path: Path) -> list[Path]:
    """Write ``PATH.png`` and ``PATH.pdf`` with the curves that the page shows initially. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = [curve for curve in plot.curves if curve.visible]
    names = [_wrapped(curve.name) for curve in curves] if len(curves) <= MAX_LEGEND_ENTRIES else []
    columns = max(1, min(4, 62 // (max(map(len, names), default=0) + 6)))
    rows = math.ceil(sum(name.count("\n") + 1 for name in names) / columns)
    height = 3.4 + LEGEND_ROW * rows
    axes_height = height - 0.65 - LEGEND_ROW * rows
    # No pyplot: it has global state. Margins are fixed, because a layout engine doubles the drawing time.
    figure = Figure(figsize=(WIDTH, height))
    FigureCanvasAgg(figure)
    ax = figure.add_axes((0.145, 0.53 / height, 0.83, axes_height / height))
    for curve in curves:
        _draw_curve(ax, curve, plot)
    _set_axes(ax, plot, curves)
    # Fixed label positions, in inches from the axes: measuring the tick labels is slow.
    ax.xaxis.set_label_coords(0.5, -0.27 / axes_height)
    ax.yaxis.set_label_coords(-0.57 / (0.83 * WIDTH), 0.5)
    if names:  # above the axes, where it hides no curve
        figure.legend(loc="upper center", ncols=columns, frameon=False, fontsize=8.5, handlelength=2.6, borderpad=0.2)
    png, pdf = (path.with_name(f"{path.name}.{kind}") for kind in ("png", "pdf"))
    # Without dates, so that the same records give the same files.
    figure.savefig(png, dpi=150, metadata={"Software": None}, pil_kwargs={"compress_level": 1})
    figure.savefig(pdf, metadata={"CreationDate": None})
    return [png, pdf]


def _set_axes(ax: Any, plot: Plot, curves: list[Curve]) -> None:
    """Set scales, ticks, limits and labels. Few ticks: they take most of the drawing time."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    for log, axis, set_scale, values in (
        (plot.log_x, ax.xaxis, ax.set_xscale, [x for c in curves for x in c.x]),
        (plot.log_y, ax.yaxis, ax.set_yscale, [y for c in curves for y in c.y]),
    ):
        if log:
            set_scale("log")
            if values and max(values) <= 100 * min(values):
                axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_locator(NullLocator())
        else:
            integer = axis is ax.xaxis and all(float(x).is_integer() for x in values)  # epochs
            axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=integer))
    if plot.ticks is not None:
        ax.set_xticks(range(len(plot.ticks)), [_literal(name) for name in plot.ticks])
        ax.set_xlim(-0.5, len(plot.ticks) - 0.5)
    if (limits := _y_limits(plot, curves)) is not None:
        ax.set_ylim(*limits)
    ax.set_xlabel(_literal(plot.x_label))
    ax.set_ylabel(_literal(plot.y_label))
    ax.tick_params(labelsize=8.5)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#e3e5e8", linewidth=0.8)
    ax.set_axisbelow(True)


def _draw_curve(ax: Any, curve: Curve, plot: Plot) -> None:
    color = METHOD_COLORS.get(curve.method, OTHER_COLOR), curve.shade  # with its opacity
    pattern = DASHES[curve.dash % len(DASHES)]
    # DASHES are in pixels of a line of width 2; matplotlib's patterns are in line widths.
    style: Any = (0, tuple(x / 2 for x in pattern)) if pattern else "-"
    name = _wrapped(curve.name)
    x, y, error, count = map(np.array, (curve.x, curve.y, curve.error, curve.count))
    if plot.points:
        error = np.nan_to_num(error)
        ax.errorbar(x, y, error, label=name, color=color, linestyle=style, linewidth=1.6, marker="o", markersize=4.5)
        return
    complete = count == count.max()
    if not complete.all():
        ax.plot(x, y, color=color, linewidth=0.7)  # thin, not pale: a pale blue is another method's colour
    solid_x, solid_y = (np.insert(v, list(curve.gaps), math.nan) for v in (x, np.where(complete, y, math.nan)))
    marker = "o" if len(x) == 1 else ""
    ax.plot(solid_x, solid_y, label=name, color=color, linestyle=style, linewidth=1.6, marker=marker)
    low = np.maximum(y - error, y / 1e3) if plot.log_y else y - error
    ax.fill_between(x, low, y + error, color=color, alpha=0.13, linewidth=0)


def _y_limits(plot: Plot, curves: list[Curve]) -> tuple[float, float] | None:
    if plot.highest is None and plot.y_bounds is None:
        return None
    values = list(plot.y_bounds or ())
    for curve in curves:
        y, error = np.array(curve.y), np.nan_to_num(curve.error)
        counts = np.arange(len(y)) >= (0 if plot.highest is None else len(y) // 10)
        counts |= y == (y.max() if plot.highest else y.min())
        values += [*(y - error)[counts], *(y + error)[counts]]
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def _wrapped(name: str) -> str:
    """Return a legend entry, on several lines if it is wider than the figure."""
    return "\n".join(map(_literal, textwrap.wrap(name, MAX_LINE_LENGTH)))


def _literal(text: str) -> str:
    """Return text that matplotlib does not parse as mathematics or hide from the legend."""
    safe = text.replace("$", r"\$")
    return f" {safe}" if safe.startswith("_") else safe
