"""Comparing methods from Python."""

import json
import re
from contextlib import ExitStack
from functools import partial

import pytest

import tiltsam
from helpers.displays import Told
from helpers.lab_processes import files_named, start
from helpers.tracing import named_functions_of
from helpers.vasso import VaSSO
from tiltsam.cli import main
from tiltsam.lab.compare import compare, runs_by_method
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.errors import ConfigError, TrainError
from tiltsam.lab.records import Record
from tiltsam.lab.report.runs import read_runs
from tiltsam.lab.report.summary import summarize
from tiltsam.lab.stats import format_interval, format_mean, mean_of, paired_difference
from tiltsam.lab.train import train

SMALL = TrainConfig(epochs=2, batch_size=128, options={"num_samples": 2})
QUICK = TrainConfig("digits", epochs=0.2, batch_size=128)


def small(**settings):
    """Return the small config with some settings replaced."""
    return SMALL.with_settings(settings)


def ends_well(process) -> bool:
    process.join(240)
    return process.exitcode == 0


def test_compare_trains_each_method_with_each_seed_once(tmp_path):
    trained = {}
    failures = compare(
        runs_by_method(QUICK, ["erm", "sam:rho=0.1"], seeds=2),
        tmp_path,
        display=Told(report=lambda config, progress: trained.setdefault((config.method, config.seed), progress)),
    )
    assert failures == {}
    assert list(trained) == [("erm", 0), ("sam", 0), ("erm", 1), ("sam", 1)]
    alone = runs_by_method(QUICK, ["erm"], seeds=2)
    assert compare(alone, tmp_path, display=Told(report=lambda *_: pytest.fail("trained again"))) == {}


def test_runs_by_method_refuses_equal_methods():
    with pytest.raises(ConfigError, match=r"^sam and sam:rho=0\.05 are the same runs"):
        runs_by_method(QUICK, ["sam", "erm", "sam:rho=0.05"], 1)
    with pytest.raises(ConfigError, match=r"^methods must differ, got sam, sam"):
        runs_by_method(QUICK, ["sam", "sam"], 1)


def test_compare_tells_what_it_waits_for(tmp_path):
    cells = runs_by_method(QUICK, ["erm", "sam"], 1)
    lines, skipped = [], []
    with ExitStack() as elsewhere:
        assert elsewhere.enter_context(Record.of(tmp_path, cells["sam"][0]).lock())

        def take(line):
            lines.append(line)
            elsewhere.close()

        compare(cells, tmp_path, display=Told(skip=skipped.append, print=take))
    assert skipped == cells["sam"]
    assert lines == ["waiting for 1 run that other processes train"]
    assert all(Record.of(tmp_path, *runs).result() for runs in cells.values())


@pytest.mark.parametrize(
    ("methods", "seeds", "value"), [(["sgd"], 1, "sgd"), (["erm:rho=1"], 1, "rho"), (["erm"], 0, "0")]
)
def test_runs_by_method_refuses_unknown_methods_settings_and_seeds(methods, seeds, value):
    with pytest.raises(ConfigError, match=value):
        runs_by_method(QUICK, methods, seeds)


def test_compare_checks_all_cells_before_it_trains(tmp_path):
    cells = runs_by_method(QUICK, ["erm", "sam:rho=-1"], seeds=1)
    with pytest.raises(ConfigError, match="-1"):
        compare(cells, tmp_path)
    assert not list(tmp_path.iterdir())


def test_compare_continues_after_a_diverged_run(tmp_path, capsys):
    bad = ["compare", "digits", "--methods", "erm", "--seeds", "1", "--out", str(tmp_path), "--epochs", "2"]
    assert main([*bad, "--lr", "1e30"]) == 2
    printed = capsys.readouterr()
    assert "erm seed 0: the loss is not finite in epoch 1: lower lr\n" in printed.out
    assert "| 0 of 1 |" in printed.out
    assert "1 seed," in printed.out
    assert "all runs failed" in printed.err
    with pytest.raises(TrainError, match="lower lr or rho"):
        train(small(method="sam", lr=1e30), Record(tmp_path / "again"))


def test_compare_returns_what_failed(tmp_path):
    bad, good = small(method="erm", lr=1e30), small(method="erm")
    failures = compare({"bad": [bad], "good": [good]}, tmp_path)
    assert list(failures) == [bad]
    assert "the loss is not finite" in str(failures[bad])


def test_compare_prints_the_main_columns_of_the_report(tmp_path, capsys):
    command = ["compare", "digits", "--methods", "erm", "sam", "--seeds", "2", "--out", str(tmp_path), "--epochs", "2"]
    assert main(command) == 0
    out = capsys.readouterr().out
    headings, _, *rows = (line.split(" | ") for line in out.splitlines() if line.startswith("|"))
    assert [heading.strip(" |") for heading in headings] == [
        "method",
        "test accuracy (%)",
        "minus erm [95% interval]",
        "at best validation",
        "passes",
        "seconds",
        "runs",
    ]
    (task,) = summarize(*read_runs([tmp_path]))
    erm, sam = (setting.finals("score", 100) for setting in task.settings)
    assert rows[0][1].strip() == format_mean(mean_of(list(erm.values())), 2)
    difference = paired_difference(sam, erm)
    assert rows[1][2].strip() == f"{difference.value:+.2f} {format_interval(difference)}"
    assert "2 |\n\n" in out  # an empty line between the table and the sentence
    assert "BatchNorm" not in out


