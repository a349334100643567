"""The table and the figure of this record, from its runs; run it from benchmarks with ``PYTHONPATH=.:../src``."""

import gzip
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt

from tiltsam.lab.palette import OKABE_ITO
from tiltsam.lab.stats import mean_of
from timing import print_table

HERE = Path(__file__).parent
KINDS = {"score": "at the end", "score_at_best_validation": "at the best epoch"}


def name_of(config: dict[str, Any]) -> str:
    """The method, with what it was given."""
    if config["method"] != "tsam":
        return str(config["method"])
    samples, t = config["options"]["num_samples"], config["options"]["t"]
    return f"tsam s={samples}" + (f" t={t:g}" if samples > 1 else "")


def spread(values: list[float], form: str = ".2f") -> str:
    """Mean and standard error."""
    mean = mean_of(values)
    return f"{mean.value:{form}} ± {mean.error:.2f}"


runs: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
for line in gzip.decompress((HERE / "runs.jsonl.gz").read_bytes()).splitlines():
    run = json.loads(line)
    runs[name_of(run["config"])][run["config"]["seed"]] = run


def scores(name: str, kind: str) -> list[float]:
    """Of all seeds, in per cent."""
    return [100 * runs[name][seed]["result"][kind] for seed in sorted(runs[name])]


def differences(name: str, other: str, kind: str) -> str:
    """Of pairs with one seed."""
    pairs = zip(scores(name, kind), scores(other, kind), strict=True)
    return spread([mine - theirs for mine, theirs in pairs], "+.2f")


def size(name: str) -> float:
    """What the weights of a step were worth, the mean over the run and the seeds."""
    rows = [row for run in runs[name].values() for row in run["metrics"]]
    return statistics.fmean(row["effective_sample_size"] for row in rows)


table = [
    [
        "method",
        "worth",
        *KINDS.values(),
        *(f"minus {what}, {told}" for told in KINDS.values() for what in ("t=0", "s=1")),
    ]
]
figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained", sharey=True)
for axis, number in zip(axes, (3, 5), strict=True):
    untilted = f"tsam s={number} t=0"
    mine = [untilted, *sorted((name for name in runs if name.startswith(f"target-{number}-")), key=size, reverse=True)]
    for name in mine:
        compared = [differences(name, other, kind) for kind in KINDS for other in (untilted, "tsam s=1")]
        table.append([name, f"{size(name):.2f}", *(spread(scores(name, kind)) for kind in KINDS), *compared])
    for (kind, told), color, marker in zip(KINDS.items(), OKABE_ITO, ("o-", "s--"), strict=False):
        means = [mean_of(scores(name, kind)) for name in mine]
        values, errors = [mean.value for mean in means], [mean.error for mean in means]
        axis.errorbar([size(name) for name in mine], values, errors, fmt=marker, color=color, capsize=3, label=told)
    alone = mean_of(scores("tsam s=1", "score")).value
    axis.axhline(alone, color="gray", linestyle=":", label="one sample, at the end")
    axis.set(xlabel=f"of {number} samples, how many the weights are worth")
    axis.grid(alpha=0.3)
for name in ("tsam s=1", "sam"):
    table.append([name, "1", *(spread(scores(name, kind)) for kind in KINDS), "", "", "", ""])
axes[0].set(ylabel="test accuracy, ×100")
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
figure.suptitle("8×8 digits, 20% of labels wrong: a tilt that keeps to a target")
figure.savefig(HERE / "target.png", dpi=160)
print_table(table[0], table[1:])
