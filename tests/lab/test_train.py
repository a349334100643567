"""Training, records and comparison: what is asked is what runs, and nothing is lost on the way."""

import csv
import json
import random
import signal
import time
import warnings
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.torch
import torch

import tiltsam
from helpers.displays import Told
from helpers.lab_files import picture
from helpers.lab_processes import files_named, start
from tiltsam.cli import main
from tiltsam.lab import train as training
from tiltsam.lab.config import TrainConfig, method_options
from tiltsam.lab.data import load
from tiltsam.lab.data.loader import TrainingBatches
from tiltsam.lab.errors import ConfigError, Interrupted, RecordError, TrainError
from tiltsam.lab.flags import field_docs
from tiltsam.lab.models import load_model
from tiltsam.lab.records import Record, read_metrics
from tiltsam.lab.report.runs import read_runs
from tiltsam.lab.tracking import EventFiles
from tiltsam.lab.train import Trainer, train

SMALL = TrainConfig(epochs=2, batch_size=128, options={"num_samples": 2})


def small(**settings):
    """Return the small config with some settings replaced."""
    return SMALL.with_settings(settings)


def weights(record: Record) -> dict[str, torch.Tensor]:
    return record.model()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("method", tiltsam.METHODS)
def test_every_method_trains(method, tmp_path):
    config = small(method=method)
    record = Record.of(tmp_path, config)
    with record.lock() as mine:
        assert mine
        result = train(config, record)
    assert result["epoch"] >= 2
    assert 0.3 < result["score"] <= 1
    rows, damaged = read_metrics(record.folder / "metrics.jsonl")
    assert not damaged
    assert rows[-1]["passes"] == result["passes"]
    assert record.config() == config
    per_step = {"erm": 1, "esam2": 2 + 10 / 3, "tsam": 4, "looksam": 20 / 16, "momentumsam": 1}.get(method, 2)
    assert result["passes"] == pytest.approx(per_step * result["steps"], rel=1e-3)


def test_train_returns_the_result_of_a_finished_run(tmp_path):
    record = Record.of(tmp_path, SMALL)
    with record.lock():
        first = train(SMALL, record)
        assert train(SMALL, record, display=Told(report=lambda *_: pytest.fail("trained again"))) == first


@pytest.fixture
def slow(monkeypatch):
    """By the clock of training a step takes a second and an evaluation an hour, on any machine."""
    now = [0.0]
    monkeypatch.setattr(training, "time", Mock(perf_counter=lambda: now[0]))

    def taking(seconds, original):
        def work(self, *args):
            now[0] += seconds
            return original(self, *args)

        return work

    monkeypatch.setattr(Trainer, "take_step", taking(1.0, Trainer.take_step))
    monkeypatch.setattr(Trainer, "_evaluate", taking(3600.0, Trainer._evaluate))


def test_budget_limits_end_training(tmp_path, slow):
    passes = small(method="sam", epochs=50, passes=40.0)
    result = train(passes, Record(tmp_path / "passes"))
    assert result["passes"] == 40
    seconds = small(method="sam", epochs=1e6, seconds=19.5)
    result = train(seconds, Record(tmp_path / "seconds"))
    assert result["seconds"] == result["steps"] == 20


def test_seconds_exclude_evaluation(tmp_path, slow):
    result = train(small(method="erm"), Record(tmp_path))
    assert result["seconds"] == result["steps"] == 16


@pytest.mark.parametrize(
    ("budget", "steps"),
    [
        ({"method": "esam2", "num_points": 4, "epochs": 50, "passes": 20.0}, 6),  # of 2 + 4/3 passes
        ({"method": "erm", "batch_size": 43, "epochs": 1.36}, 34),  # 25 an epoch
    ],
)
def test_budget_ignores_rounding_errors(budget, steps, tmp_path):
    assert train(small(**budget), Record(tmp_path))["steps"] == steps


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_tiny_budget_takes_one_step(schedule, tmp_path):
    result = train(small(method="erm", seconds=1e-6, schedule=schedule), Record(tmp_path))
    assert result["steps"] == 1
    assert result["train_loss"] > 0
    assert result["lr"] == SMALL.lr


@pytest.mark.parametrize("schedule", ["constant", "step", "cosine", "linear"])
def test_schedules(schedule, tmp_path):
    config = small(method="erm", epochs=8, schedule=schedule, lr=0.1, warmup=0.2)
    train(config, Record(tmp_path))
    rates = [row["lr"] for row in Record(tmp_path).metrics()]
    assert rates[0] < 0.1  # warming up
    assert {"constant": 0.1, "step": 0.001}.get(schedule, 0.0) == pytest.approx(rates[-1], abs=3e-3)


class Stop(Exception):
    pass


