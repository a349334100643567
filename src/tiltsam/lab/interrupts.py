"""A Ctrl-C that gets through."""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["heeding_interrupts"]


@contextmanager
def heeding_interrupts() -> Iterator[None]:
    """Let an interrupt come again that Python has dropped.

    It drops what is raised in a destructor or in the callback of a weak reference, of which a database has many.
    """
    others = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            threading.Timer(0.05, _thread.interrupt_main).start()  # at once it would be dropped with this one
        else:
            others(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = others
