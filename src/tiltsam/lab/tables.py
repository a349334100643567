"""Reading sentences and labels from tables: GLUE's files as published, and one's own CSV or TSV."""

from __future__ import annotations

import csv
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tiltsam.lab.errors import DataError
from tiltsam.lab.readers import read_lines

__all__ = ["GLUE", "Glue", "Table", "read_glue", "read_table", "split_mrpc"]

LARGEST = 3.4e38  # what float32 holds


@dataclass(frozen=True)
class Table:
    """Sentences and their labels, as text."""

    path: Path
    first: list[str]
    second: list[str] | None
    """None where examples are single sentences."""
    labels: list[str]
    first_line: int = 2
    """Line of the file that the first row is on, for messages."""

    def __len__(self) -> int:
        return len(self.labels)

    def classes(self, names: Sequence[str]) -> list[int]:
        """The labels as numbers of ``names``; a label that is not among them is an error that names its line."""
        numbers = {name: number for number, name in enumerate(names)}
        for row, label in enumerate(self.labels):
            if label not in numbers:
                shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
                raise DataError(f"{self.path}, line {row + self.first_line}: label {label!r} is none of {shown}")
        return [numbers[label] for label in self.labels]

    def values(self) -> list[float]:
        """The labels as finite numbers; one that is none is an error that names its line."""
        values = []
        for row, label in enumerate(self.labels):
            try:
                value = float(label)
            except ValueError:
                value = math.nan
            if not abs(value) <= LARGEST:
                raise DataError(f"{self.path}, line {row + self.first_line}: {label!r} is no finite number")
            values.append(value)
        return values


@dataclass(frozen=True)
class Glue:
    """One task of GLUE: where its columns are and what it is measured by."""

    folder: str
    """As in the published archive."""
    first: tuple[str, ...]
    """Names the column of the first sentence has: as published, then as in the ``glue`` data set of the hub."""
    second: tuple[str, ...] = ()
    """Likewise; empty for single sentences."""
    label: tuple[str, ...] = ("label",)
    classes: tuple[str, ...] = ("0", "1")
    """Empty for a regression."""
    metrics: tuple[str, ...] = ("accuracy",)
    """The first is the one that the paper's table reports, or its first of two."""
    train: tuple[str, ...] = ("train.tsv",)
    dev: tuple[str, ...] = ("dev.tsv", "validation.tsv")
    headless: tuple[int, int] | None = None
    """Columns of sentence and label in the published files without a header."""
    skip_short: bool = False
    """The published files hold a few broken rows, left out with a warning."""


_PAIR = (("sentence1",), ("sentence2",))
_ENTAILMENT = ("entailment", "not_entailment")

GLUE: dict[str, Glue] = {
    "cola": Glue("CoLA", ("sentence",), metrics=("matthews", "accuracy"), headless=(3, 1)),
    "sst2": Glue("SST-2", ("sentence",)),
    "mrpc": Glue(
        "MRPC", ("#1 String", "sentence1"), ("#2 String", "sentence2"), ("Quality", "label"), metrics=("accuracy", "f1")
    ),
    "stsb": Glue("STS-B", *_PAIR, label=("score", "label"), classes=(), metrics=("pearson", "spearman")),
    "qqp": Glue(
        "QQP", ("question1",), ("question2",), ("is_duplicate", "label"), metrics=("accuracy", "f1"), skip_short=True
    ),
    "mnli": Glue(
        "MNLI",
        ("sentence1", "premise"),
        ("sentence2", "hypothesis"),
        ("gold_label", "label"),
        ("entailment", "neutral", "contradiction"),
        dev=("dev_matched.tsv", "validation_matched.tsv"),
    ),
    "qnli": Glue("QNLI", ("question",), ("sentence",), classes=_ENTAILMENT),
    "rte": Glue("RTE", *_PAIR, classes=_ENTAILMENT),
    "wnli": Glue("WNLI", *_PAIR),
}
"""The nine tasks, by the names the field uses."""


