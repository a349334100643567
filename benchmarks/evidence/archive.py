"""All runs of a folder in one file, without their weights, and back: what a record keeps, and work goes on with."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tiltsam.lab.files import drafted, write_json
from tiltsam.lab.records import Record
from tiltsam.lab.sweeping.results import find_run_folders

__all__ = ["collect", "restore"]

_FILES = ("config", "environment", "flatness", "result")


def collect(out: Path, path: Path) -> int:
    """Write every run below a folder as a line of JSON; returns how many there are.

    Args:
        out: Folder of the runs.
        path: The file; what it holds of other runs stays in it, and of these where they had gone further.
    """
    lines = {entry["place"]: entry for entry in _read(path)} if path.exists() else {}
    for folder in find_run_folders([out]):
        entry: dict[str, Any] = {"place": folder.relative_to(out).as_posix()}
        for name in _FILES:
            if (folder / f"{name}.json").exists():
                entry[name] = json.loads((folder / f"{name}.json").read_text())
        entry["metrics"], _ = Record(folder).metrics()
        entry["diverged"] = Record(folder).diverged()
        known = lines.get(entry["place"])
        begun = entry["metrics"] or entry["diverged"]
        if begun and (known is None or _length(entry) >= _length(known)):
            lines[entry["place"]] = entry
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(lines[name]) + "\n" for name in sorted(lines))
    with drafted(path) as draft:
        draft.write_bytes(gzip.compress(text.encode(), mtime=0))
    return len(lines)


def restore(path: Path, out: Path) -> int:
    """Write the runs of a file as folders; those that are there already are left alone."""
    count = 0
    for entry in _read(path):
        record = Record(out / entry["place"])
        if (record.folder / "metrics.jsonl").exists():
            continue
        record.folder.mkdir(parents=True, exist_ok=True)
        for row in entry["metrics"]:
            record.log(**row)
        for name in _FILES:  # the result last, as in training: a run that has one is finished
            if name in entry:
                write_json(record.folder / f"{name}.json", entry[name])
        if entry["diverged"]:
            record.diverge("the loss was not finite")
        count += 1
    return count


def _read(path: Path) -> Iterator[dict[str, Any]]:
    for line in gzip.decompress(path.read_bytes()).decode().splitlines():
        yield json.loads(line)


def _length(entry: dict[str, Any]) -> tuple[bool, float, int]:
    """How much is known of a run: whether it is finished, how far it went, and what was measured of it."""
    ended = "result" in entry or entry["diverged"]
    return ended, max((row["epoch"] for row in entry["metrics"]), default=0.0), len(entry)
