"""Slices through the loss surface, as data: along one direction, in a plane, between two solutions.

A direction is ``{parameter name: tensor}``; parameters that it does not name stay put. There are three kinds:

- :func:`random_direction`: random, with each filter as long as the model's own (Li et al. 2018), so that slices of
  networks whose weights differ in scale can be compared;
- :meth:`tiltsam.curvature.Eigenpairs.direction`: an eigenvector of the Hessian, where the surface bends the most;
- :func:`between`: from one solution to another.

Pictures of them are in :mod:`tiltsam.flatness.figures`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from tiltsam.flatness.evaluation import Batches, LossFn, LossSurface, Progress, generator, trainable
from tiltsam.flatness.sums import wide
from tiltsam.warning import warn

__all__ = ["Direction", "Slice1D", "Slice2D", "between", "random_direction", "slice_1d", "slice_2d"]

Direction: TypeAlias = Mapping[str, Tensor]
"""A direction in parameter space: tensors by parameter name."""

Normalize: TypeAlias = Literal["filter", "layer", "none"]
"""What the parts of a random direction are scaled to: each filter's norm, each tensor's norm, or nothing."""


@dataclass(frozen=True)
class Slice1D:
    """The loss along a line: ``losses[i]`` at ``positions[i]`` (both float64, on the host)."""

    positions: Tensor
    losses: Tensor = field(repr=False)
    label: str = ""


@dataclass(frozen=True)
class Slice2D:
    """The loss in a plane: ``losses[i, j]`` at ``y[i]``, ``x[j]`` (all float64, on the host)."""

    x: Tensor
    y: Tensor
    losses: Tensor = field(repr=False)
    label: str = ""


def random_direction(
    model: nn.Module, seed: int = 0, index: int = 0, *, normalize: Normalize = "filter"
) -> dict[str, Tensor]:
    """A Gaussian direction, scaled filter by filter to the norms of the model's weights (Li et al. 2018, section 4).

        d_ij <- d_ij ||w_ij|| / ||d_ij||    for filter j of layer i, the slices along the first dimension

    Biases and normalisation parameters (fewer than two dimensions) get 0, as in the paper: their norm says nothing
    about the scale of a filter.

    Args:
        model: Whose trainable parameters, names and norms are taken.
        seed: Seed of the draw.
        index: Which of the directions of that seed; two of them span a plane.
        normalize: ``filter``; ``layer`` to scale whole tensors; ``none`` to leave everything N(0, 1).

    Warns:
        UserWarning: If the direction is zero: biases alone are trained, say.

    Example:
        >>> layer = nn.Linear(3, 2)
        >>> direction = random_direction(layer)
        >>> torch.testing.assert_close(direction["weight"].norm(dim=1), layer.weight.detach().norm(dim=1))
    """
    if normalize not in ("filter", "layer", "none"):
        raise ValueError(f"normalize must be 'filter', 'layer' or 'none', got {normalize!r}")
    direction: dict[str, Tensor] = {}
    params = trainable(model)
    random = generator(next(iter(params.values())).device, "direction", seed, index)
    for name, param in params.items():
        weight = param.detach().to(wide(param))
        draw = torch.randn(weight.shape, generator=random, device=random.device, dtype=weight.dtype).to(weight.device)
        if normalize == "none":
            direction[name] = draw
        elif weight.dim() < 2:
            direction[name] = torch.zeros_like(weight)
        else:
            rows = (len(weight), -1) if normalize == "filter" else (1, -1)
            ratio = weight.reshape(rows).norm(dim=1) / draw.reshape(rows).norm(dim=1)
            direction[name] = (draw.reshape(rows) * ratio[:, None]).view_as(weight)
    if not any(bool(part.any()) for part in direction.values()):
        warn("the direction is zero, as no trainable parameter has filters: normalize='none'")
    return direction


def slice_1d(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Batches,
    direction: Direction,
    *,
    span: tuple[float, float] = (-1.0, 1.0),
    num_points: int = 21,
    label: str = "",
    seed: int = 0,
    size_of: Callable[[Any], float] | None = None,
    progress: Progress | None = None,
) -> Slice1D:
    """The loss at ``theta + a * direction`` for ``a`` across ``span``.

    Cost: ``num_points`` forward passes over the data; memory: one copy of the weights.

    Args:
        model: The model at ``theta``. Measured in eval mode, left as it was.
        loss_fn: ``loss_fn(model, batch)``, the mean loss of a batch.
        batches: The data set, see :mod:`tiltsam.flatness.evaluation`.
        direction: Where to go; with a filter-normalised one, ``a = 1`` is noise as large as the weights.
        span: The first and the last ``a``.
        num_points: Points, evenly spaced; an odd number over a symmetric span includes ``theta`` itself.
        label: For the legend of a figure.
        seed: Where each walk over the data puts the global random state.
        size_of: The weight of a batch.
        progress: Called as ``progress(done, num_points)``.

    Raises:
        ValueError: If the data is empty, a loss is not finite, or the direction does not fit the model.

    Example:
        >>> from tiltsam.flatness.evaluation import supervised
        >>> model, data = nn.Linear(2, 1), [(torch.randn(8, 2), torch.randn(8, 1))]
        >>> line = slice_1d(model, supervised(nn.functional.mse_loss), data, random_direction(model))
        >>> line.losses.shape
        torch.Size([21])
    """
    steps = _steps(span, num_points)
    losses = _visit(model, loss_fn, batches, [direction], [(a,) for a in steps], seed, size_of, progress)
    return Slice1D(torch.tensor(steps, dtype=torch.float64, device="cpu"), losses, label)


def slice_2d(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Batches,
    direction_x: Direction,
    direction_y: Direction,
    *,
    span_x: tuple[float, float] = (-1.0, 1.0),
    span_y: tuple[float, float] = (-1.0, 1.0),
    num_points: int = 21,
    label: str = "",
    seed: int = 0,
    size_of: Callable[[Any], float] | None = None,
    progress: Progress | None = None,
) -> Slice2D:
    """The loss at ``theta + a * direction_x + b * direction_y`` on a square grid.

    Cost: ``num_points ** 2`` forward passes over the data; memory: one copy of the weights. The arguments are those
    of :func:`slice_1d`. Random directions in many dimensions are as good as orthogonal; others are taken as given.

    Raises:
        ValueError: If the data is empty, a loss is not finite, or a direction does not fit the model.
    """
    x, y = _steps(span_x, num_points), _steps(span_y, num_points)
    places = [(a, b) for b in y for a in x]
    losses = _visit(model, loss_fn, batches, [direction_x, direction_y], places, seed, size_of, progress)
    wide_x, wide_y = (torch.tensor(steps, dtype=torch.float64, device="cpu") for steps in (x, y))
    return Slice2D(wide_x, wide_y, losses.view(len(y), len(x)), label)


def between(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Batches,
    start: nn.Module | Mapping[str, Tensor],
    end: nn.Module | Mapping[str, Tensor],
    *,
    span: tuple[float, float] = (0.0, 1.0),
    num_points: int = 21,
    label: str = "",
    seed: int = 0,
    size_of: Callable[[Any], float] | None = None,
    progress: Progress | None = None,
) -> Slice1D:
    """The loss on the straight line from one solution (position 0) to another (position 1).

    Everything in floating point is interpolated, frozen parameters and buffers included, so that the ends are exactly
    the two solutions; only the extra state of modules (``get_extra_state``) stays the model's own. Between the ends,
    interpolated BatchNorm statistics are not those of the interpolated weights: a barrier there may be the
    statistics' own, not the landscape's.

    Cost: ``num_points`` forward passes over the data; memory: one copy of the weights.

    Args:
        model: The model to load the weights into; left as it was. It may be one of the two ends.
        loss_fn: ``loss_fn(model, batch)``, the mean loss of a batch.
        batches: The data set, see :mod:`tiltsam.flatness.evaluation`.
        start: A model or its state dict.
        end: Another.
        span: The first and the last position; beyond 0 and 1 the line goes on.
        num_points: Points, evenly spaced.
        label: For the legend of a figure.
        seed: Where each walk over the data puts the global random state.
        size_of: The weight of a batch.
        progress: Called as ``progress(done, num_points)``.

    Raises:
        ValueError: If the data is empty, a loss is not finite, or the two do not fit the model.
    """
    own = _tensors(model.state_dict(keep_vars=True))
    states = [_tensors(side.state_dict() if isinstance(side, nn.Module) else side) for side in (start, end)]
    for state in states:
        if state.keys() != own.keys() or any(state[name].shape != own[name].shape for name in own):
            raise ValueError("the two ends must have the names and shapes of the model's state dict")
    # The weights of the model itself move while we look: an end that is the model must be a copy.
    ends = [_copy_if_own(state, own) for state in states]
    steps = _steps(span, num_points)
    with LossSurface(model, loss_fn, batches, size_of=size_of, seed=seed) as surface:
        losses = torch.empty(num_points, dtype=torch.float64, device="cpu")
        surface.save_all()
        for i, position in enumerate(steps):
            with torch.no_grad():
                for name, tensor in own.items():
                    a, b = ends[0][name].to(tensor.device), ends[1][name].to(tensor.device)
                    if tensor.is_floating_point():
                        # lerp is exact at both ends, a + p (b - a) only at the first
                        tensor.copy_(torch.lerp(a.to(wide(tensor)), b.to(wide(tensor)), position))
                    else:
                        tensor.copy_(a if position < 0.5 else b)  # counters: the nearer end's
            losses[i] = surface.loss(f" at position {position:g}")
            if progress is not None:
                progress(i + 1, num_points)
    return Slice1D(torch.tensor(steps, dtype=torch.float64, device="cpu"), losses, label)


def _visit(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Batches,
    directions: Sequence[Direction],
    places: Sequence[tuple[float, ...]],
    seed: int,
    size_of: Callable[[Any], float] | None,
    progress: Progress | None,
) -> Tensor:
    """The loss at ``theta + sum_k place[k] directions[k]`` for every place."""
    known = trainable(model)
    for direction in directions:
        for name, part in direction.items():
            if name not in known or part.shape != known[name].shape:
                raise ValueError(f"the direction does not fit the model: {name} of shape {tuple(part.shape)}")
    moved = [name for name in known if any(name in direction for direction in directions)]
    with LossSurface(model, loss_fn, batches, parameters=moved, size_of=size_of, seed=seed) as surface:
        losses = torch.empty(len(places), dtype=torch.float64, device="cpu")
        for i, place in enumerate(places):
            with torch.no_grad():
                for name, param, saved in zip(surface.names, surface.params, surface.origin, strict=True):
                    point = saved.to(wide(saved), copy=True)
                    for a, direction in zip(place, directions, strict=True):
                        if name in direction:
                            point.add_(direction[name].to(point), alpha=a)
                    param.copy_(point)
            losses[i] = surface.loss(f" at {', '.join(f'{a:g}' for a in place)}")
            if progress is not None:
                progress(i + 1, len(places))
    return losses


def _steps(span: tuple[float, float], num_points: int) -> list[float]:
    low, high = span
    if num_points < 2 or not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"need at least 2 points over a span that rises, got {num_points} over {span}")
    # From both ends towards the middle, so that a symmetric span is symmetric to the last bit and meets 0 exactly.
    middle, half = (low + high) / 2, (high - low) / 2
    return [middle + half * ((2 * i - (num_points - 1)) / (num_points - 1)) for i in range(num_points)]


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The parameters and buffers of a state dict, without what modules make up for it (``get_extra_state``)."""
    return {name: tensor for name, tensor in state.items() if name.rpartition(".")[2] != "_extra_state"}


def _copy_if_own(side: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    pointers = {tensor.data_ptr() for tensor in own.values()}
    return {name: t.detach().clone() if t.data_ptr() in pointers else t.detach() for name, t in side.items()}
