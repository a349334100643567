"""Commands of the studies; see the package."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from bench_lab import random_cifar
from evidence.archive import collect, restore
from evidence.studies import STUDIES
from evidence.study import Cell, Rates, Study, Variants, diverged, score_at
from evidence.tables import (
    cross_table,
    draw_curves,
    draw_flatness,
    draw_variants,
    final_table,
    flat_table,
    trial_table,
    variant_table,
)
from tiltsam.flatness.objectives import ErmLoss, Objective, SamLoss, TsamLoss
from tiltsam.lab.budget import passes_per_step
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.data import Data, data_key, load
from tiltsam.lab.devices import torch_settings
from tiltsam.lab.errors import Diverged
from tiltsam.lab.files import drafted, write_json
from tiltsam.lab.flatness import FlatnessPlan, cross_runs, measure_runs, save_flatness
from tiltsam.lab.records import Record
from tiltsam.lab.train import Trainer, train
from timing import best_of, environment, print_table

COMMANDS = ("rates", "work", "left", "weights", "flat", "cross", "table", "collect", "restore")


def main() -> None:
    """One command on some studies."""
    parser = argparse.ArgumentParser(prog="python -m evidence", description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("studies", nargs="+", choices=STUDIES, metavar="STUDY", help=", ".join(STUDIES))
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--record", type=Path, required=True, help="folder of rates.json and runs.jsonl.gz")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--labels", nargs="+", help="these methods alone")
    args = parser.parse_args()
    studies = [STUDIES[name] for name in args.studies]
    runs = args.record / "runs.jsonl.gz"
    if args.command == "collect":
        print(f"{runs}: {collect(args.out, runs)} runs")
        return
    if args.command == "restore":
        print(f"{args.out}: {restore(runs, args.out)} runs from {runs}")
        return
    if args.command == "rates":
        for study in studies:
            assert isinstance(study, Study)
            measure_rates(study, args.record / "rates.json", args.data_root)
        return
    rates = {key: value["a_step"] for key, value in _known_rates(args.record / "rates.json").items()}
    for study in studies:
        known = rates.get(study.family, {}).keys()
        if isinstance(study, Study) and (missing := study.timed(args.labels) - known):
            parser.error(f"{args.record / 'rates.json'} has no rates of {', '.join(sorted(missing))}: run rates first")
    if args.command == "work":
        # Ended in the midst of a kernel, a process takes those down that share the GPU with it by MPS.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
        work(studies, args.out, rates, args.data_root, args.labels)
    for study in studies:
        mine = rates.get(study.family, {})
        if args.command == "left":
            for cell in study.left(args.out, mine, args.labels):
                print(f"{study.name} {cell.label} {cell.config.key()} seed {cell.config.seed} until {cell.until}")
        elif args.command == "weights":
            weights(study, args.out, mine, args.data_root, args.labels)
        elif args.command == "flat":
            flat(study, args.out, mine, args.data_root, args.labels)
        elif args.command == "cross" and isinstance(study, Study):
            cross(study, args.out, mine, args.data_root, args.record / f"{study.name}-cross.json")
        elif args.command == "table":
            show(study, args.out, mine, args.record)


def show(study: Study | Variants, out: Path, rates: Rates, record: Path) -> None:
    """Print the tables of a study and draw its figures into the record's folder."""
    tables = []
    if isinstance(study, Variants):
        tables.append(variant_table(study, out))
        draw_variants(study, out, record / f"{study.name}.png")
    else:
        tables += [trial_table(study, out, rates), final_table(study, out, rates)]
        draw_curves(study, out, rates, record / f"{study.name}.png")
    if len(flat := flat_table(study, out, rates)) > 2:  # the heading, and two to compare
        tables.append(flat)
        if isinstance(study, Study):
            draw_flatness(study, out, rates, record / f"{study.name}-flatness.png")
    if isinstance(study, Study) and (path := record / f"{study.name}-cross.json").exists():
        tables.append(cross_table(path))
    for table in tables:
        print(f"\n### {study.name}\n")
        print_table(table[0], table[1:])


def _known_rates(path: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    return found


def measure_rates(study: Study, path: Path, root: Path | None) -> None:
    """What a step of every label costs, by the clock with nothing else running, or in passes; written to a file.

    Args:
        study: Which.
        path: The file; what it holds stays in it, and the number of a label that it holds is not replaced.
        root: Where data sets lie; without it, noise in the shape of CIFAR-100.
    """
    family = [other for other in STUDIES.values() if isinstance(other, Study) and other.family == study.family]
    first = {}
    for label in sorted(study.timed(), key=lambda label: label != study.reference):
        owner = next(other for other in (study, *family) if label in other.trials)
        first[label] = owner.configs(label, dict.fromkeys(owner.timed(), 1.0))[0]
    if study.unit == "seconds":
        found = _milliseconds(first, root)
    else:
        found = {label: passes_per_step(config) for label, config in first.items()}
    known = _known_rates(path)
    before = known.setdefault(study.family, {"a_step": {}, "measured": []})
    # What was measured on another day is brought to the clock of the first by the reference, which is in both.
    scale = before["a_step"].get(study.reference, found[study.reference]) / found[study.reference]
    before["a_step"] = {label: scale * cost for label, cost in found.items()} | before["a_step"]
    before["measured"].append({"environment": environment(torch.device(study.base.device)), "a_step": found})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, known)
    print(json.dumps(found))


