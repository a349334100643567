"""Warnings attributed to the code that called the package."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path
from types import FrameType

import torch

__all__ = ["warn"]

# The library's own frames, and those between them: torch wraps Optimizer.step, contextlib runs context managers.
_SKIPPED = (str(Path(__file__).parent) + os.sep, str(Path(torch.__file__).parent) + os.sep, contextlib.__file__)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points at the first caller outside this package and torch.

    Args:
        message: What to say.
        category: The warning's class.
    """
    frame: FrameType = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )
