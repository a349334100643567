"""The closures of a step: run them at the current weights and collect loss and gradient."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from tiltsam.distributed import Ranks, Sharding, local_gradient, reshard
from tiltsam.space.model_state import ModelState
from tiltsam.space.tensor_lists import as_real, dealias

__all__ = ["NEEDS_CLOSURE", "Closure", "Evaluator", "check_closures", "forward_only", "needs_graph", "scale_of"]

Closure: TypeAlias = Callable[[], Any]
"""Torch's protocol: run forward and backward, return the loss."""


NEEDS_CLOSURE = """{name}.step() needs a closure, because it evaluates the loss at several points. Write:

    def closure():
        loss = criterion(model(inputs), targets)
        loss.backward()
        return loss

    loss = optimizer.step(closure)

To accumulate gradients, loop over micro-batches inside the closure."""


def check_closures(
    closure: Closure | Sequence[Closure] | None, ascent_closure: Closure | None, name: str
) -> Sequence[Closure]:
    """Return the closures of a step as a list; raise TypeError with the lines to write unless they are callable."""
    closures = [closure] if callable(closure) else closure
    if not isinstance(closures, Sequence) or not all(callable(one) for one in closures):
        raise TypeError(NEEDS_CLOSURE.format(name=name))
    if ascent_closure is not None and not callable(ascent_closure):
        hint = ": pass scaler=scaler" if isinstance(ascent_closure, torch.amp.GradScaler) else ""
        raise TypeError(f"ascent_closure must be a closure, got {type(ascent_closure).__name__}{hint}")
    return closures


