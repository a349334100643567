"""Callbacks for the progress of the lab's work: a class to subclass, and the arguments of its methods."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiltsam.flatness.loss_surface import ProgressCallback
    from tiltsam.lab.config import TrainConfig
    from tiltsam.lab.errors import TrainError

__all__ = ["QUIET", "Display", "Progress", "SweepStatus"]


@dataclass
class Progress:
    """The progress of a run."""

    epoch: float = 0.0
    passes: float = 0.0
    seconds: float = 0.0
    steps: int = 0
    done: float = 0.0
    """Fraction of the budget that is used up."""
    row: dict[str, Any] = field(default_factory=dict)
    """The metrics of the last evaluated epoch; another object after each evaluation."""


@dataclass(frozen=True)
class SweepStatus:
    """How far a sweep is."""

    ended: int
    """Trials and tests that have ended."""
    total: int
    running: float
    """Sum of the fractions of the running ones."""
    news: list[str]
    """A line for each one that has ended since the last status."""


class Display:
    """Callbacks of the lab's functions. They do nothing; a subclass shows what it wants to.

    Whatever a callback raises ends the work.

    Example:
        >>> class Losses(Display):
        ...     def report(self, config, progress):
        ...         print(progress.epoch, progress.row.get("train_loss"))
    """

    def print(self, line: str) -> None:
        """Called with a line that the user should see, such as what is skipped or waited for."""

    def loading(self, what: str, done: int, total: int | None) -> None:
        """Called during a download, and while data are unpacked or decoded."""

    def setup(self, config: TrainConfig, setup: dict[str, Any]) -> None:
        """Called before a run, with the content of ``setup.json``: sizes of the splits, classes, label noise, model."""

    def report(self, config: TrainConfig, progress: Progress) -> None:
        """Called after every epoch of a run, and about twice a second, without waiting for the device."""

    def skip(self, config: TrainConfig) -> None:
        """Called for a run that another process trains."""

    def failed(self, config: TrainConfig, error: TrainError) -> None:
        """Called for a run that failed; the others continue."""

    def measuring(self, what: str) -> ProgressCallback:
        """Called before a measurement such as ``"NAME: trace"``. Returns the callback for its progress."""
        return lambda done, total: None

    def status(self, status: SweepStatus) -> None:
        """Called when a run of a sweep makes progress or ends."""


QUIET = Display()
"""The default of functions that take a display."""
