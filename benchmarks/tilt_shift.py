"""Compare the shift that a tilt over weight noise causes with its prediction, t·σ²·‖g‖ along the gradient g.

    python benchmarks/tilt_shift.py --out docs/figures      # under a minute on a CPU; writes tilt_shift.png

A network is trained on digits for 1, 10 and 40 epochs. Each time, Gaussian noise δ with standard deviation σ per weight
is drawn, and the draws are weighted by exp(t L(θ+δ)), as TSAM does. The weighted mean of δ along g/‖g‖ is the length of
the ascent that the tilt amounts to.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from tiltsam.lab.console import format_markdown
from tiltsam.tilting import effective_sample_size, tilted_weights

DRAWS, SIGMA = 6000, 0.006  # the paper's radius of 20 is 0.006 per weight of a ResNet-18
TILTS = (1.0, 5.0, 20.0, 100.0, 500.0)
EPOCHS = (1, 10, 40)


def measure(model: nn.Sequential, x: Tensor, y: Tensor, generator: torch.Generator) -> list[tuple[float, ...]]:
    """Return t, predicted shift, measured shift, its standard error and the effective sample size, for each tilt."""
    params = dict(model.named_parameters())
    loss = nn.functional.cross_entropy(model(x), y)
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(params.values()))])
    direction = gradient / gradient.norm()
    losses, along = [], []
    with torch.no_grad():
        for _ in range(DRAWS // 2):
            noise = {name: SIGMA * torch.randn(p.shape, generator=generator) for name, p in params.items()}
            for sign in (1, -1):  # pairs, so that the mean of all draws is exactly zero
                moved = {name: p + sign * noise[name] for name, p in params.items()}
                outputs = torch.func.functional_call(model, moved, (x,))
                losses.append(nn.functional.cross_entropy(outputs, y).double())
                along.append(sign * torch.cat([d.flatten() for d in noise.values()]) @ direction)
    shifts = torch.stack(along).double()
    rows = []
    for t in TILTS:
        weights = tilted_weights(torch.stack(losses), t)
        pairs = (weights * shifts).view(-1, 2).sum(1)
        mean, error = pairs.sum(), pairs.std() * len(pairs) ** 0.5
        predicted = t * SIGMA**2 * gradient.norm()
        rows.append(tuple(float(v) for v in (t, predicted, mean, error, effective_sample_size(weights) / DRAWS)))
    return rows


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the figure")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer, generator = torch.optim.SGD(model.parameters(), lr=0.1), torch.Generator().manual_seed(0)
    batch, table, found = (x[:256], y[:256]), [["epochs", "t", "t·σ²·‖g‖", "measured", "effective draws"]], {}
    for epoch in range(1, max(EPOCHS) + 1):
        for rows in torch.randperm(len(x), generator=generator).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        if epoch in EPOCHS:
            found[epoch] = measure(model, *batch, generator)
            for t, predicted, mean, error, share in found[epoch]:
                cells = [f"{predicted:.2e}", f"{mean:.2e} ± {error:.0e}", f"{100 * share:.0f} %"]
                table.append([str(epoch), f"{t:g}", *cells])
    print(format_markdown(table))
    if args.out is not None:
        draw(found, args.out / "tilt_shift.png")


def draw(found: dict[int, list[tuple[float, ...]]], path: Path) -> None:
    """Draw measured against predicted shifts."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5.2, 3.6), layout="constrained")
    low, high = min(r[1] for rows in found.values() for r in rows), max(r[1] for rows in found.values() for r in rows)
    axes.plot([low, high], [low, high], color="0.6", linewidth=1, label="equal")
    for (epoch, rows), marker in zip(found.items(), "os^", strict=True):
        _, predicted, mean, error, _ = zip(*rows, strict=True)
        axes.errorbar(predicted, mean, error, fmt=marker, markersize=5, capsize=2, label=f"epoch {epoch}")
    axes.axhline(0.1, color="0.3", linestyle="--", linewidth=1)
    axes.text(low, 0.09, "SAM's ascent, ρ = 0.1", va="top")
    axes.set(xscale="log", yscale="log", xlabel="predicted shift t·σ²·‖g‖", ylabel="measured shift along g")
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
