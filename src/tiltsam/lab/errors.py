"""Mistakes that a user can correct: missing or damaged data, an unusable record, an unknown recipe."""

from __future__ import annotations

__all__ = ["DataError", "RecipeError", "RecordError"]


class DataError(Exception):
    """Data that cannot be used. The message is one line: which file, what is wrong with it, what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class RecordError(Exception):
    """A record that cannot be used. The message is one line."""


class RecipeError(Exception):
    """A recipe that does not exist, or cannot be run as requested. The message is one line."""
