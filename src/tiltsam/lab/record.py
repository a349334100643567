"""A run's folder: what was asked, where it ran, how it went, and enough to go on after any interruption.

    RUN/config.json         the resolved config
    RUN/environment.json    versions, device, fingerprints of the code and of one's own data; where others of these
                            had begun the run, theirs under "before", and "since" which epoch each worked on it
    RUN/metrics.jsonl       one JSON object a line, appended, never rewritten
    RUN/checkpoints/N/      enough to go on (:mod:`tiltsam.lab.checkpoints`); the last two are kept
    RUN/model.safetensors   the trained model, once finished
    RUN/result.json         the final numbers and their digest, once finished
    RUN/diverged.txt        why training could not go on, if so
    RUN/lock                held by the process that works on it

What is written once is there whole or not at all, see :mod:`tiltsam.lab.files`.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import json
import math
import os
import platform
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

import tiltsam
from tiltsam.lab import checkpoints
from tiltsam.lab.checkpoints import Checkpoint
from tiltsam.lab.config import TrainConfig, check_types
from tiltsam.lab.errors import ConfigError, RecordError
from tiltsam.lab.files import drafted, drop_drafts, load_tensors, parse_json, save_tensors, write_json
from tiltsam.lab.provenance import code_digest

__all__ = [
    "Checkpoint",
    "Record",
    "check_result",
    "folders_of_runs",
    "is_number",
    "read_metrics",
    "task_folder",
    "tests_of_sweep",
]

LONGEST_NAME = 200  # bytes of a folder's name; file systems take 255, and a sweep adds to it
# What only the process that holds the run writes by a draft: other commands may just be writing theirs.
DRAFTED = ("config.json", "environment.json", "model.safetensors", "result.json", "diverged.txt")
LARGEST = 1e100  # of a number: the squares of larger ones overflow, and float32 ends at 3e38
ATTEMPTS = 50  # to make and lock a folder that others remove meanwhile, 10 ms apart


class Record:
    """The folder of one run.

    Args:
        folder: Where.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of(cls, out: Path, config: TrainConfig) -> Record:
        """The place of a config among others: ``OUT/TASK/METHOD-DIGEST/seed-K``."""
        return cls(out / task_folder(config.task) / config.key() / f"seed-{config.seed}")

    # ---------------------------------------------------------------- one worker at a time

    @contextmanager
    def working(self) -> Iterator[bool]:
        """Hold the run; yields whether we got it. The lock goes with the process, however it ends.

        If nothing was written meanwhile (the data is missing, say), the folder goes, too.
        """
        file = self._lock()
        if file is None:
            yield False
            return
        try:
            yield True
        finally:
            with suppress(OSError):
                if os.listdir(self.folder) == ["lock"]:
                    (self.folder / "lock").unlink()
                    for folder in (self.folder, *self.folder.parents[:2]):
                        folder.rmdir()  # fails, and ends this, where something else is in it
            file.close()

    def _lock(self) -> IO[str] | None:
        """The open lock, ours as long as it is open; None if another process has it."""
        for _ in range(ATTEMPTS):
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                file = open(self.folder / "lock", "w")  # noqa: SIM115 (whoever gets it closes it)
            except FileNotFoundError:  # another process has just removed the folder: nothing came of its run
                time.sleep(0.01)
                continue
            except OSError as error:
                raise RecordError(f"cannot write to {self.folder}: {error.strerror}") from None
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(file, self.folder / "lock"):
                    return file
            except BlockingIOError:
                file.close()
                return None
            file.close()  # it was removed between our opening and our locking it
        raise RecordError(f"cannot write to {self.folder}: {os.strerror(errno.ENOENT)}")

    def begin(self, config: TrainConfig, device: torch.device, data: str = "", epoch: float = 0) -> None:
        """Write what was asked, where it runs, and where it ran before.

        Args:
            config: What was asked.
            device: Where it runs.
            data: The fingerprint of its data, if they have one.
            epoch: Where it goes on; what had begun there or later came to nothing.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._drop_drafts()
        (self.folder / "diverged.txt").unlink(missing_ok=True)
        write_json(self.folder / "config.json", dataclasses.asdict(config))
        here = _environment(device) | ({"data": data} if data else {})
        last = self.environment()
        before = [one for one in (*last.pop("before", ()), last) if one.get("since", 0) < epoch]
        if before and here == {name: value for name, value in before[-1].items() if name != "since"}:
            epoch = before.pop().get("since", 0)
        write_json(self.folder / "environment.json", here | ({"since": epoch, "before": before} if before else {}))

    def environment(self) -> dict[str, Any]:
        """Return where it runs, or ran last; empty if nothing is known of it.

        Raises:
            RecordError: If the file is damaged.
        """
        path = self.folder / "environment.json"
        if not path.exists():
            return {}
        found = _read_json(path)
        before = found.get("before", [])
        entries = [found, *before] if isinstance(before, list) else [None]
        plain = all(isinstance(one, dict) and is_number(one.get("since", 0)) for one in entries)
        if not plain or not isinstance(found.get("data", ""), str):
            raise RecordError(f"{path} is damaged: remove it to go on")
        return found

    def check_data(self, fingerprint: str) -> None:
        """Raise if the run began with other data.

        Args:
            fingerprint: Of the data as they are; one that is empty, here or in the record, tells nothing.

        Raises:
            RecordError: If they differ.
        """
        begun = self.environment().get("data")
        if fingerprint and begun and begun != fingerprint:
            raise RecordError(f"the data of {self.folder} have changed since this run began: use another --out")

    # ---------------------------------------------------------------- metrics and result

    def log(self, **numbers: Any) -> None:
        """Append a line; one write, so that a kill leaves it whole or leaves a tail that readers pass over."""
        path = self.folder / "metrics.jsonl"
        line = (json.dumps(numbers) + "\n").encode()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            if _ends_in_half_a_line(path):
                line = b"\n" + line
            if os.write(descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        finally:
            os.close(descriptor)

    def metrics(self) -> tuple[list[dict[str, Any]], list[int]]:
        """The lines that count, by epoch, and the numbers (from 1) of lines that cannot be read."""
        rows, damaged = read_metrics(self.folder / "metrics.jsonl")
        return rows, list(damaged)

    def finish(self, model: dict[str, Tensor], **numbers: Any) -> None:
        """The trained model, then the final numbers: a run with a result is finished."""
        save_tensors(self.folder / "model.safetensors", model)
        write_json(self.folder / "result.json", numbers | {"digest": _digest(numbers)})
        self.tidy()

    def tidy(self) -> None:
        """Remove what a finished run needs no more, and what a process was writing that was killed."""
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        self._drop_drafts()

    def _drop_drafts(self) -> None:
        for name in DRAFTED:
            drop_drafts(self.folder / name)

    def diverge(self, reason: str) -> None:
        """Training cannot go on: whoever looks at the run is told so, until it is begun again."""
        with drafted(self.folder / "diverged.txt") as draft:
            draft.write_text(reason + "\n")

    def diverged(self) -> bool:
        """Whether training could not go on."""
        return (self.folder / "diverged.txt").exists()

    def result(self) -> dict[str, Any] | None:
        """Return the final numbers, or ``None`` while there are none.

        Raises:
            RecordError: If the file is damaged.
        """
        path = self.folder / "result.json"
        if not path.exists():
            return None
        try:
            return check_result(_read_json(path))
        except (ValueError, RecordError):
            raise RecordError(f"{path} is damaged: remove it to train again") from None

    def config(self) -> TrainConfig:
        """Return what was asked.

        Raises:
            RecordError: If there is no config, or it is damaged.
        """
        path = self.folder / "config.json"
        if not path.exists():
            raise RecordError(f"{self.folder} is no run: there is no config.json")
        found = _read_json(path)
        try:
            check_types(found)
            return TrainConfig(**found)
        except (ConfigError, TypeError) as error:
            raise RecordError(f"{path} is damaged: {error}") from None

    def model(self) -> dict[str, Tensor]:
        """The trained model, or the newest checkpoint's, averaged if it is to be, where training has not finished."""
        path = self.folder / "model.safetensors"
        if path.exists():
            return load_tensors(path)
        checkpoint = self.load()
        if checkpoint is None:
            raise RecordError(f"{self.folder} holds no model yet")
        return {**checkpoint.model, **checkpoint.average}

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint."""
        checkpoints.save(self.folder / "checkpoints", checkpoint)

    def load(self) -> Checkpoint | None:
        """The newest checkpoint that is whole, or ``None``."""
        return checkpoints.load(self.folder / "checkpoints")


def check_result(found: dict[str, Any]) -> dict[str, Any]:
    """Return the final numbers without their digest, which records of earlier versions do not have.

    Raises:
        ValueError: If they are not what :meth:`Record.finish` writes.
    """
    numbers = {name: value for name, value in found.items() if name != "digest"}
    if "digest" in found and found["digest"] != _digest(numbers):
        raise ValueError("does not match its digest")
    for name, value in numbers.items():
        if not (isinstance(value, str) if name == "metric" else isinstance(value, bool) or is_number(value)):
            raise ValueError(f"{name!r} is {type(value).__name__}")
    if missing := {"metric", "score", "epoch", "passes", "seconds"} - numbers.keys():
        raise ValueError(f"{min(missing)!r} is missing")
    return numbers


def _digest(numbers: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object, or raise a RecordError that names the file."""
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise RecordError(f"{path} is damaged: not a JSON object")
    return found


