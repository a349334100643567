"""Schedules of the learning rate, of rho and of the tilt over a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tiltsam.lab.config import TrainConfig

__all__ = ["example_tilt", "rate_factor", "set_rates"]


def rate_factor(config: TrainConfig, done: float) -> float:
    """Return the factor of the learning rate.

    Args:
        config: The run: its schedule and warm-up.
        done: Fraction of the budget that is used up.

    Example:
        >>> [rate_factor(TrainConfig(schedule="linear"), done) for done in (0.0, 0.25, 1.0)]
        [1.0, 0.75, 0.0]
    """
    if config.warmup and done < config.warmup:
        return (done + 1e-3) / (config.warmup + 1e-3)
    decayed = (done - config.warmup) / (1 - config.warmup)  # fraction of the budget after the warm-up
    if config.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * decayed))
    if config.schedule == "linear":
        return 1 - decayed
    if config.schedule == "step":
        return 0.1 ** int((done >= 0.5) + (done >= 0.75))
    return 1.0


def set_rates(groups: Sequence[dict[str, Any]], config: TrainConfig, done: float, initial: Mapping[str, float]) -> None:
    """Set the learning rate, and rho and the tilt if they have schedules.

    Args:
        groups: The optimizer's parameter groups.
        config: The run.
        done: Fraction of the budget that is used up.
        initial: The method's rho and t, the maxima of their schedules.
    """
    lr = config.lr * rate_factor(config, done)
    factors = {"up": done, "down": 1 - done}
    for group in groups:
        group["lr"] = lr
        for name, schedule in {"rho": config.rho_schedule, "t": config.t_schedule}.items():
            if schedule in factors:
                group[name] = initial[name] * factors[schedule]


def example_tilt(config: TrainConfig, done: float) -> float:
    """Return the tilt over examples: it rises linearly from 0 during its warm-up.

    Args:
        config: The run.
        done: Fraction of the budget that is used up.

    Example:
        >>> config = TrainConfig(example_tilt=-2.0, example_tilt_warmup=0.5)
        >>> [example_tilt(config, done) for done in (0.0, 0.25, 0.75)]
        [-0.0, -1.0, -2.0]
    """
    if done >= config.example_tilt_warmup:
        return config.example_tilt
    return config.example_tilt * done / config.example_tilt_warmup
