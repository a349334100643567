"""Commands of the studies; see the package."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from bench_lab import random_cifar
from evidence.studies import STUDIES
from evidence.study import Cell, Study, diverged, score_at
from tiltsam.flatness.comparison import Plan
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.data import Data
from tiltsam.lab.devices import suited_to
from tiltsam.lab.flat import measure_runs, save_flatness
from tiltsam.lab.record import Record
from tiltsam.lab.train import Run, TrainError, data_key, load_data, train
from timing import best_of, environment


def main() -> None:
    """One command of one study."""
    parser = argparse.ArgumentParser(prog="python -m evidence", description=__doc__)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("command", choices=("rates", "work", "left", "flat"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--rates", type=Path, required=True, help="file of milliseconds a step")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--labels", nargs="+", help="these methods alone")
    parser.add_argument("--stop-at", type=float, default=float("inf"), help="begin nothing after this Unix time")
    args = parser.parse_args()
    study = STUDIES[args.study]
    if args.command == "rates":
        measure_rates(study, args.rates, args.data_root)
        return
    rates = json.loads(args.rates.read_text())["ms_a_step"]
    if args.command == "left":
        for cell in study.left(args.out, rates, args.labels):
            print(f"{cell.label:10} {cell.config.key()} seed {cell.config.seed} until {cell.until}")
        return
    if args.command == "flat":
        flat(study, args.out, rates, args.data_root, args.labels)
        return
    work(study, args.out, rates, args.data_root, args.labels, args.stop_at)


def measure_rates(study: Study, path: Path, root: Path | None) -> None:
    """Milliseconds of a captured step of every label, nothing else running, and write them."""
    found: dict[str, float] = {}
    steps = {}
    folder = tempfile.TemporaryDirectory()
    data: Data | None = None
    with folder:
        for label in study.trials:
            config = study.configs(label, dict.fromkeys(study.trials, 1.0))[0]
            data = data or (load_data(config, root) if root else random_cifar(2048, 64))
            run = Run(config, Record(Path(folder.name)), data)
            batch = next(run.batches.epoch(0, 0))
            run.model.train()
            steps[label] = (run, lambda run=run, batch=batch: run.step(*batch))
        device = run.device
        with suited_to(device, run.model):
            for _, step in steps.values():
                for _ in range(4):
                    step()
            found = best_of({label: step for label, (_, step) in steps.items()}, 5, device, inner=40)
    path.write_text(json.dumps({"environment": environment(device), "ms_a_step": found}, indent=1) + "\n")
    print(json.dumps(found))


def work(
    study: Study,
    out: Path,
    rates: Mapping[str, float],
    root: Path | None,
    labels: list[str] | None,
    stop_at: float,
) -> None:
    """Take one cell after the other until none is left."""

    @lru_cache(2)
    def load(key: TrainConfig) -> Data:
        return load_data(key, root)

    def data(config: TrainConfig) -> Data:
        return load(data_key(config))

    while time.time() < stop_at:
        cells = study.left(out, rates, labels)
        if not cells:
            return
        if not any(_try(cell, out, data) for cell in cells):
            time.sleep(0.5)  # others work on all of them


def flat(
    study: Study, out: Path, rates: Mapping[str, float], root: Path | None, labels: list[str] | None, draws: int = 50
) -> None:
    """Measure the neighbourhood and the top eigenvalues of the finished winners, seed by seed."""
    plan = Plan(num_samples=draws, num_ascent_steps=0, num_trace_samples=0, num_density_probes=0, num_points=0)
    for seed in study.seeds:
        runs: dict[str, Record] = {}
        for label in labels or study.trials:
            chosen = study.winner(label, out, rates)
            record = chosen and Record.of(out, replace(chosen, seed=seed))
            if record and record.result() and not (record.folder / "flatness.json").exists():
                runs[label] = record
        about = {"task": study.base.task, "split": "train", "examples": 1000}
        for found in measure_runs(runs, examples=1000, root=root, plan=plan) if runs else ():
            save_flatness(runs[found.name], found, about)
            print(f"{found.name} seed {seed}: loss {float(found.loss):.4f}", flush=True)


def _try(cell: Cell, out: Path, data: object) -> bool:
    """Train a cell, unless another process has it."""
    config, record = cell.config, Record.of(out, cell.config)
    with record.working() as mine:
        if not mine or score_at(out, config, cell.until) is not None:
            return False
        started = time.time()
        try:
            train(config, record, data=data, until=cell.until, checkpoint_seconds=float("inf"))  # type: ignore[arg-type]
        except TrainError as error:
            (record.folder / "diverged").write_text(f"{error}\n")
        torch.cuda.empty_cache()
    score = score_at(out, config, cell.until)
    told = "diverged" if diverged(out, config) else f"validation {100 * (score or 0):.2f}"
    name = f"{cell.label} {record.folder.parent.name} seed {config.seed} until {cell.until}"
    print(f"{name}: {told}, {time.time() - started:.0f} s", flush=True)
    return True


if __name__ == "__main__":
    main()
