"""The studies: what is tried for which method, written down before it was trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from evidence.digits import DIGITS_STUDIES
from evidence.study import Study, Variants
from evidence.trials import Pairs, around, change, in_parts, seven, tsam, with_pairs
from tiltsam.lab.config import TrainConfig

__all__ = ["STUDIES"]

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
    trials=seven(
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
            "sam": with_pairs("sam", _FINE_PAIRS),
            "tsam s=1": tsam(_FINE_PAIRS, 1, _FINE_RADII),
            "tsam s=3": tsam(_FINE_PAIRS, 3, _FINE_RADII),
        },
        rungs=(),  # three samples make two epochs: nothing that could be cut at a quarter
        seeds=tuple(range(10)),
        looks=6,
    )


FINE_TUNING = [_fine_tuning(task) for task in _NAMES]

# 64 tokens cut more than a third of RTE's examples, 128 an eighth.
_RTE = FINE_TUNING[0]
_WHOLE = change(_RTE.base, max_length=128)
RTE_WHOLE = replace(_RTE, name="minilm-rte-whole", title="MiniLM on RTE, 128 tokens", base=_WHOLE)

# ---------------------------------------------------------------- what acts

# Around what the trials of "noisy" chose, with the epochs that the seconds allow: radius and rho at one sample, the
# number of samples and the tilt at three. With a radius of 0 one sample is SAM, whose trial is there already.
_ONE = change(
    NOISY.base, method="tsam", epochs=58.8, evaluate_every=5, lr=0.03, rho=0.2, radius=20.0, num_samples=1, t=20.0
)
_THREE = change(_ONE, epochs=20.0, evaluate_every=2, rho=0.1, num_samples=3)
_NO_RADIUS = change(NOISY.base, method="sam", evaluate_every=5, lr=0.03, rho=0.2)
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
    center = change(study.base, method="tsam", epochs=epochs, lr=5e-5, rho=0.02, num_samples=1)
    return Variants(
        f"{study.name}-radius",
        {f"radius {radius:g}": change(center, radius=radius) for radius in _STARTS},
        seeds=tuple(range(5)),
        title=study.title,
    )


FINE_TUNING_RADII = [_radii(study, 5.8 if study.base.compile else 6.2) for study in FINE_TUNING[:-1]]  # not WNLI

# ---------------------------------------------------------------- cheaper steps

# On digits four parts wanted little more than half of SAM's rho, which is 0.2 here.
_SHORTER = [(0.03, 0.07), (0.03, 0.1), (0.03, 0.15), (0.03, 0.2), (0.1, 0.1)]
NOISY_CHEAPER = replace(
    NOISY,
    name="noisy-cheaper",
    trials={
        "sam": NOISY.trials["sam"],
        "sam (ascent on 1/4)": with_pairs("sam", _PAIRS, ascent_fraction=0.25),
        "tsam s=3 (concurrent)": tsam(_PAIRS, 3, _RADII, concurrent=True),
        "m-sam (2 parts)": with_pairs("tsam", _SHORTER, **in_parts(2), concurrent=True),
        "m-sam (4 parts)": with_pairs("tsam", _SHORTER, **in_parts(4), concurrent=True),
    },
)

# ---------------------------------------------------------------- a rho that rises

# On CIFAR-100 a rho of 0.1 peaks at 30 epochs, one of 0.2 higher at 50, where one of 0.4 is still on its way up.
_RISING = [(0.03, 0.3), (0.03, 0.4), (0.03, 0.6), (0.03, 0.8), (0.1, 0.4)]
NOISY_RISING = replace(
    NOISY,
    name="noisy-rising",
    trials={
        "sam": NOISY.trials["sam"],
        "sam (rising rho)": with_pairs("sam", _RISING, rho_schedule="up"),
        "sam (ascent on 1/4, rising rho)": with_pairs("sam", _RISING, rho_schedule="up", ascent_fraction=0.25),
        "tsam s=1 (rising rho)": tsam(_RISING, 1, [20.0] * 5, rho_schedule="up"),
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


def _adaptive(pairs: Pairs) -> dict[str, list[dict[str, Any]]]:
    """ASAM's trials: its rho is ten times SAM's, as where it was published (on digits fourteen times was best)."""
    return {"asam": with_pairs("asam", [(lr, round(10 * rho, 6)) for lr, rho in pairs])}


_TO_AVERAGE = ("sam", "asam", "tsam s=1", "erm")
NOISY_AVERAGED = replace(
    _averaged(replace(NOISY, trials={**NOISY.trials, **_adaptive(_PAIRS)}), _TO_AVERAGE),
    # Timed beside plain SAM, its step came out shorter than without an average, which cannot be.
    same_steps={"tsam s=1 (averaged)": "tsam s=1"},
)
FINE_TUNING_AVERAGED = [
    _averaged(replace(study, trials={**study.trials, **_adaptive(_FINE_PAIRS)}), _TO_AVERAGE) for study in FINE_TUNING
]

# What an average does to the very settings that SAM's trials chose, for as many seconds: nothing is chosen for it.
_CHOSEN = {"rte": (2e-5, 0.05), "mrpc": (5e-5, 0.02), "cola": (2e-5, 0.05), "stsb": (5e-5, 0.05)}


def _beside(study: Study, lr: float, rho: float) -> Variants:
    plain = change(study.base, method="sam", lr=lr, rho=rho)
    average = change(plain, average=True, epochs=5.8 if plain.compile else 5.9)
    return Variants(
        f"{study.name}-beside", {"average: none": plain, "average: kept": average}, study.seeds, title=study.title
    )


FINE_TUNING_BESIDE = [
    _beside(study, *_CHOSEN[task]) for task, study in zip(_NAMES, FINE_TUNING, strict=True) if task in _CHOSEN
]

# ---------------------------------------------------------------- other learning rates

# What an average gains, a rate that falls might gain too, or a smaller one. At half of its way one that falls says
# little.
_FALLING = [(0.03, 0.1), (0.03, 0.2), (0.1, 0.1), (0.1, 0.2), (0.1, 0.4)]
_FALLING_RATES = (0.03, 0.06, 0.1, 0.2, 0.3)  # ERM at a constant rate chose 0.1, the largest of its trials
NOISY_FALLING = replace(
    NOISY,
    name="noisy-falling",
    trials={
        "sam": NOISY.trials["sam"],
        "sam (cosine)": with_pairs("sam", _FALLING, schedule="cosine"),
        "erm (cosine)": [{"method": "erm", "lr": lr, "schedule": "cosine"} for lr in _FALLING_RATES],
    },
    rungs=((5 / 6, 1),),
    same_steps={"sam (cosine)": "sam", "erm (cosine)": "erm"},
)
# Around what SAM chose; of its trials the one with the smallest rate was on its way up when it was cut.
NOISY_RATES = Variants(
    "noisy-rates",
    {f"lr {lr:g}": change(_NO_RADIUS, lr=lr) for lr in (0.01, 0.02, 0.03, 0.1)},
    seeds=(0,),
    title=NOISY.title,
)

# With averages ERM, SAM and TSAM all chose the largest rate of their trials, and ERM came out best: is there more
# beyond it, and does a smaller ascent, at that rate, do better than none? Nothing is chosen here. The epochs are those
# of the chosen ones, in SAM's seconds.
_ERM_AVERAGED = change(NOISY.base, method="erm", lr=0.1, epochs=116.3, evaluate_every=10, average=True)
_SAM_AVERAGED = change(NOISY.base, method="sam", lr=0.1, rho=0.2, epochs=59.5, evaluate_every=5, average=True)
NOISY_BEYOND = Variants(
    "noisy-beyond",
    {
        "lr of erm: 0.1": _ERM_AVERAGED,
        "lr of erm: 0.2": change(_ERM_AVERAGED, lr=0.2),
        "rho at lr 0.1: 0.1": change(_SAM_AVERAGED, rho=0.1),
        "rho at lr 0.1: 0.2": _SAM_AVERAGED,
        "rho at lr 0.2: 0.1": change(_SAM_AVERAGED, lr=0.2, rho=0.1),
    },
    seeds=(0,),
    title=NOISY.title,
)
# What an ascent is worth to averaged weights at the rate that all chose, in SAM's seconds; without one it is ERM.
NOISY_ASCENT = Variants(
    "noisy-ascent",
    {"rho 0": _ERM_AVERAGED, "rho 0.1": change(_SAM_AVERAGED, rho=0.1), "rho 0.2": _SAM_AVERAGED},
    seeds=NOISY.seeds,
    title=NOISY.title,
)
# SAM's average was still rising when its seconds were over, and ERM's hardly: who is ahead after twice as many?
NOISY_LONGER = Variants(
    "noisy-longer",
    {
        f"epochs of {config.method}: {times * config.epochs:g}": change(config, epochs=times * config.epochs)
        for config in (_ERM_AVERAGED, _SAM_AVERAGED)
        for times in (1, 2)
    },
    seeds=(0,),
    title=NOISY.title,
)

# ---------------------------------------------------------------- batches in parts, for a transformer

# Batches in parts won on digits; parts of eight examples do not fill a GPU and run beside each other.
_QUARTERED = with_pairs("tsam", _FINE_PAIRS, **in_parts(4), concurrent=True)
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
    NOISY_FALLING,
    NOISY_RATES,
    NOISY_BEYOND,
    NOISY_ASCENT,
    NOISY_LONGER,
    *FINE_TUNING_AVERAGED,
    *FINE_TUNING_BESIDE,
    RTE_WHOLE,
    *DIGITS_STUDIES,
]
STUDIES: dict[str, Study | Variants] = {study.name: study for study in _ALL}
