"""Sweeps: equal numbers of trials, a choice on validation that never reads the test set, nothing done twice."""

import argparse
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import optuna
import pytest

from helpers.displays import Told
from tiltsam.cli import _parse, _read_arguments, main
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.console import SweepDisplay
from tiltsam.lab.display import Progress, SweepStatus
from tiltsam.lab.errors import ConfigError, Diverged, RecordError, TrainError, UserError
from tiltsam.lab.flags import split_settings
from tiltsam.lab.grids import PAPER, Range, make_entries, parse_grid
from tiltsam.lab.records import Record
from tiltsam.lab.report import runs
from tiltsam.lab.studies import retry, sqlite_url
from tiltsam.lab.sweep import format_results, sweep
from tiltsam.lab.train import train

SMALL = TrainConfig("digits", epochs=1, batch_size=128)
RATES = {"lr": (0.01, 0.03, 0.1)}
STUDIES = Path(__file__).parents[2] / "benchmarks" / "studies"


@pytest.fixture
def fake(monkeypatch):
    """Replace training: ``loss`` and ``score`` are functions of the config, and each run is counted."""

    class FakeTrainer:
        def __init__(self):
            self.runs = []
            self.loss = lambda config: abs(math.log(config.lr / 0.03))
            self.accuracy = lambda config: 0.5
            self.score = lambda config: 0.5 + config.seed / 100

        def __call__(self, config, record, *, data, log, display, until):
            if self.runs[-1:] != [config] or until == 1:
                self.runs.append(config)
            loss = self.loss(config)
            row = {"epoch": until, "validation_accuracy": self.accuracy(config), "validation_loss": loss}
            display.report(config, Progress(done=until / 2))  # within the first epoch
            display.report(config, Progress(epoch=until, done=until, row=row))
            display.report(config, Progress(epoch=until, done=1.2 * until, row=row))  # within the next epoch
            if until < 1:
                return row
            score = self.score(config)
            return {**row, "metric": "accuracy", "test_accuracy": score, "score": score, "passes": 1.0, "seconds": 0.1}

    trainer = FakeTrainer()
    monkeypatch.setattr("tiltsam.lab.sweep.train", trainer)
    return trainer


def studies(out):
    storage = sqlite_url(out)
    return {name: optuna.load_study(study_name=name, storage=storage) for name in optuna.get_all_study_names(storage)}


# ---------------------------------------------------------------- grids


def test_parse_grid_types_values_by_setting():
    texts = ["num-samples=2,3", "share_ascent=true,false", "radius=none,0.1", "t=1,1.0", "lr=1e-3..0.1"]
    assert parse_grid(texts, ["tsam"]) == {
        "num_samples": (2, 3),
        "share_ascent": (True, False),
        "radius": (None, 0.1),
        "t": (1.0,),
        "lr": Range(1e-3, 0.1),
    }


def test_make_entries_gives_each_method_its_settings():
    entries, notes = make_entries(SMALL, ["erm", "sam", "tsam"], PAPER, None, "grid")
    assert [set(entry.space) for entry in entries] == [{"lr"}, {"lr", "rho"}, {"lr", "rho", "t", "num_samples"}]
    assert [entry.trials for entry in entries] == [7, 42, 420]
    assert [note.split(":")[0] for note in notes] == ["erm", "sam"]


def test_make_entries_prefers_the_grid_of_one_method():
    grid = parse_grid(["asam:rho=1,2", "rho=0.1,0.2"], ["sam", "asam"])
    entries, _ = make_entries(SMALL, ["sam", "asam"], grid, None, "grid")
    assert [entry.space["rho"] for entry in entries] == [(0.1, 0.2), (1.0, 2.0)]


def test_make_entries_counts_equal_values_once():
    (entry,), _ = make_entries(SMALL, ["erm"], {"lr": [0.1, 0.1, 0.2]}, None, "grid")
    assert entry.space["lr"] == (0.1, 0.2)
    assert entry.trials == 2


def test_make_entries_leaves_out_what_an_entry_sets():
    entries, notes = make_entries(SMALL, ["sam", "sam:rho=0.3"], {**RATES, "rho": (0.1, 0.5)}, 3, "grid")
    assert set(entries[1].space) == {"lr"}
    assert entries[1].config.options == {"rho": 0.3}
    assert len(notes) == 1
    assert notes[0].startswith("sam:rho=0.3: sets rho")


def test_parse_grid_reports_wrong_methods_as_such():
    for method, value in (("esam1", "unknown method 'esam1'"), ("sam:rh=1", "'sam:rh=1': sam has no rh")):
        with pytest.raises(ConfigError, match=f"^{value}"):
            parse_grid(["rho=1,2"], ["tsam", method])


