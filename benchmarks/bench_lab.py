"""Measure the fraction of an epoch of the lab that forward, backward and step take; the rest is overhead of the loop.

    python benchmarks/bench_lab.py                     # a small network and few images, on the CPU: a minute
    python benchmarks/bench_lab.py --device cuda       # CIFAR-100's 45,000 images, bf16: ResNet-18, batches 64 and 128

The lab's own loop trains on random images in CIFAR-100's shape. The first epoch is a warm-up; of the others the fastest
counts. It is measured in three ways:

- ``in steps``: time inside the steps divided by that of the epoch, on the device's clock (CUDA events around steps).
  The rest is shuffling, augmentation, and what the device waits for between steps.
- ``steps alone``: time of as many steps on one fixed batch, without pauses, divided by that of the epoch. This includes
  delays that a slow host causes within steps.
- ``host``: time that the host needs to launch a step. If it is well below the time of a step, the device never waits.

Evaluation (re-estimated BatchNorm statistics, validation and test) and writing the record are timed separately.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiltsam.lab.config import TrainConfig
from tiltsam.lab.data import Data, Split
from tiltsam.lab.data.loader import crop, flip
from tiltsam.lab.display import Progress
from tiltsam.lab.records import Record
from tiltsam.lab.train import Trainer
from timing import environment, print_table

GOAL = 0.95  # fraction of an epoch in forward, backward and step
METHODS = ("erm", "sam", "tsam")


def random_cifar(examples: int, test: int) -> Data:
    """Return noise in the shape of CIFAR-100, with its augmentation."""
    made = torch.Generator().manual_seed(0)

    def split(n: int) -> Split:
        images = torch.randint(256, (n, 3, 32, 32), dtype=torch.uint8, generator=made)
        return Split({"image": images}, torch.randint(100, (n,), generator=made))

    return Data(
        name="random",
        train=split(examples),
        validation=split(test // 2),
        test=split(test),
        num_classes=100,
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
        augment=(crop, flip),
    )


class TimedStep:
    """A step that records its start and end on the device's clock, without synchronising."""

    def __init__(self, step: Any, device: torch.device) -> None:
        self.step = step
        self.on_gpu = device.type == "cuda"
        self.host = 0.0
        self._marks: list[tuple[Any, Any]] = []

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def __call__(self, *batch: Tensor) -> Tensor:
        begun, before = time.perf_counter(), self._now()
        loss: Tensor = self.step(*batch)
        self._marks.append((before, self._now()))
        self.host += time.perf_counter() - begun
        return loss

    def take(self) -> tuple[int, float, float]:
        """Return the steps since the last call, and the seconds of the device and of the host within them."""
        if self.on_gpu:
            torch.cuda.synchronize()
        inside = sum(a.elapsed_time(b) / 1e3 if self.on_gpu else b - a for a, b in self._marks)
        found = len(self._marks), inside, self.host
        self._marks, self.host = [], 0.0
        return found


def measure(config: TrainConfig, data: Data) -> dict[str, Any]:
    """Train for the config's epochs; return the numbers of the fastest, the first one excepted."""
    with tempfile.TemporaryDirectory() as folder:
        run = Trainer(config, Record(Path(folder)), data)
        plain = run.step
        timed = TimedStep(plain, run.device)
        run.step = timed
        epochs: list[dict[str, float]] = []
        clock = [time.perf_counter(), 0.0]

        def report(progress: Progress) -> None:
            now, seconds = time.perf_counter(), progress.seconds - clock[1]
            steps, inside, host = timed.take()
            epochs.append(
                {
                    "steps": steps,
                    "epoch_s": seconds,
                    "in_steps_s": inside,
                    "host_s": host,
                    "evaluation_s": now - clock[0] - seconds,
                }
            )
            clock[:] = time.perf_counter(), progress.seconds

        run.run(report, checkpoint_seconds=float("inf"))
        best = min(epochs[1:], key=lambda e: e["epoch_s"])
        steps = int(best["steps"])
        alone = _alone(run, plain, steps)
        return {
            "method": config.method,
            "batch": config.batch_size,
            "captured": getattr(plain, "reason", None) is None,
            "steps": steps,
            "ms_a_step": 1e3 * best["epoch_s"] / steps,
            "ms_a_step_alone": 1e3 * alone,
            "ms_host": 1e3 * best["host_s"] / steps,
            "share_in_steps": best["in_steps_s"] / best["epoch_s"],
            "share_steps_alone": alone * steps / best["epoch_s"],
            "epoch_s": best["epoch_s"],
            "evaluation_s": best["evaluation_s"],
            "epochs": epochs,
        }