def test_compare_report_shows_only_the_compared_cells(tmp_path, capsys):
    command = ["compare", "digits", "--epochs", "0.2", "--seeds", "1", "--out", str(tmp_path)]
    assert main([*command, "--methods", "erm", "sam", "--lr", "0.05"]) == 0
    assert main([*command, "--methods", "erm", "--lr", "0.2"]) == 0
    page = tmp_path / "digits" / "report" / "report.html"
    assert f"report: {page}" in capsys.readouterr().out
    lead = re.search('<p class="lead">(.*?)</p>', page.read_text()).group(1)
    assert "sam" not in lead
    assert "0.05" not in lead
    table = (page.parent / "tables" / "runs.md").read_text()
    assert [line for line in table.splitlines() if line.startswith("| sam")] == []
    assert "1 run ·" in page.read_text()


def test_compare_methods_with_own_settings(tmp_path, capsys):
    named = ["sam", "sam:rho=0.4,average=true", "tsam:num-samples=2,t=5"]
    command = ["compare", "digits", "--epochs", "0.2", "--rho", "0.2", "--seeds", "2", "--out", str(tmp_path)]
    assert main([*command, "--methods", *named]) == 0
    shown = capsys.readouterr()
    assert not shown.err
    rows = [line.split("|")[1:-1:6] for line in shown.out.splitlines() if line.startswith("| ")]
    assert [[cell.strip() for cell in row] for row in rows[1:]] == [[name, "2"] for name in named]
    assert "digits sam:rho=0.4,average=true seed 1  100%" in shown.out
    configs = [Record(path.parent).config() for path in files_named("config.json", tmp_path)]
    assert len(configs) == 6
    assert {(c.method, c.average, *sorted(c.options.items())) for c in configs} == {
        ("sam", False, ("rho", 0.2)),
        ("sam", True, ("rho", 0.4)),
        ("tsam", False, ("num_samples", 2), ("rho", 0.2), ("t", 5.0)),
    }


def test_compare_visits_few_modules(tmp_path):
    command = ["compare", "digits", "--epochs", "0.1", "--seeds", "1", "--out", str(tmp_path)]
    modules = {file for file, _ in named_functions_of(lambda: main(command)) if file.startswith(("lab/", "cli"))}
    assert (tmp_path / "digits" / "report" / "report.html").exists()
    assert len(modules) <= 25, sorted(modules)


@pytest.mark.slow
def test_two_processes_never_train_the_same_run(tmp_path):
    arguments = ["compare", "digits", "--methods", "erm", "sam", "tsam", "--seeds", "2", "--epochs", "4"]
    arguments += ["--batch-size", "256"]
    both = [start(*arguments, "--num-samples", "2", "--out", str(tmp_path)) for _ in range(2)]
    assert [ends_well(process) for process in both] == [True, True]
    finished = list(tmp_path.rglob("result.json"))
    assert len(finished) == 6
    for result in finished:
        epochs = [json.loads(line)["epoch"] for line in (result.parent / "metrics.jsonl").read_text().splitlines()]
        assert epochs == [float(k) for k in range(1, 5)]  # each epoch once: one process trained it


def test_compare_takes_a_users_method(tmp_path, monkeypatch, capsys):
    """Its options are those of its constructor."""
    monkeypatch.setitem(tiltsam.METHODS, "vasso", VaSSO)
    monkeypatch.setitem(tiltsam.METHODS, "slow", partial(VaSSO, rate=0.01))
    monkeypatch.chdir(tmp_path)
    own = ["vasso:rho=0.5,rate=0.6", "slow", "vasso:rho_schedule=up"]
    assert not main(["compare", "digits", "--methods", "sam", *own, "--epochs", "1", "--seeds", "1"])
    table = capsys.readouterr().out
    assert all(f"| {name} " in table for name in own)
    assert not main(["methods"])
    assert "slow         VaSSO" in capsys.readouterr().out
    page = (tmp_path / "runs" / "digits" / "report" / "tables" / "methods.md").read_text()
    assert "rho=0.5 rate=0.6" in page
    assert "rho=0.05 rate=0.01" in page
    for bad in (["--methods", "vasso:eta=0.5"], ["--methods", "stranger"]):
        assert main(["compare", "digits", *bad])
    errors = capsys.readouterr().err
    assert "vasso has no eta; its options: rho, rate" in errors
    assert "unknown method 'stranger': one of erm, sam, " in errors
    for name in ("vasso", "slow"):  # as outside the script that adds them
        monkeypatch.delitem(tiltsam.METHODS, name)
    assert not main(["sharpness", "runs/digits", "--examples", "50", "--samples", "2", "--no-figures"])
    printed = capsys.readouterr().out
    assert "skipped" not in printed
    assert "vasso:rho=0.5,rate=0.6" in printed


def test_methods_without_docstring_are_listed(monkeypatch, capsys):
    monkeypatch.setitem(tiltsam.METHODS, "bare", lambda base, **options: tiltsam.SAM(base, **options))
    assert main(["methods"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "bare"


def test_compare_report_names_entries_as_typed(tmp_path):
    typed = ["erm", "erm:average=true,example_tilt=-0.4"]
    command = ["compare", "digits", "--epochs", "0.2", "--seeds", "1", "--out", str(tmp_path), "--methods", *typed]
    assert main(command) == 0
    report = tmp_path / "digits" / "report"
    lead = re.search('<p class="lead">(.*?)</p>', (report / "report.html").read_text()).group(1)
    assert all(name in lead for name in typed)
    assert "Plain" not in lead
    assert (report / "tables" / "methods.md").read_text().count("not tuned") == 2
