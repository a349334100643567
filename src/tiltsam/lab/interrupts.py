"""How commands end before their time: a Ctrl-C gets through, and in order, and a closed pipe without a complaint."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

__all__ = ["GOES_ON", "end", "ending_soon", "heeding_interrupts", "let_go_of_output", "uninterrupted"]

_BY_CHECKPOINTS = "; the same command goes on from the last checkpoint, or begins anew where there is none"
GOES_ON = dict.fromkeys(("train", "compare", "reproduce"), _BY_CHECKPOINTS) | {"sweep": "; the same command goes on"}
"""What those that were stopped are told, by the command that can be gone on with."""


def end(code: int, command: str, why: object) -> int:
    """Say in one line why a command ends; returns its exit code."""
    if os.environ.get("LOCAL_RANK", "0") == "0":  # of the processes of a host one speaks
        with suppress(OSError):  # nobody may read this, either
            print(f"{f'tiltsam {command}'.strip()}: {why}", file=sys.stderr)
    return code


def let_go_of_output() -> None:
    """Write what is still to be written; what cannot be goes nowhere, or Python would complain of it at its exit."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def ending_soon() -> None:
    """Let this process look for no garbage at its exit: after all work is done, torch's takes it a second and more."""
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)


@contextmanager
def heeding_interrupts() -> Iterator[None]:
    """Let an interrupt come again that Python has dropped.

    It drops what is raised in a destructor or in the callback of a weak reference, of which a database has many.
    """
    others = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            threading.Timer(0.05, _interrupt).start()  # at once it would be dropped with this one
        else:
            others(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = others


def _interrupt() -> None:
    """Interrupt the main thread, also where it sleeps."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


class _Later:
    """A handler that notes an interrupt; a second one goes to the handler before it."""

    def __init__(self, before: Callable[[int, FrameType | None], Any]) -> None:
        self.before = before
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            self.before(number, frame)
        self.came = True


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold an interrupt back until the end; a second one does not wait.

    For work that leaves something half done behind it: a read of a database that is broken off keeps it locked, for
    ourselves, too. Python interrupts the main thread alone, so elsewhere there is nothing to hold back.
    """
    before = signal.getsignal(signal.SIGINT)
    inside = isinstance(before, _Later)
    if inside or not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    later = _Later(before)
    signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if later.came:
            before(signal.SIGINT, None)
