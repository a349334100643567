"""Figures of flatness."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.measuring import convnet, cross_entropy, unequal_batches
from tiltsam.lab.flatness import FlatnessPlan, measure
from tiltsam.landscape import Slice1D
from tiltsam.sharpness import neighborhood

QUICK = FlatnessPlan(std=(0.01, 0.1), num_samples=4, num_trace_samples=3, num_density_probes=2, num_points=5)


def test_write_figures_writes_all(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from tiltsam.lab.flatness_plots import plot_neighborhood, write_figures
    from tiltsam.lab.palette import OKABE_ITO

    flats = [measure(name, convnet(), cross_entropy, unequal_batches(), QUICK) for name in ("a", "b/c")]
    written = write_figures(flats, tmp_path / "new")
    names = {"neighborhood.png", "spectrum.png", "slices.png"}
    assert {path.name for path in written} == names
    assert all(path.stat().st_size > 1000 for path in written)
    assert not {path.name for path in (tmp_path / "new").iterdir()} - names

    ax = Figure().subplots()
    plot_neighborhood(ax, {flat.name: flat.neighborhood for flat in flats}, "tilted_variance")
    assert [line.get_color() for line in ax.get_lines()] == list(OKABE_ITO[:2])
    assert ax.get_legend_handles_labels()[1] == ["a", "b/c"]
    assert "t = 1" in ax.get_ylabel()


def test_plot_neighborhood_of_negative_loss_is_linear() -> None:
    """A logarithmic axis has no room for the mean of a log-likelihood of densities; one for the variance stays."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from tiltsam.lab.flatness_plots import plot_neighborhood

    around = neighborhood(convnet(), lambda m, b: cross_entropy(m, b) - 5, unequal_batches(), [0.05, 0.1], 4)
    ax, other = Figure().subplots(1, 2)
    plot_neighborhood(ax, {"a": around}, "mean")
    low, high = ax.get_ylim()
    assert ax.get_yscale() == "linear"
    assert low < float(around.mean.min())
    assert float(around.mean.max()) < high
    (band,) = ax.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert heights.min() == pytest.approx(float((around.mean - 2 * around.mean_error).min()))
    plot_neighborhood(other, {"a": around}, "variance")
    assert other.get_yscale() == "log"


def test_write_figures_of_many_models_keeps_axes_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from tiltsam.lab.flatness_plots import write_figures

    saved: dict[str, Figure] = {}
    save = Figure.savefig

    def keep(self: Figure, path: Path, **options: Any) -> None:
        saved[path.stem] = self
        save(self, path, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    flat = measure("", convnet(), cross_entropy, unequal_batches(), QUICK)
    names = [f"tsam epochs=6 lr=0.05 rho={rho} t=20 num_samples=1 seed 0" for rho in range(30)]
    names += ["erm", "erm"]  # two runs with one name
    write_figures([dataclasses.replace(flat, name=name) for name in names], tmp_path)
    names[-2:] = ["erm (1)", "erm (2)"]
    assert set(saved) == {"neighborhood", "spectrum", "slices"}
    for figure in saved.values():
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == names
        within = legend.get_window_extent()
        assert 0 <= within.x0 < within.x1 <= figure.bbox.x1
        for ax in figure.axes:
            box = ax.get_window_extent()
            assert ax.get_legend() is None
            assert not box.overlaps(within)
            assert box.height / figure.dpi > 2  # inches
    ticks = [line.get_ydata()[1] for line in saved["spectrum"].axes[0].lines if len(line.get_xdata()) == 2]
    assert 0 < max(ticks) < 0.35


def test_first_model_of_each_method_has_its_color_and_a_solid_line() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from tiltsam.lab.flatness_plots import plot_slices
    from tiltsam.lab.palette import METHOD_COLORS, OKABE_ITO

    line = Slice1D(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))
    names = ["erm seed 0", "erm:lr=0.1 seed 0", "SAM, s=1", "sam:rho=0.5,lr=0.1", "mine", "yours"]
    ax = Figure().subplots()
    plot_slices(ax, dict.fromkeys(names, line))
    drawn = ax.get_lines()
    styles = [x._unscaled_dash_pattern for x in drawn]
    assert styles[0] == styles[2]
    assert styles[1] == styles[3] != styles[0]
    assert styles[4] != styles[5]
    erm, sam = METHOD_COLORS["erm"], METHOD_COLORS["sam"]
    assert [x.get_color() for x in drawn] == [erm, erm, sam, sam, *OKABE_ITO[4:6]]
