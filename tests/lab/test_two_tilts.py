"""The experiment of ``tiltsam reproduce two-tilts``: equal trials, paired differences, and the numbers it shows."""

import math
from dataclasses import replace

import pytest

from tiltsam.cli import main
from tiltsam.lab.flags import method_configs
from tiltsam.lab.grids import make_entries
from tiltsam.lab.records import Record
from tiltsam.lab.report.runs import find_run_folders
from tiltsam.lab.stats import confidence_interval, mean_of
from tiltsam.lab.two_tilts import GRID, STUDIES, TRIALS, num_runs, result_rows, run_study, select_studies


@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda study: study.name)
def test_rows_have_equal_trials_and_passes(study):
    entries, notes = make_entries(study.base, [row.entry for row in study.rows], GRID, TRIALS, "grid")
    assert {entry.trials for entry in entries} == {TRIALS}
    assert notes == []
    assert {(entry.config.epochs, entry.config.passes, entry.config.noise) for entry in entries} == {
        (math.inf, study.base.passes, study.base.noise)
    }
    names = [row.name for row in study.rows]
    assert all(row.reference in ("", *names[:i]) for i, row in enumerate(study.rows))
    assert num_runs(study, 5) == 9 * len(names)


def test_tilted_rows_differ_from_their_reference_by_the_tilt():
    study = STUDIES["noise-0.4"]
    configs = method_configs(study.base, [row.entry for row in study.rows])
    by_name = {row.name: configs[row.entry] for row in study.rows}
    tilted = [row for row in study.rows if row.name.endswith(", tilt")]
    assert len(tilted) == 6
    for row in tilted:
        assert by_name[row.name] == by_name[row.reference].with_settings({"example_tilt": -1.0})
    assert [name for name, config in by_name.items() if config.loss == "gce"] == ["ERM, GCE", "SAM, GCE"]


def test_run_study_reports_paired_differences(tmp_path):
    (study,) = select_studies("two-tilts/long-tail", ["erm"])
    study = replace(study, rows=study.rows[:2])
    result = run_study(study, tmp_path, seeds=2, scale=0.02, device="cpu")
    headings, plain, tilted = result_rows(study, result)
    assert headings[2:] == [
        *("balanced accuracy", "difference", "95% interval", "few-shot", "worst class", "ECE", "seeds")
    ]
    scores = [
        [100 * test.user_attrs["result"]["test_balanced_accuracy"] for _, test in sorted(entry.tests.items())]
        for entry in result.entries
    ]
    mean = mean_of([b - a for a, b in zip(*scores, strict=True)])
    low, high = confidence_interval(mean)
    assert plain[3:5] == ["", ""]
    assert tilted[3:5] == [f"{mean.value:+.2f}", f"[{low:+.2f}, {high:+.2f}]"]
    assert tilted[2].startswith(f"{mean_of(scores[1]).value:.2f} ± ")
    assert tilted[-1] == "2"


def test_reproduce_list_of_two_tilts(capsys):
    assert main(["reproduce", "--list", "two-tilts", "--seeds", "1", "--methods", "erm"]) == 0
    out = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if "two-tilts/" in line]
    assert [row[0] for row in cells] == [f"two-tilts/{name}" for name in STUDIES]
    assert cells[-1] == ["two-tilts/long-tail", "15", "7,800"]  # three rows of four trials and a test, 520 passes each


def test_reproduce_two_tilts_shows_what_is_silenced(tmp_path, capsys):
    run = ["reproduce", "two-tilts/noise-0.4", "--methods", "erm", "--scale", "0.02", "--seeds", "1", "--device", "cpu"]
    run += ["--precision", "bf16"]
    assert main([*run, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    folder = tmp_path / "reproduced" / "two-tilts-noise-0.4"
    assert "digits, 40% noisy labels, scale 0.02: 1 seed, mean" in out
    table = (folder / "tables.md").read_text(encoding="utf-8")
    assert "digits, 40% noisy labels, scale 0.02" in table
    assert "ERM, averaged, tilt" in table
    assert "silenced precision" in table
    assert str(folder / "report.html") in out
    assert {Record(run).config().precision for run in find_run_folders([tmp_path]).runs} == {"bf16"}
    assert "Silenced" in (folder / "report.html").read_text()


@pytest.mark.parametrize("wrong", [("--seeds", "0"), ("--scale", "nan"), ("--scale", "2")])
def test_reproduce_two_tilts_refuses_wrong_numbers_at_once(tmp_path, capsys, wrong):
    assert main(["reproduce", "two-tilts", *wrong, "--out", str(tmp_path / "runs")]) == 2
    assert wrong[1] in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
