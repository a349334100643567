"""A Ctrl-C that gets through, and in order."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Stop", "heeding_interrupts", "stopping", "uninterrupted"]


class Stop:
    """A signal handler that notes the first signal, in :attr:`number`, and raises KeyboardInterrupt at a second."""

    def __init__(self) -> None:
        self.number: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Note the signal, or raise if there was one before."""
        if self.number is not None:
            raise KeyboardInterrupt
        self.number = number


@contextmanager
def stopping() -> Iterator[Stop]:
    """Let SIGINT and SIGTERM wait, inside the context, until the caller looks at the :class:`Stop` that it gets.

    Handlers of the caller's own and ignored signals stay as they are; so does everything outside the main thread, where
    Python runs no handlers.
    """
    stop = Stop()
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
