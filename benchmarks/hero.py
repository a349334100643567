"""Draw the figure at the top of README.md from the records: docs/figures/hero.png.

    python benchmarks/hero.py

A line is the mean over seeds of the test accuracy during training. Seeds were evaluated at different passes; they are
interpolated to those of the run with the fewest evaluations. The number at its end is the mean ± standard error.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np

from differences import select_runs
from record import read_runs
from tiltsam.lab.stats import mean_of

HERE = Path(__file__).parent
RECORDS = ("2026-11-15_noisy", "2026-11-18_two_tilts_cifar")
LINES = (  # label, runs, color, style, y of the label
    ("plain SGD (ERM)", "erm folder=cifar100-noisy/erm-fa595bb385", "#8a8f98", "-", 56.5),
    ("SAM", "sam folder=cifar100-noisy/sam-73af265261", "#3b6fb6", "-", 62.2),
    ("TSAM, one sample", "tsam folder=cifar100-noisy/tsam-505f0fdf7a", "#1f9e89", "-", 64.0),
    ("SAM, tilt τ = −0.5", "sam folder=cifar100-noisy/sam-780a376491", "#3b6fb6", "--", 67.0),
    ("SGD, averaged", "erm folder=cifar100-noisy/erm-edf8d6d57b", "#d9822b", "-", 69.0),
    ("SGD, averaged, tilt τ = −0.2", "erm folder=cifar100-noisy/erm-15150149f7", "#b3262e", "-", 70.9),
)


def main() -> None:
    matplotlib.use("Agg")
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    runs = [run for name in RECORDS for run in read_runs(HERE / "records" / name / "runs.jsonl.gz") if "result" in run]
    figure, axes = plt.subplots(figsize=(8.4, 4.4), layout="constrained")
    for label, query, color, style, y in LINES:
        seeds = list(select_runs(runs, query).values())
        fewest = min((run["metrics"] for run in seeds), key=len)
        passes = [0.0, *(row["passes"] for row in fewest)]
        curves = [
            np.interp(passes, [0.0, *(r["passes"] for r in m)], [0.01, *(r["test_accuracy"] for r in m)])
            for m in (run["metrics"] for run in seeds)
        ]
        axes.plot(np.array(passes) / 1000, 100 * np.mean(curves, axis=0), style, color=color, linewidth=2.2)
        end = mean_of([100 * run["result"]["score"] for run in seeds])
        axes.text(42.8, y, f"{end.value:.1f} ± {end.error:.1f}  {label}", color=color, va="center", weight="bold")
    axes.set(xlim=(0, 42.2), ylim=(30, 73), xlabel="thousand passes (forward and backward)", ylabel="test accuracy, %")
    axes.set_title("CIFAR-100 with 20% noisy labels, ResNet-18, about 41,000 passes each", loc="left", fontsize=12)
    axes.grid(axis="y", color="#e6e8eb")
    figure.savefig(HERE.parent / "docs" / "figures" / "hero.png", dpi=150)


if __name__ == "__main__":
    main()