@pytest.mark.parametrize(("method", "optimizer"), [("erm", "sgd"), ("tsam", "adamw"), ("rsam", "sgd")])
def test_resumed_run_equals_unbroken_run_bitwise(method, optimizer, tmp_path):
    config = small(method=method, epochs=4, optimizer=optimizer, lr=0.01, schedule="cosine")
    data = load(config)
    Trainer(config, Record(tmp_path / "unbroken"), data).run(lambda p: None, 0.0)

    def stop_at(epoch):
        def report(progress):
            if progress.epoch >= epoch:
                raise Stop

        return report

    (tmp_path / "broken").mkdir()
    broken = Record(tmp_path / "broken")
    for epoch in (2, 3):
        with pytest.raises(Stop):
            Trainer(config, broken, data).run(stop_at(epoch), 0.0)
    Trainer(config, broken, data).run(lambda p: None, 0.0)
    assert same(weights(Record(tmp_path / "unbroken")), weights(broken))
    ignored = ("seconds",)
    one, two = (
        {k: v for k, v in Record(tmp_path / n).result().items() if k not in ignored} for n in ("unbroken", "broken")
    )
    assert one == two


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(
    "settings", [{}, {"average": True}, {"example_tilt": -2.0, "example_ess": 0.7, "example_tilt_warmup": 0.5}], ids=str
)
def test_interrupt_within_an_epoch_saves_the_step_and_resumes_bitwise(settings, tmp_path, monkeypatch):
    config = small(method="tsam", epochs=3, optimizer="adamw", lr=0.01, schedule="cosine", **settings)
    data = load(config)
    train(config, Record(tmp_path / "unbroken"), data=lambda _: data)
    broken, original, taken = Record(tmp_path / "broken"), Trainer.take_step, []
    broken.folder.mkdir()

    def take_step(run, batch):
        taken.append(len(batch))
        if len(taken) in press:
            signal.raise_signal(press[len(taken)])
        return original(run, batch)

    # Within the first epoch of 8 steps, once more in the same one, at its last step, and by SIGTERM in the third.
    press = {3: signal.SIGINT, 5: signal.SIGINT, 8: signal.SIGINT, 20: signal.SIGTERM}
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "take_step", take_step)
        for step, number in press.items():
            with pytest.raises(Interrupted, match=rf"{broken.folder} is saved up to step {step} ") as caught:
                train(config, broken, data=lambda _: data)
            assert caught.value.number == number
            assert len(taken) == step  # it ends after the step that it came in, and none is taken twice
    train(config, broken, data=lambda _: data)
    assert same(weights(Record(tmp_path / "unbroken")), weights(broken))
    one, two = (Record(tmp_path / name).metrics() for name in ("unbroken", "broken"))
    assert [{**row, "seconds": 0} for row in one] == [{**row, "seconds": 0} for row in two]


def test_example_tilt_learns_from_wrong_labels(tmp_path):
    scores = []
    for settings in ({}, {"example_tilt": -2.0, "example_ess": 0.3}):
        config = TrainConfig("digits", "erm", noise=0.4, label_smoothing=0.1, epochs=15, evaluate_every=5, **settings)
        record = Record.of(tmp_path, config)
        scores.append(train(config, record)["score"])
    assert scores[1] > scores[0] + 0.05
    assert all(0.3 <= row["example_ess"] < 1 for row in record.metrics())


@pytest.mark.usefixtures("default_signals")
def test_interrupt_in_the_last_step_keeps_the_result(tmp_path):
    config = small(method="erm", epochs=1)

    def press(config, progress):
        if progress.done >= 1:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted, match="after training finished"):
        train(config, Record(tmp_path), display=Told(report=press))
    assert Record(tmp_path).result() is not None


def test_run_with_a_large_loss_is_resumed(tmp_path, recwarn):
    """Targets of 1e10 have squared errors of 1e20."""
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "x.npz", x=rng.normal(size=(60, 3)), y=1e10 * rng.normal(size=60))
    config = TrainConfig(f"npz:{tmp_path / 'x.npz'}", "erm", lr=1e-13, epochs=2, batch_size=16)
    record = Record(tmp_path / "run")
    train(config, record, until=0.5)
    assert train(config, record)["train_loss"] > 2**63
    assert not [str(w.message) for w in recwarn if "damaged" in str(w.message)]


@pytest.mark.usefixtures("default_signals")
def test_interrupt_before_a_pause_reports_the_checkpoint(tmp_path):
    config = small(method="erm", epochs=2)

    def press(config, progress):
        if progress.epoch == 1:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted, match="is saved up to step") as caught:
        train(config, Record(tmp_path), display=Told(report=press), until=0.5)
    assert "finished" not in str(caught.value)


@pytest.mark.usefixtures("default_signals")
def test_second_interrupt_ends_at_once(tmp_path, monkeypatch):
    original = Trainer.take_step

    def take_step(run, batch):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it went on")
        return original(run, batch)

    monkeypatch.setattr(Trainer, "take_step", take_step)
    with pytest.raises(Interrupted, match=f"{tmp_path} has no checkpoint"):
        train(small(method="erm"), Record(tmp_path))


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        ("train", signal.SIGINT, 130),
        ("train", signal.SIGTERM, 143),
        ("compare", signal.SIGINT, 130),
        ("sweep", signal.SIGTERM, 143),
    ],
)
def test_signals_end_commands_with_their_exit_code(number, code, command, tmp_path, capsys, monkeypatch):
    original, taken = Trainer.take_step, []

    def take_step(run, batch):
        taken.append(run)
        if len(taken) == 4:
            signal.raise_signal(number)
        return original(run, batch)

    more = {
        "train": ["--method", "erm"],
        "compare": ["--methods", "erm"],
        "sweep": ["--methods", "erm", "--grid", "lr=0.1"],
    }
    arguments = [command, "digits", *more[command], "--epochs", "1", "--batch-size", "128", "--out", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "take_step", take_step)
        assert main(arguments) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert "saved up to step 4" in line
    assert "the same command resumes" in line
    assert main(arguments) == 0


