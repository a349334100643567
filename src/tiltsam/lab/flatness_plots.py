"""Figures of flatness: neighbourhoods, spectra, slices. Needs matplotlib (``pip install '.[plots]'``).

A model whose name starts with that of a method has the method's colour; line styles distinguish the models of one
method, the first being solid. Other models have the colours of Okabe and Ito, which are safe for colour-blind readers,
and line styles for print.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tiltsam.curvature import Density, Eigenpairs
from tiltsam.lab.flatness import Flatness
from tiltsam.lab.palette import METHOD_COLORS, OKABE_ITO
from tiltsam.lab.report.plots import MIN_RELATIVE_DENSITY
from tiltsam.landscape import Slice1D
from tiltsam.sharpness import Neighborhood

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["STATISTICS", "plot_density", "plot_neighborhood", "plot_slices", "write_figures"]

_DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1)), (0, (6, 2, 1, 2)))


STATISTICS = {
    "mean": "mean loss",
    "variance": "variance of the loss",
    "tilted_mean": "t-weighted mean loss",
    "tilted_variance": "t-weighted variance (t-sharpness)",
}
"""Labels of the statistics of a neighbourhood."""


def plot_neighborhood(ax: Axes, neighborhoods: Mapping[str, Neighborhood], statistic: str) -> None:
    """Plot one of :data:`STATISTICS` against the noise level by model, with a band of two standard errors.

    Its axis is logarithmic, unless a value is not positive (the mean of a loss can be negative).
    """
    ax.set_xscale("log")
    if all(bool((getattr(around, statistic) > 0).all()) for around in neighborhoods.values()):
        ax.set_yscale("log")
    styles = _styles(neighborhoods)
    for name, around in neighborhoods.items():
        order = around.std.argsort()
        y = getattr(around, statistic)[order]
        error = getattr(around, f"{statistic}_error")[order]
        style = styles[name]
        ax.plot(around.std[order].numpy(), y.numpy(), label=name, marker="o", markersize=3.5, **style)
        _band(ax, around.std[order], y, error, style["color"])
    tilts = {around.t for around in neighborhoods.values()}
    suffix = f", t = {tilts.pop():g}" if "tilted" in statistic and len(tilts) == 1 else ""
    ax.set_xlabel("standard deviation of the noise on the weights")
    ax.set_ylabel(STATISTICS[statistic] + suffix)


def plot_density(ax: Axes, densities: Mapping[str, Density], eigenpairs: Mapping[str, Eigenpairs]) -> None:
    """Plot the spectral density of the Hessian by model on a logarithmic scale, with the top eigenvalues as ticks.

    There are bands of two standard errors if there are several probes.
    """
    # One grid and one width for all: differently smoothed curves cannot be compared.
    low = min(float(density.grid[0]) for density in densities.values())
    high = max(float(density.grid[-1]) for density in densities.values())
    width = max(density.width for density in densities.values())
    grid = torch.linspace(low - 5 * width, high + 5 * width, 1024, dtype=torch.float64, device="cpu")
    curves = {name: density.smooth(grid, width) for name, density in densities.items()}
    floor = MIN_RELATIVE_DENSITY * max(float(values.max()) for values, _ in curves.values())
    ax.set_yscale("log")
    styles = _styles(curves)
    row = min(0.035, 0.3 / len(curves))  # height of the ticks of a model, as a fraction of the axis
    for number, (name, (values, error)) in enumerate(curves.items()):
        style = styles[name]
        shown = values.masked_fill(values < floor, math.nan)  # a gap, not a line at the floor
        ax.plot(grid.numpy(), shown.numpy(), label=name, **style)
        _band(ax, grid, shown, error, style["color"])
        if name in eigenpairs:  # one row of ticks per model, just above the axis
            for value in eigenpairs[name].values.tolist():
                bottom = 0.012 + row * number
                ax.axvline(value, bottom, bottom + 0.8 * row, color=style["color"], linewidth=1.5)
    # Leave space for the ticks below the curves.
    ax.set_ylim(bottom=floor * 0.1 ** min(0.3 * len(densities), 2.6))
    ax.set_xlabel("eigenvalue of the Hessian")
    ax.set_ylabel("density")


def plot_slices(ax: Axes, slices: Mapping[str, Slice1D]) -> None:
    """Plot the loss along lines, one curve per model."""
    styles = _styles(slices)
    for name, line in slices.items():
        ax.plot(line.positions.numpy(), line.losses.numpy(), label=name, **styles[name])
    kinds = {line.label for line in slices.values()}
    ax.set_xlabel(f"position along the {kind}" if len(kinds) == 1 and (kind := kinds.pop()) else "position")
    ax.set_ylabel("loss")


def write_figures(flats: Sequence[Flatness], folder: str | Path) -> list[Path]:
    """Write a PNG of each kind of measurement into ``folder``, created if missing; return the paths.

    ``neighborhood.png`` (mean and variance against the noise, plain and t-weighted), ``spectrum.png``, ``slices.png``.
    Models with the same name, such as the runs of several seeds, are numbered.
    """
    from matplotlib.figure import Figure

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    flats = _numbered(flats)
    written: list[Path] = []

    def save(figure: Any, name: str) -> None:
        for ax in figure.axes:
            ax.spines[["top", "right"]].set_visible(False)
        _add_legend(figure)
        written.append(folder / name)
        figure.savefig(written[-1], dpi=150)

    figure = Figure(figsize=(9.5, 7), layout="constrained")
    for ax, statistic in zip(figure.subplots(2, 2).flat, STATISTICS, strict=True):
        plot_neighborhood(ax, {flat.name: flat.neighborhood for flat in flats}, statistic)
    save(figure, "neighborhood.png")

    if densities := {flat.name: flat.density for flat in flats if flat.density is not None}:
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        pairs = {flat.name: flat.eigenpairs for flat in flats if flat.eigenpairs is not None}
        plot_density(figure.subplots(), densities, pairs)
        save(figure, "spectrum.png")

    kinds = list(dict.fromkeys(line.label for flat in flats for line in flat.slices))
    if kinds:
        figure = Figure(figsize=(4.75 * len(kinds), 3.8), layout="constrained")
        for ax, kind in zip(figure.subplots(1, len(kinds), squeeze=False).flat, kinds, strict=True):
            lines = {flat.name: line for flat in flats for line in flat.slices if line.label == kind}
            plot_slices(ax, lines)
        save(figure, "slices.png")
    return written


def _numbered(flats: Sequence[Flatness]) -> list[Flatness]:
    times, seen = Counter(flat.name for flat in flats), Counter[str]()
    numbered = []
    for flat in flats:
        seen[flat.name] += 1
        numbered.append(replace(flat, name=f"{flat.name} ({seen[flat.name]})") if times[flat.name] > 1 else flat)
    return numbered


def _add_legend(figure: Any) -> None:
    """Add one legend below all axes; the figure grows by its height."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    # At 8 points: 0.075 inch per letter, 0.6 for the line sample, 0.17 per row.
    columns = max(1, int(figure.get_figwidth() / (0.6 + 0.075 * max(len(label) for label in labels))))
    figure.set_figheight(figure.get_figheight() + 0.17 * math.ceil(len(labels) / columns))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


def _band(ax: Axes, x: Tensor, y: Tensor, error: Tensor, color: str) -> None:
    """Draw a band of two standard errors; on a logarithmic axis, of the logarithm: ``error / y``."""
    if ax.get_yscale() == "log":
        factor = torch.exp(2 * error / y)
        low, high = y / factor, y * factor
    else:
        low, high = y - 2 * error, y + 2 * error
    ax.fill_between(x.numpy(), low.numpy(), high.numpy(), color=color, alpha=0.2, linewidth=0)


def _styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the style of each model; its dashes depend on its rank among the models of its method."""
    styles: dict[str, dict[str, Any]] = {}
    drawn: Counter[str] = Counter()
    for number, name in enumerate(names):
        first = re.split(r"[\s:,]", name.strip(), maxsplit=1)[0].lower()
        method = first if first in METHOD_COLORS else ""
        color = METHOD_COLORS.get(method, OKABE_ITO[number % len(OKABE_ITO)])
        dash = _DASHES[drawn[method] % len(_DASHES)]
        styles[name] = {"color": color, "linestyle": dash, "linewidth": 1.6}
        drawn[method] += 1
    return styles
