"""What a step costs: time as a multiple of the passes it is made of, and memory as the number of samples grows.

    python benchmarks/bench_step.py                    # ResNet-18, batch 64, on the CPU: a few minutes
    python benchmarks/bench_step.py --device cuda

Times compare within one process, the fastest of several turns; memory is the peak of a fresh process.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import tiltsam
from peers import pytorch_optimizer_sam, sam_loop, tsam_loop
from tiltsam.lab.models import MODELS
from timing import best_of, environment, in_fresh_process, peak_memory, print_table

LR = 1e-3  # small: the weights must stay where they are while we measure
RHO, RADIUS, TILT = 0.05, 20.0, 20.0


class Workload:
    """A model, a batch and the closure of a training step."""

    def __init__(self, model: str, batch: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = MODELS[model](100).to(device)
        self.x = torch.randn(batch, 3, 32, 32, device=device)
        self.y = torch.randint(100, (batch,), device=device)

    def closure(self) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        return loss

    def one_pass(self) -> None:
        self.model.zero_grad()
        self.closure()

    def sgd(self) -> torch.optim.SGD:
        return torch.optim.SGD(self.model.parameters(), lr=LR, momentum=0.9)


def candidates(work: Workload) -> dict[str, tuple[float, Callable[[], object]]]:
    """Name, number of passes, and the step itself."""
    closure, found = work.closure, {}

    def add(name: str, passes: float, step: Callable[[Callable[[], Tensor]], object]) -> None:
        found[name] = (passes, lambda: step(closure))

    def plain(base: torch.optim.Optimizer) -> Callable[[Callable[[], Tensor]], object]:
        def step(closure: Callable[[], Tensor]) -> None:
            base.zero_grad()
            closure()
            base.step()

        return step

    add("one pass alone", 1, lambda _: work.one_pass())
    add("SGD", 1, plain(work.sgd()))
    add("SAM, plain loop", 2, sam_loop(work.sgd(), RHO))
    if peer := pytorch_optimizer_sam(list(work.model.parameters()), RHO, LR):
        add("SAM, pytorch_optimizer", 2, peer)
    for name in ("erm", "sam", "asam", "pgn", "rsam"):
        passes = 1 if name == "erm" else 2
        add(f"tiltsam {name}", passes, tiltsam.METHODS[name](work.sgd(), model=work.model).step)
    for s in (1, 3):
        optimizer = tiltsam.TSAM(work.sgd(), t=TILT, rho=RHO, radius=RADIUS, num_samples=s, model=work.model)
        add(f"tiltsam tsam s={s}", 2 * s, optimizer.step)
    shared = tiltsam.TSAM(work.sgd(), t=TILT, rho=RHO, radius=RADIUS, share_ascent=True, model=work.model)
    add("tiltsam tsam s=3, shared ascent", 4, shared.step)
    add("TSAM s=3, stored gradients", 6, tsam_loop(work.sgd(), TILT, RHO, RADIUS, 3))
    return found


def measure_memory(args: argparse.Namespace, device: torch.device) -> None:
    """In a fresh process: a few steps of one candidate, then its peak as JSON."""
    work = Workload(args.model, args.memory_batch, device)
    base = work.sgd()
    if args.memory == "sgd":
        for _ in range(3):
            work.one_pass()
            base.step()
    elif args.memory.startswith("stored"):
        step = tsam_loop(base, TILT, RHO, RADIUS, int(args.memory.removeprefix("stored")))
        for _ in range(3):
            step(work.closure)
    else:
        samples = int(args.memory.removeprefix("tsam"))
        optimizer = tiltsam.TSAM(base, t=TILT, rho=RHO, radius=RADIUS, num_samples=samples, model=work.model)
        for _ in range(3):
            optimizer.step(work.closure)
    print(json.dumps({"peak_mib": peak_memory(device)}))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="resnet18", choices=sorted(MODELS))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory-batch", type=int, default=4, help="small, so that the weights dominate")
    parser.add_argument("--out", type=Path, help="write the numbers there as JSON")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.memory:
        measure_memory(args, device)
        return

    print(f"{args.model}, batch {args.batch}, {device}: milliseconds a step, fastest of {args.repeats}\n")
    steps = candidates(Workload(args.model, args.batch, device))
    times = best_of({name: step for name, (_, step) in steps.items()}, args.repeats, device)
    alone = times["one pass alone"]
    rows, record = [], []
    for name, (passes, _) in steps.items():
        ratio = times[name] / (passes * alone)
        rows.append([name, f"{times[name]:.1f}", f"{passes:g}", f"{ratio:.3f}", f"{times[name] / times['SGD']:.2f}"])
        record.append({"step": name, "ms": times[name], "passes": passes, "over_its_passes": ratio})
    print_table(["step", "ms", "passes", "× its passes alone", "× SGD"], rows)

    print(f"\npeak memory of a fresh process, batch {args.memory_batch}, MiB\n")
    memory = {}
    names = ["sgd", "tsam1", "tsam3", "tsam8", "tsam32", "stored3", "stored8"]
    for name in names:
        arguments = ["--device", args.device, "--model", args.model, "--memory-batch", str(args.memory_batch)]
        memory[name] = in_fresh_process("bench_step.py", *arguments, "--memory", name)["peak_mib"]
    weights = sum(p.numel() * p.element_size() for p in MODELS[args.model](100).parameters()) / 2**20
    print_table(
        ["step", "MiB", "above SGD, in copies of the weights"],
        [[name, f"{value:.0f}", f"{(value - memory['sgd']) / weights:.2f}"] for name, value in memory.items()],
    )
    result: dict[str, object] = {
        "environment": environment(device),
        "arguments": {"model": args.model, "batch": args.batch},
        "steps": record,
        "peak_mib": memory,
        "weights_mib": weights,
    }
    print(f"\n{json.dumps(result['environment'])}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
