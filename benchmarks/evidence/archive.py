"""All runs of a folder in one file, without their weights, and back: what a record keeps, and work goes on with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tiltsam.lab.config import TrainConfig
from tiltsam.lab.record import Record, folders_of_runs

__all__ = ["collect", "restore"]

_FILES = ("config", "environment", "result", "flatness")


def collect(out: Path, path: Path) -> int:
    """Write every run below a folder as a line of JSON; returns how many there are.

    Args:
        out: Folder of the runs.
        path: The file; what it holds of other runs stays in it.
    """
    lines = {_name(entry): entry for entry in _read(path)} if path.exists() else {}
    for folder in folders_of_runs([out]):
        entry: dict[str, Any] = {
            name: json.loads((folder / f"{name}.json").read_text())
            for name in _FILES
            if (folder / f"{name}.json").exists()
        }
        entry["metrics"], _ = Record(folder).metrics()
        entry["diverged"] = (folder / "diverged").exists()
        if entry["metrics"] or entry["diverged"]:
            lines[_name(entry)] = entry
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(lines[name]) + "\n" for name in sorted(lines)))
    return len(lines)


def restore(path: Path, out: Path) -> int:
    """Write the runs of a file as folders; those that are there already are left alone."""
    count = 0
    for entry in _read(path):
        record = Record.of(out, TrainConfig(**entry["config"]))
        if (record.folder / "metrics.jsonl").exists():
            continue
        record.folder.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            if name in entry:
                (record.folder / f"{name}.json").write_text(json.dumps(entry[name], indent=1) + "\n")
        for row in entry["metrics"]:
            record.log(**row)
        if entry["diverged"]:
            (record.folder / "diverged").touch()
        count += 1
    return count


def _read(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        yield json.loads(line)


def _name(entry: dict[str, Any]) -> tuple[str, str, int]:
    config = TrainConfig(**entry["config"])
    return config.task, config.key(), config.seed
