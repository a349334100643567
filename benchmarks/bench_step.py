"""What a step costs: time as a multiple of the passes it is made of, and memory as the number of samples grows.

    python benchmarks/bench_step.py                            # ResNet-18, batch 64, on the CPU: some minutes
    python benchmarks/bench_step.py --device cuda              # all networks, eager and captured

Times compare within one process, the fastest of several turns; memory is the peak of a fresh process. Peers that are
not installed are named and left out.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tiltsam
from peers import pytorch_optimizer_sam, sam_loop, tsam_loop
from timing import best_of, draw_ratios, environment, in_fresh_process, peak_memory, print_table
from workloads import LR, NETWORKS, PRECISIONS, Workload

RHO, RADIUS, TILT = 0.05, 20.0, 20.0
SAMPLES = (1, 3, 5)
Step = Callable[[], object]


def our_methods(samples: tuple[int, ...]) -> dict[str, tuple[str, dict[str, Any], float]]:
    """Return by name the method's key, its options and its passes; a forward pass alone counts a third."""
    found: dict[str, tuple[str, dict[str, Any], float]] = {
        "erm": ("erm", {}, 1),
        "sam": ("sam", {"rho": RHO}, 2),
        "asam": ("asam", {"rho": 0.5}, 2),
        "esam2": ("esam2", {"rho": RHO, "num_points": 6}, 2 + 6 / 3),
        "pgn": ("pgn", {"rho": RHO}, 2),
        "rsam": ("rsam", {"rho": RHO}, 2),
    }
    tsam = {"t": TILT, "rho": RHO, "radius": RADIUS}
    for s in samples:
        found[f"tsam s={s}"] = ("tsam", {**tsam, "num_samples": s}, 2 * s)
    found["tsam s=3, shared ascent"] = ("tsam", {**tsam, "num_samples": 3, "share_ascent": True}, 4)
    return found


def plain_step(work: Workload) -> Step:
    base = work.sgd()

    def step() -> None:
        base.zero_grad()
        work.closure()
        base.step()

    return step


def peer_steps(work: Workload) -> dict[str, tuple[float, Step]]:
    """Return passes and eager steps of what others would run, by name."""
    loop, twin = sam_loop(work.sgd(), RHO), tsam_loop(work.sgd(), TILT, RHO, RADIUS, 3)
    found: dict[str, tuple[float, Step]] = {
        "SGD": (1, plain_step(work)),
        "SAM, plain loop": (2, lambda: loop(work.closure)),
        "TSAM s=3, stored gradients": (6, lambda: twin(work.closure)),
    }
    if peer := pytorch_optimizer_sam(list(work.model.parameters()), RHO, LR):
        found["SAM, pytorch_optimizer"] = (2, lambda: peer(work.closure))
    else:
        print("pytorch_optimizer is not installed: its SAM is left out")
    return found


