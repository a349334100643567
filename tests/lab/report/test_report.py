"""write_report and the commands that call it."""

import html

from helpers.report_runs import write_run, write_runs
from tiltsam.cli import main
from tiltsam.lab.report import write_report
from tiltsam.lab.report.runs import read_runs


def test_write_report_writes_tables_and_figures(tmp_path):
    write_runs(tmp_path)
    report = write_report([tmp_path], tmp_path / "out")
    stems = {path.stem for path in report.figures}
    assert {"convergence", "tilt", "effective-samples", "noise-mean", "spectrum", "slice-0"} <= stems
    for path in report.figures:
        assert path.read_bytes()[:4] == {".png": b"\x89PNG", ".pdf": b"%PDF"}[path.suffix]
    assert {p.name for p in report.tables} == {
        f"{n}.{k}" for n in ("methods", "results", "flatness", "runs") for k in ("md", "tex")
    }
    assert "**78.67 ± 0.16**" in (tmp_path / "out" / "tables" / "results.md").read_text()
    assert r"\textbf{78.67 $\pm$ 0.16}" in (tmp_path / "out" / "tables" / "results.tex").read_text()


def test_write_report_overwrites_its_files_only(tmp_path):
    write_run(tmp_path, method="erm")
    out = tmp_path / "out"
    first = write_report([tmp_path], out, figures=False)
    user_file = out / "tables" / "mine.md"
    user_file.write_text("not part of the report")
    write_run(tmp_path, method="sam")
    second = write_report([tmp_path], out, figures=False)
    assert (second.page, second.tables) == (first.page, first.tables)
    assert "sam" in second.page.read_text()
    assert user_file.read_text() == "not part of the report"


def test_write_report_without_matplotlib(tmp_path, monkeypatch, capsys):
    import tiltsam.lab.report as report_package

    monkeypatch.setattr(report_package, "find_spec", lambda name: None)
    write_run(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "pip install '.[plots]'" in out
    assert str(tmp_path / "report" / "report.html") in out
    assert not (tmp_path / "report" / "figures").exists()


def test_compare_writes_report(tmp_path, capsys, monkeypatch):
    import tiltsam.lab.report as report_package

    monkeypatch.setattr(report_package, "draw_figure", lambda figure, path: [])  # slow
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
    *_, summary, folder, last = capsys.readouterr().out.splitlines()
    page = tmp_path / "digits" / "report" / "report.html"
    assert (folder, last) == (f"runs: {tmp_path / 'digits'}", f"report: {page}")
    assert summary.endswith("One seed gives no interval: use several.")
    assert html.escape(summary) in page.read_text()
    assert page.exists()
    assert len(read_runs([tmp_path]).runs) == 2  # the report is not a run
