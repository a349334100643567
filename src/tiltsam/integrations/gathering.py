"""The first half of a step: all its passes, and the aggregate left where a trainer looks for a gradient.

A trainer clips, logs norms, unscales and steps on its own. With the aggregate in ``p.grad`` it can go on doing so, on
the base optimizer, which shares parameter groups and state with the method that wraps it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tiltsam.info import StepInfo
from tiltsam.parameters import Closure, ParameterSpace
from tiltsam.wrapper import SharpnessAware

__all__ = ["gather"]


def gather(optimizer: SharpnessAware, closure: Closure, scaler: torch.amp.GradScaler | None = None) -> Tensor:
    """Run the passes of a step, and leave the gradient they make on the parameters instead of descending it.

    ``optimizer.base.step()`` is the other half. The step counts as taken.

    Args:
        optimizer: The method.
        closure: As for :meth:`tiltsam.SharpnessAware.step`.
        scaler: The scaler by which the closure scales its loss. The gradient is left scaled, as after any backward; if
            a pass overflowed it is made infinite, so that the scaler skips the step and lowers its scale.

    Returns:
        The loss of the first pass: for SAM the one at the weights, which a plain step would report. What was descended
        is in ``optimizer.last``.

    Example:
        >>> w = torch.nn.Parameter(torch.tensor([3.0]))
        >>> sam = tiltsam.SAM(torch.optim.SGD([w], lr=0.1), rho=1.0)
        >>> def closure():
        ...     loss = (w**2 / 2).sum()
        ...     loss.backward()
        ...     return loss
        >>> gather(sam, closure)
        tensor(4.5000)
        >>> w.grad  # at 3 + 1
        tensor([4.])
    """
    losses: list[Tensor] = []

    def watched() -> object:
        loss = closure()
        if not losses:
            losses.append(torch.as_tensor(loss).detach())
        return loss

    def run(space: ParameterSpace) -> StepInfo:
        info = optimizer.gather(space)
        space.hand_over()
        if space.scaling.scaler is not None:
            space.scaling.scale_mean(space.mean)
            _mark_overflow(space, info.num_nonfinite)
        elif optimizer.skip_nonfinite and not bool(info.weights.any().item()):
            optimizer.zero_grad()  # a base leaves parameters without gradient alone
        return info

    with optimizer.executing(run):
        optimizer.step(watched, scaler=scaler)
    return losses[0]


def _mark_overflow(space: ParameterSpace, num_nonfinite: Tensor) -> None:
    """Make the aggregate infinite if any pass overflowed, which is how a scaler hears of it."""
    gradient = next(p.grad for p in space.params if p.grad is not None)
    gradient.add_(torch.where(num_nonfinite > 0, torch.inf, 0.0).to(gradient))