class Evaluator:
    """Runs the closures of a step and counts the passes.

    Args:
        params: The parameters whose gradients are collected.
        model_state: Buffers and random states that all passes share.
        ranks: The processes that take the step together.
        sharding: How the parameters are split.
        dtype: Dtype of the loss.
        device: Device of the loss.
    """

    first_loss: Tensor
    """What the closure returned in the first pass of the step, on this rank."""

    changes_weights: bool | None
    """Whether the closure writes to the parameters: None before the first pass, False if they are sharded."""

    def __init__(
        self,
        params: Sequence[Tensor],
        model_state: ModelState,
        ranks: Ranks,
        sharding: Sharding,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.params, self.model_state, self.ranks, self.sharding = params, model_state, ranks, sharding
        self._dtype, self._device = dtype, device
        self.changes_weights = None if sharding.mesh is None else False
        self._needs_graph = False  # whether the closure fails in a forward pass without a graph
        self.begin_step([_no_closure])

    def begin_step(
        self,
        closures: Sequence[Closure],
        ascent_closure: Closure | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Set the closures of a step: one for all samples, or one for each."""
        self.closures, self.ascent_closure, self.scaler = closures, ascent_closure, scaler
        self.current_sample = 0  # which closure to run
        self.num_forwards = self.num_backwards = self.num_ascents = 0

    def end_step(self) -> None:
        """Release the closures."""
        self.closures, self.ascent_closure, self.scaler = [_no_closure], None, None

    def loss_and_gradient(self, *, ascent: bool) -> tuple[Tensor, list[Tensor | None]]:
        """Run forward and backward; the returned list is the only owner of the gradient."""
        for p in self.params:
            p.grad = None  # autograd then hands over its own buffer instead of adding to ours
        self.model_state.begin_pass()
        with self.ranks.no_sync() if ascent and self.ranks.local_ascent else nullcontext(), torch.enable_grad():
            before = self._versions() if self.changes_weights is None else []
            value = self._closure(ascent=ascent)()
            if before:
                self.changes_weights = before != self._versions()
        self.model_state.end_pass()
        if self.sharding.mesh is not None:
            reshard(self.model_state.model)  # the closure may have run a forward pass after the backward pass
        if self.scaler is not None and self.scaler._scale is None:  # set by scale()
            raise RuntimeError("with scaler= the closure must call scaler.scale(loss).backward()")
        self.num_forwards += 1
        self.num_backwards += 1
        self.num_ascents += ascent
        gradient = self._take_gradient()
        if all(g is None for g in gradient):
            raise RuntimeError(
                "the closure left no gradient on any trainable parameter: call loss.backward() in it and do not clear "
                "gradients afterwards. If it does, the optimizer was created over other parameters: create it after "
                "fully_shard and after any other change to the model"
            )
        return self._loss(value), gradient

    def loss(self) -> Tensor:
        """Run forward only. Backward passes of the closure are skipped; a graph is built only if the loss needs one."""
        try:
            value = self._forward()
        except RuntimeError as error:
            if self._needs_graph or not needs_graph(error):
                raise
            self._needs_graph = True
            value = self._forward()
        self.num_forwards += 1
        if self.sharding.mesh is not None:
            if self.model_state.model is None:
                raise ValueError("a forward pass without backward over sharded parameters needs model=, to reshard it")
            reshard(self.model_state.model)
        return self._loss(value)

    def _forward(self) -> Any:
        self.model_state.begin_pass()
        with torch.set_grad_enabled(self._needs_graph):
            value = forward_only(self._closure())
        self.model_state.end_pass()
        return value

    def _versions(self) -> list[tuple[int, int]]:
        """Return what changes if a parameter is written to, or gets other memory."""
        return [(p._version, p.data_ptr()) for p in self.params]

    def _closure(self, *, ascent: bool = False) -> Closure:
        if ascent and self.ascent_closure is not None:
            return self.ascent_closure
        return self.closures[self.current_sample if len(self.closures) > 1 else 0]

    def _loss(self, value: Any) -> Tensor:
        """Return what the closure returned as a scalar, averaged over the ranks that see different batches."""
        if isinstance(value, float | int):
            value = torch.tensor(value, device=self._device, dtype=self._dtype)
        if not isinstance(value, Tensor):
            raise TypeError(f"the closure must return the loss, a tensor with one element; got {type(value).__name__}")
        loss = value.detach()
        if self.num_forwards == 1:
            self.first_loss = loss.clone()  # the closure may write to its own again
        if loss.dim() > 0:
            if loss.numel() != 1:
                raise ValueError(f"the closure must return one loss, got a tensor of shape {tuple(loss.shape)}")
            loss = loss.reshape(())
        loss = loss.to(self._device, self._dtype, copy=True)
        return loss if self.ranks.alone else self.ranks.average(loss)

    def _take_gradient(self) -> list[Tensor | None]:
        """Move the gradients out of ``.grad``: as real tensors, this process's part, with no two sharing memory."""
        gradient: list[Tensor | None] = []
        for p in self.params:
            grad = p.grad
            if grad is not None:
                if grad.layout != torch.strided:
                    raise TypeError(
                        f"gradients must be dense, got {grad.layout}: build the embedding with sparse=False"
                    )
                if grad.dtype != p.dtype:
                    raise TypeError(f"a gradient must have the dtype of its parameter, {p.dtype}, got {grad.dtype}")
                if self.sharding.needs_views:
                    grad = as_real(local_gradient(p).resolve_conj())
                elif grad.requires_grad:
                    grad = grad.detach()
                if grad.is_neg():  # the imaginary part of a conjugate
                    grad = grad.resolve_neg()
                p.grad = None
            gradient.append(grad)
        return dealias(gradient)


def scale_of(scaler: torch.amp.GradScaler, like: Tensor) -> Tensor:
    """Return the factor of a GradScaler as a tensor like ``like``."""
    return scaler.scale(torch.ones_like(like))


def _no_closure() -> Tensor:
    raise RuntimeError("no step is in progress: its closure was released")


# -------------------------------------------------------------------- forward passes without backward


def forward_only(call: Callable[[], Any]) -> Any:
    """Return ``call()`` without running the backward passes in it.

    A backward pass is skipped however it is written (``loss.backward()``, ``torch.autograd.backward(loss)``,
    ``scaler.scale(loss).backward()``); ``torch.autograd.grad`` runs. From the first call on, torch.autograd calls
    :func:`_run_backward` instead of its engine.
    """
    torch.autograd._engine_run_backward = _run_backward  # type: ignore[attr-defined, assignment]
    return call()


def needs_graph(error: RuntimeError) -> bool:
    """Return whether a pass without a graph failed because it differentiates (forces) or registers a hook."""
    return any(text in str(error) for text in ("not require grad", "doesn't require grad", "requires_grad=False"))


def _run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Run torch's engine, unless a backward pass is requested inside :func:`forward_only`.

    The frames on the stack decide: other threads are not affected, and an interrupt leaves no switch on.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not forward_only.__code__:
        frame = frame.f_back
    if frame is not None and kwargs.get("accumulate_grad"):
        return ()
    return _engine_run_backward(outputs, *args, **kwargs)
