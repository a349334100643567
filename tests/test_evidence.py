"""The rule by which the studies of evidence choose and compare."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

import tiltsam
from evidence.__main__ import cross, flat, measure_rates, show, weights, work
from evidence.archive import collect, restore
from evidence.studies import STUDIES
from evidence.study import Study, Variants, score_at
from evidence.tables import (
    cross_table,
    draw_curves,
    draw_variants,
    final_table,
    flat_table,
    trial_table,
    variant_table,
)
from evidence.trials import around
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.errors import TrainError
from tiltsam.lab.records import Record
from tiltsam.lab.train import train

RECORDS = Path(__file__).parents[1] / "benchmarks" / "records"
RATES = {"erm": 1.0, "sam": 2.0}
STUDY = Study(
    name="small",
    base=TrainConfig(task="digits", epochs=4.0, batch_size=256, device="cpu"),
    reference="sam",
    trials={
        "erm": [{"method": "erm", "lr": lr} for lr in (1e-5, 0.005, 0.05)],
        "sam": [{"method": "sam", "lr": lr, "rho": 0.1} for lr in (1e-5, 0.005, 0.05)],
    },
    rungs=((0.25, 2),),
    seeds=(0, 1),
    looks=4,
    family="small",
)


def fake(out, config, epoch, validation, loss=1.0):
    record = Record.of(out, config)
    record.folder.mkdir(parents=True, exist_ok=True)
    record.log(epoch=epoch, validation_accuracy=validation, validation_loss=loss)
    if epoch == config.epochs:
        numbers = {"metric": "accuracy", "epoch": epoch, "passes": 1.0, "seconds": 1.0}
        (record.folder / "result.json").write_text(json.dumps(numbers | {"score": validation}))


def lose(out, config):
    folder = Record.of(out, config).folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "diverged.txt").touch()


def test_everybody_gets_the_seconds_of_the_reference():
    assert [c.epochs for c in STUDY.configs("erm", RATES)] == [8.0] * 3
    assert [c.epochs for c in STUDY.configs("sam", RATES)] == [4.0] * 3
    assert STUDY.configs("erm", RATES)[0].evaluate_every == 2


def test_labels_with_the_same_steps_are_timed_once():
    up = [{"method": "sam", "lr": 0.05, "rho": rho, "rho_schedule": "up"} for rho in (0.1, 0.2, 0.3)]
    study = replace(STUDY, trials={**STUDY.trials, "rising": up}, same_steps={"rising": "sam"})
    assert study.timed() == {"erm", "sam"}
    assert study.timed(["rising"]) == {"sam"}
    assert [c.epochs for c in study.configs("rising", RATES)] == [4.0] * 3


def test_labels_are_worked_on_in_the_order_they_are_asked_for(tmp_path):
    assert [cell.label for cell in STUDY.left(tmp_path, RATES, ["sam", "erm"])] == ["sam"] * 3 + ["erm"] * 3
    assert [cell.label for cell in STUDY.left(tmp_path, RATES)] == ["erm"] * 3 + ["sam"] * 3
    variants = Variants("all", {label: STUDY.base for label in "abc"}, [0, 1])
    assert [cell.label for cell in variants.left(tmp_path, {}, ["c", "a"])] == ["c", "a"] * 2


def test_first_seeds_of_all_studies_come_before_further_ones(tmp_path):
    small = TrainConfig(epochs=0.1)
    studies = [Variants(name, {"erm": replace(small, lr=lr)}, [0, 1]) for name, lr in (("one", 0.1), ("two", 0.2))]
    work(studies, tmp_path, {}, None)
    ended = sorted(tmp_path.rglob("result.json"), key=lambda path: path.stat().st_mtime_ns)
    assert [(config.lr, config.seed) for config in (Record(path.parent).config() for path in ended)] == [
        *((0.1, 0), (0.2, 0)),
        *((0.1, 1), (0.2, 1)),
    ]


def test_worse_trials_stay_where_they_are(tmp_path):
    def left():
        return [(cell.config, cell.until) for cell in STUDY.left(tmp_path, RATES, ["sam"])]

    first, second, third = STUDY.configs("sam", RATES)
    assert left() == [(config, 0.25) for config in (first, second, third)]
    fake(tmp_path, first, 1.0, 0.3)
    fake(tmp_path, second, 1.0, 0.5)
    assert left() == [(third, 0.25)]
    lose(tmp_path, third)
    assert left() == [(second, 1.0), (first, 1.0)]
    fake(tmp_path, second, 4.0, 0.55)
    assert STUDY.winner("sam", tmp_path, RATES) is None
    fake(tmp_path, first, 4.0, 0.6)
    assert STUDY.winner("sam", tmp_path, RATES) == first
    assert left() == [(replace(first, seed=1), 1.0)]
    fake(tmp_path, replace(first, seed=1), 4.0, 0.1)
    assert left() == []


def test_seeds_do_not_wait_for_the_end_of_a_single_trial(tmp_path):
    study = replace(STUDY, rungs=((0.25, 1),))
    first, *others = study.configs("sam", RATES)
    fake(tmp_path, first, 1.0, 0.5)
    for config in others:
        fake(tmp_path, config, 1.0, 0.3)
    left = [(cell.config, cell.until) for cell in study.left(tmp_path, RATES, ["sam"])]
    assert left == [(first, 1.0), (replace(first, seed=1), 1.0)]


def test_a_late_divergence_brings_nobody_back(tmp_path):
    first, second, third = STUDY.configs("sam", RATES)
    for config, score in ((first, 0.5), (second, 0.4), (third, 0.3)):
        fake(tmp_path, config, 1.0, score)
    lose(tmp_path, first)
    assert [cell.config for cell in STUDY.left(tmp_path, RATES, ["sam"])] == [second]
    fake(tmp_path, second, 4.0, 0.45)
    assert STUDY.winner("sam", tmp_path, RATES) == second
    cells = trial_table(STUDY, tmp_path, RATES)[4]
    assert cells[0] == "sam"
    assert cells[2:4] == ["50.00", "diverged"]


def test_where_all_trials_diverged_there_is_no_winner(tmp_path):
    for config in STUDY.configs("sam", RATES):
        lose(tmp_path, config)
    assert STUDY.left(tmp_path, RATES, ["sam"]) == []
    assert STUDY.winner("sam", tmp_path, RATES) is None
    assert len(final_table(STUDY, tmp_path, RATES)) == 1
    draw_curves(STUDY, tmp_path, RATES, tmp_path / "curves.png")


def test_of_equals_the_one_with_the_smaller_loss_is_chosen(tmp_path):
    first, second, _ = STUDY.configs("sam", RATES)
    for config, loss in zip(STUDY.configs("sam", RATES), (1.0, 0.5, 2.0), strict=True):
        fake(tmp_path, config, 1.0, 0.5, loss)
    assert [cell.config for cell in STUDY.left(tmp_path, RATES, ["sam"])] == [second, first]


def test_a_trial_that_another_process_ends_meanwhile_leaves_work_to_do(tmp_path, monkeypatch):
    *others, last = STUDY.configs("sam", RATES)
    for config in others:
        fake(tmp_path, config, 1.0, 0.5)

    def look(out, config, share):
        found = score_at(out, config, share)
        if config == last and found is None:  # it was not there yet; once we have looked, it is
            fake(out, config, 1.0, 0.3)
        return found

    monkeypatch.setattr("evidence.study.score_at", look)
    assert STUDY.left(tmp_path, RATES, ["sam"])


def test_a_pause_adds_no_epoch_to_the_best_ones(tmp_path):
    config = replace(STUDY.base, method="erm", epochs=10.0, evaluate_every=4)
    study = Variants("one", {"lr 0.1": config}, [0])
    for until in (0.5, 1.0):
        train(config, Record.of(tmp_path, config), until=until)
    record = Record.of(tmp_path, config)
    rows, _ = record.metrics()
    assert [row["epoch"] for row in rows] == [4, 5, 8, 10]
    rows[1] |= {"validation_accuracy": 2.0, "test_accuracy": 0.0}  # where the pause looked, and nobody else would
    (record.folder / "metrics.jsonl").unlink()
    for row in rows:
        record.log(**row)
    assert float(variant_table(study, tmp_path)[1][2]) > 0


def test_a_run_that_was_restored_in_part_is_not_done(done, tmp_path, monkeypatch):
    collect(done, tmp_path / "runs.jsonl.gz")
    log = Record.log

    def killed(record, **row):
        if row["epoch"] == 4:
            raise KeyboardInterrupt
        log(record, **row)

    monkeypatch.setattr(Record, "log", killed)
    with pytest.raises(KeyboardInterrupt):
        restore(tmp_path / "runs.jsonl.gz", tmp_path / "runs")
    (metrics,) = (tmp_path / "runs").rglob("metrics.jsonl")
    assert Record(metrics.parent).result() is None  # or it would be neither done nor trained


def test_what_is_broken_off_in_writing_leaves_no_half(done, tmp_path, monkeypatch):
    path, out = tmp_path / "runs.jsonl.gz", tmp_path / "runs"
    collect(done, path)
    restore(path, out)
    before = path.read_bytes()
    write = Path.write_bytes

    def half(place, content):
        write(place, content[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", half)
    monkeypatch.setattr("shutil.copy", lambda source, place: half(Path(place), Path(source).read_bytes()))
    with pytest.raises(KeyboardInterrupt):
        collect(done, path)
    assert path.read_bytes() == before
    with pytest.raises(KeyboardInterrupt):
        weights(STUDY, out, RATES, None, ["erm"])
    assert not (Record.of(out, STUDY.winner("erm", out, RATES)).folder / "model.safetensors").exists()


def test_rates_that_are_broken_off_in_writing_leave_those_before(tmp_path, monkeypatch):
    """The clock they were measured by cannot be had again."""
    path = tmp_path / "rates.json"
    measure_rates(replace(STUDY, unit="thousand passes"), path, None)
    before = path.read_text()
    monkeypatch.setattr("os.fsync", Mock(side_effect=KeyboardInterrupt))  # all is written, but not all on the disk
    with pytest.raises(KeyboardInterrupt):
        measure_rates(replace(STUDY, unit="thousand passes"), path, None)
    assert path.read_text() == before


def test_labels_of_another_study_are_passed_over(done, capsys):
    weights(STUDY, done, RATES, None, ["other"])
    flat(STUDY, done, RATES, None, ["other"], draws=2)
    assert capsys.readouterr().out == ""


def test_a_run_without_a_result_is_not_done(tmp_path):
    config = STUDY.configs("erm", RATES)[2]
    study = Variants("one", {"erm": config}, [0])
    work([study], tmp_path, {}, None)
    (Record.of(tmp_path, config).folder / "result.json").unlink()  # killed between the last line and the result
    assert len(study.left(tmp_path, {})) == 1
    work([study], tmp_path, {}, None)
    assert study.left(tmp_path, {}) == []


def test_a_model_that_cannot_be_compiled_has_not_diverged(tmp_path, monkeypatch):
    def fail(graph, inputs):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", lambda model: torch._dynamo.optimize(fail)(model))
    config = replace(STUDY.configs("erm", RATES)[0], compile=True)
    with pytest.raises(TrainError, match="compile"):
        work([Variants("one", {"erm": config}, [0])], tmp_path, {}, None)
    assert score_at(tmp_path, config, 0.25) is None


def test_rates_of_another_day_are_brought_to_the_clock_of_the_first(tmp_path, monkeypatch):
    path = tmp_path / "rates.json"
    days = iter([{"sam": 2.0, "erm": 1.0}, {"sam": 4.0, "erm": 2.4, "other": 6.0}])
    monkeypatch.setattr("evidence.__main__._milliseconds", lambda configs, root: next(days))
    for _ in range(2):
        measure_rates(STUDY, path, None)
    assert json.loads(path.read_text())["small"]["a_step"] == {"sam": 2.0, "erm": 1.0, "other": 3.0}


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
    collect(done, tmp_path / "runs.jsonl.gz")
    restore(tmp_path / "runs.jsonl.gz", tmp_path / "again")
    assert trial_table(STUDY, tmp_path / "again", RATES) == trials
    assert final_table(STUDY, tmp_path / "again", RATES) == final
    assert STUDY.left(tmp_path / "again", RATES) == []
    (Record.of(tmp_path / "again", chosen).folder / "result.json").unlink()
    collect(tmp_path / "again", tmp_path / "runs.jsonl.gz")  # what is known is not lost to a run that is not as far
    restore(tmp_path / "runs.jsonl.gz", tmp_path / "third")
    assert final_table(STUDY, tmp_path / "third", RATES) == final
    draw_curves(STUDY, done, RATES, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_flatness_of_the_winners_is_measured_once(done, capsys):
    flat(STUDY, done, RATES, None, ["erm"], draws=2)
    assert capsys.readouterr().out.count("loss") == 2
    flat(STUDY, done, RATES, None, ["erm"], draws=2)
    assert capsys.readouterr().out == ""
    chosen = STUDY.winner("erm", done, RATES)
    files = [Record.of(done, replace(chosen, seed=seed)).folder / "flatness.json" for seed in (0, 1)]
    one, two = (json.loads(path.read_text()) for path in files)
    _, row = flat_table(STUDY, done, RATES, stds=(0.05,))
    place = one["neighborhood"]["std"].index(0.05)
    mean = (one["neighborhood"]["mean"][place] + two["neighborhood"]["mean"][place]) / 2
    largest = (one["eigenvalues"]["values"][0] + two["eigenvalues"]["values"][0]) / 2
    assert row[0] == "erm"
    assert row[2] == f"{mean:.3g}"
    assert row[4].split()[0] == f"{largest:.3g}"


def test_flatness_of_variants_is_measured_and_shown(tmp_path, capsys):
    base = replace(STUDY.base, method="erm", epochs=1.0)
    configs = {"lr 0.01": replace(base, lr=0.01), "lr 0.05": replace(base, lr=0.05)}
    study = Variants("pair", {**configs, "epochs 1": configs["lr 0.01"]}, seeds=(0, 1))
    weights(study, tmp_path, {}, None)
    assert not list(tmp_path.iterdir())  # what has not been run is not to be trained again
    work([study], tmp_path, {}, None)
    flat(study, tmp_path, {}, None, ["lr 0.01"], draws=2)
    capsys.readouterr()
    show(study, tmp_path, {}, tmp_path)
    assert "eigenvalues" not in capsys.readouterr().out  # one alone is nothing to compare, whatever its labels
    flat(study, tmp_path, {}, None, draws=2)
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["lr 0.05 seed 0", "lr 0.05 seed 1"]
    show(study, tmp_path, {}, tmp_path)
    shown = capsys.readouterr().out.split("### pair")[-1].splitlines()
    heading, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in shown if line)
    assert heading[:2] == ["variant", "loss"]
    assert [row[0] for row in rows] == list(configs)
    for row, config in zip(rows, configs.values(), strict=True):
        files = [Record.of(tmp_path, replace(config, seed=seed)).folder / "flatness.json" for seed in (0, 1)]
        mean = sum(json.loads(path.read_text())["loss"] for path in files) / 2
        assert row[1] == f"{mean:.3g}"
        assert row[-1] == "2"


def test_weights_that_a_record_does_not_hold_are_trained_again(done, tmp_path, capsys):
    collect(done, tmp_path / "runs.jsonl.gz")
    restore(tmp_path / "runs.jsonl.gz", tmp_path / "runs")
    for _ in range(2):
        weights(STUDY, tmp_path / "runs", RATES, None, ["erm"])
    assert capsys.readouterr().out.count("erm again") == 1  # those that are there are left alone
    before, after = (Record.of(out, STUDY.winner("erm", out, RATES)) for out in (done, tmp_path / "runs"))
    assert after.result() == before.result()
    was, now = (load_file(record.folder / "model.safetensors") for record in (before, after))
    assert all(torch.equal(was[name], now[name]) for name in was)


def test_what_was_trained_again_and_came_back_without_weights_is_trained_once_more(done, tmp_path, capsys):
    collect(done, tmp_path / "runs.jsonl.gz")
    restore(tmp_path / "runs.jsonl.gz", tmp_path / "first")
    weights(STUDY, tmp_path / "first", RATES, None, ["erm"])
    collect(tmp_path / "first", tmp_path / "again.jsonl.gz")
    restore(tmp_path / "again.jsonl.gz", tmp_path / "second")
    weights(STUDY, tmp_path / "second", RATES, None, ["erm"])
    winner = STUDY.winner("erm", tmp_path / "second", RATES)
    assert (Record.of(tmp_path / "second", winner).folder / "model.safetensors").exists()
    assert capsys.readouterr().out.count("erm again") == 2


def test_weights_of_several_studies_are_trained_apart(tmp_path):
    found = []
    for smoothing in (0.0, 0.1):
        study = replace(STUDY, base=replace(STUDY.base, epochs=1.0, label_smoothing=smoothing), rungs=())
        for config, score in zip(study.configs("erm", RATES), (0.3, 0.4, 0.5), strict=True):
            fake(tmp_path, config, config.epochs, score)
        weights(study, tmp_path, RATES, None, ["erm"])
        found.append(load_file(Record.of(tmp_path, study.winner("erm", tmp_path, RATES)).folder / "model.safetensors"))
    assert not all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_losses_under_each_others_objectives(done, tmp_path, capsys):
    path = tmp_path / "small-cross.json"
    three = {**STUDY.trials, "tsam s=3": [{"method": "tsam", "lr": 0.05, "rho": 0.2, "radius": 1.0}] * 3}
    study, rates = replace(STUDY, trials=three, rungs=(), seeds=(0,)), {**RATES, "tsam s=3": 6.0}
    work([study], done, {"small": rates}, None)
    capsys.readouterr()
    cross(study, done, rates, None, path)
    entries = json.loads(path.read_text())["0"]
    losses = {(e["split"], e["model"], e["objective"]): e["loss"] for e in entries}
    assert len(losses) == 2 * 3 * 3
    for model in three:
        assert losses["train", model, "ERM"] < losses["train", model, "SAM"]
    cross(study, done, rates, None, path)
    assert capsys.readouterr().out.count("under") == 18  # not measured again
    table = cross_table(path)
    assert table[0][1] == "train, ERM"
    assert table[1][:2] == ["erm", f"{losses['train', 'erm', 'ERM']:.3f}"]
    show(study, done, rates, tmp_path)
    shown = capsys.readouterr().out
    assert shown.count("### small") == 3
    assert "| trained by |" in shown


def test_variants_change_one_setting_at_a_time(tmp_path):
    options = {"rho": 0.5, "radius": 2.0, "num_samples": 1}
    center = TrainConfig(task="digits", options=options, epochs=1.0, batch_size=512)
    configs = around(center)
    assert len(configs) == 5 + 5 + 3 + 6
    assert len({config.key() for config in configs.values()}) == 19 - 3  # the centre is in three of the four lists,
    for label, config in configs.items():  # and three samples at the usual tilt in two
        name = label.rpartition(" ")[0]
        changed = {name for name, value in config.all_options().items() if value != center.all_options()[name]}
        assert changed <= {{"s": "num_samples"}.get(name, name), *(["num_samples"] if name == "t" else [])}
    study = Variants("few", {k: configs[k] for k in ("radius 0", "radius 2", "t 0", "t 1000")}, (0, 1))
    work([study], tmp_path, {}, None)
    table = variant_table(study, tmp_path)
    assert [row[0] for row in table[1:]] == list(study.configs)
    assert float(table[3][3]) == pytest.approx(3.0, abs=1e-3)  # no tilt: all samples count
    assert float(table[4][3]) < 2.9
    draw_variants(study, tmp_path, tmp_path / "variants.png")
    assert (tmp_path / "variants.png").stat().st_size > 10_000


def test_committed_records_have_the_names_of_their_configs():
    seen = 0
    for path in sorted(RECORDS.rglob("*.jsonl.gz")):
        with gzip.open(path, "rt") as lines:
            for run in map(json.loads, lines):
                if run["config"]["method"] not in tiltsam.METHODS:  # of the script in its folder
                    continue
                config = TrainConfig(**run["config"])
                assert config.to_json() == run["config"]
                if run["place"] != "again/sam":
                    assert Path(run["place"]).parts[-2:] == (config.key(), f"seed-{config.seed}")
                    seen += 1
    assert seen > 2000


def test_committed_records_print_their_tables(tmp_path):
    record, study = RECORDS / "2026-11-15_digits", STUDIES["digits-cheaper"]
    restore(record / "runs.jsonl.gz", tmp_path)
    rates = json.loads((record / "rates.json").read_text())["digits"]["a_step"]
    assert study.left(tmp_path, rates) == []
    lines = (record / "tables.md").read_text().splitlines()
    printed = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    for row in (*trial_table(study, tmp_path, rates), *final_table(study, tmp_path, rates)):
        assert [cell.strip() for cell in row] in printed


@pytest.mark.parametrize("study", [s for s in STUDIES.values() if isinstance(s, Study)], ids=lambda s: s.name)
def test_every_method_of_a_study_has_as_many_trials(study):
    assert len({len(trials) for trials in study.trials.values()}) == 1
    rates = dict.fromkeys(study.timed(), 1.0)
    for label in study.trials:
        assert len({config.key() for config in study.configs(label, rates)}) == len(study.trials[label])