def test_paused_run_equals_unbroken_run(tmp_path, capsys):
    config = small(method="tsam", epochs=5)
    whole, paused = Record(tmp_path / "whole"), Record(tmp_path / "paused")
    train(config, whole)
    for until, epoch in ((0.2, 1), (0.2, 1), (0.5, 3)):
        row = train(config, paused, until=until)
        assert row["epoch"] == epoch
        assert "score" not in row
        assert paused.result() is None

    def report(config, progress):
        assert progress.row.get("epoch", 4) > 3  # no epoch again

    train(config, paused, display=Told(report=report))
    assert same(weights(whole), weights(paused))
    arguments = ["train", "digits", "--method", "erm", "--epochs", "4", "--batch-size", "256", "--out", str(tmp_path)]
    assert main([*arguments, "--until", "0.5"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("paused after 2 epochs")
    assert line.endswith("; the same command without --until resumes")
    assert main(arguments) == 0
    assert "after 4 epochs" in capsys.readouterr().out


def test_pause_is_no_candidate_for_the_best_epoch(tmp_path):
    config = small(method="erm", epochs=4, evaluate_every=2, lr=2.0, seed=5)
    train(config, Record(tmp_path), until=0.25)
    result = train(config, Record(tmp_path))
    rows = {row["epoch"]: row["validation_accuracy"] for row in Record(tmp_path).metrics()}
    assert list(rows) == [1, 2, 4]
    assert rows[1] > max(rows[2], rows[4]) == result["best_validation"]


def test_paused_run_returns_its_last_epoch(tmp_path):
    config = small(method="erm", epochs=10, evaluate_every=4)
    record = Record(tmp_path)

    def stop_at_seven(config, progress):
        if progress.epoch >= 7:
            raise Stop

    train(config, record, until=0.2)
    with pytest.raises(Stop):
        train(config, record, display=Told(report=stop_at_seven), checkpoint_seconds=1e9)
    assert train(config, record, until=0.3)["epoch"] == 3  # not 4, of the attempt that was killed
    with pytest.raises(Stop):
        train(config, record, display=Told(report=stop_at_seven), checkpoint_seconds=0)
    row = train(config, record, until=0.5)  # it is at six already, without an evaluation
    assert row["epoch"] == 6
    assert row["steps"] > 0
    with pytest.raises(ConfigError, match=r"until must be in \(0, 1\]"):
        train(config, record, until=0.0)


def test_evaluate_every_does_not_change_training(tmp_path):
    often, seldom = Record(tmp_path / "often"), Record(tmp_path / "seldom")
    config = small(method="sam", epochs=5)
    train(config, often)
    train(replace(config, evaluate_every=2), seldom)
    assert same(weights(often), weights(seldom))
    rows = {row["epoch"]: row for row in often.metrics()}
    assert [row["epoch"] for row in seldom.metrics()] == [2, 4, 5]
    for row in seldom.metrics():
        assert {k: v for k, v in row.items() if k != "seconds"} == {
            k: v for k, v in rows[row["epoch"]].items() if k != "seconds"
        }


def test_evaluation_with_batchnorm_does_not_change_dropout(tmp_path, monkeypatch):
    def build(name, data, init):
        nn = torch.nn
        hidden = (nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5))
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(32, 10))

    monkeypatch.setattr(training, "build", build)
    config = small(method="sam", epochs=3, model="mlp")
    often, seldom, paused = (Record(tmp_path / name) for name in ("often", "seldom", "paused"))
    train(config, often)
    train(replace(config, evaluate_every=3), seldom)
    train(replace(config, evaluate_every=3), paused, until=0.3)
    train(replace(config, evaluate_every=3), paused)
    assert same(weights(often), weights(seldom))
    assert same(weights(often), weights(paused))


def test_ascent_fraction_reduces_passes(tmp_path):
    config = small(method="sam", epochs=1, ascent_fraction=0.25)
    part, whole = Record(tmp_path / "part"), Record(tmp_path / "whole")
    result = train(config, part)
    assert result["passes"] == pytest.approx(1.25 * result["steps"])
    train(replace(config, ascent_fraction=1.0), whole)
    assert not same(weights(part), weights(whole))  # another ascent


def test_split_counts_two_passes(tmp_path):
    config = small(method="tsam", epochs=1, num_samples=4, split=True)
    parts, whole = Record(tmp_path / "parts"), Record(tmp_path / "whole")
    result = train(config, parts)
    assert result["passes"] == pytest.approx(2 * result["steps"])
    train(replace(config, split=False), whole)
    assert not same(weights(parts), weights(whole))
    for other in ({"share_ascent": True}, {"ascent_fraction": 0.5}, {"every": 2}):
        with pytest.raises(ConfigError, match="split"):
            config.with_settings(other)
    with pytest.raises(ConfigError, match=r"got 1 of \d+ training examples"):
        train(replace(config, batch_size=4), Record(tmp_path / "small"))


