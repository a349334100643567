"""Scratch weights: where the samples of a captured step are evaluated, one after the other or concurrently.

While the kernels of a sample are recorded, the parameters use the memory of a scratch copy of the weights. θ itself is
read only: it needs no backup and no restore. With one copy per sample and a stream for each, samples run concurrently.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from tiltsam.optim.sharpness_aware import SharpnessAware, Step
from tiltsam.samplers import Draw, Sampler
from tiltsam.space.model_state import uninterrupted
from tiltsam.space.parameter_space import ParameterSpace
from tiltsam.space.step_record import StepRecord
from tiltsam.space.tensor_lists import allocate

__all__ = ["Scratch", "allocate_scratch", "average_samples_concurrently", "can_run_concurrently", "weights_at"]


class Scratch(NamedTuple):
    """Memory for a copy of the weights and, on a GPU, a stream.

    Graphs that never run at the same time share it: torch reuses memory on the stream it was used on, so graphs with
    other streams could not share the memory of their passes.
    """

    point: list[Tensor]
    stream: torch.cuda.Stream | None


def allocate_scratch(space: ParameterSpace, number: int) -> list[Scratch]:
    """Allocate scratch weights for ``number`` samples.

    The first uses the memory that eager steps save θ in: a replay never runs during an eager step.
    """
    on_gpu = space.device.type == "cuda"
    points = [space.center, *(allocate(space.center)[0] for _ in range(number - 1))]
    return [Scratch(point, torch.cuda.Stream(space.device) if on_gpu else None) for point in points]


@contextmanager
def weights_at(params: Sequence[Tensor], point: Sequence[Tensor]) -> Iterator[None]:
    """Let the parameters use the memory of ``point`` inside."""
    theta = [p.data for p in params]

    def restore() -> None:
        for p, data in zip(params, theta, strict=True):
            p.data = data

    try:
        for p, x in zip(params, point, strict=True):
            p.data = torch.view_as_complex(x) if p.is_complex() else x
        yield
    finally:
        uninterrupted(restore)


def can_run_concurrently(sampler: Sampler) -> bool:
    """Return whether no sample needs another one, or an ascent that they share."""
    return sampler.independent and not sampler.share_ascent


def average_samples_concurrently(
    optimizer: SharpnessAware, step: Step, replicas: Sequence[ParameterSpace], scratch: Sequence[Scratch]
) -> StepRecord:
    """Draw all samples of a step, each in its replica and stream, then average their gradients.

    The counterpart of :meth:`SharpnessAware.average_samples`.
    """
    draws: list[tuple[ParameterSpace, Draw, Tensor]] = []
    with ExitStack() as joins:
        for j, (replica, memory) in enumerate(zip(replicas, scratch, strict=True)):
            with _forked(memory.stream, joins), weights_at(step.space.params, memory.point):
                replica.begin_sample(j)
                draw = step.sampler.sample(replica, j, step.sampler.begin(replica))
                draws.append((replica, draw, replica.perturbation_norm()))
    record = step.space.step_record(optimizer.weighting(step.space), step.num_samples)
    for replica, draw, norm in draws:
        replica.add_to_mean(draw, record.add(draw, norm), single=False)
    return record


def _forked(stream: torch.cuda.Stream | None, joins: ExitStack) -> AbstractContextManager[object]:
    """Send work to a stream that starts from the current one; the current one waits for it when ``joins`` closes."""
    if stream is None:
        return nullcontext()
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    joins.callback(current.wait_stream, stream)
    return torch.cuda.stream(stream)
