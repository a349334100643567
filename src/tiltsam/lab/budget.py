"""How long a run goes on: the limits of its config, and the share of them that is used up."""

from __future__ import annotations

import math

from tiltsam.lab.config import TrainConfig
from tiltsam.lab.team import Team
from tiltsam.optim import StepInfo

__all__ = ["Budget", "passes_of"]

ROUNDING = 1e-9  # of a budget: thirds of passes add up to a whole number but for less than this


def passes_of(info: StepInfo, ascent_fraction: float = 1.0) -> float:
    """Return the forward+backward passes of a step over the mini-batch; a forward pass alone counts a third.

    Args:
        info: The step.
        ascent_fraction: The fraction of the batch that gradients of an ascent were computed on.
    """
    forwards_alone = info.num_forwards - info.num_backwards
    passes = info.num_backwards - (1 - ascent_fraction) * info.num_ascents + forwards_alone / 3
    return passes / info.num_parts


class Budget:
    """What a run may spend: epochs, and passes or seconds where its config limits them.

    Args:
        config: The run.
        per_epoch: Steps an epoch.
        team: The processes that train it together, and have to stop together.
    """

    def __init__(self, config: TrainConfig, per_epoch: int, team: Team) -> None:
        self._epochs, self._passes, self._seconds = config.epochs, config.passes, config.seconds
        self._team = team
        if config.method == "esam1":  # SAM until it has spent what TSAM would have
            tsam = 1 + (config.num_samples * (1 + config.ascent_fraction) - 1) / config.every  # others cost one pass
            self._passes = min(config.passes or math.inf, config.epochs * per_epoch * tsam)
            self._epochs = math.inf

    def used(self, epoch: float, passes: float, seconds: float) -> float:
        """Share of the budget that is used up, by whichever limit is nearest.

        Args:
            epoch: Epochs so far.
            passes: Passes so far, of this process; those of the team's first count.
            seconds: Time so far, by this process's clock; the first one's counts.
        """
        shares = [epoch / self._epochs]
        # By one count and one clock, or some processes would stop while others wait for them.
        if self._passes is not None:
            shares.append(self._team.agree(passes) / self._passes)
        if self._seconds is not None:
            shares.append(self._team.agree(seconds) / self._seconds)
        done = max(shares)
        return done if done < 1 - ROUNDING else max(done, 1.0)
