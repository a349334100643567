"""Ranks that see the same batch and divide the samples of a step among them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiltsam.samplers import Sampler
from tiltsam.space.parameter_space import ParameterSpace
from tiltsam.space.protocol import Draw, draw_at
from tiltsam.space.step_record import StepRecord, Weighting

__all__ = ["average_samples_over_ranks"]


def average_samples_over_ranks(
    space: ParameterSpace, sampler: Sampler, num_samples: int, weighting: Weighting | None
) -> StepRecord:
    """Draw this rank's samples and average the gradients of all ranks, weighted.

    The counterpart of :meth:`SharpnessAware.average_samples`; afterwards all ranks have the same record and mean.
    """
    samples = space.ranks.my_samples(num_samples, independent=sampler.independent)
    record = StepRecord(None if weighting is None else weighting.subset(samples))
    if samples:
        common = sampler.begin(space)
        for j in samples:
            space.begin_sample(j)
            draw = sampler.sample(space, j, common)
            space.add_to_mean(draw, record.add(draw, space.perturbation_norm()), single=False)
    else:
        _skip_samples(space)
    return _join_samples(space, record, samples, StepRecord(weighting, reported=record), num_samples)


def _skip_samples(space: ParameterSpace) -> None:
    """Take part in a step without samples: one pass at θ whose gradient has no weight.

    The pass advances this rank's random state as on the other ranks and shows which parameters have a gradient.
    """
    space.reset_to_center()
    nothing = draw_at(space.evaluate())._replace(valid=space.false)
    space.add_to_mean(nothing, space.zero, single=False)


def _join_samples(
    space: ParameterSpace, record: StepRecord, samples: Sequence[int], joined: StepRecord, num_samples: int
) -> StepRecord:
    """Exchange what the ranks have found; afterwards all have the same record and the same mean of gradients.

    One sum of scalars, and one sum of gradients, each rank's weighted by the total weight of its samples.

    Args:
        space: The space of the step.
        record: The samples of this rank.
        samples: Their indices.
        joined: An empty record for the samples of all ranks.
        num_samples: Number of samples of all ranks.
    """
    numbers = torch.zeros(5 * num_samples + len(space.params), dtype=space.dtype, device=space.device)
    rows, seen = numbers[: 5 * num_samples].view(-1, 5), numbers[5 * num_samples :]
    for j, row in zip(samples, record.per_sample(), strict=True):
        rows[j] = row
    seen.copy_(torch.tensor(space.gradient_mean.seen, dtype=space.dtype))
    space.ranks.sum_over_samples(numbers)
    for row in rows:
        loss, valid, start_loss, perturbation_norm, gradient_norm = row.unbind()
        joined.add(Draw(loss, None, gradient_norm, valid != 0, start_loss), perturbation_norm)
    sample_weights = joined.table()[1]
    total = sample_weights[list(samples)].sum() if samples else space.zero
    space.gradient_mean.sum_over_ranks(total, (seen > 0).tolist())
    space.ranks.copy_from_first([*space.model_state.buffers(), *space.sampler_state.tensors(space.params)])
    return joined
