"""Which functions of the package an action calls."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import tiltsam

PACKAGE = f"{Path(tiltsam.__file__).parent}/"
CO_OPTIMIZED = 1  # set for functions, not for bodies of classes


def named_functions_of(action: Callable[[], Any]) -> set[tuple[str, str]]:
    """Return the functions and methods of the package that an action calls, as (file, name).

    Comprehensions, generator expressions and lambdas are lines of the function they are in; the bodies of modules and
    classes run when they are imported.
    """
    seen = set()

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        is_function = code.co_flags & CO_OPTIMIZED and not code.co_name.startswith("<")
        if event == "call" and is_function and code.co_filename.startswith(PACKAGE):
            seen.add((code.co_filename.removeprefix(PACKAGE), code.co_qualname))

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return seen
