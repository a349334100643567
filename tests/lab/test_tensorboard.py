"""TensorBoard sees what the record holds, each epoch once, however often the run was broken off."""

import sys
from dataclasses import replace

import pytest

from tiltsam.cli import main
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.records import Record
from tiltsam.lab.train import train

pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install '.[tensorboard]'")

CONFIG = TrainConfig(method="sam", epochs=5, batch_size=256)


def shown(record):
    """What TensorBoard reads from a run's folder: by tag, steps and values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(record.folder / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def check(record, epochs=5):
    rows, _ = record.metrics()
    found = shown(record)
    assert len(rows) == epochs
    for tag, name in (("train/loss", "train_loss"), ("test/accuracy", "test_accuracy"), ("run/passes", "passes")):
        assert [step for step, _ in found[tag]] == [row["steps"] for row in rows]
        assert [value for _, value in found[tag]] == pytest.approx([row[name] for row in rows])


class Stop(Exception):
    pass


def stop_at(epoch):
    def report(progress):
        if progress.epoch >= epoch:
            raise Stop

    return report


@pytest.mark.parametrize("from_the_start", [True, False])
def test_resumed_run_writes_every_epoch_once(from_the_start, tmp_path):
    record = Record(tmp_path / "run")
    # The checkpoint is of epoch 1; epochs 2 and 3 are on the board already when they are run again.
    with pytest.raises(Stop):
        train(CONFIG, record, report=stop_at(2), tensorboard=from_the_start, checkpoint_seconds=0)
    with pytest.raises(Stop):
        train(CONFIG, record, report=stop_at(3), tensorboard=from_the_start, checkpoint_seconds=1e9)
    train(CONFIG, record, tensorboard=True)
    check(record)


def test_epochs_without_evaluation_write_nothing(tmp_path):
    train(replace(CONFIG, evaluate_every=2), Record(tmp_path), tensorboard=True)
    check(Record(tmp_path), epochs=3)  # 2, 4 and the last


def test_finished_run_is_written_afterwards(tmp_path, capsys):
    run = ["train", "digits", "--epochs", "2", "--method", "erm", "--out", str(tmp_path)]
    assert main(run) == 0
    record = Record(next(tmp_path.rglob("result.json")).parent)
    assert not (record.folder / "tensorboard").exists()
    assert main([*run, "--tensorboard"]) == 0
    check(record, epochs=2)
    files = sorted((record.folder / "tensorboard").iterdir())
    assert main([*run, "--tensorboard"]) == 0
    assert sorted((record.folder / "tensorboard").iterdir()) == files


def test_compare_writes_event_files_for_each_run(tmp_path):
    arguments = ["compare", "digits", "--methods", "erm", "sam", "--seeds", "1", "--epochs", "2"]
    assert main([*arguments, "--out", str(tmp_path), "--tensorboard"]) == 0
    records = [Record(path.parent) for path in tmp_path.rglob("result.json")]
    assert len(records) == 2
    for record in records:
        check(record, epochs=2)


def test_missing_tensorboard_is_reported(tmp_path, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert main(["train", "digits", "--out", str(tmp_path), "--tensorboard"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "pip install '.[tensorboard]'" in line


def test_tensorboard_does_not_change_the_run(tmp_path):
    with_board, without = Record(tmp_path / "a"), Record(tmp_path / "b")
    for record, tensorboard in ((with_board, True), (without, False)):
        train(replace(CONFIG, epochs=2), record, tensorboard=tensorboard)
    assert with_board.config() == without.config()
    assert with_board.result()["score"] == without.result()["score"]
