"""Slices against the closed form of a bowl, directions against their definition; the table; every figure drawn."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from measuring import Bowl, call, convnet, cross_entropy, mse, unequal_batches
from tiltsam.curvature import top_eigenvalues
from tiltsam.flatness.comparison import Plan, compare, format_table, table_rows
from tiltsam.landscape import Slice1D, between, random_direction, slice_1d, slice_2d
from tiltsam.sharpness import neighborhood

ONE = [torch.ones(1)]
QUICK = Plan(std=(0.01, 0.1), num_samples=4, num_trace_samples=3, num_density_probes=2, num_points=5, plane=True)


def test_slices_of_a_bowl_are_parabolas() -> None:
    bowl = Bowl([2.0, 1.0], [0.0, 0.0])
    x = {"theta": torch.tensor([1.0, 0.0], dtype=torch.float64)}
    y = {"theta": torch.tensor([0.0, 1.0], dtype=torch.float64)}
    line = slice_1d(bowl, call, ONE, x, span=(-2, 2), num_points=9)
    torch.testing.assert_close(line.losses, line.positions.square())
    plane = slice_2d(bowl, call, ONE, x, y, span_x=(-1, 1), span_y=(-2, 2), num_points=5)
    torch.testing.assert_close(plane.losses, plane.x.square() + 0.5 * plane.y[:, None].square())


def test_the_second_difference_along_an_eigenvector_is_its_eigenvalue() -> None:
    model, data = convnet(), unequal_batches()
    found = top_eigenvalues(model, cross_entropy, data, k=1, tol=1e-6)
    line = slice_1d(model, cross_entropy, data, found.direction(0), span=(-1e-3, 1e-3), num_points=3)
    assert line.positions[1] == 0.0
    bend = (line.losses[0] - 2 * line.losses[1] + line.losses[2]) / 1e-6
    assert float(bend) == pytest.approx(float(found.values[0]), rel=1e-4)


def test_random_directions_have_the_filter_norms_of_the_model() -> None:
    model = convnet()
    direction = random_direction(model, seed=1)
    for name, param in model.named_parameters():
        if param.dim() < 2:
            assert not direction[name].any()
        else:
            torch.testing.assert_close(direction[name].flatten(1).norm(dim=1), param.detach().flatten(1).norm(dim=1))
    again, other = random_direction(model, seed=1), random_direction(model, seed=1, index=1)
    assert torch.equal(direction["0.weight"], again["0.weight"])
    assert not torch.equal(direction["0.weight"], other["0.weight"])
    whole = random_direction(model, normalize="layer")["0.weight"]
    torch.testing.assert_close(whole.norm(), model[0].weight.detach().norm())
    assert random_direction(model, normalize="none")["1.bias"].any()
    with pytest.raises(ValueError, match="normalize"):
        random_direction(model, normalize="row")  # type: ignore[arg-type]


def test_a_direction_that_leads_nowhere_warns() -> None:
    """Where biases alone are trained, none of the parameters has filters, and every slice would be flat."""
    model = nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    for normalize in ("filter", "layer"):
        with pytest.warns(UserWarning, match=r"zero.* normalize='none'"):
            assert not random_direction(model, normalize=normalize)["bias"].any()
    assert random_direction(model, normalize="none")["bias"].all()


def test_filter_normalisation_undoes_a_change_of_scale() -> None:
    """A ReLU network scaled up in one layer and down in the next is the same function, and has the same slice."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 1, bias=False)).double()
    data = [(torch.randn(8, 3).double(), torch.randn(8, 1).double())]
    losses = []
    for factor in (1.0, 10.0):
        with torch.no_grad():
            model[0].weight.mul_(factor)
            model[2].weight.div_(factor)
        losses.append(slice_1d(model, mse, data, random_direction(model), num_points=5).losses)
    torch.testing.assert_close(*losses)


