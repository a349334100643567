"""The command line as a user meets it."""

import errno
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import tiltsam
from tiltsam.cli import main
from tiltsam.lab.devices import code_digest


def test_version_help_and_methods(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"tiltsam {tiltsam.__version__} (code {code_digest()})\n"
    assert main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(tiltsam.METHODS)
    assert all("pass" in line and "`" not in line for line in lines)  # what each costs


@pytest.mark.slow
def test_demo_compares_methods_averages_and_tilts(tmp_path, capsys):
    assert main(["demo", "--passes", "6", "--out", str(tmp_path)]) == 0
    table = capsys.readouterr().out.rpartition("mean ± standard error")[2]
    rows = [line.split()[1] for line in table.splitlines() if "±" in line and line[0] == "|"]
    assert [row.partition(":")[0] for row in rows] == ["erm", "erm", "sam", "sam", "sam", "asam", "tsam", "tsam"]
    assert {"average" in row for row in rows} == {"example_tilt" in row for row in rows} == {True, False}
    assert all("rho=" in row for row in rows if not row.startswith("erm"))
    assert f"runs: {tmp_path / 'digits'}\n" in table
    assert (tmp_path / "digits" / "report" / "report.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "averages and a tilt on digits"),  # the help
        (("bake",), "invalid choice"),
        (("traim", "digits"), "'traim'; did you mean train?"),
        (("toys", "--in"), "--in"),
        (("train", "digits", "--resume"), "--resume; the same command resumes without it"),
        (("toys", "--resume"), "--resume\n"),
        (("train", "digits", "--lr-schedule", "cosine"), "; did you mean --schedule?\n"),
        (("train", "digits", "--batch_size", "8"), "; did you mean --batch-size?\n"),
        (("compare", "digits", "--workers", "2"), "--workers 2\n"),
        (("train", "digits", "--gpu"), "--gpu\n"),
    ],
)
def test_usage_errors_exit_2(arguments, says, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [("compare", "digits", "--seed", "3"), ("toys", "extra"), ("sweep", "--trials", "3")],
    ids=str,
)
def test_usage_errors_print_the_usage_of_the_command(arguments, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith(f"usage: tiltsam {arguments[0]} [-h]")
    assert error.startswith(f"tiltsam {arguments[0]}: error: ")


def test_unwritable_folder_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    assert main(["toys", "--out", str(tmp_path / "file" / "figures")]) == 2
    assert "cannot write to" in capsys.readouterr().err


def test_read_only_folder_is_refused_before_the_work(tmp_path, capsys, monkeypatch):
    def refuse(dir):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(dir))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert main(["toys", "--out", str(tmp_path)]) == 2
    assert f"cannot write to {tmp_path}: Read-only file system" in capsys.readouterr().err


def test_toys_prints_tables_on_one_thread(capsys, monkeypatch):
    from tiltsam.lab.theory import estimators, findings

    small, threads = estimators.study, []

    def study():
        threads.append(torch.get_num_threads())
        return small(num_samples=(1, 3), tilts=(1.0,), num_draws=256)

    monkeypatch.setattr(estimators, "study", study)
    monkeypatch.setattr(findings, "table", lambda: [next(findings._toy1())])
    torch.set_num_threads(2)
    try:
        assert main(["toys", "--no-figures"]) == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert threads == [1]  # more are slower on tensors of this size
    out = capsys.readouterr().out
    assert "1.3704" in out
    assert "uniform" in out


def without(monkeypatch, *packages):
    found = tiltsam.cli.find_spec
    monkeypatch.setattr(tiltsam.cli, "find_spec", lambda name: None if name in packages else found(name))


def test_missing_packages_are_reported_first(tmp_path, capsys, monkeypatch):
    without(monkeypatch, "rich", "safetensors")
    assert main(["train", "digits", "--epochs", "0.1", "--out", str(tmp_path / "runs")]) == 2
    assert capsys.readouterr().err == "tiltsam train: needs rich and safetensors: pip install '.[lab]'\n"
    assert not (tmp_path / "runs").exists()
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "tiltsam report: needs rich and safetensors: pip install '.[lab]'\n"
    assert main(["methods"]) == 0


@pytest.mark.filterwarnings("default:no figures")  # the command prints it
def test_toys_without_matplotlib_prints_tables(tmp_path, capsys, monkeypatch):
    from tiltsam.lab.theory import estimators, findings

    monkeypatch.setattr(estimators, "study", lambda: [])
    monkeypatch.setattr(findings, "table", lambda: [])
    without(monkeypatch, "matplotlib")
    assert main(["toys", "--out", str(tmp_path / "figures")]) == 0
    printed = capsys.readouterr()
    assert printed.err == "tiltsam toys: warning: no figures: matplotlib is not installed: pip install '.[plots]'\n"
    assert "estimator" in printed.out
    assert not (tmp_path / "figures").exists()


