"""Errors that the user can fix. The command line prints their message as one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["DataError", "RecipeError", "RecordError", "reading"]


class DataError(Exception):
    """Data that is missing, damaged or of the wrong shape. The message is one line that names the file."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class RecordError(Exception):
    """A run folder that cannot be used. The message is one line."""


class RecipeError(Exception):
    """A recipe that does not exist, or cannot be run as requested. The message is one line."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise a :class:`DataError` that names the file if the file system refuses to read it."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing") from error
    except OSError as error:
        if error.errno is None:  # raised by a decoder, not by the file system
            raise
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
