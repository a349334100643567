"""Tables and figures of a study, from its runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evidence.study import Rates, Study, diverged, rows_of, score_at
from tiltsam.lab.config import TrainConfig
from tiltsam.palette import color_of

__all__ = ["draw_curves", "final_table", "trial_table"]

_STYLES = {"tsam s=3": "--", "tsam s=5": ":"}
_SETTINGS = ("lr", "rho", "radius", "t", "num_samples", "alpha", "lam", "num_points", "ascent_fraction", "every")


def settings_of(study: Study, label: str, config: TrainConfig) -> str:
    """What distinguishes a trial from the others of its label."""
    names = {name for trial in study.trials[label] for name in trial} - {"method"}
    return ", ".join(f"{name} {getattr(config, name):g}" for name in _SETTINGS if name in names)


def trial_table(study: Study, out: Path, rates: Rates) -> list[list[str]]:
    """Every trial and its validation score at each share of the seconds that it reached."""
    shares = [share for share, _ in study.rungs] + [1.0]
    table = [["method", "trial", *(f"after {share:g}" for share in shares), ""]]
    for label in study.trials:
        chosen = study.winner(label, out, rates)
        for config in study.configs(label, rates):
            scores = [score_at(out, config, share) for share in shares]
            cells = ["diverged" if s == -math.inf else "" if s is None else f"{100 * s:.2f}" for s in scores]
            table.append([label, settings_of(study, label, config), *cells, "chosen" if config == chosen else ""])
    return table


def numbers(study: Study, label: str, out: Path, rates: Rates) -> dict[str, Any] | None:
    """What the chosen settings reached, seed by seed; None while nothing is chosen."""
    chosen = study.winner(label, out, rates)
    if chosen is None:
        return None
    found: dict[str, Any] = {"config": chosen, "seeds": [], "final": [], "best": [], "best_epoch": []}
    for seed in study.seeds:
        config = replace(chosen, seed=seed)
        if score_at(out, config, 1.0) is None or diverged(out, config):
            continue
        rows = rows_of(out, config)
        metric = next(name for name in rows[-1] if name.startswith("test_"))
        best = max(rows, key=lambda row: float(row[metric.replace("test_", "validation_")]))
        found["metric"] = metric
        found["seeds"].append(seed)
        found["final"].append(100 * rows[-1][metric])
        found["best"].append(100 * best[metric])
        found["best_epoch"].append(best["epoch"])
        found["steps"] = rows[-1]["steps"]
        found["size"] = rows[-1]["effective_sample_size"]
    found["seconds"] = found["steps"] * rates[label] / 1e3
    return found


def final_table(study: Study, out: Path, rates: Rates) -> list[list[str]]:
    """The chosen settings of every label: test score at the end, and at the epoch that was best on validation."""
    table = [["method", "chosen", "epochs", "seconds", "at the end", "at the best epoch", "seeds"]]
    for label in study.trials:
        found = numbers(study, label, out, rates)
        if found is None:
            continue
        config = found["config"]
        table.append(
            [
                label,
                settings_of(study, label, config),
                f"{config.epochs:g}",
                f"{found['seconds']:.0f}",
                _spread(found["final"]),
                _spread(found["best"]),
                ", ".join(map(str, found["seeds"])),
            ]
        )
    return table


def _spread(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.2f}"
    return f"{statistics.fmean(values):.2f} ± {statistics.stdev(values) / math.sqrt(len(values)):.2f}"


def draw_curves(study: Study, out: Path, rates: Rates, path: Path, *, title: str) -> None:
    """Test score against seconds, of the chosen settings: the mean over seeds, and from the worst to the best."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    metric = ""
    for label in study.trials:
        found = numbers(study, label, out, rates)
        if found is None:
            continue
        curves = [rows_of(out, replace(found["config"], seed=seed)) for seed in found["seeds"]]
        steps = sorted(set.intersection(*({row["steps"] for row in rows} for rows in curves)))
        metric = found["metric"]
        lines = [{row["steps"]: 100 * row[metric] for row in rows} for rows in curves]
        seconds = [k * rates[label] / 1e3 for k in steps]
        style = {"color": color_of(label), "linestyle": _STYLES.get(label, "-")}
        axes.plot(seconds, [statistics.fmean(line[k] for line in lines) for k in steps], label=label, **style)
        low, high = ([pick(line[k] for line in lines) for k in steps] for pick in (min, max))
        axes.fill_between(seconds, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axes.set(xlabel="seconds of training, alone on the GPU", ylabel=f"{metric.replace('_', ' ')}, ×100", title=title)
    axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=160)
    plt.close(figure)
