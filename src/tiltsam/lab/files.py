"""Files that survive a kill: each is written atomically, so it is complete or absent. Checkpoints are folders of them.

    N/model.safetensors       the weights and buffers after epoch N, or within the next if a signal stopped the run
    N/optimizer.safetensors   the tensors of the optimizer's state, averaged weights, states of the random generators
    N/state.json              the rest
    N/manifest.json           the digests of these files

A checkpoint is written to a temporary folder, which is then renamed. One that does not match its manifest is skipped
with a warning.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from tiltsam.lab.errors import ConfigError, RecordError

__all__ = [
    "Checkpoint",
    "drafted",
    "file_digest",
    "finite_json",
    "is_number",
    "json_digest",
    "load_checkpoint",
    "load_tensors",
    "save_checkpoint",
    "save_tensors",
    "seconds_between_checkpoints",
    "write_json",
]

KEPT_CHECKPOINTS = 2
LARGEST = 1e100  # accepted number: the squares of larger ones overflow, and float32 ends at 3e38


@contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to a file; rename it to the file at the end, or remove it after an error.

    An OSError of the temporary file names the file.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        draft.rename(path)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is not None and Path(error.filename) == draft:
            error.filename = str(path)
        raise


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically and sync it to the disk."""
    text = json.dumps(content, indent=1) + "\n"
    with drafted(path) as draft, open(draft, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def finite_json(content: Any) -> Any:
    """Return the content with lists for tensors, and null for numbers that are not finite, which JSON lacks."""
    if isinstance(content, Tensor):
        content = content.tolist()
    if isinstance(content, dict):
        return {key: finite_json(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite_json(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def is_number(x: Any) -> bool:
    """Return whether a value read from JSON is a number within the accepted range, NaN or infinite."""
    if isinstance(x, float):
        return abs(x) < LARGEST or not math.isfinite(x)
    return isinstance(x, int) and not isinstance(x, bool) and abs(x) < 2**63


def json_digest(content: Any) -> str:
    """Return the SHA-256 of content as JSON, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors by name to a safetensors file.

    Raises:
        RecordError: If they cannot be written, for example because the disk is full.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        with drafted(path) as draft:
            save_file({k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}, draft)
    except SafetensorError as error:
        raise RecordError(f"cannot write {path}: {error}") from None


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read tensors by name from a safetensors file.

    Raises:
        ValueError: If the file is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path.name}: {error}") from None


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run."""

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    state: dict[str, Any]
    """Epoch, passes, seconds, best row so far; the numbers of each step of an interrupted epoch."""
    random: dict[str, Tensor]
    """States of torch's global generators."""
    average: dict[str, Tensor] = field(default_factory=dict)
    """The averaged weights, if any, and the buffers of their last evaluation."""


def seconds_between_checkpoints() -> float:
    """Return the seconds between checkpoints: the environment variable TILTSAM_CHECKPOINT_SECONDS, or 20."""
    given = os.environ.get("TILTSAM_CHECKPOINT_SECONDS", "20")
    try:
        return float(given)
    except ValueError:
        raise ConfigError(f"TILTSAM_CHECKPOINT_SECONDS must be a number, got {given!r}") from None


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Remove partial checkpoints of killed processes, write a checkpoint, and remove all but the last two."""
    place = folder / f"{checkpoint.state['epoch']:06d}"
    draft = folder / f".{place.name}.{os.getpid()}"
    for half in folder.glob(".*"):
        shutil.rmtree(half, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        tensors, rest = _split_optimizer(checkpoint.optimizer)
        save_tensors(draft / "model.safetensors", checkpoint.model)
        more = _prefixed("random.", checkpoint.random) | _prefixed("average.", checkpoint.average)
        save_tensors(draft / "optimizer.safetensors", tensors | more)
        write_json(draft / "state.json", {"optimizer": rest, "state": checkpoint.state})
        write_json(draft / "manifest.json", {p.name: file_digest(p) for p in sorted(draft.iterdir())})
        shutil.rmtree(place, ignore_errors=True)
        draft.rename(place)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    for old in _checkpoint_folders(folder)[:-KEPT_CHECKPOINTS]:
        shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest valid checkpoint, or ``None``; warn of damaged ones."""
    places = _checkpoint_folders(folder)
    for place in reversed(places):
        try:
            manifest = json.loads((place / "manifest.json").read_text())
            for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
                if manifest[name] != file_digest(place / name):
                    raise ValueError(f"{name} does not match its digest")
            body = json.loads((place / "state.json").read_text())
            tensors = load_tensors(place / "optimizer.safetensors")
            return Checkpoint(
                load_tensors(place / "model.safetensors"),
                _join_optimizer(tensors, body["optimizer"]),
                body["state"],
                _with_prefix("random.", tensors),
                _with_prefix("average.", tensors),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            warnings.warn(
                f"checkpoint {place} is damaged and skipped ({error})",
                RuntimeWarning,
                stacklevel=3,
            )
    if places:
        warnings.warn(
            f"{folder} has no valid checkpoint: training starts from the beginning", RuntimeWarning, stacklevel=3
        )
    return None


def _checkpoint_folders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.name.isdigit()) if folder.exists() else []


def _split_optimizer(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split an optimizer's state into tensors by name and a JSON object."""
    tensors: dict[str, Tensor] = {}
    rest: dict[str, dict[str, Any]] = {}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"state.{index}.{name}"] = value
            else:
                rest.setdefault(str(index), {})[name] = value
    groups = [{k: v.item() if isinstance(v, Tensor) else v for k, v in g.items()} for g in state["param_groups"]]
    return tensors, {"state": rest, "param_groups": groups}


def _join_optimizer(tensors: dict[str, Tensor], rest: dict[str, Any]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {int(k): dict(v) for k, v in rest["state"].items()}
    for key, value in tensors.items():
        if key.startswith("state."):
            _, index, name = key.split(".", 2)
            state.setdefault(int(index), {})[name] = value
    groups = [{k: tuple(v) if k == "betas" else v for k, v in g.items()} for g in rest["param_groups"]]
    return {"state": state, "param_groups": groups}


def _prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": value for name, value in tensors.items()}


def _with_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
