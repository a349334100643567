"""How the learning rate goes over a run."""

from __future__ import annotations

import math

from tiltsam.lab.config import TrainConfig

__all__ = ["rate_factor"]


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
