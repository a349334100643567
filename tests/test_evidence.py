"""The rule by which the studies of evidence choose and compare."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from evidence.__main__ import flat, work
from evidence.archive import collect, restore
from evidence.studies import STUDIES, around
from evidence.study import Study, Variants, score_at
from evidence.tables import draw_curves, draw_variants, final_table, trial_table, variant_table
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.record import Record

RATES = {"erm": 1.0, "sam": 2.0}
STUDY = Study(
    name="small",
    base=TrainConfig(task="digits", epochs=4.0, batch_size=256, device="cpu"),
    reference="sam",
    trials={
        "erm": [{"method": "erm", "lr": lr} for lr in (1e-5, 0.005, 0.05)],
        "sam": [{"method": "sam", "lr": lr} for lr in (1e-5, 0.005, 0.05)],
    },
    rungs=((0.25, 2),),
    seeds=(0, 1),
    looks=4,
    family="small",
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
    def left():
        return [(cell.config, cell.until) for cell in STUDY.left(tmp_path, RATES, ["sam"])]

    first, second, third = STUDY.configs("sam", RATES)
    assert left() == [(config, 0.25) for config in (first, second, third)]
    fake(tmp_path, first, 1.0, 0.3)
    fake(tmp_path, second, 1.0, 0.5)
    assert left() == [(third, 0.25)]
    lost = Record.of(tmp_path, third).folder
    lost.mkdir(parents=True)
    (lost / "diverged").touch()
    assert left() == [(second, 1.0), (first, 1.0)]
    fake(tmp_path, second, 4.0, 0.55)
    assert STUDY.winner("sam", tmp_path, RATES) is None
    fake(tmp_path, first, 4.0, 0.6)
    assert STUDY.winner("sam", tmp_path, RATES) == first
    assert left() == [(replace(first, seed=1), 1.0)]
    fake(tmp_path, replace(first, seed=1), 4.0, 0.1)
    assert left() == []


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A small study, worked through."""
    out = tmp_path_factory.mktemp("runs")
    work([STUDY], out, {"small": RATES}, None)
    return out


def test_work_goes_to_the_end_and_a_run_cut_short_is_the_beginning_of_the_longer_one(done, tmp_path):
    assert STUDY.left(done, RATES) == []
    chosen = STUDY.winner("erm", done, RATES)
    assert chosen.lr == 0.05
    lines = (Record.of(done, chosen).folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [2, 4, 6, 8]  # each once
    worst = STUDY.configs("erm", RATES)[0]
    assert score_at(done, worst, 0.25) is not None
    assert score_at(done, worst, 1.0) is None
    work([Variants("whole", {"erm": chosen}, [0])], tmp_path, {}, None)
    assert Record.of(tmp_path, chosen).result()["score"] == Record.of(done, chosen).result()["score"]


def test_tables_say_what_the_runs_did_and_survive_the_archive(done, tmp_path):
    trials, final = trial_table(STUDY, done, RATES), final_table(STUDY, done, RATES)
    assert [row[-1] for row in trials[1:4]] == ["", "", "chosen"]
    chosen = STUDY.winner("erm", done, RATES)
    scores = [100 * Record.of(done, replace(chosen, seed=seed)).result()["score"] for seed in (0, 1)]
    assert final[1][4] == f"{sum(scores) / 2:.2f} ± {abs(scores[0] - scores[1]) / 2:.2f}"
    assert final[1][2:4] == ["8", "0.032"]  # 4 steps an epoch, of one pass each
    collect(done, tmp_path / "runs.jsonl")
    restore(tmp_path / "runs.jsonl", tmp_path / "again")
    assert trial_table(STUDY, tmp_path / "again", RATES) == trials
    assert final_table(STUDY, tmp_path / "again", RATES) == final
    assert STUDY.left(tmp_path / "again", RATES) == []
    draw_curves(STUDY, done, RATES, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_flatness_of_the_winners_is_measured_once(done, capsys):
    flat(STUDY, done, RATES, None, ["erm"], draws=2)
    assert capsys.readouterr().out.count("loss") == 2
    flat(STUDY, done, RATES, None, ["erm"], draws=2)
    assert capsys.readouterr().out == ""


def test_variants_change_one_setting_at_a_time(tmp_path):
    center = TrainConfig(task="digits", method="tsam", rho=0.5, radius=2.0, num_samples=1, epochs=1.0, batch_size=512)
    configs = around(center)
    assert len(configs) == 5 + 5 + 3 + 6
    assert len({config.key() for config in configs.values()}) == 19 - 3  # the centre is in three of the four lists,
    for label, config in configs.items():  # and three samples at the usual tilt in two
        name = label.rpartition(" ")[0]
        changed = {f for f in vars(config) if getattr(config, f) != getattr(center, f)}
        assert changed <= {{"s": "num_samples"}.get(name, name), *(["num_samples"] if name == "t" else [])}
    study = Variants("few", {k: configs[k] for k in ("radius 0", "radius 2", "t 0", "t 1000")}, (0, 1))
    work([study], tmp_path, {}, None)
    table = variant_table(study, tmp_path)
    assert [row[0] for row in table[1:]] == list(study.configs)
    assert float(table[3][3]) == pytest.approx(3.0, abs=1e-3)  # no tilt: all samples count
    assert float(table[4][3]) < 2.9
    draw_variants(study, tmp_path, tmp_path / "variants.png")
    assert (tmp_path / "variants.png").stat().st_size > 10_000


@pytest.mark.parametrize("study", [s for s in STUDIES.values() if isinstance(s, Study)], ids=lambda s: s.name)
def test_every_method_of_a_study_has_as_many_trials(study):
    assert len({len(trials) for trials in study.trials.values()}) == 1
    rates = dict.fromkeys((*study.trials, study.reference), 1.0)
    for label in study.trials:
        assert len({config.key() for config in study.configs(label, rates)}) == len(study.trials[label])
