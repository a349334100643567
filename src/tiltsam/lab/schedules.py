"""How the learning rate, rho and the tilt go over a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tiltsam.lab.config import TrainConfig, settings_of

__all__ = ["rate_factor", "set_rates"]


def rate_factor(config: TrainConfig, done: float) -> float:
    """What the learning rate is multiplied by.

    Args:
        config: The run: its schedule and warm-up.
        done: Share of the budget that is used up.

    Example:
        >>> [rate_factor(TrainConfig(schedule="linear"), done) for done in (0.0, 0.25, 1.0)]
        [1.0, 0.75, 0.0]
    """
    if config.warmup and done < config.warmup:
        return (done + 1e-3) / (config.warmup + 1e-3)
    fallen = (done - config.warmup) / (1 - config.warmup)  # share of what is left after it
    if config.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * fallen))
    if config.schedule == "linear":
        return 1 - fallen
    if config.schedule == "step":
        return 0.1 ** int((done >= 0.5) + (done >= 0.75))
    return 1.0


def set_rates(groups: Sequence[dict[str, Any]], config: TrainConfig, done: float, rho: float) -> None:
    """Set the learning rate, and rho and the tilt where they have schedules.

    Args:
        groups: The optimizer's parameter groups.
        config: The run.
        done: Share of the budget that is used up.
        rho: The method's rho, at the full height of its schedule.
    """
    lr = config.lr * rate_factor(config, done)
    own = settings_of(config.method)
    shares = {"up": done, "down": 1 - done}
    for group in groups:
        group["lr"] = lr
        if "rho_schedule" in own and config.rho_schedule in shares:
            group["rho"] = rho * shares[config.rho_schedule]
        if "t_schedule" in own and config.t_schedule in shares:
            group["t"] = config.t * shares[config.t_schedule]
