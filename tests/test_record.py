"""Records of runs in benchmarks/records: packed without weights, restored, and their tables printed again."""

import dataclasses
import gzip
import json
import shutil
from pathlib import Path

import pytest

import record
import tiltsam
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.records import Record
from tiltsam.lab.report.runs import read_runs
from tiltsam.lab.train import train

RECORDS = Path(__file__).parents[1] / "benchmarks" / "records"
CONFIG = TrainConfig("digits", method="erm", epochs=4, batch_size=256, device="cpu")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A finished run and a paused one."""
    out = tmp_path_factory.mktemp("runs")
    for seed, until in ((0, 1.0), (1, 0.5)):
        config = dataclasses.replace(CONFIG, seed=seed)
        train(config, Record.of(out, config), until=until)
    return out


@pytest.mark.parametrize("path", sorted(RECORDS.glob("*/tables.json")), ids=lambda path: path.parent.name)
def test_records_print_their_tables(path):
    assert record.tables(path.parent) == path.with_name("tables.md").read_text()


def test_every_record_with_tables_defines_them():
    assert len(list(RECORDS.glob("*/tables.md"))) == len(list(RECORDS.glob("*/tables.json"))) == 13


def test_packed_runs_are_restored(runs, tmp_path):
    assert record.pack(runs, tmp_path / "record") == 2
    assert record.restore(tmp_path / "record", tmp_path / "again") == 2
    before, after = (read_runs([out])[0] for out in (runs, tmp_path / "again"))
    for one, two in zip(before, after, strict=True):
        assert (one.config, one.rows, one.result, one.setup) == (two.config, two.rows, two.result, two.setup)
        assert one.setup["num_train"] == 1078
    assert record.restore(tmp_path / "record", tmp_path / "again") == 0
    assert not list((tmp_path / "again").rglob("*.safetensors"))


def test_restore_keeps_why_a_run_diverged(runs, tmp_path):
    folder = tmp_path / "runs" / "digits" / "erm-1" / "seed-0"
    shutil.copytree(Record.of(runs, dataclasses.replace(CONFIG, seed=1)).folder, folder)
    Record(folder).mark_diverged("the loss is not finite in epoch 3")
    record.pack(tmp_path / "runs", tmp_path / "record")
    record.restore(tmp_path / "record", tmp_path / "again")
    (run,) = read_runs([tmp_path / "again"]).runs
    assert run.diverged == "the loss is not finite in epoch 3"


def test_pack_keeps_what_was_further(runs, tmp_path):
    record.pack(runs, tmp_path / "record")
    before = (tmp_path / "record" / "runs.jsonl.gz").read_bytes()
    record.restore(tmp_path / "record", tmp_path / "again")
    (Record.of(tmp_path / "again", CONFIG).folder / "result.json").unlink()
    record.pack(tmp_path / "again", tmp_path / "record")
    assert (tmp_path / "record" / "runs.jsonl.gz").read_bytes() == before


def test_interrupted_pack_and_restore_leave_nothing_half_done(runs, tmp_path, monkeypatch):
    path = tmp_path / "record" / "runs.jsonl.gz"
    record.pack(runs, path.parent)
    before = path.read_bytes()
    log, write = Record.log, Path.write_bytes

    def interrupted_write(place, content):
        write(place, content[:100])
        raise KeyboardInterrupt

    def interrupted_log(self, **row):
        if row["epoch"] == 4:
            raise KeyboardInterrupt
        log(self, **row)

    monkeypatch.setattr(Path, "write_bytes", interrupted_write)
    with pytest.raises(KeyboardInterrupt):
        record.pack(runs, path.parent)
    monkeypatch.undo()
    assert path.read_bytes() == before
    monkeypatch.setattr(Record, "log", interrupted_log)
    with pytest.raises(KeyboardInterrupt):
        record.restore(path.parent, tmp_path / "again")
    assert Record.of(tmp_path / "again", CONFIG).result() is None


def test_stages_leave_out_the_worse_trials():
    def run(lr, *scores):
        config = TrainConfig(**settings, lr=lr)
        rows = [{"epoch": e, "validation_accuracy": s, "validation_loss": 1 - s} for e, s in enumerate(scores, 1)]
        found = {"metrics": rows, "diverged": lr == 0.4, **({"result": {}} if len(scores) == 4 else {})}
        return Record.of(Path(), config).folder.as_posix(), found

    settings = {"task": "digits", "method": "erm", "epochs": 4.0}
    runs = dict([run(0.1, 0.5), run(0.2, 0.6, 0.7, 0.8, 0.75), run(0.3, 0.55, 0.6, 0.7, 0.9), run(0.4)])
    trials = {"settings": {"method": "erm", "lr": [0.1, 0.2, 0.3, 0.4]}, "budget": {"epochs": 4.0}, "step_cost": 1.0}
    study = {"base": {"task": "digits"}, "stages": [[0.25, 2]], "trials": {"erm": trials}}
    table = record._trials_table(study, runs)
    assert [row[2:] for row in table[1:]] == [
        ["50.00", "", ""],
        ["60.00", "75.00", ""],
        ["55.00", "90.00", "chosen"],
        ["diverged", "diverged", ""],
    ]
    del runs[run(0.1)[0]]
    assert "chosen" not in [row[-1] for row in record._trials_table(study, runs)]  # not all reached the first stage


def test_committed_runs_are_named_by_their_configs():
    """The name of a run is derived from all its settings, which its config contains, whatever the defaults are now."""
    seen = 0
    for path in sorted(RECORDS.rglob("*.jsonl.gz")):
        with gzip.open(path, "rt") as lines:
            for run in map(json.loads, lines):
                if run["config"]["method"] not in tiltsam.METHODS:  # that of a script in the same folder
                    continue
                config = TrainConfig(**run["config"])
                if len(place := Path(run["place"]).parts) == 3 and path.parent.name != "2026-11-15_noisy_first":
                    assert place[1] == config.key()  # the networks of that record had other initial weights
                    seen += 1
    assert seen > 2000
