"""What a step measured on its way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from tiltsam.space.validation import warn
from tiltsam.tilting import effective_sample_size

__all__ = ["NonfiniteCounter", "StepInfo"]


class StepInfo:
    """Losses, weights, norms and passes of a step.

    Tensors stay on the device and are assembled when they are read, so a step that nobody looks at pays nothing.

    Attributes:
        loss: The aggregate loss whose gradient the base optimizer received.
        num_forwards: Forward passes of the step.
        num_backwards: Backward passes of the step: its cost in gradient evaluations.
        num_ascents: Those whose gradient only gave the direction of an ascent.
        num_parts: Number of closures: each pass saw this fraction of the mini-batch.
        valid: Whether each sample was finite.
    """

    def __init__(
        self,
        loss: Tensor,
        table: Callable[[], Tensor],
        sampler: Callable[[], Mapping[str, Tensor]] = dict,
        *,
        valid: Sequence[Tensor],
        num_forwards: int,
        num_backwards: int,
        num_ascents: int = 0,
        num_parts: int = 1,
    ) -> None:
        self.loss = loss
        self.num_forwards, self.num_backwards, self.num_ascents = num_forwards, num_backwards, num_ascents
        self.num_parts = num_parts
        self.valid = valid
        self._make_table, self._make_sampler = table, sampler

    @cached_property
    def _table(self) -> Tensor:
        return self._make_table()

    @property
    def losses(self) -> Tensor:
        """(s,) loss at each θ+ε_j."""
        return self._table[0]

    @property
    def weights(self) -> Tensor:
        """(s,) weight of each sample's gradient; 0 for a sample that was not finite."""
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
        return self._make_sampler()

    def __repr__(self) -> str:
        return f"StepInfo(loss={self.loss}, num_forwards={self.num_forwards}, num_backwards={self.num_backwards})"


class NonfiniteCounter:
    """Counts samples that were not finite, without waiting for the device until it is asked."""

    _MAX_PENDING = 256

    def __init__(self) -> None:
        self._pending: list[Tensor] = []
        self._total: Tensor | int = 0
        self._reported = 0

    def add(self, valid: Sequence[Tensor]) -> None:
        """Count the samples of a step, given whether each was finite."""
        self._pending += valid
        if len(self._pending) >= self._MAX_PENDING:
            self._collapse()

    def warn(self) -> None:
        """Warn about samples that were not finite since the last call. Waits for the device."""
        self._collapse()
        total = int(self._total)
        if total > self._reported:
            warn(
                f"{total - self._reported} samples had a loss or gradient that is not finite and got weight zero "
                f"({total} since the start): lower rho, radius or the learning rate if this continues"
            )
            self._reported = total

    def _collapse(self) -> None:
        if self._pending:
            device = self._pending[-1].device
            self._total = self._total + (torch.stack([x.to(device) for x in self._pending]) == 0).sum()
            self._pending.clear()

    def __getstate__(self) -> dict[str, object]:
        self._collapse()
        return {**self.__dict__, "_total": int(self._total)}
