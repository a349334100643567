"""Lightning, with automatic optimization: the Trainer steps the base, on a gradient gathered around the weights.

The mixin imports nothing of Lightning, so it serves ``lightning`` and ``pytorch_lightning`` alike.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tiltsam.integrations.gathering import gather
from tiltsam.wrapper import SharpnessAware

__all__ = ["SharpnessAwareMixin"]

# Strategies that shard or step by means that several passes cannot go through.
_UNFIT = ("FSDPStrategy", "DeepSpeedStrategy", "XLAFSDPStrategy")

_GOES_PAST = (
    "a step went past SharpnessAwareMixin: it has to come before the LightningModule, and an optimizer_step of your "
    "own has to end in super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure), not in optimizer.step"
)


class SharpnessAwareMixin:
    """Put before the LightningModule; ``configure_optimizers`` then returns an optimizer of tiltsam.

    That is all there is to write::

        class Model(SharpnessAwareMixin, LightningModule):
            def configure_optimizers(self):
                base = torch.optim.SGD(self.parameters(), lr=0.1)
                return tiltsam.TSAM(base, model=self)

    A ``training_step`` runs several times a step. Only its first run logs and counts in torchmetrics; for SAM that is
    the one at the weights, so that curves compare with those of plain training. Clipping and the hook
    ``on_before_optimizer_step`` come once a step and see the aggregated gradient and the base optimizer; hooks around
    backward come at each pass.

    With ``accumulate_grad_batches`` batches are kept until the last of their window, and every pass goes over all of
    them: such a step equals one on the large batch. ``on_train_batch_end`` sees a loss of zero for batches that wait.

    Raises:
        TypeError: If ``training_step`` takes a ``dataloader_iter``: its passes would see different batches.
        RuntimeError: If an ``optimizer_step`` of the module's own steps by itself instead of calling this one.
    """

    _waiting: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = ()  # arguments of training_step, of one window
    _passing = False  # inside a step
    _first_pass = True
    _current_fx_name: str | None = None  # Lightning's: the hook that runs

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        training_step = getattr(cls, "training_step", None)
        if training_step is not None and not hasattr(training_step, "_puts_off"):
            cls.training_step = _putting_off(training_step)  # type: ignore[attr-defined]

    def log(self, *args: Any, **kwargs: Any) -> None:
        """As ever at the first pass of a step, nothing at the others."""
        if self._first_pass:
            super().log(*args, **kwargs)  # type: ignore[misc]

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Run the passes, then let the Trainer go on as after any backward."""
        method = getattr(optimizer, "optimizer", optimizer)  # Lightning wraps it
        if not isinstance(method, SharpnessAware) or optimizer_closure is None:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)  # type: ignore[misc]
            return
        trainer = self.trainer  # type: ignore[attr-defined]
        if trainer.fit_loop._skip_backward:
            optimizer_closure()  # for the sake of BatchNorm's statistics: there is nothing to descend
            return
        if type(trainer.strategy).__name__ in _UNFIT:
            raise ValueError(
                f"{type(trainer.strategy).__name__} cannot take a step of several passes: use strategy='ddp', or "
                "ModelParallelStrategy with fully_shard"
            )
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        window, self._waiting = self._waiting, ()
        with self._pass_by_pass() as one_pass:
            try:
                loss = gather(method, lambda: one_pass(window, method, optimizer_closure), scaler)
            except _NothingToLearn:
                loss = None
                method.zero_grad()
        trainer.strategy.optimizer_step(method.base, lambda: loss)

    @contextmanager
    def _pass_by_pass(self) -> Iterator[Callable[..., Tensor]]:
        """Around a step: what runs one pass, so that only the first leaves traces."""
        metrics: list[_MetricState] = []
        self._passing = True

        def one_pass(window: Any, method: SharpnessAware, last: Callable[[], Tensor | None]) -> Tensor:
            outputs = [self._run(args, kwargs, method) for args, kwargs in window]
            losses = [loss for loss in [*outputs, last()] if loss is not None]
            if not losses:
                raise _NothingToLearn
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
        """What the Trainer does with a batch of a window before its last: forward and backward, not yet averaged."""
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


class _NothingToLearn(Exception):
    """A training_step returned None for every batch, by which Lightning means: no step on these."""


@contextmanager
def _logging_of(trainer: Any, batch: Any) -> Iterator[None]:
    """What is logged inside counts, in means over an epoch, by the size of this batch."""
    results = trainer._results
    kept = results.batch, results.batch_size
    results.batch, results.batch_size = batch, None
    try:
        yield
    finally:
        results.batch, results.batch_size = kept


def _is_metric(module: torch.nn.Module) -> bool:
    """Whether it is a torchmetric; of a collection each of its metrics is, and comes by itself."""
    return hasattr(module, "metric_state") and not isinstance(module, torch.nn.ModuleDict)


class _MetricState:
    """What a torchmetric has counted, to be put back."""

    def __init__(self, metric: Any) -> None:
        self.metric = metric
        self.counts = {name: value for name, value in vars(metric).items() if isinstance(value, int | float)}
        self.state = {k: list(v) if isinstance(v, list) else v.clone() for k, v in metric.metric_state.items()}

    def restore(self) -> None:
        for name, value in self.state.items():
            setattr(self.metric, name, value)
        vars(self.metric).update(self.counts, _computed=None)


def _putting_off(training_step: Callable[..., Any]) -> Callable[..., Any]:
    """A ``training_step`` that keeps batches which wait for others, for the passes to come."""
    if "dataloader_iter" in inspect.signature(training_step).parameters:
        raise TypeError(
            "training_step(dataloader_iter) draws a new batch at each call, but the passes of a step need the same "
            "one: write training_step(batch, batch_idx)"
        )

    @functools.wraps(training_step)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._passing or not _descends(self):
            return training_step(self, *args, **kwargs)
        fit = self.trainer.fit_loop
        if not fit._should_accumulate():
            if self._current_fx_name == "training_step":  # called by the Trainer, not by hand
                raise RuntimeError(_GOES_PAST)
            return training_step(self, *args, **kwargs)
        first = fit.batch_idx % self.trainer.accumulate_grad_batches == 0  # what an interrupted fit left is stale
        self._waiting = (*(() if first else self._waiting), (args, kwargs))
        return torch.zeros((), device=self.device, requires_grad=True)

    wrapped._puts_off = True  # type: ignore[attr-defined]
    return wrapped


def _descends(module: Any) -> bool:
    """Whether the Trainer is to step a method of tiltsam on the current batch, or on the window it belongs to."""
    trainer = getattr(module, "_trainer", None)
    return (
        trainer is not None
        and trainer.training
        and module.automatic_optimization
        and any(isinstance(optimizer, SharpnessAware) for optimizer in trainer.optimizers)
        and not trainer.fit_loop._skip_backward
    )
