"""What a user sees while the lab works."""

import functools
import hashlib
import http.server
import re
import sys
import threading
import time
import warnings
from dataclasses import replace

import pytest
import rich
import torch
from rich.console import Console

from helpers.displays import Told
from helpers.lab_files import cifar, dtd, picture
from tiltsam.cli import main
from tiltsam.lab import console
from tiltsam.lab import data as lab_data
from tiltsam.lab import train as training
from tiltsam.lab.compare import compare
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.console import LiveDisplay, RunDisplay, print_table
from tiltsam.lab.data.download import Remote, download
from tiltsam.lab.display import Progress
from tiltsam.lab.records import Record
from tiltsam.lab.train import train

CONFIG = TrainConfig(method="sam", epochs=2)
ROW = {"epoch": 1, "train_loss": 0.5, "validation_accuracy": 0.8, "test_accuracy": 0.9}


@pytest.fixture(params=["terminal", "file"])
def terminal(request, monkeypatch, capsys):
    monkeypatch.setattr(rich, "_console", Console())  # another package may have made it without a terminal
    # The class: capsys has one stream while fixtures are set up, and another in the test.
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda stream: request.param == "terminal")
    monkeypatch.setenv("COLUMNS", "200")
    return request.param == "terminal"


def test_run_display_shows_loss_score_speed_and_time_left(terminal, capsys):
    with RunDisplay() as screen:
        screen.report(CONFIG, Progress(epoch=1.0, passes=300, seconds=90.0, steps=150, done=0.5, row=ROW))
    out = capsys.readouterr().out
    for piece in ("sam seed 0", "50%", "loss 0.500", "test accuracy 90.00", "3.33 passes/s", "1:30 left"):
        assert piece in out
    with RunDisplay() as screen:  # the first epoch has not ended
        screen.report(CONFIG, Progress(passes=10, seconds=10.0, steps=5, done=0.001))
    out = capsys.readouterr().out
    assert "2:46:30 left" in out
    assert "loss" not in out
    with RunDisplay() as screen:
        screen.report(CONFIG, Progress(passes=12_345, seconds=10.0, done=1.0, row=ROW))
    assert "1,234 passes/s" in capsys.readouterr().out


def test_only_a_finished_run_is_at_100_percent(monkeypatch, capsys):
    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)
    with RunDisplay() as screen:
        for done in (0.999, 1.0):
            screen.report(CONFIG, Progress(passes=10, seconds=1.0, done=done, row=ROW))
    assert re.findall(r"\d+%", capsys.readouterr().out) == ["99%", "100%"]


def test_run_display_keeps_a_line_per_finished_run(terminal, capsys):
    with RunDisplay() as screen:
        for seed in range(3):
            screen.report(replace(CONFIG, seed=seed), Progress(epoch=2.0, passes=300, seconds=90.0, done=1.0, row=ROW))
    out = capsys.readouterr().out
    for seed in range(3):
        assert re.search(rf"sam seed {seed} .*test accuracy 90.00  3.33 passes/s *\n", out)


def test_run_display_shows_the_time_left_for_all_runs(terminal, capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("tiltsam.lab.console.time.monotonic", lambda: now[0])
    erm, sam = replace(CONFIG, method="erm"), CONFIG  # twice the passes in as many epochs
    with RunDisplay({}, [erm, sam, replace(sam, seed=1)]) as screen:
        for config, done, seconds, note in (
            (erm, 0.0, 0, "run 1 of 3"),
            (erm, 1.0, 10, "run 1 of 3, about 0:40 left"),
            (sam, 0.5, 10, "run 2 of 3, about 0:30 left"),  # then it diverges
            (replace(sam, seed=1), 0.5, 10, "run 3 of 3, about 0:08 left"),  # 30 s for four of five units
            (replace(sam, seed=1), 1.0, 10, "run 3 of 3"),
        ):
            now[0] += seconds
            screen.report(config, Progress(passes=10, seconds=1.0, done=done, row=ROW))
            if terminal:
                screen._live.refresh()
            shown = re.findall(r"run \d of \d(?:, about [\d:]+ left)?", capsys.readouterr().out)
            assert shown[-1] == note


def test_run_display_shows_percentage_and_time_left_on_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "80")
    runs = [replace(CONFIG, seed=seed) for seed in range(3)]
    with RunDisplay({CONFIG.key(): "tsam:num_samples=1"}, runs) as screen:
        for done in (0.2, 0.5):
            screen.report(runs[0], Progress(passes=1000, seconds=90.0, done=done, row=ROW))
        screen._live.refresh()
        last = capsys.readouterr().out.splitlines()[-1]
    assert re.search(r"50%.*━.*tsam:num_samples=1 seed 0  run 1 of 3, about [\d:]+ left", last)


