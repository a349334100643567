"""Several workers on one machine: processes that follow the same plan, and end when the one that started them does."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tiltsam.lab.errors import LabError, SweepError
from tiltsam.lab.shutdown import reraise_dropped_interrupts, skip_garbage_collection_at_exit
from tiltsam.lab.sweeping.plan import Desk, Plan

__all__ = ["main", "run_workers", "work"]

LOOK_SECONDS = 0.5
STOP_SECONDS = 20.0  # for a worker to put its job back
# An interrupt ends it at once until all is imported: torch drops one that comes while it imports NumPy.
PROGRAM = f"""\
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
from {__name__} import main
sys.exit(main())
"""


def run_workers(plan: Plan, devices: Sequence[str], look: Callable[[], None], say: Callable[[str], None]) -> None:
    """Start a worker for each device named (several may name the same), and wait until the plan is done.

    A worker that is killed is not replaced, since what killed it may be the lack of memory: the others take up its
    work.

    Args:
        plan: The plan.
        devices: One for each worker.
        look: Called twice a second.
        say: Called with a line when a worker is killed.

    Raises:
        SweepError: What a worker says is wrong; none is left.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    workers: dict[int, subprocess.Popen[bytes]] = {}
    finished = False
    try:
        for k, device in enumerate(devices, 1):
            workers[k] = _start(plan, device, plan.folder / f"worker-{k}.log", len(devices))
        while workers:
            time.sleep(LOOK_SECONDS)
            look()
            for k, process in list(workers.items()):
                code = process.poll()
                if code is None:
                    continue
                del workers[k]
                if code < 0:
                    say(f"worker {k} was killed by {signal.Signals(-code).name}; the others take up its work")
                elif code:
                    raise SweepError(_last_words(plan.folder / f"worker-{k}.log", k, code))
                else:
                    finished = True
    finally:
        _stop(list(workers.values()))
    if not finished:
        raise SweepError("all workers were killed; the same command goes on")


def _start(plan: Plan, device: str, log: Path, number: int) -> subprocess.Popen[bytes]:
    threads = max(1, (os.cpu_count() or 1) // number)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    with open(log, "w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches us alone, and we stop them in order
        )
    assert process.stdin is not None
    # By the pipe and not on the command line, where everybody could read the database's password.
    with suppress(BrokenPipeError), process.stdin as pipe:  # one that died already says so by its exit code
        pickle.dump((plan, device, os.getpid()), pipe)
    return process


def _stop(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Stop workers in order; those that are slow, and all if we are interrupted once more, without."""
    try:
        for process in workers:
            process.send_signal(signal.SIGINT)
        for process in workers:
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
    finally:
        for process in workers:  # its lock goes with it, and so its job is free
            process.kill()  # does nothing to one that has ended
            process.wait()


def _last_words(log: Path, k: int, code: int) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    last = lines[-1] if lines else f"exit code {code}"
    return last if code == 2 else f"worker {k} failed: {last} (see {log})"


def work(plan: Plan, device: str | None = None, parent: int | None = None) -> int:
    """Follow a plan to its end; returns the exit code.

    Args:
        plan: The plan.
        device: Where to train, if not where the configs say.
        parent: The process without which to stop.
    """

    def orphaned() -> None:
        if parent is not None and os.getppid() != parent:
            raise KeyboardInterrupt

    try:
        with Desk(plan, device=device, pause=orphaned) as desk:
            desk.work()
    except (LabError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def main() -> int:
    """A worker as a program of its own: its plan comes by the standard input."""
    skip_garbage_collection_at_exit()
    told = pickle.load(sys.stdin.buffer)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with reraise_dropped_interrupts():
        return work(*told)
