"""The tables, and their Markdown and LaTeX."""

import json
import math
import statistics
from dataclasses import replace

import pytest

from helpers.report_runs import column, flatness, rows, write_run, write_runs
from tiltsam.lab.report import write_report
from tiltsam.lab.report.plots import flatness_plots
from tiltsam.lab.report.runs import read_runs, save_entries
from tiltsam.lab.report.summary import summarize
from tiltsam.lab.report.tables import (
    comparable_flatness,
    difference_cell,
    examples_table,
    flatness_table,
    latex_table,
    markdown_table,
    methods_table,
    overview_table,
    results_table,
    runs_table,
)
from tiltsam.lab.stats import Mean


def test_overview_table(tmp_path):
    write_runs(tmp_path)
    write_run(tmp_path, task="dtd", method="sam")
    tasks = summarize(*read_runs([tmp_path]))
    table = overview_table(tasks)
    assert table.headings == ["method", "digits: accuracy (%)", "dtd: accuracy (%)"]
    assert [row[0].text for row in table.rows] == ["erm", "sam", "tsam"]
    assert [row[2].text for row in table.rows] == ["–", "75.56", "–"]
    assert [row[1].best for row in table.rows] == [False, False, True]
    assert "over seeds, of 1 to 3 runs each. Bold" in table.caption
    assert (
        "over seeds, of 3 runs each. Bold" in overview_table([task for task in tasks if task.name == "digits"]).caption
    )


def test_runs_table_equals_records(tmp_path):
    (task,) = summarize(*read_runs([write_runs(tmp_path)]))
    table = runs_table(task)
    for row, run in zip(table.rows, task.runs, strict=True):
        assert row[table.headings.index("test accuracy (%)")].value == 100 * run.result["score"]
        assert row[table.headings.index("seconds")].value == run.rows[-1]["seconds"]


def test_results_table_has_optional_columns_if_a_run_has_them(tmp_path):
    more = ["ECE (%)", "worst class (%)"]
    write_run(tmp_path, method="sam", seed=0)
    (task,) = summarize(*read_runs([tmp_path]))
    table = results_table(task)
    final = rows(6)[-1]
    assert [column(table, name)[0].value for name in more] == pytest.approx(
        [100 * final["test_ece"], 100 * final["test_worst_class_accuracy"]]
    )
    older = [{k: v for k, v in row.items() if "ece" not in k and "worst" not in k} for row in rows(6)]
    write_run(tmp_path / "older", method="sam", lines=older)
    (task,) = summarize(*read_runs([tmp_path / "older"]))
    assert not set(more) & set(results_table(task).headings)
    assert "ECE" not in results_table(task).caption


def test_results_table_has_paired_differences_to_plain_training(tmp_path):
    for method, options, scores in (("erm", {}, [0.9, 0.8]), ("sam", {}, [0.93, 0.81]), ("asam", {}, [0.7])):
        for seed, score in enumerate(scores):
            write_run(tmp_path, method=method, seed=seed, lines=rows(1, 1.5 * score), **options)
    (task,) = summarize(*read_runs([tmp_path]))
    table = results_table(task)
    cells = column(table, "minus erm [95% interval]")
    assert [cell.full_text for cell in cells] == ["", "+2.00 [-10.71, +14.71]", "-20.00"]
    assert difference_cell(Mean(-0.001, math.nan, 1)).text == "+0.00"
    assert "over the seeds that both have" in table.caption
    assert "+2.00 \\[-10.71, +14.71\\]" in markdown_table(table)
    (task,) = summarize(*read_runs([next(tmp_path.rglob("asam-*"))]))
    assert not any("minus" in heading for heading in results_table(task).headings)


def test_results_table_compares_with_the_first_entry_without_plain_training(tmp_path):
    runs = {method: write_run(tmp_path, method=method) for method in ("tsam", "sam")}
    save_entries(tmp_path / "digits", {run.parent.name: method for method, run in runs.items()})
    (task,) = summarize(*read_runs([tmp_path]))
    assert [cell.text for cell in column(results_table(task), "minus tsam")] == ["+0.00", ""]