def _alone(run: Trainer, step: Any, count: int) -> float:
    """Return the seconds per step on one fixed batch, of many steps without pauses; the fastest of three rounds."""
    batch = next(run.batches.epoch(0, 0))
    count = min(count, 200)
    best = float("inf")
    run.model.train()
    for _ in range(3):
        _wait(run.device)
        start = time.perf_counter()
        for _ in range(count):
            step(*batch)
        _wait(run.device)
        best = min(best, (time.perf_counter() - start) / count)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", help="default: cnn; on a GPU resnet18")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--batches", type=int, nargs="+", help="batch sizes (default: 64; on a GPU 64 128)")
    parser.add_argument("--examples", type=int, help="training images (default: 1024; on a GPU 45000)")
    parser.add_argument("--test", type=int, help="test images (default: 256; on a GPU 10000)")
    parser.add_argument("--epochs", type=int, default=3, help="the first is not counted (default: %(default)s)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="default: fp32; on a GPU bf16")
    parser.add_argument("--out", type=Path, help="folder for the numbers (lab.json)")
    args = parser.parse_args()
    gpu = torch.device(args.device).type == "cuda"
    args.batches = args.batches or ([64, 128] if gpu else [64])
    args.model = args.model or ("resnet18" if gpu else "cnn")
    args.examples = args.examples or (45_000 if gpu else 1024)
    args.test = args.test or (10_000 if gpu else 256)
    args.precision = args.precision or ("bf16" if gpu else "fp32")
    if args.epochs < 2:
        parser.error("--epochs must be at least 2: the first is not counted")
    return args


def main() -> None:
    """Measure, print a table and write the numbers."""
    args = parse()
    device = torch.device(args.device)
    about = environment(device)
    print(json.dumps(about))
    data = random_cifar(args.examples, args.test)
    usual = TrainConfig(
        task="random",
        model=args.model,
        epochs=args.epochs,
        lr=1e-3,
        label_smoothing=0.1,
        precision=args.precision,
        device=args.device,
    )
    rows = []
    for batch in args.batches:
        for method in args.methods:
            rows.append(measure(replace(usual, method=method, batch_size=batch), data))
            if device.type == "cuda":
                torch.cuda.empty_cache()
    print(f"\n### {args.model}, {args.examples} images, {args.precision}, {args.device}\n")
    headings = [
        "method",
        "batch",
        "steps",
        "ms per step",
        "alone",
        "host",
        "in steps",
        "steps alone",
        "epoch s",
        "eval s",
    ]
    print_table(
        headings,
        [
            [
                row["method"] + ("" if row["captured"] else ", eager"),
                str(row["batch"]),
                str(row["steps"]),
                *(f"{row[name]:.2f}" for name in ("ms_a_step", "ms_a_step_alone", "ms_host")),
                *(f"{100 * row[name]:.1f}%" for name in ("share_in_steps", "share_steps_alone")),
                *(f"{row[name]:.2f}" for name in ("epoch_s", "evaluation_s")),
            ]
            for row in rows
        ],
    )
    worst = min(row["share_in_steps"] for row in rows)
    outcome = "met" if worst >= GOAL else "missed"
    print(f"\nforward, backward and step take at least {100 * worst:.1f}% of an epoch; the goal of 95% is {outcome}")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        record = {"environment": about, "model": args.model, "precision": args.precision, "rows": rows}
        (args.out / "lab.json").write_text(json.dumps(record, indent=1) + "\n")
        print(f"wrote {args.out / 'lab.json'}")


if __name__ == "__main__":
    main()
