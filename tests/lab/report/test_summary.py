"""Grouping runs into settings and averaging over seeds."""

import json
import math
import re
import statistics

import pytest
import torch

from helpers.report_runs import column, rows, write_run, write_runs
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.flags import parse_method
from tiltsam.lab.records import Record
from tiltsam.lab.report import write_report
from tiltsam.lab.report.plots import task_plots
from tiltsam.lab.report.runs import read_runs, save_entries
from tiltsam.lab.report.summary import entry_text, summarize
from tiltsam.lab.report.tables import (
    results_table,
    runs_table,
)
from tiltsam.lab.train import Diverged, train


def test_unfinished_runs_and_missing_seeds_are_problems(tmp_path):
    write_run(tmp_path, method="erm", seed=0)
    write_run(tmp_path, method="erm", seed=1, finished=False, lines=rows(2))
    write_run(tmp_path, method="sam", seed=0, finished=False, lines=[])
    report = write_report([tmp_path], tmp_path / "report", figures=False)
    assert [p.where for p in report.problems] == ["erm, seed 1", "sam, seed 0"]
    assert [re.findall(r"\d+", p.what) for p in report.problems] == [["2", "6"], ["6"]]
    (task,) = summarize(*read_runs([tmp_path]))
    table = results_table(task)
    assert [cell.text for cell in column(table, "runs")] == ["1 of 2", "0 of 1"]
    assert column(table, "test accuracy (%)")[1].text == "–"
    convergence = task_plots(task)[0]
    assert convergence.curves[0].count == [2, 2, 1, 1, 1, 1]


def test_diverged_run_state(tmp_path):
    config = TrainConfig(method="erm", lr=1e30, epochs=1)
    record = Record.of(tmp_path, config)
    with pytest.raises(Diverged):
        train(config, record)
    report = write_report([tmp_path], tmp_path / "report", figures=False)
    assert [p.where for p in report.problems] == ["erm, seed 0"]
    assert "diverged" in report.problems[0].what
    (task,) = summarize(*read_runs([tmp_path]))
    assert column(runs_table(task), "state")[0].text == "diverged"
    record.begin(config, torch.device("cpu"))  # restart it
    (task,) = summarize(*read_runs([tmp_path]))
    assert column(runs_table(task), "state")[0].text == "not finished"


def test_runs_on_edited_data_are_problems(tmp_path):
    folders = [write_run(tmp_path, method="erm", seed=seed) for seed in range(4)]
    for folder, mark in zip(folders[:3], ("new", "old", "new"), strict=True):  # the last one has no fingerprint
        (folder / "environment.json").write_text(json.dumps({"data": mark}))
    (task,) = summarize(*read_runs([tmp_path]))
    assert [p.where for p in task.problems] == [str(folders[1])]


def test_summarize_settings_and_means(tmp_path):
    (task,) = summarize(*read_runs([write_runs(tmp_path)]))
    assert [s.name for s in task.settings] == ["erm", "sam", "tsam:t=1", "tsam:t=20"]
    assert [s.name for s in task.chosen] == ["erm", "sam", "tsam:t=20"]
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


def test_summarize_fills_missing_fields_with_defaults(tmp_path):
    write_run(tmp_path / "a", method="sam", seed=0)
    folder = write_run(tmp_path / "b", method="sam", seed=1)
    config = json.loads((folder / "config.json").read_text())
    del config["batch_size"]
    config["epochs"] = 6
    (folder / "config.json").write_text(json.dumps(config))
    (task,) = summarize(*read_runs([tmp_path]))
    assert [len(setting.runs) for setting in task.settings] == [2]
    assert task.shared["batch_size"] == TrainConfig().batch_size


def test_differs_includes_options_of_some_methods(tmp_path):
    """With a single setting of sam, rho does not vary, but readers still want to see it."""
    write_run(tmp_path, method="erm")
    write_run(tmp_path, method="sam", rho=0.3)
    write_run(tmp_path, method="tsam", rho=0.3, num_samples=1)
    (task,) = summarize(*read_runs([tmp_path]))
    assert [cell.text for cell in column(results_table(task), "settings")] == ["", "rho=0.3", "rho=0.3 num_samples=1"]
    assert [setting.name for setting in task.settings] == ["erm", "sam", "tsam"]
    assert not {"rho", "t"} & task.shared.keys()


