"""How a command ends: on SIGINT and SIGTERM, on a closed pipe, and with which last line and exit code."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from tiltsam.lab.errors import find_cause

__all__ = [
    "RESUMES",
    "StopFlag",
    "defer_interrupt",
    "defer_signals",
    "exit_with_message",
    "flush_output",
    "reraise_dropped_interrupts",
]

RESUMES = dict.fromkeys(("train", "compare", "demo", "reproduce", "sweep"), "; the same command resumes")
"""The commands that can be resumed, and what their last line says about resuming."""


def exit_with_message(code: int, command: str, message: object) -> int:
    """Print why a command ends, as one line on standard error, and return its exit code."""
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one process per host prints
        with suppress(OSError):  # standard error may be closed, too
            print(f"{f'tiltsam {command}'.strip()}: {message}", file=sys.stderr)
    return code


def flush_output() -> None:
    """Flush standard output; discard it if the pipe is closed, which Python would otherwise report at its exit."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class StopFlag:
    """A signal handler that stores the first signal in :attr:`number`, and raises KeyboardInterrupt at a second."""

    def __init__(self) -> None:
        self.number: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Store the signal, or raise if there is one already."""
        if self.number is not None:
            raise KeyboardInterrupt
        self.number = number


@contextmanager
def defer_signals() -> Iterator[StopFlag]:
    """Store SIGINT and SIGTERM in the :class:`StopFlag` that is yielded, instead of ending the process.

    Other handlers and ignored signals are left as they are. Outside the main thread, where Python runs no handlers,
    nothing is changed.
    """
    stop = StopFlag()
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: handler for number, handler in defaults.items() if signal.getsignal(number) is handler}
    if threading.current_thread() is not threading.main_thread():
        before = {}
    for number in before:
        signal.signal(number, stop)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def reraise_dropped_interrupts() -> Iterator[None]:
    """Raise an interrupt again if Python dropped it, or if an import replaced it by an ImportError.

    Python drops exceptions raised in destructors and in callbacks of weak references; database clients have many.
    Extension modules raise ImportError whatever ends their import.
    """
    others = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            threading.Timer(0.05, _interrupt).start()  # sent at once, it would be dropped with this one
        else:
            others(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    except ImportError as error:
        if (interrupt := find_cause(error, KeyboardInterrupt)) is not None:
            raise interrupt from None
        raise
    finally:
        sys.unraisablehook = others


def _interrupt() -> None:
    """Interrupt the main thread, also while it sleeps."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


@contextmanager
def defer_interrupt() -> Iterator[None]:
    """Defer SIGINT and SIGTERM to the end of the context; a second one interrupts at once.

    For work that must not be left half done: an interrupted read of a database leaves it locked.
    """
    stop = StopFlag()
    try:
        with defer_signals() as stop:
            yield
    finally:
        if stop.number is not None:
            signal.raise_signal(stop.number)
