"""Many workers on one study: on SQLite and on a PostgreSQL server, each run is made once, whoever dies."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import optuna
import pytest
import torch

import postgres
from lab_processes import files_named, wait_for
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.errors import SweepError
from tiltsam.lab.records import Record
from tiltsam.lab.sweep import sweep
from tiltsam.lab.sweeping.board import Board, Job
from tiltsam.lab.sweeping.grids import points
from tiltsam.lab.sweeping.plan import Desk, Plan
from tiltsam.lab.sweeping.store import open_store, sqlite_url
from tiltsam.lab.sweeping.workers import _start, run_workers, work
from tiltsam.lab.train import train

BASE = TrainConfig("digits", method="erm", epochs=3, batch_size=256)
GRID = {"lr": (0.02, 0.05, 0.1)}


@pytest.fixture(scope="module")
def server():
    if reason := postgres.missing():
        pytest.skip(reason)
    with postgres.serve() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def storage(request, tmp_path):
    if request.param == "sqlite":
        return sqlite_url(tmp_path)
    url = request.getfixturevalue("server")
    open_store(url).close()
    return url


def plan_of(out: Path, storage: str, **changes) -> Plan:
    found, _ = points(replace(BASE, **changes), ["erm"], GRID)
    return Plan(points=found, seeds=1, final={}, out=out, storage=storage, heartbeat=1.0)


PRELOAD = ["tiltsam.lab.sweeping.workers", "sklearn.datasets", "alembic.migration", "optuna.storages._rdb.models"]


@pytest.fixture(scope="module")
def processes():
    """Processes that have everything loaded already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def whole_checkpoints(out):
    return [path for path in files_named("manifest.json", out) if path.parent.name.isdigit()]


def work_with_checkpoints(plan):
    """A worker that writes a checkpoint after every epoch: the server that forks it may have another environment."""
    os.environ["TILTSAM_CHECKPOINT_SECONDS"] = "0"
    torch.set_num_threads(1)
    work(plan)


def killed_at_work(worker: int, run: Path) -> bool:
    """Kill a worker that has not finished that run; it is stopped first, so that it does not finish meanwhile."""
    os.kill(worker, signal.SIGSTOP)
    wait_for(lambda: Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0] in "TZ")
    at_work = not (run / "result.json").exists()
    os.kill(worker, signal.SIGKILL if at_work else signal.SIGCONT)
    return at_work


def tickets(storage: str, study: str) -> list[optuna.trial.FrozenTrial]:
    store = open_store(storage)
    try:
        return store.study(study).get_trials()
    finally:
        store.close()