def test_run_display_leaves_out_runs_of_other_processes(capsys):
    erm, sam = replace(CONFIG, method="erm"), CONFIG
    with RunDisplay({}, [erm, sam, replace(sam, seed=1)]) as screen:
        screen.skip(sam)
        screen.report(erm, Progress(passes=10, seconds=1.0, done=1.0, row=ROW))
        screen.report(replace(sam, seed=1), Progress(passes=10, seconds=1.0, done=1.0, row=ROW))
        screen.report(sam, Progress(passes=10, seconds=1.0, done=1.0, row=ROW))  # the other process died
    lines = capsys.readouterr().out.splitlines()
    assert [re.findall(r"run \d of \d", line) for line in lines] == [["run 1 of 2"], ["run 2 of 2"], []]


def test_compare_counts_the_runs_that_are_not_finished(tmp_path, capsys):
    command = ["compare", "digits", "--epochs", "1", "--out", str(tmp_path), "--seeds", "1", "--methods", "erm"]
    assert main(command) == 0
    assert "run 1 of" not in capsys.readouterr().out
    assert main([*command, "sam", "pgn"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"sam seed 0 .* run 1 of 2", out)
    assert re.search(r"pgn seed 0 .* run 2 of 2$", out, re.MULTILINE)


def test_run_display_prints_the_setup_once(terminal, capsys):
    setup = {"num_train": 1078, "num_validation": 120, "num_test": 599, "num_classes": 10, "noise": 0.2}
    setup |= {"model": "mlp", "num_parameters": 70_403}
    with RunDisplay() as screen:
        for seed in (0, 1):
            screen.setup(TrainConfig(seed=seed), setup)
        screen.setup(TrainConfig("npz:a.npz"), {"num_train": "?", "num_classes": 1, "num_test": 9, "model": "mlp"})
        own = {"num_train": 144, "num_validation": 16, "num_test": 40, "test_split_off": 0.2, "noise": 0}
        screen.setup(TrainConfig("npz:b.npz"), own | {"num_classes": 3, "model": "mlp"})
        screen.setup(TrainConfig("npz:c.npz"), own | {"num_classes": 1, "model": "mlp"})
    out = capsys.readouterr().out.replace("\x1b[2K", "")  # clears the line of the bar
    assert [line.strip() for line in out.splitlines() if "examples" in line] == [
        "digits: 1,078 train, 120 validation, 599 test examples; 10 classes; "
        "20% of the train and validation labels replaced with wrong ones; mlp, 70,403 parameters",
        "npz:a.npz: 9 test examples; regression; mlp",
        "npz:b.npz: 144 train, 16 validation, 40 test examples; test: 20% split off; 3 classes; mlp",
        "npz:c.npz: 144 train, 16 validation, 40 test examples; test: 20% split off; regression; mlp",
    ]


def test_commands_first_print_what_is_trained(tmp_path, capsys):
    train_it = ["train", "digits", "--method", "erm", "--epochs", "0.2", "--noise", "0", "--out", str(tmp_path)]
    compare_it = ["compare", *train_it[1:2], "--methods", "erm", "--seeds", "1", *train_it[4:]]
    for command in (train_it, compare_it, train_it):  # the run of the others is finished
        assert main(command) == 0
        first = capsys.readouterr().out.splitlines()[0]
        assert first.startswith("digits: 1,078 train, 120 validation, 599 test examples; 10 classes; mlp, ")


def test_print_table_breaks_no_word_on_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    numbers = [f"{k}18.6722 ± 12.1214" for k in range(5)]
    print_table("losses", [["trained by", *[f"sam example_tilt_warmup={k}" for k in range(5)]], ["TSAM", *numbers]])
    out = capsys.readouterr().out
    assert all(number in out for number in numbers)
    assert all(f"example_tilt_warmup={k}" in out for k in range(5))
    assert out.count("TSAM") == 3  # two columns fit next to the first
    assert out.count("│") == 2 * 4 + 3  # none is cut off


@pytest.mark.parametrize("terminal", [True, False])
def test_measurement_bars(terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with LiveDisplay() as screen:
        tell = screen.measuring("a model")
        tell(1, 4)
    out, err = capsys.readouterr()
    assert out == ""
    assert "25%" in err if terminal else err == "measuring a model\n"


def test_measurement_bars_print_one_line_per_model_without_a_terminal(capsys):
    with LiveDisplay() as screen:
        for what in ("sam-1: neighbourhood", "sam-1: trace", "erm-2: neighbourhood", "erm-2: trace"):
            screen.measuring(what)
    assert capsys.readouterr().err == "measuring sam-1\nmeasuring erm-2\n"


def test_measuring_stops_the_bar_of_runs(monkeypatch, capsys):
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    with RunDisplay() as screen:
        screen.report(CONFIG, Progress(epoch=1.0, done=1.0, row=ROW))
        time.sleep(0.3)
        assert capsys.readouterr().err == ""  # nothing is measured yet
        tell = screen.measuring("a model")
        capsys.readouterr()
        time.sleep(0.3)
        tell(1, 4)
        screen.print("one is not measured")
        out = err = ""
        end = time.monotonic() + 60
        while "25%" not in err:  # a thread draws it, up to ten times a second
            assert time.monotonic() < end
            time.sleep(0.1)
            seen = capsys.readouterr()
            out, err = out + seen.out, err + seen.err
    assert out.split() == ["one", "is", "not", "measured"]


def test_report_is_called_within_and_after_epochs(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "REPORT_SECONDS", 0.0)
    reports = []

    def report(config, progress):
        assert config is CONFIG
        reports.append((progress.done, progress.seconds, progress.row.get("epoch", 0)))

    train(CONFIG, Record(tmp_path), display=Told(report=report))
    assert reports == sorted(reports)
    assert len(reports) > 20
    assert {row for *_, row in reports} == {0, 1, 2}
    assert [row for *_, row in reports].count(2) == 1  # after the last epoch


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "data.bin").write_bytes(bytes(3_000_000))

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as here:
        thread = threading.Thread(target=here.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{here.server_port}/data.bin"
        here.shutdown()
        thread.join()


def test_download_shows_progress(terminal, server, tmp_path, capsys):
    remote = Remote(server, "md5:" + hashlib.md5(bytes(3_000_000)).hexdigest())
    with RunDisplay() as screen:
        download(remote, tmp_path, screen.loading)
    out = capsys.readouterr().out
    assert "downloading data.bin" in out
    assert "3.0 MB of 3.0 MB" in out


def test_reading_images_shows_progress(terminal, tmp_path, capsys):
    dtd(tmp_path)
    arguments = ["train", "dtd", "--data-root", str(tmp_path), "--out", str(tmp_path), "--image-size", "16"]
    assert main([*arguments, "--model", "cnn", "--epochs", "1", "--batch-size", "2", "--method", "erm"]) == 0
    assert "reading images of train1" in capsys.readouterr().out


def test_image_size_is_what_the_model_sees(tmp_path):
    dtd(tmp_path)
    small = replace(CONFIG, task="dtd", model="cnn", image_size=16)
    assert lab_data.load(small, tmp_path).train.inputs["image"].shape[1:] == (3, 16, 16)
    usual = replace(small, image_size=None)
    assert lab_data.load(usual, tmp_path).train.inputs["image"].shape[1:] == (3, 224, 224)
    assert small.key() != usual.key()


@pytest.mark.parametrize("task", ["cifar100", "digits"])
def test_image_size_where_there_is_nothing_to_resize(task, tmp_path, capsys):
    cifar(tmp_path, fine=True)
    arguments = ["train", task, "--data-root", str(tmp_path), "--out", str(tmp_path), "--image-size", "64"]
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert "image_size" in err
    assert task in err


def test_cli_prints_warnings_as_one_line(tmp_path, capsys):
    for name in ("train/a", "train/b", "test/a", "test/b", "val/a"):
        picture(tmp_path / name / "0.png", 10)
    arguments = ["train", f"images:{tmp_path}", "--out", str(tmp_path / "runs"), "--epochs", "1", "--model", "cnn"]
    arguments += ["--image-size", "8", "--validation", "0"]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(arguments) == 0
        assert warnings.showwarning.__module__ != "tiltsam.cli"  # what was there before is back
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tiltsam train: warning: ")
    assert str(tmp_path / "val") in line
    assert ".py" not in line


def test_compare_loads_data_once_per_seed(tmp_path, monkeypatch):
    loaded = []
    original = lab_data.load

    def load(config, *args, **options):
        loaded.append(config.seed)
        return original(config, *args, **options)

    monkeypatch.setattr(lab_data, "load", load)
    cells = [replace(CONFIG, method=m, seed=s, epochs=1) for s in (0, 1) for m in ("erm", "sam")]
    compare({m: [c for c in cells if c.method == m] for m in ("erm", "sam")}, tmp_path)
    assert loaded == [0, 1]
    scores = [Record.of(tmp_path, cell).result()["score"] for cell in cells]
    alone = train(cells[3], Record(tmp_path / "alone"))
    assert alone["score"] == scores[3]


def test_sweep_loads_data_once_and_shows_it(terminal, tmp_path, capsys, monkeypatch):
    pytest.importorskip("optuna")
    dtd(tmp_path)
    loaded = []
    original = lab_data.load

    def load(config, *args, **options):
        loaded.append(config.seed)
        return original(config, *args, **options)

    monkeypatch.setattr(lab_data, "load", load)
    command = ["sweep", "dtd", "--methods", "erm", "sam", "--grid", "lr=0.01,0.1", "--seeds", "2", "--epochs", "1"]
    command += ["--model", "cnn", "--validation", "0.4", "--image-size", "8", "--batch-size", "2"]
    assert main([*command, "--data-root", str(tmp_path), "--out", str(tmp_path / "runs")]) == 0
    assert loaded == [0, 1]  # trials and tests of seed 0 share one
    assert "reading" in capsys.readouterr().out


def test_sweep_takes_no_abbreviated_options(tmp_path, capsys):
    command = ["sweep", "digits", "--grid", "lr=0.1", "--out", str(tmp_path)]
    with pytest.raises(SystemExit):
        main([*command, "--heart", "1"])
    assert "--heart" in capsys.readouterr().err


def test_unknown_task_creates_no_folder(tmp_path, capsys):
    assert main(["train", "digitz", "--out", str(tmp_path / "runs")]) == 2
    assert "did you mean digits?" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_interrupted_command_says_how_to_resume(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TILTSAM_CHECKPOINT_SECONDS", "0")
    run = ["train", "digits", "--method", "sam", "--epochs", "4", "--out"]
    assert main([*run, str(tmp_path / "unbroken")]) == 0
    with monkeypatch.context() as patch:

        def press(self, config, progress):
            if progress.epoch >= 3:
                raise KeyboardInterrupt

        patch.setattr(RunDisplay, "report", press)
        assert main([*run, str(tmp_path / "broken")]) == 130
    (folder,) = (tmp_path / "broken" / "digits").glob("sam-*/seed-0")
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{folder} is saved up to step 32 (epoch 2): the same command resumes" in line
    assert main([*run, str(tmp_path / "broken")]) == 0
    one, two = (Record(next((tmp_path / n).rglob("result.json")).parent) for n in ("unbroken", "broken"))
    assert [row["epoch"] for row in two.metrics()] == [1, 2, 3, 4]
    assert one.result()["score"] == two.result()["score"]
    assert all(torch.equal(x, two.model()[name]) for name, x in one.model().items())
