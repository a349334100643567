"""Showing how far long work is: bars on a terminal, a line for each piece of work elsewhere."""

from __future__ import annotations

import sys
from typing import Any

from tiltsam.flatness.evaluation import Progress

__all__ = ["Bars"]


class Bars:
    """Shows several pieces of work, one after the other, on standard error. A context.

    Called with what is going on, it gives the callback that every measurement takes as ``progress``. Bars are drawn by
    rich, and go when the work is done; where there is no terminal or no rich, each piece of work is one line.

    Example:
        >>> with Bars() as bars:
        ...     tell = bars("the neighbourhood of a model")  # neighborhood(model, …, progress=tell)
        ...     tell(1, 2)
    """

    def __init__(self) -> None:
        self._bar: Any = None
        if sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import Progress as RichProgress
            except ImportError:
                return
            self._bar = RichProgress(console=Console(stderr=True), transient=True)

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, what: str) -> Progress:
        """The callback for one piece of work."""
        if self._bar is None:
            print(f"measuring {what}", file=sys.stderr, flush=True)
            return lambda done, total, /: None
        self._bar.start()  # no sooner: another bar may be on the terminal until then
        task = self._bar.add_task(what, total=None)
        return lambda done, total, /: self._bar.update(task, completed=done, total=total, visible=done < total)
