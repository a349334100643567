"""Tables and figures of a study, from its runs."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evidence.study import Rates, Study, Variants, diverged, rows_of, score_at
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.palette import OKABE_ITO, color_of
from tiltsam.lab.records import Record

__all__ = [
    "cross_table",
    "draw_curves",
    "draw_flatness",
    "draw_variants",
    "final_table",
    "flat_table",
    "trial_table",
    "variant_table",
]

_STYLES = ("-", "--", ":", "-.")  # of labels that share their method's colour
_KINDS = {"final": "at the end", "best": "at the best epoch"}
_SHOWN = 12.0  # points below the best that a figure of variants shows; what collapsed is told in words
_ABREAST = 4  # panels in a line, at most
_SETTINGS = ("lr", "rho", "radius", "t", "num_samples", "alpha", "lam", "num_points", "ascent_fraction", "every")


def settings_of(study: Study, label: str, config: TrainConfig) -> str:
    """What distinguishes a trial from the others of its label."""
    names = {name for trial in study.trials[label] for name in trial} - {"method"}
    values = config.to_json() | config.all_options()
    return ", ".join(f"{name} {values[name]:g}" for name in _SETTINGS if name in names)


def trial_table(study: Study, out: Path, rates: Rates) -> list[list[str]]:
    """Every trial and its validation score at each share of the seconds that it reached."""
    shares = [share for share, _ in study.rungs] + [1.0]
    table = [["method", "trial", *(f"after {share:.2g}" for share in shares), ""]]
    for label in study.trials:
        chosen = study.winner(label, out, rates)
        for config in study.configs(label, rates):
            scores = [score_at(out, config, share) for share in shares]
            cells = ["diverged" if s == -math.inf else "" if s is None else f"{100 * s:.2f}" for s in scores]
            table.append([label, settings_of(study, label, config), *cells, "chosen" if config == chosen else ""])
    return table


def over_seeds(out: Path, config: TrainConfig, seeds: Sequence[int]) -> dict[str, Any]:
    """What settings reached, seed by seed, of the runs that are finished."""
    found: dict[str, Any] = {"config": config, "seeds": [], "diverged": []}
    found |= {"final": [], "best": [], "size": [], "steps": 0}
    for seed in seeds:
        mine = replace(config, seed=seed)
        if diverged(out, mine):
            found["diverged"].append(seed)
            continue
        result = Record.of(out, mine).result()
        if result is None or score_at(out, mine, 1.0) is None:
            continue
        rows = rows_of(out, mine)
        metric = f"test_{result['metric']}"
        found |= {"metric": metric, "steps": rows[-1]["steps"]}
        found["seeds"].append(seed)
        found["final"].append(100 * rows[-1][metric])
        found["best"].append(100 * result["score_at_best_validation"])  # where a pause looked does not count
        found["size"].append(statistics.fmean(row["effective_sample_size"] for row in rows))
    return found


def numbers(study: Study, label: str, out: Path, rates: Rates) -> dict[str, Any] | None:
    """What the chosen settings reached; None while nothing is chosen."""
    chosen = study.winner(label, out, rates)
    if chosen is None:
        return None
    found = over_seeds(out, chosen, study.seeds)
    return found | {"cost": found["steps"] * study.rate(label, rates) / 1e3}


def final_table(study: Study, out: Path, rates: Rates) -> list[list[str]]:
    """The chosen settings of every label: test score at the end, and at the epoch that was best on validation.

    Seeds are paired (the same labels, the same split), so differences to the reference are of the same seed.
    """
    heading = ["method", "chosen", "epochs", study.unit, "at the end", "at the best epoch"]
    table = [[*heading, f"at the end, minus {study.reference}", "seeds"]]
    against = numbers(study, study.reference, out, rates) if study.reference in study.trials else None
    for label in study.trials:
        found = numbers(study, label, out, rates)
        if found is None or not found["seeds"]:
            continue
        config = found["config"]
        shared = [seed for seed in found["seeds"] if against and seed in against["seeds"]] * (label != study.reference)
        differences = [_of_seed(found, seed) - _of_seed(against, seed) for seed in shared if against]
        lost = f", {len(found['diverged'])} diverged" if found["diverged"] else ""
        table.append(
            [
                label,
                settings_of(study, label, config),
                f"{config.epochs:g}",
                f"{found['cost']:.3g}",
                _spread(found["final"]),
                _spread(found["best"]),
                _spread(differences, sign="+") if differences else "",
                f"{len(found['seeds'])}{lost}",
            ]
        )
    return table


def _of_seed(found: dict[str, Any], seed: int) -> float:
    score: float = found["final"][found["seeds"].index(seed)]
    return score


def _spread(values: Sequence[float], sign: str = "") -> str:
    error = f" ± {_error(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{sign}.2f}{error}"


def draw_curves(study: Study, out: Path, rates: Rates, path: Path) -> None:
    """Test score against cost, of the chosen settings: the mean over seeds and its standard error."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    metric, floor = "", math.inf
    drawn: Counter[str] = Counter()
    for label in study.trials:
        found = numbers(study, label, out, rates)
        if found is None or not found["seeds"]:
            continue
        curves = [rows_of(out, replace(found["config"], seed=seed)) for seed in found["seeds"]]
        steps = sorted(set.intersection(*({row["steps"] for row in rows} for rows in curves)))
        metric = found["metric"]
        lines = [{row["steps"]: 100 * row[metric] for row in rows} for rows in curves]
        costs = [k * study.rate(label, rates) / 1e3 for k in steps]
        style = {"color": color_of(label), "linestyle": _STYLES[drawn[color_of(label)]]}
        drawn[color_of(label)] += 1
        means = [statistics.fmean(line[k] for line in lines) for k in steps]
        errors = [_error([line[k] for line in lines]) for k in steps]
        axes.plot(costs, means, label=label, **style)
        low, high = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
        axes.fill_between(costs, low, high, color=style["color"], alpha=0.2, linewidth=0)
        late = [m for c, m in zip(costs, means, strict=True) if c >= 0.2 * costs[-1]]
        floor = min(floor, *late)
    axes.set(xlabel=f"{study.unit} of training", ylabel=f"{metric.replace('_', ' ')}, ×100", title=study.title)
    if drawn:
        axes.set_ylim(bottom=floor - 0.2 * (axes.get_ylim()[1] - floor))  # the climb at the start tells little
    axes.grid(alpha=0.3)
    if drawn:
        axes.legend()
    figure.savefig(path, dpi=160)
    plt.close(figure)


