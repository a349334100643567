"""Measure how much an ascent of length rho raises the initial loss, for two initialisations of the convolutions.

    python benchmarks/bench_initialisation.py --data-root DATA

BatchNorm makes a network's function independent of the norm of the weights before it, so the effect of a perturbation
depends on its length relative to that norm. One batch of noisy CIFAR-100, ResNet-18, training mode.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from tiltsam.lab.config import TrainConfig
from tiltsam.lab.data import load
from tiltsam.lab.data.loader import TrainingBatches
from tiltsam.lab.models import resnet18

LENGTHS = (0.05, 0.1, 0.2, 0.4)


def loss_increases(model: nn.Module, images: Tensor, targets: Tensor) -> list[float]:
    """Return the increase of the loss after an ascent of each length along the normalised gradient."""

    def loss() -> Tensor:
        return nn.functional.cross_entropy(model(images), targets, label_smoothing=0.1)

    here = loss()
    parameters: list[Tensor] = list(model.parameters())
    gradient = torch.autograd.grad(here, parameters)
    norm = torch.stack([g.norm() for g in gradient]).norm()
    found = []
    for rho in LENGTHS:
        with torch.no_grad():
            for sign in (1, -1):
                torch._foreach_add_(parameters, gradient, alpha=(sign * rho / norm).item())
                if sign > 0:
                    found.append((loss() - here).item())
    return found


def main() -> None:
    """Print the increases for both initialisations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, help="folder of the data sets (default: $TILTSAM_DATA, or data)")
    args = parser.parse_args()
    data = load(TrainConfig(task="cifar100-noisy"), args.data_root)
    images, targets = next(TrainingBatches(data, 128).epoch(0, 0))
    for name in ("PyTorch's default", "He's"):
        torch.manual_seed(0)
        model = resnet18()
        convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
        if name != "He's":
            for m in convolutions:
                m.reset_parameters()
        length = torch.stack([m.weight.norm() for m in convolutions]).norm()
        increases = ", ".join(
            f"{increase:.3f} at {rho}"
            for rho, increase in zip(LENGTHS, loss_increases(model, images, targets), strict=True)
        )
        print(f"{name}: convolutions of norm {length:.1f}; an ascent raises the loss by {increases}")


if __name__ == "__main__":
    main()
