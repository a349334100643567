"""Text files: read lines, and turn tables of sentences and labels into tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from tiltsam.lab import pretrained
from tiltsam.lab.data.dataset import Request, Split
from tiltsam.lab.errors import DataError, reading

__all__ = ["TextTable", "column_index", "read_lines", "tokenize"]

_FLOAT32_MAX = 3.4e38


@dataclass(frozen=True)
class TextTable:
    """Sentences, or pairs of sentences, and their labels."""

    path: Path
    first: list[str]
    second: list[str] | None
    """None for single sentences."""
    labels: list[str]
    first_line: int = 2
    """Line number of the first row, for error messages."""

    def __len__(self) -> int:
        return len(self.labels)

    def sources(self) -> list[str]:
        """Return the sentences as text, those of a pair next to each other."""
        return (
            self.first if self.second is None else [f"{a} | {b}" for a, b in zip(self.first, self.second, strict=True)]
        )

    def classes(self, names: Sequence[str]) -> list[int]:
        """Return the labels as indices into ``names``; raise a DataError that names the line of an unknown label."""
        numbers = {name: number for number, name in enumerate(names)}
        for row, label in enumerate(self.labels):
            if label not in numbers:
                known = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
                raise DataError(
                    f"{self.path}: row {row + self.first_line}: label must be one of {known}, got {label!r}"
                )
        return [numbers[label] for label in self.labels]

    def values(self) -> list[float]:
        """Return the labels as finite numbers; raise a DataError that names the line of any other label."""
        values = []
        for row, label in enumerate(self.labels):
            try:
                value = float(label)
            except ValueError:
                value = math.nan
            if not abs(value) <= _FLOAT32_MAX:
                raise DataError(f"{self.path}: row {row + self.first_line}: must be a finite number, got {label!r}")
            values.append(value)
        return values


def read_lines(path: Path) -> list[str]:
    r"""Return the lines of a text file without the empty lines at its end.

    Only ``\n`` and ``\r\n`` end a line: sentences may contain the other characters that Unicode counts as line ends.

    Args:
        path: A UTF-8 file, with or without a byte order mark.

    Raises:
        DataError: If the file cannot be read, or is not UTF-8.
    """
    with reading(path):
        raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8") from error
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    return lines


def column_index(path: Path, header: Sequence[str], names: Sequence[str]) -> int:
    """Return the index of the first of ``names`` that is in the header of a table; raise a DataError if none is."""
    for name in names:
        if name in header:
            return list(header).index(name)
    raise DataError(f"{path} must have a column {' or '.join(names)}, got {', '.join(header)[:200]}")


def tokenize(request: Request, tables: Sequence[TextTable], targets: Sequence[Tensor]) -> list[Split]:
    """Return one split per table, with tokens of the model's tokenizer, all padded to the same length."""
    first = [sentence for table in tables for sentence in table.first]
    second = None if tables[0].second is None else [sentence for table in tables for sentence in table.second or ()]
    tokens = pretrained.tokenize(first, second, model=request.config.model, max_length=request.config.max_length)
    pieces = {name: x.split([len(table) for table in tables]) for name, x in tokens.items()}
    return [Split({name: x[i] for name, x in pieces.items()}, y) for i, y in enumerate(targets)]
