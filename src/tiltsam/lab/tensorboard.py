"""A run's metrics for TensorBoard, next to its record.

The event files are a copy of the record. A new writer invalidates everything written before (TensorBoard's
``purge_step``) and copies the record's lines again, so that a run that was killed and resumed, or started without
TensorBoard, shows every epoch once.
"""

from __future__ import annotations

import math
from typing import Any

from tiltsam.lab.records import Record

__all__ = ["TensorBoardWriter"]


class TensorBoardWriter:
    """Writes a run's metrics to ``RUN/tensorboard``. A context manager.

    Args:
        record: The run.

    Raises:
        ImportError: If the package tensorboard is not installed.
    """

    def __init__(self, record: Record) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ImportError("--tensorboard needs tensorboard: pip install '.[tensorboard]'") from None
        self._open = SummaryWriter
        self._record = record
        self._writer: Any = None
        self._written = 0  # steps of the newest line written

    def __enter__(self) -> TensorBoardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def update(self, steps: float = math.inf) -> None:
        """Write the record's lines up to that many steps, each of them once."""
        rows = [row for row in self._record.metrics()[0] if self._written < row["steps"] <= steps]
        if self._writer is None:
            self._writer = self._open(str(self._record.folder / "tensorboard"), purge_step=1)
        for row in rows:
            self._written = row["steps"]
            for name, value in row.items():
                if name not in ("epoch", "steps") and isinstance(value, int | float):
                    # validation_loss → validation/loss: TensorBoard groups tags by the part before the slash.
                    part, _, what = name.partition("_")
                    tag = f"{part}/{what}" if part in ("train", "validation", "test") else f"run/{name}"
                    self._writer.add_scalar(tag, value, row["steps"])
        self._writer.flush()
