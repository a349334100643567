"""What is measured on trained runs for a recipe, and remembered beside them: measuring may take as long as training.

RUN/reproduced.json     what was measured, each under a key that says how; under "data" the size of the data set
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tiltsam.flatness.objectives import ErmLoss, Objective, SamLoss, TsamLoss
from tiltsam.lab.data import LoadingCallback, load
from tiltsam.lab.files import write_json
from tiltsam.lab.flat import cross_runs, measure_runs, save_flatness
from tiltsam.lab.flatness import PAPER_STDS, Flatness, FlatnessPlan
from tiltsam.lab.recipes.settings import column_config
from tiltsam.lab.record import Record, RecordError

__all__ = ["Thoroughness", "measure", "trained_on"]

Numbers = dict[str, Any]
"""What was measured of one run, as JSON has it."""


@dataclass(frozen=True)
class Thoroughness:
    """How much is measured; the paper's draws, and our number of examples, unless scaled."""

    examples: int = 5000
    """Of training, for neighbourhoods and eigenvalues."""
    draws: int = 500
    """Perturbations at each std."""

    def scaled(self, scale: float) -> Thoroughness:
        """That share of both; never fewer than 100 examples and 2 draws."""
        return Thoroughness(max(100, round(self.examples * scale)), max(2, round(self.draws * scale)))

    def passes(self, kind: str, batch_size: int, training_examples: int) -> float:
        """Forward+backward passes that measuring one run takes, of batches of training's size; about.

        Args:
            kind: Of the recipe.
            batch_size: Of training.
            training_examples: Of the run; a test set is taken to be a fifth of them, as CIFAR's is.
        """
        batches = self.examples / batch_size
        if kind == "neighborhood":
            return (len(PAPER_STDS) * self.draws + 1) * batches / 3
        if kind == "eigenvalues":
            return 50 * 2 * batches  # five to ten products of two passes to an eigenvalue
        if kind == "losses":
            s = column_config("cifar100-resnet18", "tsam").num_samples
            return (
                (1 / 3 + (1 + s) * 4 / 3) * 1.2 * training_examples / batch_size
            )  # an ascent is a pass, a loss a third
        return 0.0


def measure(
    kind: str,
    runs: Mapping[str, Record],
    much: Thoroughness,
    *,
    device: str = "auto",
    root: Path | None = None,
    progress: Callable[[str], Any] | None = None,
) -> dict[str, Numbers]:
    """Measure runs of one seed, on the same examples, unless it was done before.

    Args:
        kind: ``losses``, ``neighborhood`` or ``eigenvalues``.
        runs: Finished runs by method.
        much: How much.
        device: Where.
        root: Where data sets lie.
        progress: ``progress("what is measured")`` gives a callback.

    Returns:
        By method: of ``losses`` the split, then the objective, to the loss; of a ``neighborhood`` lists ``std``,
        ``mean`` and ``variance``; of ``eigenvalues`` a list ``values``.
    """
    key = json.dumps({"kind": kind, "with": sorted(runs), **({} if kind == "losses" else asdict(much))})
    known = {method: _recall(record).get(key) for method, record in runs.items()}
    if all(numbers is not None for numbers in known.values()):
        return {method: numbers for method, numbers in known.items() if numbers is not None}
    given = dict(runs)
    where: dict[str, Any] = {"device": device, "root": root}
    if kind == "losses":
        tell = None if progress is None else progress("losses under all objectives")
        table = cross_runs(given, _objectives(), progress=tell, **where)
        found: dict[str, Numbers] = {method: {"train": {}, "test": {}} for method in runs}
        for entry in table.entries:
            found[entry.model][entry.split][entry.objective] = entry.loss
    else:
        found = {}
        plan = _plan(kind, much)
        for flat, about in measure_runs(given, examples=much.examples, plan=plan, progress=progress, **where):
            found[flat.name] = _numbers(kind, flat)
            record = runs[flat.name]
            # The report shows a neighbourhood, unless somebody has measured more already.
            if kind == "neighborhood" and not (record.folder / "flatness.json").exists():
                save_flatness(record, flat, about)
    for method, record in runs.items():
        _remember(record, key, found[method])
    return found


def trained_on(
    records: Sequence[Record], root: Path | None = None, loading: LoadingCallback | None = None
) -> list[Numbers]:
    """The number of classes and of training examples of each run, looked up once and remembered beside it.

    Args:
        records: Finished runs of one task that hold out the same share.
        root: Where data sets lie.
        loading: Told how far the decoding of images is.

    Raises:
        DataError: If that has not been looked up, and the data is not there.
    """
    fresh = [record for record in records if "data" not in _recall(record)]
    if fresh:
        data = load(fresh[0].config(), root, progress=loading)
        for record in fresh:
            _remember(record, "data", {"classes": data.num_classes, "examples": len(data.train)})
    return [_recall(record)["data"] for record in records]


def _objectives() -> dict[str, Objective]:
    """The objectives that the three methods trained on."""
    sam, tsam = (column_config("cifar100-resnet18", method) for method in ("sam", "tsam"))
    assert sam.rho is not None
    assert tsam.rho is not None
    return {
        "ERM": ErmLoss(),
        "SAM": SamLoss(sam.rho),
        "TSAM": TsamLoss(tsam.t, tsam.rho, tsam.radius, tsam.num_samples),
    }


def _plan(kind: str, much: Thoroughness) -> FlatnessPlan:
    nothing: dict[str, Any] = {"num_ascent_steps": 0, "num_trace_samples": 0, "num_density_probes": 0, "num_points": 0}
    if kind == "neighborhood":
        return FlatnessPlan(num_samples=much.draws, num_eigenvalues=0, **nothing)
    return FlatnessPlan(std=PAPER_STDS[:1], num_samples=2, num_eigenvalues=5, **nothing)


def _numbers(kind: str, flat: Flatness) -> Numbers:
    if kind == "neighborhood":
        around = flat.neighborhood
        return {name: getattr(around, name).tolist() for name in ("std", "mean", "variance")}
    assert flat.eigenpairs is not None
    return {"values": flat.eigenpairs.values.tolist()}


def _recall(record: Record) -> dict[str, Numbers]:
    path = record.folder / "reproduced.json"
    try:
        found: dict[str, Numbers] = json.loads(path.read_text()) if path.exists() else {}
    except ValueError:
        raise RecordError(f"{path} is damaged: remove it to measure again") from None
    return found


def _remember(record: Record, key: str, numbers: Numbers) -> None:
    path = record.folder / "reproduced.json"
    write_json(path, _recall(record) | {key: numbers})
