"""The budget of a run: the passes of a step, and the fraction of the config's limits that is used up."""

from __future__ import annotations

import math

from tiltsam.lab.config import METHOD_SETTINGS, TrainConfig
from tiltsam.lab.distributed import DistributedContext
from tiltsam.lab.errors import ConfigError
from tiltsam.optim import StepInfo

__all__ = ["Budget", "passes_of", "passes_per_step"]

ROUNDING = 1e-9  # relative rounding error of sums of thirds of passes


def passes_of(info: StepInfo, ascent_fraction: float = 1.0) -> float:
    """Return the forward+backward passes of a step over the mini-batch; a forward pass alone counts a third.

    Args:
        info: The step.
        ascent_fraction: The fraction of the batch that gradients of an ascent were computed on.
    """
    forwards_alone = info.num_forwards - info.num_backwards
    passes = info.num_backwards - (1 - ascent_fraction) * info.num_ascents + forwards_alone / 3
    return passes / info.num_parts


def passes_per_step(config: TrainConfig) -> float:
    """Return the forward+backward passes of a step, as :func:`passes_of` counts them, averaged over the steps.

    Example:
        >>> passes_per_step(TrainConfig(method="tsam", num_samples=5))
        10.0
        >>> passes_per_step(TrainConfig(method="sam", ascent_fraction=0.25))
        1.25

    Raises:
        ConfigError: If the method is not one of the package's, so that its cost is not known.
    """
    if config.method not in METHOD_SETTINGS:
        raise ConfigError(f"the cost of a step must be known, got method {config.method!r}")
    ascent, s = config.ascent_fraction, config.num_samples
    if config.method == "erm":
        passes = 1.0
    elif config.method == "esam2":
        passes = 1 + ascent + config.num_points / 3
    elif config.method == "pgn":
        passes = 2.0  # both gradients enter the step
    elif config.method == "tsam":
        ascents = {"ascent": ascent * config.ascent_steps, "hmc": 1.0}.get(config.sampler, 0.0)
        passes = s + ascents if config.share_ascent else s * (1 + ascents)
        if config.split:
            passes /= s
    else:
        passes = 1 + ascent
    return 1 + (passes - 1) / config.every  # the other steps are plain ones


class Budget:
    """The limits of a run: epochs, and passes or seconds if the config limits them.

    Args:
        config: The run.
        per_epoch: Steps per epoch.
        distributed: The ranks that train the run together, and must stop at the same step.
    """

    def __init__(self, config: TrainConfig, per_epoch: int, distributed: DistributedContext) -> None:
        self._epochs, self._passes, self._seconds = config.epochs, config.passes, config.seconds
        self._distributed = distributed
        if config.method == "esam1":  # SAM, until it has used the passes of TSAM
            tsam = 1 + (config.num_samples * (1 + config.ascent_fraction) - 1) / config.every  # others cost one pass
            self._passes = min(config.passes or math.inf, config.epochs * per_epoch * tsam)
            self._epochs = math.inf

    def used(self, epoch: float, passes: float, seconds: float) -> float:
        """Return the fraction of the budget that is used up, by whichever limit is nearest.

        Args:
            epoch: Epochs so far.
            passes: Passes so far of this rank; those of rank 0 count.
            seconds: Seconds so far of this rank; those of rank 0 count.
        """
        fractions = [epoch / self._epochs]
        # All ranks use rank 0's values, or some would stop while others wait for them.
        if self._passes is not None:
            fractions.append(self._distributed.broadcast(passes) / self._passes)
        if self._seconds is not None:
            fractions.append(self._distributed.broadcast(seconds) / self._seconds)
        done = max(fractions)
        return done if done < 1 - ROUNDING else max(done, 1.0)
