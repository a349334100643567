"""The curves of the plots."""

import json
import math
import statistics

import pytest

from helpers.report_runs import flatness, rows, write_run, write_runs
from tiltsam.lab.report import write_report
from tiltsam.lab.report.figures import draw_figure
from tiltsam.lab.report.plots import flatness_plots, task_plots
from tiltsam.lab.report.runs import read_runs
from tiltsam.lab.report.summary import summarize
from tiltsam.lab.report.tables import (
    comparable_flatness,
)


def test_task_plots_equal_records(tmp_path):
    (task,) = summarize(*read_runs([write_runs(tmp_path)]))
    figures = {figure.name: figure for figure in task_plots(task)}
    names = ["convergence", "train-loss", "passes", "seconds", "effective-samples", "tilt", "tilt-curves"]
    assert list(figures) == names
    tsam = task.settings[3]
    for figure, x, y, scale in (
        ("convergence", "epoch", "test_accuracy", 100),
        ("train-loss", "epoch", "train_loss", 1),
        ("passes", "passes", "test_accuracy", 100),
        ("seconds", "seconds", "test_accuracy", 100),
    ):
        series = figures[figure].curves[3]
        assert series.name == "tsam:t=20"
        records = [[json.loads(x) for x in (r.folder / "metrics.jsonl").read_text().splitlines()] for r in tsam.runs]
        assert series.x == pytest.approx([statistics.fmean(r[k][x] for r in records) for k in range(6)])
        assert series.y == pytest.approx([statistics.fmean(scale * r[k][y] for r in records) for k in range(6)])
        errors = [statistics.stdev(scale * r[k][y] for r in records) / math.sqrt(3) for k in range(6)]
        assert series.error == pytest.approx(errors)
    assert [s.name for s in figures["effective-samples"].curves] == ["tsam:t=1", "tsam:t=20"]
    (tilt,) = figures["tilt"].curves
    assert (figures["tilt"].ticks, tilt.x) == (["1", "20"], [0.0, 1.0])
    assert tilt.y == pytest.approx([setting.final("score", 100).value for setting in task.settings[2:]])
    assert [s.name for s in figures["tilt-curves"].curves] == ["t = 1", "t = 20"]
    assert min(s.shade for s in figures["tilt-curves"].curves) >= 0.5  # paler lines are invisible


@pytest.mark.parametrize("budget", ["passes", "seconds"])
def test_curves_have_the_budget_on_their_x_axis(budget, tmp_path):
    """In equal passes SAM makes half as many epochs."""
    limits = {"epochs": math.inf, budget: 60.0}
    for method, epochs, cost in (("erm", 6, 1), ("sam", 3, 2)):
        write_run(tmp_path, method=method, lines=rows(epochs, cost=cost), **limits)
    (task,) = summarize(*read_runs([tmp_path]))
    convergence, loss, other = task_plots(task)
    assert [convergence.name, loss.name, other.name] == [
        "convergence",
        "train-loss",
        "seconds" if budget == "passes" else "passes",
    ]
    assert "epoch" not in convergence.x_label
    assert [curve.x[-1] for curve in convergence.curves] == pytest.approx([60.0 if budget == "passes" else 4.2] * 2)
    assert convergence.note.startswith("All runs are limited by")
    write_run(tmp_path, method="asam")
    (task,) = summarize(*read_runs([tmp_path]))
    assert task_plots(task)[0].x_label == "epoch"


def test_example_ess_is_plotted_if_a_run_has_it(tmp_path):
    write_run(tmp_path, method="erm")
    lines = [row | {"example_ess": 0.5 / row["epoch"]} for row in rows(6)]
    write_run(tmp_path, method="erm", example_tilt=-2.0, lines=lines)
    (task,) = summarize(*read_runs([tmp_path]))
    (curve,) = next(plot for plot in task_plots(task) if plot.name == "example-ess").curves
    assert curve.name == "erm:example_tilt=-2"
    assert curve.y == pytest.approx([50 / epoch for epoch in range(1, 7)])