def test_settings_of_a_loss_are_shown_for_that_loss(tmp_path):
    for options in ({}, {"loss": "gce"}, {"loss": "gce", "gce_q": 0.4}, {"loss": "logit-adjusted"}):
        write_run(tmp_path, method="erm", **options)
    (task,) = summarize(*read_runs([tmp_path]))
    assert [s.name for s in task.settings] == [
        "erm",
        "erm:loss=logit-adjusted",
        "erm:loss=gce,gce_q=0.4",
        "erm:loss=gce,gce_q=0.7",
    ]
    assert "logit_tau" not in task.shared


def test_chosen_breaks_ties_by_validation_loss(tmp_path):
    for rho, loss in ((0.1, 1.1), (0.2, 0.9), (0.3, 1.0), (0.4, None)):
        lines = [{k: v for k, v in (row | {"validation_loss": loss}).items() if v is not None} for row in rows(3)]
        write_run(tmp_path, method="sam", rho=rho, lines=lines)
    (task,) = summarize(*read_runs([tmp_path]))
    assert [setting.name for setting in task.chosen] == ["sam:rho=0.2"]


def test_chosen_compares_settings_on_their_common_seeds(tmp_path):
    """The choice of a sweep was tested with more seeds than its trials, which may be harder ones."""
    for lr, scores in ((0.01, [0.7, 0.72]), (0.02, [0.8, 0.6, 0.6]), (0.03, [0.75, 0.75])):
        for seed, score in enumerate(scores):
            write_run(tmp_path, method="sam", lr=lr, seed=seed, lines=rows(2, score))
    (task,) = summarize(*read_runs([tmp_path]))
    assert [setting.values["lr"] for setting in task.chosen] == [0.03]  # over seeds 0 and 1
    write_run(tmp_path, method="sam", lr=0.04, seed=0, lines=rows(2, 0.5))
    write_run(tmp_path, method="sam", lr=0.05, seed=4, lines=rows(2, 0.9), finished=False)
    (task,) = summarize(*read_runs([tmp_path]))
    assert [setting.values["lr"] for setting in task.chosen] == [0.02]  # over seed 0
    write_run(tmp_path, method="sam", lr=0.06, seed=5, lines=rows(2, 0.79))
    (task,) = summarize(*read_runs([tmp_path]))
    assert [setting.values["lr"] for setting in task.chosen] == [0.06]  # none in common: each over its own


def test_settings_are_named_as_typed(tmp_path):
    entries = {
        write_run(tmp_path, method="erm"): "erm",
        write_run(tmp_path, method="erm", average=True, example_tilt=-0.4): "erm:average=true,example_tilt=-0.4",
    }
    (task,) = summarize(*read_runs([tmp_path]))  # what was typed is not known
    assert [s.name for s in task.settings] == ["erm", "erm:example_tilt=-0.4,average=true"]
    save_entries(tmp_path / "digits", {run.parent.name: entry for run, entry in entries.items()})
    (task,) = summarize(*read_runs([tmp_path]))
    assert [s.name for s in task.settings] == [s.full_name for s in task.settings] == list(entries.values())


def test_equal_entries_are_not_used_as_names(tmp_path):
    """Such as the choices of two sweeps with the same method."""
    runs = [write_run(tmp_path, method="sam", lr=lr) for lr in (0.05, 0.1)]
    save_entries(tmp_path / "digits", {run.parent.name: "sam" for run in runs})
    (task,) = summarize(*read_runs([tmp_path]))
    assert [s.name for s in task.settings] == ["sam:lr=0.05", "sam:lr=0.1"]


def write_sweep(out, tests, trials, **more):
    """Write the ``sweep.json`` of a sweep of sam and return its folder."""
    study = out / "sweeps" / "study"
    study.mkdir(parents=True)
    runs = [{"run": str(run.relative_to(out)), "seed": seed, "state": "done"} for seed, run in enumerate(tests)]
    tried = [{"run": str(run.relative_to(out)), "state": "done"} for run in trials]
    methods = {"sam": {"test": {"runs": runs}, "trials": tried}}
    (study / "sweep.json").write_text(json.dumps({"task": "digits", "trial_seeds": 1, "methods": methods, **more}))
    return study


