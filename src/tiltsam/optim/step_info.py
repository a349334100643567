"""What a step measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from tiltsam.tilting import effective_sample_size

__all__ = ["StepInfo"]


@dataclass(frozen=True, eq=False)
class StepInfo:
    """Losses, sample weights, norms and passes of a step.

    Tensors stay on the device and are assembled when read. Without Triton ``‖ε_j‖`` costs one more reading of the
    weights per sample, except where the ascent starts at θ.
    """

    loss: Tensor
    """The aggregate loss of the samples; its gradient is what the base receives, except for GSAM and LookSAM."""
    _make_table: Callable[[], Tensor] = field(repr=False)
    """Returns (6, s): losses, sample weights, start losses, perturbation norms, gradient norms and validity."""
    _make_sampler_info: Callable[[], Mapping[str, Tensor]] = field(repr=False)
    """Returns the numbers of the sampler."""
    valid: Sequence[Tensor] = field(repr=False)
    """Whether each sample was finite."""
    num_forwards: int
    """Forward passes of the step."""
    num_backwards: int
    """Backward passes of the step: its cost in gradient evaluations."""
    num_ascents: int = 0
    """Backward passes that only gave the direction of an ascent."""
    num_parts: int = 1
    """Number of closures: each pass sees 1/num_parts of the mini-batch."""

    @cached_property
    def _table(self) -> Tensor:
        return self._make_table()

    @property
    def losses(self) -> Tensor:
        """(s,) loss at each θ+ε_j."""
        return self._table[0]

    @property
    def weights(self) -> Tensor:
        """(s,) sample weights: how much each gradient counts; 0 for a sample that was not finite."""
        return self._table[1]

    @property
    def start_losses(self) -> Tensor:
        """(s,) loss where each sample started, before its ascent."""
        return self._table[2]

    @property
    def perturbation_norms(self) -> Tensor:
        """(s,) ‖ε_j‖."""
        return self._table[3]

    @property
    def gradient_norms(self) -> Tensor:
        """(s,) ‖∇L(θ+ε_j)‖; 0 if not finite."""
        return self._table[4]

    @property
    def num_nonfinite(self) -> Tensor:
        """Number of samples that were not finite, int64."""
        return (torch.stack(list(self.valid)) == 0).sum()

    @property
    def effective_sample_size(self) -> Tensor:
        """``(Σw)²/Σw²``: s if the tilt has no effect, 1 if a single sample has all the weight."""
        return effective_sample_size(self.weights)

    @cached_property
    def sampler(self) -> Mapping[str, Tensor]:
        """(s,) each: numbers of the sampler (HMC: ``acceptance``, ``energy_error``, ``divergence``) on this rank."""
        return self._make_sampler_info()
