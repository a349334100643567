"""Checkpoints: all that a run needs to go on, in a folder each.

    N/model.safetensors       the weights and buffers after epoch N, or later if a signal stopped the run in the next
    N/optimizer.safetensors   the tensors of the optimizer's state, averaged weights, states of the random generators
    N/state.json              the rest
    N/manifest.json           the digests of these files

A checkpoint is written beside its place and renamed into it, so it is there whole or not at all; one that does not
match its manifest is passed over for the one before, with a warning.
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
    """All that a run needs to go on."""

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    state: dict[str, Any]
    """Numbers: epoch, passes, seconds, best so far; losses and effective sample sizes of an epoch that was cut off."""
    random: dict[str, Tensor]
    """States of the global generators."""
    average: dict[str, Tensor] = field(default_factory=dict)
    """The averaged weights, of a run that has some, and the buffers that they were last tested with."""


def seconds_between() -> float:
    """The time between checkpoints: the environment variable TILTSAM_CHECKPOINT_SECONDS, or 20."""
    given = os.environ.get("TILTSAM_CHECKPOINT_SECONDS", "20")
    try:
        return float(given)
    except ValueError:
        raise ConfigError(f"TILTSAM_CHECKPOINT_SECONDS is a number of seconds, got {given!r}") from None


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint whole, then drop all but the last two; what a killed process was writing goes first."""
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
    """The newest checkpoint that is whole, or ``None``; the caller's caller is warned of those that are not."""
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
                f"checkpoint {place} is damaged ({error}): going back to the one before",
                RuntimeWarning,
                stacklevel=3,
            )
    return None


def _check_state(state: dict[str, Any]) -> None:
    """Raise unless a run can go on from it; a KeyError names what is missing."""
    best = [state["best"][name] for name in state["best"]]
    losses, sizes = state.get("losses", []), state.get("sizes", [])
    if len(losses) != len(sizes):
        raise ValueError(f"state.json holds {len(losses)} losses and {len(sizes)} sizes")
    numbers = [state[name] for name in ("epoch", "passes", "seconds", "steps", "done")]
    for value in [*numbers, *best, *losses, *sizes]:
        if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) >= 2**63:
            raise ValueError(f"state.json holds {value!r} for a number")
    if not (0 <= state["done"] < 1 and state["epoch"] >= 0 and state["steps"] >= 0):
        raise ValueError(f"state.json is of a run that is done or has not begun: {state['done']!r}")


def _places(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.name.isdigit()) if folder.exists() else []


def _split_optimizer(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state as tensors by name, and the rest as JSON can hold it."""
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
