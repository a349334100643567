"""Run a function in several processes, which end with the process that started them."""

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
from typing import Any

from tiltsam.lab.errors import LabError, UserError
from tiltsam.lab.shutdown import reraise_dropped_interrupts

__all__ = ["main", "run_processes"]

POLL_SECONDS = 0.5
STOP_SECONDS = 20.0  # for a worker to save its run
# Until everything is imported an interrupt ends the process: torch drops one that arrives while it imports NumPy.
PROGRAM = f"""\
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
from {__name__} import main
sys.exit(main())
"""


def run_processes(
    function: Callable[..., None],
    arguments: Sequence[Sequence[Any]],
    folder: Path,
    *,
    poll: Callable[[], None] = lambda: None,
    notify: Callable[[str], None] = lambda line: None,
) -> None:
    """Call a function in one process per list of arguments, and wait for all of them.

    A process that is killed is not replaced, since it may have been killed for lack of memory.

    Args:
        function: A function of a module. It is called with the arguments and with a function ``check()``, which it
            must call often: ``check`` raises KeyboardInterrupt once this process is gone.
        arguments: The arguments for each process; they are pickled.
        folder: Folder of the processes' output, ``worker-K.log``.
        poll: Called twice a second.
        notify: Called with a line when a process is killed.

    Raises:
        UserError: The error of a process, or if all were killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    workers: dict[int, subprocess.Popen[bytes]] = {}
    ended = False
    try:
        for k, own in enumerate(arguments, 1):
            workers[k] = _start(function, own, folder / f"worker-{k}.log", len(arguments))
        while workers:
            time.sleep(POLL_SECONDS)
            poll()
            for k, process in list(workers.items()):
                code = process.poll()
                if code is None:
                    continue
                del workers[k]
                if code < 0:
                    notify(f"worker {k} was killed by {signal.Signals(-code).name}; the others take over its work")
                elif code:
                    raise UserError(_last_line(folder / f"worker-{k}.log", k, code))
                else:
                    ended = True
    finally:
        _stop(list(workers.values()))
    if not ended:
        raise UserError("all workers were killed; the same command resumes")


def _start(function: Callable[..., None], arguments: Sequence[Any], log: Path, number: int) -> subprocess.Popen[bytes]:
    threads = max(1, (os.cpu_count() or 1) // number)
    with open(log, "w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            env={"OMP_NUM_THREADS": str(threads), **os.environ},
            start_new_session=True,  # a Ctrl-C reaches only this process, which stops them in order
        )
    assert process.stdin is not None
    # Not on the command line, which everybody can read: the arguments may contain a password.
    with suppress(BrokenPipeError), process.stdin as pipe:  # a worker that died has an exit code
        pickle.dump((function, tuple(arguments), os.getpid()), pipe)
    return process


def _stop(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Interrupt workers and wait for them; kill those that are slow, and all at a second interrupt."""
    try:
        for process in workers:
            process.send_signal(signal.SIGINT)
        for process in workers:
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
    finally:
        for process in workers:
            process.kill()  # without effect on one that has ended
            process.wait()


def _last_line(log: Path, k: int, code: int) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    last = lines[-1] if lines else f"exit code {code}"
    return last if code == 2 else f"worker {k} failed: {last} (see {log})"


def main() -> int:
    """Call the function that is read from standard input, and return the exit code."""
    function, arguments, parent = pickle.load(sys.stdin.buffer)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def check() -> None:
        if os.getppid() != parent:
            raise KeyboardInterrupt

    try:
        with reraise_dropped_interrupts():
            function(*arguments, check)
    except LabError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