def test_tilt_curves_leave_out_runs_without_epochs(tmp_path):
    write_run(tmp_path, method="tsam", t=1.0)
    write_run(tmp_path, method="tsam", t=5.0, finished=False, lines=[])
    (task,) = summarize(*read_runs([tmp_path]))
    (plot,) = [plot for plot in task_plots(task) if plot.name == "tilt-curves"]
    assert [curve.name for curve in plot.curves] == ["t = 1"]
    write_report([tmp_path], tmp_path / "report")


def test_user_methods_have_different_dashes(tmp_path):
    """Methods without a colour of their own share one, so their dashes must differ."""
    for name in ("mine", "yours"):
        for rho in (0.1, 0.2):
            folder = write_run(tmp_path / name, method="sam", rho=rho)
            config = json.loads((folder / "config.json").read_text()) | {"method": name}
            (folder / "config.json").write_text(json.dumps(config))
    write_run(tmp_path, method="sam")
    (task,) = summarize(*read_runs([tmp_path]))
    dashes = {series.name: series.dash for series in task_plots(task)[0].curves}
    names = ["sam", "mine:rho=0.1", "mine:rho=0.2", "yours:rho=0.1", "yours:rho=0.2"]
    assert dashes == dict(zip(names, [0, 0, 1, 2, 3], strict=True))


def test_axes_have_units(tmp_path):
    (task,) = summarize(*read_runs([write_runs(tmp_path)]))
    labels = {
        f.name: (f.x_label, f.y_label) for f in [*task_plots(task), *flatness_plots(comparable_flatness(task)[0], task)]
    }
    assert labels["convergence"] == ("epoch", "test accuracy (%)")
    assert labels["train-loss"] == ("epoch", "train loss (nats)")
    assert labels["seconds"] == ("training time (s)", "test accuracy (%)")
    assert labels["passes"][0] == "forward+backward passes"
    assert labels["noise-variance"][1] == "variance of the loss (nats²)"
    assert all(x and y for x, y in labels.values())


def test_malformed_flatness_is_ignored(tmp_path):
    odd = {"about": 3, "neighborhood": [1], "slices": [7, {"label": None}], "eigenvalues": {"values": ["x", None]}}
    write_run(tmp_path, flatness=odd)
    report = write_report([tmp_path], tmp_path / "report", figures=False)
    assert report.page.exists()


def test_many_settings_show_the_best_of_each_method(tmp_path):
    for number in range(8):
        for method in ("erm", "sam"):
            write_run(tmp_path, method=method, lr=0.01 * (number + 1), lines=rows(3, 0.5 + 0.01 * number))
    (task,) = summarize(*read_runs([tmp_path]))
    shown = [s.name for s in task_plots(task)[0].curves if s.visible]
    assert shown == ["erm:lr=0.08", "sam:lr=0.08"]


@pytest.mark.parametrize(("count", "visible", "note"), [(12, 12, "At 1, "), (14, 12, "Initially shown: the first 12")])
def test_plot_without_a_chosen_setting_is_not_empty(tmp_path, count, visible, note):
    write_run(tmp_path, method="tsam", num_samples=1, lines=rows(3, 0.9))  # the best: it has no effective samples
    for number in range(count):
        write_run(tmp_path, method="tsam", num_samples=2 + number, lines=rows(3, 0.5))
    (task,) = summarize(*read_runs([tmp_path]))
    (plot,) = [plot for plot in task_plots(task) if plot.name == "effective-samples"]
    assert sum(curve.visible for curve in plot.curves) == visible
    assert plot.note.startswith(note)


def test_labels_of_a_regression_fit_the_figure(tmp_path, monkeypatch):
    folder = write_run(tmp_path, flatness=flatness())
    result = json.loads((folder / "result.json").read_text()) | {"metric": "pearson"}
    (folder / "result.json").write_text(json.dumps(result))
    (task,) = summarize(*read_runs([tmp_path]))
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, *a, **k: drawn.append(self))
    for plot in flatness_plots(task.settings, task):
        draw_figure(plot, tmp_path / plot.name)
    for figure in drawn:
        figure.canvas.draw()
        (ax,) = figure.axes
        for box in (ax.xaxis.label.get_window_extent(), ax.yaxis.label.get_window_extent()):
            assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
            assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1
