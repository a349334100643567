"""What the trials of several studies are written with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiltsam.lab.config import TrainConfig

__all__ = ["Pairs", "around", "change", "in_parts", "seven", "tsam", "with_pairs"]

Pairs = Sequence[tuple[float, float]]
"""Learning rate and rho of each trial."""

_TILTS = [20.0, 100.0, 20.0, 100.0, 20.0, 100.0]
_SHARES = (0.0, 0.5, 1.0, 1.5, 2.0)


def change(config: TrainConfig, **settings: Any) -> TrainConfig:
    """The config with other fields, or options of its method."""
    return config.with_settings(settings)


def with_pairs(method: str, pairs: Pairs, **more: Any) -> list[dict[str, Any]]:
    """Trials of a method: learning rate and rho, and beside them what else it has: a list of values, or one for all."""
    return [
        {"method": method, "lr": lr, "rho": rho}
        | {name: value[i] if isinstance(value, list) else value for name, value in more.items()}
        for i, (lr, rho) in enumerate(pairs)
    ]


def tsam(pairs: Pairs, num_samples: int, radii: list[float], **more: Any) -> list[dict[str, Any]]:
    """TSAM's trials, the tilt varied beside the radius where there is more than one sample."""
    if num_samples > 1:  # a single sample has all the weight, whatever the tilt
        more["t"] = _TILTS
    return with_pairs("tsam", pairs, radius=radii, num_samples=num_samples, **more)


def seven(
    rates: Sequence[float], pairs: Pairs, radii: list[float], alphas: list[float], lams: list[float]
) -> dict[str, list[dict[str, Any]]]:
    """The methods of the paper's comparison; ``rates`` are ERM's, which has no rho, as many as there are pairs."""
    return {
        "erm": [{"method": "erm", "lr": lr} for lr in rates],
        "sam": with_pairs("sam", pairs),
        "tsam s=1": tsam(pairs, 1, radii),
        "tsam s=3": tsam(pairs, 3, radii),
        "pgn": with_pairs("pgn", pairs, alpha=alphas),
        "rsam": with_pairs("rsam", pairs, lam=lams),
        "esam2": with_pairs("esam2", pairs, num_points=3),
    }


def in_parts(number: int) -> dict[str, Any]:
    """m-SAM: every part of the batch has an ascent of its own."""
    return {"num_samples": number, "split": number > 1, "radius": 0.0, "t": 0.0}


def around(center: TrainConfig) -> dict[str, TrainConfig]:
    """TSAM with one setting changed at a time; the tilt is varied at three samples, for a single one has no weights."""
    found: dict[str, TrainConfig] = {}
    for name in ("radius", "rho"):
        values = [share * center.all_options()[name] for share in _SHARES]
        found |= {f"{name} {value:g}": change(center, **{name: value}) for value in values}
    found |= {f"s {s}": change(center, num_samples=s) for s in (1, 3, 5)}
    found |= {f"t {t:g}": change(center, num_samples=3, t=t) for t in (0.0, 1.0, 5.0, 20.0, 100.0, 1000.0)}
    return found