def test_between_meets_both_ends_exactly() -> None:
    start, end, data = convnet().eval(), convnet().eval(), unequal_batches()
    with torch.no_grad():
        for p in end.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
        end[1].running_mean.add_(1.0)
    for model, ends in [(start, (start, end)), (convnet(), (start.state_dict(), end.state_dict()))]:
        line = between(model, cross_entropy, data, *ends, num_points=5)
        at_start = between(start, cross_entropy, data, start, start, num_points=2).losses[0]
        at_end = between(end, cross_entropy, data, end, end, num_points=2).losses[1]
        assert line.losses[0] == at_start
        assert line.losses[-1] == at_end
        assert line.losses[0] != line.losses[-1]
    with pytest.raises(ValueError, match="names and shapes"):
        between(start, cross_entropy, data, start, nn.Linear(2, 2))


class Noted(nn.Linear):
    """A layer that keeps more than tensors in its state dict."""

    def __init__(self, note: object) -> None:
        super().__init__(2, 1)
        self.note = note

    def get_extra_state(self) -> object:
        return self.note

    def set_extra_state(self, state: object) -> None:
        self.note = state


@pytest.mark.parametrize("note", ["a note", torch.ones(2)], ids=["text", "tensor"])
def test_between_leaves_extra_state_alone(note: object) -> None:
    ends, data = (Noted(note), Noted(torch.zeros(3))), [(torch.randn(4, 2), torch.randn(4, 1))]
    line = between(ends[0], mse, data, *ends, num_points=3)
    with torch.no_grad():
        expected = [float(mse(end, data[0])) for end in ends]
    assert line.losses[[0, -1]].tolist() == pytest.approx(expected, rel=1e-6)
    assert ends[0].note is note


@pytest.mark.parametrize(
    "end",
    [{"model": nn.Linear(2, 1).state_dict()}, {**nn.Linear(2, 1).state_dict(), "epoch": 3}, nn.Linear(3, 1), {}],
    ids=["checkpoint", "more", "shape", "empty"],
)
def test_ends_that_do_not_fit(end: Any) -> None:
    model, data = nn.Linear(2, 1), [(torch.randn(4, 2), torch.randn(4, 1))]
    for ends in ((model, end), (end, model)):
        with pytest.raises(ValueError, match="names and shapes"):
            between(model, mse, data, *ends)


def test_between_moves_frozen_parameters_and_puts_them_back() -> None:
    model = convnet()
    model[0].weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other = {name: tensor * 0 if tensor.is_floating_point() else tensor for name, tensor in before.items()}
    other["1.running_var"] = torch.ones(3, dtype=torch.float64)
    line = between(model, cross_entropy, unequal_batches(), model, other, num_points=2)
    assert float(line.losses[-1]) == pytest.approx(math.log(3), rel=1e-9)  # all weights zero: a fair guess
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("options", [{"span": (1.0, -1.0)}, {"num_points": 1}, {"span": (0.0, math.inf)}], ids=str)
def test_bad_spans(options: dict[str, Any]) -> None:
    model = convnet()
    with pytest.raises(ValueError, match="span"):
        slice_1d(model, cross_entropy, unequal_batches(), random_direction(model), **options)


def test_a_direction_that_does_not_fit() -> None:
    for direction in ({"nothing": torch.ones(1)}, {"0.weight": torch.ones(2)}):
        with pytest.raises(ValueError, match="does not fit"):
            slice_1d(convnet(), cross_entropy, unequal_batches(), direction)


def test_table_of_two_models() -> None:
    flats = compare({"a": convnet(), "b": convnet()}, cross_entropy, unequal_batches(), QUICK)
    first, second = table_rows(flats, std=0.1)
    assert first["std"] == 0.1
    assert {k: v for k, v in first.items() if k != "model"} == {k: v for k, v in second.items() if k != "model"}
    assert first["λ1"] == float(flats[0].eigenpairs.values[0])  # type: ignore[union-attr]
    assert {"loss", "mean", "variance", "t-variance", "worst case", "adaptive", "trace", "trace error"} <= first.keys()
    text = format_table([first, second])
    assert text.splitlines()[0].split() == ["model", "a", "b"]
    assert "±" in text
    few = compare({"a": convnet()}, cross_entropy, unequal_batches(), Plan((0.1,), 2, 1.0, 0.05, 0.5, 0, 0, 0, 0, 1, 0))
    assert "λ1" not in table_rows(few)[0]
    with pytest.raises(ValueError, match="models is empty"):
        compare({}, cross_entropy, unequal_batches())


