"""Reading runs, averaging them, and the files that come out."""

import json
import math
import statistics

import pytest
import torch

from report_files import flatness, rows, write_run, write_runs
from tiltsam.cli import main
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.errors import Diverged, RecordError
from tiltsam.lab.palette import METHOD_COLORS
from tiltsam.lab.records import Record
from tiltsam.lab.report import write_report
from tiltsam.lab.report.figures import flatness_figures, task_figures
from tiltsam.lab.report.runs import read_runs
from tiltsam.lab.report.settings import arrange
from tiltsam.lab.report.tables import (
    comparable,
    flatness_table,
    overview_table,
    results_table,
    runs_table,
)
from tiltsam.lab.report.writing import latex_table, markdown_table
from tiltsam.lab.train import train


def column(table, heading):
    return [row[table.headings.index(heading)] for row in table.rows]


# ---------------------------------------------------------------- what is there, and what is not


def test_a_damaged_line_is_named_and_the_rest_is_read(tmp_path):
    folder = write_run(tmp_path, method="sam")
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[2] = lines[2][: len(lines[2]) // 2]
    lines[4] = '{"epoch": 5, "test_accuracy": "<b>high</b>"}'
    path.write_text("\n".join([*lines, "[1, 2]", '{"epoch": NaN}', "\xff not UTF-8"]) + "\n", encoding="latin-1")
    reading = read_runs([tmp_path])
    assert [row["epoch"] for row in reading.runs[0].rows] == [1, 2, 4, 6]
    assert [p.where for p in reading.problems] == [f"{path}, line {n}" for n in (3, 5, 7, 8, 9)]
    assert "'test_accuracy' is not a number" in reading.problems[1].what
    report = write_report([tmp_path], tmp_path / "report", figures=False)
    assert f"{path}, line 3" in report.page.read_text()
    assert [p.where for p in report.problems] == [p.where for p in reading.problems]


def test_an_epoch_begun_again_voids_later_ones_and_half_a_line_at_the_end_is_told(tmp_path):
    folder = write_run(tmp_path, finished=False)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(rows(6)[3] | {"train_loss": 9.0}) + "\n" + '{"epoch": 5, "tr')
    reading = read_runs([tmp_path])
    (run,) = reading.runs
    assert [row["epoch"] for row in run.rows] == [1, 2, 3, 4]
    assert run.rows[3]["train_loss"] == 9.0
    assert "line 8" in reading.problems[0].where


