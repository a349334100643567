"""The optimizers: TSAM and the methods it is compared with, averaged weights, and what a new method needs."""

from tiltsam.optim.averaging import WeightAverage
from tiltsam.optim.methods import ASAM, ERM, METHODS, PGN, RSAM, SAM, TSAM, LineSearchSAM
from tiltsam.optim.sharpness_aware import SharpnessAware
from tiltsam.optim.step_info import StepInfo
from tiltsam.optim.variants import GSAM, USAM, WSAM, FriendlySAM, LookSAM, MomentumSAM, norm_groups
from tiltsam.schedules import Schedule
from tiltsam.space.step_record import FixedWeights, Weighting
from tiltsam.space.validation import check_count, check_fraction, check_nonnegative, check_unit

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
    "FixedWeights",
    "FriendlySAM",
    "LineSearchSAM",
    "LookSAM",
    "MomentumSAM",
    "Schedule",
    "SharpnessAware",
    "StepInfo",
    "WeightAverage",
    "Weighting",
    "check_count",
    "check_fraction",
    "check_nonnegative",
    "check_unit",
    "norm_groups",
]