def variant_table(study: Variants, out: Path) -> list[list[str]]:
    """Every variant: test score, and the effective sample size of its weights over the run."""
    table = [["variant", "at the end", "at the best epoch", "effective samples", "of", "seeds"]]
    for label, config in study.configs.items():
        found = over_seeds(out, config, study.seeds)
        if found["seeds"]:
            size = f"{statistics.fmean(found['size']):.3f}"
            scores = [_spread(found["final"]), _spread(found["best"])]
            table.append([label, *scores, size, str(_samples(config)), str(len(found["seeds"]))])
    return table


def _samples(config: TrainConfig) -> int:
    samples: int = config.all_options().get("num_samples", 1)
    return samples


def draw_variants(study: Variants, out: Path, path: Path) -> None:
    """A panel for each setting that was varied: test score at the end and at the best epoch, with standard errors.

    Below it, where there are several samples anywhere, which share of them the weights are worth.
    """
    plt = _pyplot()
    found = {label: over_seeds(out, config, study.seeds) for label, config in study.configs.items()}
    found = {label: runs for label, runs in found.items() if runs["seeds"]}
    names = list(dict.fromkeys(label.rpartition(" ")[0] for label in found))
    several = any(_samples(runs["config"]) > 1 for runs in found.values())
    scores = [runs[kind] for runs in found.values() for kind in _KINDS]
    floor = max(map(statistics.fmean, scores)) - _SHOWN
    top = max(statistics.fmean(score) + _error(score) for score in scores) + 0.1 * _SHOWN
    heights = (2, 1)[: 1 + several]
    lines = math.ceil(len(names) / _ABREAST)
    columns = math.ceil(len(names) / lines)
    figure, axes = plt.subplots(
        lines * len(heights),
        columns,
        figsize=(max(4.5, 3 * columns), lines * (3.3 + 1.5 * several)),  # of a single panel the title is the widest
        layout="constrained",
        sharey="row",
        height_ratios=heights * lines,
        squeeze=False,
    )
    for panel in axes[-len(heights) :, len(names) - (lines - 1) * columns :].flat:
        panel.set_visible(False)
    for number, name in enumerate(names):
        line, column = divmod(number, columns)
        panels = axes[line * len(heights) : (line + 1) * len(heights), column]
        mine = {label.rpartition(" ")[2]: runs for label, runs in found.items() if label.rpartition(" ")[0] == name}
        at, above = range(len(mine)), panels[0]
        for (kind, told), color, marker in zip(_KINDS.items(), OKABE_ITO, ("o-", "s--"), strict=False):
            means = [statistics.fmean(runs[kind]) for runs in mine.values()]
            errors = [_error(runs[kind]) for runs in mine.values()]
            above.errorbar(at, means, errors, fmt=marker, color=color, label=told, capsize=3)
            for place, mean in zip(at, means, strict=True):
                if mean < floor and kind == "final":
                    above.annotate(f"{mean:.0f} ↓", (place, floor), ha="center", va="bottom")
        if several:
            shares = [statistics.fmean(runs["size"]) / _samples(runs["config"]) for runs in mine.values()]
            panels[1].plot(at, shares, "o-", color=color_of("tsam"))
            panels[1].set_ylim(0, 1.05)
        for panel in panels:
            panel.set_xticks(at, [])
            panel.grid(alpha=0.3)
        panels[-1].set_xticks(at, mine)
        panels[-1].set_xlabel(name.rstrip(":"))
        above.set_ylim(floor, top)
        if column == 0:
            above.set_ylabel("test score, ×100")
        if column == 0 and several:
            panels[1].set_ylabel("effective samples / s")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(study.title)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def flatness_of(study: Study | Variants, out: Path, rates: Rates) -> dict[str, list[dict[str, Any]]]:
    """By label, what was measured around the runs of its settings, a seed each."""
    found: dict[str, list[dict[str, Any]]] = {}
    for label, config in study.settled(out, rates).items():
        for seed in study.seeds:
            path = Record.of(out, replace(config, seed=seed)).folder / "flatness.json"
            if path.exists():
                found.setdefault(label, []).append(json.loads(path.read_text()))
    return found


