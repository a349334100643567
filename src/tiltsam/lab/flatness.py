"""All measurements of flatness for several models, and a table of them.

    flats = compare({"ERM": erm, "TSAM": tsam}, loss_fn, batches)
    print(format_table(table_rows(flats)))
    write_figures(flats, "figures")  # from tiltsam.lab.flatness_plots

All models see the same data, the same noise and the same probes, so their differences have smaller errors than their
values.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from tiltsam.curvature import Density, Eigenpairs, Trace, spectral_density, top_eigenvalues, trace
from tiltsam.flatness.loss_surface import Batches, LossFn, ProgressCallback
from tiltsam.landscape import Slice1D, Slice2D, random_direction, slice_1d, slice_2d
from tiltsam.sharpness import Neighborhood, WorstCase, m_sharpness, neighborhood

__all__ = ["PAPER_STDS", "Flatness", "FlatnessPlan", "compare", "format_table", "measure", "table_rows"]

PAPER_STDS = (0.005, 0.0075, 0.01, 0.015, 0.02, 0.035, 0.05, 0.075, 0.1)
"""The noise levels of the paper's Figure 2."""

_LABELS, _COLUMN = 12, 24  # characters of the first column of a table, and the fewest of the others


@dataclass(frozen=True)
class FlatnessPlan:
    """What to measure and with which settings; a count of 0 skips that measurement (except the neighbourhood).

    Attributes:
        std: Noise levels of the neighbourhood.
        num_samples: Draws per noise level (500 in the paper).
        t: Tilt of the t-weighted numbers.
        rho: Radius of worst-case sharpness.
        adaptive_rho: Radius of adaptive worst-case sharpness.
        num_ascent_steps: Ascent steps of both.
        num_eigenvalues: Number of largest eigenvalues of the Hessian.
        num_trace_samples: Probes for its trace.
        num_density_probes: Probes for its spectral density.
        num_density_steps: Lanczos steps per probe.
        num_points: Points of each slice; the plane has the square of it.
        plane: Whether to measure the plane.
        span: Half the length of the slices along random directions, relative to the weights.
        eigen_span: Half the length of the slice along the top eigenvector, a unit vector.
        seed: Seed of everything.
    """

    std: Sequence[float] = PAPER_STDS
    num_samples: int = 50
    t: float = 1.0
    rho: float = 0.05
    adaptive_rho: float = 0.5
    num_ascent_steps: int = 5
    num_eigenvalues: int = 5
    num_trace_samples: int = 30
    num_density_probes: int = 1
    num_density_steps: int = 30
    num_points: int = 21
    plane: bool = False
    span: float = 1.0
    eigen_span: float = 0.5
    seed: int = 0


@dataclass(frozen=True)
class Flatness:
    """All measurements of one model; None for those the plan skips."""

    name: str
    loss: float
    neighborhood: Neighborhood
    worst_case: WorstCase | None = None
    adaptive: WorstCase | None = None
    eigenpairs: Eigenpairs | None = None
    trace: Trace | None = None
    density: Density | None = None
    slices: tuple[Slice1D, ...] = ()
    plane: Slice2D | None = None


def measure(
    name: str,
    model: nn.Module,
    loss_fn: LossFn,
    batches: Batches,
    plan: FlatnessPlan | None = None,
    *,
    size_of: Callable[[Any], float] | None = None,
    progress: Callable[[str], ProgressCallback | None] | None = None,
) -> Flatness:
    """Measure one model.

    Cost: see the functions of :mod:`tiltsam.sharpness`, :mod:`tiltsam.curvature` and :mod:`tiltsam.landscape`.

    Args:
        name: The name of the model.
        model: The model; restored.
        loss_fn: ``loss_fn(model, batch)``, the mean loss of a batch.
        batches: The data set, see :mod:`tiltsam.flatness.loss_surface`.
        plan: What to measure.
        size_of: Weight of a batch; its number of examples by default.
        progress: ``progress("NAME: trace")`` returns the callback for that measurement.

    Example:
        >>> import torch
        >>> from tiltsam.flatness.loss_surface import supervised
        >>> data = [(torch.randn(8, 2), torch.randn(8, 1))]
        >>> flat = measure("line", nn.Linear(2, 1), supervised(nn.functional.mse_loss), data, FlatnessPlan(std=[0.01]))
        >>> flat.eigenpairs.num_products
        3
    """
    plan = FlatnessPlan() if plan is None else plan
    given = (model, loss_fn, batches)

    def options(what: str, **more: Any) -> dict[str, Any]:
        callback = None if progress is None else progress(f"{name}: {what}")
        return {"seed": plan.seed, "size_of": size_of, "progress": callback, **more}

    around = neighborhood(*given, plan.std, plan.num_samples, plan.t, **options("neighbourhood"))
    worst = adaptive = eigenpairs = hessian_trace = density = plane = None
    if steps := plan.num_ascent_steps:
        worst = m_sharpness(*given, **options("worst case", rho=plan.rho, num_steps=steps))
        ratio = options("adaptive worst case", rho=plan.adaptive_rho, num_steps=steps, adaptive=True)
        adaptive = m_sharpness(*given, **ratio)
    if plan.num_eigenvalues:
        eigenpairs = top_eigenvalues(*given, plan.num_eigenvalues, **options("eigenvalues"))
    if plan.num_trace_samples:
        hessian_trace = trace(*given, plan.num_trace_samples, deflate=eigenpairs, **options("trace"))
    if probes := plan.num_density_probes:
        density = spectral_density(*given, probes, plan.num_density_steps, **options("spectral density"))
    slices = []
    if points := plan.num_points:
        span, top = (-plan.span, plan.span), (-plan.eigen_span, plan.eigen_span)
        first, second = (random_direction(model, plan.seed, index) for index in (0, 1))
        line = options("random slice", span=span, num_points=points, label="random direction")
        slices.append(slice_1d(*given, first, **line))
        if eigenpairs is not None:
            line = options("eigenvector slice", span=top, num_points=points, label="top eigenvector")
            slices.append(slice_1d(*given, eigenpairs.direction(0), **line))
        if plan.plane:
            square = options("plane", span_x=span, span_y=span, num_points=points)
            plane = slice_2d(*given, first, second, **square)
    return Flatness(
        name, around.center, around, worst, adaptive, eigenpairs, hessian_trace, density, tuple(slices), plane
    )


