"""The optimizers: TSAM and the methods it is compared with, and what is needed to write another one."""

from tiltsam.optim.methods import ASAM, ERM, METHODS, PGN, RSAM, SAM, TSAM, LineSearchSAM
from tiltsam.optim.sharpness_aware import Schedule, SharpnessAware
from tiltsam.optim.step_info import StepInfo
from tiltsam.space.step_record import FixedWeights, Weighting
from tiltsam.space.validation import check_count, check_nonnegative

__all__ = [
    "ASAM",
    "ERM",
    "METHODS",
    "PGN",
    "RSAM",
    "SAM",
    "TSAM",
    "FixedWeights",
    "LineSearchSAM",
    "Schedule",
    "SharpnessAware",
    "StepInfo",
    "Weighting",
    "check_count",
    "check_nonnegative",
]
