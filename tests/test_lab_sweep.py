"""Sweeps: the same number of trials for every method, a choice that never sees the test set, nothing done twice."""

import io
import json
import math
import shutil
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import numpy as np
import optuna
import pytest
from rich.console import Console

import tiltsam
from tiltsam.cli import main
from tiltsam.lab.compare import compare_configs
from tiltsam.lab.config import TILT_HAS_NO_EFFECT, TrainConfig
from tiltsam.lab.errors import Diverged, SweepError, TrainError
from tiltsam.lab.records import Record
from tiltsam.lab.sweep import sweep
from tiltsam.lab.sweeping import plan as planning
from tiltsam.lab.sweeping import screen
from tiltsam.lab.sweeping.board import Entry
from tiltsam.lab.sweeping.grids import PAPER, GridPoint, parse_grid, points
from tiltsam.lab.sweeping.results import find_run_folders
from tiltsam.lab.sweeping.standing import Standing, Trial, validation_numbers
from tiltsam.lab.sweeping.store import open_store, sqlite_url
from tiltsam.lab.train import Progress

SMALL = TrainConfig("digits", epochs=1, batch_size=128, options={"num_samples": 2})
RATES = {"lr": (0.01, 0.1)}


def trials_of(out: Path, study: str) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name=study, storage=sqlite_url(out)).get_trials()


@pytest.fixture
def pretend(monkeypatch):
    """Trains nothing: a run's numbers are what ``scores`` says of its config, and each run is counted."""

    class Pretend:
        def __init__(self):
            self.ran = []
            self.scores = lambda config: (config.lr, 1 - config.lr)

        def __call__(self, config, record, *, data, report, tick):
            self.ran.append(config)
            report(Progress(epoch=1.0, done=1.0))
            validation, test = self.scores(config)
            numbers = {"metric": "accuracy", "validation_accuracy": validation, "validation_loss": 0.5, "epoch": 1.0}
            return {**numbers, "test_accuracy": test, "score": test, "score_at_best_validation": test, "seconds": 0.1}

        def interrupt(self, number):
            """Press Ctrl-C in a run, counted from 1; the others score by their learning rate."""

            def scores(config):
                if len(self.ran) == number:
                    raise KeyboardInterrupt
                return config.lr, 0.5

            self.scores = scores

    pretend = Pretend()
    monkeypatch.setattr(planning, "train", pretend)
    return pretend


# ---------------------------------------------------------------- grids


def test_the_papers_grids():
    assert parse_grid(["paper"]) == PAPER
    found, _ = points(SMALL, ["erm"], PAPER)
    assert [p.config.lr for p in found["erm"]] == [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1]
    for method, size in {"erm": 7, "sam": 42, "rsam": 42, "tsam": 420}.items():
        assert len(points(SMALL, [method], PAPER)[0][method]) == size


@pytest.mark.parametrize("number", [1, 5, 7, 8, 30])
def test_every_method_gets_the_same_number_of_distinct_points(number):
    found, notes = points(SMALL, list(tiltsam.METHODS), PAPER, number)
    assert set(found) == set(tiltsam.METHODS)
    for method, chosen in found.items():
        assert len({p.config.key() for p in chosen}) == number, method
        assert all(p.config.method == method for p in chosen)
    assert any(note.startswith("erm") for note in notes) == (number != 7)


def test_a_small_grid_is_taken_whole_and_made_finer():
    found, notes = points(SMALL, ["erm"], {"lr": (0.01, 0.1)}, 5)
    rates = [p.config.lr for p in found["erm"]]
    assert rates[:2] == [0.01, 0.1]
    assert all(0.01 < rate < 0.1 for rate in rates[2:])
    assert notes == ["erm: all 2 points of its grid, and 3 with learning rates between"]


def test_a_grid_of_tilts_for_one_sample_is_told():
    assert points(SMALL.with_settings({"num_samples": 1}), ["tsam"], {"t": (0.0, 5.0)})[1] == [
        f"tsam has {TILT_HAS_NO_EFFECT}"
    ]
    assert not points(SMALL, ["tsam"], {"t": (0.0, 5.0)})[1]
    assert not points(SMALL.with_settings({"num_samples": 1}), ["tsam:t=0"], RATES)[1]  # no tilt is asked for
    entries = ["tsam:num_samples=3", "tsam:num_samples=1", "tsam:num_samples=1,average=true,t=5"]
    _, notes = points(SMALL, entries, {"t": (0.0, 5.0), **RATES}, 4)
    assert notes[-2:] == [f"{name} has {TILT_HAS_NO_EFFECT}" for name in entries[1:]]
    with pytest.raises(SweepError, match=r"sam has 2 points in its grid and 5 trials to make"):
        points(SMALL, ["sam"], {"rho": (0.1, 0.5)}, 5)


