"""What the lab tells while it works: a class whose methods do nothing, to subclass, and what they are told."""

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
    """Is told how the work goes on, and shows nothing. What a method raises ends the work.

    Example:
        >>> class Losses(Display):
        ...     def report(self, config, progress):
        ...         print(progress.epoch, progress.row.get("train_loss"))
    """

    def print(self, line: str) -> None:
        """Take a line that the user should see, such as what is skipped or waited for."""

    def loading(self, what: str, done: int, total: int | None) -> None:
        """Take the progress of a download, of unpacking or of decoding images."""

    def setup(self, config: TrainConfig, setup: dict[str, Any]) -> None:
        """Take the content of ``setup.json`` (sizes of the splits, classes, label noise, model) before a run."""

    def report(self, config: TrainConfig, progress: Progress) -> None:
        """Take the progress of a run: after every epoch, and about twice a second, without waiting for the device."""

    def skip(self, config: TrainConfig) -> None:
        """Take a run that another process trains."""

    def failed(self, config: TrainConfig, error: TrainError) -> None:
        """Take a run that failed; the others continue."""

    def measuring(self, what: str) -> ProgressCallback:
        """Take what is measured, as in ``"NAME: trace"``, and return the callback for its progress."""
        return lambda done, total: None

    def status(self, status: SweepStatus) -> None:
        """Take how far a sweep is, when a run makes progress or ends."""


QUIET = Display()
"""The display of functions that are not given one."""
