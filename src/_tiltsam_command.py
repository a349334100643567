"""The entry point of the command ``tiltsam``. Outside the package, whose import loads torch and takes seconds."""

import os
import signal
import sys


def main() -> int:
    """Import the command line and run it. Ctrl-C ends the import with one line instead of a traceback."""
    ignored = signal.getsignal(signal.SIGINT) is not signal.default_int_handler  # such as in the background of a script
    if not ignored:  # a handler, since an import may turn KeyboardInterrupt into ImportError
        signal.signal(signal.SIGINT, _exit)
    from tiltsam.cli import main

    if not ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return main()


def _exit(*_: object) -> None:
    print("tiltsam: interrupted", file=sys.stderr, flush=True)
    os._exit(128 + signal.SIGINT)
