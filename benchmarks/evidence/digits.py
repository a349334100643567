"""The studies on 8×8 digits: small enough for a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from evidence.study import Study, Variants
from evidence.trials import around, change, in_parts, seven, tsam, with_pairs
from tiltsam.lab.config import TrainConfig

__all__ = ["DIGITS_STUDIES"]

# Two of six trials end at a quarter of the cost, two more at half of it; two go to the end. On digits this turned out
# to favour small rhos, which learn faster and overfit later: where a study can afford it, all trials go to the end.
_RUNGS = ((0.25, 4), (0.5, 2))

_PAIRS = [(0.03, 0.2), (0.03, 0.5), (0.03, 1.0), (0.1, 0.2), (0.1, 0.5), (0.1, 1.0)]
_RADII = [2.0, 4.0, 2.0, 4.0, 2.0, 4.0]

DIGITS = Study(
    name="digits",
    family="digits",
    title="8×8 digits, 20% of labels wrong, a small network",
    base=TrainConfig(
        task="digits",
        model="mlp",
        epochs=60.0,
        batch_size=64,
        label_smoothing=0.1,
        validation=0.3,  # a tenth would be 120 examples, a fifth of them with wrong labels
        device="cpu",
    ),
    reference="sam",
    trials=seven(
        (0.003, 0.01, 0.03, 0.1, 0.2, 0.4),
        _PAIRS,
        _RADII,
        alphas=[0.5, 0.8, 0.5, 0.8, 0.5, 0.8],
        lams=[1.0, 2.0, 1.0, 2.0, 1.0, 2.0],
    ),
    rungs=_RUNGS,
    seeds=tuple(range(10)),
    unit="thousand passes",
)

# Around the settings that the trials of "digits" chose for a single sample.
_CENTER = change(DIGITS.base, method="tsam", lr=0.03, rho=0.5, radius=4.0, num_samples=1, t=20.0, evaluate_every=3)
DIGITS_ACTS = Variants("digits-acts", around(_CENTER), tuple(range(5)), DIGITS.title)

# Is a random start more than a longer ascent? Without one, TSAM with a single sample is SAM.
DIGITS_MAP = Variants(
    "digits-map",
    {
        f"rho at radius {radius:g}: {rho:g}": change(_CENTER, radius=radius, rho=rho)
        for radius in (0.0, 2.0, 4.0, 6.0)
        for rho in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
    },
    tuple(range(5)),
    DIGITS.title,
)

# ---------------------------------------------------------------- cheaper steps

# The coarse grid of "digits" has nothing between a rho of 0.5 and one of 1, at which training collapses.
_FINE = [(0.03, rho) for rho in (0.45, 0.5, 0.55, 0.6, 0.65, 0.7)]
DIGITS_FINE = replace(
    DIGITS,
    name="digits-fine",
    trials={
        "sam": with_pairs("sam", _FINE),
        "tsam s=1": tsam(_FINE, 1, [4.0] * 6),
        "esam2": with_pairs("esam2", _FINE, num_points=3),
        "tsam s=2 (shared ascent)": tsam(_FINE, 2, [4.0] * 6, share_ascent=True),
    },
)

# Steps that cost less than SAM's, and a second sample at half as much again. An ascent on a quarter of the batch costs
# a quarter of a pass, and is the perturbation of fewer examples at that.
DIGITS_CHEAPER = replace(
    DIGITS,
    name="digits-cheaper",
    trials={
        "sam (ascent on 1/4)": with_pairs("sam", _PAIRS, ascent_fraction=0.25),
        "tsam s=1 (ascent on 1/4)": tsam(_PAIRS, 1, _RADII, ascent_fraction=0.25),
        "sam (every 2nd step)": with_pairs("sam", _PAIRS, every=2),
        "tsam s=2 (shared ascent)": tsam(_PAIRS, 2, _RADII, share_ascent=True),
    },
)

# ---------------------------------------------------------------- samples that share the batch out

# The smaller the parts, the smaller the rho from which on training collapses.
_LENGTHS = {
    1: (0.6, 0.65, 0.7, 0.75),
    2: (0.4, 0.45, 0.5, 0.55, 0.6),
    4: (0.25, 0.3, 0.35, 0.4, 0.45),
    8: (0.15, 0.2, 0.25, 0.3),
}
_QUARTERS = change(_CENTER, **in_parts(4), rho=0.35)
DIGITS_SPLIT = Variants(
    "digits-split",
    {
        f"rho at {number} parts: {rho:g}": change(_CENTER, **in_parts(number), rho=rho)
        for number, lengths in _LENGTHS.items()
        for rho in lengths
    }
    | {f"t at 4 parts: {t:g}": change(_QUARTERS, t=t) for t in (0.0, 1.0, 5.0, 20.0)}
    | {f"radius at 4 parts: {radius:g}": change(_QUARTERS, radius=radius) for radius in (0.0, 2.0, 4.0)},
    tuple(range(5)),
    DIGITS.title,
)

# ---------------------------------------------------------------- a rho that rises

# A small rho learns fast and overfits early, a large one learns slowly: does one that grows over the run do both?
DIGITS_RISING = Variants(
    "digits-rising",
    {
        f"last rho at radius {radius:g}: {rho:g}": change(_CENTER, radius=radius, rho=rho, rho_schedule="up")
        for radius in (0.0, 4.0)
        for rho in (0.7, 0.9, 1.1, 1.3, 1.6, 2.0, 2.5)
    },
    tuple(range(5)),
    DIGITS.title,
)

# ---------------------------------------------------------------- a length for every weight

# ASAM measures the ascent in units of the weights: large ones, and layers of large ones, move further.
_ADAPTIVE = (1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0)
DIGITS_ADAPTIVE = Variants(
    "digits-adaptive",
    {f"rho of asam: {rho:g}": change(_CENTER, method="asam", rho=rho) for rho in _ADAPTIVE}
    | {
        f"rho of asam, averaged: {rho:g}": change(_CENTER, method="asam", rho=rho, average=True)
        for rho in _ADAPTIVE[2:-1]
    },
    tuple(range(5)),
    DIGITS.title,
)

# ---------------------------------------------------------------- averaged weights

_ERM = change(DIGITS.base, method="erm", epochs=120.0, evaluate_every=6)  # as many passes as SAM has
DIGITS_AVERAGED = Variants(
    "digits-averaged",
    {
        f"rho at radius {radius:g}: {rho:g}": change(_CENTER, radius=radius, rho=rho, average=True)
        for radius in (0.0, 4.0)
        for rho in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
    }
    | {
        f"rho at {number} parts: {rho:g}": change(_CENTER, **in_parts(number), rho=rho, average=True)
        for number in (4, 8)
        for rho in _LENGTHS[number]
    }
    | {f"lr of erm: {lr:g}": change(_ERM, lr=lr, average=True) for lr in (0.003, 0.01, 0.03)},
    tuple(range(5)),
    DIGITS.title,
)

# Does a learning rate that falls do the same? And does an average make a larger one usable?
_SAM = change(_CENTER, method="sam")
DIGITS_RATES = Variants(
    "digits-rates",
    {
        f"rho at lr {lr:g}, {name}: {rho:g}": change(_SAM, lr=lr, rho=rho, **kind)
        for name, kind in (("cosine", {"schedule": "cosine"}), ("averaged", {"average": True}), ("constant", {}))
        for lr in (0.03, 0.1)
        for rho in (0.3, 0.4, 0.5, 0.6, 0.7)
    },
    tuple(range(5)),
    DIGITS.title,
)


def _plain_and_averaged(
    erm: TrainConfig, erm_rates: Sequence[float], sam: TrainConfig, rates: Sequence[float], rhos: Sequence[float]
) -> dict[str, TrainConfig]:
    """ERM by learning rate and SAM by learning rate and rho, each with its last weights and with their average."""
    both = (("", False), (", averaged", True))
    return {
        f"lr of erm{name}: {lr:g}": change(erm, lr=lr, average=average) for name, average in both for lr in erm_rates
    } | {
        f"rho at lr {lr:g}{name}: {rho:g}": change(sam, lr=lr, rho=rho, average=average)
        for lr in rates
        for name, average in both
        for rho in rhos
    }


# ERM and SAM chose the smallest rates of their trials. A still smaller one stops learning in time, as early stopping
# does: what does it do for each, and does an average add to it?
DIGITS_BELOW = Variants(
    "digits-below",
    _plain_and_averaged(_ERM, (0.0003, 0.001, 0.002, 0.003), _SAM, (0.003, 0.01, 0.03), (0.3, 0.5, 0.7)),
    tuple(range(10)),
    DIGITS.title,
)

# On CIFAR-100 an average did for plain training what the ascent does, on digits it did not. There the network has
# convolutions and BatchNorm, here it has neither: is it that?
DIGITS_CNN = Variants(
    "digits-cnn",
    _plain_and_averaged(
        change(_ERM, model="cnn"),
        (0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
        change(_SAM, model="cnn"),
        (0.03, 0.1, 0.3),
        (0.1, 0.2, 0.4, 0.8, 1.2),
    ),
    tuple(range(5)),
    "8×8 digits, 20% of labels wrong, a small convolutional network",
)

DIGITS_STUDIES: list[Study | Variants] = [
    DIGITS,
    DIGITS_CHEAPER,
    DIGITS_ACTS,
    DIGITS_MAP,
    DIGITS_FINE,
    DIGITS_SPLIT,
    DIGITS_RISING,
    DIGITS_AVERAGED,
    DIGITS_ADAPTIVE,
    DIGITS_RATES,
    DIGITS_BELOW,
    DIGITS_CNN,
]
