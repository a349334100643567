"""Which code made a result."""

import json
import shutil
from contextlib import suppress
from pathlib import Path

import tiltsam
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.provenance import code_digest, digest_of
from tiltsam.lab.record import Record
from tiltsam.lab.train import train

PACKAGE = Path(tiltsam.__file__).parent


def test_a_copy_has_the_same_digest_and_any_change_another(tmp_path):
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


def test_the_lock_of_an_editor_is_no_source(tmp_path):
    (tmp_path / "a.py").write_text("a = 1\n")
    alone = digest_of(tmp_path)
    (tmp_path / ".#a.py").symlink_to("someone@somewhere.1234:5678")  # Emacs makes it while changes are not saved
    assert digest_of(tmp_path) == alone


def test_a_run_says_which_code_it_ran(tmp_path):
    config = TrainConfig("digits", "erm", epochs=1)
    train(config, Record(tmp_path))
    assert json.loads((tmp_path / "environment.json").read_text())["code"] == code_digest()


def test_a_run_that_went_on_with_other_code_tells_both(tmp_path, monkeypatch):
    config, record = TrainConfig("digits", "erm", epochs=4), Record(tmp_path)
    train(config, record, until=1 / 4)
    assert "before" not in record.environment()
    train(config, record, until=2 / 4)
    begun = record.environment()
    assert begun["code"] == code_digest()
    assert "before" not in begun  # the same went on
    monkeypatch.setattr("tiltsam.lab.record.code_digest", lambda: "other")
    train(config, record, until=3 / 4)
    train(config, record)
    assert record.environment() == {**begun, "code": "other", "since": 2, "before": [begun]}


def test_code_whose_epochs_were_trained_again_did_not_make_the_run(tmp_path, monkeypatch):
    config, record = TrainConfig("digits", "erm", epochs=4), Record(tmp_path)
    mine = code_digest()

    def killed(progress):
        raise KeyboardInterrupt

    def attempt(code, until=1.0, report=lambda progress: None):
        monkeypatch.setattr("tiltsam.lab.record.code_digest", lambda: code)
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
