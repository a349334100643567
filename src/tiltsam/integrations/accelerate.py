"""Accelerate: one step on a batch, with any configuration.

``accelerator.prepare`` accepts a method of tiltsam like any optimizer, but what it returns does not know that a step
runs the model several times: it passes a closure to the scaler, and steps on the last of several accumulated batches
only. :func:`step` handles both.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor

from tiltsam.distributed import find_ddp
from tiltsam.optim import SharpnessAware
from tiltsam.space.validation import check_positive

__all__ = ["step"]

# Batches of incomplete accumulation windows.
_waiting: WeakKeyDictionary[SharpnessAware, list[tuple[Any, ...]]] = WeakKeyDictionary()


def step(
    accelerator: Accelerator,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[..., Tensor],
    *batch: Any,
    max_grad_norm: float | None = None,
) -> Tensor | None:
    """Take a step on a batch, or keep the batch while gradients accumulate.

    Use it instead of ``accelerator.backward``, ``accelerator.clip_grad_norm_`` and ``optimizer.step``; in a loop that
    accumulates, inside ``with accelerator.accumulate(model)`` as usual. A step sees all batches of its window in every
    pass and equals a step on one large batch; they are held in memory until then. With DDP, prepare the model first and
    pass the result as ``model=`` to the optimizer: ranks then average gradients once a pass, not after each batch.
    With FSDP2, prepare both together, as Accelerate requires, and pass the bare model as ``model=``.

    Args:
        accelerator: The accelerator.
        optimizer: A method of tiltsam, as ``accelerator.prepare`` returned it.
        loss_fn: Called with ``*batch``, returns the loss. It must not call backward.
        batch: Arguments of ``loss_fn``.
        max_grad_norm: Clip the norm of the aggregated gradient, once a step.

    Returns:
        The aggregate loss, detached; ``None`` while gradients accumulate.

    Raises:
        TypeError: If the optimizer is not one of tiltsam, or wraps a base that was prepared by itself; if ``loss_fn``
            is not callable, or does not return a loss.
        ValueError: If the accelerator shards or steps in a way that does not allow several passes.

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
        raise TypeError(f"optimizer must be a tiltsam optimizer, got {type(method).__name__}: step that one as usual")
    if isinstance(method.base, AcceleratedOptimizer):
        name = type(method).__name__
        raise TypeError(f"the base must not be prepared by itself: write accelerator.prepare({name}(base, ...))")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be callable with the batch, got {type(loss_fn).__name__}")
    if max_grad_norm is not None:
        check_positive("max_grad_norm", max_grad_norm)
    check_distribution(accelerator)
    method.model = prepared_model(accelerator, method.model)
    window = _waiting.setdefault(method, [])
    window.append(batch)
    if not accelerator.sync_gradients:
        return None
    del _waiting[method]

    def closure() -> Tensor:
        total = torch.zeros((), device=accelerator.device)
        for i, micro_batch in enumerate(window):
            is_last = i + 1 == len(window)
            with nullcontext() if is_last else without_sync(accelerator, method.model):
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
            prepared._is_overflow = not updates  # read by accelerator.optimizer_step_was_skipped
    return loss


def check_distribution(accelerator: Accelerator) -> None:
    """Raise ValueError for distribution strategies that do not allow several passes a step."""
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(f"{kind.value} steps once per backward and is not supported: use DDP or FSDP2")
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError("FSDP 1 flattens parameters and is not supported: use DDP, or set fsdp_version=2")


def prepared_model(accelerator: Accelerator, model: torch.nn.Module | None) -> torch.nn.Module | None:
    """Return the compiled module, which FSDP2 shards, if the accelerator compiled the model; else the model."""
    if model is None:
        return None
    return next((m for m in accelerator._models if getattr(m, "_orig_mod", None) is model), model)


def without_sync(accelerator: Accelerator, model: torch.nn.Module | None) -> ExitStack:
    """Return a context in which ranks do not average gradients, unless ``sync_each_batch`` is set.

    An accelerator keeps models as they were before it wrapped them for DDP, so the DDP module is found in ``model``.
    """
    stack = ExitStack()
    if accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
        return stack
    ddp = find_ddp(model)
    for module in accelerator._models if ddp is None else [ddp]:
        stack.enter_context(accelerator.no_sync(module))
    return stack


def _clip(base: torch.optim.Optimizer, max_norm: float) -> None:
    torch.nn.utils.clip_grad_norm_([p for group in base.param_groups for p in group["params"]], max_norm)