def epochs_of(run: Path) -> list[float]:
    return [json.loads(line)["epoch"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def running(desk: Desk):
    return [t for s in desk.look() for t in s.trials if t.entry.state == "running"]


def assert_each_job_was_done_once(plan: Plan) -> None:
    for study in (plan.name, f"{plan.name}-test"):
        complete = Counter(t.user_attrs["job"] for t in tickets(plan.storage, study) if t.state.name == "COMPLETE")
        assert set(complete.values()) == {1}
        assert not [t for t in tickets(plan.storage, study) if t.state.name in ("RUNNING", "WAITING")]
    with Desk(plan) as desk:
        standings = desk.look()
    assert all(s.finished for s in standings)
    assert len(standings[0].trials) == 3


# ---------------------------------------------------------------- whole sweeps


def test_two_workers_on_one_study_share_the_runs(tmp_path, server, processes):
    plan = plan_of(tmp_path, server)
    both = [processes.Process(target=work_with_checkpoints, args=(plan,)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(300)
    assert_each_job_was_done_once(plan)
    assert Counter(t.state.name for t in tickets(server, plan.name)) == {"COMPLETE": 3}
    for path in tmp_path.rglob("metrics.jsonl"):
        assert epochs_of(path.parent) == [1, 2, 3]  # nobody else was in there


def test_a_killed_workers_trial_is_finished_once_from_its_checkpoint(tmp_path, storage, processes):
    plan = plan_of(tmp_path, storage, epochs=15)
    victim, helper = (processes.Process(target=work_with_checkpoints, args=(plan,)) for _ in range(2))
    victim.start()

    def later_runs():
        return [path.parents[2] for path in whole_checkpoints(tmp_path) if int(path.parent.name) > 2]

    wait_for(lambda: any(killed_at_work(victim.pid, run) for run in later_runs()))
    victim.join()
    helper.start()
    helper.join(300)
    assert_each_job_was_done_once(plan)
    found = tickets(storage, plan.name)
    (broken,) = (t for t in found if t.state.name == "FAIL")
    assert broken.user_attrs["owner"].endswith(f":{victim.pid}")
    assert broken.user_attrs["ended"] == "its worker died"
    (whole,) = (t for t in found if t.state.name == "COMPLETE" and t.user_attrs["job"] == broken.user_attrs["job"])
    assert whole.user_attrs["owner"].endswith(f":{helper.pid}")
    config = next(p.config for p in plan.points["erm"] if Job(p.config, {}).key == broken.user_attrs["job"])
    record = Record.of(tmp_path, config)
    assert len(epochs_of(record.folder)) <= 17  # not from the start: at most what was since the last checkpoint
    unbroken = train(config, Record(tmp_path / "unbroken"))
    assert {**record.result(), "seconds": 0} == {**unbroken, "seconds": 0}


def test_workers_of_one_command_and_one_of_them_is_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("TILTSAM_CHECKPOINT_SECONDS", "0")
    monkeypatch.setattr("tiltsam.lab.sweeping.workers.LOOK_SECONDS", 0.05)
    said, killed = [], []

    def kill_one(standings):
        for s in standings:
            for trial in s.trials:
                if trial.entry.state == "running" and not killed:
                    owner = int(trial.entry.owner.rpartition(":")[2])
                    if killed_at_work(owner, Record.of(tmp_path, trial.point.config).folder):
                        killed.append(owner)

    base = replace(BASE, epochs=10)
    outcome = sweep(base, ["erm"], GRID, tmp_path, seeds=1, workers=2, report=kill_one, say=said.append)
    assert said[0].endswith("was killed by SIGKILL; the others take up its work")
    assert killed[0] != os.getpid()
    (s,) = outcome.standings
    assert [t.entry.state for t in s.trials] == ["done"] * 3
    assert len(s.scores) == 1
    assert Counter(t.state.name for t in tickets(sqlite_url(tmp_path), outcome.study)) == {"COMPLETE": 3, "FAIL": 1}


def test_workers_make_a_run_of_two_rows_once(tmp_path):
    entries = ["sam:lr=0.1", "sam:rho=0.5", "sam:average=true,rho=0.5"]
    outcome = sweep(BASE, entries, {"lr": (0.02, 0.1), "rho": (0.1, 0.5)}, tmp_path, seeds=2, workers=2)
    assert [s.method for s in outcome.standings] == entries
    assert [(len(s.trials), len(s.scores)) for s in outcome.standings] == [(2, 2)] * 3
    found = tickets(sqlite_url(tmp_path), outcome.study)
    assert Counter(t.state.name for t in found) == {"COMPLETE": 5}
    assert len({t.user_attrs["job"] for t in found}) == 5


def test_what_a_worker_says_is_wrong_reaches_the_user(tmp_path):
    plan = plan_of(tmp_path, sqlite_url(tmp_path), model="resnet18")
    with pytest.raises(SweepError, match="resnet18"):
        run_workers(plan, ["cpu"], look=lambda: None, say=pytest.fail)


def test_ctrl_c_leaves_a_study_that_the_same_command_continues(tmp_path):
    command = [sys.executable, "-m", "tiltsam", "sweep", "digits", "--method", "erm", "--grid", "lr=0.02,0.05,0.1"]
    command += ["--epochs", "4000", "--batch-size", "256", "--seeds", "1", "--out", str(tmp_path)]
    # Where the tests run in the background, children would ignore a Ctrl-C.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, preexec_fn=heed, **pipes)
    wait_for(lambda: files_named("metrics.jsonl", tmp_path))
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 130
    (line,) = error.splitlines()
    assert line.startswith("tiltsam sweep: interrupted; ")
    assert "the same command resumes" in line
    plan = plan_of(tmp_path, sqlite_url(tmp_path), epochs=4000)
    assert plan.folder.exists()  # a call from Python finds the study of the command
    with Desk(plan) as desk:
        assert not running(desk)


def test_an_interrupt_while_workers_start_stops_those_that_did(tmp_path, monkeypatch):
    """Who calls from Python goes on living, and so would they."""
    first = Mock()
    monkeypatch.setattr("tiltsam.lab.sweeping.workers._start", Mock(side_effect=[first, KeyboardInterrupt]))
    with pytest.raises(KeyboardInterrupt):
        run_workers(plan_of(tmp_path, "sqlite://"), ["cpu", "cpu"], look=lambda: None, say=pytest.fail)
    first.send_signal.assert_called_once_with(signal.SIGINT)
    first.wait.assert_called()


def test_a_second_interrupt_kills_the_workers(tmp_path, monkeypatch):
    slow = [Mock(**{"poll.return_value": None, "wait.side_effect": [KeyboardInterrupt, None]}) for _ in range(2)]
    monkeypatch.setattr("tiltsam.lab.sweeping.workers._start", Mock(side_effect=slow))
    with pytest.raises(KeyboardInterrupt):
        run_workers(
            plan_of(tmp_path, "sqlite://"), ["cpu", "cpu"], look=Mock(side_effect=KeyboardInterrupt), say=pytest.fail
        )
    for process in slow:
        process.kill.assert_called_once()


def test_a_worker_that_is_interrupted_at_its_imports_is_gone(tmp_path, monkeypatch):
    """Torch, for one, drops an interrupt that comes while it imports NumPy."""
    (tmp_path / "tiltsam").mkdir()
    (tmp_path / "tiltsam" / "__init__.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    pass\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = _start(plan_of(tmp_path, "sqlite://"), "cpu", tmp_path / "log", 1)
    assert process.wait(60) == -signal.SIGINT


def test_a_worker_whose_parent_is_gone_stops_within_its_epoch(tmp_path, monkeypatch):
    monkeypatch.setattr("tiltsam.lab.train.TICK_SECONDS", 0.0)
    parent = Mock(side_effect=[None, KeyboardInterrupt])
    with Desk(plan_of(tmp_path, sqlite_url(tmp_path)), pause=parent) as desk, pytest.raises(KeyboardInterrupt):
        desk.work()
    assert not files_named("metrics.jsonl", tmp_path)


# ---------------------------------------------------------------- machines that share the database alone


def board_of(storage: str, out: Path, name: str = "board") -> Board:
    return Board(open_store(storage), name, [Job(BASE, {"lr": 0.1})], out, heartbeat=0.1)


def test_of_machines_that_come_at_once_one_gets_the_job(tmp_path, storage, monkeypatch):
    store = open_store(storage)
    boards = [Board(store, "rush", [Job(BASE, {"lr": 0.1})], tmp_path / str(k), heartbeat=30) for k in range(4)]
    everybody, came, had = threading.Barrier(4), set(), []
    create = store.storage.create_new_trial

    def create_at_once(*arguments):
        if threading.get_ident() not in came:  # a database that was busy is asked again
            came.add(threading.get_ident())
            everybody.wait(300)  # all have seen that nobody has it, and none has written yet
        return create(*arguments)

    monkeypatch.setattr(store.storage, "create_new_trial", create_at_once)

    def come(board: Board) -> None:
        with board.claim(board.jobs[0]) as ticket:
            if ticket is not None:
                had.append(board)
                time.sleep(0.3)
                ticket.finish(0.5, {"metric": "accuracy"})

    threads = [threading.Thread(target=come, args=(board,)) for board in boards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(had) == 1
    assert all(board.look()[board.jobs[0].key].state == "done" for board in boards)
    store.close()


def test_another_machines_job_is_taken_up_when_its_signs_of_life_cease(tmp_path, storage, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("tiltsam.lab.sweeping.board.time", Mock(monotonic=lambda: now[0]))
    here, there = (board_of(storage, tmp_path / name, "signs") for name in ("here", "there"))
    (job,) = here.jobs

    def sign_of_life():
        return there._study.get_trials()[0].user_attrs["beat"]

    def it_lives() -> bool:
        with here.claim(job) as mine:
            return mine is None

    with there.claim(job) as theirs:
        assert theirs is not None
        for _ in range(3):
            last = sign_of_life()
            wait_for(lambda last=last: sign_of_life() != last)
            now[0] += 60 * here.heartbeat
            assert it_lives()
        theirs._over.set()  # as if its machine had lost its power
        theirs._thread.join()
        assert it_lives()  # there may have been one more
        now[0] += 5.5 * here.heartbeat
        assert it_lives()
        now[0] += here.heartbeat
        with here.claim(job) as mine:
            assert mine is not None
            mine.finish(0.7, {"metric": "accuracy"})
        theirs.finish(0.1, {"metric": "accuracy"})  # it wakes up, too late
        assert theirs.lost
    assert here.look()[job.key].result == {"metric": "accuracy"}
    states = [t.state.name for t in tickets(storage, "signs")]
    assert sorted(states) == ["COMPLETE", "FAIL"]
    for board in (here, there):
        board.store.close()


def test_a_worker_that_was_taken_for_dead_notices(tmp_path, storage):
    here, there = (board_of(storage, tmp_path / name, "notice") for name in ("here", "there"))
    (job,) = here.jobs
    with there.claim(job) as theirs:
        here._end(theirs._trial_id, optuna.trial.TrialState.FAIL, ended="its worker died")
        wait_for(lambda: theirs.lost)
    for board in (here, there):
        board.store.close()


def test_a_database_that_is_away_for_a_moment_is_waited_for(tmp_path):
    store = open_store(sqlite_url(tmp_path))
    calls = []

    def away():
        calls.append(1)
        if len(calls) < 2:
            raise optuna.exceptions.StorageInternalError("gone")
        return "back"

    assert store.insist(away) == "back"
    assert store.absences == 1
    store.close()