def test_examples_table_has_the_settings_with_a_tilt(tmp_path):
    write_run(tmp_path, method="sam")
    (task,) = summarize(*read_runs([tmp_path]))
    assert examples_table(task) is None
    more = {"silenced_precision": 0.9, "silenced_recall": 0.71, "test_balanced_accuracy": 0.75}
    lines = [row | more for row in rows(6)]
    write_run(tmp_path, method="sam", example_tilt=-1.0, lines=lines)
    (task,) = summarize(*read_runs([tmp_path]))
    table = examples_table(task)
    assert [cell.text for cell in table.rows[0]] == [
        "sam",
        "example_tilt=-1",
        "90.0",
        "71.0",
    ]
    assert len(table.rows) == 1
    assert "Few-shot" not in table.caption
    report = write_report([tmp_path], tmp_path / "report", figures=False)
    assert "<h3>Examples</h3>" in report.page.read_text()
    assert tmp_path / "report" / "tables" / "examples.md" in report.tables


def test_examples_table_has_few_shot_accuracy(tmp_path):
    more = {"test_few_shot_accuracy": 0.5, "test_balanced_accuracy": 0.75}
    write_run(tmp_path, task="digits-lt", lines=[row | more for row in rows(6)])
    (task,) = summarize(*read_runs([tmp_path]))
    table = examples_table(task)
    assert column(table, "balanced accuracy (%)")[0].value == 75
    assert column(table, "few-shot accuracy (%)")[0].value == 50
    assert "third of the classes" in table.caption
    assert "ilenced" not in table.caption


def test_comparable_flatness_needs_the_same_examples(tmp_path):
    write_runs(tmp_path)
    odd = next(tmp_path.rglob("erm-*/seed-2")) / "flatness.json"
    odd.write_text(json.dumps(flatness() | {"about": {"split": "test"}}))
    next(tmp_path.rglob("sam-*/seed-1/flatness.json")).unlink()
    (task,) = summarize(*read_runs([tmp_path]))
    settings, problems = comparable_flatness(task)
    assert [len(s.runs) for s in settings] == [2, 2, 3, 3]
    assert [p.where for p in problems] == [str(odd), "erm", "sam"]
    figures = {f.name: f for f in flatness_plots(settings, task)}
    assert list(figures) == ["noise-mean", "noise-variance", "spectrum", "density", "slice-0"]
    density = figures["density"].curves[0]  # of the first run, without the noise in its tail
    assert density.x == [0.0, 4.0, 8.0]
    assert density.y == [5.0, 0.01, 0.002]
    erm = figures["spectrum"].curves[0]
    measured = [json.loads((run.folder / "flatness.json").read_text()) for run in settings[0].runs]
    assert erm.y == pytest.approx([statistics.fmean(m["eigenvalues"]["values"][k] for m in measured) for k in range(3)])
    assert figures["noise-mean"].curves[0].x == [0.005, 0.01, 0.1]


def test_flatness_table_shows_rises(tmp_path):
    """The model with the lower loss is the sharper one here."""
    about = {"task": "digits", "split": "train", "examples": 300, "num_samples": 50}
    for seed in range(2):
        for method, loss, rise in (("erm", 0.01, 0.2), ("sam", 0.3, 0.02)):
            around = {"std": [0.01], "mean": [loss + rise * (1 + 0.01 * seed)], "variance": [rise]}
            measured = {"about": about, "loss": loss, "neighborhood": around, "worst_case": {"value": rise}}
            measured["rounding"] = {"bits": [8, 4], "losses": [loss + rise, loss + 3 * rise]}
            write_run(tmp_path, flatness=measured, method=method, seed=seed)
    (task,) = summarize(*read_runs([tmp_path]))
    table = flatness_table(comparable_flatness(task)[0], task)
    columns = {
        heading: [row[k] for row in table.rows] for k, heading in enumerate(h.split(" (")[0] for h in table.headings)
    }
    assert [cell.value for cell in columns["loss"]] == [0.01, 0.3]
    assert [cell.best for cell in columns["loss"]] == [False, False]
    assert [cell.value for cell in columns["mean rise at 0.01"]] == pytest.approx([0.201, 0.0201])
    assert [cell.best for cell in columns["mean rise at 0.01"]] == [False, True]
    assert [cell.value for cell in columns["4 bits"]] == pytest.approx([0.6, 0.06])
    assert "largest rise nearby" in table.caption  # the radius is not in these records
    assert "over seeds, of 2 runs each; losses" in table.caption


