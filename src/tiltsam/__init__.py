"""Train any torch model into flat minima.

- Methods: :class:`TSAM`, and :class:`ERM`, :class:`SAM`, :class:`ASAM`, :class:`LineSearchSAM`, :class:`PGN`,
  :class:`RSAM`; variants of SAM: :class:`GSAM`, :class:`LookSAM`, :class:`FriendlySAM`, :class:`WSAM`, :class:`USAM`,
  :class:`MomentumSAM`. :data:`METHODS` maps names to them.
- Speed: :func:`capture` runs a whole step as one CUDA graph, a :class:`CapturedStep`.
- Tilting over the examples of a batch: :class:`ExampleTilt`, in the closure of any optimizer.
- Averaged weights: :class:`WeightAverage`, for any optimizer.
- Several processes: :class:`Parallel`; DDP and FSDP2 are detected automatically.
- Measuring flatness: :mod:`tiltsam.sharpness`, :mod:`tiltsam.curvature`, :mod:`tiltsam.landscape`.
- Schedules of settings: :mod:`tiltsam.schedules`.
- The mathematics: :mod:`tiltsam.tilting`, :mod:`tiltsam.samplers`.
"""

# ruff: noqa: E402 (the version of torch is checked before anything is imported)

import re

import torch

_TORCH_FLOOR = (2, 11)  # as in pyproject.toml; FSDP2 gives wrong gradients on older versions, without an error


def _check_torch(version: str) -> None:
    """Raise ImportError if torch is older than the floor. Local and development parts of the version do not count."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) < _TORCH_FLOOR:
        floor = ".".join(map(str, _TORCH_FLOOR))
        raise ImportError(
            f"tiltsam needs torch>={floor}, found torch {version}, where FSDP2 gives wrong gradients without an error"
        )


_check_torch(str(torch.__version__))

from tiltsam import curvature, landscape, samplers, schedules, sharpness, tilting
from tiltsam.distributed import Parallel
from tiltsam.graphs import capture
from tiltsam.graphs.captured_step import CapturedStep
from tiltsam.optim import (
    ASAM,
    ERM,
    GSAM,
    METHODS,
    PGN,
    RSAM,
    SAM,
    TSAM,
    USAM,
    WSAM,
    FriendlySAM,
    LineSearchSAM,
    LookSAM,
    MomentumSAM,
    SharpnessAware,
    StepInfo,
    WeightAverage,
)
from tiltsam.tilting import ExampleTilt, tilted_loss, tilted_mean, tilted_var, tilted_weights

__version__ = "0.2.0"

__all__ = [
    "ASAM",
    "ERM",
    "GSAM",
    "METHODS",
    "PGN",
    "RSAM",
    "SAM",
    "TSAM",
    "USAM",
    "WSAM",
    "CapturedStep",
    "ExampleTilt",
    "FriendlySAM",
    "LineSearchSAM",
    "LookSAM",
    "MomentumSAM",
    "Parallel",
    "SharpnessAware",
    "StepInfo",
    "WeightAverage",
    "__version__",
    "capture",
    "curvature",
    "landscape",
    "samplers",
    "schedules",
    "sharpness",
    "tilted_loss",
    "tilted_mean",
    "tilted_var",
    "tilted_weights",
    "tilting",
]