def task_folder(task: str) -> str:
    """The name of a task as that of a folder: of a long path its end, and a digest that tells it from others."""
    name = task.replace("/", "-").replace(":", "-").strip("-.")
    raw = os.fsencode(name)
    if len(raw) <= LONGEST_NAME:
        return name
    end = raw[-LONGEST_NAME // 2 :].decode("utf-8", "ignore").strip("-.")
    return f"{end}-{hashlib.sha256(raw).hexdigest()[:10]}"


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """The lines of a ``metrics.jsonl`` that count, and what is wrong with those that cannot be read.

    An epoch that is written again was begun again, from a checkpoint: what had been written of it and of later ones is
    of an attempt that came to nothing.

    Args:
        path: The file; nothing is in one that is not there.

    Returns:
        Lines, their epochs rising; and by number, from 1, why a line was left out.
    """
    rows: list[dict[str, Any]] = []
    damaged: dict[int, str] = {}
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for number, line in enumerate(lines, 1):
        if not line.strip() and number == len(lines):
            continue
        try:
            row = _metrics_line(line)
        except ValueError as error:
            # JSON counts lines of its own, which would mislead here.
            what = f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
            damaged[number] = str(what)
            continue
        while rows and rows[-1]["epoch"] >= row["epoch"]:
            rows.pop()
        rows.append(row)
    return rows, damaged


def _metrics_line(line: bytes) -> dict[str, Any]:
    row = parse_json(line)
    if not isinstance(row, dict) or not is_number(row.get("epoch")) or not math.isfinite(row["epoch"]):
        raise ValueError("not an object with the number of its epoch")
    for name, value in row.items():
        if value is not None and not is_number(value):
            raise ValueError(f"{name!r} is not a number")
    return row


def is_number(x: Any) -> bool:
    """Return whether something read from JSON is a number that arithmetic can be done with, or NaN or infinite."""
    if isinstance(x, float):
        return abs(x) < LARGEST or not math.isfinite(x)
    return isinstance(x, int) and not isinstance(x, bool) and abs(x) < 2**63


def folders_of_runs(roots: Iterable[Path]) -> list[Path]:
    """The folders that hold runs: those given, or all below them, each once.

    Runs may be in progress, and their drafts come and go. The folder of a sweep stands for the runs that its choices
    were tested with.

    Raises:
        RecordError: If there is none in one of the folders.
    """
    found: dict[Path, Path] = {}
    for root in roots:
        places, sweeps, seen = [], [], set()
        for place, folders, files in os.walk(root, followlinks=True):  # passes over what vanishes
            if (real := os.path.realpath(place)) in seen:  # a link may lead round
                folders.clear()
                continue
            seen.add(real)
            if "config.json" in files:
                places.append(Path(place))
                folders.clear()
            elif "sweep.json" in files:
                sweeps.append(Path(place))
                places += [run for run in tests_of_sweep(Path(place)) if (run / "config.json").exists()]
                folders.clear()
        if not places and sweeps:
            raise RecordError(_why_no_test(sweeps[0]))
        if not places:
            raise RecordError(f"no run in {root}: a run is a folder with config.json, as tiltsam train writes it")
        for folder in sorted(places):
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def tests_of_sweep(folder: Path) -> dict[Path, tuple[str, str]]:
    """The runs that a sweep tested, some maybe on other machines: of each its row and seed in words, and its state."""
    path = folder / "sweep.json"
    try:
        methods = parse_json(path.read_text())["methods"].items()
        tests = [(name, run) for name, method in methods for run in method["test"]["runs"]]
        return {_out(folder) / run["run"]: (f"{name}, seed {run['seed']}", run["state"]) for name, run in tests}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RecordError(f"{path} is not what tiltsam sweep writes") from None


def _out(sweep: Path) -> Path:
    """The OUT of ``OUT/sweeps/STUDY``, which may be given as ``.`` or ``../STUDY``, or by a link to it."""
    out = sweep / ".." / ".."
    plain = Path(os.path.normpath(out))  # as a reader wants it, if no link makes it another folder
    return plain if plain.samefile(out) else out.resolve()


def _why_no_test(sweep: Path) -> str:
    if not tests_of_sweep(sweep):
        return f"{sweep / 'sweep.json'} has no tests, or none yet"
    told = f"none of the runs that {sweep / 'sweep.json'} tested is below {_out(sweep)}"
    return f"{told}: they are on another machine, or this folder was in another OUT/sweeps"


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether an open file is the one that has that name now."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _ends_in_half_a_line(path: Path) -> bool:
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _environment(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tiltsam": tiltsam.__version__,
        "code": code_digest(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": str(device),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found
