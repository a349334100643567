"""Slices through the loss surface, as data: along one direction, in a plane, between two solutions.

A direction is ``{parameter name: tensor}``; parameters that it does not name do not move. There are three kinds:

- :func:`random_direction`: random, with the filter norms of the model (Li et al. 2018), so that slices of networks
  whose weights differ in scale can be compared;
- :meth:`tiltsam.curvature.Eigenpairs.direction`: an eigenvector of the Hessian, along which the loss curves most;
- :func:`between`: from one solution to another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from tiltsam.flatness.loss_surface import Batches, LossFn, LossSurface, ProgressCallback, trainable
from tiltsam.flatness.numerics import at_least_float32
from tiltsam.flatness.randomness import Purpose, generator
from tiltsam.space.validation import check_count, warn

__all__ = ["Direction", "Slice1D", "Slice2D", "between", "random_direction", "slice_1d", "slice_2d"]

Direction: TypeAlias = Mapping[str, Tensor]
"""A direction in parameter space: tensors by parameter name."""

Normalize: TypeAlias = Literal["filter", "layer", "none"]
"""How a random direction is scaled: to the norm of each filter, of each tensor, or not at all."""


@dataclass(frozen=True)
class Slice1D:
    """The loss along a line: ``losses[i]`` at ``positions[i]`` (both float64, on the host)."""

    positions: Tensor
    losses: Tensor = field(repr=False)
    label: str = ""
    """Name of the direction, for plots."""


@dataclass(frozen=True)
class Slice2D:
    """The loss in a plane: ``losses[i, j]`` at ``y[i]``, ``x[j]`` (all float64, on the host)."""

    x: Tensor
    y: Tensor
    losses: Tensor = field(repr=False)
    label: str = ""
    """Name of the two directions, for plots."""


def random_direction(
    model: nn.Module, seed: int = 0, index: int = 0, *, normalize: Normalize = "filter"
) -> dict[str, Tensor]:
    """Return a Gaussian direction, scaled to the norm of each filter of the model (Li et al. 2018, section 4).

        d_ij <- d_ij ||w_ij|| / ||d_ij||    for filter j of layer i, the slices along the first dimension

    Biases and normalisation parameters (fewer than two dimensions) get 0, as in the paper.

    Args:
        model: The model; the direction has the names and norms of its trainable parameters.
        seed: Seed of the draw.
        index: The number of the direction for this seed; two of them span a plane.
        normalize: ``filter``; ``layer`` to scale whole tensors; ``none`` to leave everything N(0, 1).

    Warns:
        UserWarning: If the direction is zero, for example because only biases are trained.

    Example:
        >>> layer = nn.Linear(3, 2)
        >>> direction = random_direction(layer)
        >>> torch.testing.assert_close(direction["weight"].norm(dim=1), layer.weight.detach().norm(dim=1))
    """
    if normalize not in ("filter", "layer", "none"):
        raise ValueError(f"normalize must be 'filter', 'layer' or 'none', got {normalize!r}")
    direction: dict[str, Tensor] = {}
    params = trainable(model)
    random = generator(next(iter(params.values())).device, Purpose.DIRECTION, seed, index)
    for name, param in params.items():
        weight = param.detach().to(at_least_float32(param))
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
        warn("the direction is zero: no trainable parameter has filters; pass normalize='none'", UserWarning)
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
    progress: ProgressCallback | None = None,
) -> Slice1D:
    """Return the loss at ``theta + a * direction`` for ``a`` across ``span``.

    Cost: ``num_points`` forward passes over the data; memory: one copy of the weights.

    Args:
        model: The model at ``theta``. Measured in eval mode and restored.
        loss_fn: ``loss_fn(model, batch)``, the mean loss of a batch.
        batches: The data set, see :mod:`tiltsam.flatness.loss_surface`.
        direction: The direction; if it is filter-normalised, ``a = 1`` is noise as large as the weights.
        span: The first and the last ``a``.
        num_points: Evenly spaced points; an odd number over a symmetric span includes ``theta`` itself.
        label: Label for a figure.
        seed: Seed of the global generators, set before each iteration over the data.
        size_of: Weight of a batch; its number of examples by default.
        progress: Called as ``progress(done, num_points)``.

    Raises:
        ValueError: If the data is empty, a loss is not finite, or the direction does not fit the model.

    Example:
        >>> from tiltsam.sharpness import supervised
        >>> model, data = nn.Linear(2, 1), [(torch.randn(8, 2), torch.randn(8, 1))]
        >>> line = slice_1d(model, supervised(nn.functional.mse_loss), data, random_direction(model))
        >>> line.losses.shape
        torch.Size([21])
    """
    positions = _positions("span", span, num_points)
    points = [(a,) for a in positions.tolist()]
    losses = _losses_at(model, loss_fn, batches, [direction], points, seed, size_of, progress)
    return Slice1D(positions, losses, label)


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
    progress: ProgressCallback | None = None,
) -> Slice2D:
    """Return the loss at ``theta + a * direction_x + b * direction_y`` on a square grid.

    Cost: ``num_points ** 2`` forward passes over the data; memory: one copy of the weights. The directions are not
    orthogonalised; ``random_direction(model)`` and ``random_direction(model, index=1)`` nearly are.

    Args:
        model: The model at ``theta``. Measured in eval mode and restored.
        loss_fn: ``loss_fn(model, batch)``, the mean loss of a batch.
        batches: The data set, see :mod:`tiltsam.flatness.loss_surface`.
        direction_x: The direction of ``a``.
        direction_y: The direction of ``b``.
        span_x: The first and the last ``a``.
        span_y: The first and the last ``b``.
        num_points: Evenly spaced points along each direction.
        label: Label for a figure.
        seed: Seed of the global generators, set before each iteration over the data.
        size_of: Weight of a batch; its number of examples by default.
        progress: Called as ``progress(done, num_points ** 2)``.

    Raises:
        ValueError: If the data is empty, a loss is not finite, or a direction does not fit the model.

    Warns:
        UserWarning: If the directions are parallel.
    """
    x, y = _positions("span_x", span_x, num_points), _positions("span_y", span_y, num_points)
    points = [(a, b) for b in y.tolist() for a in x.tolist()]
    losses = _losses_at(model, loss_fn, batches, [direction_x, direction_y], points, seed, size_of, progress)
    return Slice2D(x, y, losses.view(len(y), len(x)), label)


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
    progress: ProgressCallback | None = None,
) -> Slice1D:
    """Return the loss on the straight line from one solution (position 0) to another (position 1).

    All floating-point parameters and buffers are interpolated, the frozen ones too, so that the ends are exactly the
    two solutions; the extra state of modules (``get_extra_state``) is left alone. Between the ends, interpolated
    BatchNorm statistics are not those of the interpolated weights: a barrier may be due to them alone.

    Cost: ``num_points`` forward passes over the data; memory: one copy of the weights.

    Args:
        model: The model to load the weights into; restored. It may be one of the two ends.
        loss_fn: ``loss_fn(model, batch)``, the mean loss of a batch.
        batches: The data set, see :mod:`tiltsam.flatness.loss_surface`.
        start: The solution at position 0, a model or its state dict.
        end: The solution at position 1.
        span: The first and the last position; may extend beyond 0 and 1.
        num_points: Evenly spaced points.
        label: Label for a figure.
        seed: Seed of the global generators, set before each iteration over the data.
        size_of: Weight of a batch; its number of examples by default.
        progress: Called as ``progress(done, num_points)``.

    Raises:
        ValueError: If the data is empty, a loss is not finite, or an end does not fit the model.
    """
    own = _tensors(model.state_dict(keep_vars=True))
    states = [_tensors(side.state_dict() if isinstance(side, nn.Module) else side) for side in (start, end)]
    for state in states:
        if state.keys() != own.keys() or any(state[name].shape != own[name].shape for name in own):
            raise ValueError("start and end must have the names and shapes of the model's state dict")
    # The weights of the model itself change below: an end that shares memory with them must be copied.
    ends = [_copy_if_shared(state, own) for state in states]
    positions = _positions("span", span, num_points)
    with LossSurface(model, loss_fn, batches, size_of=size_of, seed=seed) as surface:
        losses = torch.empty(num_points, dtype=torch.float64, device="cpu")
        surface.save_all()
        for i, position in enumerate(positions.tolist()):
            with torch.no_grad():
                for name, tensor in own.items():
                    a, b = (end[name].to(tensor.device) for end in ends)
                    if tensor.is_floating_point():
                        dtype = at_least_float32(tensor)
                        # lerp is exact at both ends, a + p (b - a) only at the first
                        tensor.copy_(torch.lerp(a.to(dtype), b.to(dtype), position))
                    else:
                        tensor.copy_(a if position < 0.5 else b)  # a counter: that of the nearer end
            losses[i] = surface.mean_loss(f" at position {position:g}")
            if progress is not None:
                progress(i + 1, num_points)
    return Slice1D(positions, losses, label)


def _losses_at(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Batches,
    directions: Sequence[Direction],
    points: Sequence[tuple[float, ...]],
    seed: int,
    size_of: Callable[[Any], float] | None,
    progress: ProgressCallback | None,
) -> Tensor:
    """Return the loss at ``theta + sum_k point[k] directions[k]`` for every point."""
    known = trainable(model)
    for direction in directions:
        if not direction:
            raise ValueError("a direction must have at least one parameter, got none")
        for name, part in direction.items():
            if name not in known or part.shape != known[name].shape:
                raise ValueError(f"a direction must fit the model, got {name!r} of shape {tuple(part.shape)}")
    if len(directions) == 2 and _are_parallel(*directions):
        warn("the directions are parallel: the second random one is random_direction(model, index=1)", UserWarning)
    moved = [name for name in known if any(name in direction for direction in directions)]
    with LossSurface(model, loss_fn, batches, parameters=moved, size_of=size_of, seed=seed) as surface:
        losses = torch.empty(len(points), dtype=torch.float64, device="cpu")
        for i, point in enumerate(points):
            surface.move_to(_offsets(surface, directions, point))
            losses[i] = surface.mean_loss(f" at {', '.join(f'{a:g}' for a in point)}")
            if progress is not None:
                progress(i + 1, len(points))
    return losses


def _are_parallel(a: Direction, b: Direction) -> bool:
    """Return whether two directions span a line."""

    def inner(x: Direction, y: Direction) -> float:
        return sum((x[name] * y[name].to(x[name])).sum().item() for name in x if name in y)

    return inner(a, b) ** 2 > (1 - 1e-6) * inner(a, a) * inner(b, b)


def _offsets(surface: LossSurface, directions: Sequence[Direction], point: tuple[float, ...]) -> Iterator[Tensor]:
    """Yield ``sum_k point[k] directions[k]`` for each parameter."""
    for name, param in zip(surface.names, surface.params, strict=True):
        offset = torch.zeros_like(param, dtype=at_least_float32(param), requires_grad=False)
        for a, direction in zip(point, directions, strict=True):
            if name in direction:
                offset.add_(direction[name].to(offset), alpha=a)
        yield offset


def _positions(name: str, span: tuple[float, float], num_points: int) -> Tensor:
    """Return evenly spaced positions (float64, on the host)."""
    low, high = span
    check_count("num_points", num_points, 2)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"{name} must be finite and increasing, got {span}")
    # From both ends towards the middle: a symmetric span is symmetric to the last bit and contains 0 exactly.
    middle, half = (low + high) / 2, (high - low) / 2
    positions = [middle + half * ((2 * i - (num_points - 1)) / (num_points - 1)) for i in range(num_points)]
    return torch.tensor(positions, dtype=torch.float64, device="cpu")


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the parameters and buffers of a state dict, without extra state (``get_extra_state``)."""
    return {name: tensor for name, tensor in state.items() if name.rpartition(".")[2] != "_extra_state"}


def _copy_if_shared(side: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return detached tensors, copied if they share memory with the model's own."""
    pointers = {tensor.data_ptr() for tensor in own.values()}
    return {name: t.detach().clone() if t.data_ptr() in pointers else t.detach() for name, t in side.items()}