def read_glue(path: Path, task: Glue) -> Table:
    """One file of a GLUE task: tab-separated, without quoting, as published.

    Args:
        path: The file, with a header; CoLA's also without, as it is published.
        task: Which.

    Returns:
        The sentences and labels; labels that are numbers of classes are turned into their names.

    Raises:
        DataError: The file is missing, has no such columns, or a row lacks some.
    """
    rows = [line.split("\t") for line in read_lines(path)]
    if not rows:
        raise DataError(f"{path} is damaged: it is empty")
    if task.headless and not set(task.first) & set(rows[0]):
        if len(rows[0]) <= max(task.headless):
            raise DataError(f"{path}: no header with {task.first[0]}, and no {1 + max(task.headless)} columns either")
        columns, line = [*task.headless], 1
    else:
        wanted = [names for names in (task.first, task.second, task.label) if names]
        columns, line = [_column(path, rows[0], names) for names in wanted], 2
        rows = rows[1:]
    whole = [row for row in rows if len(row) > max(columns)]
    if len(whole) < len(rows):
        at = next(i for i, row in enumerate(rows) if len(row) <= max(columns)) + line
        if not task.skip_short or len(rows) - len(whole) > len(rows) // 100:
            raise DataError(f"{path} is damaged: line {at} has fewer than {1 + max(columns)} columns")
        broken = len(rows) - len(whole)
        warnings.warn(f"{path}: {broken} of {len(rows)} rows lack a column and are left out", stacklevel=2)
    if not whole:
        raise DataError(f"{path} is damaged: it holds a header and no rows")
    labels = [row[columns[-1]] for row in whole]
    if task.classes and set(labels) <= {str(i) for i in range(len(task.classes))}:
        labels = [task.classes[int(label)] for label in labels]  # as the hub writes them
    second = [row[columns[1]] for row in whole] if task.second else None
    return Table(path, [row[columns[0]] for row in whole], second, labels, line)


def read_table(path: Path) -> tuple[Table, bool]:
    """One's own table: a header with ``text``, perhaps ``text2``, and ``label`` (classes) or ``score`` (numbers).

    Args:
        path: ``.csv`` with commas and quoting as spreadsheets write it; ``.tsv`` with tabs and no quoting.

    Returns:
        The sentences and labels, and whether the labels are scores.

    Raises:
        DataError: The file is missing, has no such columns, or a row lacks some, or its label, or has more than these.
    """
    if not path.exists():
        raise DataError(f"{path} is missing: make it a .csv or .tsv with a header, columns text[,text2],label")
    lines, quoted = read_lines(path), path.suffix.lower() == ".csv"
    if quoted:
        limit = csv.field_size_limit(sum(len(line) + 1 for line in lines))  # a text may be all of it
        try:
            rows = list(csv.reader((line + "\n" for line in lines), strict=True))
        except csv.Error as error:
            raise DataError(f"{path} is damaged: {error}") from error
        finally:
            csv.field_size_limit(limit)
    else:
        rows = [line.split("\t") for line in lines]
    if len(rows) < 2:
        raise DataError(f"{path} holds no examples: it needs a header (text,label) and one row per example")
    scores = "score" in rows[0] and "label" not in rows[0]
    wanted = [("text",), *([("text2",)] if "text2" in rows[0] else []), ("score",) if scores else ("label",)]
    columns = [_column(path, rows[0], names) for names in wanted]
    for number, row in enumerate(rows[1:], 2):
        if len(row) <= max(columns):
            raise DataError(f"{path} is damaged: row {number} has fewer than {1 + max(columns)} columns")
        if any(row[len(rows[0]) :]):  # which of its cells is the label cannot be told
            hint = "put a text that holds commas in quotes" if quoted else "a text cannot hold a tab"
            raise DataError(f"{path}: row {number} has {len(row)} cells, and the header {len(rows[0])}: {hint}")
        if not scores and not row[columns[-1]].strip():
            raise DataError(f"{path}: row {number} has no label; fill it in, or leave the row out")
    chosen = [[row[column] for column in columns] for row in rows[1:]]
    second = [row[1] for row in chosen] if len(columns) == 3 else None
    return Table(path, [row[0] for row in chosen], second, [row[-1].strip() for row in chosen]), scores


def split_mrpc(folder: Path) -> None:
    """Make GLUE's ``train.tsv`` and ``dev.tsv`` of MRPC from the two files they are distributed as.

    Args:
        folder: Holds ``msr_paraphrase_train.txt`` and ``mrpc_dev_ids.tsv``, and gets the two files.
    """
    header, *rows = read_lines(folder / "msr_paraphrase_train.txt")
    dev = {tuple(line.split("\t")[:2]) for line in read_lines(folder / "mrpc_dev_ids.tsv")}
    chosen = [tuple(row.split("\t")[1:3]) in dev for row in rows]
    for name, wanted in (("train.tsv", False), ("dev.tsv", True)):
        lines = [header, *(row for row, is_dev in zip(rows, chosen, strict=True) if is_dev == wanted)]
        part = folder / f".{name}.part"
        part.write_text("\n".join(lines) + "\n", encoding="utf-8")
        part.replace(folder / name)


def _column(path: Path, header: Sequence[str], names: Sequence[str]) -> int:
    for name in names:
        if name in header:
            return list(header).index(name)
    raise DataError(f"{path}: no column {' or '.join(names)} in the header, which has {', '.join(header)[:200]}")
