"""What a sample-parallel step of TSAM costs: s ranks with one sample each, against a step of SAM on one rank.

    python benchmarks/bench_samples.py [--ranks 2] [--network resnet18] [--batch 32]

Every rank has one thread. Three kinds of step take turns: SAM on rank 0 while the others rest, SAM on all ranks at once
(what sharing the machine costs by itself), and TSAM with one sample a rank. The fastest turn of each counts.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tiltsam
from timing import environment, print_table
from workloads import NETWORKS, Workload

RHO, RADIUS = 0.05, 20.0
KINDS = ("SAM on one rank", "SAM on every rank at once", "TSAM, one sample a rank")


def rank_main(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=args.ranks, timeout=timedelta(minutes=10))
    own, shared = (Workload(args.network, args.batch, torch.device("cpu")) for _ in range(2))
    apart = tiltsam.SAM(own.sgd(), rho=RHO, model=own.model, parallel=None)
    parallel = tiltsam.Parallel(samples=dist.group.WORLD)
    together = tiltsam.TSAM(
        shared.sgd(), rho=RHO, radius=RADIUS, num_samples=args.ranks, model=shared.model, parallel=parallel
    )
    steps: dict[str, Callable[[], object]] = {
        KINDS[0]: lambda: apart.step(own.closure) if rank == 0 else None,
        KINDS[1]: lambda: apart.step(own.closure),
        KINDS[2]: lambda: together.step(shared.closure),
    }
    best = dict.fromkeys(KINDS, float("inf"))
    for turn in range(args.repeats + 1):
        for name, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            step()
            if turn:  # the first warms up
                best[name] = min(best[name], time.perf_counter() - began)
    slowest = torch.tensor([best[name] if name != KINDS[0] or rank == 0 else 0.0 for name in KINDS])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps(dict(zip(KINDS, slowest.tolist(), strict=True))))
    dist.destroy_process_group()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of each kind of step on the slowest rank."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OMP_NUM_THREADS"] = "1"
        mp.spawn(rank_main, (args, folder), nprocs=args.ranks)  # type: ignore[attr-defined, no-untyped-call]
        found: dict[str, Any] = json.loads(Path(folder, "times.json").read_text())
        return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--network", choices=sorted(NETWORKS), default="resnet18")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(json.dumps({**environment(torch.device("cpu")), "ranks": args.ranks, "threads a rank": 1}))
    print(f"{args.network}, batch {args.batch}: fastest of {args.repeats} turns")
    times = measure(args)
    rows = [[name, f"{1000 * s:.0f}", f"{s / times[KINDS[0]]:.3f}"] for name, s in times.items()]
    print_table(["step", "ms", "× SAM on one rank"], rows)


if __name__ == "__main__":
    main()
