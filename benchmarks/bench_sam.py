"""What a step costs beyond its passes, on a CPU: SAM against a plain loop and pytorch_optimizer's, TSAM's too.

ResNet-18, batch 64. On a shared machine a pass varies by tens of percent from one to the next, so steps are not
compared with passes timed at another moment: the clock runs inside the closure too, and what a step adds to its own
passes is the difference. The median over turns is shown. ``--gradients-only`` leaves the passes out: gradients are
copied instead of computed, so that nothing but the step's own work is timed, the fastest of many turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import tiltsam
from peers import pytorch_optimizer_sam, sam_loop
from timing import environment, print_table
from workloads import LR, Workload

RHO, TURNS = 0.05, 7


class Clock:
    """A closure that adds up the time spent in it."""

    def __init__(self, closure: Callable[[], Tensor]) -> None:
        self.closure, self.seconds = closure, 0.0

    def __call__(self) -> Tensor:
        start = time.perf_counter()
        loss = self.closure()
        self.seconds += time.perf_counter() - start
        return loss


def copied_gradients(work: Workload) -> Callable[[], Tensor]:
    """Return a closure that costs next to nothing."""
    kept = [torch.randn_like(p) for p in work.model.parameters()]

    def closure() -> Tensor:
        for p, g in zip(work.model.parameters(), kept, strict=True):
            p.grad = g.clone()
        return torch.ones(())

    return closure


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gradients-only", action="store_true", help="time the step's own work alone: seconds")
    light = parser.parse_args().gradients_only
    device = torch.device("cpu")
    work = Workload("resnet18", 64, device)
    clock = Clock(copied_gradients(work) if light else work.closure)
    steps: dict[str, Callable[[], object]] = {
        "SAM, plain loop": partial(sam_loop(work.sgd(), RHO), clock),
        "tiltsam SAM": partial(tiltsam.SAM(work.sgd(), rho=RHO, model=work.model).step, clock),
    }
    for s in (1, 3):
        optimizer = tiltsam.TSAM(work.sgd(), rho=RHO, radius=20.0, num_samples=s, model=work.model)
        steps[f"tiltsam TSAM s={s}"] = partial(optimizer.step, clock)
    if peer := pytorch_optimizer_sam(list(work.model.parameters()), RHO, LR):
        steps["SAM, pytorch_optimizer"] = partial(peer, clock)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(25 if light else TURNS + 1):
        for name, step in steps.items():
            clock.seconds, start = 0.0, time.perf_counter()
            step()
            if turn:  # the first one warms up
                taken[name].append((time.perf_counter() - start, clock.seconds))
    print(json.dumps(environment(device)))
    rows = []
    for name, times in taken.items():
        beyond = (min if light else statistics.median)([total - inside for total, inside in times])
        ratio = statistics.median(total / inside for total, inside in times)
        whole = f"{1e3 * min(total for total, _ in times):.0f}"
        rows.append([name, f"{1e3 * beyond:.1f}"] if light else [name, whole, f"{1e3 * beyond:.0f}", f"{ratio:.3f}"])
    if light:
        print_table(["step", "ms of its own work"], rows)
    else:
        print_table(["step", "ms, fastest", "ms beyond its passes", "× its passes"], rows)


if __name__ == "__main__":
    main()