MISTAKES = [
    (["--grid", "lr"], "'lr'"),
    (["--grid", "lrr=1"], "no lrr"),
    (["--grid", "lr=big"], "'big'"),
    (["--grid", "lr=-1,0.1"], "got -1"),
    (["--grid", "lr=0.1,-1"], "got -1"),
    (["--grid", "rho=-1"], "got -1"),
    (["--grid", "seed=1,2"], "seed"),
    (["--grid", "noise=0,0.1"], "noise"),
    (["--grid", "adam:lr=1"], "'adam'"),
    (["--grid", "sam:rho=1"], "sam"),
    (["--grid", "eta=1,2"], "eta"),
    (["--grid", "lr=0.1", "--methods", "adam"], "'adam'"),
    (["--grid", "lr=0.1", "--methods", "sam", "sam"], "sam, sam"),
    (["--grid", "lr=0.1", "--methods", "sam:rho=0.1", "sam:rho=0.10"], "sam:rho=0.10"),
    (["--grid", "lr=0.1", "--methods", "sam:validation=0.2"], "validation"),
    (["--grid", "lr=0.1", "--methods", "sam:num_samples=3"], "num_samples"),
    (["--grid", "lr=1e-3..0.1"], "--sampler"),
    (["--grid", "lr=0.1..1e-3", "--sampler", "tpe", "--trials", "3"], "0.1..0.001"),
    (["--grid", "num_samples=1..3", "--sampler", "tpe", "--trials", "3"], "1..3"),
    (["--grid", "lr=0.1,1", "--sampler", "random"], "--trials"),
    (["--grid", "lr=0.1", "--trials", "0"], "got 0"),
    (["--grid", "lr=0.1", "--seeds", "-1"], "got -1"),
    (["--grid", "lr=0.1", "--trial-seeds", "0"], "got 0"),
    (["--grid", "lr=0.1", "--workers", "0"], "got 0"),
    (["--grid", "lr=0.1", "--heartbeat", "0"], "got 0"),
    (["--grid", "lr=0.1", "--validation", "0"], "got 0"),
    (["--grid", "lr=0.1", "--final-epochs", "0"], "got 0"),
    (["--grid", "lr=0.1", "--final-epochs", "inf"], "finite"),
    (["--grid", "lr=0.1", "--final-validation", "1.5"], "got 1.5"),
    (["--grid", "epochs=1,2"], "epochs must be the same"),
    (["--grid", "tsam:passes=10,20"], "passes must be the same"),
    (["--grid", "seconds=1.0..2.0", "--sampler", "random", "--trials", "3"], "seconds must be the same"),
    (["--grid", "lr=0.1", "--methods", "erm:epochs =2", "--final-epochs", "3"], "erm:epochs =2: sets epochs"),
    (["--grid", "lr=0.1", "--methods", "erm:passes=9", "--final-epochs", "3"], "erm:passes=9: sets passes"),
    (["--grid", "lr=0.1", "--storage", "here"], "--storage"),
    (["--grid", "lr=0.1", "--storage", "cobol://h/d"], "cobol"),
    (["--grid", "lr=0.1", "--storage", "sqlite://"], "sqlite:///FILE"),
    (["--grid", "lr=0.1", "--storage", "sqlite:////nowhere/a.db"], "sqlite:////nowhere/a.db"),
    (["--grid", "lr=0.1", "--storage", "postgresql://u:secret@127.0.0.1:1/d"], "postgresql://u:***@127.0.0.1:1"),
    (["--grid", "lr=0.1", "--device", "gpu"], "'gpu'"),
]