def test_concurrent_has_no_effect_on_cpu(tmp_path):
    config = small(epochs=1)
    plain, other = Record(tmp_path / "plain"), Record(tmp_path / "other")
    train(config, plain)
    train(replace(config, concurrent=True), other)
    assert same(weights(plain), weights(other))
    with pytest.raises(ConfigError, match="share_ascent"):
        config.with_settings({"concurrent": True, "share_ascent": True})
    with pytest.raises(ConfigError, match="sam has no concurrent"):
        small(method="sam", concurrent=True)


@pytest.mark.parametrize(("tilt", "graphs"), [(0.0, 1), (-0.5, 2)])
def test_compiled_model_and_tilt_train_alike(tmp_path, monkeypatch, tilt, graphs):
    compiled = []

    def compile_(model):
        compiled.append(model)
        return torch._dynamo.optimize("eager")(model)  # the graph, without the minute that compiling it takes

    monkeypatch.setattr(torch, "compile", compile_)
    plain, other = Record(tmp_path / "plain"), Record(tmp_path / "other")
    config = small(method="sam", epochs=1, example_tilt=tilt)
    train(config, plain)
    assert not compiled
    train(replace(config, compile=True), other)
    assert len(compiled) == graphs
    assert same(weights(plain), weights(other))


def test_failed_compilation_raises_train_error(tmp_path, monkeypatch):
    def fail(graph, inputs):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", lambda model: torch._dynamo.optimize(fail)(model))
    config = small(method="sam", epochs=1, compile=True)
    with pytest.raises(TrainError, match="--compile"):
        train(config, Record(tmp_path))


def ends_well(process) -> bool:
    process.join(240)
    return process.exitcode == 0


def lines(out: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in files_named("metrics.jsonl", out))


@pytest.mark.slow
def test_run_killed_ten_times_equals_unbroken_run(tmp_path):
    command = ["train", "digits", "--epochs", "60", "--num-samples", "2", "--batch-size", "256", "--out"]
    assert ends_well(start(*command, str(tmp_path / "unbroken")))
    rng, broken = random.Random(0), tmp_path / "broken"
    for _ in range(10):
        before = lines(broken)
        process = start(*command, str(broken))
        while lines(broken) == before:
            assert process.is_alive()
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.15))  # within a step, an evaluation, a checkpoint
        assert process.is_alive()
        process.kill()
        process.join()
    assert ends_well(start(*command, str(broken)))
    one, two = (Record(next((tmp_path / n).rglob("result.json")).parent) for n in ("unbroken", "broken"))
    assert same(weights(one), weights(two))
    assert [row["epoch"] for row in two.metrics()] == [float(k) for k in range(1, 61)]


def test_damaged_checkpoint_falls_back_to_previous(tmp_path):
    config = small(method="sam", epochs=6)
    data, record = load(config), Record(tmp_path / "run")

    def stop(progress):
        if progress.epoch >= 4:
            raise Stop

    record.folder.mkdir()
    with pytest.raises(Stop):
        Trainer(config, record, data).run(stop, 0.0)
    places = sorted(p.name for p in (record.folder / "checkpoints").iterdir())
    assert places == ["000002", "000003"]  # the last two
    newest = record.folder / "checkpoints" / "000003" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-7] + b"damaged")
    with pytest.warns(RuntimeWarning, match=r"000003 is damaged .*model.safetensors"):
        checkpoint = record.load()
    assert checkpoint.state["epoch"] == 2
    with pytest.warns(RuntimeWarning, match="damaged"):
        Trainer(config, record, data).run(lambda p: None, 100.0)
    unbroken = Record(tmp_path / "unbroken")
    Trainer(config, unbroken, data).run(lambda p: None, 100.0)
    assert same(weights(record), weights(unbroken))


def test_damaged_checkpoints_are_reported_before_training_starts_again(tmp_path):
    record = Record(tmp_path)
    train(small(method="sam"), record, until=0.1)
    (only,) = (tmp_path / "checkpoints").iterdir()
    (only / "manifest.json").write_text("{}")
    with pytest.warns(RuntimeWarning, match="damaged and skipped"), pytest.warns(RuntimeWarning, match="beginning"):
        assert record.load() is None


def test_begin_removes_drafts_of_killed_processes(tmp_path):
    record = Record(tmp_path)
    train(small(method="erm"), record, until=0.5)
    (tmp_path / "checkpoints" / ".000002.1").mkdir()
    (tmp_path / "checkpoints" / ".000002.1" / "model.safetensors").write_bytes(b"half a mod")
    (tmp_path / ".model.safetensors.1").write_bytes(b"half a mod")
    (tmp_path / ".flatness.json.1").write_text("another command's")
    train(small(method="erm", epochs=4), record, until=0.6)
    assert [p.name for p in tmp_path.rglob(".*")] == [".flatness.json.1"]


