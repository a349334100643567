"""Checks of numbers and parameters, and warnings attributed to the user's line."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from tiltsam.distributed import local_part

__all__ = [
    "check_count",
    "check_fraction",
    "check_nonnegative",
    "check_positive",
    "check_storage",
    "check_unit",
    "warn",
]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def check_nonnegative(name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is a finite number >= 0."""
    if not _is_finite(value) or value < 0:
        raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")


def check_positive(name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is a finite number > 0."""
    if not _is_finite(value) or value <= 0:
        raise ValueError(f"{name} must be a finite number > 0, got {value!r}")


def check_count(name: str, value: Any, minimum: int = 1) -> None:
    """Raise ValueError unless ``value`` is an integer >= ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {value!r}")


def check_fraction(name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is a number in [0, 1)."""
    if not _is_finite(value) or not 0 <= value < 1:
        raise ValueError(f"{name} must be a number in [0, 1), got {value!r}")


def check_unit(name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is a number in [0, 1]."""
    if not _is_finite(value) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be a number in [0, 1], got {value!r}")


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def check_storage(params: Sequence[Tensor]) -> None:
    """Raise unless every parameter is floating point or complex and owns its memory."""
    seen: dict[tuple[torch.device, int], Tensor] = {}
    for p in params:
        if not p.is_floating_point() and not p.is_complex():
            raise TypeError(f"parameters must be floating point or complex, got {p.dtype}")
        local = local_part(p)
        if local.numel() and seen.setdefault((local.device, local.data_ptr()), p) is not p:
            raise ValueError(
                f"two parameters of shape {tuple(p.shape)} share memory and would be perturbed twice: tie weights by "
                "using one Parameter object in both places"
            )


def warn(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Issue a warning attributed to the first caller outside this package and torch."""
    torch_folder = os.path.dirname(torch.__file__) + os.sep
    level, frame = 2, sys._getframe(1)  # level 1 is this function
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_PACKAGE, torch_folder)):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
