"""tiltsam: flat minima for any torch optimizer.

- The methods: :class:`TSAM`, and :class:`ERM`, :class:`SAM`, :class:`ASAM`, :class:`LineSearchSAM`, :class:`PGN`,
  :class:`RSAM` that it is compared with; :data:`METHODS` maps the paper's names to them.
- The fast step: :func:`capture` runs a whole step as one CUDA graph.
- Averaged weights: :class:`WeightAverage`, beside any optimizer.
- Several processes: :class:`Parallel`; DDP and FSDP2 are noticed by themselves.
- Measuring flatness: :mod:`tiltsam.sharpness`, :mod:`tiltsam.curvature`, :mod:`tiltsam.landscape`.
- The mathematics: :mod:`tiltsam.tilting`, :mod:`tiltsam.samplers`.
"""

from tiltsam import samplers, tilting
from tiltsam.distributed import Parallel
from tiltsam.optim import ASAM, ERM, METHODS, PGN, RSAM, SAM, TSAM, LineSearchSAM, SharpnessAware, StepInfo
from tiltsam.tilting import tilted_loss, tilted_mean, tilted_var, tilted_weights

__version__ = "0.1.0"

__all__ = [
    "ASAM",
    "ERM",
    "METHODS",
    "PGN",
    "RSAM",
    "SAM",
    "TSAM",
    "LineSearchSAM",
    "Parallel",
    "SharpnessAware",
    "StepInfo",
    "__version__",
    "samplers",
    "tilted_loss",
    "tilted_mean",
    "tilted_var",
    "tilted_weights",
    "tilting",
]
