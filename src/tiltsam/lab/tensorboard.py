"""A run's metrics for TensorBoard, beside its record.

The record is the truth and the board a copy of it: whoever starts writing declares all that was written before void
(TensorBoard's ``purge_step``) and copies the record's lines anew, so that a run that was killed and resumed, or begun
without a board, shows every epoch once.
"""

from __future__ import annotations

import math
from typing import Any

from tiltsam.lab.records import Record

__all__ = ["TensorBoardWriter"]


class TensorBoardWriter:
    """Writes to ``RUN/tensorboard``. A context.

    Args:
        record: The run.

    Raises:
        ImportError: If the package tensorboard is not installed.
    """

    def __init__(self, record: Record) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ImportError("--tensorboard needs a package: pip install '.[tensorboard]'") from None
        self._open = SummaryWriter
        self._record = record
        self._writer: Any = None
        self._shown = 0  # steps of the newest line on the board

    def __enter__(self) -> TensorBoardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def update(self, steps: float = math.inf) -> None:
        """Show the record's lines of up to that many steps, each of them once."""
        rows = [row for row in self._record.metrics()[0] if self._shown < row["steps"] <= steps]
        if self._writer is None:
            self._writer = self._open(str(self._record.folder / "tensorboard"), purge_step=1)
        for row in rows:
            self._shown = row["steps"]
            for name, value in row.items():
                if name not in ("epoch", "steps") and isinstance(value, int | float):
                    # validation_loss → validation/loss: TensorBoard puts what is before a slash into one section.
                    part, _, what = name.partition("_")
                    tag = f"{part}/{what}" if part in ("train", "validation", "test") else f"run/{name}"
                    self._writer.add_scalar(tag, value, row["steps"])
        self._writer.flush()
