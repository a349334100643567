"""Trackers show what the record holds, each epoch once, however often the run was interrupted."""

import sys
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType

import pytest

from helpers.displays import Told
from tiltsam.cli import main
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.records import Record
from tiltsam.lab.tracking import TRACKERS
from tiltsam.lab.train import train

needs_tensorboard = pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
CONFIG = TrainConfig(method="sam", epochs=5, batch_size=256)


def shown(record):
    """What TensorBoard reads from a run's folder: by tag, steps and values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(record.folder / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def check(record, epochs=5):
    rows = record.metrics()
    found = shown(record)
    assert len(rows) == epochs
    for tag, name in (("train/loss", "train_loss"), ("test/accuracy", "test_accuracy"), ("run/passes", "passes")):
        assert [step for step, _ in found[tag]] == [row["steps"] for row in rows]
        assert [value for _, value in found[tag]] == pytest.approx([row[name] for row in rows])


class Stop(Exception):
    pass


def stop_at(epoch):
    def report(config, progress):
        if progress.epoch >= epoch:
            raise Stop

    return Told(report=report)


@needs_tensorboard
@pytest.mark.parametrize("from_the_start", [True, False])
def test_resumed_run_writes_every_epoch_once(from_the_start, tmp_path):
    record = Record(tmp_path / "run")
    # The checkpoint is of epoch 1; epochs 2 and 3 are on the board already when they are run again.
    with pytest.raises(Stop):
        train(CONFIG, record, display=stop_at(2), log="tensorboard" if from_the_start else None, checkpoint_seconds=0)
    with pytest.raises(Stop):
        train(CONFIG, record, display=stop_at(3), log="tensorboard" if from_the_start else None, checkpoint_seconds=1e9)
    train(CONFIG, record, log="tensorboard")
    check(record)


@needs_tensorboard
def test_run_finished_without_tracker_is_completed(tmp_path):
    record = Record(tmp_path)
    train(CONFIG, record, until=0.5, log="tensorboard")
    train(CONFIG, record)
    train(CONFIG, record, log="tensorboard")
    check(record)
    files = list((tmp_path / "tensorboard").glob("events.*"))  # which TensorBoard reads in the order of their names
    assert len({path.name.split(".")[3] for path in files}) == len(files) == 2


@needs_tensorboard
def test_epochs_without_evaluation_write_nothing(tmp_path):
    train(replace(CONFIG, evaluate_every=2), Record(tmp_path), log="tensorboard")
    check(Record(tmp_path), epochs=3)  # 2, 4 and the last


@needs_tensorboard
def test_finished_run_is_written_afterwards(tmp_path, capsys):
    run = ["train", "digits", "--epochs", "2", "--method", "erm", "--out", str(tmp_path)]
    assert main(run) == 0
    record = Record(next(tmp_path.rglob("result.json")).parent)
    assert not (record.folder / "tensorboard").exists()
    assert main([*run, "--log", "tensorboard"]) == 0
    check(record, epochs=2)
    files = sorted((record.folder / "tensorboard").iterdir())
    assert main([*run, "--log", "tensorboard"]) == 0
    assert sorted((record.folder / "tensorboard").iterdir()) == files


@needs_tensorboard
def test_compare_writes_event_files_for_each_run(tmp_path):
    arguments = ["compare", "digits", "--methods", "erm", "sam", "--seeds", "1", "--epochs", "2"]
    assert main([*arguments, "--out", str(tmp_path), "--log", "tensorboard"]) == 0
    records = [Record(path.parent) for path in tmp_path.rglob("result.json")]
    assert len(records) == 2
    for record in records:
        check(record, epochs=2)


@pytest.mark.parametrize("command", ["train", "compare", "sweep"])
@pytest.mark.parametrize("name", TRACKERS)
def test_missing_tracker_is_reported(command, name, tmp_path, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    more = ["--grid", "lr=0.1"] if command == "sweep" else []
    assert main([command, "digits", *more, "--out", str(tmp_path / "runs"), "--log", name]) == 2
    assert f"pip install '.[{name}]'" in capsys.readouterr().err.strip().splitlines()[-1]
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


class FakeTracker(ModuleType):
    """A tracker with the functions of wandb and trackio: runs are known by id or name, and steps only increase."""

    def __init__(self, name):
        super().__init__(name)
        self.runs, self.open, self.num_opened = {}, None, 0

    def init(self, *, project, name, config, resume, id=None):
        assert (project, resume, self.open) == ("tiltsam", "allow", None)
        self.open = id or name
        self.num_opened += 1
        self.runs.setdefault(self.open, {"name": name, "config": config, "rows": {}})
        return self

    def log(self, metrics, step):
        rows = self.runs[self.open]["rows"]
        assert step > max(rows, default=0)
        rows[step] = metrics

    def finish(self):
        self.open = None


@pytest.fixture(params=["wandb", "trackio"])
def fake_tracker(request, monkeypatch):
    module = FakeTracker(request.param)
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


def check_online(tracker, record):
    """Compare the only run of a tracker with a record."""
    (run,) = tracker.runs.values()
    rows = record.metrics()
    assert list(run["rows"]) == [row["steps"] for row in rows]
    for row in rows:
        shown = run["rows"][row["steps"]]
        assert (shown["train/loss"], shown["test/accuracy"]) == (row["train_loss"], row["test_accuracy"])
    assert run["config"] == record.config().to_json()
    assert tracker.open is None  # closed


@pytest.mark.parametrize("from_the_start", [True, False])
def test_resumed_run_sends_every_epoch_once(fake_tracker, from_the_start, tmp_path):
    record, log = Record(tmp_path / "digits" / "sam" / "seed-0"), fake_tracker.__name__
    first = log if from_the_start else None
    with pytest.raises(Stop):
        train(CONFIG, record, display=stop_at(2), log=first, checkpoint_seconds=0)
    with pytest.raises(Stop):
        train(CONFIG, record, display=stop_at(3), log=first, checkpoint_seconds=1e9)
    train(CONFIG, record, log=log)
    check_online(fake_tracker, record)
    assert next(iter(fake_tracker.runs.values()))["name"].startswith("digits-sam-seed-0")


def test_finished_run_is_sent_afterwards_once(fake_tracker, tmp_path):
    run = ["train", "digits", "--epochs", "2", "--method", "erm", "--out", str(tmp_path)]
    assert main(run) == 0
    for _ in range(2):
        assert main([*run, "--log", fake_tracker.__name__]) == 0
    check_online(fake_tracker, Record(next(tmp_path.rglob("result.json")).parent))
    assert fake_tracker.num_opened == 1


def test_sweep_sends_all_runs(fake_tracker, tmp_path):
    sweep = ["sweep", "digits", "--methods", "erm", "--grid", "lr=0.01,0.1", "--epochs", "1", "--seeds", "1"]
    assert main([*sweep, "--out", str(tmp_path), "--log", fake_tracker.__name__]) == 0
    assert len(fake_tracker.runs) == len(list(tmp_path.rglob("result.json"))) == 2  # the choice has been trained


@needs_tensorboard
def test_tensorboard_does_not_change_the_run(tmp_path):
    with_board, without = Record(tmp_path / "a"), Record(tmp_path / "b")
    for record, log in ((with_board, "tensorboard"), (without, None)):
        train(replace(CONFIG, epochs=2), record, log=log)
    assert with_board.config() == without.config()
    assert with_board.result()["score"] == without.result()["score"]