def compare(
    models: Mapping[str, nn.Module],
    loss_fn: LossFn,
    batches: Batches,
    plan: FlatnessPlan | None = None,
    *,
    size_of: Callable[[Any], float] | None = None,
    progress: Callable[[str], ProgressCallback | None] | None = None,
) -> list[Flatness]:
    """Measure several models by name on the same data with the same draws, see :func:`measure`."""
    if not models:
        raise ValueError("models must not be empty")
    return [
        measure(name, model, loss_fn, batches, plan, size_of=size_of, progress=progress)
        for name, model in models.items()
    ]


def table_rows(flats: Sequence[Flatness], std: float | None = None) -> list[dict[str, str | float]]:
    """Return one row per model; an estimate ``x`` is followed by its ``x error``.

    Args:
        flats: The result of :func:`compare`.
        std: The noise level of the neighbourhood columns: the nearest measured one is used. 0.01 by default.
    """
    rows: list[dict[str, str | float]] = []
    for flat in flats:
        around = flat.neighborhood
        at = int((around.std.log() - math.log(0.01 if std is None else std)).abs().argmin())
        row: dict[str, str | float] = {"model": flat.name, "loss": flat.loss, "std": float(around.std[at])}
        for column, key in [
            ("mean", "mean"),
            ("variance", "variance"),
            ("t-mean", "tilted_mean"),
            ("t-variance", "tilted_variance"),
        ]:
            row[column] = float(getattr(around, key)[at])
            row[f"{column} error"] = float(getattr(around, f"{key}_error")[at])
        for column, worst in [("worst case", flat.worst_case), ("adaptive", flat.adaptive)]:
            if worst is not None:
                row[column], row[f"{column} error"] = worst.value, worst.error
        if flat.eigenpairs is not None:
            for number, value in enumerate(flat.eigenpairs.values.tolist(), start=1):
                row[f"λ{number}"] = value
                row[f"λ{number} error"] = float(flat.eigenpairs.residuals[number - 1])
        if flat.trace is not None:
            row["trace"], row["trace error"] = flat.trace.value, flat.trace.error
        rows.append(row)
    return rows


def format_table(rows: Sequence[Mapping[str, str | float]], width: int | None = None) -> str:
    """Format the rows as text, one model per column, with their errors.

    Args:
        rows: The result of :func:`table_rows`.
        width: Characters per line: long names are wrapped, and models that do not fit go into further blocks below.
    """
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if not key.endswith(" error")]
    columns = [[_cell(row.get(key, "–"), row.get(f"{key} error", math.nan)) for key in keys] for row in rows]
    if width is None:
        return _side_by_side(keys, columns)
    fit, blocks = max(1, (width - _LABELS) // _COLUMN), []
    for part in (columns[k : k + fit] for k in range(0, len(columns), fit)):
        names = [textwrap.wrap(name, _COLUMN - 2) for name, *_ in part]
        height = max(len(name) for name in names)
        folded = [[*name, *[""] * (height - len(name)), *cells] for name, (_, *cells) in zip(names, part, strict=True)]
        blocks.append(_side_by_side([keys[0], *[""] * (height - 1), *keys[1:]], folded))
    return "\n\n".join(blocks)


def _side_by_side(labels: Sequence[str], columns: Sequence[Sequence[str]]) -> str:
    widths = [max(_COLUMN, 2 + max(len(cell) for cell in column)) for column in columns]
    lines = []
    for label, *cells in zip(labels, *columns, strict=True):
        lines.append(label.ljust(_LABELS) + "".join(cell.rjust(n) for cell, n in zip(cells, widths, strict=True)))
    return "\n".join(lines)


def _cell(value: str | float, error: str | float) -> str:
    """Format ``value ± error``, the value with the digits that are significant given the error."""
    if isinstance(value, str) or isinstance(error, str):
        return str(value)
    if math.isnan(error):
        return f"{value:.4g}"
    if error == 0 or value == 0:
        return f"{value:.4g} ± {error:.1g}"
    digits = math.floor(math.log10(abs(value))) - math.floor(math.log10(error)) + 1
    return f"{value:.{min(max(digits, 1), 6)}g} ± {error:.1g}"
