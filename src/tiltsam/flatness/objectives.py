"""The losses of ERM, SAM and TSAM, evaluated on any model and any data.

    ERM    L(theta)
    SAM    L(theta + rho n(grad L(theta)))
    TSAM   (1/t) log mean_j exp(t L(theta + eps_j)),  eps_j = delta_j + rho n(grad L(theta + delta_j)),
           delta_j uniform in the ball of radius R  (Algorithm 2 of the paper)

with ``n(v) = v / (||v|| + 1e-12)``, each on one batch. :func:`cross_objectives` returns the paper's
table: models trained with one, evaluated on all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from tiltsam.flatness.loss_surface import Batches, LossFn, LossSurface, ProgressCallback
from tiltsam.flatness.numerics import Estimate, at_least_float32, finite_losses, total_norm, weighted_mean
from tiltsam.flatness.randomness import Purpose, generator
from tiltsam.space import EPS
from tiltsam.space.protocol import default_radius
from tiltsam.space.validation import check_count, check_nonnegative
from tiltsam.tilting import StreamingTilt

__all__ = ["CrossEntry", "CrossTable", "ErmLoss", "Objective", "SamLoss", "TsamLoss", "cross_objectives"]


class Objective(Protocol):
    """A training objective on one batch."""

    def __call__(self, surface: LossSurface, batch: Any, key: tuple[int, int], /) -> Tensor:
        """Return the objective at ``surface.origin``, a scalar; may leave the parameters moved.

        Random draws may depend on nothing but ``key``, ``(seed, batch number)``.
        """


@dataclass(frozen=True)
class ErmLoss:
    """The plain loss. Cost: one forward pass."""

    def __call__(self, surface: LossSurface, batch: Any, key: tuple[int, int], /) -> Tensor:
        """Return the loss of the batch."""
        return surface.batch_loss(batch)


@dataclass(frozen=True)
class SamLoss:
    """SAM's loss, after one normalised ascent step of length ``rho``. Cost: a gradient and a forward pass."""

    rho: float = 0.05

    def __post_init__(self) -> None:
        check_nonnegative("rho", self.rho)

    def __call__(self, surface: LossSurface, batch: Any, key: tuple[int, int], /) -> Tensor:
        """Return the loss of the batch at the end of the step."""
        _ascend(surface, batch, self.rho)
        return surface.batch_loss(batch)


@dataclass(frozen=True)
class TsamLoss:
    """TSAM's loss over the samples of Algorithm 2. Cost: ``num_samples`` gradients and as many forward passes.

    With ``rho=0`` it is the plain Monte-Carlo estimate of the tilted loss over the ball, biased low by order
    ``1/num_samples``; with ``rho > 0`` the samples are shifted uphill.

    To match ``optimizer.info.loss`` of a :class:`tiltsam.TSAM` but for the draws, pass its t − δ as ``t``, and its
    ``rho``, ``radius`` and ``num_samples``. The defaults match its defaults.

    Args:
        t: The tilt.
        rho: Length of the ascent step from each random start.
        radius: Radius of the ball of random starts; by default that of :class:`tiltsam.TSAM`, ``0.003 sqrt(d)``
            for ``d`` parameters, 10 for a ResNet-18.
        num_samples: Samples per batch.
    """

    t: float = 10.0
    rho: float = 0.1
    radius: float | None = None
    num_samples: int = 3

    def __post_init__(self) -> None:
        check_nonnegative("t", self.t)
        check_nonnegative("rho", self.rho)
        if self.radius is not None:
            check_nonnegative("radius", self.radius)
        check_count("num_samples", self.num_samples)

    def __call__(self, surface: LossSurface, batch: Any, key: tuple[int, int], /) -> Tensor:
        """Return the tilted loss of the batch."""
        size = sum(p.numel() for p in surface.params)
        radius = default_radius(size) if self.radius is None else self.radius
        tilt = StreamingTilt(self.t)
        for sample in range(self.num_samples):
            _add_noise(surface, radius, size, generator(surface.device, Purpose.OBJECTIVE, *key, sample))
            if self.rho > 0:
                _ascend(surface, batch, self.rho)
            tilt.add(surface.batch_loss(batch))
            surface.restore()
        return tilt.loss()


class CrossEntry(NamedTuple):
    """One cell of the table."""

    model: str
    """Name of the model."""
    split: str
    """Name of the data."""
    objective: str
    """Name of the objective."""
    loss: float
    """Mean of the objective over the batches."""
    error: float
    """Standard error over batches; NaN for a single batch."""


