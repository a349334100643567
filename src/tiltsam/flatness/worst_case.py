"""Worst-case sharpness: how far the loss rises within a small ball around the weights.

    S_m = mean over chunks B of m examples of  max_{||eps / T|| <= rho} L_B(theta + eps) - L_B(theta)

with ``T = 1`` (Foret et al. 2021, m-sharpness) or ``T = |theta| + eta`` (Kwon et al. 2021, adaptive: unchanged when a
layer is scaled up and the next one down by the same factor, up to ``eta``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tiltsam.flatness.data import batch_size, chunks
from tiltsam.flatness.loss_surface import Batches, LossFn, LossSurface, ProgressCallback
from tiltsam.flatness.numerics import at_least_float32, finite_losses, total_norm, weighted_mean
from tiltsam.flatness.randomness import Purpose, generator
from tiltsam.space import EPS
from tiltsam.space.validation import check_count, check_nonnegative, check_positive

__all__ = ["WorstCase", "m_sharpness"]


@dataclass(frozen=True)
class WorstCase:
    """Worst-case sharpness, a mean over chunks of the data.

    Attributes:
        value: The mean rise of the loss; never negative, and a lower bound (the ascent may miss the maximum).
        error: Its standard error over chunks; NaN for a single chunk.
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
    progress: ProgressCallback | None = None,
) -> WorstCase:
    """Return the rise of the loss at the worst point of a ball, found by ascent on each chunk of ``m`` examples.

    Projected ascent along the normalised gradient. The first step goes to the edge of the ball; with ``num_steps=1``
    it is SAM's ascent (ASAM's if ``adaptive``). Later steps are shorter, and the highest loss counts.

        eps += step_j T^2 g / (||T g|| + 1e-12),  step_j = rho (1 - j / num_steps),  then back into the ball

    Cost: ``num_steps`` gradients and a forward pass over the data; memory: three copies of the weights. Biased low, as
    the ascent may stop short of the maximum.

    Args:
        model: The model. Measured in eval mode and restored.
        loss_fn: ``loss_fn(model, batch)``, the mean loss of a batch.
        batches: The data set, see :mod:`tiltsam.flatness.loss_surface`.
        rho: The radius: about .05 to .2 for plain, .5 to 2 for adaptive sharpness.
        m: Examples per chunk, cut from each batch along the first dimension of its tensors; whole batches by default.
            The last chunk of a batch may be smaller and weighs less.
        num_steps: The number of ascent steps.
        adaptive: Measure distances relative to the weights, ``T = |theta| + eta``.
        eta: Keeps ``T`` away from zero.
        random_start: Start at a random point on the sphere of radius ``rho / 2``: at an exact minimum the gradient is
            zero, and ascent from the center does not move.
        seed: Seed of the random start.
        parameters: Names of the parameters to move; all trainable ones by default.
        size_of: Weight of a chunk; its number of examples by default.
        progress: Called as ``progress(done, total)`` in chunks; until the end ``total`` is ``done + 1``.

    Raises:
        ValueError: If the data is empty, the first batch has fewer than ``m`` examples, a loss is not finite, or an
            argument is out of range.

    Warns:
        UserWarning: If half-precision weights round a step by more than a tenth of its length.

    Example:
        >>> from tiltsam.sharpness import supervised
        >>> data = [(torch.randn(8, 2), torch.randn(8, 1))]
        >>> worst = m_sharpness(nn.Linear(2, 1), supervised(nn.functional.mse_loss), data, rho=0.1, m=4)
        >>> worst.value >= 0, len(worst.rises)
        (True, 2)
    """
    check_positive("rho", rho)
    check_count("num_steps", num_steps)
    if m is not None:
        check_count("m", m)
    check_nonnegative("eta", eta)
    highs, lows, sizes = [], [], []
    with LossSurface(model, loss_fn, batches, parameters=parameters, size_of=size_of, seed=seed) as surface:
        for number, (chunk, size) in enumerate(_chunks(surface, m)):
            random = generator(surface.device, Purpose.WORST_CASE, seed, number) if random_start else None
            with surface.fixed_randomness():
                low, high = _ascend(surface, chunk, rho, num_steps, eta if adaptive else None, random)
            lows.append(low)
            highs.append(high)
            sizes.append(size)
            surface.restore()
            if progress is not None:
                progress(number + 1, number + 2)
        if progress is not None:
            progress(len(sizes), len(sizes))
    loss = finite_losses(lows)
    rises = finite_losses(highs, " during the ascent") - loss
    return WorstCase(
        *weighted_mean(rises, sizes),
        loss=weighted_mean(loss, sizes).value,
        rises=rises,
        sizes=torch.tensor(sizes, dtype=torch.float64, device="cpu"),
    )


def _ascend(
    surface: LossSurface,
    chunk: Any,
    rho: float,
    num_steps: int,
    eta: float | None,
    random: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """Return the loss of a chunk at the center and the highest one; leave the parameters at the end of the ascent."""
    origin = surface.origin
    # The offset is eps / T, so that a weight with T = 0 does not move; in float32 for half-precision weights.
    offset = [saved.new_zeros(saved.shape, dtype=at_least_float32(saved)) for saved in origin]

    def times_t(index: int, x: Tensor) -> Tensor:
        return x if eta is None else x * (origin[index].abs() + eta)

    def move() -> None:
        surface.move_to(times_t(index, x) for index, x in enumerate(offset))

    low = high = surface.batch_loss(chunk)
    if random is not None:
        for saved, x in zip(origin, offset, strict=True):
            x.normal_(generator=random)
            if eta == 0:
                x.mul_(saved != 0)
        _scale_to(offset, rho / 2)
        move()
    for step in range(num_steps):
        loss, grads = surface.loss_and_gradient(chunk)
        high = torch.maximum(high, loss)
        slopes = [grad.to(x.dtype) for grad, x in zip(grads, offset, strict=True)]
        pace = rho * (1 - step / num_steps) / (total_norm(times_t(i, slope) for i, slope in enumerate(slopes)) + EPS)
        for index, (x, slope) in enumerate(zip(offset, slopes, strict=True)):
            x.add_(times_t(index, slope) * pace.to(x.device))
        _scale_to(offset, rho, only_shrink=True)
        move()
    return low, torch.maximum(high, surface.batch_loss(chunk))


def _scale_to(offset: list[Tensor], length: float, only_shrink: bool = False) -> None:
    """Scale the offset to a length, or to at most that."""
    factor = length / (total_norm(offset) + EPS)
    if only_shrink:
        factor = factor.clamp(max=1.0)
    for x in offset:
        x.mul_(factor.to(x.device))


def _chunks(surface: LossSurface, m: int | None) -> Iterator[tuple[Any, float]]:
    """Yield the data set in chunks of ``m`` examples, each with its weight."""
    for number, (batch, size) in enumerate(surface.iterate()):
        if m is None:
            yield batch, size
            continue
        if number == 0 and batch_size(batch) < m:
            raise ValueError(f"m must be at most the batch size, {batch_size(batch)}, got {m}")
        for chunk in chunks(batch, m):
            yield chunk, float(surface.size_of(chunk))
