"""Records: damaged files are reported in one line that names the file."""

import json
import os
import resource
import shutil
import warnings
from dataclasses import fields, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from tiltsam.cli import main
from tiltsam.lab import flatness as lab_flatness
from tiltsam.lab.compare import compare
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.data import load
from tiltsam.lab.errors import DataError, RecordError
from tiltsam.lab.files import write_json
from tiltsam.lab.flatness import FlatnessPlan, find_runs, measure_runs, save_flatness
from tiltsam.lab.records import Record, read_metrics
from tiltsam.lab.report import write_report
from tiltsam.lab.train import train

QUICK = FlatnessPlan(
    std=(0.01,), num_samples=2, num_ascent_steps=1, num_eigenvalues=1, num_trace_samples=2, num_density_probes=0
)
WHOLE = ["[]", "5", "null", '"text"', "{}", "", "\x00", '{"a": [1]}']
VALUES = [None, [], "text", True, -1, 1e308, {"a": 1}]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A config, its data, a finished run that was measured and one that paused."""
    folder = tmp_path_factory.mktemp("made")
    rng = np.random.default_rng(0)
    np.savez(folder / "a.npz", x=rng.normal(size=(60, 3)), y=np.arange(60) % 2)
    config = TrainConfig(f"npz:{folder / 'a.npz'}", method="sam", epochs=4, batch_size=32, optimizer="adamw")
    data = load(config)
    for name, until in (("finished", 1.0), ("paused", 0.5)):
        train(config, Record.of(folder / name, config), data=lambda _: data, until=until, checkpoint_seconds=0)
    for flat, about in measure_runs(runs := find_runs([folder / "finished"]), plan=QUICK, examples=40):
        save_flatness(runs[flat.name], flat, about)
    return config, data, folder


def mutations(body):
    """Yield texts instead of a JSON object: no object, each entry removed, each entry replaced by other values.

    An entry is replaced by half of the values, in turn, and an entry of a nested object by a quarter.
    """
    yield from WHOLE
    for number, path in enumerate(_paths(body)):
        yield json.dumps(_changed(body, path))
        share = 2 * len(path)
        for value in VALUES[number % share :: share]:
            yield json.dumps(_changed(body, path, value))


def _paths(body, depth=2):
    for key, value in body.items():
        yield (key,)
        if isinstance(value, dict) and depth > 1:
            yield from ((key, *rest) for rest in _paths(value, depth - 1))


def _changed(body, path, *value):
    body = dict(body)
    if len(path) > 1:
        body[path[0]] = _changed(body[path[0]], path[1:], *value)
    elif value:
        body[path[0]] = value[0]
    else:
        del body[path[0]]
    return body


def commands(made, out):
    """What train, compare, report and sharpness do with a folder of one run."""
    config, data, _ = made
    return {
        "train": lambda: train(config, Record.of(out, config), data=lambda _: data),
        "compare": lambda: compare({"it": [config]}, out),
        "report": lambda: write_report([out], out / "report", figures=False),
        "sharpness": lambda: list(measure_runs(find_runs([out], skip_errors=True), reuse=True, skip_errors=True)),
    }


READ_BY = {
    ("finished", "config.json"): ["report", "sharpness"],
    ("finished", "environment.json"): ["train", "report"],
    ("finished", "result.json"): ["train", "compare", "report"],
    ("finished", "metrics.jsonl"): ["report"],
    ("finished", "flatness.json"): ["report", "sharpness"],
    ("paused", "environment.json"): ["train"],
    ("paused", "metrics.jsonl"): ["train", "report"],
    ("paused", "checkpoints/000002/manifest.json"): ["train", "sharpness"],
    ("paused", "checkpoints/000002/state.json"): ["train", "sharpness"],
}


@pytest.mark.parametrize(("run", "name", "command"), [(*file, c) for file, users in READ_BY.items() for c in users])
def test_damaged_json_is_named_or_skipped(made, run, name, command, tmp_path, monkeypatch):
    config, _, folder = made
    monkeypatch.setattr(lab_flatness, "measure", lambda *args, **options: None)
    source = Record.of(folder / run, config).folder
    lines = (source / name).read_text()
    body = json.loads(lines.splitlines()[-1] if name == "metrics.jsonl" else lines)
    changes_run = command in ("train", "compare")  # then each needs a copy of the run, which takes most of the time
    for number, text in enumerate(mutations(body)):
        out = tmp_path / str(number if changes_run else 0)
        record = Record.of(out, config)
        if changes_run or number == 0:
            shutil.copytree(source, record.folder)
        (record.folder / name).write_text(text)
        message = ""
        try:
            with warnings.catch_warnings(action="ignore"):
                commands(made, out)[command]()
        except RecordError as error:
            message = str(error)
        except DataError:
            assert command == "sharpness"  # another task, which is not there
        except Exception as error:
            raise AssertionError(f"{command} with {name} = {text[:200]}") from error
        named = str(record.folder / name.split("/")[0]) in message or f"{record.folder} changed" in message
        assert not message or (named and "\n" not in message), f"{text[:200]}: {message}"


def test_huge_numbers_in_metrics_are_damage(made, tmp_path):
    config, _, folder = made
    shutil.copytree(folder / "finished", tmp_path / "runs")
    path = Record.of(tmp_path / "runs", config).folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["train_loss"] = rows[2]["test_accuracy"] = -1e308
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "report")]) == 0
    assert f"{path}, line 3" in (tmp_path / "report" / "report.html").read_text()


@pytest.mark.parametrize("command", ["train", "compare"])
def test_damaged_result_ends_a_command_with_exit_2(made, command, tmp_path, capsys):
    config, _, folder = made
    shutil.copytree(folder / "finished", tmp_path / "runs")
    record = Record.of(tmp_path / "runs", config)
    path = record.folder / "result.json"
    path.write_text(path.read_text().replace('"metric"', '"metrid"'))
    arguments = [config.task, "--epochs", "4", "--batch-size", "32", "--optimizer", "adamw"]
    arguments += [
        "--out",
        str(tmp_path / "runs"),
        *(["--method", "sam"] if command == "train" else ["--methods", "sam"]),
    ]
    assert main([command, *arguments]) == 2
    assert str(path) in capsys.readouterr().err


def test_every_flipped_byte_of_a_result_is_detected(made, tmp_path):
    config, _, folder = made
    record = Record(tmp_path)
    raw = (Record.of(folder / "finished", config).folder / "result.json").read_bytes()
    numbers = Record.of(folder / "finished", config).result()
    for i in range(len(raw)):
        (tmp_path / "result.json").write_bytes(raw[:i] + bytes([raw[i] ^ 1]) + raw[i + 1 :])
        try:
            assert record.result() == numbers, i  # a space that became another
        except RecordError:
            continue


def test_result_without_digest_is_read(made, tmp_path):
    config, _, folder = made
    numbers = Record.of(folder / "finished", config).result()
    assert "digest" not in numbers
    (tmp_path / "result.json").write_text(json.dumps(numbers))
    assert Record(tmp_path).result() == numbers


def test_config_types_are_checked(tmp_path):
    for field in fields(TrainConfig):
        (tmp_path / "config.json").write_text(json.dumps({field.name: [1]}))
        with pytest.raises(RecordError, match=rf"config\.json.*{field.name}"):
            Record(tmp_path).config()


def test_partial_metrics_line_is_skipped(tmp_path):
    record = Record(tmp_path)
    record.log(epoch=1, loss=2.0)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 2, "lo')
    record.log(epoch=2, loss=1.0)
    rows, damaged = read_metrics(record.folder / "metrics.jsonl")
    assert [row["loss"] for row in rows] == [2.0, 1.0]
    assert list(damaged) == [2]


def test_log_raises_after_a_partial_write(tmp_path):
    record = Record(tmp_path)
    record.log(epoch=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 5, limits[1]))
    try:
        with pytest.raises(OSError, match="No space left on device"):
            record.log(epoch=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    record.log(epoch=2)
    assert [row["epoch"] for row in record.metrics()] == [1, 2]


def test_task_folder_shortens_long_paths(tmp_path):
    deep = [
        replace(
            TrainConfig(epochs=2, batch_size=128),
            task=f"npz:{'длинное имя/' * 20}{end}.npz",
        )
        for end in "ab"
    ]
    folders = [Record.of(tmp_path, config).folder for config in deep]
    for folder, end in zip(folders, "ab", strict=True):
        folder.mkdir(parents=True)
        assert f"{end}.npz" in folder.parent.parent.name
    others = replace(deep[0], task=deep[0].task.replace("npz:", "npz:other/"))
    assert len({*(f.parent.parent for f in folders), Record.of(tmp_path, others).folder.parent.parent}) == 3


def test_lock_removes_empty_folders(tmp_path, capsys):
    out = tmp_path / "runs"
    (out / "digits").mkdir(parents=True)
    command = ["train", "cifar10", "--out", str(out), "--data-root", str(tmp_path / "nowhere")]
    assert main(command) == 2
    assert "cifar" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["digits"]


def test_lock_is_not_taken_on_a_removed_file(tmp_path):
    """Another process, whose run wrote nothing, removes the file between our opening and our locking it."""
    record = Record(tmp_path / "task" / "method" / "seed-0")
    lock, real_open, opened = record.folder / "lock", os.open, []

    def open_and_remove(path, *args, **options):
        file = real_open(path, *args, **options)
        if Path(path) == lock and not opened:
            lock.unlink()
        opened.append(path)
        return file

    with patch("os.open", open_and_remove), record.lock() as mine, Record(record.folder).lock() as other:
        assert mine
        assert not other
        assert lock.exists()
        (record.folder / "config.json").touch()
    assert len(opened) > 1


def test_config_of_other_folders_is_refused(tmp_path):
    with pytest.raises(RecordError, match=r"config\.json"):
        Record(tmp_path).config()
    for content in (b"{", b"\xff\xfe", b"[]"):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(RecordError, match="damaged"):
            Record(tmp_path).config()


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[]", b"{}"])
def test_damaged_result_is_refused(content, tmp_path):
    (tmp_path / "result.json").write_bytes(content)
    with pytest.raises(RecordError, match=r"result.json is damaged: remove it to train again"):
        Record(tmp_path).result()


def test_failed_write_names_the_file(tmp_path):
    path = tmp_path / "missing" / "page.json"
    with pytest.raises(FileNotFoundError) as error:
        write_json(path, {})
    assert error.value.filename == str(path)
