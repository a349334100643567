"""Training: from a config to a finished record. A run can be killed at any moment and resumed."""

from __future__ import annotations

import copy
import dataclasses
import math
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import tiltsam
from tiltsam.lab.config import DEFAULTS, TrainConfig, has_setting
from tiltsam.lab.data import Data, Split, find_task, fingerprint, load
from tiltsam.lab.data.loader import TrainingBatches
from tiltsam.lab.devices import DistributedContext, RunAheadLimit, resolve_device, torch_settings
from tiltsam.lab.display import QUIET, Display, Progress
from tiltsam.lab.errors import ConfigError, Diverged, Interrupted, RecordError, TrainError, first_line
from tiltsam.lab.evaluate import (
    class_accuracies,
    evaluate,
    evaluated_weights,
    few_shot_accuracy,
    prior_shift,
    reestimate_batchnorm,
    silenced_examples,
    silenced_scores,
    split_outputs,
    suspects_table,
    task_loss,
)
from tiltsam.lab.files import Checkpoint, seconds_between_checkpoints, write_json
from tiltsam.lab.models import build, resolve_name
from tiltsam.lab.records import Record
from tiltsam.lab.schedules import budget_used, example_tilt, passes_of, set_rates
from tiltsam.lab.shutdown import StopFlag, defer_signals
from tiltsam.lab.tracking import TRACKERS, TrackerName
from tiltsam.optim import norm_groups

__all__ = ["Trainer", "train"]

REPORT_SECONDS = 0.5  # between progress reports within an epoch
SMALL_ESS = 0.1  # fraction of a batch; a smaller effective sample size of the examples gets a warning


def train(
    config: TrainConfig,
    record: Record,
    *,
    data: Callable[[TrainConfig], Data] = load,
    log: TrackerName | None = None,
    display: Display = QUIET,
    checkpoint_seconds: float | None = None,
    distributed: DistributedContext | None = None,
    until: float = 1.0,
) -> dict[str, Any]:
    """Train or resume a run, and return its result; of a paused run, the metrics so far.

    Args:
        config: The run.
        record: Its folder. A finished run is not trained again.
        data: Returns the data of a config.
        log: Also write the metrics to this tracker; see :mod:`tiltsam.lab.tracking`.
        display: Shows the progress of loading and training.
        checkpoint_seconds: Seconds between checkpoints, which are written at the end of epochs; by default the
            environment variable TILTSAM_CHECKPOINT_SECONDS, or 20.
        distributed: The ranks that train the run together, each of which calls this; rank 0 writes and reports.
        until: Pause, with a checkpoint, at the end of the epoch in which this fraction of the budget is reached; the
            next call resumes from there.

    Raises:
        Interrupted: After a SIGINT or SIGTERM. A checkpoint is written after the current step, unless a second signal
            comes first or several ranks train together; the message says up to which step the run is saved.
    """
    if not 0 < until <= 1:
        raise ConfigError(f"until must be in (0, 1], got {until}")
    distributed = distributed or DistributedContext()
    with ExitStack() as stack:
        tracker = stack.enter_context(closing(TRACKERS[log](log, record))) if log and distributed.is_main else None
        result: dict[str, Any] | None = distributed.broadcast_object(record.result())
        if result is not None:
            record.check_data(fingerprint(config.task))
            if distributed.is_main:
                record.remove_leftovers()  # the process that finished it may have been killed before it did so
                display.setup(config, record.setup())
            if tracker is not None:
                tracker.complete()
            return result
        if checkpoint_seconds is None:
            checkpoint_seconds = seconds_between_checkpoints()

        tracked: dict[str, Any] | None = None

        def report_progress(progress: Progress) -> None:
            nonlocal tracked
            if tracker is not None and progress.row is not tracked:
                tracker.update(progress.steps)
                tracked = progress.row
            display.report(config, progress)

        run = Trainer(config, record, data(config), distributed)
        if distributed.is_main:
            display.setup(config, run.setup())
            run.warn_if_slow()
        # Several ranks would have to agree on the step to stop after: they end at once.
        with defer_signals() if distributed.world_size == 1 else nullcontext(StopFlag()) as stop:
            try:
                numbers = run.run(report_progress, checkpoint_seconds, until, stop)
            except Diverged as error:
                if distributed.is_main:
                    record.mark_diverged(str(error))
                raise
            except KeyboardInterrupt:
                raise Interrupted(f"interrupted; {run.saved_message}", stop.number or signal.SIGINT) from None
        if stop.number is not None:
            finished = "score" in numbers
            message = f" after training finished: {record.folder}" if finished else f"; {run.saved_message}"
            raise Interrupted(f"interrupted{message}", stop.number)
        return numbers


