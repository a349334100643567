"""How commands end: with a line that says why and a code, without a complaint of a closed pipe, and soon."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from contextlib import suppress

__all__ = ["GOES_ON", "end", "ending_soon", "let_go_of_output"]

GOES_ON = dict.fromkeys(("train", "compare", "reproduce", "sweep"), "; the same command resumes")
"""What a command that was stopped adds to its last line, if it can be resumed."""


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