@dataclass(frozen=True)
class CrossTable:
    """Losses by model, objective and split; ``str()`` formats them as the paper does, one block per split."""

    entries: tuple[CrossEntry, ...]
    """All cells."""

    def entry(self, model: str, objective: str, split: str = "data") -> CrossEntry:
        """Return one cell; raise KeyError if there is none."""
        for entry in self.entries:
            if (entry.model, entry.objective, entry.split) == (model, objective, split):
                return entry
        raise KeyError((model, objective, split))

    def __str__(self) -> str:
        objectives = list(dict.fromkeys(e.objective for e in self.entries))
        models = list(dict.fromkeys(e.model for e in self.entries))
        name_width = max(len(name) for name in ["trained by", *models]) + 2
        cell_width = max(20, *(len(name) + 2 for name in objectives))
        lines = []
        for split in dict.fromkeys(e.split for e in self.entries):
            lines.append(f"{split} loss".ljust(name_width) + "".join(o.rjust(cell_width) for o in objectives))
            for model in models:
                cells = [_cell(self.entry(model, objective, split)) for objective in objectives]
                lines.append(model.ljust(name_width) + "".join(cell.rjust(cell_width) for cell in cells))
        return "\n".join(lines)


def cross_objectives(
    models: Mapping[str, nn.Module],
    loss_fn: LossFn,
    splits: Batches | Mapping[str, Batches],
    objectives: Mapping[str, Objective] | None = None,
    *,
    seed: int = 0,
    size_of: Callable[[Any], float] | None = None,
    progress: ProgressCallback | None = None,
) -> CrossTable:
    """Evaluate every model on every objective and every split: the paper's cross table.

    All models see the same batches and, if they have the same shape, the same random draws. BatchNorm is in eval mode.

    Cost per model and batch: a forward pass for ERM, a gradient more for SAM, ``num_samples`` of both for TSAM.

    Args:
        models: The models by name, ``{"ERM": ..., "SAM": ..., "TSAM": ...}``.
        loss_fn: ``loss_fn(model, batch)``, the mean loss of a batch.
        splits: The data sets by name, ``{"train": ..., "test": ...}``; a single one is called ``data``. The ascent is
            on each batch, so use the batch size of training.
        objectives: The objectives by name; ``ErmLoss()``, ``SamLoss()`` and ``TsamLoss()`` by default.
        seed: Seed of the random draws.
        size_of: Weight of a batch; its number of examples by default.
        progress: Called as ``progress(done, total)`` after each cell of the table.

    Raises:
        ValueError: If there is no model, split or objective, a model has no trainable parameters, the data is empty or
            a loss is not finite.

    Warns:
        UserWarning: If half-precision weights round a step by more than a tenth of its length.

    Example:
        >>> from tiltsam.sharpness import supervised
        >>> data = [(torch.randn(8, 2), torch.randn(8, 1))]
        >>> table = cross_objectives({"a": nn.Linear(2, 1)}, supervised(nn.functional.mse_loss), data)
        >>> table.entry("a", "SAM").loss >= table.entry("a", "ERM").loss
        True
    """
    wanted: Mapping[str, Objective] = (
        {"ERM": ErmLoss(), "SAM": SamLoss(), "TSAM": TsamLoss()} if objectives is None else objectives
    )
    parts = splits if isinstance(splits, Mapping) else {"data": splits}
    for name, given in (("models", models), ("splits", parts), ("objectives", wanted)):
        if not given:
            raise ValueError(f"{name} must not be empty")
    total = len(models) * len(parts) * len(wanted)
    entries: list[CrossEntry] = []
    for name, model in models.items():
        for split, batches in parts.items():
            for label, objective in wanted.items():
                loss, error = _evaluate(model, loss_fn, batches, objective, seed, size_of)
                entries.append(CrossEntry(name, split, label, loss, error))
                if progress is not None:
                    progress(len(entries), total)
    return CrossTable(tuple(entries))


def _cell(entry: CrossEntry) -> str:
    return f"{entry.loss:.4f}" + ("" if math.isnan(entry.error) else f" ± {entry.error:.4f}")


def _evaluate(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Batches,
    objective: Objective,
    seed: int,
    size_of: Callable[[Any], float] | None,
) -> Estimate:
    """Return the mean of the objective over the batches."""
    values, sizes = [], []
    with LossSurface(model, loss_fn, batches, size_of=size_of, seed=seed) as surface:
        for number, (batch, size) in enumerate(surface.iterate()):
            with surface.fixed_randomness():
                values.append(objective(surface, batch, (seed, number)))
            sizes.append(size)
            surface.restore()
    return weighted_mean(finite_losses(values), sizes)


def _ascend(surface: LossSurface, batch: Any, rho: float) -> None:
    """Move the parameters by ``rho`` along the normalised gradient at their current place."""
    _, grads = surface.loss_and_gradient(batch)
    pace = rho / (total_norm(grads) + EPS)
    surface.move_by(grad.to(at_least_float32(grad)) * pace.to(grad.device) for grad in grads)


def _add_noise(surface: LossSurface, radius: float, size: int, random: torch.Generator) -> None:
    """Move the parameters to ``origin + delta``, ``delta`` uniform in the ball: a direction times R U^(1/d)."""
    device = surface.device
    noise = [torch.randn(p.shape, generator=random, device=device, dtype=at_least_float32(p)) for p in surface.params]
    length = torch.rand((), generator=random, device=device, dtype=torch.float64) ** (1 / size) * radius
    scale = length / total_norm(noise)
    surface.move_to(part.mul_(scale) for part in noise)
