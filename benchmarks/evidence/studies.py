"""The studies: what is tried for which method, written down before it was trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from evidence.study import Study, Variants
from tiltsam.lab.config import TrainConfig

__all__ = ["STUDIES"]

# Two of six trials end at a quarter of the cost, two more at half of it; two go to the end. On digits this turned out
# to favour small rhos, which learn faster and overfit later: where a study can afford it, all trials go to the end.
_RUNGS = ((0.25, 4), (0.5, 2))

_Pairs = Sequence[tuple[float, float]]


def _with_pairs(method: str, pairs: _Pairs, **more: Any) -> list[dict[str, Any]]:
    """Trials of a method: learning rate and rho, and beside them what else it has: a list of values, or one for all."""
    return [
        {"method": method, "lr": lr, "rho": rho}
        | {name: value[i] if isinstance(value, list) else value for name, value in more.items()}
        for i, (lr, rho) in enumerate(pairs)
    ]


def _tsam(pairs: _Pairs, num_samples: int, radii: list[float], **more: Any) -> list[dict[str, Any]]:
    if num_samples > 1:  # a single sample has all the weight, whatever the tilt
        more["t"] = _TILTS
    return _with_pairs("tsam", pairs, radius=radii, num_samples=num_samples, **more)


def _seven(
    rates: Sequence[float], pairs: _Pairs, radii: list[float], alphas: list[float], lams: list[float]
) -> dict[str, list[dict[str, Any]]]:
    """The methods of the paper's comparison; ``rates`` are ERM's, which has no rho, as many as there are pairs."""
    return {
        "erm": [{"method": "erm", "lr": lr} for lr in rates],
        "sam": _with_pairs("sam", pairs),
        "tsam s=1": _tsam(pairs, 1, radii),
        "tsam s=3": _tsam(pairs, 3, radii),
        "pgn": _with_pairs("pgn", pairs, alpha=alphas),
        "rsam": _with_pairs("rsam", pairs, lam=lams),
        "esam2": _with_pairs("esam2", pairs, num_points=3),
    }


_TILTS = [20.0, 100.0, 20.0, 100.0, 20.0, 100.0]

# ---------------------------------------------------------------- noisy CIFAR-100

_PAIRS = [(0.01, 0.2), (0.1, 0.2), (0.03, 0.1), (0.03, 0.2), (0.03, 0.4)]
_RADII = [20.0, 10.0, 20.0, 20.0, 10.0]

NOISY = Study(
    name="noisy",
    family="noisy",
    title="CIFAR-100, 20% of labels wrong, ResNet-18",
    base=TrainConfig(
        task="cifar100-noisy",
        model="resnet18",
        epochs=60.0,
        batch_size=128,
        label_smoothing=0.1,
        precision="bf16",
        compile=True,
        device="cuda",
    ),
    reference="sam",
    trials=_seven(
        (0.003, 0.01, 0.03, 0.06, 0.1), _PAIRS, _RADII, alphas=[0.8, 0.5, 0.8, 0.5, 0.8], lams=[1.0, 2.0, 1.0, 2.0, 1.0]
    ),
    rungs=((1 / 2, 2), (5 / 6, 1)),  # ERM, SAM and TSAM went to 5/6 with all five: the half would have chosen the same
    seeds=(0, 1, 2),
    looks=12,
)

# ---------------------------------------------------------------- a transformer on small tasks

_FINE_PAIRS = [(2e-5, 0.05), (5e-5, 0.02), (5e-5, 0.05), (5e-5, 0.15), (1e-4, 0.05), (1e-4, 0.15)]
_FINE_RADII = [5.0, 12.0, 5.0, 12.0, 5.0, 12.0]


_NAMES = {"rte": "RTE", "mrpc": "MRPC", "cola": "CoLA", "stsb": "STS-B", "wnli": "WNLI"}
_COMPILED = ("cola", "stsb")  # the larger ones; their steps are timed compiled too


def _fine_tuning(task: str) -> Study:
    return Study(
        name=f"minilm-{task}",
        family="minilm-compiled" if task in _COMPILED else "minilm",
        title=f"MiniLM on {_NAMES[task]}",
        base=TrainConfig(
            task=f"glue/{task}",
            model="minilm",
            epochs=6.0,
            batch_size=32,
            optimizer="adamw",
            weight_decay=0.01,
            clip=1.0,
            precision="bf16",
            compile=task in _COMPILED,
            device="cuda",
        ),
        reference="sam",
        trials={
            "erm": [{"method": "erm", "lr": lr} for lr in (1e-5, 2e-5, 3e-5, 5e-5, 1e-4, 2e-4)],
            "sam": _with_pairs("sam", _FINE_PAIRS),
            "tsam s=1": _tsam(_FINE_PAIRS, 1, _FINE_RADII),
            "tsam s=3": _tsam(_FINE_PAIRS, 3, _FINE_RADII),
        },
        rungs=(),  # three samples make two epochs: nothing that could be cut at a quarter
        seeds=tuple(range(10)),
        looks=6,
    )


FINE_TUNING = [_fine_tuning(task) for task in _NAMES]

# 64 tokens cut more than a third of RTE's examples, 128 an eighth.
_RTE = FINE_TUNING[0]
_WHOLE = replace(_RTE.base, max_length=128)
RTE_WHOLE = replace(_RTE, name="minilm-rte-whole", title="MiniLM on RTE, 128 tokens", base=_WHOLE)

# ---------------------------------------------------------------- what acts

_SHARES = (0.0, 0.5, 1.0, 1.5, 2.0)


def around(center: TrainConfig) -> dict[str, TrainConfig]:
    """TSAM with one setting changed at a time; the tilt is varied at three samples, for a single one has no weights."""
    assert center.rho is not None
    assert center.radius is not None
    found = {f"radius {share * center.radius:g}": replace(center, radius=share * center.radius) for share in _SHARES}
    found |= {f"rho {share * center.rho:g}": replace(center, rho=share * center.rho) for share in _SHARES}
    found |= {f"s {s}": replace(center, num_samples=s) for s in (1, 3, 5)}
    found |= {f"t {t:g}": replace(center, num_samples=3, t=t) for t in (0.0, 1.0, 5.0, 20.0, 100.0, 1000.0)}
    return found


# Around what the trials of "noisy" chose, with the epochs that the seconds allow: radius and rho at one sample, the
# number of samples and the tilt at three. With a radius of 0 one sample is SAM, whose trial is there already.
_ONE = replace(
    NOISY.base, method="tsam", epochs=58.8, evaluate_every=5, lr=0.03, rho=0.2, radius=20.0, num_samples=1, t=20.0
)
_THREE = replace(_ONE, epochs=20.0, evaluate_every=2, rho=0.1, num_samples=3)
_NO_RADIUS = replace(NOISY.base, method="sam", evaluate_every=5, lr=0.03, rho=0.2)
NOISY_ACTS = Variants(
    "noisy-acts",
    {label: config for label, config in around(_ONE).items() if label.startswith(("radius", "rho"))}
    | {"radius 0": _NO_RADIUS}
    | {label: config for label, config in around(_THREE).items() if label.startswith(("s ", "t "))},
    seeds=(0,),
    title=NOISY.title,
)

# How large a random start does a transformer want? Around the settings that one sample chose on four of the five tasks.
_STARTS = (0.0, 6.0, 12.0, 24.0, 48.0)


def _radii(study: Study, epochs: float) -> Variants:
    center = replace(study.base, method="tsam", epochs=epochs, lr=5e-5, rho=0.02, num_samples=1)
    return Variants(
        f"{study.name}-radius",
        {f"radius {radius:g}": replace(center, radius=radius) for radius in _STARTS},
        seeds=tuple(range(5)),
        title=study.title,
    )


FINE_TUNING_RADII = [_radii(study, 5.8 if study.base.compile else 6.2) for study in FINE_TUNING[:-1]]  # not WNLI

# ---------------------------------------------------------------- small enough for a CPU

_SMALL_PAIRS = [(0.03, 0.2), (0.03, 0.5), (0.03, 1.0), (0.1, 0.2), (0.1, 0.5), (0.1, 1.0)]
_SMALL_RADII = [2.0, 4.0, 2.0, 4.0, 2.0, 4.0]

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
    trials=_seven(
        (0.003, 0.01, 0.03, 0.1, 0.2, 0.4),
        _SMALL_PAIRS,
        _SMALL_RADII,
        alphas=[0.5, 0.8, 0.5, 0.8, 0.5, 0.8],
        lams=[1.0, 2.0, 1.0, 2.0, 1.0, 2.0],
    ),
    rungs=_RUNGS,
    seeds=tuple(range(10)),
    unit="thousand passes",
)

# Around the settings that the trials of "digits" chose for a single sample.
_DIGITS_CENTER = replace(
    DIGITS.base, method="tsam", lr=0.03, rho=0.5, radius=4.0, num_samples=1, t=20.0, evaluate_every=3
)
DIGITS_ACTS = Variants("digits-acts", around(_DIGITS_CENTER), tuple(range(5)), DIGITS.title)

# Is a random start more than a longer ascent? Without one, TSAM with a single sample is SAM.
DIGITS_MAP = Variants(
    "digits-map",
    {
        f"rho at radius {radius:g}: {rho:g}": replace(_DIGITS_CENTER, radius=radius, rho=rho)
        for radius in (0.0, 2.0, 4.0, 6.0)
        for rho in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
    },
    tuple(range(5)),
    DIGITS.title,
)

# ---------------------------------------------------------------- cheaper steps


def _cheaper(study: Study, pairs: _Pairs, radii: list[float]) -> Study:
    """The same comparison for methods whose steps cost less than SAM's, and for a second sample at half as much again.

    An ascent on a quarter of the batch costs a quarter of a pass, and is the perturbation of fewer examples at that.
    """
    return replace(
        study,
        name=f"{study.name}-cheaper",
        trials={
            "sam (ascent on 1/4)": _with_pairs("sam", pairs, ascent_fraction=0.25),
            "tsam s=1 (ascent on 1/4)": _tsam(pairs, 1, radii, ascent_fraction=0.25),
            "sam (every 2nd step)": _with_pairs("sam", pairs, every=2),
            "tsam s=2 (shared ascent)": _tsam(pairs, 2, radii, share_ascent=True),
        },
    )


# The coarse grid of "digits" has nothing between a rho of 0.5 and one of 1, at which training collapses.
_FINE = [(0.03, rho) for rho in (0.45, 0.5, 0.55, 0.6, 0.65, 0.7)]
DIGITS_FINE = replace(
    DIGITS,
    name="digits-fine",
    trials={
        "sam": _with_pairs("sam", _FINE),
        "tsam s=1": _tsam(_FINE, 1, [4.0] * 6),
        "esam2": _with_pairs("esam2", _FINE, num_points=3),
        "tsam s=2 (shared ascent)": _tsam(_FINE, 2, [4.0] * 6, share_ascent=True),
    },
)

DIGITS_CHEAPER = _cheaper(DIGITS, _SMALL_PAIRS, _SMALL_RADII)

# ---------------------------------------------------------------- samples that share the batch out


def _in_parts(number: int) -> dict[str, Any]:
    """m-SAM: every part of the batch has an ascent of its own."""
    return {"num_samples": number, "split": number > 1, "radius": 0.0, "t": 0.0}


# The smaller the parts, the smaller the rho from which on training collapses.
_LENGTHS = {
    1: (0.6, 0.65, 0.7, 0.75),
    2: (0.4, 0.45, 0.5, 0.55, 0.6),
    4: (0.25, 0.3, 0.35, 0.4, 0.45),
    8: (0.15, 0.2, 0.25, 0.3),
}
_QUARTERS = replace(_DIGITS_CENTER, **_in_parts(4), rho=0.35)
DIGITS_SPLIT = Variants(
    "digits-split",
    {
        f"rho at {number} parts: {rho:g}": replace(_DIGITS_CENTER, **_in_parts(number), rho=rho)
        for number, lengths in _LENGTHS.items()
        for rho in lengths
    }
    | {f"t at 4 parts: {t:g}": replace(_QUARTERS, t=t) for t in (0.0, 1.0, 5.0, 20.0)}
    | {f"radius at 4 parts: {radius:g}": replace(_QUARTERS, radius=radius) for radius in (0.0, 2.0, 4.0)},
    tuple(range(5)),
    DIGITS.title,
)

# ---------------------------------------------------------------- a rho that rises

# A small rho learns fast and overfits early, a large one learns slowly: does one that grows over the run do both?
DIGITS_RISING = Variants(
    "digits-rising",
    {
        f"last rho at radius {radius:g}: {rho:g}": replace(_DIGITS_CENTER, radius=radius, rho=rho, rho_schedule="up")
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
    {f"rho of asam: {rho:g}": replace(_DIGITS_CENTER, method="asam", rho=rho) for rho in _ADAPTIVE}
    | {
        f"rho of asam, averaged: {rho:g}": replace(_DIGITS_CENTER, method="asam", rho=rho, average=True)
        for rho in _ADAPTIVE[2:-1]
    },
    tuple(range(5)),
    DIGITS.title,
)

# On digits four parts wanted little more than half of SAM's rho, which is 0.2 here.
_SHORTER = [(0.03, 0.07), (0.03, 0.1), (0.03, 0.15), (0.03, 0.2), (0.1, 0.1)]
NOISY_CHEAPER = replace(
    NOISY,
    name="noisy-cheaper",
    trials={
        "sam": NOISY.trials["sam"],
        "sam (ascent on 1/4)": _with_pairs("sam", _PAIRS, ascent_fraction=0.25),
        "tsam s=3 (concurrent)": _tsam(_PAIRS, 3, _RADII, concurrent=True),
        "m-sam (2 parts)": _with_pairs("tsam", _SHORTER, **_in_parts(2), concurrent=True),
        "m-sam (4 parts)": _with_pairs("tsam", _SHORTER, **_in_parts(4), concurrent=True),
    },
)

# On CIFAR-100 a rho of 0.1 peaks at 30 epochs, one of 0.2 higher at 50, where one of 0.4 is still on its way up.
_RISING = [(0.03, 0.3), (0.03, 0.4), (0.03, 0.6), (0.03, 0.8), (0.1, 0.4)]
NOISY_RISING = replace(
    NOISY,
    name="noisy-rising",
    trials={
        "sam": NOISY.trials["sam"],
        "sam (rising rho)": _with_pairs("sam", _RISING, rho_schedule="up"),
        "sam (ascent on 1/4, rising rho)": _with_pairs("sam", _RISING, rho_schedule="up", ascent_fraction=0.25),
        "tsam s=1 (rising rho)": _tsam(_RISING, 1, [20.0] * 5, rho_schedule="up"),
    },
    rungs=((5 / 6, 2),),  # at half of it a rho that rises is half of what it will be
    same_steps={
        "sam (rising rho)": "sam",
        "sam (ascent on 1/4, rising rho)": "sam (ascent on 1/4)",
        "tsam s=1 (rising rho)": "tsam s=1",
    },
)

# ---------------------------------------------------------------- averaged weights

# At a constant learning rate the last weights are one draw from where they wander; their average is the middle of it.


def _averaged(study: Study, labels: Sequence[str]) -> Study:
    """The trials of some labels once more, with what is tested averaged."""
    found = {f"{label} (averaged)": [{**trial, "average": True} for trial in study.trials[label]] for label in labels}
    beside = {study.reference: study.trials[study.reference]}
    return replace(study, name=f"{study.name}-averaged", trials=beside | found)


def _adaptive(pairs: _Pairs) -> dict[str, list[dict[str, Any]]]:
    """ASAM's trials: its rho is ten times SAM's, as where it was published (on digits fourteen times was best)."""
    return {"asam": _with_pairs("asam", [(lr, round(10 * rho, 6)) for lr, rho in pairs])}


_TO_AVERAGE = ("sam", "asam", "tsam s=1", "erm")
NOISY_AVERAGED = _averaged(replace(NOISY, trials={**NOISY.trials, **_adaptive(_PAIRS)}), _TO_AVERAGE)
FINE_TUNING_AVERAGED = [
    _averaged(replace(study, trials={**study.trials, **_adaptive(_FINE_PAIRS)}), _TO_AVERAGE) for study in FINE_TUNING
]
DIGITS_AVERAGED = Variants(
    "digits-averaged",
    {
        f"rho at radius {radius:g}: {rho:g}": replace(_DIGITS_CENTER, radius=radius, rho=rho, average=True)
        for radius in (0.0, 4.0)
        for rho in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
    }
    | {
        f"rho at {number} parts: {rho:g}": replace(_DIGITS_CENTER, **_in_parts(number), rho=rho, average=True)
        for number in (4, 8)
        for rho in _LENGTHS[number]
    }
    | {
        f"lr of erm: {lr:g}": replace(DIGITS.base, method="erm", epochs=120.0, evaluate_every=6, lr=lr, average=True)
        for lr in (0.003, 0.01, 0.03)
    },
    tuple(range(5)),
    DIGITS.title,
)

# ---------------------------------------------------------------- batches in parts, for a transformer

# Batches in parts won on digits; parts of eight examples do not fill a GPU and run beside each other.
_QUARTERED = _with_pairs("tsam", _FINE_PAIRS, **_in_parts(4), concurrent=True)
FINE_TUNING_PARTS = [
    replace(study, name=f"{study.name}-parts", trials={"sam": study.trials["sam"], "m-sam (4 parts)": _QUARTERED})
    for study in FINE_TUNING
]

_ALL: list[Study | Variants] = [
    NOISY,
    NOISY_CHEAPER,
    NOISY_RISING,
    NOISY_ACTS,
    *FINE_TUNING,
    *FINE_TUNING_PARTS,
    *FINE_TUNING_RADII,
    NOISY_AVERAGED,
    *FINE_TUNING_AVERAGED,
    RTE_WHOLE,
    DIGITS,
    DIGITS_CHEAPER,
    DIGITS_ACTS,
    DIGITS_MAP,
    DIGITS_FINE,
    DIGITS_SPLIT,
    DIGITS_RISING,
    DIGITS_AVERAGED,
    DIGITS_ADAPTIVE,
]
STUDIES: dict[str, Study | Variants] = {study.name: study for study in _ALL}