def flat_table(
    study: Study | Variants, out: Path, rates: Rates, stds: Sequence[float] = (0.01, 0.05, 0.1)
) -> list[list[str]]:
    """Loss at the weights, mean and variance of the loss around them, and the Hessian's largest eigenvalues.

    Args:
        study: Which.
        out: Folder of the runs.
        rates: Of the study.
        stds: Noise levels to show, of those that were measured.
    """
    first = "variant" if isinstance(study, Variants) else "method"
    heading = [first, "loss", *(f"{what} at {std:g}" for std in stds for what in ("mean", "variance"))]
    table = [[*heading, "top-5 eigenvalues", "seeds"]]
    for label, seeds in flatness_of(study, out, rates).items():
        around = [seed["neighborhood"] for seed in seeds]
        places = [around[0]["std"].index(std) for std in stds]
        cells = [_plain(statistics.fmean(seed["loss"] for seed in seeds))]
        for k in places:
            cells += [_plain(statistics.fmean(n[what][k] for n in around)) for what in ("mean", "variance")]
        values = [seed["eigenvalues"]["values"] for seed in seeds]
        top = " ".join(_plain(statistics.fmean(column)) for column in zip(*values, strict=True))
        table.append([label, *cells, top, str(len(seeds))])
    return table


def cross_table(path: Path) -> list[list[str]]:
    """Rows trained on, columns evaluated on, the mean over seeds."""
    seeds: dict[str, list[dict[str, Any]]] = json.loads(path.read_text())
    entries = [entry for found in seeds.values() for entry in found]
    columns = list(dict.fromkeys((e["split"], e["objective"]) for e in entries))
    table = [["trained by", *(f"{split}, {objective}" for split, objective in columns), "seeds"]]
    for model in dict.fromkeys(e["model"] for e in entries):
        mine = [e for e in entries if e["model"] == model]
        means = [statistics.fmean(e["loss"] for e in mine if (e["split"], e["objective"]) == c) for c in columns]
        table.append([model, *(f"{mean:.3f}" for mean in means), str(len(seeds))])
    return table


def draw_flatness(study: Study, out: Path, rates: Rates, path: Path) -> None:
    """Mean and variance of the loss around the weights against the size of the noise."""
    plt = _pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    drawn: Counter[str] = Counter()
    for label, seeds in flatness_of(study, out, rates).items():
        color = color_of(label)
        for panel, what in zip(axes, ("mean", "variance"), strict=True):
            columns = zip(*(seed["neighborhood"][what] for seed in seeds), strict=True)
            means = [statistics.fmean(column) for column in columns]
            style = {"color": color, "linestyle": _STYLES[drawn[color]], "marker": "o", "markersize": 3}
            panel.plot(seeds[0]["neighborhood"]["std"], means, label=label, **style)
        drawn[color] += 1
    for panel, what in zip(axes, ("mean", "variance"), strict=True):
        panel.set(xscale="log", yscale="log", xlabel="std of the noise on the weights", ylabel=f"{what} of the loss")
        panel.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle(study.title)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def _pyplot() -> Any:
    """Matplotlib, drawing into files."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    return plt


def _plain(value: float) -> str:
    return f"{value:.3g}"


def _error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
