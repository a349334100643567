"""How the samples of a step are weighed, and the ledger that keeps what each of them showed."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tiltsam.samplers import Draw
from tiltsam.tilting import effective_sample_size

__all__ = ["FixedWeights", "Ledger", "OneSample", "TorchLedger", "Weighing"]


class Weighing(Protocol):
    """Takes the losses of a step one by one and says what share of the aggregate each newcomer gets."""

    def add(self, losses: Tensor, valid: Tensor) -> Tensor:
        """The newcomer's share of the total weight."""
        ...

    def loss(self) -> Tensor:
        """The aggregate loss."""
        ...

    def weights(self, losses: Tensor, valid: Tensor) -> Tensor:
        """The final weights of all samples."""
        ...


class OneSample:
    """A single sample has all the weight, unless it is not finite."""

    def add(self, losses: Tensor, valid: Tensor) -> Tensor:
        """See :class:`Weighing`."""
        self._loss = losses.masked_fill(~valid, torch.nan)
        return valid.to(losses.dtype)

    def loss(self) -> Tensor:
        """See :class:`Weighing`."""
        return self._loss

    def weights(self, losses: Tensor, valid: Tensor) -> Tensor:
        """See :class:`Weighing`."""
        return valid.to(losses.dtype)


class FixedWeights:
    """A plain weighted mean: sample j counts ``weights[j]``, a sample that is not finite counts nothing.

    Weights may be negative (a mean that extrapolates), but no first few of them may add up to zero where not all are.
    """

    def __init__(self, weights: Tensor) -> None:
        self._given = weights
        self._count = 0
        self._mass = torch.zeros_like(weights[0])
        self._mean = torch.zeros_like(weights[0])

    def add(self, losses: Tensor, valid: Tensor) -> Tensor:
        """See :class:`Weighing`."""
        mine = torch.where(valid, self._given[self._count], 0.0)
        self._count += 1
        self._mass = self._mass + mine
        share = self._of_the_mass(mine)
        self._mean = self._mean + torch.where(valid, share * (losses - self._mean), 0.0)
        return share

    def loss(self) -> Tensor:
        """See :class:`Weighing`."""
        return torch.where(self._mass != 0, self._mean, torch.nan)

    def weights(self, losses: Tensor, valid: Tensor) -> Tensor:
        """See :class:`Weighing`."""
        return self._of_the_mass(torch.where(valid, self._given, 0.0))

    def _of_the_mass(self, weights: Tensor) -> Tensor:
        return torch.where(self._mass != 0, weights / torch.where(self._mass != 0, self._mass, 1.0), 0.0)


class Ledger(Protocol):
    """Takes the samples of a step in, one by one, and knows all numbers of the step at the end."""

    def add(self, draw: Draw, distance: Tensor) -> Tensor:
        """Take a sample in that lies ``distance`` from θ; returns its share of the total weight so far."""
        ...

    def numbers(self) -> dict[str, Tensor]:
        """The step's numbers, by the names of :class:`tiltsam.StepInfo`."""
        ...


class TorchLedger:
    """A ledger in torch's own operations.

    Args:
        weighing: What each sample counts.
    """

    def __init__(self, weighing: Weighing) -> None:
        self._weighing = weighing
        self._draws: list[Draw] = []
        self._distances: list[Tensor] = []

    def add(self, draw: Draw, distance: Tensor) -> Tensor:
        """See :class:`Ledger`."""
        self._draws.append(draw)
        self._distances.append(distance)
        return self._weighing.add(draw.loss, draw.valid)

    def rows(self) -> list[Tensor]:
        """Each sample as five numbers, for other ranks: loss, validity, start loss, distance, gradient norm."""
        return [
            torch.stack([d.loss, d.valid.to(d.loss.dtype), d.start_loss, distance, d.gradient_norm])
            for d, distance in zip(self._draws, self._distances, strict=True)
        ]

    def add_row(self, row: Tensor) -> None:
        """Take in a sample that another rank has drawn."""
        loss, valid, start_loss, distance, norm = row.unbind()
        self.add(Draw(loss, None, norm, valid != 0, start_loss), distance)

    def numbers(self) -> dict[str, Tensor]:
        """See :class:`Ledger`."""
        losses = torch.stack([d.loss for d in self._draws])
        valid = torch.stack([d.valid for d in self._draws])
        weights = self._weighing.weights(losses, valid)
        return {
            "loss": self._weighing.loss(),
            "losses": losses,
            "weights": weights,
            "effective_sample_size": effective_sample_size(weights),
            "start_losses": torch.stack([d.start_loss for d in self._draws]),
            "perturbation_norms": torch.stack(self._distances),
            "gradient_norms": torch.stack([d.gradient_norm for d in self._draws]),
            "num_nonfinite": (~valid).sum(),
        }