def test_comparable_flatness_ignores_number_of_draws(tmp_path):
    for seed, more in enumerate([{"num_samples": 50}, {"num_samples": 500, "rho": 0.1}, {}]):
        measured = flatness()
        measured["about"] |= more
        write_run(tmp_path, flatness=measured, seed=seed)
    (task,) = summarize(*read_runs([tmp_path]))
    settings, problems = comparable_flatness(task)
    assert not problems
    assert "largest rise within a radius of 0.1;" in flatness_table(settings, task).caption


def test_markdown_and_latex_escape_text(tmp_path):
    write_run(tmp_path, task="npz:a_b|c&d%$x^{2}~#<i>`*[y](z).npz", notes="line\n| two \\ end")
    (task,) = summarize(*read_runs([tmp_path]))
    markdown, latex = markdown_table(runs_table(task)), latex_table(results_table(task))
    body = markdown.splitlines()[2]
    assert body.replace("\\\\", "").replace("\\|", "").count("|") == len(runs_table(task).headings) + 1
    assert r"a\_b\|c\&d%$x^{2}\~\#\<i\>\`\*\[y\](z).npz" in markdown
    assert (
        r"npz:a\_b|c\&d\%\$x\textasciicircum{}\{2\}\textasciitilde{}\#\textless{}i\textgreater{}`*[y](z).npz" in latex
    )


def test_methods_table_shows_defaults_and_selection(tmp_path):
    write_run(tmp_path, method="erm")
    for rho, score in ((0.1, 0.7), (0.2, 0.8)):
        write_run(tmp_path, method="sam", rho=rho, lines=rows(3, score))
    write_run(tmp_path, method="tsam", t=10.0)
    (task,) = summarize(*read_runs([tmp_path]))
    table = methods_table(task)
    settings = [cell.text for cell in column(table, "settings")]
    assert settings[:3] == ["–", "rho=0.1", "rho=0.2"]
    assert settings[3] == "t=10 rho=0.1 radius=0.003√d num_samples=3 delta=5"
    selection = [cell.text for cell in column(table, "selection")]
    assert selection == [
        "not tuned",
        "not the best of 2 settings on validation",
        "best of 2 settings on validation",
        "not tuned",
    ]


def test_methods_table_tells_entries_apart(tmp_path):
    write_run(tmp_path, method="erm")
    write_run(tmp_path, method="erm", average=True, example_tilt=-0.4)
    (task,) = summarize(*read_runs([tmp_path]))
    table = methods_table(replace(task, compare_settings=True))
    assert [cell.text for cell in column(table, "settings")] == ["–", "example_tilt=-0.4 average=true"]
    assert [cell.text for cell in column(table, "selection")] == ["not tuned", "not tuned"]
    assert [cell.text for cell in column(results_table(task), "settings")] == ["", "example_tilt=-0.4 average=true"]


@pytest.mark.parametrize(
    ("variances", "heading", "texts"),
    [
        ((2e-6, 4e-5), "variance at 0.01 (1e-6)", ["2.00", "40.00"]),
        ((0.5, 12.0), "variance at 0.01", ["0.500", "12.000"]),
        ((1e-9, 0.1), "variance at 0.01", ["1.0e-09", "1.0e-01"]),
    ],
)
def test_flatness_column_has_one_notation(tmp_path, variances, heading, texts):
    for method, variance in zip(("erm", "sam"), variances, strict=True):
        around = {"std": [0.01], "mean": [0.4], "variance": [variance]}
        write_run(tmp_path, method=method, flatness=flatness() | {"neighborhood": around})
    (task,) = summarize(*read_runs([tmp_path]))
    cells = column(flatness_table(comparable_flatness(task)[0], task), heading)
    assert [cell.text for cell in cells] == texts
    assert [cell.value for cell in cells] == list(variances)


def test_runs_of_a_sweep_are_tuned(tmp_path):
    out = tmp_path / "out"
    folder = write_run(out, method="sam")
    study = out / "sweeps" / "study"
    study.mkdir(parents=True)
    test = {"runs": [{"run": str(folder.relative_to(out)), "seed": 0, "state": "done"}]}
    (study / "sweep.json").write_text(json.dumps({"methods": {"sam": {"test": test}}}))
    for place in (study, study.parent, out, tmp_path):
        (task,) = summarize(*read_runs([place]))
        assert task.tuning(task.settings[0]) == "tuned by a sweep on validation"
