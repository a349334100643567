"""The studies: what is tried for which method, written down before anything was trained."""

from __future__ import annotations

from typing import Any

from evidence.study import Study
from tiltsam.lab.config import TrainConfig

__all__ = ["STUDIES"]

_RUNGS = ((0.25, 3), (0.5, 1))

# Learning rate and rho, the same six for every method that has both. What else a method has is set beside them.
_PAIRS = [(0.01, 0.1), (0.01, 0.2), (0.01, 0.4), (0.03, 0.1), (0.03, 0.2), (0.03, 0.4)]


def _with_pairs(method: str, **lists: list[Any]) -> list[dict[str, Any]]:
    return [
        {"method": method, "lr": lr, "rho": rho} | {name: values[i] for name, values in lists.items()}
        for i, (lr, rho) in enumerate(_PAIRS)
    ]


_RADII = [20.0, 20.0, 10.0, 20.0, 10.0, 10.0]
_TILTS = [20.0, 100.0, 20.0, 100.0, 20.0, 100.0]

NOISY = Study(
    name="noisy",
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
    trials={
        "erm": [{"method": "erm", "lr": lr} for lr in (0.003, 0.006, 0.01, 0.03, 0.06, 0.1)],
        "sam": _with_pairs("sam"),
        "tsam s=1": _with_pairs("tsam", radius=_RADII, num_samples=[1] * 6),
        "tsam s=3": _with_pairs("tsam", radius=_RADII, t=_TILTS, num_samples=[3] * 6),
        "pgn": _with_pairs("pgn", alpha=[0.5, 0.8, 0.8, 0.5, 0.8, 0.8]),
        "rsam": _with_pairs("rsam", lam=[1.0, 2.0, 1.0, 2.0, 1.0, 2.0]),
        "esam2": _with_pairs("esam2", num_points=[3] * 6),
    },
    rungs=_RUNGS,
    seeds=(0, 1, 2),
)

STUDIES = {study.name: study for study in (NOISY,)}
