"""Reading records, damaged ones included."""

import json

import pytest

from helpers.report_runs import rows, write_run
from tiltsam.lab.report import write_report
from tiltsam.lab.report.runs import read_runs


def test_read_runs_skips_damaged_lines(tmp_path):
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


def test_read_runs_drops_rows_of_a_restarted_epoch(tmp_path):
    folder = write_run(tmp_path, finished=False)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(rows(6)[3] | {"train_loss": 9.0}) + "\n" + '{"epoch": 5, "tr')
    reading = read_runs([tmp_path])
    (run,) = reading.runs
    assert [row["epoch"] for row in run.rows] == [1, 2, 3, 4]
    assert run.rows[3]["train_loss"] == 9.0
    assert "line 8" in reading.problems[0].where


@pytest.mark.parametrize("name", ["config.json", "result.json", "setup.json", "environment.json", "flatness.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"], ids=["half", "list", "bytes"])
def test_damaged_file_is_a_problem(tmp_path, name, content):
    write_run(tmp_path, method="erm")
    folder = write_run(tmp_path, method="sam")
    (folder / name).write_bytes(content)
    report = write_report([tmp_path], tmp_path / "report", figures=False)
    assert str(folder / name) in [p.where for p in report.problems]
    assert str(folder / name) in report.page.read_text()


def test_read_runs_drops_duplicates(tmp_path):
    write_run(tmp_path / "a", method="erm", finished=False)
    again = write_run(tmp_path / "b", method="erm")
    reading = read_runs([tmp_path, tmp_path / "a", again])
    assert [run.folder for run in reading.runs] == [again]
    assert reading.problems[0].where == str(tmp_path / "a" / again.relative_to(tmp_path / "b"))
    assert str(again) in reading.problems[0].what
