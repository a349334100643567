"""The lab with a TSAM that chooses its tilt: ``python lab.py compare digits --methods target-3-2.0 …``."""

import math
import sys
from functools import partial
from typing import Any

from torch.optim import Optimizer

import tiltsam
from tiltsam.cli import main


class TargetTSAM(tiltsam.TSAM):
    """TSAM whose tilt follows what its weights are worth.

    After a step whose samples were worth more than ``target`` it tilts more, after one where they were worth less it
    tilts less: ``log t ← log t + gain (size − target) / s``.
    """

    def __init__(
        self, base: Optimizer, rho: float = 0.5, target: float = 2.0, gain: float = 0.2, **options: Any
    ) -> None:
        super().__init__(base, t=20.0, rho=rho, **options)
        self.target, self.gain = target, gain

    def step(self, *closures: Any, **options: Any) -> Any:
        """A step, and the tilt of the next one."""
        loss = super().step(*closures, **options)
        size = float(self.info.effective_sample_size)
        for group in self.param_groups:
            t = group["t"] * math.exp(self.gain * (size - self.target) / group["num_samples"])
            group["t"] = min(max(t, 1e-3), 1e6)
        return loss


for number, targets in {3: (2.9, 2.5, 2.0, 1.5, 1.2), 5: (4.5, 2.5, 1.3)}.items():
    for target in targets:
        tiltsam.METHODS[f"target-{number}-{target}"] = partial(
            TargetTSAM, target=target, num_samples=number, radius=4.0
        )

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
