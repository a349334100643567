"""Errors that the user can fix. The command line prints their message as one line and exits with code 2."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "ConfigError",
    "DataError",
    "Diverged",
    "Interrupted",
    "LabError",
    "RecordError",
    "TrainError",
    "UserError",
    "find_cause",
    "first_line",
    "reading",
]


class LabError(Exception):
    """Base class of the errors that the user can fix.

    Args:
        message: What is wrong. Line breaks become spaces.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class UserError(LabError):
    """Invalid use of a command, or a package that it needs and that is not installed."""


class ConfigError(LabError):
    """A setting that is out of bounds or does not go with the others."""


class DataError(LabError):
    """Data that is missing, damaged or of the wrong shape. The message names the file."""


class RecordError(LabError):
    """A run folder that cannot be used."""


class TrainError(LabError):
    """Training that cannot continue."""


class Diverged(TrainError):
    """Training with a loss that is not finite."""


class Interrupted(KeyboardInterrupt):
    """Training that a signal ended. Not a :class:`LabError`: it is caught as a KeyboardInterrupt.

    Args:
        message: What is saved.
        number: The signal.
    """

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.number = number


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def find_cause(error: BaseException | None, *kinds: type[BaseException]) -> BaseException | None:
    """Return the first exception of the given types in a chain: the error itself, or one that it was raised from."""
    while error is not None and not isinstance(error, kinds):
        error = error.__cause__ or error.__context__
    return error


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
