"""Measure how often the errors of t-weighted numbers cover the truth: the table of docs/measure.md.

    python benchmarks/coverage.py      # about five minutes on a CPU

Losses are those of a quadratic with curvatures from 0.05 to 1 under noise of standard deviation 1, where the t-weighted
mean and variance are known. Each cell has, over tilts and dimensions with that share of effective draws, the smallest
and the largest number of cases in 100 where two standard errors cover the t-weighted mean, and the t-weighted variance.
"""

from __future__ import annotations

import torch

from tiltsam.lab.console import format_markdown
from tiltsam.sharpness import Neighborhood

REPEATS = 2000
DRAWS = (20, 100, 500)
TILTS = {20: (0.0, 0.05, 0.1, 0.2, 0.3, 0.46), 200: (0.0, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15)}  # by dimension
SHARES = {"1 (`t=0`)": (1.0, 1.01), "0.9 to 0.99": (0.9, 1.0), "0.5 to 0.9": (0.5, 0.9), "0.2 to 0.5": (0.2, 0.5)}


def coverage(dim: int, draws: int, t: float, generator: torch.Generator) -> tuple[float, float, float]:
    """Return the share of effective draws, and how often the t-weighted mean and variance are covered."""
    curvatures = torch.linspace(0.05, 1, dim, dtype=torch.float64)
    noise = torch.randn(REPEATS, draws, dim, generator=generator, dtype=torch.float64)
    found = Neighborhood.from_losses(torch.ones(REPEATS), 0.5 * noise.square() @ curvatures, 0.0, t)
    spread = curvatures / (1 - t * curvatures)  # curvature times the variance of the tilted Gaussian
    mean = (found.tilted_mean - spread.sum() / 2).abs() < 2 * found.tilted_mean_error
    variance = (found.tilted_variance - spread.square().sum() / 2).abs() < 2 * found.tilted_variance_error
    share = float(found.effective_samples.mean()) / draws
    return share, float(mean.double().mean()), float(variance.double().mean())


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    cells: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for draws in DRAWS:
        for dim, tilts in TILTS.items():
            for t in tilts:
                share, *covered = coverage(dim, draws, t, generator)
                for name, (low, high) in SHARES.items():
                    if low <= round(share, 12) < high:
                        cells.setdefault((name, draws), []).append((covered[0], covered[1]))
    table = [["share of the draws that is effective", *(f"{draws} draws" for draws in DRAWS)]]
    for name in SHARES:
        row = [name]
        for draws in DRAWS:
            columns = zip(*cells[name, draws], strict=True)
            ranges = [dict.fromkeys((f"{100 * min(column):.0f}", f"{100 * max(column):.0f}")) for column in columns]
            row.append(", ".join(" to ".join(ends) for ends in ranges))
        table.append(row)
    print(format_markdown(table))


if __name__ == "__main__":
    main()
