"""A run's metrics for a tracker: TensorBoard, trackio or Weights & Biases.

A tracker shows a copy of the record, each epoch once, also of a run that was killed and resumed or was started without
a tracker. TensorBoard's event files, in the run's folder, are written again from the start (``purge_step``) by each
process that adds to them; ``RUN/tensorboard/steps.json`` has the steps of the newest line. The others keep what they
received: ``RUN/wandb.json`` or ``RUN/trackio.json`` has the id of the run there and the steps of the newest line sent.
"""

from __future__ import annotations

import importlib
import json
import math
import time
import uuid
from typing import Any, Literal, TypeAlias

from tiltsam.lab.errors import UserError
from tiltsam.lab.files import write_json
from tiltsam.lab.records import Record

__all__ = ["TRACKERS", "EventFiles", "OnlineRun", "Tracker", "TrackerName", "find_tracker"]

TrackerName: TypeAlias = Literal["tensorboard", "trackio", "wandb"]

PROJECT = "tiltsam"  # of the runs in trackio and wandb


class Tracker:
    """Copies a run's metrics to a tracker, until it is closed.

    Raises:
        UserError: If the tracker is not installed.
    """

    def __init__(self, name: TrackerName, record: Record) -> None:
        self._name, self._record = name, record
        self._module = find_tracker(name)
        self._written = 0  # steps of the newest line written

    def update(self, steps: float = math.inf) -> None:
        """Write the record's lines up to that many steps, each of them once."""
        for row in self._record.metrics():
            if self._written < row["steps"] <= steps:
                self.write(_tagged(row), row["steps"])
                self._written = row["steps"]

    def complete(self) -> None:
        """Write what a finished run has not written yet."""
        self.update()

    def write(self, metrics: dict[str, float], steps: int) -> None:
        """Write the metrics of an epoch."""
        raise NotImplementedError

    def close(self) -> None:
        """End writing."""
        raise NotImplementedError


class EventFiles(Tracker):
    """Writes TensorBoard's event files to ``RUN/tensorboard``."""

    def __init__(self, name: TrackerName, record: Record) -> None:
        super().__init__(name, record)
        self._writer: Any = None
        self._steps = record.folder / "tensorboard" / "steps.json"  # of the newest line in the event files

    def complete(self) -> None:
        """Write a finished run, unless its event files have all of it."""
        rows = self._record.metrics()
        if rows and not (self._steps.exists() and json.loads(self._steps.read_text()) == rows[-1]["steps"]):
            self.update()

    def write(self, metrics: dict[str, float], steps: int) -> None:
        """Write the metrics of an epoch; the first ones invalidate what earlier processes wrote."""
        if self._writer is None:
            folder = self._steps.parent
            # TensorBoard orders files by name, which begins with the second they were made in: make no two in one.
            made = [int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*")]
            time.sleep(max(0.0, max(made, default=0) + 1 - time.time()))
            self._writer = self._module.SummaryWriter(str(folder), purge_step=1)
        for tag, value in metrics.items():
            self._writer.add_scalar(tag, value, steps)
        self._writer.flush()
        write_json(self._steps, steps)

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


class OnlineRun(Tracker):
    """Sends metrics to a run of wandb, or of trackio, which has the same functions."""

    def __init__(self, name: TrackerName, record: Record) -> None:
        super().__init__(name, record)
        self._file = record.folder / f"{name}.json"
        self._id = uuid.uuid4().hex[:8]
        self._run: Any = None
        if self._file.exists():
            saved = json.loads(self._file.read_text())
            self._id, self._written = saved["id"], saved["steps"]

    def write(self, metrics: dict[str, float], steps: int) -> None:
        """Send the metrics of an epoch."""
        if self._run is None:
            label = "-".join(self._record.folder.parts[-3:])  # task, method and seed
            # trackio knows runs by their names, wandb by their ids.
            known_by = {"name": label, "id": self._id} if self._name == "wandb" else {"name": f"{label}-{self._id}"}
            config = self._record.config().to_json()
            self._run = self._module.init(project=PROJECT, config=config, resume="allow", **known_by)
        self._run.log(metrics, step=steps)
        write_json(self._file, {"id": self._id, "steps": steps})

    def close(self) -> None:
        """End the run, which may be resumed."""
        if self._run is not None:
            self._run.finish()


TRACKERS: dict[TrackerName, type[Tracker]] = {"tensorboard": EventFiles, "trackio": OnlineRun, "wandb": OnlineRun}
"""The values of ``--log``."""

_MODULES: dict[TrackerName, str] = {"tensorboard": "torch.utils.tensorboard"}


def find_tracker(name: TrackerName) -> Any:
    """Import the module of a tracker.

    Raises:
        UserError: If the tracker is not installed.
    """
    try:
        return importlib.import_module(_MODULES.get(name, name))
    except ModuleNotFoundError:
        raise UserError(f"--log {name} needs {name}: pip install '.[{name}]'") from None


def _tagged(row: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a line by tag: validation_loss → validation/loss, because trackers group by the slash."""
    tagged = {}
    for name, value in row.items():
        if name not in ("epoch", "steps") and isinstance(value, int | float):
            part, _, what = name.partition("_")
            tagged[f"{part}/{what}" if part in ("train", "validation", "test") else f"run/{name}"] = value
    return tagged
