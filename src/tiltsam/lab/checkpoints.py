"""Checkpoints of a run, each in a folder.

    N/model.safetensors       the weights and buffers after epoch N, or within the next if a signal stopped the run
    N/optimizer.safetensors   the tensors of the optimizer's state, averaged weights, states of the random generators
    N/state.json              the rest
    N/manifest.json           the digests of these files

A checkpoint is written to a temporary folder, which is then renamed, so it is complete or absent. One that does not
match its manifest is skipped with a warning, and the one before is used.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from tiltsam.lab.errors import ConfigError
from tiltsam.lab.files import load_tensors, parse_json, save_tensors, write_json

__all__ = ["Checkpoint", "load", "save", "seconds_between"]

KEEP = 2


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


def seconds_between() -> float:
    """Return the seconds between checkpoints: the environment variable TILTSAM_CHECKPOINT_SECONDS, or 20."""
    given = os.environ.get("TILTSAM_CHECKPOINT_SECONDS", "20")
    try:
        return float(given)
    except ValueError:
        raise ConfigError(f"TILTSAM_CHECKPOINT_SECONDS must be a number, got {given!r}") from None


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Remove partial checkpoints of killed processes, write a checkpoint, and remove all but the last two."""
    place = folder / f"{checkpoint.state['epoch']:06d}"
    draft = folder / f".{place.name}.{os.getpid()}"
    for half in folder.glob(".*"):
        shutil.rmtree(half, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        tensors, rest = _split_optimizer(checkpoint.optimizer)
        save_tensors(draft / "model.safetensors", checkpoint.model)
        beside = _prefixed("random.", checkpoint.random) | _prefixed("average.", checkpoint.average)
        save_tensors(draft / "optimizer.safetensors", tensors | beside)
        write_json(draft / "state.json", {"optimizer": rest, "state": checkpoint.state})
        write_json(draft / "manifest.json", {p.name: _digest(p) for p in sorted(draft.iterdir())})
        shutil.rmtree(place, ignore_errors=True)
        draft.rename(place)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    for old in _places(folder)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)


def load(folder: Path) -> Checkpoint | None:
    """Return the newest valid checkpoint, or ``None``; warn of damaged ones."""
    for place in reversed(_places(folder)):
        try:
            manifest = parse_json((place / "manifest.json").read_text())
            for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
                if manifest[name] != _digest(place / name):
                    raise ValueError(f"{name} does not match its digest")
            body = parse_json((place / "state.json").read_text())
            _check_state(body["state"])
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
                f"checkpoint {place} is damaged ({error}): using the one before",
                RuntimeWarning,
                stacklevel=3,
            )
    return None


def _check_state(state: dict[str, Any]) -> None:
    """Raise if a run cannot be resumed from a state; a KeyError names a missing entry."""
    best = [state["best"][name] for name in state["best"]]
    series = state.get("interrupted_epoch", {})
    if len({len(values) for values in series.values() if values}) > 1:
        raise ValueError(f"the series of state.json must have one length, got {list(map(len, series.values()))}")
    numbers = [state[name] for name in ("epoch", "passes", "seconds", "steps", "done")]
    for value in [*numbers, *best, *(value for values in series.values() for value in values)]:
        if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) >= 2**63:
            raise ValueError(f"state.json has {value!r} instead of a number")
    if not (0 <= state["done"] < 1 and state["epoch"] >= 0 and state["steps"] >= 0):
        raise ValueError(f"done in state.json must be in [0, 1), got {state['done']!r}")


def _places(folder: Path) -> list[Path]:
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


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