@pytest.mark.parametrize(("arguments", "value"), MISTAKES, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_mistakes_are_one_line_and_exit_2(arguments, value, tmp_path, capsys):
    methods = [] if "--methods" in arguments else ["--methods", "tsam"]
    assert main(["sweep", "digits", *methods, *arguments, "--epochs", "1", "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert value in line
    assert "secret" not in line


def test_unknown_task_creates_no_folder(tmp_path, capsys):
    assert main(["sweep", "digit", "--grid", "lr=0.1", "--out", str(tmp_path / "runs")]) == 2
    assert "'digit'" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_methods_must_be_a_list(tmp_path):
    with pytest.raises(ConfigError, match="'sam'"):
        sweep(SMALL, "sam", RATES, tmp_path)


# ---------------------------------------------------------------- samplers and the choice


@pytest.mark.parametrize("sampler", ["grid", "random", "tpe"])
def test_samplers_choose_the_lowest_validation_loss(sampler, tmp_path, fake):
    grid = RATES if sampler == "grid" else {"lr": Range(1e-3, 1.0)}
    number = 3 if sampler == "grid" else 20
    result = sweep(SMALL, ["erm"], grid, tmp_path, sampler=sampler, trials=number, seeds=2)
    (row,) = result.entries
    tried = [trial.params["lr"] for trial in row.trials]
    assert len(set(tried)) == len(tried) == number
    assert row.config.lr == min(tried, key=lambda lr: abs(math.log(lr / 0.03)))
    assert [run for run in fake.runs if run.seed == 1] == [replace(row.config, seed=1, device="auto")]
    assert row.scores == {0: 0.5, 1: 0.51}


def test_choose_by_score_ignores_the_loss(tmp_path, fake):
    """With noisy validation labels the model that is sure of the right ones has the highest loss."""
    fake.accuracy = lambda config: config.lr
    fake.loss = lambda config: config.lr
    for choose_by, lr in (("loss", 0.01), ("score", 0.1)):
        result = sweep(SMALL, ["erm"], RATES, tmp_path / choose_by, choose_by=choose_by, seeds=1)
        assert result.entries[0].config.lr == lr
    assert result.entries[0].best.value == pytest.approx(0.9)
    assert format_results(result)[0][3] == "validation error"
    content = json.loads(result.path.read_text())
    assert content["choose_by"] == "score"
    assert content["methods"]["erm"]["validation_error"] == pytest.approx(0.9)


def test_score_is_the_default_choice_and_the_loss_breaks_ties(tmp_path, fake):
    fake.accuracy = lambda config: 0.4 if config.lr == 0.01 else 0.8
    fake.loss = lambda config: config.lr
    (row,) = sweep(SMALL, ["erm"], RATES, tmp_path, trial_seeds=2, seeds=0).entries
    assert row.config.lr == 0.03


def test_choose_by_score_of_a_regression(tmp_path):
    """The score is Pearson's correlation, also with pruning."""
    x = np.random.default_rng(0).normal(size=(200, 3)).astype("float32")
    np.savez(tmp_path / "a.npz", x=x, y=x[:, 0].astype("float32"))
    config = TrainConfig(f"npz:{tmp_path / 'a.npz'}", epochs=8, batch_size=32)
    grid = {"lr": (1e-6, 1e-5, 1e-4, 0.03)}
    (row,) = sweep(config, ["erm"], grid, tmp_path / "runs", pruner="halving", seeds=1).entries
    assert row.config.lr == 0.03
    result = Record.of(tmp_path / "runs", row.config).result()
    assert row.best.value == pytest.approx(1 - result["validation_pearson"])


def test_choose_by_balanced_accuracy(tmp_path):
    """On a long tail the accuracy of all examples is that of the frequent classes."""
    config = replace(SMALL, task="digits-lt", epochs=2)
    result = sweep(config, ["erm"], RATES, tmp_path, choose_by="balanced", seeds=0)
    (row,) = result.entries
    runs = [Record.of(tmp_path, config.with_settings({"method": "erm", **trial.params})) for trial in row.trials]
    assert [t.value for t in row.trials] == [1 - run.result()["validation_balanced_accuracy"] for run in runs]
    np.savez(tmp_path / "a.npz", x=np.random.default_rng(0).normal(size=(40, 2)), y=np.arange(40) / 7)
    regression = replace(config, task=f"npz:{tmp_path / 'a.npz'}")
    with pytest.raises(ConfigError, match="choose_by='balanced' needs a classification"):
        sweep(regression, ["erm"], RATES, tmp_path, choose_by="balanced", seeds=0)


@pytest.mark.slow
def test_tpe_samples_near_good_trials(tmp_path, fake):
    def distance(sampler):
        result = sweep(
            SMALL, ["erm"], {"lr": Range(1e-5, 10.0)}, tmp_path, sampler=sampler, choose_by="loss", trials=24, seeds=0
        )
        return np.mean([trial.value for trial in result.entries[0].trials[12:]])  # TPE draws ten at random first

    assert distance("tpe") < 0.5 * distance("random")


def test_random_points_do_not_depend_on_who_draws_them(tmp_path, fake):
    def points(out):
        result = sweep(SMALL, ["sam"], grid, out, sampler="random", trials=4, seeds=0)
        return [tuple(trial.params.values()) for trial in result.entries[0].trials]

    grid = {"lr": Range(1e-3, 1.0), "rho": Range(1e-3, 1.0)}
    first = points(tmp_path / "a")
    assert first == points(tmp_path / "b")
    assert all(lr != rho for lr, rho in first)


def test_entries_get_equal_trials(tmp_path, fake):
    grid = {**RATES, "rho": (0.1, 0.2, 0.5)}
    result = sweep(SMALL, ["erm", "sam", "sam:average=true"], grid, tmp_path, trials=3, seeds=1)
    assert [len(row.trials) for row in result.entries] == [3, 3, 3]
    assert len(fake.runs) == 3 * 3 + 3
    first, second = ([t.params for t in row.trials] for row in result.entries[1:])
    assert first == second  # entries with the same grid try the same points
    result = sweep(SMALL, ["erm", "sam"], grid, tmp_path, seeds=1)
    assert [len(row.trials) for row in result.entries] == [3, 9]
    assert result.notes[0] == "erm: its grid allows 3 of 9 trials; add values: --grid erm:lr=…"


def test_uneven_coverage_of_grids_is_noted():
    _, (note,) = make_entries(SMALL, ["erm", "sam", "tsam"], PAPER, 7, "grid")
    sam, tsam = (f"{name}: tries 7 of the {size} points of its grid" for name, size in (("sam", 42), ("tsam", 420)))
    assert note.startswith(f"{sam}; {tsam}; erm: all 7 (fairer: ")
    assert make_entries(SMALL, ["sam"], PAPER, 7, "grid")[1] == []
    assert make_entries(SMALL, ["erm", "sam"], PAPER, 7, "random")[1] == []


def test_tilt_of_one_sample_is_not_tuned():
    names = ["tsam:num_samples=1", "tsam:num_samples=3", "tsam:num_samples=1,sampler=hmc", "tsam"]
    entries, notes = make_entries(SMALL, names, PAPER, 42, "random")
    assert [list(entry.space) for entry in entries] == [
        ["lr", "rho"],
        ["lr", "rho", "t"],
        ["lr", "rho", "t"],
        ["lr", "rho", "t", "num_samples"],
    ]
    assert [entry.trials for entry in entries] == [42] * 4
    assert "tsam:num_samples=1: its tilt has no effect, so t is not tuned" in notes


def test_trial_value_is_the_mean_over_seeds(tmp_path, fake):
    fake.loss = lambda config: config.lr + config.seed
    result = sweep(SMALL, ["erm"], RATES, tmp_path, choose_by="loss", trial_seeds=3, seeds=0)
    assert sorted(t.value for t in result.entries[0].trials) == pytest.approx([1.01, 1.03, 1.1])
    assert Counter(run.seed for run in fake.runs) == {0: 3, 1: 3, 2: 3}


def test_score_is_that_of_the_metric(tmp_path, fake, monkeypatch):
    """Whatever the order of the numbers of an epoch."""
    made = fake.__call__

    def reordered(*args, **options):
        return {"validation_ece": 0.9, **made(*args, **options)}

    monkeypatch.setattr("tiltsam.lab.sweep.train", reordered)
    fake.accuracy = lambda config: config.lr
    (row,) = sweep(SMALL, ["erm"], RATES, tmp_path, choose_by="score", seeds=0).entries
    assert sorted(trial.value for trial in row.trials) == pytest.approx([0.9, 0.97, 0.99])


@pytest.mark.parametrize(
    "arguments",
    [{"seeds": -1}, {"trial_seeds": 0}, {"workers": 0}, {"heartbeat": 0}, {"final_passes": 0.0}],
    ids=lambda arguments: next(iter(arguments)),
)
def test_sweep_errors_name_the_argument(arguments, tmp_path):
    ((name, value),) = arguments.items()
    with pytest.raises(ConfigError, match=rf"^{name} must be .*, got {value:g}$"):
        sweep(SMALL, ["erm"], RATES, tmp_path, **arguments)
    with pytest.raises(ConfigError, match=r"^validation must be > 0"):
        sweep(replace(SMALL, validation=0.0), ["erm"], RATES, tmp_path)


def test_final_budget_is_checked_before_the_trials(tmp_path, fake):
    with pytest.raises(ConfigError, match="finite"):
        sweep(SMALL, ["erm"], RATES, tmp_path, seeds=1, final_epochs=math.inf)
    assert fake.runs == []


def test_devices_may_be_separated_by_a_comma_and_a_space(tmp_path, fake):
    (row,) = sweep(replace(SMALL, device="cpu, cpu"), ["erm"], RATES, tmp_path, seeds=1).entries
    assert row.config.device == "cpu"


def test_grid_of_another_method_is_no_conflict():
    _, notes = make_entries(SMALL, ["erm", "sam:lr=0.1"], {"erm:lr": (0.1, 0.2), "rho": (0.1, 0.2)}, None, "grid")
    assert not [note for note in notes if "sets lr" in note]
    _, notes = make_entries(SMALL, ["erm", "sam:lr=0.1"], {"lr": (0.1, 0.2), "rho": (0.1, 0.2)}, None, "grid")
    assert [note for note in notes if "sam:lr=0.1: sets lr" in note]


def test_tilt_of_one_sample_is_reported():
    with pytest.warns(UserWarning, match="no effect"):
        make_entries(SMALL, ["tsam:num_samples=1,t=5"], RATES, None, "grid")


def test_search_stores_no_test_numbers(tmp_path, fake):
    fake.score = lambda config: 0.987654
    sweep(SMALL, ["erm"], RATES, tmp_path, seeds=0)
    (study,) = studies(tmp_path).values()
    assert "test" not in repr([(t.user_attrs, t.values, t.intermediate_values) for t in study.trials])
    assert "0.987654" not in "".join(p.read_text() for p in tmp_path.rglob("sweep.json"))


def test_final_budget_replaces_that_of_the_trials(tmp_path, fake):
    base = replace(SMALL, passes=10.0)
    (row,) = sweep(base, ["erm"], RATES, tmp_path, seeds=1, final_epochs=5).entries
    assert (row.config.epochs, row.config.passes) == (5, None)
    (row,) = sweep(base, ["erm"], RATES, tmp_path, seeds=1, final_passes=20).entries
    assert (row.config.epochs, row.config.passes) == (math.inf, 20)


def test_final_validation_of_0_trains_the_choice_on_all_examples(tmp_path):
    result = sweep(replace(SMALL, epochs=2.0), ["erm"], RATES, tmp_path, seeds=1, final_validation=0.0)
    assert result.entries[0].config.validation == 0
    erm = json.loads(result.path.read_text())["methods"]["erm"]
    runs = [tmp_path / run["run"] / "result.json" for run in (erm["test"]["runs"][0], erm["trials"][0])]
    tested, trial = (json.loads(path.read_text())["steps"] for path in runs)
    assert tested > trial


@pytest.mark.parametrize(("seconds", "workers", "noted"), [(5.0, 2, True), (5.0, 1, False), (None, 2, False)])
def test_shared_device_is_noted_with_a_budget_in_seconds(seconds, workers, noted, tmp_path, fake, monkeypatch):
    monkeypatch.setattr("tiltsam.lab.sweep.run_processes", lambda *_, **__: None)
    result = sweep(replace(SMALL, seconds=seconds), ["erm"], RATES, tmp_path, workers=workers, seeds=0)
    assert any("workers share" in note for note in result.notes) == noted


def test_edges_are_noted(tmp_path, fake):
    fake.loss = lambda config: config.lr
    grid = {"lr": (0.01, 0.03), "num_samples": (1, 3), "radius": (None, 1.0)}
    result = sweep(SMALL, ["tsam"], grid, tmp_path, seeds=0)
    assert result.entries[0].edges() == {"lr": "smallest"}
    assert result.notes == ["tsam: lr=0.01 is the smallest value of its grid; a smaller one may be better"]
    fake.loss = lambda config: -config.lr
    result = sweep(SMALL, ["erm"], {"lr": (0.01, 0.03)}, tmp_path, seeds=0)
    assert result.notes == ["erm: lr=0.03 is the largest value of its grid; a larger one may be better"]
    result = sweep(SMALL, ["erm"], {"lr": Range(0.01, 1.0)}, tmp_path, sampler="random", trials=2, seeds=0)
    assert (result.entries[0].edges(), result.notes) == ({}, [])


# ---------------------------------------------------------------- diverged and pruned runs


def test_diverged_trials_are_pruned_with_a_reason(tmp_path, fake):
    def loss(config):
        if config.lr > 0.05:
            raise Diverged("the loss is not finite")
        return config.lr

    fake.loss = loss
    result = sweep(SMALL, ["erm"], RATES, tmp_path, seeds=1)
    states = {trial.params["lr"]: trial.state.name for trial in result.entries[0].trials}
    assert states == {0.01: "COMPLETE", 0.03: "COMPLETE", 0.1: "PRUNED"}
    written = json.loads(result.path.read_text())["methods"]["erm"]["trials"]
    assert [t["reason"] for t in written if t["state"] == "pruned"] == ["the loss is not finite"]
    runs = len(fake.runs)
    sweep(SMALL, ["erm"], RATES, tmp_path, seeds=1)
    assert len(fake.runs) == runs


def test_no_finite_loss_ends_with_an_error(tmp_path, fake, capsys):
    def loss(config):
        raise Diverged("the loss is not finite")

    fake.loss = loss
    assert main(["sweep", "digits", "--methods", "erm", "--grid", "lr=1,2", "--out", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert "nothing was chosen" in shown.err
    assert "2, 2 diverged" in shown.out


def test_progress_ends_if_an_entry_chose_nothing(tmp_path, fake):
    def loss(config):
        if config.method == "erm":
            raise Diverged("the loss is not finite")
        return config.lr

    fake.loss, statuses = loss, []
    sweep(SMALL, ["erm", "sam"], RATES, tmp_path, seeds=2, display=Told(status=statuses.append))
    assert statuses[0].total == 2 * 3 + 2 * 2
    assert (statuses[-1].ended, statuses[-1].total) == (2 * 3 + 2, 2 * 3 + 2)


def test_diverged_test_is_reported_and_not_averaged(tmp_path, fake):
    def score(config):
        if config.seed == 1:
            raise Diverged("the loss is not finite")
        return 0.5

    fake.score = score
    (row,) = sweep(SMALL, ["erm"], RATES, tmp_path, seeds=3).entries
    assert row.scores == {0: 0.5, 2: 0.5}


def test_halving_stops_runs_and_keeps_them_resumable(tmp_path):
    base = replace(SMALL, epochs=8)
    grid = {"lr": (1e-6, 1e-5, 1e-4, 0.01, 0.03, 0.1)}
    result = sweep(base, ["erm"], grid, tmp_path, pruner="halving", seeds=0)
    pruned = [t for t in result.entries[0].trials if t.state.name == "PRUNED"]
    assert 1 <= len(pruned) <= 4
    assert format_results(result)[1][1] == f"6, {len(pruned)} pruned"
    assert result.entries[0].best.params["lr"] in (0.03, 0.1)
    for trial in pruned:
        config = replace(base, method="erm", lr=trial.params["lr"])
        record = Record.of(tmp_path, config)
        rows = record.metrics()
        assert [row["epoch"] for row in rows] in ([1, 2], [1, 2, 3, 4])  # 25 % or 50 % of 8 epochs
        assert record.result() is None
        assert int(record.load().state["epoch"]) == rows[-1]["epoch"]
    whole = train(replace(config, epochs=8), record)
    assert whole["epoch"] == 8
    assert len(record.metrics()) == 8


# ---------------------------------------------------------------- interruption and reuse


def test_halving_does_not_depend_on_interruptions(tmp_path):
    """A trial whose run is already beyond the first rung is compared at it nevertheless."""
    base = replace(SMALL, epochs=8)
    grid = {"lr": (1e-6, 1e-5, 1e-4, 0.01, 0.03, 0.1)}
    for lr in grid["lr"]:
        config = base.with_settings({"method": "erm", "lr": lr})
        train(config, Record.of(tmp_path / "resumed", config), until=0.6)
    whole, resumed = (
        sweep(base, ["erm"], grid, tmp_path / name, pruner="halving", seeds=0).entries[0].trials
        for name in ("whole", "resumed")
    )
    assert any(trial.state.name == "PRUNED" for trial in whole)
    for one, other in zip(whole, resumed, strict=True):
        reasons = [trial.user_attrs.get("reason") for trial in (one, other)]
        assert (one.params, one.state, reasons[0]) == (other.params, other.state, reasons[1])


@pytest.mark.parametrize("error", [KeyboardInterrupt, TrainError("no memory"), OSError(28, "disk full")])
def test_interrupted_trial_is_run_again(error, tmp_path, fake):
    def loss(config):
        if len(fake.runs) == 2:
            raise error
        return config.lr

    fake.loss = loss
    with pytest.raises((KeyboardInterrupt, TrainError, OSError)):
        sweep(SMALL, ["erm"], RATES, tmp_path, seeds=2)
    (row,) = sweep(SMALL, ["erm"], RATES, tmp_path, seeds=2).entries
    assert sorted(trial.params["lr"] for trial in row.trials) == [0.01, 0.03, 0.1]
    assert row.scores.keys() == {0, 1}
    assert len(fake.runs) == 3 + 1 + 2


def test_interrupted_test_is_run_again(tmp_path, fake):
    def score(config):
        if len(fake.runs) == 5:
            raise KeyboardInterrupt
        return 0.5

    fake.score = score
    with pytest.raises(KeyboardInterrupt):
        sweep(SMALL, ["erm"], RATES, tmp_path, seeds=3)
    path = next(tmp_path.rglob("sweep.json"))
    assert json.loads(path.read_text())["finished"] is False
    (row,) = sweep(SMALL, ["erm"], RATES, tmp_path, seeds=3).entries
    assert row.scores.keys() == {0, 1, 2}
    assert json.loads(path.read_text())["finished"] is True


def test_trial_whose_heartbeats_stopped_is_taken_over(tmp_path, fake):
    """Another process failed and repeated the trial: its own result is dropped, and the sweep continues."""

    def loss(config):
        if len(fake.runs) == 2:
            (study,) = studies(tmp_path).values()
            study.tell(len(study.trials) - 1, state=optuna.trial.TrialState.FAIL)
            retry(study, study.trials[-1])
        return config.lr

    fake.loss = loss
    (row,) = sweep(SMALL, ["erm"], RATES, tmp_path, seeds=0).entries
    assert sorted(trial.params["lr"] for trial in row.trials) == [0.01, 0.03, 0.1]


def test_more_seeds_reuse_the_search(tmp_path, fake):
    sweep(SMALL, ["erm"], RATES, tmp_path, seeds=1)
    runs = len(fake.runs)
    sweep(SMALL, ["erm", "sam"], RATES, tmp_path, seeds=2)
    assert len(fake.runs) == runs + 2 + 3 + 2  # ERM's tests, SAM's trials and tests


def test_equal_points_are_trained_once(tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr("tiltsam.lab.train.Trainer.run", _counting(steps))
    grid = {"lr": (0.01, 0.1), "sam:rho": (0.1, 0.5)}
    result = sweep(SMALL, ["sam", "sam:rho=0.5"], grid, tmp_path, trials=4, seeds=2)
    assert [len(row.trials) for row in result.entries] == [4, 2]
    configs = {(c.key(), c.seed) for c in steps}
    assert len(steps) == len(configs)


def _counting(steps):
    from tiltsam.lab.train import Trainer

    run = Trainer.run

    def counted(self, *arguments):
        steps.append(self.config)
        return run(self, *arguments)

    return counted


def test_changed_data_are_another_sweep(tmp_path, fake):
    def write(seed):
        rng = np.random.default_rng(seed)
        np.savez(tmp_path / "a.npz", x=rng.normal(size=(60, 4)).astype("float32"), y=np.arange(60) % 3)

    config, out = TrainConfig(f"npz:{tmp_path / 'a.npz'}", epochs=1), tmp_path / "runs"
    write(0)
    first = sweep(config, ["erm"], RATES, out, seeds=0)
    write(1)
    assert sweep(config, ["erm"], RATES, out, seeds=0).path != first.path
    fake.loss = lambda c: write(len(fake.runs)) or 0.1
    with pytest.raises(RecordError, match=r"a\.npz"):
        sweep(replace(config, epochs=2), ["erm"], RATES, out, seeds=0)


# ---------------------------------------------------------------- results


def test_result_has_paired_differences_and_a_report(tmp_path, capsys):
    arguments = [
        "--grid",
        "lr=0.03,0.1",
        "--passes",
        "20",
        "--seeds",
        "3",
        "--batch-size",
        "256",
        "--out",
        str(tmp_path),
    ]
    assert main(["sweep", "digits", "--methods", "erm", "sam", *arguments]) == 0
    shown = capsys.readouterr().out
    path = next(tmp_path.rglob("sweep.json"))
    found = json.loads(path.read_text())
    assert found["finished"] is True
    scores = {}
    for name, method in found["methods"].items():
        results = [Record(tmp_path / run["run"]).result() for run in method["test"]["runs"]]
        assert [r["passes"] for r in results] == [20] * 3
        scores[name] = [100 * r["score"] for r in results]
        for trial in method["trials"]:
            accuracy = Record(tmp_path / trial["run"]).result()["validation_accuracy"]
            assert trial["validation_error"] == 1 - accuracy
    differences = np.subtract(scores["sam"], scores["erm"])
    half = 4.302653 * differences.std(ddof=1) / math.sqrt(3)  # 97.5 % point of Student's t, two degrees of freedom
    test = found["methods"]["sam"]["test"]
    assert 100 * test["difference"] == pytest.approx(differences.mean())
    assert 100 * np.array(test["interval"]) == pytest.approx([differences.mean() - half, differences.mean() + half])
    row = next(line for line in shown.splitlines() if line.startswith("| sam "))
    assert f"{differences.mean():+.2f}" in row
    assert f"[{differences.mean() - half:+.2f}, {differences.mean() + half:+.2f}]" in row
    assert len(runs.read_sweep(path.parent).tests) == 6
    assert (path.parent / "report" / "report.html").exists()
    assert "run 10 of 10" in shown


def test_table_without_tests(tmp_path, fake):
    table = format_results(sweep(SMALL, ["erm", "sam"], RATES, tmp_path, seeds=0))
    assert [row[0] for row in table] == ["method", "erm", "sam"]
    assert table[1][-4:] == ["–", "", "", "0"]


def test_display_counts_runs_and_time_left(capsys, monkeypatch):
    clock = iter([0.0, 10.0, 20.0])
    monkeypatch.setattr("tiltsam.lab.console.time.monotonic", lambda: next(clock))
    with SweepDisplay() as display:
        display.status(SweepStatus(0, 14, 0.0, []))
        display.status(SweepStatus(5, 14, 0.0, ["sam lr=0.1: validation loss 0.5000"]))
        display.status(SweepStatus(14, 14, 0.0, ["last"]))
    first, last = capsys.readouterr().out.splitlines()
    assert first == "run 5 of 14  sam lr=0.1: validation loss 0.5000  0:18 left"
    assert last == "run 14 of 14  last"


def test_devices_are_used_in_turn(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(
        "tiltsam.lab.sweep.run_processes", lambda function, arguments, *_, **__: started.extend(arguments)
    )
    sweep(replace(SMALL, device="cpu,cuda:1"), ["erm"], RATES, tmp_path, workers=3, seeds=0)
    assert [device for _, device in started] == ["cpu", "cuda:1", "cpu"]


# ---------------------------------------------------------------- TOML


def test_toml_file_holds_the_arguments(tmp_path, fake, capsys):
    path = tmp_path / "study.toml"
    path.write_text(
        'task = "digits"\nmethods = ["erm", "sam"]\ntrials = 2\nseeds = 1\nepochs = 1\naverage = true\n'
        "compile = false\ndownload = false\n"  # the second has no --no-download
        f'out = "{tmp_path / "runs"}"\n[grid]\nlr = [0.03, 0.1]\n"sam:rho" = 0.1\n'
    )
    assert main(["sweep", "--seeds", "2", str(path)]) == 0  # the command line wins, wherever the file is
    assert Counter((run.method, run.average) for run in fake.runs) == {("erm", True): 4, ("sam", True): 4}
    assert "tested with 2 seeds" in capsys.readouterr().out


def test_false_in_a_toml_file_is_refused_where_a_flag_takes_a_value(tmp_path, capsys):
    path = tmp_path / "study.toml"
    path.write_text('task = "digits"\nseeds = false\n[grid]\nlr = 0.1\n')
    with pytest.raises(SystemExit):
        main(["sweep", str(path)])
    assert "--seeds" in capsys.readouterr().err


def test_toml_file_takes_negative_numbers(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text('task = "digits"\nexample_tilt = -0.00001\n[grid]\nclass_tilt = [-1e-5, 0.5]\n')
    args = _parse(["sweep", str(path)])
    assert (args.example_tilt, args.grid) == (-1e-5, ["class_tilt=-1e-05,0.5"])


def test_only_the_task_can_be_a_toml_file(tmp_path, fake, capsys):
    out = tmp_path / "runs.toml"
    assert main(["sweep", "digits", "--methods", "erm", "--grid", "lr=0.1", "--seeds", "0", "--out", str(out)]) == 0
    assert fake.runs
    with pytest.raises(SystemExit):
        main(["sweep", "digits", str(out), "--grid", "lr=0.1"])


@pytest.mark.parametrize("text", ["lr = [", "methods = ['sam']", "task = 'digits'\n[grid.erm]\nlr = [0.1]", None])
def test_damaged_toml_file_is_one_line(text, tmp_path, capsys):
    path = tmp_path / "study.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=r"study\.toml"):
        _read_arguments(path, argparse.ArgumentParser())
    assert main(["sweep", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tiltsam sweep: ")
    assert "study.toml" in line


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_studies_give_entries_equal_trials(path):
    args = _parse(["sweep", str(path)])
    base, settings = split_settings(args)
    grid = parse_grid(args.grid, args.methods)
    entries, notes = make_entries(base, args.methods, grid, args.trials, args.trial_sampler, settings)
    assert len({entry.trials for entry in entries}) == 1
    fixed = [f"{name}: sets rho itself, the grid is not used" for name in args.methods if "sampler=" in name]
    assert notes == fixed  # naive sampling and HMC have no ascent


def test_settings_hold_for_the_methods_that_have_them():
    entries, _ = make_entries(SMALL, ["erm", "sam", "asam:rho=2"], RATES, None, "grid", {"rho": 0.3})
    assert [entry.config.options for entry in entries] == [{}, {"rho": 0.3}, {"rho": 2.0}]
    with pytest.raises(ConfigError, match="erm has no rho; its options: none"):
        make_entries(SMALL, ["erm"], RATES, None, "grid", {"rho": 0.3})
