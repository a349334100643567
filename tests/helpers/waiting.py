"""A function for another process, in a module that imports only the standard library."""

import os
import time
from pathlib import Path


def wait_for_parent(path, check):
    """Write the number of this process to a file, and run until ``check`` raises."""
    Path(path).write_text(str(os.getpid()))
    while True:
        check()
        time.sleep(0.05)
