"""A Ctrl-C that gets through, and in order."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["heeding_interrupts", "uninterrupted"]


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
