"""Pack the runs of a folder into a record, restore them, and print the tables of a record.

python benchmarks/record.py pack RUNS RECORD       # RECORD/runs.jsonl.gz: all runs, without their weights
python benchmarks/record.py restore RECORD RUNS    # folders again, for tiltsam report and to resume
python benchmarks/record.py tables RECORD          # the tables of RECORD/tables.json, as in RECORD/tables.md

A record of a sweep needs no ``tables.json``: its result is ``sweep.json``. The records of 2026-11 were made before
``tiltsam sweep``. Their ``tables.json`` names the settings of every row: ``trials`` were compared by validation score
after each stage (a fraction of the epochs, and how many go on), and the best one at the end was run with all seeds;
``variants`` were run with all seeds, and nothing was chosen.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tiltsam.lab.config import TrainConfig
from tiltsam.lab.console import format_markdown
from tiltsam.lab.files import drafted, write_json
from tiltsam.lab.records import Record
from tiltsam.lab.report.runs import find_run_folders
from tiltsam.lab.stats import format_mean, mean_of

FILES = ("config", "setup", "environment", "flatness", "result")
# The settings that tables show, in this order.
SHOWN = ("lr", "rho", "radius", "t", "num_samples", "alpha", "lam", "num_points", "ascent_fraction", "every")
NOISE_LEVELS = (0.01, 0.05, 0.1)
MOST_SEEDS = 10

Table = list[list[str]]
Run = dict[str, Any]
"""A line of ``runs.jsonl.gz``: place, metrics, why it diverged, and the content of those :data:`FILES` that exist."""


# ---------------------------------------------------------------- runs


def pack(runs: Path, record: Path) -> int:
    """Add all runs below a folder to ``runs.jsonl.gz``, and return how many it contains.

    A run that the file contains already is replaced, unless it was further.
    """
    path = record / "runs.jsonl.gz"
    lines = {run["place"]: run for run in read_runs(path)} if path.exists() else {}
    for folder in find_run_folders([runs]).runs:
        run: Run = {"place": folder.relative_to(runs).as_posix()}
        for name in FILES:
            if (folder / f"{name}.json").exists():
                run[name] = json.loads((folder / f"{name}.json").read_text())
        run["metrics"] = Record(folder).metrics()
        run["diverged"] = Record(folder).diverged()
        known = lines.get(run["place"])
        if (run["metrics"] or run["diverged"]) and (known is None or _extent(run) >= _extent(known)):
            lines[run["place"]] = run
    record.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(lines[place]) + "\n" for place in sorted(lines))
    with drafted(path) as draft:
        draft.write_bytes(gzip.compress(text.encode(), mtime=0))
    return len(lines)


def restore(record: Path, runs: Path) -> int:
    """Write the runs of a record as folders, except those that exist, and return how many were written."""
    count = 0
    for run in read_runs(record / "runs.jsonl.gz"):
        target = Record(runs / run["place"])
        if (target.folder / "metrics.jsonl").exists():
            continue
        target.folder.mkdir(parents=True, exist_ok=True)
        for row in run["metrics"]:
            target.log(**row)
        for name in FILES:  # the result last: a run that has one is finished
            if name in run:
                write_json(target.folder / f"{name}.json", run[name])
        if run["diverged"]:
            target.mark_diverged(run["diverged"])
        count += 1
    return count


def read_runs(path: Path) -> Iterator[Run]:
    """Yield the runs of a ``runs.jsonl.gz``."""
    for line in gzip.decompress(path.read_bytes()).decode().splitlines():
        yield json.loads(line)


def _extent(run: Run) -> tuple[bool, float, int]:
    """Return what orders two states of a run: finished, epochs, number of files."""
    ended = "result" in run or bool(run["diverged"])
    return ended, max((row["epoch"] for row in run["metrics"]), default=0.0), len(run)


# ---------------------------------------------------------------- tables


def tables(record: Path) -> str:
    """Return all tables of a record as Markdown."""
    definition = json.loads((record / "tables.json").read_text())
    folders = [record, *(record / other for other in definition.get("other_records", []))]
    runs = {run["place"]: run for folder in folders for run in read_runs(folder / "runs.jsonl.gz")}
    text = ""
    for found in definition["studies"]:
        if "variants" in found:
            made = [_variants_table(found, runs)]
        else:
            made = [_trials_table(found, runs), _final_table(found, runs)]
        if len(flat := _flatness_table(found, runs)) > 2:  # the headings, and two rows to compare
            made.append(flat)
        if (path := record / f"{found['study']}-cross.json").exists():
            made.append(_cross_table(json.loads(path.read_text())))
        text += "".join(f"\n### {found['study']}\n\n{format_markdown(table)}\n" for table in made)
    return text


@dataclass(frozen=True)
class Setting:
    """The runs of one config, with several seeds."""

    config: TrainConfig
    shown: str
    """The settings that distinguish it from others of its row."""
    runs: Mapping[str, Run]

    def run(self, seed: int = 0) -> Run:
        """Return the run with a seed; empty if there is none."""
        place = Record.of(Path(), replace(self.config, seed=seed)).folder.as_posix()
        return self.runs.get(place, {"metrics": [], "diverged": False})

    def at(self, fraction: float) -> tuple[float, float] | None:
        """Return validation score and loss of seed 0 after a fraction of the epochs; None if it did not get there."""
        run = self.run()
        rows = [row for row in run["metrics"] if row["epoch"] >= fraction * self.config.epochs - 1e-6]
        if not rows:
            return (-math.inf, 0.0) if run["diverged"] else None
        if fraction >= 1 and "result" not in run:
            return None
        score = next(value for name, value in rows[0].items() if name.startswith("validation_"))
        return float(score), float(rows[0].get("validation_loss", 0.0))

    @cached_property
    def finished(self) -> dict[int, Run]:
        """The finished runs by seed."""
        found = {seed: self.run(seed) for seed in range(MOST_SEEDS)}
        return {seed: run for seed, run in found.items() if "result" in run and not run["diverged"]}

    def final_scores(self, seeds: int) -> dict[int, float]:
        """Return the test scores at the end, times 100, by seed."""
        found = {seed: run for seed, run in self.finished.items() if seed < seeds}
        return {seed: 100 * run["metrics"][-1][f"test_{run['result']['metric']}"] for seed, run in found.items()}

    def best_scores(self, seeds: int) -> list[float]:
        """Return the test scores at the best epoch on validation, times 100; none without a validation split."""
        results = [run["result"] for seed, run in self.finished.items() if seed < seeds]
        return [100 * r["score_at_best_validation"] for r in results if "score_at_best_validation" in r]


def _trials(study: Mapping[str, Any], label: str, runs: Mapping[str, Run]) -> list[Setting]:
    """Return the trials of a row; a list of values is one per trial."""
    row = study["trials"][label]
    number = max(len(v) for v in row["settings"].values() if isinstance(v, list))
    found = []
    for k in range(number):
        settings = {name: v[k] if isinstance(v, list) else v for name, v in row["settings"].items()}
        config = TrainConfig().with_settings({**study["base"], **row["budget"], **settings})
        shown = ", ".join(f"{name} {settings[name]:g}" for name in SHOWN if name in settings)
        found.append(Setting(config, shown, runs))
    return found


def _chosen(study: Mapping[str, Any], trials: Sequence[Setting]) -> Setting | None:
    """Return the best trial after all stages; None if not all got there."""
    left = list(trials)
    for fraction, keep in (*study["stages"], (1.0, 1)):
        values = {id(trial): trial.at(fraction) for trial in left}
        ranks = {key: (-value[0], value[1]) for key, value in values.items() if value is not None}
        if len(ranks) < len(left):
            return None
        left = sorted(left, key=lambda trial: ranks[id(trial)])[:keep]
    return left[0]


def _trials_table(study: Mapping[str, Any], runs: Mapping[str, Run]) -> Table:
    fractions = [fraction for fraction, _ in study["stages"]] + [1.0]
    table = [["method", "trial", *(f"after {fraction:.2g}" for fraction in fractions), ""]]
    for label in study["trials"]:
        trials = _trials(study, label, runs)
        chosen = _chosen(study, trials)
        for trial in trials:
            values = [trial.at(fraction) for fraction in fractions]
            cells = ["" if v is None else "diverged" if v[0] == -math.inf else f"{100 * v[0]:.2f}" for v in values]
            table.append([label, trial.shown, *cells, "chosen" if trial is chosen else ""])
    return table


def _final_table(study: Mapping[str, Any], runs: Mapping[str, Run]) -> Table:
    reference, seeds = study["reference"], study["seeds"]
    headings = ["method", "chosen", "epochs", study["unit"], "at the end", "at the best epoch"]
    table = [[*headings, f"at the end, minus {reference}", "seeds"]]
    chosen = {label: _chosen(study, _trials(study, label, runs)) for label in study["trials"]}
    against = chosen.get(reference)
    for label, setting in chosen.items():
        if setting is None or not (scores := setting.final_scores(seeds)):
            continue
        difference = ""
        if against is not None and label != reference:
            others = against.final_scores(seeds)
            if paired := [score - others[seed] for seed, score in scores.items() if seed in others]:
                difference = format_mean(mean_of(paired), 2, "+")
        lost = sum(bool(setting.run(seed)["diverged"]) for seed in range(seeds))
        steps = setting.finished[max(scores)]["metrics"][-1]["steps"]
        table.append(
            [
                label,
                setting.shown,
                f"{setting.config.epochs:g}",
                f"{steps * study['trials'][label]['step_cost'] / 1e3:.3g}",
                format_mean(mean_of(list(scores.values())), 2),
                format_mean(mean_of(setting.best_scores(seeds)), 2),
                difference,
                f"{len(scores)}" + (f", {lost} diverged" if lost else ""),
            ]
        )
    return table


def _variants(study: Mapping[str, Any], runs: Mapping[str, Run]) -> dict[str, Setting]:
    return {
        label: Setting(TrainConfig().with_settings({**study["base"], **settings}), label, runs)
        for label, settings in study["variants"].items()
    }


def _variants_table(study: Mapping[str, Any], runs: Mapping[str, Run]) -> Table:
    table = [["variant", "at the end", "at the best epoch", "effective samples", "of", "seeds"]]
    for label, setting in _variants(study, runs).items():
        if scores := setting.final_scores(study["seeds"]):
            sizes = [
                mean_of([row["effective_sample_size"] for row in setting.finished[seed]["metrics"]]).value
                for seed in scores
            ]
            samples = study["variants"][label].get("num_samples", 1)
            means = [format_mean(mean_of(x), 2) for x in (list(scores.values()), setting.best_scores(study["seeds"]))]
            table.append([label, *means, f"{mean_of(sizes).value:.3f}", str(samples), str(len(scores))])
    return table


def _flatness_table(study: Mapping[str, Any], runs: Mapping[str, Run]) -> Table:
    """Return loss, mean and variance of the loss under noise on the weights, and the largest eigenvalues."""
    if "variants" in study:
        first = {setting.config: (label, setting) for label, setting in reversed(_variants(study, runs).items())}
        settings = dict(sorted(first.values(), key=lambda item: list(study["variants"]).index(item[0])))
    else:
        chosen = {label: _chosen(study, _trials(study, label, runs)) for label in study["trials"]}
        settings = {label: setting for label, setting in chosen.items() if setting is not None}
    headings = ["variant" if "variants" in study else "method", "loss"]
    headings += [f"{what} at {std:g}" for std in NOISE_LEVELS for what in ("mean", "variance")]
    table = [[*headings, "top-5 eigenvalues", "seeds"]]
    for label, setting in settings.items():
        measured = [run["flatness"] for k in range(study["seeds"]) if "flatness" in (run := setting.run(k))]
        if not measured:
            continue
        cells = [_mean_of_three([one["loss"] for one in measured])]
        for std in NOISE_LEVELS:
            around = [(one["neighborhood"], one["neighborhood"]["std"].index(std)) for one in measured]
            cells += [_mean_of_three([values[what][k] for values, k in around]) for what in ("mean", "variance")]
        columns = zip(*(one["eigenvalues"]["values"] for one in measured), strict=True)
        table.append([label, *cells, " ".join(map(_mean_of_three, columns)), str(len(measured))])
    return table


def _cross_table(seeds: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """Return the losses of models (rows) under the objectives of others (columns), averaged over seeds."""
    entries = [entry for found in seeds.values() for entry in found]
    columns = list(dict.fromkeys((e["split"], e["objective"]) for e in entries))
    table = [["trained by", *(f"{split}, {objective}" for split, objective in columns), "seeds"]]
    for model in dict.fromkeys(e["model"] for e in entries):
        mine = [e for e in entries if e["model"] == model]
        means = [mean_of([e["loss"] for e in mine if (e["split"], e["objective"]) == c]).value for c in columns]
        table.append([model, *(f"{mean:.3f}" for mean in means), str(len(seeds))])
    return table


def _mean_of_three(values: Sequence[float]) -> str:
    """Return a mean with three significant digits."""
    return f"{mean_of(values).value:.3g}"


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("pack", "restore", "tables"))
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    if args.command == "tables":
        print(tables(*args.folders), end="")
    elif args.command == "pack":
        print(f"{args.folders[1] / 'runs.jsonl.gz'}: {pack(*args.folders)} runs")
    else:
        print(f"{args.folders[1]}: {restore(*args.folders)} runs")


if __name__ == "__main__":
    main()
