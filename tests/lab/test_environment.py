"""The code versions that a run records."""

import json
import shutil
from pathlib import Path

import tiltsam
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.devices import code_digest, digest_of
from tiltsam.lab.records import Record
from tiltsam.lab.train import train


def test_digest_changes_with_any_source_file(tmp_path):
    copy = tmp_path / "elsewhere"
    shutil.copytree(Path(tiltsam.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert digest_of(copy) == code_digest()
    seen = {code_digest()}
    source = copy / "samplers" / "ascent.py"
    source.write_text(source.read_text() + "\n")
    seen.add(digest_of(copy))
    source.rename(source.with_name("other.py"))
    seen.add(digest_of(copy))
    source.with_name("noise.py").unlink()
    seen.add(digest_of(copy))
    assert len(seen) == 4


def test_digest_ignores_editor_locks(tmp_path):
    (tmp_path / "a.py").write_text("a = 1\n")
    alone = digest_of(tmp_path)
    (tmp_path / ".#a.py").symlink_to("someone@somewhere.1234:5678")  # Emacs creates it while changes are unsaved
    assert digest_of(tmp_path) == alone


def test_run_records_code_digest(tmp_path):
    config = TrainConfig("digits", "erm", epochs=1)
    train(config, Record(tmp_path))
    assert json.loads((tmp_path / "environment.json").read_text())["code"] == code_digest()


def test_resumed_run_records_the_newest_code(tmp_path, monkeypatch):
    config, record = TrainConfig("digits", "erm", epochs=2), Record(tmp_path)
    train(config, record, until=1 / 2)
    monkeypatch.setattr("tiltsam.lab.devices.code_digest", lambda: "other")
    train(config, record)
    assert record.environment()["code"] == "other"
