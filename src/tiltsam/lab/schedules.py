"""The budget of a run, and the schedules of the learning rate, of rho and of the tilt over it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tiltsam.lab.config import TrainConfig
from tiltsam.lab.devices import DistributedContext
from tiltsam.optim import StepInfo

__all__ = ["budget_used", "example_tilt", "passes_of", "passes_per_step", "rate_factor", "set_rates"]

ROUNDING = 1e-9  # relative rounding error of sums of thirds of passes


def passes_of(info: StepInfo, ascent_fraction: float = 1.0) -> float:
    """Return the forward+backward passes of a step over the mini-batch; a forward pass alone counts a third.

    Gradients of an ascent were computed on ``ascent_fraction`` of the batch.
    """
    forwards_alone = info.num_forwards - info.num_backwards
    passes = info.num_backwards - (1 - ascent_fraction) * info.num_ascents + forwards_alone / 3
    return passes / info.num_parts


def passes_per_step(config: TrainConfig) -> float:
    """Count the forward+backward passes of a step, as :func:`passes_of` does, by taking steps on two weights.

    Averaged over a period of ``every`` and of the method's ``k``, if it has one (LookSAM); ``rho`` has its full value.

    Example:
        >>> passes_per_step(TrainConfig(method="tsam", options={"num_samples": 5}))
        10.0
        >>> passes_per_step(TrainConfig(method="sam", ascent_fraction=0.25))
        1.25
    """
    weights = torch.nn.Parameter(torch.ones(2))
    optimizer = config.wrap(torch.optim.SGD([weights], lr=0.1), parallel=None)

    def closure() -> Tensor:
        loss = weights.square().sum()
        loss.backward()
        return loss

    passes = []
    for _ in range(config.every * config.all_options().get("k", 1)):
        optimizer.step([closure] * optimizer.num_samples if config.split else closure)
        passes.append(passes_of(optimizer.info, config.ascent_fraction))
    return math.fsum(passes) / len(passes)


def budget_used(
    config: TrainConfig, distributed: DistributedContext, *, epoch: float, passes: float, seconds: float
) -> float:
    """Return the fraction of the budget that is used up, by whichever limit is nearest.

    All ranks call this together, and use the passes and seconds of rank 0: otherwise some would stop while others wait.
    """
    fractions = [epoch / config.epochs]
    if config.passes is not None:
        fractions.append(distributed.broadcast(passes) / config.passes)
    if config.seconds is not None:
        fractions.append(distributed.broadcast(seconds) / config.seconds)
    used = max(fractions)
    return used if used < 1 - ROUNDING else max(used, 1.0)


def rate_factor(config: TrainConfig, done: float) -> float:
    """Return the factor that multiplies ``config.lr`` when the fraction ``done`` of the budget is used up.

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
    """Set the learning rate of parameter groups, and rho and the tilt if they have schedules.

    ``done`` is the fraction of the budget that is used up; ``initial`` has the maxima of the schedules of rho and t.
    """
    lr = config.lr * rate_factor(config, done)
    factors = {"constant": 1.0, "up": done, "down": 1 - done}
    late = float(done >= config.rho_from)
    for group in groups:
        group["lr"] = lr
        if config.t_schedule != "constant":
            group["t"] = initial["t"] * factors[config.t_schedule]
        if (config.rho_schedule != "constant" or config.rho_from) and not group["own_rho"]:
            group["rho"] = initial["rho"] * factors[config.rho_schedule] * late


def example_tilt(config: TrainConfig, done: float) -> float:
    """Return the tilt over examples at a fraction of the budget: it rises linearly from 0 during its warm-up.

    Example:
        >>> config = TrainConfig(example_tilt=-2.0, example_tilt_warmup=0.5)
        >>> [example_tilt(config, done) for done in (0.0, 0.25, 0.75)]
        [-0.0, -1.0, -2.0]
    """
    warmup = config.example_tilt_warmup or 0.0
    return config.example_tilt if done >= warmup else config.example_tilt * done / warmup
