"""Files that are there whole or not at all, whoever is killed meanwhile and however many write at once."""

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
    """A place beside a file to write it to: it takes the file's name once it is whole, and goes if that fails."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        draft.rename(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def drop_drafts(path: Path) -> None:
    """Remove what processes that were killed have left of writing a file; nobody may be writing it now."""
    for draft in path.parent.glob(f".{path.name}.*"):
        draft.unlink(missing_ok=True)


def write_json(path: Path, content: Any, *, allow_nan: bool = True) -> None:
    """Write something as JSON, to the disk itself.

    Raises:
        ValueError: If it holds a number that is none, or an infinite one, which other readers of JSON may not take, and
            ``allow_nan`` is false.
    """
    text = json.dumps(content, indent=1, allow_nan=allow_nan) + "\n"
    with drafted(path) as draft, open(draft, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def parse_json(text: str | bytes) -> Any:
    """Return what a JSON text holds.

    Raises:
        ValueError: If it is no JSON, is nested too deeply, or holds an integer of more than 64 bits, which Python takes
            and no float holds.
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
    """Write tensors by name.

    Raises:
        RecordError: If there is no room for them.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        with drafted(path) as draft:
            save_file({k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}, draft)
    except SafetensorError as error:  # a full disk, for example
        raise RecordError(f"cannot write {path}: {error}") from None


def load_tensors(path: Path) -> dict[str, Tensor]:
    """What :func:`save_tensors` wrote.

    Raises:
        ValueError: If the file is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path.name}: {error}") from None
