"""Atomic writing of files: after a kill or concurrent writes a file is complete or absent."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from tiltsam.lab.errors import RecordError

__all__ = ["drafted", "drop_drafts", "load_tensors", "parse_json", "save_tensors", "write_json"]


@contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to a file; rename it to the file at the end, or remove it after an error."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        draft.rename(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def drop_drafts(path: Path) -> None:
    """Remove the drafts of a file that killed processes left; no process may be writing it now."""
    for draft in path.parent.glob(f".{path.name}.*"):
        draft.unlink(missing_ok=True)


def write_json(path: Path, content: Any, *, allow_nan: bool = True) -> None:
    """Write JSON atomically and sync it to the disk.

    Raises:
        ValueError: If ``allow_nan`` is false and the content has NaN or an infinite number.
    """
    text = json.dumps(content, indent=1, allow_nan=allow_nan) + "\n"
    with drafted(path) as draft, open(draft, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: If it is not JSON, is nested too deeply, or has an integer of more than 64 bits.
    """
    try:
        return json.loads(text, parse_int=_int64)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _int64(digits: str) -> int:
    number = int(digits)
    if abs(number) >= 2**63:
        raise ValueError(f"a number of {len(digits)} digits is out of range")
    return number


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
