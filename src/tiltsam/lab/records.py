"""The folder of a run: its config, environment, metrics and result, and checkpoints to resume from.

    RUN/config.json         the resolved config
    RUN/setup.json          numbers of examples and classes, label noise, model
    RUN/environment.json    versions, device, fingerprints of the code and of user data
    RUN/metrics.jsonl       one JSON object per line, appended, never rewritten
    RUN/checkpoints/N/      the last two checkpoints (:mod:`tiltsam.lab.files`)
    RUN/model.safetensors   the trained model, once finished
    RUN/suspects.csv        training examples that a negative tilt over examples silences, once finished
    RUN/result.json         the final numbers and their digest, once finished
    RUN/diverged.txt        why training diverged, if it did
    RUN/lock                locked by the process that trains the run

Files that are written once are written atomically, see :mod:`tiltsam.lab.files`.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from tiltsam.lab.config import DATA_FIELDS, TrainConfig
from tiltsam.lab.devices import describe_environment
from tiltsam.lab.errors import ConfigError, RecordError
from tiltsam.lab.files import (
    Checkpoint,
    drafted,
    is_number,
    json_digest,
    load_checkpoint,
    load_tensors,
    save_checkpoint,
    save_tensors,
    write_json,
)

__all__ = [
    "Record",
    "check_result",
    "read_metrics",
    "task_folder",
]

LONGEST_NAME = 200  # bytes of a folder's name; file systems allow 255, and a sweep appends to it
# Files that only the process that holds the lock writes: drafts of others may belong to running commands.
DRAFTED = (
    "config.json",
    "setup.json",
    "environment.json",
    "model.safetensors",
    "suspects.csv",
    "result.json",
    "diverged.txt",
)
ATTEMPTS = 50  # to create and lock a folder that other processes remove meanwhile, 10 ms apart


@dataclass(frozen=True)
class Record:
    """The folder of one run."""

    folder: Path

    @classmethod
    def of(cls, out: Path, config: TrainConfig) -> Record:
        """Return the record of a config: ``OUT/TASK/METHOD-DIGEST/seed-K``."""
        return cls(out / task_folder(config.task) / config.key() / f"seed-{config.seed}")

    # ---------------------------------------------------------------- one worker at a time

    @contextmanager
    def lock(self) -> Iterator[bool]:
        """Lock the run for this process; yields whether that succeeded. The lock ends with the process in any case.

        If nothing was written meanwhile (for example because the data is missing), the folder is removed.
        """
        lock = self._acquire()
        if lock is None:
            yield False
            return
        try:
            yield True
        finally:
            with suppress(OSError):
                if os.listdir(self.folder) == ["lock"]:
                    (self.folder / "lock").unlink()
                    for folder in (self.folder, *self.folder.parents[:2]):
                        folder.rmdir()  # raises, and stops here, if the folder is not empty
            lock.release()

    def _acquire(self) -> FileLock | None:
        """Return the acquired lock; None if another process holds it."""
        path = self.folder / "lock"
        for _ in range(ATTEMPTS):
            lock = FileLock(path, timeout=0, thread_local=False)
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                lock.acquire()
                return lock
            except Timeout:
                if path.exists():
                    return None
            except FileNotFoundError:
                pass
            except OSError as error:
                raise RecordError(f"cannot write to {self.folder}: {error.strerror}") from None
            time.sleep(0.01)  # another process has just removed the folder, because its run wrote nothing
        raise RecordError(f"cannot write to {self.folder}: {os.strerror(errno.ENOENT)}")

    def begin(self, config: TrainConfig, device: torch.device, data: str = "") -> None:
        """Write the config, and the environment with the fingerprint of the data if there is one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._drop_drafts()
        (self.folder / "diverged.txt").unlink(missing_ok=True)
        write_json(self.folder / "config.json", config.to_json())
        environment = describe_environment(device) | ({"data": data} if data else {})
        write_json(self.folder / "environment.json", environment)

    def setup(self) -> dict[str, Any]:
        """Return the content of ``setup.json``; empty if the file is missing or damaged."""
        try:
            return _read_json(self.folder / "setup.json")
        except RecordError:
            return {}

    def environment(self) -> dict[str, Any]:
        """Return the environment that the run was last started in; empty if there is none.

        Raises:
            RecordError: If the file is damaged.
        """
        path = self.folder / "environment.json"
        return _read_json(path) if path.exists() else {}

    def check_data(self, fingerprint: str) -> None:
        """Raise a RecordError if the run was started with other data; an empty fingerprint is not compared."""
        begun = self.environment().get("data")
        if fingerprint and begun and begun != fingerprint:
            raise RecordError(f"the data of {self.folder} changed since this run was started: pass another --out")

    # ---------------------------------------------------------------- metrics and result

    def log(self, **numbers: Any) -> None:
        """Append a line in one write: after a kill it is complete, or a partial line that readers skip."""
        path = self.folder / "metrics.jsonl"
        line = (json.dumps(numbers) + "\n").encode()
        with open(path, "ab+", buffering=0) as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a partial line
                    line = b"\n" + line
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def metrics(self) -> list[dict[str, Any]]:
        """Return the valid lines, by epoch; see :func:`read_metrics`."""
        return read_metrics(self.folder / "metrics.jsonl")[0]

    def write_suspects(self, table: Sequence[Sequence[str]]) -> None:
        """Write ``suspects.csv``, before :meth:`finish`."""
        with drafted(self.folder / "suspects.csv") as draft, open(draft, "w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(table)

    def num_suspects(self) -> int:
        """Return how many examples ``suspects.csv`` lists; 0 if there is no such file."""
        count = (self.result() or {}).get("num_suspects", 0)
        return int(count) if (self.folder / "suspects.csv").exists() else 0

    def finish(self, model: dict[str, Tensor], **numbers: Any) -> None:
        """Write the trained model, then the result: a run with a result is finished."""
        save_tensors(self.folder / "model.safetensors", model)
        write_json(self.folder / "result.json", numbers | {"digest": json_digest(numbers)})
        self.remove_leftovers()

    def remove_leftovers(self) -> None:
        """Remove the checkpoints of a finished run, and drafts left by a killed process."""
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        self._drop_drafts()

    def _drop_drafts(self) -> None:
        for name in DRAFTED:
            for draft in self.folder.glob(f".{name}.*"):
                draft.unlink(missing_ok=True)

    def mark_diverged(self, reason: str) -> None:
        """Mark the run as diverged, until it is started again."""
        with drafted(self.folder / "diverged.txt") as draft:
            draft.write_text(reason + "\n")

    def diverged(self) -> str:
        """Return why the run diverged; empty if it is not marked as diverged."""
        path = self.folder / "diverged.txt"
        return path.read_text().strip() if path.exists() else ""

    def result(self) -> dict[str, Any] | None:
        """Return the result, or ``None`` if the run has not finished.

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
        """Return the config.

        Raises:
            RecordError: If there is no config, or it is damaged.
        """
        return self._make_config(self.settings())

    def settings(self) -> dict[str, Any]:
        """Return the settings in ``config.json``, unchecked.

        Raises:
            RecordError: If there is no config, or it is damaged.
        """
        path = self.folder / "config.json"
        if not path.exists():
            raise RecordError(f"{self.folder} is not a run: config.json is missing")
        return _read_json(path)

    def data_config(self) -> TrainConfig:
        """Return the settings of data and model alone: reading them needs no method of the user's.

        Raises:
            RecordError: If there is no config, or it is damaged.
        """
        settings = self.settings()
        return self._make_config({name: settings[name] for name in ("model", *DATA_FIELDS) if name in settings})

    def _make_config(self, settings: dict[str, Any]) -> TrainConfig:
        try:
            return TrainConfig(**settings)
        except (ConfigError, TypeError) as error:
            raise RecordError(f"{self.folder / 'config.json'} is damaged: {error}") from None

    def model(self) -> dict[str, Tensor]:
        """Return the trained model, or that of the newest checkpoint if training has not finished."""
        path = self.folder / "model.safetensors"
        if path.exists():
            return load_tensors(path)
        checkpoint = self.load()
        if checkpoint is None:
            raise RecordError(f"{self.folder} has no model and no checkpoint")
        return {**checkpoint.model, **checkpoint.average}

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint."""
        save_checkpoint(self.folder / "checkpoints", checkpoint)

    def load(self) -> Checkpoint | None:
        """Return the newest valid checkpoint, or ``None``."""
        return load_checkpoint(self.folder / "checkpoints")


def check_result(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result without its digest, which records of earlier versions lack.

    Raises:
        ValueError: If :meth:`Record.finish` did not write it.
    """
    numbers = {name: value for name, value in result.items() if name != "digest"}
    if "digest" in result and result["digest"] != json_digest(numbers):
        raise ValueError("does not match its digest")
    for name, value in numbers.items():
        if isinstance(value, list):
            fits = all(x is None or is_number(x) for x in value)
        else:
            fits = isinstance(value, str) if name == "metric" else isinstance(value, bool) or is_number(value)
        if not fits:
            raise ValueError(f"{name!r} is {type(value).__name__}")
    if missing := {"metric", "score", "epoch", "passes", "seconds"} - numbers.keys():
        raise ValueError(f"{min(missing)!r} is missing")
    return numbers


def _read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object, or raise a RecordError that names the file."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict):
        raise RecordError(f"{path} is damaged: not a JSON object")
    return content


def task_folder(task: str) -> str:
    """Return the folder name of a task: of a long path its end and a digest."""
    name = task.replace("/", "-").replace(":", "-").strip("-.")
    raw = os.fsencode(name)
    if len(raw) <= LONGEST_NAME:
        return name
    end = raw[-LONGEST_NAME // 2 :].decode("utf-8", "ignore").strip("-.")
    return f"{end}-{hashlib.sha256(raw).hexdigest()[:10]}"


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Read a ``metrics.jsonl``.

    An epoch that occurs again was trained again, from a checkpoint: earlier lines of it and of later epochs are
    dropped. A missing file is read as empty.

    Returns:
        The valid lines, their epochs rising; and the errors of the others, by line number from 1.
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
            # The line number in JSON's own message is always 1.
            what = f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
            damaged[number] = str(what)
            continue
        while rows and rows[-1]["epoch"] >= row["epoch"]:
            rows.pop()
        rows.append(row)
    return rows, damaged


def _metrics_line(line: bytes) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict) or not is_number(row.get("epoch")) or not math.isfinite(row["epoch"]):
        raise ValueError("not an object with a finite epoch")
    for name, value in row.items():
        if value is not None and not is_number(value):
            raise ValueError(f"{name!r} is not a number")
    return row
