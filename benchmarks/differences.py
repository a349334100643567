"""Print the mean score of some runs of a record, or the difference between two groups of runs, paired by seed.

    python benchmarks/differences.py benchmarks/records/2026-11-16_digits_below "sam lr=0.01 rho=0.5 average=false"
    python benchmarks/differences.py RECORD [RECORD ...] "sam lr=0.01 rho=0.5" --minus "erm lr=0.001"

Runs are selected by their method and by settings of their config and options, or by their folder in the record
(``folder=cifar100-noisy/sam-73af265261``); each seed must be selected once. Scores are times 100, at the end of
training and at the epoch that was best on validation, as mean ± standard error; test losses are those at the end.
Differences are paired by seed and have a 95% interval (Student's t).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

from record import read_runs
from tiltsam.lab.stats import format_interval, format_mean, mean_of, paired_difference

METRICS = {  # key of a result, factor, digits
    "at the end": ("score", 100, 2),
    "at the best epoch": ("score_at_best_validation", 100, 2),
    "test loss": ("test_loss", 1, 3),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD", help="folders with runs.jsonl.gz")
    parser.add_argument("runs", help='method and settings, such as "sam lr=0.01 rho=0.5"')
    parser.add_argument("--minus", help="the runs to compare with")
    parser.add_argument("--seeds", type=int, help="use only the first seeds")
    args = parser.parse_args(argv)
    runs = [run for record in args.records for run in read_runs(record / "runs.jsonl.gz")]
    entries = [run for run in runs if "result" in run]
    first = select_runs(entries, args.runs, args.seeds)
    second = select_runs(entries, args.minus, args.seeds) if args.minus else {}
    for label, (key, factor, digits) in METRICS.items():
        values, others = ({s: factor * r["result"][key] for s, r in runs.items()} for runs in (first, second))
        if args.minus:
            difference = paired_difference(values, others)
            mean, interval = format_mean(difference, digits, "+"), f" {format_interval(difference, digits)}"
            print(f"{label}: {mean} ({difference.runs} seeds){interval}")
        else:
            print(f"{label}: {format_mean(mean_of(list(values.values())), digits)} ({len(values)} seeds)")


def select_runs(
    entries: Iterable[dict[str, Any]], query: str, seeds: int | None = None
) -> dict[Hashable, dict[str, Any]]:
    """Return the runs of a method with the given settings by seed.

    Raises:
        SystemExit: If no run matches, or several do for one seed.
    """
    method, *settings = query.split()
    wanted = {
        key: json.loads(value) if _is_json(value) else value for key, _, value in (s.partition("=") for s in settings)
    }
    found: dict[Hashable, dict[str, Any]] = {}
    for entry in entries:
        config = {"folder": str(Path(entry["place"]).parent), **entry["config"], **entry["config"]["options"]}
        if config["method"] != method or any(config.get(key) != value for key, value in wanted.items()):
            continue
        seed = config["seed"]
        if seeds is not None and seed >= seeds:
            continue
        if seed in found:
            other = {**found[seed]["config"], **found[seed]["config"]["options"]}
            differing = {
                key: (other.get(key), v) for key, v in config.items() if key != "options" and other.get(key) != v
            }
            raise SystemExit(f"{query!r} matches several runs of seed {seed}, which differ in {differing or 'nothing'}")
        found[seed] = entry
    if not found:
        raise SystemExit(f"no finished run matches {query!r}")
    return found


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    main()
