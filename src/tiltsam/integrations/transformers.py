"""The Trainer of transformers with a sharpness-aware method.

The Trainer holds the *base* optimizer: it clips, unscales, logs norms, steps, schedules, saves and resumes as usual.
Only ``training_step`` differs: it keeps the batches of an accumulation window and, at the last of them, runs all passes
of a step over the whole window, which leaves the aggregate in ``.grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Trainer

from tiltsam.integrations.accelerate import check_distribution, prepared_model, without_sync
from tiltsam.optim import SharpnessAware

__all__ = ["SharpnessAwareTrainer", "SharpnessAwareTrainerMixin"]


class SharpnessAwareTrainerMixin:
    """Mixin for any Trainer: ``class Mine(SharpnessAwareTrainerMixin, Seq2SeqTrainer)``.

    The logged loss is that of a step's first pass, for SAM the one at the weights, so that curves compare with plain
    training; everything else is in ``trainer.sharpness_aware.info``. ``grad_norm`` is that of the aggregate.

    Args:
        args: As for the Trainer.
        method: Called with the Trainer's optimizer and ``model=``, returns the method that wraps it: a class of
            tiltsam, or a ``functools.partial`` of one. Not needed if ``optimizers`` contains a tiltsam optimizer.
        kwargs: As for the Trainer.

    Raises:
        TypeError: If ``method`` is not callable.
        ValueError: If there is no method, or two.
    """

    sharpness_aware: SharpnessAware | None = None
    """The method, once training has begun. It shares its state with the Trainer's optimizer."""

    if TYPE_CHECKING:  # attributes of the Trainer
        accelerator: Any
        model: Any
        optimizer: Any

    def __init__(self, *args: Any, method: Callable[..., SharpnessAware] | None = None, **kwargs: Any) -> None:
        if method is not None and not callable(method):
            name = type(method).__name__
            is_made = isinstance(method, SharpnessAware)
            got = f"{name}: pass optimizers=({name}(...), None)" if is_made else repr(method)
            raise TypeError(f"method must be a class of tiltsam or a partial of one, got {got}")
        super().__init__(*args, **kwargs)
        self._method = method
        self._window: list[Any] = []
        given = isinstance(self.optimizer, SharpnessAware)
        if method is not None and given:
            raise ValueError(f"pass method= or optimizers=({type(self.optimizer).__name__}(...), None), not both")
        if method is None and not given:
            raise ValueError("pass a method: method=tiltsam.TSAM, or optimizers=(tiltsam.TSAM(base, ...), None)")

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Create the base as the Trainer does, and wrap it."""
        is_new = self.optimizer is None or self.sharpness_aware is None
        base = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if isinstance(base, SharpnessAware):
            self.sharpness_aware, self.optimizer = base, base.base
        elif is_new and self._method is not None:
            self.sharpness_aware = self._method(base, model=self.model)
        optimizer: torch.optim.Optimizer = self.optimizer
        return optimizer

    @contextmanager
    def _holding_sharpness_aware(self) -> Iterator[None]:
        """Let the Trainer save and load the method instead of its base: the sampler may keep vectors between steps."""
        base, self.optimizer = self.optimizer, self.sharpness_aware
        try:
            yield
        finally:
            self.optimizer = base

    def _save_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> None:
        with self._holding_sharpness_aware():
            super()._save_optimizer_and_scheduler(*args, **kwargs)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> None:
        with self._holding_sharpness_aware():
            super()._load_optimizer_and_scheduler(*args, **kwargs)  # type: ignore[misc]

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of one step."""
        self._window = []  # a callback may have ended the last epoch inside a window
        return super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Keep the batch; at the last of a window run all passes over the whole window.

        Returns:
            The window's loss at the first pass; zero for the other batches of a window.
        """
        self._window.append(inputs)
        accelerator = self.accelerator
        if not accelerator.sync_gradients:
            return torch.zeros((), device=accelerator.device)
        check_distribution(accelerator)
        assert self.sharpness_aware is not None
        self.sharpness_aware.model = prepared_model(accelerator, self.sharpness_aware.model)
        one_batch = super().training_step  # type: ignore[misc]

        def closure() -> Tensor:
            total = torch.zeros((), device=accelerator.device)
            for i, micro_batch in enumerate(self._window):
                is_last = i + 1 == len(self._window)
                with nullcontext() if is_last else without_sync(accelerator, model):
                    total = total + one_batch(model, micro_batch, num_items_in_batch)
            return total

        try:
            return self.sharpness_aware.compute_gradient(closure, scaler=accelerator.scaler)
        finally:
            self._window = []


class SharpnessAwareTrainer(SharpnessAwareTrainerMixin, Trainer):
    """A :class:`transformers.Trainer` with ``method=``; see :class:`SharpnessAwareTrainerMixin`."""
