"""Finding runs, and the runs that tested the choices of a sweep."""

import json

import pytest

from helpers.report_runs import write_run
from tiltsam.cli import main
from tiltsam.lab.errors import RecordError
from tiltsam.lab.report import runs
from tiltsam.lab.report.runs import SweepTestRun, find_run_folders, save_entries, sweeps_of, typed_entries


def test_find_run_folders_follows_symlinks(tmp_path):
    far = write_run(tmp_path / "far", method="erm")
    near = write_run(tmp_path / "runs", task="dtd", method="sam")
    (tmp_path / "runs" / "digits").symlink_to(tmp_path / "far" / "digits")
    (tmp_path / "runs" / "round").symlink_to(tmp_path / "runs")
    assert [run.resolve() for run in find_run_folders([tmp_path / "runs"]).runs] == [far.resolve(), near.resolve()]


def test_find_run_folders_refuses_folder_without_runs(tmp_path, capsys):
    with pytest.raises(RecordError, match=str(tmp_path)):
        find_run_folders([tmp_path])
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert str(tmp_path / "nowhere") in capsys.readouterr().err


def test_sweep_stands_for_the_runs_that_tested_its_choices(tmp_path):
    trial, test = (write_run(tmp_path, method="sam", lr=0.1, seed=seed) for seed in (0, 1))
    sweep = tmp_path / "sweeps" / "study"
    sweep.mkdir(parents=True)
    run = {"run": str(test.relative_to(tmp_path)), "seed": 1, "state": "done"}
    (sweep / "sweep.json").write_text(json.dumps({"methods": {"sam:lr=0.1": {"test": {"runs": [run]}}}}))
    assert runs.read_sweep(sweep).tests == {test: SweepTestRun("sam:lr=0.1", 1, "done")}
    found = find_run_folders([sweep])
    assert (found.runs, [s.folder for s in found.sweeps]) == ([test], [sweep])
    assert [s.folder for s in sweeps_of([trial])] == [sweep]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"methods": {"sam": {"test": {"runs": [1]}}}}'])
def test_damaged_sweep_is_named_or_skipped(content, tmp_path):
    run, sweep = write_run(tmp_path, method="sam"), tmp_path / "sweeps" / "study"
    sweep.mkdir(parents=True)
    (sweep / "sweep.json").write_text(content)
    with pytest.raises(RecordError, match=r"sweep\.json"):
        runs.read_sweep(sweep)
    assert sweeps_of([run]) == []


def test_entries_of_the_last_comparison_come_first(tmp_path):
    erm, sam, asam = (write_run(tmp_path, method=method) for method in ("erm", "sam", "asam"))
    task = tmp_path / "digits"
    save_entries(task, {erm.parent.name: "erm", sam.parent.name: "sam"})
    save_entries(task, {asam.parent.name: "asam", sam.parent.name: "sam:rho=0.05", "gone": "pgn"})
    typed = typed_entries(find_run_folders([tmp_path]))
    assert list(typed.items()) == [(asam, "asam"), (sam, "sam:rho=0.05"), (erm, "erm")]
    assert typed_entries(find_run_folders([sam])) == {sam: "sam:rho=0.05"}
    for damaged in ("{", "[]", f'{{"{sam.parent.name}": 1}}'):
        (task / "entries.json").write_text(damaged)
        assert typed_entries(find_run_folders([tmp_path])) == {}
