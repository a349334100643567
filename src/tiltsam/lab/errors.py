"""What a user can put right: data that is missing, damaged or of the wrong shape, a record that cannot be used."""

from __future__ import annotations

__all__ = ["DataError", "RecordError"]


class DataError(Exception):
    """Data that cannot be used. The message is one line: which file, what is wrong with it, what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class RecordError(Exception):
    """A record that cannot be used, told in one line."""
