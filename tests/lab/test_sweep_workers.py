"""Several processes on one sweep, on SQLite and on PostgreSQL: each trial ends once, whichever process is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import optuna
import pytest
import torch

import tiltsam
from helpers import postgres
from helpers.displays import Told
from helpers.lab_processes import CONTEXT, files_named, wait_for
from tiltsam.cli import main
from tiltsam.lab import processes
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.errors import UserError
from tiltsam.lab.records import Record
from tiltsam.lab.studies import SeededSampler, SharedStudy, open_storage, sqlite_url
from tiltsam.lab.sweep import sweep
from tiltsam.lab.train import train

BASE = TrainConfig("digits", epochs=3, batch_size=256)
RATES = {"lr": (0.02, 0.05, 0.1)}


@pytest.fixture(scope="module")
def server():
    if reason := postgres.missing():
        pytest.skip(reason)
    with postgres.serve() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def storage(request, tmp_path):
    return sqlite_url(tmp_path) if request.param == "sqlite" else request.getfixturevalue("server")


def run_sweep(base, out, storage, options):
    """Run in a process that writes a checkpoint after every epoch."""
    os.environ["TILTSAM_CHECKPOINT_SECONDS"] = "0"
    torch.set_num_threads(1)
    sweep(base, ["erm"], RATES, out, storage=storage, heartbeat=1, **options)


def start(base, out, storage, **options):
    process = CONTEXT.Process(target=run_sweep, args=(base, out, storage, options))
    process.start()
    return process


def run_command(arguments, errors):
    """Run a command that Ctrl-C interrupts, also in the background, and keep what it writes to stderr."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    with open(os.devnull, "w") as sys.stdout, open(errors, "w") as sys.stderr:
        code = main(arguments)
    os._exit(code)


def start_command(arguments, errors):
    process = CONTEXT.Process(target=run_command, args=(arguments, errors))
    process.start()
    return process


def trials_of(storage, contains=""):
    with open_storage(storage) as database:
        names = [name for name in optuna.get_all_study_names(database) if contains in name]
        return [t for name in names for t in optuna.load_study(study_name=name, storage=database).trials]


def kill_in_a_run(pid: int, out: Path) -> Path:
    """Kill a process while it trains a run that has a checkpoint, and return the folder of the run."""
    found = []

    def killed():
        for manifest in files_named("manifest.json", out):
            run = manifest.parents[2]
            if int(manifest.parent.name) > 2 and not (run / "result.json").exists():
                os.kill(pid, signal.SIGSTOP)
                wait_for(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "TZ")
                if not (run / "result.json").exists():
                    os.kill(pid, signal.SIGKILL)
                    found.append(run)
                    return True
                os.kill(pid, signal.SIGCONT)
        return False

    wait_for(killed)
    return found[0]


