"""Lightning with automatic optimization: the Trainer steps the base with a sharpness-aware gradient.

The mixin imports nothing from Lightning, so it works with ``lightning`` and ``pytorch_lightning``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tiltsam.optim import SharpnessAware

__all__ = ["SharpnessAwareMixin"]

# Strategies that shard or step in a way that does not allow several passes.
_UNSUPPORTED = ("FSDPStrategy", "DeepSpeedStrategy", "XLAFSDPStrategy")

_BYPASSED = (
    "SharpnessAwareMixin.optimizer_step was bypassed: list the mixin before LightningModule, and let your own "
    "optimizer_step call super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure), not optimizer.step"
)


class SharpnessAwareMixin:
    """Mixin for a LightningModule whose ``configure_optimizers`` returns a tiltsam optimizer.

    ::

        class Model(SharpnessAwareMixin, LightningModule):
            def configure_optimizers(self):
                base = torch.optim.SGD(self.parameters(), lr=0.1)
                return tiltsam.TSAM(base, model=self)

    ``training_step`` runs several times a step. Only its first run logs and updates torchmetrics; for SAM that is the
    one at the weights, so that curves compare with plain training. Clipping and the hook ``on_before_optimizer_step``
    run once a step, with the aggregated gradient and the base optimizer; hooks around backward run at each pass.

    With ``accumulate_grad_batches`` batches are kept until the last of their window, and every pass covers all of them:
    such a step equals one on the large batch. ``on_train_batch_end`` gets a loss of zero for the other batches.

    Raises:
        TypeError: If ``training_step`` takes a ``dataloader_iter``: its passes would see different batches.
        RuntimeError: If the module's own ``optimizer_step`` does not call this one.
    """

    # Arguments of training_step in the current window.
    _waiting: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = ()
    _passing = False  # inside a step
    _first_pass = True
    _current_fx_name: str | None = None  # set by Lightning: the hook that runs

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        training_step = getattr(cls, "training_step", None)
        if training_step is not None and not hasattr(training_step, "_is_deferring"):
            cls.training_step = _deferring(training_step)  # type: ignore[attr-defined]

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log at the first pass of a step only."""
        if self._first_pass:
            super().log(*args, **kwargs)  # type: ignore[misc]

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Run the passes of a step, then let the Trainer step the base."""
        method = getattr(optimizer, "optimizer", optimizer)  # Lightning wraps it
        if not isinstance(method, SharpnessAware) or optimizer_closure is None:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)  # type: ignore[misc]
            return
        trainer = self.trainer  # type: ignore[attr-defined]
        if trainer.fit_loop._skip_backward:
            optimizer_closure()  # only for BatchNorm's statistics
            return
        if type(trainer.strategy).__name__ in _UNSUPPORTED:
            raise ValueError(
                f"{type(trainer.strategy).__name__} does not allow several passes a step: use strategy='ddp', or "
                "ModelParallelStrategy with fully_shard"
            )
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        window, self._waiting = self._waiting, ()
        with self._passes_of_one_step() as one_pass:
            try:
                closure = functools.partial(one_pass, window, method, optimizer_closure)
                loss = method.compute_gradient(closure, scaler=scaler)
            except _StepSkipped:
                loss = None
                method.zero_grad()
        trainer.strategy.optimizer_step(method.base, lambda: loss)

    @contextmanager
    def _passes_of_one_step(self) -> Iterator[Callable[..., Tensor]]:
        """Yield a function that runs one pass; only the first pass logs and updates metrics."""
        metrics: list[_MetricState] = []
        self._passing = True

        def one_pass(window: Any, method: SharpnessAware, last: Callable[[], Tensor | None]) -> Tensor:
            outputs = [self._run(args, kwargs, method) for args, kwargs in window]
            losses = [loss for loss in [*outputs, last()] if loss is not None]
            if not losses:
                raise _StepSkipped
            if self._first_pass:
                metrics.extend(_MetricState(m) for m in self.modules() if _is_metric(m))  # type: ignore[attr-defined]
            self._first_pass = False
            return torch.stack(losses).sum()

        try:
            yield one_pass
        finally:
            self._passing, self._first_pass = False, True
            for metric in metrics:
                metric.restore()

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], method: SharpnessAware) -> Tensor | None:
        """Run forward and backward on a batch before the last of its window, without averaging over ranks."""
        trainer = self.trainer  # type: ignore[attr-defined]
        self._current_fx_name, name = "training_step", self._current_fx_name  # or log refuses
        without_sync: Callable[[], AbstractContextManager[Any]]
        without_sync = getattr(trainer.strategy, "block_backward_sync", nullcontext)
        try:
            with without_sync(), _logging_of(trainer, next(iter((*args, *kwargs.values())), None)):
                output = trainer.strategy.training_step(*args, **kwargs)
                loss = output["loss"] if isinstance(output, Mapping) else output
                if loss is None:
                    return None
                loss = loss / trainer.accumulate_grad_batches
                trainer.strategy.backward(loss, method)
        finally:
            self._current_fx_name = name
        detached: Tensor = loss.detach()
        return detached


class _StepSkipped(Exception):
    """Raised if training_step returned None for every batch: Lightning then takes no step."""


@contextmanager
def _logging_of(trainer: Any, batch: Any) -> Iterator[None]:
    """Weight what is logged inside by the size of this batch, in means over an epoch."""
    results = trainer._results
    kept = results.batch, results.batch_size
    results.batch, results.batch_size = batch, None
    try:
        yield
    finally:
        results.batch, results.batch_size = kept


def _is_metric(module: torch.nn.Module) -> bool:
    """Return whether a module is a torchmetric; the metrics of a collection are modules of their own."""
    return hasattr(module, "metric_state") and not isinstance(module, torch.nn.ModuleDict)


class _MetricState:
    """The state of a torchmetric, to be restored."""

    def __init__(self, metric: Any) -> None:
        self.metric = metric
        self.counts = {name: value for name, value in vars(metric).items() if isinstance(value, int | float)}
        self.state = {k: list(v) if isinstance(v, list) else v.clone() for k, v in metric.metric_state.items()}

    def restore(self) -> None:
        for name, value in self.state.items():
            setattr(self.metric, name, value)
        vars(self.metric).update(self.counts, _computed=None)


def _deferring(training_step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``training_step`` that keeps the batches of an incomplete accumulation window."""
    if "dataloader_iter" in inspect.signature(training_step).parameters:
        raise TypeError(
            "training_step(dataloader_iter) draws a new batch at each call, but all passes of a step need the same "
            "one: write training_step(batch, batch_idx)"
        )

    @functools.wraps(training_step)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._passing or not _is_training(self):
            return training_step(self, *args, **kwargs)
        fit = self.trainer.fit_loop
        if not fit._should_accumulate():
            if self._current_fx_name == "training_step":  # called by the Trainer, not by hand
                raise RuntimeError(_BYPASSED)
            return training_step(self, *args, **kwargs)
        first = fit.batch_idx % self.trainer.accumulate_grad_batches == 0  # an interrupted fit may have left batches
        self._waiting = (*(() if first else self._waiting), (args, kwargs))
        return torch.zeros((), device=self.device, requires_grad=True)

    wrapped._is_deferring = True  # type: ignore[attr-defined]
    return wrapped


def _is_training(module: Any) -> bool:
    """Return whether the Trainer steps a tiltsam optimizer on the current batch or its window."""
    trainer = getattr(module, "_trainer", None)
    return (
        trainer is not None
        and trainer.training
        and module.automatic_optimization
        and any(isinstance(optimizer, SharpnessAware) for optimizer in trainer.optimizers)
        and not trainer.fit_loop._skip_backward
    )