def test_a_draw_grows_without_changing_and_depends_on_its_seed():
    few, more = (points(SMALL, ["tsam"], PAPER, n)[0]["tsam"] for n in (5, 20))
    assert few == more[:5]
    assert few != points(SMALL, ["tsam"], PAPER, 5, draw_seed=1)[0]["tsam"]


def test_a_grid_for_one_method_goes_before():
    found, _ = points(SMALL, ["sam", "tsam"], parse_grid(["rho=0.1,0.2", "tsam:rho=0.5,1", "lr=0.1"]))
    assert [p.config.all_options()["rho"] for p in found["sam"]] == [0.1, 0.2]
    assert [p.config.all_options()["rho"] for p in found["tsam"]] == [0.5, 1.0]


def test_values_are_of_the_settings_type():
    grid = parse_grid(
        ["num-samples=2,3", "share_ascent=true,false", "radius=none,0.1", "sampler=ascent,hmc", "t=1,1.0"]
    )
    assert grid == {
        "num_samples": (2, 3),
        "share_ascent": (True, False),
        "radius": (None, 0.1),
        "sampler": ("ascent", "hmc"),
        "t": (1.0,),
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--grid", "lr"], "--grid lr: write NAME=VALUE"),
        (["--grid", "lrr=1"], "unknown setting 'lrr'"),
        (["--grid", "lr=big"], "--grid lr: 'big' is not a float"),
        (["--grid", "lr=nan"], "got nan"),
        (["--grid", "lr=-1,0.1"], "lr must be > 0, got -1.0"),
        (["--grid", "rho=-1"], "rho must be a finite number >= 0, got -1.0"),
        (["--grid", "share_ascent=maybe"], "got 'maybe'"),
        (["--grid", "sampler=best"], "got 'best'"),
        (["--grid", "seed=1,2"], "seed is the same for all trials"),
        (["--grid", "adam:lr=1"], "unknown method 'adam'"),
        (["--grid", ":lr=0.1,0.2"], "unknown method ''"),
        (["--grid", "sam:rho=1"], "sam is not among the methods: tsam"),
        (["--grid", "eta=1,2"], "tsam has no eta"),
        (["--grid", "lr=0.1", "--methods", "adam"], "unknown method 'adam'"),
        (["--grid", "paper", "--methods", "erm", "sam"], "the grids differ in size (erm 7, sam 42): say --trials N"),
        (["--grid", "lr=0.1", "--trials", "0"], "--trials must be at least 1, got 0"),
        (["--grid", "lr=0.1", "--seeds", "-1"], "--seeds must be at least 0, got -1"),
        (["--grid", "lr=0.1", "--workers", "0"], "--workers must be at least 1, got 0"),
        (["--grid", "lr=0.1", "--validation", "0"], "--validation must be > 0"),
        (["--grid", "lr=0.1", "--final-epochs", "0"], "--final-epochs must be > 0, got 0"),
        (["--grid", "lr=0.1", "--heartbeat", "0"], "--heartbeat must be > 0, got 0"),
        (["--grid", "lr=0.1", "--storage", "here"], "--storage is no database URL"),
        (["--grid", "lr=0.1", "--storage", "cobol://h/d"], "cobol"),
        (["--grid", "lr=0.1", "--storage", "sqlite://"], "give a file"),
        (["--grid", "lr=0.1", "--storage", "sqlite:////nowhere/a.db"], "unable to open database file"),
        (["--grid", "lr=0.1", "--storage", "postgresql://u:secret@127.0.0.1:1/d"], "cannot reach postgresql://u:***@"),
        (["--grid", "lr=0.1", "--device", "gpu"], "unknown device 'gpu'"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_mistakes_are_one_line_and_exit_2(arguments, says, tmp_path, capsys):
    methods = [] if "--methods" in arguments else ["--method", "tsam"]
    assert main(["sweep", "digits", *methods, *arguments, "--epochs", "1", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err.strip()
    assert says in error
    assert "secret" not in error
    assert len(error.splitlines()) == 1


# ---------------------------------------------------------------- methods with settings of their own

ENTRIES = ["sam", "sam:average=true", "tsam:num_samples=1", "tsam:num_samples=3"]
GRID = {"lr": (0.01, 0.1), "rho": (0.1, 0.5)}


def test_one_method_is_a_list_of_one(tmp_path):
    with pytest.raises(SweepError, match=r"methods are a list, as in \['sam'\]"):
        sweep(SMALL, "sam", RATES, tmp_path)


def test_a_method_with_settings_of_its_own_is_a_row_of_its_own(tmp_path, pretend, capsys):
    pretend.scores = lambda c: (
        c.lr * c.all_options()["rho"] + 0.01 * c.average + 0.02 * (c.all_options().get("num_samples") == 3),
        0.5,
    )
    outcome = sweep(SMALL, ENTRIES, GRID, tmp_path, trials=4, seeds=2)
    assert [s.method for s in outcome.standings] == ENTRIES
    assert [(len(s.trials), len(s.scores)) for s in outcome.standings] == [(4, 2)] * 4
    assert len(pretend.ran) == 4 * (4 + 2)
    best = {name: (c.method, c.average, c.lr, c.all_options()["rho"]) for name, c in outcome.best.items()}
    assert best == {name: (name.partition(":")[0], "average" in name, 0.1, 0.5) for name in ENTRIES}
    assert [outcome.best[name].all_options().get("num_samples") for name in ENTRIES] == [None, None, 1, 3]
    written = json.loads(outcome.path.read_text())["methods"]
    assert list(written) == ENTRIES
    assert written["sam:average=true"]["settings"] == {"lr": 0.1, "rho": 0.5}
    assert TrainConfig(**written["sam:average=true"]["config"]) == outcome.best["sam:average=true"]
    for study, number in ((outcome.study, 4), (f"{outcome.study}-test", 2)):
        shown = [trial.params["method"] for trial in trials_of(tmp_path, study)]
        assert sorted(shown) == sorted(ENTRIES * number)
    grids = ["--grid", "lr=0.01,0.1", "--grid", "rho=0.1,0.5", "--trials", "4", "--seeds", "2"]
    assert main(["sweep", "digits", "--methods", *ENTRIES, *grids, "--out", str(tmp_path / "command")]) == 0
    out = capsys.readouterr().out
    assert f"4 trials for each of {', '.join(ENTRIES)}" in out
    assert "sam:average=true 4/4  lr=0.1 rho=0.5: validation" in out
    assert "tsam:num_samples=3 seed 1: test 50.00" in out
    assert all(f"| {name} " in out for name in ENTRIES)


def test_a_grid_for_what_is_fixed_is_left_out_and_that_is_told():
    grid = {**GRID, "sam:rho": (1.0, 2.0), "sam:every": (1, 2)}
    found, notes = points(SMALL, ["sam", "sam:rho=0.3", "tsam"], grid, 4)
    assert {p.config.all_options()["rho"] for p in found["sam"]} == {1.0, 2.0}
    assert {(p.config.all_options()["rho"], p.config.every) for p in found["sam:rho=0.3"]} == {(0.3, 1), (0.3, 2)}
    assert "rho" not in found["sam:rho=0.3"][0].settings
    assert {p.config.all_options()["rho"] for p in found["tsam"]} == {0.1, 0.5}
    assert [note for note in notes if "left out" in note] == [
        "sam:rho=0.3: the grid's rho left out, which it sets itself"
    ]


def test_entries_of_one_method_draw_the_same_points():
    found, _ = points(SMALL, ["sam", "sam:average=true"], PAPER, 5)
    one, two = ([p.settings for p in rows] for rows in found.values())
    assert one == two


def test_a_run_of_two_rows_is_made_once_and_counts_for_both(tmp_path, pretend):
    names = ["sam", "sam:rho=0.5"]
    outcome = sweep(SMALL, names, {**RATES, "sam:rho": (0.1, 0.5)}, tmp_path, trials=4, seeds=2)
    searched = [c for c in pretend.ran if c.seed == 0]
    shared = {p.point.config.key() for p in outcome.standings[0].trials}
    shared &= {p.point.config.key() for p in outcome.standings[1].trials}
    assert len(shared) == 2
    assert len({c.key() for c in searched}) == 4 + 4 - 2
    assert [len(s.trials) for s in outcome.standings] == [4, 4]
    assert len([t for t in trials_of(tmp_path, outcome.study) if t.state.name == "COMPLETE"]) == 6
    ran = len(pretend.ran)
    assert sweep(SMALL, names, {**RATES, "sam:rho": (0.1, 0.5)}, tmp_path, trials=4, seeds=2) == outcome
    assert len(pretend.ran) == ran


def test_choices_that_coincide_are_tested_once_and_count_for_both(tmp_path, pretend):
    pretend.scores = lambda config: (config.lr * config.all_options()["rho"], 0.5 + config.seed / 10)
    outcome = sweep(SMALL, ["sam:lr=0.1", "sam:rho=0.5"], GRID, tmp_path, seeds=2)
    assert outcome.best["sam:lr=0.1"] == outcome.best["sam:rho=0.5"]
    assert [s.scores for s in outcome.standings] == [[0.5, 0.6]] * 2
    assert len(pretend.ran) == 3 + 2
    written = json.loads(outcome.path.read_text())
    assert written["finished"] is True
    assert [len(m["test"]["runs"]) for m in written["methods"].values()] == [2, 2]
    shown = [trial.params["method"] for trial in trials_of(tmp_path, f"{outcome.study}-test")]
    assert shown == ["sam:lr=0.1"] * 2


def test_the_live_table_counts_a_run_of_two_rows_once(tmp_path, pretend):
    seen = []

    def watch(standings):
        text = io.StringIO()
        Console(file=text, width=140).print(screen._draw(standings))
        seen.append(text.getvalue())

    sweep(SMALL, ["sam:lr=0.1", "sam:rho=0.5"], GRID, tmp_path, seeds=1, report=watch)
    assert any("1 running" in text for text in seen)
    assert not any("2 running" in text for text in seen)


def test_studies_keep_their_names_and_rows_of_other_names_make_another(tmp_path):
    def plan(methods, base=SMALL, grid=PAPER, trials=9, data=""):
        found, _ = points(base, methods, grid, trials)
        return planning.Plan(points=found, seeds=1, final={}, out=tmp_path, storage="", data=data)

    assert plan(["erm", "sam", "tsam"]).name == "digits-adc0ea3ba9"
    assert plan(["erm", "sam", "tsam"], data="x").name == "digits-6874ce3d57"
    plain, entry = (
        plan(["sam"], SMALL.with_settings({"rho": 0.5}), RATES, None),
        plan(["sam:rho=0.5"], SMALL, RATES, None),
    )
    assert [p.config.key() for p in plain.points["sam"]] == [p.config.key() for p in entry.points["sam:rho=0.5"]]
    assert plain.name != entry.name  # Optuna holds a study to the names that it began with


def test_runs_of_a_plain_sweep_are_reused_by_one_with_entries(tmp_path, monkeypatch):
    first = sweep(SMALL.with_settings({"rho": 0.5}), ["sam"], RATES, tmp_path, seeds=1)
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    second = sweep(SMALL, ["sam:rho=0.5"], RATES, tmp_path, seeds=1)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")} == made
    assert second.standings[0].scores == first.standings[0].scores


def test_entries_are_gone_on_with(tmp_path, pretend):
    pretend.interrupt(5)
    with pytest.raises(KeyboardInterrupt):
        sweep(SMALL, ENTRIES, GRID, tmp_path, seeds=1)
    outcome = sweep(SMALL, ENTRIES, GRID, tmp_path, seeds=1)
    assert len(pretend.ran) == 16 + 1 + 4  # the interrupted one again, and the tests
    assert all(s.finished for s in outcome.standings)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["sam:num_samples=3"], "'sam:num_samples=3': sam has no num_samples"),
        (["sam:rho"], "got 'sam:rho'"),
        (["sam:"], "got 'sam:'"),
        (["sam:size=1"], "'sam:size=1': sam has no size; its options: rho"),
        (["sam:rho=big"], "'sam:rho=big': rho: 'big' is not a float"),
        (["adam:rho=1"], "unknown method 'adam': one of erm"),
        *(
            (["erm", f"sam:{name}=1"], f"{name} cannot be set for a single method")
            for name in ("task", "seed", "device")
        ),
        *((["erm", f"sam:{name}=0.2"], f"{name} is the same for all trials") for name in ("noise", "validation")),
        (["sam:rho=-1"], "sam:rho=-1: rho must be a finite number >= 0, got -1.0"),
        (["sam:batch_size=0"], "sam:batch_size=0: batch_size must be > 0, got 0"),
        (["sam", "erm", "sam"], "sam is given twice"),
        (["sam:rho=0.1", "sam:rho=0.10"], "sam:rho=0.1 and sam:rho=0.10 are the same runs: leave one out"),
        (["sam", "sam:average=false"], "sam and sam:average=false are the same runs: leave one out"),
        (["sam:average=true", "--grid", "tsam:rho=1"], "tsam is not among the methods: sam:average=true"),
        (["erm:average=true", "--grid", "rho=1,2"], "--grid rho: erm has no rho"),
        (["sam", "sam:lr=0.3"], "the grids differ in size (sam 2, sam:lr=0.3 1): say --trials N"),
        (["sam:lr=0.3", "--trials", "2"], "sam:lr=0.3 has 1 points in its grid and 2 trials to make"),
        (
            ["erm", "--grid", "epochs=1,2", "--final-epochs", "3"],
            "the grid's epochs would be chosen in vain: --final-epochs changes them",
        ),
        (
            ["erm:passes=20", "--final-passes", "30"],
            "'erm:passes=20' has its own passes, which --final-passes would change",
        ),
        (
            ["erm:epochs=2", "--final-epochs", "3"],
            "'erm:epochs=2' has its own epochs, which --final-epochs would change",
        ),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_wrong_entries_are_one_line_and_nothing_is_made(arguments, says, tmp_path, capsys):
    out = tmp_path / "runs"
    assert main(["sweep", "digits", "--grid", "lr=0.1,0.2", "--out", str(out), "--methods", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert says in error
    assert len(error.splitlines()) == 1
    assert not out.exists()


# ---------------------------------------------------------------- the choice


def test_the_choice_is_made_on_the_validation_split_and_the_test_comes_after(tmp_path, pretend):
    grid = {"lr": (0.1, 0.3, 0.2)}  # the better on validation, the worse on the test set
    outcome = sweep(SMALL, ["erm", "sam"], grid, tmp_path, seeds=2, final_epochs=5)
    assert [outcome.best[m].lr for m in ("erm", "sam")] == [0.3, 0.3]
    assert all(s.scores == [0.7, 0.7] for s in outcome.standings)
    searched, tested = pretend.ran[:6], pretend.ran[6:]
    assert {(c.epochs, c.seed) for c in searched} == {(1, 0)}
    assert sorted((c.method, c.lr, c.epochs, c.seed) for c in tested) == [
        (m, 0.3, 5, seed) for m in ("erm", "sam") for seed in (0, 1)
    ]


def test_tests_may_have_more_passes_and_say_what_else_ends_them(tmp_path, pretend):
    base = replace(SMALL, passes=8.0)
    outcome = sweep(base, ["erm"], {"lr": (0.1, 0.3)}, tmp_path, seeds=1, final_passes=20)
    assert [c.passes for c in pretend.ran] == [8, 8, 20]
    assert outcome.notes == ["the tests end after 20 passes or, as the trials, 1 epochs: whichever comes first"]
    outcome = sweep(base, ["erm"], {"lr": (0.1, 0.3)}, tmp_path, seeds=1, final_epochs=5)
    assert outcome.notes == ["the tests end after 5 epochs or, as the trials, 8 passes: whichever comes first"]
    assert outcome.best["erm"].passes == 8
    assert not sweep(SMALL, ["erm"], {"lr": (0.1, 0.3)}, tmp_path, seeds=1, final_epochs=5).notes
    assert not sweep(base, ["erm"], {"lr": (0.1, 0.3)}, tmp_path, seeds=0, final_epochs=5).notes  # there are none


@pytest.mark.parametrize(
    ("entry", "device", "final", "told"),
    [
        ("erm:seconds=0.5", "cpu", None, "cpu"),
        ("erm", "cpu", 0.5, "cpu"),
        ("erm:seconds=0.5", "cuda:0,cuda:1", None, ""),  # one for each
        ("erm", "cpu", None, ""),
    ],
)
def test_workers_that_share_a_device_and_a_clock_are_told(entry, device, final, told, tmp_path, monkeypatch):
    monkeypatch.setattr("tiltsam.lab.sweep._carry_out", lambda plan, *rest: plan)
    base = replace(SMALL, device=device)
    plan = sweep(base, [entry], {"lr": (0.1, 0.3)}, tmp_path, workers=2, final_seconds=final)
    said = [note for note in plan.notes if "slow each other down" in note]
    wanted = f"2 workers on {told} slow each other down, and the budget is in seconds: use one worker a device"
    assert said == ([wanted] if told else [])


def test_what_a_trial_did_on_the_test_set_is_nowhere(tmp_path, pretend):
    outcomes = []
    for name, tests in {"good": 0.9, "bad": 0.0}.items():
        pretend.scores = lambda config, tests=tests: (round(math.sin(50 * config.lr), 6), tests * config.lr)
        outcomes.append(sweep(SMALL, ["erm"], {"lr": (0.1, 0.2, 0.3)}, tmp_path / name, seeds=0))
        for trial in trials_of(tmp_path / name, outcomes[-1].study):
            assert set(trial.user_attrs["result"]) == {
                "metric",
                "validation_accuracy",
                "validation_loss",
                "epoch",
                "seconds",
            }
    one, two = (json.loads(outcome.path.read_text())["methods"] for outcome in outcomes)
    assert one == two
    kept = validation_numbers({"test_accuracy": 1, "score": 1, "score_at_best_validation": 1, "validation_f1": 2})
    assert kept == {"validation_f1": 2}


def test_equal_scores_go_by_the_loss_then_by_the_order():
    def trial(lr, score, loss):
        result = {"metric": "f1", "validation_f1": score, "validation_loss": loss}
        point = GridPoint(replace(SMALL, lr=lr), {"lr": lr})
        return Trial(point, Entry("done", result))

    rows = [trial(0.1, 0.5, 0.1), trial(0.2, 0.8, 0.9), trial(0.3, 0.8, 0.3), trial(0.4, 0.8, 0.3)]
    assert Standing("erm", rows).best.point.config.lr == 0.3


@pytest.mark.parametrize(
    ("settings", "chosen", "edges"),
    [
        ([{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.3}], 0, {"lr": "smallest"}),
        ([{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.3}], 1, {}),
        ([{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.3}], 2, {"lr": "largest"}),
        ([{"lr": 0.1, "rho": 0.5}, {"lr": 0.1, "rho": 1.0}], 1, {"rho": "largest"}),  # one value has no edge
        ([{"t": 0.0}, {"t": 5.0}], 0, {}),  # there is nothing below
        ([{"radius": None}, {"radius": 2.0}], 1, {}),
        ([{"radius": None}, {"radius": 2.0}, {"radius": 3.0}], 2, {}),  # where the default lies is the network's matter
        ([{"t": 1.0}, {"t": 5.0}], 0, {"t": "smallest"}),
        ([{"t": 1.0, "num_samples": 1}, {"t": 5.0, "num_samples": 1}], 0, {}),  # which does nothing there
        ([{"num_samples": 1}, {"num_samples": 3}], 1, {}),  # more is dearer, not beyond
        ([{"schedule": "cosine"}, {"schedule": "constant"}], 0, {}),
    ],
)
def test_a_choice_at_the_edge_of_what_was_tried_is_told(settings, chosen, edges):
    rows = [
        Trial(
            GridPoint(SMALL.with_settings(each), each),
            Entry("done", {"metric": "f1", "validation_f1": float(k == chosen), "validation_loss": 1}),
        )
        for k, each in enumerate(settings)
    ]
    assert Standing("sam", rows).edges == edges


def test_a_rate_that_diverges_was_tried(tmp_path, pretend, capsys):
    def scores(config):
        if config.lr > 0.1:
            raise Diverged("the loss is nan")
        return config.lr, 0.5

    pretend.scores = scores
    rates = ["--epochs", "1", "--seeds", "1", "--out"]
    assert main(["sweep", "digits", "--methods", "erm", "--grid", "lr=0.01,0.1,1", *rates, str(tmp_path / "one")]) == 0
    assert "may do better" not in capsys.readouterr().out
    assert main(["sweep", "digits", "--methods", "erm", "--grid", "lr=0.01,0.1", *rates, str(tmp_path / "two")]) == 0
    assert "erm: lr=0.1 is the largest that was tried: a larger one may do better\n" in capsys.readouterr().out
    [path] = (tmp_path / "two").glob("sweeps/*/sweep.json")
    assert json.loads(path.read_text())["methods"]["erm"]["edges"] == {"lr": "largest"}


def test_a_run_that_diverges_is_counted_and_not_tried_again(tmp_path, pretend):
    def scores(config):
        if config.lr > 0.25:
            raise Diverged("the loss is not finite")
        return (math.nan, 0.5) if config.lr > 0.15 else (0.4, 0.5)

    pretend.scores = scores
    grid = {"lr": (0.1, 0.2, 0.3)}
    outcome = sweep(SMALL, ["erm"], grid, tmp_path, seeds=1)
    (s,) = outcome.standings
    assert [t.entry.state for t in s.trials] == ["done", "diverged", "diverged"]
    assert s.config.lr == 0.1
    ran = len(pretend.ran)
    assert sweep(SMALL, ["erm"], grid, tmp_path, seeds=1).standings == outcome.standings
    assert len(pretend.ran) == ran
    written = json.loads(outcome.path.read_text())
    assert written["methods"]["erm"]["trials"][2]["error"] == "the loss is not finite"


def test_what_is_wrong_with_the_machine_is_no_divergence(tmp_path, pretend):
    def no_compiler(config):
        raise TrainError("the model cannot be compiled here")

    pretend.scores, mended = no_compiler, pretend.scores
    with pytest.raises(TrainError, match="cannot be compiled here"):
        sweep(SMALL, ["erm"], RATES, tmp_path, seeds=1)
    pretend.scores = mended
    (s,) = sweep(SMALL, ["erm"], RATES, tmp_path, seeds=1).standings
    assert [t.entry.state for t in s.trials] == ["done", "done"]


def test_a_method_of_which_nothing_came(tmp_path, pretend, capsys):
    pretend.scores = lambda config: (math.nan, 0.5) if config.method == "sam" else (0.5, 0.5)
    arguments = ["--methods", "erm", "sam", "--grid", "lr=0.1,0.2", "--seeds", "1", "--out", str(tmp_path)]
    assert main(["sweep", "digits", *arguments]) == 0
    out = capsys.readouterr().out
    assert "sam: no trial came to a number" in out
    (path,) = tmp_path.glob("sweeps/*/sweep.json")
    written = json.loads(path.read_text())
    assert written["methods"]["sam"]["config"] is None
    assert written["methods"]["erm"]["test"]["mean"] == 0.5
    assert written["methods"]["erm"]["test"]["error"] is None  # one seed has none
    pretend.scores = lambda config: (math.nan, 0.5)
    assert main(["sweep", "digits", *arguments, "--epochs", "7"]) == 2
    told = capsys.readouterr()
    assert "erm: no trial came to a number\nsam: no trial came to a number\nresult: " in told.out
    assert told.err.endswith("tiltsam sweep: nothing could be chosen: no trial came to a number\n")


def test_a_task_that_is_none_leaves_nothing_behind(tmp_path, capsys):
    assert main(["sweep", "digit", "--methods", "erm", "--grid", "lr=0.1", "--out", str(tmp_path / "runs")]) == 2
    assert "'digit'" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


# ---------------------------------------------------------------- going on, reuse, the file


def test_interrupted_the_same_call_goes_on(tmp_path, pretend):
    pretend.interrupt(2)
    grid = {"lr": (0.1, 0.2, 0.3)}
    with pytest.raises(KeyboardInterrupt):
        sweep(SMALL, ["erm"], grid, tmp_path, seeds=1)
    (path,) = tmp_path.glob("sweeps/*/sweep.json")
    assert json.loads(path.read_text())["finished"] is False
    pretend.scores = lambda config: (config.lr, 0.5)
    outcome = sweep(SMALL, ["erm"], grid, tmp_path, seeds=1)
    assert json.loads(path.read_text())["finished"] is True
    assert [c.lr for c in pretend.ran] == [0.1, 0.2, 0.2, 0.3, 0.3]  # the interrupted one again, and the test
    states = [t.state.name for t in trials_of(tmp_path, outcome.study)]
    assert sorted(states) == ["COMPLETE", "COMPLETE", "COMPLETE", "FAIL"]


def test_trained_runs_are_reused_and_the_numbers_are_those_of_the_records(tmp_path, monkeypatch):
    compare_configs([SMALL.with_settings({"method": "erm", "lr": 0.1})], tmp_path)
    made = Record.of(tmp_path, SMALL.with_settings({"method": "erm", "lr": 0.1})).folder / "result.json"
    before = made.stat().st_mtime_ns
    outcome = sweep(SMALL, ["erm", "sam"], RATES, tmp_path, seeds=2)
    assert made.stat().st_mtime_ns == before
    written = json.loads(outcome.path.read_text())
    assert written["finished"] is True
    assert written["trials_per_method"] == 2
    for method, found in written["methods"].items():
        assert len(found["trials"]) == 2
        for trial in found["trials"]:
            result = json.loads((tmp_path / trial["run"] / "result.json").read_text())
            assert trial["validation_accuracy"] == result["validation_accuracy"]
            assert not any(name.startswith(("test", "score")) for name in trial)
        best = max(found["trials"], key=lambda t: (t["validation_accuracy"], -t["validation_loss"]))
        assert found["settings"] == best["settings"]
        assert TrainConfig(**found["config"]) == SMALL.with_settings({"method": method, **best["settings"]})
        scores = [json.loads((tmp_path / r["run"] / "result.json").read_text())["score"] for r in found["test"]["runs"]]
        assert found["test"]["mean"] == pytest.approx(sum(scores) / 2)
        assert found["test"]["error"] == pytest.approx(abs(scores[0] - scores[1]) / 2)
    monkeypatch.setattr(planning, "train", lambda *a, **k: pytest.fail("trained again"))
    assert sweep(SMALL, ["erm", "sam"], RATES, tmp_path, seeds=2).standings == outcome.standings


def test_a_sweep_that_tested_nothing_has_no_report(tmp_path, capsys, pretend):
    assert (
        main(["sweep", "digits", "--methods", "erm", "--grid", "lr=0.1", "--seeds", "0", "--out", str(tmp_path)]) == 0
    )
    (path,) = tmp_path.glob("sweeps/*/sweep.json")
    assert "report:" not in capsys.readouterr().out
    for command in ("report", "sharpness"):
        assert main([command, str(path.parent)]) == 2
        assert f"{path} has no tests, or none yet" in capsys.readouterr().err


def test_it_ends_with_a_report_of_what_was_tested(tmp_path, capsys):
    arguments = ["--grid", "lr=0.01,0.1", "--epochs", "1", "--seeds", "2", "--out", str(tmp_path)]
    assert main(["sweep", "digits", "--methods", "erm", "erm:average=true", *arguments]) == 0
    (path,) = tmp_path.glob("sweeps/*/sweep.json")
    assert f"report: {path.parent}/report/report.html" in capsys.readouterr().out
    table = (path.parent / "report" / "tables" / "results.md").read_text()
    assert "average=True" in table
    assert "lr" not in table  # the trials that were not chosen have no part in it
    tested = {run["run"] for each in json.loads(path.read_text())["methods"].values() for run in each["test"]["runs"]}
    assert {folder.relative_to(tmp_path).as_posix() for folder in find_run_folders([path.parent])} == tested
    assert len(find_run_folders([tmp_path])) == 6  # all, each once
    for here, name in ((path.parent, "."), (path.parent.parent, path.parent.name), (tmp_path / "digits", "../sweeps")):
        with chdir(here):
            assert len(find_run_folders([Path(name)])) == 4, name
    (tmp_path / "beside").mkdir()
    for link, to in (("study", path.parent), ("out", tmp_path), ("sweeps", path.parent.parent)):
        (tmp_path / "beside" / link).symlink_to(to)
    for way in ("study", "sweeps", f"sweeps/{path.parent.name}", f"out/sweeps/{path.parent.name}"):
        found = find_run_folders([tmp_path / "beside" / way])
        assert {folder.resolve().relative_to(tmp_path).as_posix() for folder in found} == tested, way
    shutil.rmtree(tmp_path / "digits" / TrainConfig(epochs=1, method="erm", lr=0.1).key() / "seed-1")
    assert main(["report", str(path.parent)]) == 0
    assert "erm, seed 1: no record here" in capsys.readouterr().out
    copy = shutil.copytree(path.parent, tmp_path / "elsewhere" / "copied" / "here")
    assert main(["report", str(copy)]) == 2
    told = f"none of the runs that {copy}/sweep.json tested is below {tmp_path / 'elsewhere'}"
    assert f"{told}: they are on another machine, or this folder was in another OUT/sweeps" in capsys.readouterr().err
    path.write_text("{}")
    assert main(["report", str(path.parent)]) == 2
    assert f"{path} is not what tiltsam sweep writes" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a%20b", "a?b", "a b#c"])
def test_the_database_lies_in_a_folder_of_any_name(name, tmp_path):
    (tmp_path / name).mkdir()
    store = open_store(sqlite_url(tmp_path / name))
    store.close()
    assert (tmp_path / name / "sweeps.db").exists()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def arrays(path: Path, shift: float) -> str:
    np.savez(path, x=np.random.default_rng(0).random((40, 3)) + shift, y=np.arange(40) % 2)
    return f"npz:{path}"


def test_trials_on_other_data_are_not_reused(tmp_path, capsys):
    command = ["sweep", arrays(tmp_path / "a.npz", 0.0), "--methods", "erm", "--grid", "lr=0.01,0.1", "--epochs", "1"]
    command += ["--seeds", "1", "--storage", sqlite_url(tmp_path), "--out"]
    assert main([*command, str(tmp_path / "one")]) == 0
    assert main([*command, str(tmp_path / "one")]) == 0  # the same data, the same result
    arrays(tmp_path / "a.npz", 1.0)
    capsys.readouterr()
    assert main([*command, str(tmp_path / "one")]) == 2
    assert "changed since this run" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "two")]) == 0  # what the database knows is of the other data
    assert len(list(tmp_path.glob("two/*/*/seed-0/result.json"))) == 2


def test_data_that_change_in_the_middle_end_the_sweep(tmp_path, pretend):
    def edit(config):
        arrays(tmp_path / "a.npz", 1.0)
        return config.lr, 0.5

    pretend.scores = edit
    base = replace(SMALL, task=arrays(tmp_path / "a.npz", 0.0))
    with pytest.raises(SweepError, match="changed since this sweep began: use another --out"):
        sweep(base, ["erm"], RATES, tmp_path / "runs", seeds=1)
    assert len(pretend.ran) == 1


def test_optuna_says_nothing_and_its_tools_can_read_the_study(tmp_path, pretend, capsys):
    arguments = ["--method", "tsam", "--grid", "lr=0.1,0.2", "--grid", "t=0,5", "--seeds", "1", "--out", str(tmp_path)]
    assert main(["sweep", "digits", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "[I " not in captured.out
    assert "tsam seed 0: test 80.00" in captured.out
    assert "4/4" in captured.out
    (path,) = tmp_path.glob("sweeps/*/sweep.json")
    study = optuna.load_study(study_name=json.loads(path.read_text())["study"], storage=sqlite_url(tmp_path))
    assert study.best_params == {"method": "tsam", "lr": 0.2, "t": 0.0}
    assert study.best_value == 0.2
    assert main(["sweep", "digits", *arguments]) == 0
    assert len(pretend.ran) == 5  # the second time only the result is printed
    assert "tsam seed 0" not in capsys.readouterr().out


def test_the_live_table_shows_no_test_before_the_choice(tmp_path, pretend):
    seen = []

    def watch(standings):
        text = io.StringIO()
        Console(file=text, width=140).print(screen._draw(standings))
        seen.append((all(t.entry.finished for s in standings for t in s.trials), text.getvalue()))

    sweep(SMALL, ["erm"], {"lr": (0.1, 0.2)}, tmp_path, seeds=1, report=watch)
    assert "80.00" not in "".join(text for done, text in seen if not done)
    assert "80.00" in seen[-1][1]
    assert "lr=0.2" in seen[-1][1]


def test_several_devices_are_dealt_out(tmp_path, pretend):
    outcome = sweep(replace(SMALL, device="cpu,cpu"), ["erm"], RATES, tmp_path, seeds=1)
    assert {c.device for c in pretend.ran} == {"cpu"}
    assert outcome.best["erm"].device == "cpu"