@pytest.mark.parametrize("name", ["config.json", "result.json", "environment.json", "flatness.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000], ids=["half", "list", "bytes", "deep"])
def test_a_damaged_file_is_named(tmp_path, name, content):
    write_run(tmp_path, method="erm")
    folder = write_run(tmp_path, method="sam")
    (folder / name).write_bytes(content)
    report = write_report([tmp_path], tmp_path / "report", figures=False)
    assert str(folder / name) in [p.where for p in report.problems]
    assert str(folder / name) in report.page.read_text()


def test_unfinished_runs_and_missing_seeds_are_told(tmp_path):
    write_run(tmp_path, method="erm", seed=0)
    write_run(tmp_path, method="erm", seed=1, finished=False, lines=rows(2))
    write_run(tmp_path, method="sam", seed=0, finished=False, lines=[])
    report = write_report([tmp_path], tmp_path / "report", figures=False)
    assert [str(p) for p in report.problems] == [
        "erm, seed 1: not finished, at epoch 2 of 6",
        "sam, seed 0: not finished, at no epoch of 6 finished",
        "sam: no run with seed 1, which others have",
    ]
    (task,) = arrange(read_runs([tmp_path]))
    table = results_table(task)
    assert [cell.text for cell in column(table, "runs")] == ["1 of 2", "0 of 1"]
    assert column(table, "test accuracy (%)")[1].text == "–"
    convergence = task_figures(task)[0]
    assert convergence.series[0].count == [2, 2, 1, 1, 1, 1]


def test_a_run_that_diverged_is_not_taken_for_one_that_goes_on(tmp_path):
    config = TrainConfig(method="erm", lr=1e30, epochs=1)
    record = Record.of(tmp_path, config)
    with pytest.raises(Diverged):
        train(config, record)
    report = write_report([tmp_path], tmp_path / "report", figures=False)
    told = "the loss is not finite in epoch 1 of erm, seed 0: lower lr"
    assert [str(p) for p in report.problems] == [f"erm, seed 0: diverged: {told}"]
    (task,) = arrange(read_runs([tmp_path]))
    assert column(runs_table(task), "state")[0].text == "diverged"
    record.begin(config, torch.device("cpu"))  # once more
    (task,) = arrange(read_runs([tmp_path]))
    assert column(runs_table(task), "state")[0].text == "not finished"


def test_runs_on_data_that_were_edited_are_told(tmp_path):
    folders = [write_run(tmp_path, method="erm", seed=seed) for seed in range(4)]
    for folder, mark in zip(folders[:3], ("new", "old", "new"), strict=True):  # one of before there were any
        (folder / "environment.json").write_text(json.dumps({"data": mark}))
    (task,) = arrange(read_runs([tmp_path]))
    assert [str(p) for p in task.problems] == [f"{folders[1]}: the data were others than those of most runs"]


def test_a_run_counts_once(tmp_path):
    write_run(tmp_path / "a", method="erm", finished=False)
    again = write_run(tmp_path / "b", method="erm")
    reading = read_runs([tmp_path, tmp_path / "a", again])
    assert [run.folder for run in reading.runs] == [again]
    assert "the same config and seed" in reading.problems[0].what


def test_runs_behind_a_link_are_found_and_one_that_leads_round_does_no_harm(tmp_path):
    write_run(tmp_path / "far", method="erm")
    write_run(tmp_path / "runs", task="dtd", method="sam")
    (tmp_path / "runs" / "digits").symlink_to(tmp_path / "far" / "digits")
    (tmp_path / "runs" / "round").symlink_to(tmp_path / "runs")
    assert [run.task for run in read_runs([tmp_path / "runs"]).runs] == ["digits", "dtd"]


def test_folders_without_runs(tmp_path, capsys):
    with pytest.raises(RecordError, match="no run in"):
        read_runs([tmp_path])
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "no run in" in capsys.readouterr().err


def test_settings_and_their_numbers(tmp_path):
    (task,) = arrange(read_runs([write_runs(tmp_path)]))
    assert [s.name for s in task.settings] == ["erm", "sam", "tsam t=1", "tsam t=20"]
    assert [s.name for s in task.chosen] == ["erm", "sam", "tsam t=20"]
    table = results_table(task)
    scores = column(table, "test accuracy (%)")
    for setting, cell in zip(task.settings, scores, strict=True):
        finals = [100 * json.loads((run.folder / "result.json").read_text())["score"] for run in setting.runs]
        assert cell.value == pytest.approx(statistics.fmean(finals), rel=1e-14)
        assert cell.error == pytest.approx(statistics.stdev(finals) / math.sqrt(3), rel=1e-12)
        assert cell.text == f"{cell.value:.2f} ± {cell.error:.2f}"
    assert [cell.best for cell in scores] == [False, False, False, True]
    assert not any(cell.best for cell in column(table, "passes"))
    assert [cell.text for cell in column(table, "passes")] == ["60", "120", "360", "360"]


def test_another_methods_settings_and_older_records_make_no_other_setting(tmp_path):
    write_run(tmp_path / "a", method="sam", seed=0, t=1.0)
    folder = write_run(tmp_path / "b", method="sam", seed=1, t=5.0)
    config = json.loads((folder / "config.json").read_text())
    del config["batch_size"]
    config["epochs"] = 6
    (folder / "config.json").write_text(json.dumps(config))
    (task,) = arrange(read_runs([tmp_path]))
    assert [len(setting.runs) for setting in task.settings] == [2]
    assert task.shared["batch_size"] == TrainConfig().batch_size


def test_what_only_some_methods_heed_is_told_too(tmp_path):
    """With one setting of sam beside erm, rho differs from nothing, and is still what a reader asks for first."""
    write_run(tmp_path, method="erm")
    write_run(tmp_path, method="sam", rho=0.3)
    write_run(tmp_path, method="tsam", rho=0.3, num_samples=1)
    (task,) = arrange(read_runs([tmp_path]))
    assert [cell.text for cell in column(results_table(task), "settings")] == ["", "rho=0.3", "rho=0.3 num_samples=1"]
    assert [setting.name for setting in task.settings] == ["erm", "sam", "tsam"]
    assert task.shared["t"] == TrainConfig().t  # of tsam alone, and its default
    assert "rho" not in task.shared


def test_overview_of_several_tasks(tmp_path):
    write_runs(tmp_path)
    write_run(tmp_path, task="dtd", method="sam")
    tasks = arrange(read_runs([tmp_path]))
    table = overview_table(tasks)
    assert table.headings == ["method", "digits: accuracy (%)", "dtd: accuracy (%)"]
    assert [row[0].text for row in table.rows] == ["erm", "sam", "tsam"]
    assert [row[2].text for row in table.rows] == ["–", "75.56", "–"]
    assert [row[1].best for row in table.rows] == [False, False, True]
    assert "over seeds, of 1 to 3 runs each. Bold" in table.caption
    assert (
        "over seeds, of 3 runs each. Bold" in overview_table([task for task in tasks if task.name == "digits"]).caption
    )


def test_every_run_is_listed_as_recorded(tmp_path):
    (task,) = arrange(read_runs([write_runs(tmp_path)]))
    table = runs_table(task)
    for row, run in zip(table.rows, task.runs, strict=True):
        assert row[table.headings.index("test accuracy (%)")].value == 100 * run.result["score"]
        assert row[table.headings.index("seconds")].value == run.rows[-1]["seconds"]


# ---------------------------------------------------------------- figures


def test_curves_are_the_means_of_the_records(tmp_path):
    (task,) = arrange(read_runs([write_runs(tmp_path)]))
    figures = {figure.name: figure for figure in task_figures(task)}
    names = ["convergence", "train-loss", "passes", "seconds", "effective-samples", "tilt", "tilt-curves"]
    assert list(figures) == names
    tsam = task.settings[3]
    for figure, x, y, scale in (
        ("convergence", "epoch", "test_accuracy", 100),
        ("train-loss", "epoch", "train_loss", 1),
        ("passes", "passes", "test_accuracy", 100),
        ("seconds", "seconds", "test_accuracy", 100),
    ):
        series = figures[figure].series[3]
        assert series.name == "tsam t=20"
        records = [[json.loads(x) for x in (r.folder / "metrics.jsonl").read_text().splitlines()] for r in tsam.runs]
        assert series.x == pytest.approx([statistics.fmean(r[k][x] for r in records) for k in range(6)])
        assert series.y == pytest.approx([statistics.fmean(scale * r[k][y] for r in records) for k in range(6)])
        errors = [statistics.stdev(scale * r[k][y] for r in records) / math.sqrt(3) for k in range(6)]
        assert series.error == pytest.approx(errors)
    assert [s.name for s in figures["effective-samples"].series] == ["tsam t=1", "tsam t=20"]
    (tilt,) = figures["tilt"].series
    assert (figures["tilt"].ticks, tilt.x) == (["1", "20"], [0.0, 1.0])
    assert tilt.y == pytest.approx([setting.final("score", 100).value for setting in task.settings[2:]])
    assert [s.name for s in figures["tilt-curves"].series] == ["t = 1", "t = 20"]
    assert min(s.shade for s in figures["tilt-curves"].series) >= 0.5  # paler lines are lost on white and on dark


def test_methods_of_ones_own_are_told_apart(tmp_path):
    """They have one colour, which is no method's of ours, and so lines of several kinds."""
    for name in ("mine", "yours"):
        for rho in (0.1, 0.2):
            folder = write_run(tmp_path / name, method="sam", rho=rho)
            config = json.loads((folder / "config.json").read_text()) | {"method": name}
            (folder / "config.json").write_text(json.dumps(config))
    write_run(tmp_path, method="sam")
    (task,) = arrange(read_runs([tmp_path]))
    dashes = {series.name: series.dash for series in task_figures(task)[0].series}
    names = ["sam", "mine rho=0.1", "mine rho=0.2", "yours rho=0.1", "yours rho=0.2"]
    assert dashes == dict(zip(names, [0, 0, 1, 2, 3], strict=True))


def test_axes_have_units(tmp_path):
    (task,) = arrange(read_runs([write_runs(tmp_path)]))
    labels = {
        f.name: (f.x_label, f.y_label) for f in [*task_figures(task), *flatness_figures(comparable(task)[0], task)]
    }
    assert labels["convergence"] == ("epoch", "test accuracy (%)")
    assert labels["train-loss"] == ("epoch", "train loss (nats)")
    assert labels["seconds"] == ("training time (s)", "test accuracy (%)")
    assert labels["passes"][0] == "forward+backward passes"
    assert labels["noise-variance"][1] == "variance of the loss (nats²)"
    assert all(x and y for x, y in labels.values())


def test_flatness_is_compared_on_the_same_examples_only(tmp_path):
    write_runs(tmp_path)
    odd = next(tmp_path.rglob("erm-*/seed-2")) / "flatness.json"
    odd.write_text(json.dumps(flatness() | {"about": {"split": "test"}}))
    next(tmp_path.rglob("sam-*/seed-1/flatness.json")).unlink()
    (task,) = arrange(read_runs([tmp_path]))
    settings, problems = comparable(task)
    assert [len(s.runs) for s in settings] == [2, 2, 3, 3]
    assert [p.where for p in problems] == [str(odd), "erm", "sam"]
    figures = {f.name: f for f in flatness_figures(settings, task)}
    assert list(figures) == ["noise-mean", "noise-variance", "spectrum", "density", "slice-0"]
    density = figures["density"].series[0]  # of the first run; the tail that is noise is left out
    assert density.x == [0.0, 4.0, 8.0]
    assert density.y == [5.0, 0.01, 0.002]
    erm = figures["spectrum"].series[0]
    measured = [json.loads((run.folder / "flatness.json").read_text()) for run in settings[0].runs]
    assert erm.y == pytest.approx([statistics.fmean(m["eigenvalues"]["values"][k] for m in measured) for k in range(3)])
    assert figures["noise-mean"].series[0].x == [0.005, 0.01, 0.1]


def test_the_flatness_table_shows_rises_and_calls_no_loss_the_best(tmp_path):
    """Of two models the one with the lower loss is the sharper one."""
    about = {"task": "digits", "split": "train", "examples": 300, "num_samples": 50}
    for seed in range(2):
        for method, loss, rise in (("erm", 0.01, 0.2), ("sam", 0.3, 0.02)):
            around = {"std": [0.01], "mean": [loss + rise + 0.001 * seed], "variance": [rise]}
            measured = {"about": about, "loss": loss, "neighborhood": around, "worst_case": {"value": rise}}
            write_run(tmp_path, flatness=measured, method=method, seed=seed)
    (task,) = arrange(read_runs([tmp_path]))
    table = flatness_table(comparable(task)[0], task)
    columns = {heading: [row[k] for row in table.rows] for k, heading in enumerate(table.headings)}
    assert [cell.value for cell in columns["loss"]] == [0.01, 0.3]
    assert [cell.best for cell in columns["loss"]] == [False, False]
    assert [cell.value for cell in columns["mean rise at 0.01"]] == pytest.approx([0.2005, 0.0205])
    assert [cell.best for cell in columns["mean rise at 0.01"]] == [False, True]
    assert "largest rise nearby" in table.caption  # the radius is not in these records
    assert "over seeds, of 2 runs each; losses" in table.caption


def test_more_draws_do_not_make_other_examples(tmp_path):
    for seed, more in enumerate([{"num_samples": 50}, {"num_samples": 500, "rho": 0.1}, {}]):
        measured = flatness()
        measured["about"] |= more
        write_run(tmp_path, flatness=measured, seed=seed)
    (task,) = arrange(read_runs([tmp_path]))
    settings, problems = comparable(task)
    assert not problems
    assert "largest rise within a radius of 0.1;" in flatness_table(settings, task).caption


def test_between_two_bells_of_a_spectrum_there_is_a_gap_not_a_line(tmp_path, monkeypatch):
    from matplotlib.figure import Figure as Canvas

    from tiltsam.lab.report.drawing import draw

    bells = {"grid": [-1.0, 0.0, 1.0, 2.0, 7.0, 8.0], "values": [2.0, 5.0, 1e-12, 1e-80, 0.01, 0.002]}
    write_run(tmp_path, method="erm", flatness=flatness() | {"density": bells})
    (task,) = arrange(read_runs([tmp_path]))
    (figure,) = [f for f in flatness_figures(comparable(task)[0], task) if f.name == "density"]
    assert figure.series[0].x == [-1.0, 0.0, 7.0, 8.0]
    assert figure.series[0].gaps == [2]
    drawn = []
    monkeypatch.setattr(Canvas, "savefig", lambda self, *a, **k: drawn.append(self))
    draw(figure, tmp_path / "x")
    (line,) = drawn[0].axes[0].get_lines()
    assert [str(y) for y in line.get_ydata()] == ["2.0", "5.0", "nan", "0.01", "0.002"]


def test_odd_measurements_do_no_harm(tmp_path):
    odd = {"about": 3, "neighborhood": [1], "slices": [7, {"label": None}], "eigenvalues": {"values": ["x", None]}}
    write_run(tmp_path, flatness=odd)
    report = write_report([tmp_path], tmp_path / "report", figures=False)
    assert report.page.exists()


def test_of_settings_level_on_validation_the_one_with_the_lower_loss_there_is_chosen(tmp_path):
    for rho, loss in ((0.1, 1.1), (0.2, 0.9), (0.3, 1.0), (0.4, None)):
        lines = [{k: v for k, v in (row | {"validation_loss": loss}).items() if v is not None} for row in rows(3)]
        write_run(tmp_path, method="sam", rho=rho, lines=lines)
    (task,) = arrange(read_runs([tmp_path]))
    assert [setting.name for setting in task.chosen] == ["sam rho=0.2"]


def test_many_settings_begin_with_the_best_of_each_method(tmp_path):
    for number in range(8):
        for method in ("erm", "sam"):
            write_run(tmp_path, method=method, lr=0.01 * (number + 1), lines=rows(3, 0.5 + 0.01 * number))
    (task,) = arrange(read_runs([tmp_path]))
    shown = [s.name for s in task_figures(task)[0].series if s.shown]
    assert shown == ["erm lr=0.08", "sam lr=0.08"]


# ---------------------------------------------------------------- files for a paper


def test_figures_and_tables_are_written(tmp_path):
    write_runs(tmp_path)
    report = write_report([tmp_path], tmp_path / "out")
    stems = {path.stem for path in report.figures}
    assert {"convergence", "tilt", "effective-samples", "noise-mean", "spectrum", "slice-0"} <= stems
    for path in report.figures:
        assert path.read_bytes()[:4] == {".png": b"\x89PNG", ".pdf": b"%PDF"}[path.suffix]
    assert {p.name for p in report.tables} == {
        f"{n}.{k}" for n in ("results", "flatness", "runs") for k in ("md", "tex")
    }
    assert "**78.67 ± 0.16**" in (tmp_path / "out" / "tables" / "results.md").read_text()
    assert r"\textbf{78.67 $\pm$ 0.16}" in (tmp_path / "out" / "tables" / "results.tex").read_text()


def test_files_of_the_report_before_that_this_one_does_not_have_go(tmp_path, capsys):
    write_run(tmp_path, method="erm")
    out = tmp_path / "out"
    assert write_report([tmp_path], out).removed == []
    for mine in (out / "tables" / "mine.md", out / "figures" / "mine.png", out / "results.md"):
        mine.write_text("not of the report")
    write_run(tmp_path, task="dtd", method="erm")  # now files begin with the name of their task
    assert main(["report", str(tmp_path), "--out", str(out)]) == 0
    assert "removed 12 files of the report before, which this one does not have\n" in capsys.readouterr().out
    tables = {
        f"{n}.{k}"
        for n in ("digits-results", "digits-runs", "dtd-results", "dtd-runs", "overview")
        for k in ("md", "tex")
    }
    assert {path.name for path in (out / "tables").iterdir()} == {*tables, "mine.md"}
    curves = ("convergence", "train-loss", "passes", "seconds")
    figures = {f"{task}-{name}.{kind}" for task in ("digits", "dtd") for name in curves for kind in ("png", "pdf")}
    assert {path.name for path in (out / "figures").iterdir()} == {*figures, "mine.png"}
    assert len(write_report([tmp_path], out, figures=False).removed) == 16
    for page in (
        b"no report",
        b'<script type="application/json" id="report-files">[1, "../results.md"]</script>',
        b"\xff",
    ):
        (out / "report.html").write_bytes(page)
        assert write_report([tmp_path], out, figures=False).removed == []
    assert (out / "results.md").exists()


def test_drawn_curves_have_the_methods_colours(tmp_path, monkeypatch):
    from matplotlib.figure import Figure as Canvas

    from tiltsam.lab.report.drawing import draw

    (task,) = arrange(read_runs([write_runs(tmp_path)]))
    drawn = []
    monkeypatch.setattr(Canvas, "savefig", lambda self, *a, **k: drawn.append(self))
    draw(task_figures(task)[0], tmp_path / "x")
    (ax,) = drawn[0].axes
    methods = ["erm", "sam", "tsam", "tsam"]
    assert [line.get_color() for line in ax.get_lines()] == [METHOD_COLORS[m].lower() for m in methods]
    assert len({line.get_linestyle() for line in ax.get_lines()[2:]}) == 2
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("epoch", "test accuracy (%)")
    samples = next(f for f in task_figures(task) if f.name == "effective-samples")
    draw(samples, tmp_path / "x")
    low, high = drawn[-1].axes[0].get_ylim()
    assert low < 1
    assert high > 3  # from one sample to all


def test_the_papers_five_tilts_have_lines_of_different_kinds(tmp_path, monkeypatch):
    from matplotlib.figure import Figure as Canvas

    from tiltsam.lab.report.drawing import draw

    for t in (0.0, 1.0, 5.0, 20.0, 100.0):
        write_run(tmp_path, method="tsam", t=t)
    (task,) = arrange(read_runs([tmp_path]))
    drawn = []
    monkeypatch.setattr(Canvas, "savefig", lambda self, *a, **k: drawn.append(self))
    draw(task_figures(task)[0], tmp_path / "x")
    patterns = {str(line._dash_pattern) for line in drawn[0].axes[0].get_lines()}
    assert len(patterns) == 5


@pytest.mark.parametrize("epochs", [2, 3, 4, 6, 15])
def test_ticks_of_few_epochs_are_whole(epochs, tmp_path, monkeypatch):
    from matplotlib.figure import Figure as Canvas

    from tiltsam.lab.report.drawing import draw

    write_run(tmp_path, method="sam", lines=rows(epochs), epochs=epochs)
    (task,) = arrange(read_runs([tmp_path]))
    drawn = []
    monkeypatch.setattr(Canvas, "savefig", lambda self, *a, **k: drawn.append(self))
    draw(task_figures(task)[0], tmp_path / "x")
    (ax,) = drawn[0].axes
    assert all(float(tick).is_integer() for tick in ax.get_xticks())


def test_a_long_name_stays_within_its_figure(tmp_path, monkeypatch):
    from matplotlib.figure import Figure as Canvas

    from tiltsam.lab.report.drawing import draw

    for letter in "abc":
        write_run(tmp_path, method="sam", model="hf:an-organisation/" + 130 * letter, lr=ord(letter) / 1000)
    (task,) = arrange(read_runs([tmp_path]))
    drawn = []
    monkeypatch.setattr(Canvas, "savefig", lambda self, *a, **k: drawn.append(self))
    draw(task_figures(task)[0], tmp_path / "x")
    figure = drawn[0]
    figure.canvas.draw()
    box, whole = figure.legends[0].get_window_extent(), figure.bbox
    assert whole.x0 <= box.x0 < box.x1 <= whole.x1
    assert figure.axes[0].bbox.y1 <= box.y0 < box.y1 <= whole.y1  # above the axes


def test_matplotlib_reads_no_mathematics_into_a_name(tmp_path):
    from tiltsam.lab.report.drawing import draw

    for name in ("_hidden", r"$\frac{", "a$b$"):
        folder = write_run(tmp_path / "runs", method="erm", model=name)
        config = json.loads((folder / "config.json").read_text()) | {"method": name}
        (folder / "config.json").write_text(json.dumps(config))
    (task,) = arrange(read_runs([tmp_path]))
    for path in draw(task_figures(task)[0], tmp_path / "x"):
        assert path.stat().st_size > 1000


def test_markdown_and_latex_keep_text_as_text(tmp_path):
    write_run(tmp_path, task="npz:a_b|c&d%$x^{2}~#<i>`*[y](z).npz", notes="line\n| two \\ end")
    (task,) = arrange(read_runs([tmp_path]))
    markdown, latex = markdown_table(runs_table(task)), latex_table(results_table(task))
    body = markdown.splitlines()[2]
    assert body.replace("\\\\", "").replace("\\|", "").count("|") == len(runs_table(task).headings) + 1
    assert r"a\_b\|c\&d%$x^{2}\~\#\<i\>\`\*\[y\](z).npz" in markdown
    assert (
        r"npz:a\_b|c\&d\%\$x\textasciicircum{}\{2\}\textasciitilde{}\#\textless{}i\textgreater{}`*[y](z).npz" in latex
    )


def test_the_page_is_written_without_matplotlib(tmp_path, monkeypatch, capsys):
    import tiltsam.lab.report.write as writing

    monkeypatch.setattr(writing, "find_spec", lambda name: None)
    write_run(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "pip install '.[plots]'" in out
    assert str(tmp_path / "report" / "report.html") in out
    assert not (tmp_path / "report" / "figures").exists()


def test_compare_ends_with_the_report(tmp_path, capsys, monkeypatch):
    import tiltsam.lab.report.write as writing

    monkeypatch.setattr(writing, "draw", lambda figure, path: [])  # tested above, and slow
    arguments = [
        "compare",
        "digits",
        "--methods",
        "erm",
        "tsam",
        "--seeds",
        "1",
        "--epochs",
        "2",
        "--batch-size",
        "256",
    ]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    page = tmp_path / "digits" / "report" / "report.html"
    assert last == f"report: {page}"
    assert page.exists()
    assert len(read_runs([tmp_path]).runs) == 2  # the report is no run