def test_finished_run_is_tidied_after_an_interrupt(tmp_path, monkeypatch):
    config, record = small(method="erm"), Record(tmp_path)
    train(config, record, until=0.5)
    with monkeypatch.context() as patch:
        patch.setattr("tiltsam.lab.records.shutil.rmtree", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(config, record)
    assert record.result() is not None
    for name in ("config.json", "environment.json", "model.safetensors", "result.json", "diverged.txt"):
        (tmp_path / f".{name}.1").write_text("half")
    train(config, record)
    assert not (tmp_path / "checkpoints").exists()
    assert not list(tmp_path.rglob(".*"))


def test_metrics_of_a_killed_attempt_are_dropped(tmp_path):
    """It was ahead of the one that finished: of its later epochs none may stay."""
    for epoch in (1, 2, 3, 4):
        Record(tmp_path).log(epoch=epoch, steps=10 * epoch, train_loss=1.0)
    for epoch in (2, 2.5):
        Record(tmp_path).log(epoch=epoch, steps=10 * epoch, train_loss=0.5)
    rows, damaged = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["epoch"], row["train_loss"]) for row in rows] == [(1, 1.0), (2, 0.5), (2.5, 0.5)]
    assert not damaged
    (tmp_path / "config.json").write_text("{}")
    (run,) = read_runs([tmp_path]).runs
    assert run.rows == rows
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6
    pytest.importorskip("tensorboard")
    board, writer = EventFiles("tensorboard", Record(tmp_path)), Mock()
    board._writer = writer
    (tmp_path / "tensorboard").mkdir()
    board.update()
    assert [call.args for call in writer.add_scalar.call_args_list] == [
        ("train/loss", row["train_loss"], row["steps"]) for row in rows
    ]


def test_divergence_in_the_last_step_has_no_result(tmp_path):
    config = small(method="erm", epochs=1, batch_size=2000, lr=1e38)  # one step, from a finite loss
    with pytest.raises(TrainError, match=r"not finite after epoch 1: lower lr$"):
        train(config, Record(tmp_path))
    assert Record(tmp_path).result() is None
    assert Record(tmp_path).metrics() == []


def test_locked_run_is_refused(tmp_path, capsys):
    config = TrainConfig(epochs=2)
    with Record.of(tmp_path, config).lock() as mine:
        assert mine
        assert main(["train", "digits", "--epochs", "2", "--out", str(tmp_path)]) == 2
    assert "another process is training this run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "digitz"], "digitz"),
        (["train", "digits", "--method", "adam"], "unknown method 'adam'"),
        (["train", "digits", "--model", "resnet18"], "resnet18"),
        (["train", "digits", "--lr", "0"], "lr must be > 0, got 0.0"),
        (["train", "digits", "--lr", "inf"], "lr must be finite, got inf"),
        (["train", "digits", "--weight-decay", "-1"], "weight_decay must be in [0, inf), got -1.0"),
        (["train", "digits", "--momentum", "-1"], "momentum must be in [0, inf), got -1.0"),
        (["compare", "digits", "--methods", "erm", "pgn", "--alpha", "2"], "alpha must be a number in [0, 1], got 2.0"),
        (["train", "digits", "--rho", "-1"], "rho must be a finite number >= 0, got -1.0"),
        (["train", "digits", "--validation", "1.5"], "validation must be in [0, 1), got 1.5"),
        (["train", "digits", "--device", "gpu"], "unknown device 'gpu'"),
        (["train", "digits", "--device", "meta"], "device 'meta' is not available"),
        (["train", "digits", "--batch-size", "1"], "got 1 of 1078 training examples"),
        (["train", "digits", "--validation", "0.999"], "1 of 1 training examples"),
        (["train", "digits", "--batch-size", "4", "--ascent-fraction", "0.25"], "got 1 of 1078 training examples"),
        (["train", "digits", "--split", "--num-samples", "65"], "got 65"),
        (["train", "digits", "--seed", str(2**63)], f"seed must be in [0, 2^63), got {2**63}"),
        (["train", "digits", "--seed", "-1"], "seed must be in [0, 2^63), got -1"),
        (["train", "digits", "--epochs", "inf"], "epochs, passes or seconds must be finite"),
        (["train", "cifar100", "--data-root", "/nonexistent"], "/nonexistent"),
        (["compare", "digits", "--seeds", "0"], "seeds must be at least 1, got 0"),
        (["compare", "digits", "--methods", "sam:t=5"], "'sam:t=5': sam has no t"),
        (["compare", "digits", "--methods", "adam:rho=5"], "unknown method 'adam'"),
        (["compare", "digits", "--methods", "sam:rho"], "got 'sam:rho"),
        (["compare", "digits", "--methods", "sam:rho=1,rho=2"], "got 'sam:rho"),
        (["compare", "digits", "--methods", "sam:rho=big"], "'sam:rho=big': rho must be a number, got 'big'"),
        (["compare", "digits", "--methods", "sam:lr=nan"], "lr must be > 0, got nan"),
        (["compare", "digits", "--methods", "sam:rho=-1"], "rho must be a finite number >= 0, got -1.0"),
        (["compare", "digits", "--methods", "sam:rhoo=1"], "'sam:rhoo=1': sam has no rhoo; its options: rho"),
        (["compare", "digits", "--methods", "erm", "sam", "--t", "5"], "t is not a setting of erm, sam"),
        (["compare", "digits", "--methods", "sam:seed=1"], "seed must be the same for all methods"),
        (["compare", "digits", "--methods", "sam:noise=0"], "noise must be the same for all methods"),
        (["compare", "digits", "--methods", "sam:average=yes"], "average must be one of true, false, got 'yes'"),
        (
            ["compare", "digits", "--methods", "tsam:sampler=x"],
            "got 'x'",
        ),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_user_errors_are_one_line_and_exit_2(arguments, says, tmp_path, capsys):
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err.strip()
    assert says in error
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [("label-smoothing", "0.1", "must be 0"), ("class-tilt", "0.1", "must be None"), ("loss", "gce", "must be cross-")],
)
def test_settings_of_classifications_are_refused_for_a_regression(flag, value, says, tmp_path, capsys):
    np.savez(tmp_path / "a.npz", x=np.random.default_rng(0).normal(size=(40, 2)), y=np.arange(40) / 7)
    arguments = ["train", f"npz:{tmp_path / 'a.npz'}", f"--{flag}", value, "--out", str(tmp_path / "runs")]
    assert main(arguments) == 2
    assert f"{flag.replace('-', '_')} {says}" in capsys.readouterr().err
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="there is one")
def test_missing_device_is_refused(tmp_path, capsys):
    assert main(["train", "digits", "--device", "mps", "--out", str(tmp_path)]) == 2
    assert "device 'mps' is not available here: use --device cpu" in capsys.readouterr().err