def epochs_of(run: Path) -> list[float]:
    return [json.loads(line)["epoch"] for line in (run / "metrics.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------- whole sweeps


@pytest.mark.slow
def test_two_processes_share_the_trials(tmp_path, storage):
    # Long enough for the second process to start before the first one has done everything.
    base = replace(BASE, epochs=10, weight_decay=1e-4 if "sqlite" in storage else 2e-4)
    both = [start(base, tmp_path, storage, seeds=2) for _ in range(2)]
    for process in both:
        process.join(300)
        assert process.exitcode == 0
    ended = [t for t in trials_of(storage) if t.state.name == "COMPLETE"]
    assert sorted(t.params["lr"] for t in ended if "lr" in t.params) == [0.02, 0.05, 0.1]
    assert sorted(t.params["seed"] for t in ended if "seed" in t.params) == [0, 1]
    assert len({t.user_attrs["worker"] for t in ended}) == 2
    for path in tmp_path.rglob("metrics.jsonl"):
        assert epochs_of(path.parent) == list(range(1, 11))


@pytest.mark.slow
def test_trial_of_a_killed_process_is_resumed_by_another(tmp_path, storage):
    base = replace(BASE, epochs=15, weight_decay=1e-4 if "sqlite" in storage else 3e-4)
    victim = start(base, tmp_path, storage, seeds=0)
    run = kill_in_a_run(victim.pid, tmp_path)
    victim.join()
    helper = start(base, tmp_path, storage, seeds=0)
    helper.join(300)
    assert helper.exitcode == 0
    mine = [
        t for t in trials_of(storage) if t.user_attrs.get("worker", "").endswith((f":{victim.pid}", f":{helper.pid}"))
    ]
    states = Counter(t.state.name for t in mine)
    assert states["COMPLETE"] == 3
    (failed,) = (t for t in mine if t.state.name == "FAIL")
    assert failed.user_attrs["worker"].endswith(f":{victim.pid}")
    (again,) = (t for t in mine if t.user_attrs.get("retry_of") == failed.number)
    assert again.params == failed.params
    assert len(epochs_of(run)) <= 17  # from a checkpoint, not from the start
    whole = train(Record(run).config(), Record(tmp_path / "whole"))
    assert {**Record(run).result(), "seconds": 0} == {**whole, "seconds": 0}


@pytest.mark.slow
def test_processes_that_share_only_the_database(tmp_path, server):
    """Each has its own folder; both return the same result."""
    base = replace(BASE, weight_decay=4e-4)
    both = [start(base, tmp_path / name, server, seeds=2) for name in "ab"]
    for process in both:
        process.join(300)
        assert process.exitcode == 0
    found = [json.loads(next((tmp_path / name).rglob("sweep.json")).read_text()) for name in "ab"]
    assert found[0] == found[1]
    assert found[0]["finished"] is True
    assert len(found[0]["methods"]["erm"]["test"]["runs"]) == 2


@pytest.mark.slow
def test_killed_worker_of_a_command_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("TILTSAM_CHECKPOINT_SECONDS", "0")
    said = []

    def kill_one(status):
        if said:
            return
        for trial in trials_of(sqlite_url(tmp_path)):
            if trial.state.name == "RUNNING" and "worker" in trial.user_attrs:
                os.kill(int(trial.user_attrs["worker"].rpartition(":")[2]), signal.SIGKILL)
                said.append("killed")
                return

    base = replace(BASE, epochs=10)
    display = Told(status=kill_one, print=said.append)
    result = sweep(base, ["erm"], RATES, tmp_path, seeds=1, workers=2, heartbeat=1, display=display)
    assert "SIGKILL" in said[1]
    assert len(result.entries[0].trials) == 3
    assert len(result.entries[0].scores) == 1


@pytest.mark.slow
def test_ctrl_c_stops_workers_and_the_command_resumes(tmp_path, capsys):
    """The trials are long enough for the first not to end before the second starts."""
    arguments = ["sweep", "digits", "--methods", "erm", "--grid", "lr=0.02,0.05", "--batch-size", "256"]
    arguments += ["--seeds", "0", "--epochs", "200", "--out", str(tmp_path)]
    process = start_command([*arguments, "--workers", "2"], tmp_path / "errors")
    wait_for(lambda: len(files_named("metrics.jsonl", tmp_path)) == 2)
    os.kill(process.pid, signal.SIGINT)
    process.join(300)
    assert process.exitcode == 130
    (line,) = (tmp_path / "errors").read_text().splitlines()
    assert line.startswith("tiltsam sweep: interrupted")
    states = Counter(t.state.name for t in trials_of(sqlite_url(tmp_path)))
    assert states["RUNNING"] == 0
    assert states["WAITING"] == states["FAIL"] == 2
    assert len(files_named("manifest.json", tmp_path)) >= 2  # both saved their runs
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "run 2 of 2" in printed.out


@pytest.mark.slow
def test_lost_server_is_one_line(tmp_path):
    if reason := postgres.missing():
        pytest.skip(reason)
    with suppress(subprocess.CalledProcessError), postgres.serve() as url:  # which cannot stop it a second time
        arguments = ["sweep", "digits", "--methods", "erm", "--grid", "lr=0.02,0.05"]
        arguments += ["--epochs", "5000", "--heartbeat", "1", "--storage", url, "--out", str(tmp_path)]
        process = start_command(arguments, tmp_path / "errors")
        wait_for(lambda: files_named("metrics.jsonl", tmp_path))
        data = f"{url.partition('host=')[2]}/data"
        stop = [str(postgres.programs() / "pg_ctl"), "-D", data, "-m", "immediate", "stop"]
        subprocess.run(stop, check=True, cwd="/", user=postgres.user(), stdout=subprocess.DEVNULL)
        process.join(60)
    assert process.exitcode == 2
    (line,) = (tmp_path / "errors").read_text().splitlines()
    assert "lost postgresql://" in line


@pytest.mark.slow
def test_workers_do_not_know_methods_of_a_script(tmp_path, monkeypatch):
    """The error of a worker reaches the user."""
    monkeypatch.setitem(tiltsam.METHODS, "mine", tiltsam.SAM)
    with pytest.raises(UserError, match=r"'mine'.*your script"):
        sweep(BASE, ["mine"], RATES, tmp_path, workers=2, seeds=0)
    result = sweep(BASE, ["mine"], RATES, tmp_path, seeds=0)
    assert len(result.entries[0].trials) == 3


# ---------------------------------------------------------------- studies


@pytest.fixture
def study(tmp_path):
    with open_storage(sqlite_url(tmp_path), heartbeat=1) as database:
        yield SharedStudy(database, "a", 2, optuna.samplers.RandomSampler(seed=0), grace=0.1)


def test_surplus_trials_are_not_run(study):
    """Of processes that start the last trial at once, the lowest number runs it."""
    for _ in range(2):
        study.study.enqueue_trial({})  # as others would start them
    ran = []
    for _ in range(3):
        study.run_one(lambda trial: ran.append(trial.number) or 0.0)
    assert ran == [0, 1]
    assert study.ended()
    assert [t.state.name for t in study.study.trials] == ["COMPLETE", "COMPLETE", "FAIL"]


def test_trial_that_died_before_its_first_heartbeat_is_retried(study):
    with pytest.warns(UserWarning, match="Heartbeat"):
        study.study.ask()
    study.run_one(lambda trial: 0.0)
    assert not study.startable()
    study.retry_dead()
    assert not study.startable()
    time.sleep(0.2)
    study.retry_dead()
    assert study.startable() == 1
    study.run_one(lambda trial: 1.0)
    assert study.ended()


class InterruptedSampler(optuna.samplers.RandomSampler):
    """Interrupts the process once, between the creation of a trial and its start."""

    interrupts = 1

    def before_trial(self, study, trial):
        if self.interrupts:
            self.interrupts -= 1
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("default_signals")
def test_trial_interrupted_before_it_starts_is_queued(tmp_path):
    with open_storage(sqlite_url(tmp_path)) as database:
        study = SharedStudy(database, "a", 1, InterruptedSampler(seed=0))
        with pytest.raises(KeyboardInterrupt):
            study.run_one(lambda trial: 0.0)
        assert [t.state.name for t in study.study.trials] == ["FAIL", "WAITING"]
        study.run_one(lambda trial: 0.0)
        assert study.ended()


@pytest.mark.parametrize("interrupted", ["before", "after"])
def test_interrupted_study_samples_the_same_points(interrupted, tmp_path):
    """Before or after a trial has its parameters, and twice."""

    def points(name, number_of_interrupts):
        left = [KeyboardInterrupt] * number_of_interrupts
        sampler = SeededSampler(lambda seed: optuna.samplers.RandomSampler(seed=seed))
        study = SharedStudy(database, name, 4, sampler)

        def run(trial):
            if left and trial.number > 0 and interrupted == "before":
                raise left.pop()
            value = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
            if left and trial.number > 0:
                raise left.pop()
            return value

        while not study.ended():
            with suppress(KeyboardInterrupt):
                study.run_one(run)
        return sorted(trial.params["lr"] for trial in study.trials())

    with open_storage(sqlite_url(tmp_path)) as database:
        assert points("interrupted", 2) == points("whole", 0)


def test_lost_database_is_one_line(tmp_path):
    with open_storage(sqlite_url(tmp_path)) as database, database.engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE studies")
        connection.exec_driver_sql("CREATE TABLE studies (other)")
    with pytest.raises(UserError, match=r"lost sqlite:.*resumes"), open_storage(sqlite_url(tmp_path)) as database:
        optuna.get_all_study_names(database)


# ---------------------------------------------------------------- processes


def fail(check):
    raise UserError("not possible")


def test_run_processes_interrupts_those_started(tmp_path, monkeypatch):
    first = Mock()
    monkeypatch.setattr(processes, "_start", Mock(side_effect=[first, KeyboardInterrupt]))
    with pytest.raises(KeyboardInterrupt):
        processes.run_processes(fail, [(), ()], tmp_path)
    first.send_signal.assert_called_once_with(signal.SIGINT)
    first.wait.assert_called()


def test_second_interrupt_kills_processes(tmp_path, monkeypatch):
    slow = [Mock(**{"poll.return_value": None, "wait.side_effect": [KeyboardInterrupt, None]}) for _ in range(2)]
    monkeypatch.setattr(processes, "_start", Mock(side_effect=slow))
    with pytest.raises(KeyboardInterrupt):
        processes.run_processes(fail, [(), ()], tmp_path, poll=Mock(side_effect=KeyboardInterrupt))
    for process in slow:
        process.kill.assert_called_once()


@pytest.mark.slow
def test_process_ends_with_its_parent(tmp_path):
    path = tmp_path / "pid"
    code = (
        "import sys; from pathlib import Path; from helpers.waiting import wait_for_parent; "
        "from tiltsam.lab.processes import run_processes; "
        "run_processes(wait_for_parent, [(sys.argv[1],)], Path(sys.argv[1]).parent)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", code, str(path)], env=environment)
    wait_for(lambda: path.exists() and path.read_text())
    worker = int(path.read_text())
    parent.kill()
    parent.wait()
    wait_for(lambda: not Path(f"/proc/{worker}").exists() or " Z " in Path(f"/proc/{worker}/stat").read_text(), 30)
