"""The rule by which the studies of evidence choose and compare."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from evidence.__main__ import work
from evidence.studies import STUDIES
from evidence.study import Study, score_at
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.record import Record

RATES = {"erm": 1.0, "sam": 2.0}
STUDY = Study(
    name="small",
    base=TrainConfig(task="digits", epochs=4.0, batch_size=256, device="cpu"),
    reference="sam",
    trials={
        "erm": [{"method": "erm", "lr": lr} for lr in (1e-4, 1e-3, 0.05)],
        "sam": [{"method": "sam", "lr": lr} for lr in (1e-4, 1e-3, 0.05)],
    },
    rungs=((0.25, 2), (0.5, 1)),
    seeds=(0, 1),
    looks=4,
)


def fake(out, config, epoch, validation):
    record = Record.of(out, config)
    record.folder.mkdir(parents=True, exist_ok=True)
    record.log(epoch=epoch, validation_accuracy=validation)


def test_everybody_gets_the_seconds_of_the_reference():
    assert [c.epochs for c in STUDY.configs("erm", RATES)] == [8.0] * 3
    assert [c.epochs for c in STUDY.configs("sam", RATES)] == [4.0] * 3
    assert STUDY.configs("erm", RATES)[0].evaluate_every == 2


def test_worse_trials_stay_where_they_are(tmp_path):
    first, second, third = STUDY.configs("sam", RATES)
    assert [(c.config, c.until) for c in STUDY.left(tmp_path, RATES, ["sam"])] == [
        (config, 0.25) for config in (first, second, third)
    ]
    for config, score in ((first, 0.3), (second, 0.5)):
        fake(tmp_path, config, 1.0, score)
    assert [c.config for c in STUDY.left(tmp_path, RATES, ["sam"])] == [third]
    (Record.of(tmp_path, third).folder).mkdir(parents=True)
    (Record.of(tmp_path, third).folder / "diverged").touch()
    assert [(c.config, c.until) for c in STUDY.left(tmp_path, RATES, ["sam"])] == [(second, 0.5), (first, 0.5)]
    fake(tmp_path, first, 2.0, 0.6)
    fake(tmp_path, second, 2.0, 0.55)
    assert STUDY.winner("sam", tmp_path, RATES) == first
    assert [(c.config, c.until) for c in STUDY.left(tmp_path, RATES, ["sam"])] == [(first, 1.0)]
    fake(tmp_path, first, 4.0, 0.6)
    assert [(c.config, c.until) for c in STUDY.left(tmp_path, RATES, ["sam"])] == [(replace(first, seed=1), 1.0)]
    fake(tmp_path, replace(first, seed=1), 4.0, 0.1)
    assert STUDY.left(tmp_path, RATES, ["sam"]) == []


def test_work_goes_to_the_end_and_a_run_cut_short_is_the_beginning_of_the_longer_one(tmp_path):
    work(STUDY, tmp_path, RATES, None, ["erm"], float("inf"))
    assert STUDY.left(tmp_path, RATES, ["erm"]) == []
    chosen = STUDY.winner("erm", tmp_path, RATES)
    assert chosen.lr == 0.05
    lines = (Record.of(tmp_path, chosen).folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [2, 4, 6, 8]  # each once
    worst = STUDY.configs("erm", RATES)[0]
    assert score_at(tmp_path, worst, 0.25) is not None
    assert score_at(tmp_path, worst, 1.0) is None
    whole = tmp_path / "whole"
    work(replace(STUDY, rungs=()), whole, RATES, None, ["erm"], float("inf"))
    assert Record.of(whole, chosen).result()["score"] == Record.of(tmp_path, chosen).result()["score"]


@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda s: s.name)
def test_every_method_of_a_study_has_as_many_trials(study):
    assert len({len(trials) for trials in study.trials.values()}) == 1
    rates = dict.fromkeys(study.trials, 1.0)
    for label in study.trials:
        assert len({config.key() for config in study.configs(label, rates)}) == len(study.trials[label])
