"""Find the records of runs and read them. What cannot be read is listed as a problem, by file and line.

Reports are often written about unfinished or damaged runs, so reading never stops at the first error and drops nothing
silently. Only numbers and the few texts that a report shows are passed on.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tiltsam.lab.config import DEFAULTS
from tiltsam.lab.data import TASKS
from tiltsam.lab.errors import RecordError
from tiltsam.lab.files import is_number, write_json
from tiltsam.lab.flags import format_value
from tiltsam.lab.records import check_result, read_metrics

__all__ = [
    "Group",
    "MetricsRow",
    "RunFolders",
    "RunProblem",
    "RunRecord",
    "RunSet",
    "SweepFile",
    "SweepTestRun",
    "find_run_folders",
    "measured",
    "read_runs",
    "read_sweep",
    "save_entries",
    "sweeps_of",
    "typed_entries",
]

T = TypeVar("T")

MetricsRow = dict[str, float]
"""The numbers of one line of ``metrics.jsonl``, by name."""


class Group(NamedTuple):
    """What runs must have in common to be compared, as texts."""

    task: str
    noise: str
    """The label noise."""
    validation: str
    """The share of validation examples."""


@dataclass(frozen=True)
class RunProblem:
    """Something missing or damaged that a reader of the report must know about."""

    where: str
    """A file, with its line if there is one, or a run."""
    what: str
    group: Group | None = None
    """The runs it belongs to; None if unknown."""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True)
class RunRecord:
    """One run as found on disk."""

    folder: Path
    config: dict[str, Any]
    rows: list[MetricsRow] = field(default_factory=list)
    """Metrics by epoch, without those of an attempt that was killed and restarted."""
    result: MetricsRow | None = None
    """The final numbers; None until the run has finished."""
    metric: str = ""
    """The metric of the task, such as ``accuracy``; empty if the record does not name one yet."""
    environment: dict[str, Any] = field(default_factory=dict)
    setup: dict[str, Any] = field(default_factory=dict)
    """Numbers of examples and classes, label noise, model; empty in records of earlier versions."""
    flatness: dict[str, Any] | None = None
    """What ``tiltsam sharpness`` measured."""
    diverged: str = ""
    """Why training stopped, if it diverged."""
    notes: str = ""
    """The content of ``notes.txt``."""
    swept: bool = False
    """Whether its settings were chosen by ``tiltsam sweep`` on the validation split."""
    entry: str = ""
    """The method and its settings as typed at the command line; empty if unknown."""
    position: int = 0
    """The position of :attr:`entry` among those typed."""

    @property
    def task(self) -> str:
        """The name of the task."""
        return str(self.config.get("task", "?"))

    @property
    def noise(self) -> Any:
        """The label noise; that of the task if the config has none."""
        noise = self.config.get("noise")
        default = TASKS[self.task].noise if self.task in TASKS else 0.0
        return self.setup.get("noise", default) if noise is None else noise

    @property
    def group(self) -> Group:
        """The runs that it is compared with."""
        validation = self.config.get("validation", DEFAULTS["validation"])
        return Group(self.task, format_value(self.noise), format_value(validation))

    @property
    def method(self) -> str:
        """The name of the method."""
        return str(self.config.get("method", "?"))

    @property
    def seed(self) -> Any:
        """The seed; not a number if the config is damaged."""
        return self.config.get("seed", "?")

    @property
    def finished(self) -> bool:
        """Whether the run has final numbers."""
        return self.result is not None

    @property
    def score(self) -> float:
        """The final test score, or NaN."""
        return math.nan if self.result is None else self.result.get("score", math.nan)

    @property
    def state(self) -> str:
        """``finished``, ``diverged`` or ``not finished``."""
        return "finished" if self.finished else "diverged" if self.diverged else "not finished"

    @property
    def progress(self) -> str:
        """How far training got, such as ``at epoch 2 of 6``."""
        epochs: Any = self.config.get("epochs")
        of = f" of {epochs:g}" if is_number(epochs) and math.isfinite(epochs) else ""
        return f"at epoch {self.rows[-1]['epoch']:g}{of}" if self.rows else f"no epoch{of} yet"


class RunSet(NamedTuple):
    """The runs below some folders, what could not be read, and what sweeps noted."""

    runs: list[RunRecord]
    problems: list[RunProblem]
    notes: dict[Group, list[str]]
    """By group of runs, notes on the fairness of their sweeps, such as choices at the edge of a grid."""


def read_runs(folders: Sequence[Path], *, trials: bool = False) -> RunSet:
    """Read all runs below the folders.

    Args:
        folders: The folders.
        trials: Whether to include the trials of sweeps; otherwise only the runs that tested their choices.

    Raises:
        RecordError: If one of the folders contains no run.
    """
    runs: list[RunRecord] = []
    problems: list[RunProblem] = []
    found = find_run_folders(folders, trials=trials)
    swept = {place.resolve() for sweep in (*found.sweeps, *sweeps_of(found.runs)) for place in sweep.tests}
    typed = typed_entries(found)
    positions = {entry: position for position, entry in enumerate(dict.fromkeys(typed.values()))}
    for folder in found.runs:
        config = _read(folder / "config.json", _json_object, problems, required=True)
        if config is None:
            continue
        own_problems: list[RunProblem] = []
        run = _read_run(folder, config, own_problems)
        place = folder.resolve()
        entry = typed.get(place, "")
        runs.append(replace(run, swept=place in swept, entry=entry, position=positions.get(entry, len(positions))))
        problems += [replace(problem, group=run.group) for problem in own_problems]
    groups = {run.folder.resolve(): run.group for run in runs}
    notes: dict[Group, list[str]] = {}
    for sweep in found.sweeps:
        for place, test in sweep.tests.items():
            if not (place / "config.json").exists():
                what = f"no record here; its state in sweep.json is {test.state}"
                problems.append(RunProblem(f"{test.entry}, seed {test.seed}", what))
        places = {place.resolve() for place in (*sweep.tests, *sweep.trials)}
        for group in {groups[place] for place in places if place in groups}:
            notes[group] = list(dict.fromkeys([*notes.get(group, []), *sweep.notes]))
    return RunSet(*_drop_duplicates(runs, problems), notes)


def measured(content: Any, *path: str) -> list[float]:
    """Return the numbers at a path in a measurement: a list, or one number as a list, with NaN for missing ones."""
    for key in path:
        content = content.get(key) if isinstance(content, dict) else None
    entries = content if isinstance(content, list) and content else [content]
    return [float(x) if is_number(x) else math.nan for x in entries]


def _read_run(folder: Path, config: dict[str, Any], problems: list[RunProblem]) -> RunRecord:
    lines, damaged = _read(folder / "metrics.jsonl", read_metrics, problems) or ([], {})
    for number, what in damaged.items():
        problems.append(RunProblem(f"{folder / 'metrics.jsonl'}, line {number}", f"damaged, skipped: {what}"))
    rows = [_numeric_entries(line) for line in lines]
    # Without a result, the metric is the first one of the test split.
    tested = (k.removeprefix("test_") for row in rows for k in row if k.startswith("test_") and k != "test_loss")
    result = _read(folder / "result.json", lambda path: check_result(_json_object(path)), problems)
    return RunRecord(
        folder=folder,
        config=config,
        rows=rows,
        result=None if result is None else _numeric_entries(result),
        metric=next(tested, "") if result is None else result["metric"],
        environment=_read(folder / "environment.json", _json_object, problems) or {},
        setup=_read(folder / "setup.json", _json_object, problems) or {},
        flatness=_read(folder / "flatness.json", _json_object, problems),
        diverged=_read(folder / "diverged.txt", _text, problems) or "",
        notes=_read(folder / "notes.txt", _text, problems) or "",
    )


def _read(path: Path, parse: Callable[[Path], T], problems: list[RunProblem], *, required: bool = False) -> T | None:
    """Return the parsed file, or None if there is none.

    If it is damaged, or required and missing, return None and append a problem.
    """
    try:
        return parse(path) if required or path.exists() else None
    except OSError as error:
        problems.append(RunProblem(str(path), f"cannot be read ({error.strerror})"))
    except ValueError as error:  # not JSON, not UTF-8, or not what is expected
        problems.append(RunProblem(str(path), f"damaged: {error}"))
    return None


def _json_object(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    return content


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").strip()


def _drop_duplicates(runs: list[RunRecord], problems: list[RunProblem]) -> tuple[list[RunRecord], list[RunProblem]]:
    """Keep one record per config and seed, a finished one if possible: a second one would count twice in a mean."""
    kept: dict[str, RunRecord] = {}
    problems = list(problems)
    for run in sorted(runs, key=lambda r: not r.finished):
        config = {k: v for k, v in run.config.items() if k != "device"}
        first = kept.setdefault(json.dumps(config, sort_keys=True), run)
        if first is not run:
            problems.append(RunProblem(str(run.folder), f"skipped: same config and seed as {first.folder}", run.group))
    chosen = {id(run) for run in kept.values()}
    return [run for run in runs if id(run) in chosen], problems


def _numeric_entries(row: dict[str, Any]) -> MetricsRow:
    return {k: float(v) for k, v in row.items() if is_number(v)}


# ---------------------------------------------------------------- folders of runs and of sweeps


class SweepTestRun(NamedTuple):
    """A run that tested the choice of a sweep."""

    entry: str
    seed: int
    state: str


@dataclass(frozen=True)
class SweepFile:
    """The content of a ``sweep.json``."""

    folder: Path
    tests: dict[Path, SweepTestRun]
    """By run folder, the runs that tested the choices; some may be on other machines."""
    trials: set[Path]
    """The run folders of the trials, one per seed."""
    notes: list[str]

    @property
    def entries(self) -> dict[Path, str]:
        """The entries as typed, by the resolved folder of the runs that tested them."""
        return {run.resolve(): test.entry for run, test in self.tests.items()}


class RunFolders(NamedTuple):
    """What is found among and below some folders."""

    runs: list[Path]
    sweeps: list[SweepFile]


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
    all_sweeps: dict[Path, SweepFile] = {}
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
                sweeps.append(read_sweep(Path(place)))
                places += [run for run in sweeps[-1].tests if (run / "config.json").exists()]
                folders.clear()
        if not places and sweeps:
            raise RecordError(_why_no_tested_run(sweeps[0]))
        if not places:
            raise RecordError(f"no run in {root}: a run is a folder with config.json, as tiltsam train writes it")
        if not trials:
            places = _without_trials(places) or places
        for folder in sorted(places):
            runs.setdefault(folder.resolve(), folder)
        for sweep in sorted(sweeps, key=lambda sweep: sweep.folder):
            all_sweeps.setdefault(sweep.folder.resolve(), sweep)
    return RunFolders(list(runs.values()), list(all_sweeps.values()))


def _without_trials(places: Sequence[Path]) -> list[Path]:
    """Return the runs of the settings that are not only trials of sweeps in the same ``OUT``."""
    sweeps = sweeps_of(places)
    tried = {run.resolve() for sweep in sweeps for run in sweep.trials}
    tested = {run.resolve() for sweep in sweeps for run in sweep.tests}
    folders = [place.resolve() for place in places]
    kept = {folder.parent for folder in folders if folder not in tried or folder in tested}
    return [place for place, folder in zip(places, folders, strict=True) if folder.parent in kept]


def sweeps_of(runs: Iterable[Path]) -> list[SweepFile]:
    """Return the sweeps in the ``OUT`` of some runs, without damaged ones."""
    sweeps = []
    for out in sorted({ancestor for run in runs for ancestor in run.resolve().parents[2:3]}):
        for path in sorted(out.glob("sweeps/*/sweep.json")):
            with suppress(RecordError):
                sweeps.append(read_sweep(path.parent))
    return sweeps


def save_entries(task: Path, entries: Mapping[str, str]) -> None:
    """Write the entries of a comparison to ``entries.json`` in the folder of its task, next to those of earlier ones.

    Args:
        task: The folder.
        entries: The entries as typed at the command line, by the name of the folder of their runs.
    """
    earlier = _read(task / "entries.json", _json_object, []) or {}
    write_json(task / "entries.json", {**entries, **{k: v for k, v in earlier.items() if k not in entries}})


def typed_entries(found: RunFolders) -> dict[Path, str]:
    """Return the entries of comparisons and sweeps as typed at the command line, by the resolved folder of each run."""
    typed: dict[Path, str] = {}
    for sweep in sweeps_of(found.runs):
        typed |= sweep.entries
    settings: dict[Path, list[Path]] = {}
    for run in map(Path.resolve, found.runs):
        settings.setdefault(run.parent, []).append(run)
    for task in dict.fromkeys(setting.parent for setting in settings):
        for name, entry in (_read(task / "entries.json", _json_object, []) or {}).items():
            if isinstance(entry, str):
                typed |= dict.fromkeys(settings.get(task / name, ()), entry)
    for sweep in found.sweeps:
        typed |= sweep.entries
    return typed


def read_sweep(folder: Path) -> SweepFile:
    """Read the ``sweep.json`` of a sweep.

    Raises:
        RecordError: If it is damaged.
    """
    path = folder / "sweep.json"
    try:
        content, out = json.loads(path.read_bytes()), _out(folder)
        methods = content["methods"].items()
        tests = [(name, run) for name, method in methods for run in method["test"]["runs"]]
        first = [out / trial["run"] for _, method in methods for trial in method.get("trials", ())]
        return SweepFile(
            folder,
            {out / run["run"]: SweepTestRun(name, run["seed"], run["state"]) for name, run in tests},
            {run.with_name(f"seed-{seed}") for run in first for seed in range(content.get("trial_seeds", 0))},
            list(dict.fromkeys(note for note in content.get("notes", ()) if isinstance(note, str))),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RecordError(f"{path} is not what tiltsam sweep writes") from None


def _out(sweep: Path) -> Path:
    """Return the OUT of ``OUT/sweeps/STUDY``, which may be given as ``.`` or ``../STUDY``, or as a link."""
    out = sweep / ".." / ".."
    plain = Path(os.path.normpath(out))  # shorter, but wrong if the path contains a link
    return plain if plain.samefile(out) else out.resolve()


def _why_no_tested_run(sweep: SweepFile) -> str:
    path = sweep.folder / "sweep.json"
    if not sweep.tests:
        return f"{path} has no tests, or none yet"
    missing = f"none of the runs that {path} tested is below {_out(sweep.folder)}"
    return f"{missing}: they are on another machine, or this folder was in another OUT/sweeps"
