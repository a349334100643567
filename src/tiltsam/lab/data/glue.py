"""The nine tasks of GLUE, read from their published tab-separated files.

The labels of GLUE's test sets are not public, so its development sets are the test sets here.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from tiltsam.lab.data.dataset import Data, Request, assemble
from tiltsam.lab.data.download import require
from tiltsam.lab.data.text import TextTable, column_index, read_lines, tokenize
from tiltsam.lab.errors import DataError
from tiltsam.lab.files import drafted

__all__ = ["GLUE", "GlueTask", "glue", "read_glue"]


@dataclass(frozen=True)
class GlueTask:
    """Files, columns, classes and metrics of a task."""

    description: str
    folder: str
    """Folder in the published archive."""
    first: tuple[str, ...]
    """Names of the column of the first sentence: as published, then as in the ``glue`` data set of Hugging Face."""
    second: tuple[str, ...] = ()
    """As ``first``; empty for single sentences."""
    label: tuple[str, ...] = ("label",)
    classes: tuple[str, ...] = ("0", "1")
    """Empty for a regression."""
    metrics: tuple[str, ...] = ("accuracy",)
    """The first one is what the paper's table reports, or the first of two."""
    train: str = "train.tsv"
    dev: tuple[str, ...] = ("dev.tsv", "validation.tsv")
    headerless: tuple[int, int] | None = None
    """Columns of sentence and label if the published files have no header."""
    skip_short: bool = False
    """Whether to skip short rows with a warning; the published files have a few."""


_PAIR = (("sentence1",), ("sentence2",))
_ENTAILMENT = ("entailment", "not_entailment")

GLUE: dict[str, GlueTask] = {
    "cola": GlueTask(
        "is a sentence acceptable English?",
        "CoLA",
        ("sentence",),
        metrics=("matthews", "accuracy"),
        headerless=(3, 1),
    ),
    "sst2": GlueTask("is a film review positive?", "SST-2", ("sentence",)),
    "mrpc": GlueTask(
        "do two sentences from the news mean the same?",
        "MRPC",
        ("#1 String", "sentence1"),
        ("#2 String", "sentence2"),
        ("Quality", "label"),
        metrics=("accuracy", "f1"),
    ),
    "stsb": GlueTask(
        "how similar are two sentences, from 0 to 1?",
        "STS-B",
        *_PAIR,
        label=("score", "label"),
        classes=(),
        metrics=("pearson", "spearman"),
    ),
    "qqp": GlueTask(
        "do two Quora questions ask the same?",
        "QQP",
        ("question1",),
        ("question2",),
        ("is_duplicate", "label"),
        metrics=("accuracy", "f1"),
        skip_short=True,
    ),
    "mnli": GlueTask(
        "does a sentence follow from another, contradict it, or neither?",
        "MNLI",
        ("sentence1", "premise"),
        ("sentence2", "hypothesis"),
        ("gold_label", "label"),
        ("entailment", "neutral", "contradiction"),
        dev=("dev_matched.tsv", "validation_matched.tsv"),
    ),
    "qnli": GlueTask("does a sentence answer a question?", "QNLI", ("question",), ("sentence",), classes=_ENTAILMENT),
    "rte": GlueTask("does a sentence follow from another?", "RTE", *_PAIR, classes=_ENTAILMENT),
    "wnli": GlueTask("what does a pronoun refer to?", "WNLI", *_PAIR),
}
"""The tasks by their usual names."""


def glue(request: Request, *, name: str) -> Data:
    """Load a task of GLUE."""
    task = GLUE[name]
    home = request.path / "glue"
    folders = (home / task.folder, home / name)
    existing = [folder / file for folder in folders for file in task.dev if (folder / file).exists()]
    dev = [*existing, folders[0] / task.dev[0]][0]
    train, folder = dev.with_name(task.train), dev.parent
    target, prepare = (folder, _split_mrpc) if name == "mrpc" else (home, None)
    require(request, f"glue/{name}", [train, dev], target, prepare=prepare)
    tables = [read_glue(path, task) for path in (train, dev)]
    if task.classes:
        targets = [torch.tensor(table.classes(task.classes)) for table in tables]
    else:
        targets = [torch.tensor(table.values(), dtype=torch.float32) / 5 for table in tables]  # STS-B scores are 0…5
    pool, test = tokenize(request, tables, targets)
    return assemble(
        request,
        pool,
        test,
        len(task.classes) or 1,
        metrics=task.metrics,
        sources=tables[0].sources(),
        class_names=task.classes,
    )


def read_glue(path: Path, task: GlueTask) -> TextTable:
    """Read a file of a GLUE task: tab-separated, without quoting. Labels given as numbers are converted to names.

    Raises:
        DataError: If the file is missing, lacks a column, or has a row that lacks one.
    """
    rows = [line.split("\t") for line in read_lines(path)]
    if not rows:
        raise DataError(f"{path} is damaged: it is empty")
    if task.headerless and not set(task.first) & set(rows[0]):
        columns, first_line = [*task.headerless], 1
        if len(rows[0]) <= max(columns):
            raise DataError(f"{path} must have a header or {1 + max(columns)} columns, got {len(rows[0])}")
    else:
        wanted = [names for names in (task.first, task.second, task.label) if names]
        columns, first_line = [column_index(path, rows[0], names) for names in wanted], 2
        rows = rows[1:]
    complete = [row for row in rows if len(row) > max(columns)]
    if num_short := len(rows) - len(complete):
        line = next(i for i, row in enumerate(rows) if len(row) <= max(columns)) + first_line
        if not task.skip_short or num_short > len(rows) // 100:
            raise DataError(f"{path} is damaged: line {line} has fewer than {1 + max(columns)} columns")
        warnings.warn(f"{path}: skipped {num_short} of {len(rows)} rows, which lack a column", stacklevel=2)
    if not complete:
        raise DataError(f"{path} is damaged: it has no rows")
    labels = [row[columns[-1]] for row in complete]
    if task.classes and set(labels) <= {str(i) for i in range(len(task.classes))}:
        labels = [task.classes[int(label)] for label in labels]  # as Hugging Face writes them
    second = [row[columns[1]] for row in complete] if task.second else None
    return TextTable(path, [row[columns[0]] for row in complete], second, labels, first_line)


def _split_mrpc(folder: Path) -> None:
    """Write ``train.tsv`` and ``dev.tsv`` of MRPC from the two files in which it is distributed."""
    header, *rows = read_lines(folder / "msr_paraphrase_train.txt")
    dev = {tuple(line.split("\t")[:2]) for line in read_lines(folder / "mrpc_dev_ids.tsv")}
    is_dev = [tuple(row.split("\t")[1:3]) in dev for row in rows]
    for name, wanted in (("train.tsv", False), ("dev.tsv", True)):
        lines = [header, *(row for row, chosen in zip(rows, is_dev, strict=True) if chosen == wanted)]
        with drafted(folder / name) as draft:
            draft.write_text("\n".join(lines) + "\n", encoding="utf-8")
