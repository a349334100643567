"""Time how long a report over 500 runs takes to build, and its page to open in Chromium.

    python benchmarks/bench_report.py [--runs 500] [--epochs 200] [--out FOLDER]

The records are synthetic: five tasks, each with several settings of every method and several seeds; a tenth of the runs
is unfinished, and one task in five has flatness. The bounds are 20 s to build and 3 s to open.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import tiltsam
from browser import MISSING, Browser
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.records import Record
from tiltsam.lab.report import write_report

TASKS = ("cifar100", "cifar100-noisy", "digits", "dtd", "tiny-imagenet")
SEEDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--out", type=Path, help="keep the runs and the report here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out = args.out or Path(scratch)
        made = make_runs(out / "runs", args.runs, args.epochs)
        start, work = time.perf_counter(), time.process_time()
        report = write_report([out / "runs"], out / "report")
        built, work = time.perf_counter() - start, time.process_time() - work
        size = report.page.stat().st_size / 2**20
        print(f"{made} runs of {args.epochs} epochs: built in {built:.1f} s ({work:.1f} s of CPU time), ", end="")
        print(f"{len(report.figures)} figure files, {len(report.tables)} table files, a page of {size:.1f} MiB")
        if MISSING:
            print(f"opening not timed; not installed: {MISSING}")
            return
        browser = Browser(Path(scratch) / "profile")
        try:
            times = [browser.open(report.page) for _ in range(3)]
        finally:
            browser.close()
        print("opened in " + ", ".join(f"{t / 1000:.2f}" for t in times) + " s")


def make_runs(folder: Path, count: int, epochs: int) -> int:
    """Write records in the format that training writes."""
    draw = random.Random(0)
    settings = math.ceil(count / (len(TASKS) * SEEDS))
    methods = list(tiltsam.METHODS)
    made = 0
    for task in TASKS:
        for number in range(settings):
            method = methods[number % len(methods)]
            lr, t = 0.01 * (1 + number // len(methods)), (0.0, 1.0, 5.0, 20.0)[number // len(methods) % 4]
            for seed in range(SEEDS):
                if made == count:
                    return made
                options = {"t": t} if method == "tsam" else {}
                config = TrainConfig(task=task, method=method, options=options, lr=lr, epochs=epochs, seed=seed)
                write_run(folder, config, draw, finished=draw.random() > 0.1, measured=task == TASKS[0])
                made += 1
    return made


def write_run(folder: Path, config: TrainConfig, draw: random.Random, *, finished: bool, measured: bool) -> None:
    place = Record.of(folder, config).folder
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(config.to_json()))
    (place / "environment.json").write_text(json.dumps({"device": "cpu", "torch": "made up"}))
    last = int(config.epochs) if finished else draw.randrange(1, int(config.epochs))
    cost, top = draw.choice((1, 2, 6)), 0.6 + 0.2 * draw.random()
    rows = [metrics(epoch, cost, top, draw) for epoch in range(1, last + 1)]
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if finished:
        final = rows[-1]
        score = {"metric": "accuracy", "score": final["test_accuracy"]}
        best = {"score_at_best_validation": final["test_accuracy"], "best_validation": final["validation_accuracy"]}
        (place / "result.json").write_text(json.dumps(final | score | best))
    if measured:
        (place / "flatness.json").write_text(json.dumps(flatness(draw)))


def metrics(epoch: int, cost: int, top: float, draw: random.Random) -> dict[str, Any]:
    score = top * (1 - math.exp(-epoch / 20)) + 0.01 * draw.gauss(0, 1)
    return {
        "epoch": epoch,
        "steps": 782 * epoch,
        "passes": 782.0 * epoch * cost,
        "seconds": 12.3 * epoch * cost + draw.random(),
        "lr": 0.05,
        "train_loss": 4 * math.exp(-epoch / 30) + 0.02 * draw.random(),
        "effective_sample_size": 2 + draw.random(),
        "validation_accuracy": score - 0.01,
        "validation_loss": 2.0,
        "test_accuracy": score,
        "test_loss": 2.0 + draw.random(),
    }


def flatness(draw: random.Random) -> dict[str, Any]:
    stds, places = (0.005, 0.01, 0.02, 0.05, 0.1), [i / 10 - 1 for i in range(21)]
    return {
        "about": {"task": TASKS[0], "split": "train", "examples": 1000},
        "loss": draw.random(),
        "neighborhood": {
            "std": list(stds),
            "mean": [1 + 90 * s * s + draw.random() for s in stds],
            "variance": [s * s * (1 + draw.random()) for s in stds],
        },
        "eigenvalues": {"values": [100 / (i + 1) + draw.random() for i in range(5)]},
        "trace": {"value": 1000 * draw.random(), "error": 1.0},
        "slices": [
            {"label": "random direction", "positions": places, "losses": [x * x + draw.random() for x in places]}
        ],
    }


if __name__ == "__main__":
    main()
