"""The plots drawn by matplotlib."""

import json

import pytest
from matplotlib.colors import to_hex

from helpers.report_runs import flatness, rows, write_run, write_runs
from tiltsam.lab.palette import METHOD_COLORS
from tiltsam.lab.report.figures import draw_figure
from tiltsam.lab.report.plots import flatness_plots, task_plots
from tiltsam.lab.report.runs import read_runs
from tiltsam.lab.report.summary import summarize
from tiltsam.lab.report.tables import comparable_flatness


def test_density_curve_has_gaps(tmp_path, monkeypatch):
    bells = {"grid": [-1.0, 0.0, 1.0, 2.0, 7.0, 8.0], "values": [2.0, 5.0, 1e-12, 1e-80, 0.01, 0.002]}
    write_run(tmp_path, method="erm", flatness=flatness() | {"density": bells})
    (task,) = summarize(*read_runs([tmp_path]))
    (figure,) = [f for f in flatness_plots(comparable_flatness(task)[0], task) if f.name == "density"]
    assert figure.curves[0].x == [-1.0, 0.0, 7.0, 8.0]
    assert figure.curves[0].gaps == [2]
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, *a, **k: drawn.append(self))
    draw_figure(figure, tmp_path / "x")
    (line,) = drawn[0].axes[0].get_lines()
    assert [str(y) for y in line.get_ydata()] == ["2.0", "5.0", "nan", "0.01", "0.002"]


def test_figure_uses_method_colors(tmp_path, monkeypatch):
    (task,) = summarize(*read_runs([write_runs(tmp_path)]))
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, *a, **k: drawn.append(self))
    draw_figure(task_plots(task)[0], tmp_path / "x")
    (ax,) = drawn[0].axes
    methods = ["erm", "sam", "tsam", "tsam"]
    assert [to_hex(line.get_color()) for line in ax.get_lines()] == [METHOD_COLORS[m].lower() for m in methods]
    assert len({line.get_linestyle() for line in ax.get_lines()[2:]}) == 2
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("epoch", "test accuracy (%)")
    samples = next(f for f in task_plots(task) if f.name == "effective-samples")
    draw_figure(samples, tmp_path / "x")
    low, high = drawn[-1].axes[0].get_ylim()
    assert low < 1
    assert high > 3  # the axis includes 1 and s


def test_five_tilts_have_different_dashes(tmp_path, monkeypatch):
    for t in (0.0, 1.0, 5.0, 20.0, 100.0):
        write_run(tmp_path, method="tsam", t=t)
    (task,) = summarize(*read_runs([tmp_path]))
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, *a, **k: drawn.append(self))
    draw_figure(task_plots(task)[0], tmp_path / "x")
    patterns = {str(line._dash_pattern) for line in drawn[0].axes[0].get_lines()}
    assert len(patterns) == 5


@pytest.mark.parametrize("epochs", [2, 3, 4, 6, 15])
def test_epoch_ticks_are_integers(epochs, tmp_path, monkeypatch):
    write_run(tmp_path, method="sam", lines=rows(epochs), epochs=epochs)
    (task,) = summarize(*read_runs([tmp_path]))
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, *a, **k: drawn.append(self))
    draw_figure(task_plots(task)[0], tmp_path / "x")
    (ax,) = drawn[0].axes
    assert all(float(tick).is_integer() for tick in ax.get_xticks())


def test_long_legend_entries_stay_inside(tmp_path, monkeypatch):
    for letter in "abc":
        write_run(tmp_path, method="sam", model="hf:an-organisation/" + 130 * letter, lr=ord(letter) / 1000)
    (task,) = summarize(*read_runs([tmp_path]))
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, *a, **k: drawn.append(self))
    draw_figure(task_plots(task)[0], tmp_path / "x")
    figure = drawn[0]
    figure.canvas.draw()
    box, whole = figure.legends[0].get_window_extent(), figure.bbox
    assert whole.x0 <= box.x0 < box.x1 <= whole.x1
    assert figure.axes[0].bbox.y1 <= box.y0 < box.y1 <= whole.y1  # above the axes


def test_names_are_not_parsed_as_mathematics(tmp_path):
    for name in ("_hidden", r"$\frac{", "a$b$"):
        folder = write_run(tmp_path / "runs", method="erm", model=name)
        config = json.loads((folder / "config.json").read_text()) | {"method": name}
        (folder / "config.json").write_text(json.dumps(config))
    (task,) = summarize(*read_runs([tmp_path]))
    for path in draw_figure(task_plots(task)[0], tmp_path / "x"):
        assert path.stat().st_size > 1000


def test_y_axis_includes_early_peaks(tmp_path, monkeypatch):
    """With noisy labels, the accuracy may be best in the first tenth of training."""
    lines = rows(40, 0.5)
    lines[0] |= {"test_accuracy": 0.1, "train_loss": 9.0}
    lines[1] |= {"test_accuracy": 0.9, "train_loss": 0.001}
    write_run(tmp_path, method="erm", lines=lines, epochs=40)
    (task,) = summarize(*read_runs([tmp_path]))
    convergence, loss = task_plots(task)[:2]
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, *a, **k: drawn.append(self))
    for plot in (convergence, loss):
        draw_figure(plot, tmp_path / "x")
    (low, high), (low_loss, high_loss) = drawn[0].axes[0].get_ylim(), drawn[-1].axes[0].get_ylim()
    assert high > 90
    assert low > 10  # the first epoch is still left out
    assert low_loss < 0.001
    assert high_loss < 9