def _milliseconds(configs: Mapping[str, TrainConfig], root: Path | None) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        steps: dict[str, Callable[[], object]] = {}
        data: Data | None = None
        for label, config in configs.items():
            if data is None:
                data = load(config, root) if root or config.model != "resnet18" else random_cifar(2048, 64)
            run = Trainer(config, Record(Path(folder)), data)
            run.model.train()
            steps[label] = partial(run.take_step, next(run.batches.epoch(0, 0)))
        with torch_settings(run.device, run.model):
            for step in steps.values():
                for _ in range(4):  # the fourth is captured
                    step()
            return best_of(steps, 5, run.device, inner=40)


def work(
    studies: Sequence[Study | Variants],
    out: Path,
    rates: dict[str, Rates],
    root: Path | None,
    labels: list[str] | None = None,
) -> None:
    """Take one cell after the other until none is left.

    Args:
        studies: The first one's cells come first, but for further seeds: those wait for all studies' first.
        out: Folder of the runs.
        rates: By family of studies.
        root: Where data sets lie.
        labels: These alone.
    """

    @lru_cache(2)
    def cached(key: TrainConfig) -> Data:
        return load(key, root)

    def data(config: TrainConfig) -> Data:
        return cached(data_key(config))

    while True:
        cells = [cell for study in studies for cell in study.left(out, rates.get(study.family, {}), labels)]
        cells.sort(key=lambda cell: cell.config.seed)
        if not cells:
            return
        if not any(_try(cell, out, data) for cell in cells):
            time.sleep(0.5)  # others work on all of them


def _try(cell: Cell, out: Path, data: Callable[[TrainConfig], Data]) -> bool:
    """Train a cell, unless another process has it."""
    config, record = cell.config, Record.of(out, cell.config)
    with record.lock() as mine:
        if not mine or score_at(out, config, cell.until) is not None:
            return False
        started = time.time()
        with suppress(Diverged):  # the record tells
            train(config, record, data=data, until=cell.until, checkpoint_seconds=120)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    score = score_at(out, config, cell.until)
    told = "diverged" if diverged(out, config) else f"validation {100 * (score or 0):.2f}"
    name = f"{config.task} {cell.label} {config.key()} seed {config.seed} until {cell.until}"
    print(f"{name}: {told}, {time.time() - started:.0f} s", flush=True)
    return True


def weights(
    study: Study | Variants, out: Path, rates: Rates, root: Path | None, labels: list[str] | None = None
) -> None:
    """Train again what came back from a record without weights: the first seed's, and what it wrote is kept.

    On a GPU, whose sums are not ordered, they are not the same weights to the bit.
    """
    for label, config in study.settled(out, rates, labels).items():
        record = Record.of(out, config)
        if record.result() is None or (kept := record.folder / "model.safetensors").exists():
            continue
        again = Record.of(out / "again", config)
        if again.result() is not None and not (again.folder / "model.safetensors").exists():
            shutil.rmtree(again.folder)  # it came from a record, too
        result = train(config, again, root=root)
        with drafted(kept) as draft:
            shutil.copy(again.folder / "model.safetensors", draft)
        print(f"{label} again: {result}", flush=True)


def flat(
    study: Study | Variants,
    out: Path,
    rates: Rates,
    root: Path | None,
    labels: list[str] | None = None,
    draws: int = 50,
) -> None:
    """Measure the neighbourhood and the top eigenvalues of finished runs, a study's winners', seed by seed."""
    plan = FlatnessPlan(num_samples=draws, num_ascent_steps=0, num_trace_samples=0, num_density_probes=0, num_points=0)
    for seed in study.seeds:
        runs = {
            label: record
            for label, record in _finished(study, out, rates, labels, seed).items()
            if not (record.folder / "flatness.json").exists()
        }
        for found, about in measure_runs(runs, examples=1000, root=root, plan=plan):
            save_flatness(runs[found.name], found, about)
            print(f"{found.name} seed {seed}: loss {float(found.loss):.4f}", flush=True)


def cross(study: Study, out: Path, rates: Rates, root: Path | None, path: Path) -> None:
    """The losses of ERM's, SAM's and TSAM's winners under the objectives of all three, on training and test examples.

    Args:
        study: One with these three.
        out: Folder of the runs.
        rates: Of the study.
        root: Where data sets lie.
        path: The file; seeds that it holds are not measured again.
    """
    labels = ["erm", "sam", "tsam s=3"]
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for seed in study.seeds:
        runs = _finished(study, out, rates, labels, seed)
        if len(runs) < len(labels) or str(seed) in known:
            continue
        sam, tsam = (runs[label].config().all_options() for label in labels[1:])
        objectives: dict[str, Objective] = {
            "ERM": ErmLoss(),
            "SAM": SamLoss(sam["rho"]),
            "TSAM": TsamLoss(tsam["t"], tsam["rho"], tsam["radius"], tsam["num_samples"]),
        }
        found = cross_runs(runs, objectives, batch_size=study.base.batch_size, device=study.base.device, root=root)
        known[str(seed)] = [entry._asdict() for entry in found.entries]
        write_json(path, known)
        for entry in found.entries:
            print(f"seed {seed} {entry.split} {entry.model} under {entry.objective}: {entry.loss:.4f}", flush=True)


def _finished(
    study: Study | Variants, out: Path, rates: Rates, labels: Sequence[str] | None, seed: int
) -> dict[str, Record]:
    """The finished runs of a study's settings with a seed, those whose weights are here."""
    settled = study.settled(out, rates, labels)
    found = {label: Record.of(out, replace(config, seed=seed)) for label, config in settled.items()}
    return {label: r for label, r in found.items() if r.result() and (r.folder / "model.safetensors").exists()}


if __name__ == "__main__":
    main()
