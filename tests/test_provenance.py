"""Which code made a result."""

import json
import shutil
from pathlib import Path

import tiltsam
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.record import Record
from tiltsam.lab.train import train
from tiltsam.provenance import code_digest, digest_of

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
