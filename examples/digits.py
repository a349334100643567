"""Compare ERM, SAM and TSAM on handwritten digits with 20% noisy labels.

    python examples/digits.py

Trains the same small network with each method on scikit-learn's digits, with 20% of the training labels replaced by
wrong ones, and prints test accuracy (on correct labels), seconds and passes. Takes about a minute on two cores.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

import tiltsam

NOISE = 0.2  # share of the training labels that are wrong
EPOCHS = 60  # long enough for plain training to memorise the noisy labels
BATCH = 64  # the paper's
LEARNING_RATE = 0.05  # constant, as in the paper; momentum and weight decay are the paper's too
RHO = 0.5  # label noise needs a larger rho than the 0.05 of clean data
METHODS: dict[str, dict[str, Any]] = {  # what is compared
    "erm": {},
    "sam": {"rho": RHO},
    "tsam": {"rho": RHO, "t": 20.0, "num_samples": 3},
}


@dataclass(frozen=True)
class Data:
    """Images as rows of 64 numbers, and their classes."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass(frozen=True)
class Result:
    """One training run."""

    accuracy: float
    train_accuracy: float
    seconds: float
    passes: int


def load(seed: int) -> Data:
    """Load the digits, hold out a third of them, and replace some labels of the rest by wrong ones."""
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    x, y = x[order], y[order]
    split = 2 * len(x) // 3
    wrong = torch.rand(split, generator=generator) < NOISE
    shift = torch.randint(1, 10, (split,), generator=generator)  # 1..9: always another class
    noisy = torch.where(wrong, (y[:split] + shift) % 10, y[:split])
    return Data(x[:split], noisy, x[split:], y[split:])


def train(method: str, data: Data, seed: int, epochs: int, progress: Progress) -> Result:
    """Train one method with one seed."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    model.append(nn.Linear(256, 10))
    base = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9, weight_decay=5e-4)
    optimizer = tiltsam.METHODS[method](base, model=model, seed=seed, **METHODS[method])
    batches = torch.Generator().manual_seed(seed)
    task = progress.add_task(f"{method:5} seed {seed}", total=epochs)
    passes, start = 0, time.perf_counter()
    for _ in range(epochs):
        for rows in torch.randperm(len(data.train_x), generator=batches).split(BATCH):
            x, y = data.train_x[rows], data.train_y[rows]

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
            passes += optimizer.info.num_backwards
        progress.advance(task)
    seconds = time.perf_counter() - start
    progress.remove_task(task)
    model.eval()
    with torch.no_grad():
        test = (model(data.test_x).argmax(1) == data.test_y).float().mean().item()
        fit = (model(data.train_x).argmax(1) == data.train_y).float().mean().item()
    return Result(100 * test, 100 * fit, seconds, passes)


def main() -> None:
    """Train every method with every seed, then print the table."""
    parser = argparse.ArgumentParser(description="ERM, SAM and TSAM on digits with 20% noisy labels.")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="epochs a run (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs a method (default: %(default)s)")
    args = parser.parse_args()
    if args.epochs < 1 or args.seeds < 1:
        parser.error("--epochs and --seeds must be at least 1")
    torch.set_num_threads(1)  # the network is so small that threads slow it down
    console = Console()
    results: dict[str, list[Result]] = {method: [] for method in METHODS}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        for seed in range(args.seeds):
            data = load(seed)
            for method in METHODS:
                results[method].append(train(method, data, seed, args.epochs, progress))
    table = Table(title=f"digits, {NOISE:.0%} noisy labels; epochs: {args.epochs}, seeds: {args.seeds}")
    for heading in ("method", "test accuracy %", "fits its labels %", "seconds a run", "passes a run"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for method, runs in results.items():
        accuracy = torch.tensor([run.accuracy for run in runs])
        error = f" ± {accuracy.std() / len(runs) ** 0.5:.2f}" if len(runs) > 1 else ""
        table.add_row(
            method,
            f"{accuracy.mean():.2f}{error}",
            f"{sum(run.train_accuracy for run in runs) / len(runs):.1f}",
            f"{sum(run.seconds for run in runs) / len(runs):.1f}",
            f"{runs[0].passes}",
        )
    console.print(table)
    console.print("Test labels are clean; ± is the standard error over seeds. A pass is one forward and backward.")
    console.print("Methods are compared at equal epochs, not at equal passes.")


if __name__ == "__main__":
    main()
