"""The digest of the source code, and the code versions that a run records."""

import json
import shutil
from contextlib import suppress
from pathlib import Path

import tiltsam
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.provenance import code_digest, digest_of
from tiltsam.lab.records import Record
from tiltsam.lab.train import train

PACKAGE = Path(tiltsam.__file__).parent


def test_digest_changes_with_any_source_file(tmp_path):
    copy = tmp_path / "elsewhere"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
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


def test_resumed_run_records_both_digests(tmp_path, monkeypatch):
    config, record = TrainConfig("digits", "erm", epochs=4), Record(tmp_path)
    train(config, record, until=1 / 4)
    assert "before" not in record.environment()
    train(config, record, until=2 / 4)
    begun = record.environment()
    assert begun["code"] == code_digest()
    assert "before" not in begun  # resumed with the same code
    monkeypatch.setattr("tiltsam.lab.records.code_digest", lambda: "other")
    train(config, record, until=3 / 4)
    train(config, record)
    assert record.environment() == {**begun, "code": "other", "since": 2, "before": [begun]}


def test_run_drops_digest_of_lost_epochs(tmp_path, monkeypatch):
    config, record = TrainConfig("digits", "erm", epochs=4), Record(tmp_path)
    mine = code_digest()

    def killed(progress):
        raise KeyboardInterrupt

    def attempt(code, until=1.0, report=lambda progress: None):
        monkeypatch.setattr("tiltsam.lab.records.code_digest", lambda: code)
        with suppress(KeyboardInterrupt):
            train(config, record, until=until, report=report)
        found = record.environment()
        return [(one["code"], one.get("since", 0)) for one in (*found.get("before", ()), found)]

    assert attempt("lost", report=killed) == [("lost", 0)]
    assert attempt(mine, until=2 / 4) == [(mine, 0)]
    assert attempt("lost", report=killed) == [(mine, 0), ("lost", 2)]
    assert attempt("other", until=3 / 4) == [(mine, 0), ("other", 2)]
    assert attempt("lost", report=killed) == [(mine, 0), ("other", 2), ("lost", 3)]
    assert attempt("other") == [(mine, 0), ("other", 2)]