def test_errors_are_one_line_without_the_lab_packages(tmp_path, capsys, monkeypatch):
    from tiltsam.lab.theory import findings

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(findings, "table", interrupt)
    for name in ("train", "tasks"):
        monkeypatch.setitem(sys.modules, f"tiltsam.lab.{name}", None)  # as if numpy were missing
    assert main(["toys", "--no-figures"]) == 130
    assert capsys.readouterr().err == "tiltsam toys: interrupted\n"
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("tiltsam report: no run in")


def test_import_error_is_not_reported_as_a_user_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiltsam.lab.data", None)
    with pytest.raises(ImportError, match=r"tiltsam\.lab\.data"):
        main(["tasks"])


def test_interrupted_train_says_how_to_resume(tmp_path, capsys, monkeypatch):
    import tiltsam.lab.train as training

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "train", interrupt)
    assert main(["train", "digits", "--out", str(tmp_path)]) == 130
    assert "the same command resumes" in capsys.readouterr().err


def test_interrupt_during_parsing_is_no_traceback(capsys, monkeypatch):
    monkeypatch.setattr("tiltsam.cli._add_train", Mock(side_effect=KeyboardInterrupt))
    assert main(["methods"]) == 130
    assert capsys.readouterr().err == "tiltsam: interrupted\n"


def test_interrupt_during_import_is_no_traceback(tmp_path):
    root = Path(__file__).parents[1]
    module, name = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]["tiltsam"].split(":")
    (tmp_path / "torch.py").write_text("""
import signal
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    raise ImportError from None  # as extension modules do
""")
    # A shell starts programs in its background with SIGINT ignored, and they pass that on.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    done = subprocess.run(
        [sys.executable, "-c", f"{code}from {module} import {name}; sys.exit({name}())", "methods"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root / 'src'}"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (130, "tiltsam: interrupted\n")


def test_exit_with_triton_prints_no_leaks():
    pytest.importorskip("triton")
    code = "import triton._C.libtriton; from tiltsam.cli import main; main(['methods'])"
    assert not subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True).stderr


ASCII = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


def test_ascii_output_shows_question_marks():
    environment = {**os.environ, **ASCII, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "tiltsam", "methods"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "one pass at ?, bitwise" in done.stdout


def test_toml_file_is_utf8_in_any_locale(tmp_path):
    (tmp_path / "study.toml").write_text('task = "café"\nmethods = ["erm"]\n', encoding="utf-8")
    command = [sys.executable, "-m", "tiltsam", "sweep", str(tmp_path / "study.toml")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **ASCII})
    assert (done.returncode, done.stderr.partition(":")[0]) == (2, "tiltsam sweep")
    assert "unknown task 'caf" in done.stderr


@pytest.mark.parametrize("arguments", [["methods"], ["--help"]])
def test_closed_output_is_not_an_error(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "tiltsam", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=buffered)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_train_with_closed_output_says_how_to_resume(tmp_path, capsys, monkeypatch):
    """As in ``tiltsam train … | head``."""
    monkeypatch.setattr("tiltsam.lab.console.RunDisplay.report", Mock(side_effect=BrokenPipeError))
    assert main(["train", "digits", "--epochs", "1", "--out", str(tmp_path)]) == 141
    said = "tiltsam train: stopped: standard output was closed; the same command resumes"
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize("flag", [["--t", "3"], ["--split"]], ids=str)
def test_settings_of_other_methods_are_refused(flag, tmp_path, capsys):
    for command, method in (("train", "--method"), ("compare", "--methods")):
        assert main([command, "digits", method, "sam", "--rho", "0.4", *flag, "--out", str(tmp_path)]) == 2
        assert capsys.readouterr().err == f"tiltsam {command}: sam has no {flag[0].strip('-')}; its options: rho\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("always:.* has one sample")  # the command prints it
def test_tilt_of_one_sample_is_reported(tmp_path, capsys):
    says = "has one sample, so t has no effect: set num_samples to 3 or more"
    small = ["digits", "--epochs", "0.1", "--out", str(tmp_path)]
    tsam, one = ["train", *small, "--method", "tsam"], ["--num-samples", "1"]
    assert main([*tsam, *one, "--t", "5"]) == 0
    assert capsys.readouterr().err == f"tiltsam train: warning: tsam {says}\n"
    for fine in (one, [*one, "--t", "0"], ["--t", "5"], [*one, "--t", "5", "--sampler", "hmc"]):
        assert main([*tsam, *fine]) == 0
        assert not capsys.readouterr().err
    entries = ["erm", "tsam:num_samples=1", "tsam:average=true"]
    assert main(["compare", *small, "--methods", *entries, "--seeds", "1", "--t", "5"]) == 0
    assert [line for line in capsys.readouterr().err.splitlines() if "no effect" in line] == [
        f"tiltsam compare: warning: tsam:num_samples=1 {says}"
    ]
