"""Worst-case sharpness: how far the loss rises within a small ball around the weights.

    S_m = mean over chunks B of m examples of  max_{||eps / T|| <= rho} L_B(theta + eps) - L_B(theta)

with ``T = 1`` (Foret et al. 2021, m-sharpness) or ``T = |theta| + eta`` (Kwon et al. 2021, adaptive:
unchanged when a layer is scaled up and the next one down by the same factor, up to ``eta``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tiltsam.batches import cut, tree_map
from tiltsam.flatness.evaluation import Batches, LossFn, LossSurface, Progress, batch_size, generator
from tiltsam.flatness.losses import check_finite
from tiltsam.flatness.moves import place
from tiltsam.flatness.sums import total_norm, weighted_mean, wide

__all__ = ["WorstCase", "m_sharpness"]

_TINY = 1e-12  # the paper's guard in v / (||v|| + 1e-12)


@dataclass(frozen=True)
class WorstCase:
    """Worst-case sharpness, a mean over chunks of the data.

    Attributes:
        value: The mean rise of the loss; never negative, and a lower bound of the true one (the ascent may
            miss the maximum).
        error: Its standard error over chunks; NaN if there is one chunk.
        loss: The mean loss at the weights.
        rises: The rise of each chunk (float64, on the host).
        sizes: The size of each chunk.
    """

    value: float
    error: float
    loss: float
    rises: Tensor = field(repr=False)
    sizes: Tensor = field(repr=False)


def m_sharpness(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Batches,
    *,
    rho: float,
    m: int | None = None,
    num_steps: int = 5,
    adaptive: bool = False,
    eta: float = 0.01,
    random_start: bool = False,
    seed: int = 0,
    parameters: Sequence[str] | None = None,
    size_of: Callable[[Any], float] | None = None,
    progress: Progress | None = None,
) -> WorstCase:
    """The rise of the loss at the worst point of a ball, found by ascent on each chunk of ``m`` examples.

    Projected ascent along the normalised gradient: the first step goes to the edge of the ball, which with
    ``num_steps=1`` is SAM's own ascent (ASAM's, if ``adaptive``); later ones are shorter in turn, and the
    highest loss met counts.

        eps += step_j T^2 g / (||T g|| + 1e-12),  step_j = rho (1 - j / num_steps),  then back into the ball

    Cost: ``num_steps`` gradients and a forward pass over the data; memory: three copies of the weights. Biased low, as
    every ascent that may stop short of the maximum.

    Args:
        model: The model. Measured in eval mode, left as it was.
        loss_fn: ``loss_fn(model, batch)``, the mean loss of a batch.
        batches: The data set, see :mod:`tiltsam.flatness.evaluation`.
        rho: The radius: about .05 to .2 for plain, .5 to 2 for adaptive sharpness.
        m: Examples per chunk, cut from each batch along the first dimension of its tensors; whole batches by
            default. The last chunk of a batch may be smaller and weighs less.
        num_steps: Steps of ascent.
        adaptive: Measure distances relative to the weights, ``T = |theta| + eta``.
        eta: What keeps ``T`` away from zero.
        random_start: Start at a random point on the sphere of radius ``rho / 2``; at an exact minimum, where
            the gradient is zero, ascent from the centre goes nowhere.
        seed: Seed of the random start.
        parameters: Names of the parameters to move; all trainable ones by default.
        size_of: The weight of a chunk, its number of examples by default.
        progress: Called as ``progress(chunks done, chunks)``; the total is only known at the end, until then
            it is one more than done.

    Raises:
        ValueError: If the data is empty, a batch holds fewer than ``m`` examples at the start, a loss is not
            finite, or an argument is out of range.

    Warns:
        UserWarning: If the weights are so coarse (bfloat16, float16) that rounding changes a step by a tenth or more.

    Example:
        >>> from tiltsam.flatness.evaluation import supervised
        >>> data = [(torch.randn(8, 2), torch.randn(8, 1))]
        >>> worst = m_sharpness(nn.Linear(2, 1), supervised(nn.functional.mse_loss), data, rho=0.1, m=4)
        >>> worst.value >= 0, len(worst.rises)
        (True, 2)
    """
    if not (math.isfinite(rho) and rho > 0):
        raise ValueError(f"rho must be a finite number > 0, got {rho}")
    if num_steps < 1 or (m is not None and m < 1) or not eta >= 0:
        raise ValueError(f"num_steps and m must be at least 1, eta at least 0: got {num_steps}, {m}, {eta}")
    highs, lows, sizes = [], [], []
    with LossSurface(model, loss_fn, batches, parameters=parameters, size_of=size_of, seed=seed) as surface:
        for number, (chunk, size) in enumerate(_chunks(surface, m)):
            random = generator(surface.device, "worst case", seed, number) if random_start else None
            with surface.same_draws():
                low, high = _ascend(surface, chunk, rho, num_steps, eta if adaptive else None, random)
            lows.append(low)
            highs.append(high)
            sizes.append(size)
            surface.restore()
            if progress is not None:
                progress(number + 1, number + 2)
        if progress is not None:
            progress(len(sizes), len(sizes))
    loss = torch.stack(lows).to("cpu", torch.float64)
    rises = torch.stack(highs).to("cpu", torch.float64) - loss
    check_finite(loss)
    check_finite(rises, " on the way up")
    weights = torch.tensor(sizes, dtype=torch.float64, device="cpu")
    return WorstCase(
        *weighted_mean(rises, weights),
        loss=weighted_mean(loss, weights)[0],
        rises=rises,
        sizes=weights,
    )


def _ascend(
    surface: LossSurface,
    chunk: Any,
    rho: float,
    num_steps: int,
    eta: float | None,
    random: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """The loss of a chunk at the centre and the highest met; leaves the parameters where the ascent ended."""
    origin, params = surface.origin, surface.params
    # In units of T, so that a weight whose T is zero just stays where it is. In float32 beside half-precision weights;
    # only the sum with them is rounded.
    offset = [saved.new_zeros(saved.shape, dtype=wide(saved)) for saved in origin]

    def unit(index: int) -> Tensor | float:
        return 1.0 if eta is None else origin[index].abs() + eta

    def moves() -> Iterator[Tensor]:
        return (shift * unit(index) for index, shift in enumerate(offset))

    low = high = surface.value(chunk)
    with torch.no_grad():
        if random is not None:
            for index, shift in enumerate(offset):
                shift.normal_(generator=random)
                if eta is not None:
                    shift.mul_(unit(index) > 0)
            _to_length(offset, rho / 2)
            place(params, origin, moves())
    for step in range(num_steps):
        loss, grads = surface.gradient(chunk)
        high = torch.maximum(high, loss)
        with torch.no_grad():
            slope = [g.to(e.dtype).mul_(unit(i)) for i, (g, e) in enumerate(zip(grads, offset, strict=True))]
            pace = rho * (1 - step / num_steps) / (total_norm(slope) + _TINY)
            for shift, rise in zip(offset, slope, strict=True):
                shift.add_(rise.mul_(pace.to(rise.device)))
            _to_length(offset, rho, only_shrink=True)
            place(params, origin, moves())
    return low, torch.maximum(high, surface.value(chunk))


def _to_length(offset: list[Tensor], length: float, only_shrink: bool = False) -> None:
    """Scale the offset to that length, or to at most that."""
    factor = length / (total_norm(offset) + _TINY)
    if only_shrink:
        factor = factor.clamp(max=1.0)
    for shift in offset:
        shift.mul_(factor.to(shift.device))


def _chunks(surface: LossSurface, m: int | None) -> Iterator[tuple[Any, float]]:
    """The data set in chunks of ``m`` examples, each with its weight."""
    for number, (batch, size) in enumerate(surface.walk()):
        if m is None:
            yield batch, size
            continue
        length = batch_size(batch)
        if number == 0 and length < m:
            raise ValueError(f"m = {m} examples are more than the {length} in a batch; give larger batches")
        for begin in range(0, length, m):
            chunk = tree_map(partial(cut, length=length, begin=begin, end=begin + m), batch)
            yield chunk, float(surface.size_of(chunk))
