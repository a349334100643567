"""Find the folders of runs, also those that a sweep tested."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from tiltsam.lab.errors import RecordError
from tiltsam.lab.files import parse_json

__all__ = ["find_run_folders", "tested_runs"]


def find_run_folders(roots: Iterable[Path]) -> list[Path]:
    """Return the run folders among and below the given folders, each once.

    Runs may be in progress. The folder of a sweep stands for the runs that tested its choices.

    Args:
        roots: The folders.

    Raises:
        RecordError: If one of the folders contains no run.
    """
    found: dict[Path, Path] = {}
    for root in roots:
        places, sweeps, seen = [], [], set()
        for place, folders, files in os.walk(root, followlinks=True):  # skips what vanishes meanwhile
            if (real := os.path.realpath(place)) in seen:  # links may form a cycle
                folders.clear()
                continue
            seen.add(real)
            if "config.json" in files:
                places.append(Path(place))
                folders.clear()
            elif "sweep.json" in files:
                sweeps.append(Path(place))
                places += [run for run in tested_runs(Path(place)) if (run / "config.json").exists()]
                folders.clear()
        if not places and sweeps:
            raise RecordError(_why_no_tested_run(sweeps[0]))
        if not places:
            raise RecordError(f"no run in {root}: a run is a folder with config.json, as tiltsam train writes it")
        for folder in sorted(places):
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def tested_runs(folder: Path) -> dict[Path, tuple[str, str]]:
    """Return the runs that tested the choices of a sweep; some may be on other machines.

    Args:
        folder: The folder of the sweep.

    Returns:
        By run folder, a label of the method and seed, and the state of the run.

    Raises:
        RecordError: If ``sweep.json`` is damaged.
    """
    path = folder / "sweep.json"
    try:
        methods = parse_json(path.read_text())["methods"].items()
        tests = [(name, run) for name, method in methods for run in method["test"]["runs"]]
        return {_out(folder) / run["run"]: (f"{name}, seed {run['seed']}", run["state"]) for name, run in tests}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RecordError(f"{path} is not what tiltsam sweep writes") from None


def _out(sweep: Path) -> Path:
    """Return the OUT of ``OUT/sweeps/STUDY``, which may be given as ``.`` or ``../STUDY``, or as a link."""
    out = sweep / ".." / ".."
    plain = Path(os.path.normpath(out))  # shorter, but wrong if the path contains a link
    return plain if plain.samefile(out) else out.resolve()


def _why_no_tested_run(sweep: Path) -> str:
    if not tested_runs(sweep):
        return f"{sweep / 'sweep.json'} has no tests, or none yet"
    missing = f"none of the runs that {sweep / 'sweep.json'} tested is below {_out(sweep)}"
    return f"{missing}: they are on another machine, or this folder was in another OUT/sweeps"