def test_every_figure_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from tiltsam.flatness.figures import plot_neighborhood, plot_slices, write_figures
    from tiltsam.lab.palette import OKABE_ITO

    flats = compare({"a": convnet(), "b/c": convnet()}, cross_entropy, unequal_batches(), QUICK)
    written = write_figures(flats, tmp_path / "new", dpi=40)
    names = {"neighborhood.png", "spectrum.png", "slices.png", "plane-a.png", "plane-b-c.png"}
    assert {path.name for path in written} == names
    assert all(path.stat().st_size > 1000 for path in written)
    assert not {path.name for path in (tmp_path / "new").iterdir()} - names

    around = {flat.name: flat.neighborhood for flat in flats}
    ax = plot_neighborhood(around, "tilted_variance")
    assert [line.get_color() for line in ax.get_lines()] == list(OKABE_ITO[:2])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b/c"]
    assert "t = 1" in ax.get_ylabel()
    with pytest.raises(ValueError, match="statistic"):
        plot_neighborhood(around, "median")
    ax = plot_slices({"x": Slice1D(torch.arange(3.0), torch.ones(3))}, logarithmic=True)
    assert ax.get_yscale() == "log"


def test_losses_below_zero_are_drawn() -> None:
    """A logarithmic axis has no room for the mean of a log-likelihood of densities; one for the variance stays."""
    pytest.importorskip("matplotlib")
    from tiltsam.flatness.figures import plot_neighborhood

    around = neighborhood(convnet(), lambda m, b: cross_entropy(m, b) - 5, unequal_batches(), [0.05, 0.1], 4)
    ax = plot_neighborhood({"a": around}, "mean")
    low, high = ax.get_ylim()
    assert ax.get_yscale() == "linear"
    assert low < float(around.mean.min())
    assert float(around.mean.max()) < high
    (band,) = ax.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert heights.min() == pytest.approx(float((around.mean - 2 * around.mean_error).min()))
    assert plot_neighborhood({"a": around}, "variance").get_yscale() == "log"


def test_long_names_stand_apart_in_a_table():
    names = ["tsam num_samples=5 rho=0.05 seed 0", "tsam num_samples=5 rho=0.05 seed 1"]
    text = format_table([{"model": name, "loss": 1.0} for name in names])
    assert "  ".join(names) in text
    assert len({len(line) for line in text.splitlines()}) == 1


def test_many_models_fit_the_width_of_a_table():
    names = [f"tsam lr=0.05 num_samples=5 rho=0.05 seed {seed}" for seed in range(7)]
    text = format_table([{"model": name, "loss": 1.0, "mean": 2.0, "mean error": 0.1} for name in names], width=90)
    assert max(len(line) for line in text.splitlines()) <= 90
    first, second, third = text.split("\n\n")  # three models fit beside each other
    lines = [line.split() for line in first.splitlines()]
    assert lines[0] == ["model", *["tsam", "lr=0.05"] * 3]
    assert " ".join(lines[2]) == "seed 0 seed 1 seed 2"
    assert lines[-1] == ["mean", *["2", "±", "0.1"] * 3]
    assert second.count("±") == 3
    assert third.count("±") == 1
    assert len(format_table([{"model": "a", "loss": 1.0}], width=1).splitlines()) == 2


def test_figures_of_many_models_keep_their_axes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from tiltsam.flatness.figures import write_figures

    saved: dict[str, Figure] = {}
    save = Figure.savefig

    def keep(self: Figure, path: Path, **options: Any) -> None:
        saved[path.stem] = self
        save(self, path, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    (flat,) = compare({"": convnet()}, cross_entropy, unequal_batches(), QUICK)
    names = [f"tsam epochs=6 lr=0.05 rho={rho} t=20 num_samples=1 seed 0" for rho in range(30)]
    write_figures([dataclasses.replace(flat, name=name, plane=None) for name in names], tmp_path, dpi=40)
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