def time_network(network: str, precision: str, args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Time all steps on one network; return rows of name, mode, milliseconds and passes."""
    work = Workload(network, args.batch, device, precision)
    eager: dict[str, tuple[float, Step]] = {"one pass alone": (1, work.one_pass), **peer_steps(work)}
    for name, (key, options, passes) in ({} if args.captured_only else our_methods(args.samples)).items():
        optimizer = tiltsam.METHODS[key](work.sgd(), model=work.model, **options)
        eager[f"tiltsam {name}"] = (passes, partial(optimizer.step, work.closure))
    times = best_of({name: step for name, (_, step) in eager.items()}, args.repeats, device, args.inner)
    rows = [
        {
            "step": n,
            "mode": "eager",
            "ms": times[n],
            "passes": p,
            "over_its_passes": times[n] / p / times["one pass alone"],
        }
        for n, (p, _) in eager.items()
    ]
    if device.type == "cuda":
        rows += time_captured(work, args, device)
    return [{"network": network, "precision": precision, **row} for row in rows]


def time_captured(work: Workload, args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Time each captured step against as many captured passes, one graph at a time so that memory stays small."""
    alone = best_of({"": work.captured_passes(6)}, args.repeats, device, args.inner)[""] / 6
    rows = [_row("one pass alone", "captured", alone, 1, alone)]
    for name, (key, options, passes) in our_methods(args.samples).items():
        optimizer = tiltsam.METHODS[key](work.sgd(), model=work.model, **options)
        step = tiltsam.capture(optimizer, work.loss)
        for _ in range(4):
            step(work.x, work.y)
        if step.reason is not None:
            print(f"{name} was not captured: {step.reason}")
            continue
        ms = best_of({"": partial(step, work.x, work.y)}, args.repeats, device, args.inner)[""]
        rows.append(_row(f"tiltsam {name}", "captured", ms, passes, alone))
        del step, optimizer
        gc.collect()
    return rows


def _row(step: str, mode: str, ms: float, passes: float, alone: float) -> dict[str, Any]:
    return {"step": step, "mode": mode, "ms": ms, "passes": passes, "over_its_passes": ms / passes / alone}


def show(rows: list[dict[str, Any]], title: str) -> None:
    print(f"\n### {title}\n")
    speed = {(row["step"], row["mode"]): row["ms"] for row in rows}
    sgd = speed["SGD", "eager"]
    table = []
    for row in rows:
        sam = speed.get(("tiltsam sam", row["mode"]))
        table.append(
            [
                f"{row['step']}, {row['mode']}",
                f"{row['ms']:.2f}",
                f"{row['passes']:.3g}",
                f"{row['over_its_passes']:.3f}",
                f"{row['ms'] / sam:.2f}" if sam else "",
                f"{row['ms'] / sgd:.2f}",
            ]
        )
    print_table(["step", "ms", "passes", "× its passes alone", "× SAM, same mode", "× SGD, eager"], table)


def measure_memory(args: argparse.Namespace, device: torch.device) -> None:
    """Take a few steps of one candidate and print the peak as JSON; run in a fresh process."""
    work = Workload(args.networks[0], args.memory_batch, device, args.precisions[0])
    kind, _, number = args.memory.partition(":")
    step: Step
    if kind == "sgd":
        step = plain_step(work)
    elif kind == "stored":
        step = partial(tsam_loop(work.sgd(), TILT, RHO, RADIUS, int(number)), work.closure)
    else:
        optimizer = tiltsam.TSAM(work.sgd(), t=TILT, rho=RHO, radius=RADIUS, num_samples=int(number), model=work.model)
        step = partial(optimizer.step, work.closure)
        if kind == "captured":
            step = partial(tiltsam.capture(optimizer, work.loss), work.x, work.y)
    for _ in range(5):
        step()
    print(json.dumps({"peak_mib": peak_memory(device)}))


def compare_memory(args: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Return the peak memory of fresh processes in MiB, by candidate and number of samples."""
    names = ["sgd", "tsam:1", "tsam:3", "tsam:8", "tsam:32", "stored:3", "stored:8"]
    if device.type == "cuda":
        names += ["captured:1", "captured:3", "captured:32"]
    network, precision = args.networks[0], args.precisions[0]
    common = ["--device", args.device, "--networks", network, "--precisions", precision]
    common += ["--memory-batch", str(args.memory_batch)]

    def peak(name: str) -> float:
        return float(in_fresh_process("bench_step.py", *common, "--memory", name)["peak_mib"])

    with ThreadPoolExecutor(1 if device.type == "cpu" else 4) as pool:  # a GPU counts each process by itself
        peaks = dict(zip(names, pool.map(peak, names), strict=True))
    weights = sum(p.numel() * p.element_size() for p in NETWORKS[network]().parameters()) / 2**20
    print(f"\n### Peak memory, {network}, {precision}, batch {args.memory_batch} ({weights:.0f} MiB of weights)\n")
    rows = [[n, f"{v:.0f}", f"{(v - peaks['sgd']) / weights:.2f}"] for n, v in peaks.items()]
    print_table(["step", "MiB", "above SGD, in copies of the weights"], rows)
    return peaks


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--networks", nargs="+", choices=sorted(NETWORKS), help="default: resnet18; on a GPU all")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, help="default: fp32; on a GPU three kinds")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--samples", type=int, nargs="+", help="numbers of samples (default: 1 3; on a GPU 1 3 5)")
    parser.add_argument("--repeats", type=int, default=5, help="turns, of which the fastest counts")
    parser.add_argument("--inner", type=int, help="steps a turn (default: 1; on a GPU 20)")
    parser.add_argument("--memory-batch", type=int, default=4, help="small, so that the weights dominate")
    parser.add_argument("--captured-only", action="store_true", help="of our own steps")
    parser.add_argument("--no-memory", action="store_true", help="measure time only")
    parser.add_argument("--out", type=Path, help="folder for the numbers (JSON) and the figure (PNG)")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    gpu = torch.device(args.device).type == "cuda"
    args.networks = args.networks or (list(NETWORKS) if gpu else ["resnet18"])
    args.precisions = args.precisions or (["bf16-cl", "tf32", "bf16-cl-compiled"] if gpu else ["fp32"])
    args.samples = tuple(args.samples or (SAMPLES if gpu else (1, 3)))
    args.inner = args.inner or (20 if gpu else 1)
    return args


def main() -> None:
    """Measure, print, write."""
    args = parse()
    device = torch.device(args.device)
    if args.memory:
        measure_memory(args, device)
        return
    print(json.dumps(environment(device)))
    rows: list[dict[str, Any]] = []
    for network in args.networks:
        for precision in args.precisions if network == "resnet18" else args.precisions[:1]:
            found = time_network(network, precision, args, device)
            show(found, f"{network}, {precision}, batch {args.batch}: fastest of {args.repeats} turns")
            rows += found
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    peaks = {} if args.no_memory else compare_memory(args, device)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        record = {"environment": environment(device), "batch": args.batch, "steps": rows, "peak_mib": peaks}
        (args.out / "step.json").write_text(json.dumps(record, indent=1) + "\n")
        draw_ratios(rows, args.out / "step.png")
        print(f"\nwrote {args.out / 'step.json'}")


if __name__ == "__main__":
    main()
