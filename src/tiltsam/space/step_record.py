"""The samples of one step and their sample weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tiltsam.space.protocol import Draw

__all__ = ["HEADER", "FixedWeights", "StepRecord", "Weighting", "unpack"]

HEADER = 3  # numbers before the table in a packed record; the first is the loss, the others belong to the kernel weigh


class Weighting(Protocol):
    """Sample weights for losses that arrive one by one. :class:`tiltsam.tilting.StreamingTilt` is TSAM's.

    Final sample weights follow from the shares: a later share c multiplies the weights before it by 1 − c.
    """

    def add(self, loss: Tensor, valid: Tensor, /) -> Tensor:
        """Add a loss and return its share of the total weight so far."""
        ...

    def loss(self) -> Tensor:
        """Return the aggregate loss; NaN if no sample was valid."""
        ...

    def subset(self, samples: Sequence[int], /) -> Weighting:
        """Return a new weighting for a rank that draws only these samples.

        The ratio of two sample weights must be the same as with all samples.
        """
        ...


class FixedWeights:
    """A weighted mean: sample j has the sample weight ``weights[j]``, or 0 if it is not finite.

    Weights may be negative (a mean that extrapolates), but no prefix of them may sum to zero unless it is all zeros.
    """

    def __init__(self, weights: Tensor) -> None:
        self._weights = weights
        self._count = 0
        self._mass = self._mean = weights.new_zeros(())

    def add(self, loss: Tensor, valid: Tensor, /) -> Tensor:
        """See :class:`Weighting`."""
        weight = torch.where(valid, self._weights[self._count], 0.0)
        self._count += 1
        self._mass = self._mass + weight
        share = torch.where(self._mass != 0, weight / torch.where(self._mass != 0, self._mass, 1.0), 0.0)
        self._mean = self._mean + torch.where(valid, share * (loss - self._mean), 0.0)
        return share

    def loss(self) -> Tensor:
        """See :class:`Weighting`."""
        return torch.where(self._mass != 0, self._mean, torch.nan)

    def subset(self, samples: Sequence[int], /) -> FixedWeights:
        """See :class:`Weighting`."""
        return FixedWeights(self._weights[list(samples)])


class StepRecord:
    """Collects the samples of a step.

    Args:
        weighting: Computes the sample weights; ``None`` for a step with one sample, which has all the weight.
        reported: The record whose numbers of the sampler are returned: that of this rank's samples, in the record of
            all ranks. By default this one.
    """

    def __init__(self, weighting: Weighting | None, reported: StepRecord | None = None) -> None:
        self._weighting = weighting
        self._draws: list[Draw] = []
        self.valid: list[Tensor] = []
        """Whether each sample was finite."""
        self._reported = self._draws if reported is None else reported._draws
        self._perturbation_norms: list[Tensor] = []
        self._shares: list[Tensor] = []

    def add(self, draw: Draw, perturbation_norm: Tensor) -> Tensor:
        """Add a sample; return its share of the total weight so far."""
        self._draws.append(draw._replace(gradient=None))
        self._perturbation_norms.append(perturbation_norm)
        self.valid.append(draw.valid)
        self._shares.append(draw.valid if self._weighting is None else self._weighting.add(draw.loss, draw.valid))
        return self._shares[-1]

    def loss(self) -> Tensor:
        """Return the loss of the step."""
        if self._weighting is None:
            (draw,) = self._draws
            if draw.valid.device.type == "cpu":  # reading it is free
                return draw.loss if draw.valid else torch.full_like(draw.loss, torch.nan)
            return torch.where(draw.valid, draw.loss, torch.nan)
        return self._weighting.loss()

    def table(self) -> Tensor:
        """Return rows of losses, sample weights, start losses, perturbation norms, gradient norms and validity."""
        losses, valid = torch.stack([d.loss for d in self._draws]), torch.stack(self.valid)
        shares = torch.stack(self._shares).to(losses.dtype)
        # Each later share c has multiplied a sample's weight by 1 - c.
        left = torch.cat([1 - shares[1:], torch.ones_like(shares[:1])]).flip(0).cumprod(0).flip(0)
        starts = torch.stack([d.start_loss for d in self._draws])
        gradient_norms = torch.stack([d.gradient_norm for d in self._draws])
        norms = torch.stack(self._perturbation_norms)
        return torch.stack([losses, shares * left, starts, norms, gradient_norms, valid.to(losses.dtype)])

    def pack(self) -> Tensor:
        """Return loss and table in one tensor, see :func:`unpack`."""
        header = torch.nn.functional.pad(self.loss().reshape(1), (0, HEADER - 1))
        return torch.cat([header, self.table().reshape(-1)])

    def per_sample(self) -> list[Tensor]:
        """Return each sample as five numbers for other ranks: loss, validity, start loss, ‖ε‖, norm of the gradient."""
        return [
            torch.stack([d.loss, d.valid.to(d.loss.dtype), d.start_loss, norm, d.gradient_norm])
            for d, norm in zip(self._draws, self._perturbation_norms, strict=True)
        ]

    def sampler_info(self) -> dict[str, Tensor]:
        """Return what the sampler reported, one entry per sample."""
        names = self._reported[0].info if self._reported else ()
        return {name: torch.stack([d.info[name] for d in self._reported]) for name in names}


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and the table of a packed record."""
    return packed[0], packed[HEADER:].view(6, -1)
