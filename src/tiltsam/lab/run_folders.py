"""Find the folders of runs and of sweeps, and tell the runs that tested a choice from the trials."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tiltsam.lab.errors import RecordError
from tiltsam.lab.files import parse_json

__all__ = ["RunFolders", "SweepTestRun", "find_run_folders", "sweeps_of", "tested_runs"]


class RunFolders(NamedTuple):
    """What is found among and below some folders."""

    runs: list[Path]
    sweeps: list[Path]


def find_run_folders(roots: Iterable[Path], *, trials: bool = True) -> RunFolders:
    """Return the folders of runs and of sweeps among and below the given folders, each once.

    Runs may be in progress. The folder of a sweep stands for the runs that tested its choices.

    Args:
        roots: The folders.
        trials: Whether to include the settings of which sweeps in the same ``OUT`` have trials and nothing else has
            runs. If a folder contains no other, they are included anyway.

    Raises:
        RecordError: If one of the folders contains no run.
    """
    runs: dict[Path, Path] = {}
    all_sweeps: dict[Path, Path] = {}
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
        if not trials:
            places = _without_trials(places) or places
        for folder in sorted(places):
            runs.setdefault(folder.resolve(), folder)
        for folder in sorted(sweeps):
            all_sweeps.setdefault(folder.resolve(), folder)
    return RunFolders(list(runs.values()), list(all_sweeps.values()))


def _without_trials(places: Sequence[Path]) -> list[Path]:
    """Return the runs of the settings that are not only trials of sweeps in the same ``OUT``."""
    sweeps = sweeps_of(places)
    tried = {run.resolve() for sweep in sweeps for run in _trial_runs(sweep)}
    tested = {run.resolve() for sweep in sweeps for run in tested_runs(sweep)}
    folders = [place.resolve() for place in places]
    kept = {folder.parent for folder in folders if folder not in tried or folder in tested}
    return [place for place, folder in zip(places, folders, strict=True) if folder.parent in kept]


def sweeps_of(runs: Iterable[Path]) -> list[Path]:
    """Return the folders of the sweeps in the ``OUT`` of some runs, without damaged ones."""
    sweeps = []
    for out in sorted({ancestor for run in runs for ancestor in run.resolve().parents[2:3]}):
        for path in sorted(out.glob("sweeps/*/sweep.json")):
            with suppress(RecordError):
                tested_runs(path.parent)
                sweeps.append(path.parent)
    return sweeps


def _trial_runs(sweep: Path) -> set[Path]:
    """Return the folders of the trials of a sweep, one per seed; none if it does not list them."""
    try:
        content = parse_json((sweep / "sweep.json").read_bytes())
        trials = [trial for method in content["methods"].values() for trial in method["trials"]]
        first = [_out(sweep) / trial["run"] for trial in trials]
        return {run.with_name(f"seed-{seed}") for run in first for seed in range(content["trial_seeds"])}
    except (ValueError, KeyError, TypeError, AttributeError):
        return set()


class SweepTestRun(NamedTuple):
    """A run that tested the choice of a sweep."""

    entry: str
    seed: int
    state: str


def tested_runs(folder: Path) -> dict[Path, SweepTestRun]:
    """Return the runs that tested the choices of a sweep; some may be on other machines.

    Args:
        folder: The folder of the sweep.

    Returns:
        By run folder, the entry as typed, the seed and the state of the run.

    Raises:
        RecordError: If ``sweep.json`` is damaged.
    """
    path = folder / "sweep.json"
    try:
        methods = parse_json(path.read_text())["methods"].items()
        tests = [(name, run) for name, method in methods for run in method["test"]["runs"]]
        return {_out(folder) / run["run"]: SweepTestRun(name, run["seed"], run["state"]) for name, run in tests}
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
