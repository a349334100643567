"""Accelerate: one step on a batch, whatever was configured.

``accelerator.prepare`` takes a method of tiltsam like any optimizer. What it returns does not know that a step runs the
model several times: it hands the scaler a closure, and steps on the last of several accumulated batches alone.
:func:`step` does both right.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor

from tiltsam.distributed import ddp_in
from tiltsam.wrapper import SharpnessAware

__all__ = ["step"]

# Batches that wait for the last of their window.
_waiting: WeakKeyDictionary[SharpnessAware, list[tuple[Any, ...]]] = WeakKeyDictionary()


def step(
    accelerator: Accelerator,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[..., Tensor],
    *batch: Any,
    max_grad_norm: float | None = None,
) -> Tensor | None:
    """Take a step on a batch, or, while gradients accumulate, keep the batch for the step that is to come.

    Use it in place of ``accelerator.backward``, ``accelerator.clip_grad_norm_`` and ``optimizer.step``; in a loop that
    accumulates, inside ``with accelerator.accumulate(model)`` as usual. A step then sees all batches of its window in
    every pass, and equals a step on one large batch; they are held in memory until then. With DDP, prepare the model
    first, and give the optimizer what comes back as ``model=``: ranks then average gradients once a pass, and not after
    each of its batches.

    Args:
        accelerator: The accelerator.
        optimizer: A method of tiltsam, as ``accelerator.prepare`` returned it.
        loss_fn: Called with ``*batch``, returns the loss. It does not call backward.
        batch: What ``loss_fn`` takes.
        max_grad_norm: Clip the norm of the aggregated gradient, once a step.

    Returns:
        The loss that was descended, detached; ``None`` while gradients accumulate.

    Raises:
        TypeError: If the optimizer is not one of tiltsam's, or wraps a base that was prepared by itself; if ``loss_fn``
            is no function, or returns something else than a loss.
        ValueError: Where the accelerator shards or steps by means that several passes cannot go through.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> model = accelerator.prepare(torch.nn.Linear(3, 1))
        >>> sam = accelerator.prepare(tiltsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), model=model))
        >>> loss = step(accelerator, sam, lambda x: model(x).square().mean(), torch.ones(4, 3), max_grad_norm=1.0)
    """
    prepared = optimizer if isinstance(optimizer, AcceleratedOptimizer) else None
    method = prepared.optimizer if prepared is not None else optimizer
    if not isinstance(method, SharpnessAware):
        raise TypeError(f"step is for an optimizer of tiltsam, got {type(method).__name__}: step that one as usual")
    if isinstance(method.base, AcceleratedOptimizer):
        name = type(method).__name__
        raise TypeError(f"the base was prepared before {name} wrapped it: write accelerator.prepare({name}(base, ...))")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn is called with the batch, several times a step; got {type(loss_fn).__name__}")
    check_distribution(accelerator)
    window = _waiting.setdefault(method, [])
    window.append(batch)
    if not accelerator.sync_gradients:
        return None
    del _waiting[method]

    def closure() -> Tensor:
        total = torch.zeros((), device=accelerator.device)
        for i, micro_batch in enumerate(window):
            with without_sync(accelerator, method.model, i + 1 < len(window)):
                loss = loss_fn(*micro_batch)
                if not isinstance(loss, Tensor):
                    got = type(loss).__name__
                    raise TypeError(f"loss_fn must return the loss, a tensor with one element; got {got}")
                accelerator.backward(loss)
            total = total + loss.detach() / accelerator.gradient_accumulation_steps
        return total

    updates: list[object] = []
    with ExitStack() as hooks:
        if max_grad_norm is not None:
            clip = method.base.register_step_pre_hook(lambda base, *_: _clip(base, max_grad_norm))
            hooks.callback(clip.remove)
        hooks.callback(method.base.register_step_post_hook(lambda *_: updates.append(None)).remove)
        loss = method.step(closure, scaler=accelerator.scaler)
    if accelerator.scaler is not None:
        accelerator.scaler.update()
        if prepared is not None:
            prepared._is_overflow = not updates  # what accelerator.optimizer_step_was_skipped reads
    return loss


def check_distribution(accelerator: Accelerator) -> None:
    """Raise where a step of several passes cannot be right."""
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(f"{kind.value} steps on its own, once a backward, and cannot be used: take DDP or FSDP2")
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError("FSDP 1 flattens parameters, so that norms would be wrong: take DDP, or set fsdp_version=2")


def without_sync(accelerator: Accelerator, model: torch.nn.Module | None, wanted: bool) -> ExitStack:
    """Around passes whose gradient waits for another before ranks average it.

    An accelerator keeps models as they were before it wrapped them for DDP, so that ``model`` has to say which that is.
    """
    stack = ExitStack()
    if wanted:
        ddp = ddp_in(model)
        for module in accelerator._models if ddp is None else [ddp]:
            stack.enter_context(accelerator.no_sync(module))
    return stack


def _clip(base: torch.optim.Optimizer, max_norm: float) -> None:
    torch.nn.utils.clip_grad_norm_([p for group in base.param_groups for p in group["params"]], max_norm)