def test_largest_seed_trains(tmp_path):
    for method in ("tsam", "rsam"):
        config = small(method=method, seed=2**63 - 1, epochs=0.1)
        assert train(config, Record(tmp_path / method))["steps"] > 0


def test_batch_of_one_image_trains_with_batchnorm(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((8, 1, 8, 8), np.uint8), y=np.arange(8) % 2)
    config = TrainConfig(f"npz:{tmp_path / 'a.npz'}", "erm", "cnn", epochs=1, batch_size=1)
    before = Trainer(config, Record(tmp_path / "run"), load(config)).model.state_dict()
    assert all(int(x) == 0 for name, x in before.items() if name.endswith("num_batches_tracked"))
    assert train(config, Record(tmp_path / "run"))["steps"] > 1


def arrays(path: Path, shift: float) -> str:
    rng = np.random.default_rng(0)
    np.savez(path, x=rng.random((40, 3)) + shift, y=np.arange(40) % 2)
    return f"npz:{path}"


def test_result_of_other_data_is_not_reused(tmp_path, capsys):
    task = arrays(tmp_path / "a.npz", 0.0)
    command = ["compare", task, "--methods", "erm", "--epochs", "1", "--seeds", "1", "--out", str(tmp_path / "runs")]
    assert main(command) == 0
    assert main(command) == 0  # the same data, the same result
    record = Record(next((tmp_path / "runs").rglob("config.json")).parent)
    load_model(record, load(record.config()))
    arrays(tmp_path / "a.npz", 1.0)
    capsys.readouterr()
    assert main(command) == 2
    assert "changed since this run" in capsys.readouterr().err
    with pytest.raises(RecordError, match="changed since this run"):
        load_model(record, load(record.config()))
    load_model(record, replace(load(record.config()), name="another task"))
    (tmp_path / "a.npz").unlink()
    assert main(command) == 0  # gone is not changed


def test_resume_refuses_other_data(tmp_path):
    config = TrainConfig(arrays(tmp_path / "a.npz", 0.0), "erm", epochs=4)
    record = Record(tmp_path / "run")
    train(config, record, until=0.5)
    arrays(tmp_path / "a.npz", 1.0)
    with pytest.raises(RecordError, match="changed since this run"):
        train(config, record)
    kept = json.loads((record.folder / "environment.json").read_text())
    del kept["data"]
    (record.folder / "environment.json").write_text(json.dumps(kept))
    assert train(config, record)["epoch"] == 4  # of a record without a fingerprint nothing is known


