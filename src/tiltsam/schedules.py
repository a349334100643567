"""Schedules of ``t``, ``rho`` and other settings: a value as a function of the step, 0 at the first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from tiltsam.space.validation import check_count, check_unit

__all__ = ["Schedule", "late_phase", "linear_down", "linear_up"]

Schedule: TypeAlias = Callable[[int], float]
"""A value as a function of the step, 0 at the first."""


@dataclass(frozen=True)
class _Linear:
    """From ``start`` to ``end`` over ``num_steps`` steps, constant afterwards."""

    start: float
    end: float
    num_steps: int

    def __post_init__(self) -> None:
        check_count("num_steps", self.num_steps)

    def __call__(self, step: int) -> float:
        if step >= self.num_steps:
            return self.end  # the sum below may miss it by rounding
        return self.start + (self.end - self.start) * (max(step, 0) / self.num_steps)


def linear_up(value: float, num_steps: int) -> Schedule:
    """Return a schedule from 0 to ``value`` over ``num_steps`` steps."""
    return _Linear(0.0, value, num_steps)


def linear_down(value: float, num_steps: int) -> Schedule:
    """Return a schedule from ``value`` to 0 over ``num_steps`` steps."""
    return _Linear(value, 0.0, num_steps)


@dataclass(frozen=True)
class _Late:
    """0 before the step ``start``, ``value`` from there on."""

    value: float
    start: int

    def __call__(self, step: int) -> float:
        return self.value if step >= self.start else 0.0


def late_phase(value: float, num_steps: int, fraction: float = 0.75) -> Schedule:
    """Return a schedule that is 0 for the first ``fraction`` of ``num_steps`` steps and then ``value``.

    As ``rho`` of a method: sharpness-aware steps late in training only, and steps of one pass before (late-phase SAM,
    Zhou et al., ICLR 2025).

    Example:
        >>> rho = late_phase(0.05, num_steps=1000)
        >>> rho(749), rho(750)
        (0.0, 0.05)
    """
    check_count("num_steps", num_steps)
    check_unit("fraction", fraction)
    return _Late(value, round(fraction * num_steps))