@pytest.mark.parametrize("below", ["", "digits"])
def test_trials_of_sweeps_are_left_out(tmp_path, below):
    trials = [write_run(tmp_path, method="sam", lr=lr) for lr in (0.01, 0.02, 0.03, 0.04)]
    tests = [trials[1], write_run(tmp_path, method="sam", lr=0.02, seed=1)]
    write_run(tmp_path, method="sam", lr=0.03, seed=1)  # another command's
    write_run(tmp_path, method="erm")
    write_sweep(tmp_path, tests, trials)
    folder = tmp_path / below
    report = write_report([folder], tmp_path / "report", figures=False)
    assert report.problems == []
    (task,) = summarize(*read_runs([folder]))
    assert [(s.method, s.values["lr"], len(s.runs)) for s in task.settings] == [
        ("erm", 0.05, 1),
        ("sam", 0.02, 2),
        ("sam", 0.03, 2),
    ]
    assert task.tuning(task.settings[1]) == "tuned by a sweep on validation"
    (task,) = summarize(*read_runs([folder], trials=True))
    assert len(task.settings) == 5
    assert len(read_runs([trials[0].parent]).runs) == 1  # asked for


def test_notes_of_a_sweep_are_on_its_page(tmp_path):
    note = "sam: rho=0.05 is the smallest value of its grid; a smaller one may be better"
    run = write_run(tmp_path, method="sam")
    study = write_sweep(tmp_path, [run], [run], notes=[note, note, 1])
    assert read_runs([study]).notes == {("digits", "0.2", "0.1"): [note]}
    page = write_report([study], tmp_path / "report", figures=False).page
    assert f"<li>{note}</li>" in page.read_text()


def test_tests_of_a_sweep_are_named_by_their_entry(tmp_path):
    runs = {
        "sam": write_run(tmp_path, method="sam"),
        "sam:average=true": write_run(tmp_path, method="sam", average=True),
    }
    study = tmp_path / "sweeps" / "study"
    study.mkdir(parents=True)
    tests = {n: [{"run": str(run.relative_to(tmp_path)), "seed": 0, "state": "done"}] for n, run in runs.items()}
    content = {"methods": {name: {"test": {"runs": found}} for name, found in tests.items()}}
    (study / "sweep.json").write_text(json.dumps(content))
    (task,) = summarize(*read_runs([study]))
    assert [s.name for s in task.settings] == list(runs)


def test_runs_with_other_noise_or_validation_are_tasks_of_their_own(tmp_path):
    """They are scored by other labels: a difference between them is not one of the methods."""
    for seed in (0, 1):
        write_run(tmp_path, method="erm", noise=0.0, seed=seed)
        write_run(tmp_path, method="erm", seed=seed)  # the task's default, 20%
        write_run(tmp_path, method="sam", noise=0.2, seed=seed)
        write_run(tmp_path, method="sam", noise=0.2, validation=0.0, seed=seed)
    tasks = summarize(*read_runs([tmp_path]))
    assert {task.name: [s.method for s in task.settings] for task in tasks} == {
        "digits, noise 0, validation 0.1": ["erm"],
        "digits, noise 0.2, validation 0": ["sam"],
        "digits, noise 0.2, validation 0.1": ["erm", "sam"],
    }


def test_entry_text_can_be_typed():
    assert parse_method(entry_text("tsam", {"delta": None, "rho": 0.2})) == {
        "method": "tsam",
        "delta": None,
        "rho": 0.2,
    }


def test_noise_of_the_task_and_the_same_noise_are_one_setting(tmp_path):
    write_run(tmp_path, method="erm", seed=0)
    write_run(tmp_path, method="erm", noise=0.2, seed=1)
    (task,) = summarize(*read_runs([tmp_path]))
    (setting,) = task.settings
    assert (task.name, len(setting.runs)) == ("digits", 2)


def test_notes_and_problems_are_shown_with_their_runs(tmp_path):
    sweeps = []
    for noise in (0.0, 0.4):
        run = write_run(tmp_path / f"{noise}", method="sam", noise=noise)
        (run / "setup.json").write_text("{")
        sweeps.append(write_sweep(tmp_path / f"{noise}", [run], [run], notes=[f"note {noise}"]))
    tasks = summarize(*read_runs(sweeps))
    assert [task.name for task in tasks] == ["digits, noise 0", "digits, noise 0.4"]
    for task, noise in zip(tasks, ("0.0", "0.4"), strict=True):
        assert list(task.notes) == [f"note {noise}"]
        assert [f"/{noise}/" in problem.where for problem in task.problems] == [True]
