"""Random probes of a matrix that is known by its products alone, and the mean of what they show."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Estimate", "mean", "signs"]


class Estimate(NamedTuple):
    """A number and its standard error."""

    value: float
    error: float


def signs(random: torch.Generator, vector: Tensor) -> Tensor:
    """Fill a vector with random signs."""
    # U(-1/2, 1/2) can be 0 exactly, which has no sign: the second pass sends it to 1
    return vector.uniform_(-0.5, 0.5, generator=random).sign_().add_(0.5).sign_()


def mean(samples: Tensor) -> Estimate:
    """The mean over independent probes and its standard error (NaN for a single one)."""
    error = float(samples.std()) / len(samples) ** 0.5 if len(samples) > 1 else math.nan
    return Estimate(float(samples.mean()), error)