@dataclass
class EpochSeries:
    """Numbers of each step of an epoch, so that a resumed epoch logs the same means.

    Those of new steps are tensors until :meth:`to_host` copies them from the device, all at once.
    """

    losses: list[Any] = field(default_factory=list)
    sizes: list[Any] = field(default_factory=list)
    """Effective sample sizes of the step's samples."""
    example_sizes: list[Any] = field(default_factory=list)
    """Effective sample sizes of the batch's examples, as fractions; empty without a tilt over examples."""

    def to_host(self) -> None:
        """Convert tensors to numbers. Waits for the device."""
        for values in (self.losses, self.sizes, self.example_sizes):
            if new := [x for x in values if isinstance(x, Tensor)]:
                values[len(values) - len(new) :] = torch.stack(new).double().tolist()


class Trainer:
    """The model, the optimizer and the progress of a run.

    Args:
        config: The run.
        record: Its folder.
        data: The task's data.
        distributed: The ranks that train the run together.

    Attributes:
        step: A :class:`tiltsam.CapturedStep`, which takes a step on a batch and returns its loss.
        saved_message: A sentence that says up to which step the run is saved.
    """

    def __init__(
        self, config: TrainConfig, record: Record, data: Data, distributed: DistributedContext | None = None
    ) -> None:
        self.config, self.record = config, record
        self.distributed = distributed or DistributedContext()
        self.device = resolve_device(self.distributed.device or config.device)
        self.data = data.to(self.device)
        torch.manual_seed(config.seed)
        self.model = build(config.model, data, config.init).to(self.device)
        if self.device.type == "cuda":
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.wrapped = self.distributed.wrap(self.model)
        self._compiled = torch.compile(self.wrapped) if config.compile else self.wrapped
        self.optimizer = self._optimizer()
        self.average = tiltsam.WeightAverage(self.model) if config.average else None
        self.tilt = self._example_tilt(sync=self.distributed.divides_batches)
        self._task_loss = self._loss_function()
        compiles_loss = config.compile and self.tilt is not None  # a tilt is a hundred small kernels
        self._batch_loss = torch.compile(self._task_loss) if compiles_loss else self._task_loss
        group = self.optimizer.param_groups[0]
        self._initial: dict[str, float] = {name: group[name] for name in ("rho", "t") if name in group}
        self.progress = Progress()
        self.best_row: dict[str, Any] = {}
        self.saved_message = f"{record.folder} has no checkpoint yet: the same command starts from the beginning"
        self._interrupted_epoch = EpochSeries()
        self.estimated: dict[str, Tensor] = {}
        self._warned_small_ess = False
        self.batches = TrainingBatches(self.data, config.batch_size)
        self.distributed.check_config(self.batches.size, config.passes)
        part = len(self.distributed.local_batch((self.data.train.targets[: self.batches.size],))[0])
        samples = self.optimizer.num_samples
        if config.split and part < samples:
            raise ConfigError(f"num_samples must be at most the batch size {part} with split, got {samples}")
        smallest = 1 / samples if config.split else config.ascent_fraction  # fraction of a batch that a pass sees
        self.batches.check(self.model, math.ceil(smallest * part))
        self.step: Callable[..., Tensor] = tiltsam.capture(
            self.optimizer,
            [partial(self._part_loss, i) for i in range(samples)] if config.split else self._loss,
            ascent_loss_fn=self._ascent_loss if config.ascent_fraction < 1 else None,
            concurrent=config.concurrent,
        )

    def _optimizer(self) -> tiltsam.SharpnessAware:
        config = self.config
        base: torch.optim.Optimizer
        try:
            params = norm_groups(self.model) if config.perturb == "norm" else self.model.parameters()
        except ValueError as error:
            raise ConfigError(f"perturb='norm': {error}") from None
        if config.optimizer == "adamw":
            base = torch.optim.AdamW(params, lr=config.lr, weight_decay=config.weight_decay)
        else:
            base = torch.optim.SGD(params, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
        if config.clip is not None:
            max_norm = config.clip
            base.register_step_pre_hook(lambda *_: _clip(self.model, max_norm))
        return config.wrap(base, model=self.wrapped, seed=config.seed, parallel=self.distributed.parallel())

    def _example_tilt(self, *, sync: bool) -> tiltsam.ExampleTilt | None:
        config = self.config
        if not config.example_tilt and config.class_tilt is None:
            return None
        if config.class_tilt is not None and self.data.num_classes == 1:
            raise ConfigError(f"class_tilt must be None for a regression, got {config.class_tilt}")
        return tiltsam.ExampleTilt(
            config.example_tilt,
            min_ess=config.example_ess or 0.0,
            group_tilt=config.class_tilt,
            num_groups=None if config.class_tilt is None else self.data.num_classes,
            sync=sync,
        )

    def _loss_function(self) -> Callable[..., Tensor]:
        """Return the loss of outputs and targets, with the settings of the run."""
        config, data = self.config, self.data
        if data.num_classes == 1:
            for name in ("label_smoothing", "loss"):
                if (value := getattr(config, name)) != DEFAULTS[name]:
                    raise ConfigError(f"{name} must be {DEFAULTS[name]} for a regression, got {value}")
        shift = None
        if config.loss == "logit-adjusted":
            shift = prior_shift(data.train.targets, data.num_classes, config.logit_tau)
        return partial(
            task_loss,
            num_classes=data.num_classes,
            label_smoothing=config.label_smoothing,
            gce_q=config.gce_q if config.loss == "gce" else None,
            logit_shift=shift,
        )

    # ---------------------------------------------------------------- the loop

    def run(
        self,
        report: Callable[[Progress], None],
        checkpoint_seconds: float,
        until: float = 1.0,
        stop: StopFlag | None = None,
    ) -> dict[str, Any]:
        """Train until the budget is used up. For the arguments see :func:`train`.

        Raises:
            KeyboardInterrupt: After a checkpoint, if ``stop`` has a signal.
        """
        stop = stop or StopFlag()
        with torch_settings(self.device, self.model):
            self._resume()
            if self.distributed.is_main:
                self.record.begin(self.config, self.device, self.data.fingerprint)
                write_json(self.record.folder / "setup.json", self.setup())
            last_save = time.perf_counter()
            while self.progress.done < until:
                means = self._epoch(report, stop)
                pause = self.progress.done >= until
                due = self.progress.done >= 1 or int(self.progress.epoch) % self.config.evaluate_every == 0
                evaluated = pause or due
                if evaluated:
                    self.progress.row = self._evaluate(means)
                if due:  # an evaluation because of a pause is not a candidate for the best epoch
                    self._choose(self.progress.row)
                if self.distributed.is_main:
                    self._check_example_ess(means)
                    if evaluated:
                        self.record.log(**self.progress.row)
                    self.optimizer.check_nonfinite()
                    report(self.progress)
                    stopped = stop.number is not None and not pause
                    overdue = time.perf_counter() - last_save >= checkpoint_seconds
                    if self.progress.done < 1 and (pause or stopped or overdue):
                        self._save()
                        last_save = time.perf_counter()
                    if stopped:
                        raise KeyboardInterrupt
            conclude = self._finish if self.progress.done >= 1 else self._last_row
            numbers: dict[str, Any] = self.distributed.broadcast_object(
                conclude() if self.distributed.is_main else None
            )
            return numbers

    def setup(self) -> dict[str, Any]:
        """Return the sizes of the splits, classes, label noise and model, which the report shows: ``setup.json``."""
        config, data = self.config, self.data
        task = find_task(config.task)
        return {
            "description": task.description,
            "num_train": len(data.train),
            "num_validation": len(data.validation),
            "num_test": len(data.test),
            "test_split_off": data.test_split_off,
            "num_classes": data.num_classes,
            "noise": task.noise if config.noise is None else config.noise,
            "model": resolve_name(config.model, data),
            "num_parameters": sum(p.numel() for p in self.model.parameters()),
        }

    def warn_if_slow(self) -> None:
        """Warn if the default model is one for GPUs, and the device is a CPU."""
        config = self.config
        if self.device.type != "cpu" or config.model != "auto" or resolve_name("auto", self.data) != "resnet18":
            return
        size = config.image_size or find_task(config.task).image_size  # None if images cannot be resized
        smaller = " --image-size 32" if size is not None and size > 32 else ""
        warnings.warn(
            f"resnet18, the default model, is slow on a CPU: --model cnn{smaller} is much faster", stacklevel=2
        )

    def _epoch(self, report: Callable[[Progress], None], stop: StopFlag) -> dict[str, float]:
        """Train an epoch, or what is left of it or of the budget.

        Returns:
            The means over the whole epoch: of the loss, of the effective sample size of the samples and, with a tilt
            over examples, of that of the examples, as a fraction of the batch.
        """
        config, progress = self.config, self.progress
        epoch, per_epoch = int(progress.epoch), self.batches.per_epoch
        series, self._interrupted_epoch = self._interrupted_epoch, EpochSeries()
        first, run_ahead = len(series.losses), RunAheadLimit(self.device)
        start, seconds = time.perf_counter(), progress.seconds
        reported = start
        self.wrapped.train()
        self.distributed.seed_dropout(config.seed, epoch)
        for k, batch in enumerate(self.batches.epoch(config.seed, epoch)):
            if k < first:
                continue
            now = time.perf_counter()
            progress.seconds = seconds + now - start
            if k:  # always take the first step: an epoch without one has no loss
                progress.done = self._budget_used(epoch + k / per_epoch)
            if progress.done >= 1:
                break
            if k > first and stop.number is not None:
                series.to_host()
                self._interrupted_epoch = series
                progress.steps += k - first
                self._save()
                raise KeyboardInterrupt
            if now - reported >= REPORT_SECONDS and self.distributed.is_main:
                report(progress)
                reported = now
            self._take_scheduled_step(batch, series)
            run_ahead.step()
        series.to_host()  # waits for the device, for the clock below
        progress.seconds = seconds + time.perf_counter() - start
        taken = len(series.losses)
        progress.steps += taken - first
        progress.epoch = epoch + (1 if taken == per_epoch else taken / per_epoch)
        progress.done = max(progress.done, self._budget_used(progress.epoch))
        means = {"train_loss": _mean(series.losses), "effective_sample_size": _mean(series.sizes)}
        if self.tilt is not None:
            means["example_ess"] = _mean(series.example_sizes)
        self._check_finite(means["train_loss"], f"in epoch {epoch + 1}")
        return means

    def _take_scheduled_step(self, batch: tuple[Tensor, ...], series: EpochSeries) -> None:
        """Set the rates and tilts that are due, take a step on the batch, and add its numbers to the series."""
        config, progress = self.config, self.progress
        set_rates(self.optimizer.param_groups, config, progress.done, self._initial)
        if self.tilt is not None:
            self.tilt.t = example_tilt(config, progress.done)
        series.losses.append(self.take_step(self.distributed.local_batch(batch)))  # a sum would be one more kernel
        info = self.optimizer.info
        series.sizes.append(info.effective_sample_size)
        if self.tilt is not None and self.tilt.effective_sample_size is not None:
            parts = self.optimizer.num_samples if config.split else 1  # of the batch, to each of which the tilt applies
            series.example_sizes.append(self.tilt.effective_sample_size * parts / len(batch[-1]))
        progress.passes += passes_of(info, config.ascent_fraction)

    def _budget_used(self, epoch: float) -> float:
        passes, seconds = self.progress.passes, self.progress.seconds
        return budget_used(self.config, self.distributed, epoch=epoch, passes=passes, seconds=seconds)

    def _check_finite(self, loss: float, where: str) -> None:
        if not math.isfinite(loss):
            remedy = "lr or rho" if has_setting(self.config.method, "rho") else "lr"
            raise Diverged(f"the loss is not finite {where}: lower {remedy}")

    def _check_example_ess(self, means: dict[str, float]) -> None:
        """Warn, once, if the tilt over examples leaves little of the batches of an epoch."""
        # If a model predicts a single class, the examples of this class keep their weights: 1 / num_classes of a batch.
        smallest = max(SMALL_ESS, 1.5 / self.data.num_classes) if self.data.num_classes > 1 else SMALL_ESS
        if self._warned_small_ess or not means.get("example_ess", 1.0) < smallest:
            return
        self._warned_small_ess = True
        tilt, between = self.config.example_tilt, self.config.class_tilt
        name = f"example_tilt {tilt:g}" if between is None else f"example_tilt {tilt:g} with class_tilt {between:g}"
        remedy = "move example_tilt towards 0 or set --example-ess"
        if between is not None:  # it cannot be combined with --example-ess
            remedy = f"move {'both' if tilt else 'class_tilt'} towards 0"
        warnings.warn(
            f"{name} leaves an effective sample size of {means['example_ess']:.0%} of the batch: {remedy}",
            RuntimeWarning,
            stacklevel=2,
        )

    def take_step(self, batch: Sequence[Tensor]) -> Tensor:
        """Take one step on a batch, update the averaged weights, and return the loss."""
        loss = self.step(*batch) if not self.config.compile else self._compiled_step(batch)
        if self.average is not None:
            self.average.update()
        return loss

    def _compiled_step(self, batch: Sequence[Tensor]) -> Tensor:
        from torch._dynamo.exc import TorchDynamoException  # importing it takes half a second

        with warnings.catch_warnings():
            for remark in ("The .grad attribute of a Tensor that is not a leaf", "Online softmax is disabled"):
                warnings.filterwarnings("ignore", remark)  # about the compiler's own code
            try:
                return self.step(*batch)
            except TorchDynamoException as error:  # the first step compiles
                raise TrainError(f"torch.compile failed ({first_line(error)}): run without --compile") from error

    # ---------------------------------------------------------------- outputs and losses

    def _forward(self, model: Callable[..., Any], inputs: Sequence[Tensor]) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            outputs: Tensor = model(*inputs)
        return outputs.float()

    def _outputs(self, part: Split) -> Tensor:
        return self._forward(self.model, self.batches.inputs(part))

    def _loss(self, *batch: Tensor) -> Tensor:
        return self._batch_loss(self._forward(self._compiled, batch[:-1]), batch[-1], tilt=self.tilt)

    def _part_loss(self, sample: int, *batch: Tensor) -> Tensor:
        """Return the loss on the part of the batch that belongs to a sample."""
        length, parts = len(batch[-1]), self.optimizer.num_samples
        rows = slice(length * sample // parts, length * (sample + 1) // parts)
        return self._loss(*(x[rows] for x in batch))

    def _ascent_loss(self, *batch: Tensor) -> Tensor:
        """Return the loss on the first rows of the batch, whose gradient only gives the direction of an ascent."""
        rows = math.ceil(self.config.ascent_fraction * len(batch[-1]))
        return self._loss(*(x[:rows] for x in batch))

    # ---------------------------------------------------------------- evaluation

    def _evaluate(self, means: dict[str, float]) -> dict[str, Any]:
        """Return the line of the epoch: losses and metrics on validation and test."""
        row: dict[str, Any] = {
            "epoch": round(self.progress.epoch, 6),
            "steps": self.progress.steps,
            "passes": round(self.progress.passes, 3),
            "seconds": round(self.progress.seconds, 4),
            "lr": self.optimizer.param_groups[0]["lr"],
            **means,
        }
        with evaluated_weights(self.model, self.average):
            if self.config.reestimate_batchnorm:
                reestimate_batchnorm(self.model, self._outputs, self.data.train)
            self.model.eval()
            for name in ("validation", "test"):
                for metric, value in evaluate(self._outputs, self.data, getattr(self.data, name)).items():
                    row[f"{name}_{metric}"] = value
                self._check_finite(row.get(f"{name}_loss", 0.0), f"after epoch {math.ceil(self.progress.epoch)}")
            kept = self.model.state_dict().keys()  # non-persistent buffers are not in it
            self.estimated = {name: b.detach().clone() for name, b in self.model.named_buffers() if name in kept}
        return row

    def _final_numbers(self) -> dict[str, Any]:
        """Return what the result has beyond the last row, at the evaluated weights, and write ``suspects.csv``.

        For a classification the test accuracy of each class, None for one without examples; for a long-tailed task that
        of its rare classes; with a tilt over examples and label noise, how many of the examples that it silences are
        mislabelled, and the reverse; with a negative tilt, the number of these examples, which the file lists.
        """
        config, data = self.config, self.data
        if data.num_classes == 1:
            return {}
        by_class = class_accuracies(split_outputs(self._outputs, data.test), data.test.targets)
        numbers: dict[str, Any] = {"test_class_accuracies": [None if math.isnan(x) else x for x in by_class.tolist()]}
        if find_task(config.task).imbalance > 1:
            numbers["test_few_shot_accuracy"] = few_shot_accuracy(by_class, data.train.targets)
        tilt = self._example_tilt(sync=False)
        if tilt is not None and (config.example_tilt < 0 or data.mislabelled is not None):
            silenced = silenced_examples(self._outputs, data, tilt, self.batches.size, self._task_loss)
            if data.mislabelled is not None:
                numbers |= silenced_scores(silenced, data.mislabelled)
            if config.example_tilt < 0:
                self.record.write_suspects(suspects_table(silenced, data))
                numbers["num_suspects"] = len(silenced.indices)
        return numbers

    def _choose(self, row: dict[str, Any]) -> None:
        """Keep the row with the best validation score."""
        score = f"validation_{self.data.metrics[0]}"
        if score in row and (not self.best_row or row[score] > self.best_row[score]):
            self.best_row = row

    # ---------------------------------------------------------------- saving and resuming

    def _save(self) -> None:
        self.record.save(self._checkpoint())
        self._note_saved()

    def _note_saved(self) -> None:
        epoch = int(self.progress.epoch) + len(self._interrupted_epoch.losses) / self.batches.per_epoch
        where = f"step {self.progress.steps} (epoch {epoch:.4g})"
        self.saved_message = f"{self.record.folder} is saved up to {where}: the same command resumes there"

    def _checkpoint(self) -> Checkpoint:
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        progress = {k: getattr(self.progress, k) for k in ("epoch", "passes", "seconds", "steps", "done")}
        state = {**progress, "epoch": int(self.progress.epoch), "best": self.best_row}
        if self._interrupted_epoch.losses:
            state["interrupted_epoch"] = dataclasses.asdict(self._interrupted_epoch)
        average = {} if self.average is None else {**self.average.state_dict()["average"], **self.estimated}
        return Checkpoint(copy.copy(self.model.state_dict()), self.optimizer.state_dict(), state, random, average)

    def _resume(self) -> None:
        checkpoint = self.record.load()
        if checkpoint is None:
            return
        self.record.check_data(self.data.fingerprint)
        try:
            self._restore(checkpoint)
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            where, why = self.record.folder / "checkpoints", " ".join(str(error).split())
            raise RecordError(f"{where} does not fit this run ({why}): remove it to train again") from error

    def _restore(self, checkpoint: Checkpoint) -> None:
        self.model.load_state_dict(checkpoint.model)
        self.optimizer.load_state_dict(checkpoint.optimizer)
        self.best_row = checkpoint.state.pop("best")
        self._interrupted_epoch = EpochSeries(**checkpoint.state.pop("interrupted_epoch", {}))
        self.progress = Progress(**checkpoint.state)
        self._note_saved()
        if self.average is not None:
            state = self.average.state_dict()
            averaged = {name: checkpoint.average[name] for name in state["average"]}
            self.average.load_state_dict({**state, "count": self.progress.steps, "average": averaged})
        torch.set_rng_state(checkpoint.random["cpu"])
        if self.device.type == "cuda" and "cuda" in checkpoint.random:
            torch.cuda.set_rng_state(checkpoint.random["cuda"], self.device)

    def _last_row(self) -> dict[str, Any]:
        """Return the metrics of the current epoch; only the counters if it was not evaluated."""
        here = round(self.progress.epoch, 6)
        rows = self.record.metrics()  # a killed attempt may have left later ones
        numbers = {name: getattr(self.progress, name) for name in ("passes", "seconds", "steps")}
        return next((row for row in rows if row["epoch"] == here), {"epoch": here, **numbers})

    def _finish(self) -> dict[str, Any]:
        """Write the trained model with its re-estimated statistics, and the result."""
        metric, final = self.data.metrics[0], self._last_row()
        with evaluated_weights(self.model, self.average):
            self.model.load_state_dict(self.estimated, strict=False)
            self.model.eval()
            numbers = {
                **final,
                **self._final_numbers(),
                "captured": getattr(self.step, "reason", None) is None,
                "metric": metric,
                "score": final[f"test_{metric}"],
            }
            if self.best_row:
                numbers["score_at_best_validation"] = self.best_row[f"test_{metric}"]
                numbers["best_validation"] = self.best_row[f"validation_{metric}"]
            self.record.finish(self.model.state_dict(), **numbers)
        return numbers


def _mean(values: list[float]) -> float:
    """Return the mean, summed in the same order on any device; zero if there are no values."""
    return torch.tensor(values, dtype=torch.float64).mean().item() if values else 0.0


def _clip(model: nn.Module, max_norm: float) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