def test_full_disk_keeps_the_checkpoint(tmp_path, capsys, monkeypatch):
    def full(self, checkpoint):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Record, "save", full)
    monkeypatch.setenv("TILTSAM_CHECKPOINT_SECONDS", "0")
    assert main(["train", "digits", "--epochs", "3", "--out", str(tmp_path)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(["train", "digits", "--epochs", "3", "--out", str(tmp_path)]) == 0


def test_model_that_cannot_be_written_is_one_line(tmp_path, capsys, monkeypatch):
    def full(tensors, path):
        path.write_bytes(b"half a mod")
        raise safetensors.SafetensorError("No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    command = ["train", "digits", "--epochs", "0.1", "--method", "erm", "--out", str(tmp_path)]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "model.safetensors: No space left on device" in error
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.rglob(".*"))
    monkeypatch.undo()
    assert main(command) == 0


def test_unwritable_folder_is_refused(capsys):
    assert main(["train", "digits", "--epochs", "0.1", "--out", "/proc/tiltsam"]) == 2
    assert "cannot write to /proc/tiltsam" in capsys.readouterr().err


def test_checkpoint_seconds_must_be_a_number(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TILTSAM_CHECKPOINT_SECONDS", "often")
    assert main(["train", "digits", "--out", str(tmp_path)]) == 2
    assert "TILTSAM_CHECKPOINT_SECONDS must be a number, got 'often'" in capsys.readouterr().err


def test_load_model_restores_the_weights(tmp_path):
    record = Record(tmp_path / "run")
    config = small(method="sam", epochs=8)
    result = train(config, record)
    data = load(config)
    outputs = load_model(record, data).eval()(*TrainingBatches(data, 64).inputs(data.test))
    accuracy = (outputs.argmax(1) == data.test.targets).float().mean().item()
    assert accuracy == pytest.approx(result["score"], abs=1e-6)


def test_no_best_epoch_without_validation(tmp_path):
    config = small(method="erm", validation=0.0)
    record = Record.of(tmp_path, config)
    train(config, record)
    text = (record.folder / "result.json").read_text()
    assert "NaN" not in text
    assert "best_validation" not in text


def test_rows_and_result_have_calibration_and_class_accuracies(tmp_path):
    config = small(method="erm")
    record = Record(tmp_path)
    result = train(config, record)
    assert record.result() == result
    by_class = result["test_class_accuracies"]
    assert len(by_class) == 10
    assert result["test_worst_class_accuracy"] == min(by_class)
    counts = load(config).test.targets.bincount(minlength=10) / 599
    assert result["score"] == result["test_accuracy"] == pytest.approx(torch.dot(counts, torch.tensor(by_class)).item())
    for row in record.metrics():
        assert list(row).index("test_accuracy") < list(row).index("test_ece")  # the first one is the score
        for name in ("validation_ece", "validation_worst_class_accuracy", "test_ece", "test_worst_class_accuracy"):
            assert 0 <= row[name] <= 1
        assert "test_class_accuracies" not in row


def test_negative_tilt_silences_mislabelled_examples(tmp_path):
    config = small(method="erm", epochs=5, batch_size=64, noise=0.4, example_tilt=-1.0)
    result = train(config, Record(tmp_path / "tilted"))
    assert result["silenced_precision"] > 0.8  # by chance both are 0.4
    assert result["silenced_recall"] > 0.8
    for name, other in {"plain": {"example_tilt": 0.0}, "clean": {"noise": 0.0}}.items():
        result = train(config.with_settings({**other, "epochs": 1}), Record(tmp_path / name))
        assert not [key for key in result if "silenced" in key]


def test_negative_tilt_lists_suspects(tmp_path):
    config = small(method="erm", epochs=5, batch_size=64, noise=0.4, example_tilt=-1.0)
    record = Record(tmp_path)
    result = train(config, record)
    with open(record.folder / "suspects.csv", newline="") as file:
        suspects = list(csv.DictReader(file))
    assert result["num_suspects"] == record.num_suspects() == len(suspects) > 300  # of 1078
    pool, clean = load(config), load(replace(config, noise=0.0))
    labels = dict(zip(pool.rows.tolist(), pool.train.targets.tolist(), strict=True))
    truth = dict(zip(clean.rows.tolist(), clean.train.targets.tolist(), strict=True))
    wrong = [labels[int(s["index"])] != truth[int(s["index"])] for s in suspects]
    assert result["silenced_precision"] == sum(wrong) / len(suspects) > 0.8
    assert sum(wrong[:100]) >= 95
    assert all(int(s["label"]) == labels[int(s["index"])] for s in suspects)
    assert sum(int(s["predicted"]) == truth[int(s["index"])] for s in suspects) > 0.8 * len(suspects)
    losses = [float(s["loss"]) for s in suspects]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("settings", [{}, {"example_tilt": 1.0}, {"class_tilt": 1.0}], ids=str)
def test_no_suspects_without_a_negative_tilt(tmp_path, settings):
    record = Record(tmp_path)
    assert "num_suspects" not in train(small(method="erm", noise=0.2, **settings), record)
    assert not (tmp_path / "suspects.csv").exists()
    assert record.num_suspects() == 0


def test_no_suspicious_label_is_reported(tmp_path, capsys):
    """With a tilt this small no weight is below half the mean."""
    arguments = ["train", "digits", "--method", "erm", "--epochs", "1", "--example-tilt=-1e-6", "--out", str(tmp_path)]
    assert main(arguments) == 0
    assert "no labels look wrong" in capsys.readouterr().out


def test_suspects_survive_resuming_and_tidying(tmp_path):
    config = small(method="erm", example_tilt=-1.0, noise=0.2)
    train(config, Record(tmp_path / "whole"))
    record = Record(tmp_path / "paused")
    train(config, record, until=0.5)
    assert not (record.folder / "suspects.csv").exists()
    train(config, record)
    draft = record.folder / ".suspects.csv.123"  # of a killed process
    draft.write_text("index")
    count = record.num_suspects()
    train(config, record)  # finished
    assert not draft.exists()
    assert record.num_suspects() == count > 0
    assert (record.folder / "suspects.csv").read_bytes() == (tmp_path / "whole" / "suspects.csv").read_bytes()
    (record.folder / "suspects.csv").unlink()
    assert record.num_suspects() == 0


def test_suspects_of_images_are_files(tmp_path):
    for name, level in (("cats", 20), ("dogs", 220)):
        for i in range(20):
            picture(tmp_path / "images" / name / f"{i:02}.png", level)
    wrong = tmp_path / "images" / "cats" / "05.png"
    picture(wrong, 220)
    config = TrainConfig(
        f"images:{tmp_path / 'images'}", "erm", model="cnn", image_size=8, epochs=10, batch_size=8, example_tilt=-1.0
    )
    record = Record(tmp_path / "run")
    train(config, record)
    with open(record.folder / "suspects.csv", newline="") as file:
        first = next(csv.DictReader(file))
    assert (first["example"], first["label"], first["predicted"]) == (str(wrong), "cats", "dogs")


@pytest.mark.parametrize(
    ("settings", "advice"),
    [({}, "--model cnn --image-size 32 is"), ({"image_size": 32}, "--model cnn is"), ({"model": "cnn"}, None)],
    ids=str,
)
def test_default_image_model_warns_on_a_cpu(settings, advice, tmp_path, recwarn):
    for name in ("cats", "dogs"):
        for i in range(5):
            picture(tmp_path / name / f"{i}.png", 20)
    config = TrainConfig(f"images:{tmp_path}", "erm", epochs=1, device="cpu", **settings)
    warnings.simplefilter("always")
    Trainer(config, Record(tmp_path), load(config)).warn_if_slow()
    assert [advice in str(found.message) for found in recwarn] == ([True] if advice else [])


def test_long_tailed_task_has_few_shot_accuracy(tmp_path):
    result = train(small(task="digits-lt", method="erm", epochs=5, batch_size=32), Record(tmp_path / "tailed"))
    assert result["test_few_shot_accuracy"] == pytest.approx(sum(result["test_class_accuracies"][7:]) / 3)
    assert result["test_few_shot_accuracy"] < result["test_accuracy"]
    assert result["test_balanced_accuracy"] == pytest.approx(sum(result["test_class_accuracies"]) / 10)
    assert "test_few_shot_accuracy" not in train(small(method="erm", epochs=1), Record(tmp_path / "usual"))


def test_gce_learns_from_wrong_labels_and_is_tilted(tmp_path):
    config = TrainConfig("digits", "erm", noise=0.4, epochs=15, evaluate_every=5)
    gce = config.with_settings({"loss": "gce"})
    scores = [train(c, Record.of(tmp_path, c))["score"] for c in (config, gce)]
    assert scores[1] > scores[0] + 0.05
    tilted = gce.with_settings({"example_tilt": -1.0, "epochs": 10})
    result = train(tilted, Record.of(tmp_path, tilted))
    assert result["silenced_precision"] > 0.8  # GCE is at most 1/q, so fewer are below half of the mean weight
    assert {"test_ece", "test_worst_class_accuracy"} <= result.keys()


def test_logit_adjustment_helps_rare_classes(tmp_path):
    plain = small(task="digits-lt", method="erm", epochs=4, batch_size=32, lr=0.01)  # rare classes are not fitted yet
    adjusted = plain.with_settings({"loss": "logit-adjusted"})
    one, two = (train(config, Record.of(tmp_path, config)) for config in (plain, adjusted))
    assert two["test_few_shot_accuracy"] > one["test_few_shot_accuracy"] + 0.3
    assert two["test_balanced_accuracy"] > one["test_balanced_accuracy"]


@pytest.mark.parametrize(
    ("tilts", "message"),
    [
        (
            {"example_tilt": -50.0, "example_ess": 0.0, "example_tilt_warmup": 0.0},
            r"^example_tilt -50 leaves .* [0-9]% of the batch: .* or set --example-ess$",
        ),
        ({"example_tilt": -50.0, "class_tilt": -50.0}, r"^example_tilt -50 with class_tilt -50 .* both towards 0$"),
        (
            {"example_tilt": 0.0, "class_tilt": 50.0},
            r"^example_tilt 0 with class_tilt 50 .* move class_tilt towards 0$",
        ),
    ],
)
def test_small_example_ess_warns_once(tilts, message, tmp_path):
    with pytest.warns(RuntimeWarning, match=message) as caught:
        train(small(method="erm", epochs=3, **tilts), Record(tmp_path))
    assert len(caught) == 1


def test_bounded_example_ess_does_not_warn(tmp_path):
    result = train(small(method="erm", example_tilt=-50.0), Record(tmp_path))  # bounded by default
    assert result["example_ess"] >= 0.3


def test_example_ess_with_split_is_relative_to_the_rows_that_the_tilt_sees(tmp_path):
    config = small(method="tsam", num_samples=8, split=True, example_tilt=-1e-3, example_tilt_warmup=0.0)
    assert train(config, Record(tmp_path))["example_ess"] == pytest.approx(1, abs=1e-3)


def test_regression_has_no_class_accuracies(tmp_path):
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    np.savez(tmp_path / "a.npz", x=x, y=x.sum(1))
    result = train(small(task=f"npz:{tmp_path / 'a.npz'}", method="erm", batch_size=16), Record(tmp_path / "run"))
    assert not [name for name in result if "class" in name or "ece" in name]


def test_every_field_is_documented_and_on_the_command_line(capsys):
    docs = field_docs(TrainConfig)
    assert set(docs) == set(TrainConfig.__dataclass_fields__)
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    options = {name for method in tiltsam.METHODS for name in method_options(method)}
    for name in (set(docs) | options) - {"task", "options"}:
        assert f"--{name.replace('_', '-')}" in text


def test_nonfinite_samples_are_reported_after_the_epoch(tmp_path, monkeypatch):
    calls, loss = [], Trainer._loss

    def sometimes_infinite(self, *batch):
        calls.append(batch)
        return loss(self, *batch) * (torch.inf if len(calls) == 4 else 1.0)  # the second sample of the first step

    monkeypatch.setattr(Trainer, "_loss", sometimes_infinite)
    config = small(method="tsam", epochs=1)
    with pytest.warns(RuntimeWarning, match=r"^1 sample had") as caught:
        train(config, Record(tmp_path))
    assert len(caught) == 1
