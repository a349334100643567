"""What a step costs beyond its passes when passes are short: a small MLP, eager, on one CPU thread.

    python benchmarks/bench_overhead.py [--repeats 15] [--out FILE.json]

11 linear layers, 64 wide, ReLU between: 22 tensors; batch 64, float32. Steps take turns in one process, and the fastest
turn of each counts. Time is that of the thread, which other processes of a busy machine disturb less than wall time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import tiltsam
from peers import sam_loop
from timing import best_of, environment, print_table

WIDTH, LAYERS, BATCH = 64, 11, 64
RHO = 0.05


class Problem:
    """A network of its own for each step, so that none finds the gradients of another."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        self.model = nn.Sequential(*layers[:-1])
        self.base = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
        self.x, self.y = torch.randn(BATCH, WIDTH), torch.randint(WIDTH, (BATCH,))

    def closure(self) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        return loss

    def run_pass(self) -> None:
        self.base.zero_grad()
        self.closure()

    def step(self) -> None:
        self.run_pass()
        self.base.step()


def candidates() -> dict[str, Callable[[], object]]:
    """Return the steps to time by name."""
    loop = Problem()
    found: dict[str, Callable[[], object]] = {
        "one pass": Problem().run_pass,
        "SGD": Problem().step,
        "SAM, plain loop": partial(sam_loop(loop.base, RHO), loop.closure),
    }
    ours: dict[str, Callable[..., tiltsam.SharpnessAware]] = {
        "ERM": tiltsam.ERM,
        "SAM": partial(tiltsam.SAM, rho=RHO),
        "TSAM s=1": partial(tiltsam.TSAM, rho=RHO, num_samples=1),
        "TSAM s=3": partial(tiltsam.TSAM, rho=RHO, num_samples=3),
    }
    for name, method in ours.items():
        problem = Problem()
        found[name] = partial(method(problem.base, model=problem.model).step, problem.closure)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="turns of each step (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    ms = best_of(candidates(), args.repeats, device, inner=20, clock=time.thread_time)
    ratios = {
        "ERM / SGD": ms["ERM"] / ms["SGD"],
        "SAM / plain loop": ms["SAM"] / ms["SAM, plain loop"],
        "TSAM s=1 / plain loop": ms["TSAM s=1"] / ms["SAM, plain loop"],
        "TSAM s=3 / its six passes": ms["TSAM s=3"] / (6 * ms["one pass"]),
    }
    found = {"environment": environment(device), "milliseconds": ms, "ratios": ratios}
    print(json.dumps(found["environment"]))
    print_table(["step", "ms"], [[name, f"{value:.3f}"] for name, value in ms.items()])
    print_table(["ratio", "value"], [[name, f"{value:.3f}"] for name, value in ratios.items()])
    if args.out:
        args.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
