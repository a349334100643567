"""One training run, from a config to a finished record; killed at any moment, it goes on where it was."""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tiltsam
from tiltsam.lab import tasks
from tiltsam.lab.augment import augment, normalise
from tiltsam.lab.config import ConfigError, TrainConfig
from tiltsam.lab.data import Data, Split
from tiltsam.lab.metrics import METRICS
from tiltsam.lab.models import build
from tiltsam.lab.record import Checkpoint, Record

__all__ = ["Run", "TrainError", "load_data", "load_model", "train"]

EVAL_BATCH = 512
SMALL_MODEL = 500_000  # parameters
BATCHNORM_BATCHES = 40  # enough for BatchNorm's statistics to settle, far less than an epoch of CIFAR


class TrainError(Exception):
    """Training that cannot go on, told in one line."""


@dataclass
class Progress:
    """How far a run is; handed to ``report`` after each epoch."""

    epoch: float = 0.0
    passes: float = 0.0
    seconds: float = 0.0
    steps: int = 0
    done: float = 0.0
    """Share of the budget that is used up."""
    row: dict[str, Any] = field(default_factory=dict)
    """The epoch's line of metrics."""


def train(
    config: TrainConfig,
    record: Record,
    *,
    root: Path | None = None,
    download: bool = False,
    report: Callable[[Progress], None] = lambda progress: None,
    checkpoint_seconds: float | None = None,
) -> dict[str, Any]:
    """Train, or go on training, and return the final numbers.

    Args:
        config: The run.
        record: Its folder. A finished one is not trained again.
        root: Where data sets lie.
        download: Fetch what is missing.
        report: Called after every epoch.
        checkpoint_seconds: Time between checkpoints, which lie at ends of epochs; by default the environment variable
            TILTSAM_CHECKPOINT_SECONDS, or 20.
    """
    if (finished := record.result()) is not None:
        return finished
    if checkpoint_seconds is None:
        checkpoint_seconds = float(os.environ.get("TILTSAM_CHECKPOINT_SECONDS", "20"))
    return Run(config, record, load_data(config, root, download=download)).run(report, checkpoint_seconds)


class Run:
    """A run in progress: the model, its optimizer, and how far they are."""

    def __init__(self, config: TrainConfig, record: Record, data: Data) -> None:
        self.config, self.record = config, record
        self.device = resolve_device(config.device)
        self.data = data.to(self.device)
        self._mean, self._std = (torch.tensor(x, device=self.device) for x in (data.mean, data.std))
        torch.manual_seed(config.seed)
        self.model = _build(config, data).to(self.device)
        self.optimizer = self._optimizer()
        self.progress = Progress()
        self.best: dict[str, Any] = {}
        self.batch_size = min(config.batch_size, len(data.train))
        self.steps_per_epoch = (
            len(data.train) // self.batch_size
        )  # a rest too small for a batch waits for another epoch
        self._names = list(data.train.inputs)
        example = self._batch(torch.arange(self.batch_size, device=self.device), None)
        self._step = tiltsam.capture(self.optimizer, self._loss, example)
        if self.device.type == "cuda":
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def _optimizer(self) -> tiltsam.SharpnessAware:
        config, params = self.config, self.model.parameters()
        base: torch.optim.Optimizer
        if config.optimizer == "adamw":
            base = torch.optim.AdamW(params, lr=config.lr, weight_decay=config.weight_decay)
        else:
            base = torch.optim.SGD(params, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
        if config.clip is not None:
            longest = config.clip
            base.register_step_pre_hook(lambda *_: _clip(self.model, longest))
        try:
            return config.constructor()(base, model=self.model, seed=config.seed, **config.method_options())
        except ValueError as error:
            raise ConfigError(str(error)) from None

    # ---------------------------------------------------------------- the loop

    def run(self, report: Callable[[Progress], None], checkpoint_seconds: float) -> dict[str, Any]:
        """Epoch after epoch until the budget is used up."""
        with _threads_for(self.model, self.device):
            return self._run(report, checkpoint_seconds)

    def _run(self, report: Callable[[Progress], None], checkpoint_seconds: float) -> dict[str, Any]:
        self._resume()
        self.record.begin(self.config, self.device)
        saved = time.perf_counter()
        while self.progress.done < 1:
            loss, spread = self._epoch()
            row = self._evaluate(loss, spread)
            self.record.log(**row)
            self.progress.row = row
            report(self.progress)
            if self.progress.done < 1 and time.perf_counter() - saved >= checkpoint_seconds:
                self.record.save(self._checkpoint())
                saved = time.perf_counter()
        return self._finish()

    def _epoch(self) -> tuple[float, float]:
        """One pass through the examples, or what is left of the budget; the mean loss and effective sample size."""
        config, progress = self.config, self.progress
        epoch = int(progress.epoch)
        order = torch.randperm(len(self.data.train), generator=_generator("cpu", config.seed, epoch)).to(self.device)
        shapes = _generator(self.device, config.seed, epoch)
        losses = torch.zeros((), device=self.device)
        sizes = torch.zeros((), device=self.device)
        start, before, steps = time.perf_counter(), progress.seconds, 0
        self.model.train()
        for k in range(self.steps_per_epoch):
            progress.done = self._used(epoch + k / self.steps_per_epoch, before + time.perf_counter() - start)
            if progress.done >= 1:
                break
            self._set_rate(progress.done)
            rows = order[k * self.batch_size : (k + 1) * self.batch_size]
            losses += self._step(*self._batch(rows, shapes)).to(losses.dtype)
            last = self.optimizer.last
            sizes += last.effective_sample_size.to(sizes.dtype)
            progress.passes += last.num_backwards + (last.num_forwards - last.num_backwards) / 3
            steps += 1
        mean = (losses / max(steps, 1)).item()  # waits for the device, so that the clock below tells the truth
        progress.seconds = before + time.perf_counter() - start
        progress.steps += steps
        progress.epoch = epoch + (1 if steps == self.steps_per_epoch else steps / self.steps_per_epoch)
        progress.done = max(progress.done, self._used(progress.epoch, progress.seconds))
        if not math.isfinite(mean):
            raise TrainError(
                f"the loss is not finite in epoch {epoch + 1} of {config.method}, seed {config.seed}: lower lr or rho"
            )
        return mean, (sizes / max(steps, 1)).item()

    def _used(self, epoch: float, seconds: float) -> float:
        """Share of the budget that is used up, by whichever limit is nearest."""
        config = self.config
        passes = config.passes
        epochs = config.epochs
        if config.method == "esam1":  # SAM until it has spent what TSAM would have
            passes = passes or config.epochs * self.steps_per_epoch * 2 * config.num_samples
            epochs = math.inf
        shares = [epoch / epochs]
        if passes is not None:
            shares.append(self.progress.passes / passes)
        if config.seconds is not None:
            shares.append(seconds / config.seconds)
        return max(shares)

    def _set_rate(self, done: float) -> None:
        config = self.config
        factor = 1.0
        if config.warmup and done < config.warmup:
            factor = (done + 1e-3) / (config.warmup + 1e-3)
        elif config.schedule == "cosine":
            factor = 0.5 * (1 + math.cos(math.pi * done))
        elif config.schedule == "step":
            factor = 0.1 ** ((done >= 0.5) + (done >= 0.75))
        for group in self.optimizer.param_groups:
            group["lr"] = config.lr * factor

    # ---------------------------------------------------------------- batches and losses

    def _batch(self, rows: Tensor, shapes: torch.Generator | None) -> tuple[Tensor, ...]:
        """Inputs by name, then targets; images augmented if a generator is given."""
        part = self.data.train[rows]
        return (*self._inputs(part, shapes), part.targets)

    def _inputs(self, part: Split, shapes: torch.Generator | None) -> list[Tensor]:
        found = []
        for name in self._names:
            x = part.inputs[name]
            if name == "image":
                if shapes is not None:
                    x = augment(x, self.data.augment, shapes)
                x = normalise(x, self._mean, self._std)
                if x.is_cuda:
                    x = x.contiguous(memory_format=torch.channels_last)
            found.append(x)
        return found

    def _forward(self, inputs: list[Tensor]) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            outputs: Tensor = self.model(*inputs)
        return outputs.float()

    def _loss(self, *batch: Tensor) -> Tensor:
        outputs, targets = self._forward(list(batch[:-1])), batch[-1]
        if self.data.num_classes == 1:
            return nn.functional.mse_loss(outputs.squeeze(1), targets)
        return nn.functional.cross_entropy(outputs, targets, label_smoothing=self.config.label_smoothing)

    # ---------------------------------------------------------------- evaluation

    def _evaluate(self, loss: float, spread: float) -> dict[str, Any]:
        """The epoch's line: losses and metrics on validation and test, at the weights themselves."""
        kept = {name: b.detach().clone() for name, b in self.model.named_buffers()}
        if self.config.reestimate_batchnorm:
            self._reestimate()
        row: dict[str, Any] = {
            "epoch": round(self.progress.epoch, 6),
            "steps": self.progress.steps,
            "passes": round(self.progress.passes, 3),
            "seconds": round(self.progress.seconds, 4),
            "lr": self.optimizer.param_groups[0]["lr"],
            "train_loss": loss,
            "effective_sample_size": spread,
        }
        for name in ("validation", "test"):
            for metric, value in self._score(getattr(self.data, name)).items():
                row[f"{name}_{metric}"] = value
        self.estimated = {name: b.detach().clone() for name, b in self.model.named_buffers()}
        for name, b in self.model.named_buffers():
            b.copy_(kept[name])
        counts = f"validation_{self.data.metrics[0]}"
        if counts in row and (not self.best or row[counts] > self.best[counts]):
            self.best = row
        return row

    @torch.no_grad()
    def _score(self, split: Split) -> dict[str, float]:
        if not len(split):
            return {}
        self.model.eval()
        parts = [split[i : i + EVAL_BATCH] for i in range(0, len(split), EVAL_BATCH)]
        outputs = torch.cat([self._forward(self._inputs(part, None)) for part in parts])
        found = {name: METRICS[name](outputs, split.targets).item() for name in self.data.metrics}
        if self.data.num_classes == 1:
            return {**found, "loss": nn.functional.mse_loss(outputs.squeeze(1), split.targets).item()}
        return {**found, "loss": nn.functional.cross_entropy(outputs, split.targets).item()}

    @torch.no_grad()
    def _reestimate(self) -> None:
        """BatchNorm's statistics anew: the average over training batches, without augmentation, at θ itself."""
        layers = [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        if not layers:
            return
        momenta = [m.momentum for m in layers]
        for m in layers:
            m.reset_running_stats()
            m.momentum = None  # a plain average
        self.model.train()
        size = min(EVAL_BATCH, len(self.data.train))
        for k in range(min(BATCHNORM_BATCHES, len(self.data.train) // size)):
            self._forward(self._inputs(self.data.train[k * size : (k + 1) * size], None))
        for m, momentum in zip(layers, momenta, strict=True):
            m.momentum = momentum

    # ---------------------------------------------------------------- stopping and going on

    def _checkpoint(self) -> Checkpoint:
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        progress = {k: getattr(self.progress, k) for k in ("epoch", "passes", "seconds", "steps", "done")}
        state = {**progress, "epoch": int(self.progress.epoch), "best": self.best}
        return Checkpoint(copy.copy(self.model.state_dict()), self.optimizer.state_dict(), state, random)

    def _resume(self) -> None:
        checkpoint = self.record.load()
        if checkpoint is None:
            return
        self.model.load_state_dict(checkpoint.model)
        self.optimizer.load_state_dict(checkpoint.optimizer)
        self.best = checkpoint.state.pop("best")
        self.progress = Progress(**checkpoint.state)
        torch.set_rng_state(checkpoint.random["cpu"])
        if self.device.type == "cuda" and "cuda" in checkpoint.random:
            torch.cuda.set_rng_state(checkpoint.random["cuda"], self.device)

    def _finish(self) -> dict[str, Any]:
        """The trained model with its estimated statistics, and the numbers to compare."""
        rows, _ = self.record.metrics()
        final = rows[-1]
        numbers = {
            **final,
            "metric": self.data.metrics[0],
            "score": final[f"test_{self.data.metrics[0]}"],
            "score_at_best_validation": self.best.get(f"test_{self.data.metrics[0]}", math.nan),
            "best_validation": self.best.get(f"validation_{self.data.metrics[0]}", math.nan),
        }
        self.record.finish({**self.model.state_dict(), **self.estimated}, **numbers)
        return numbers


@contextmanager
def _threads_for(model: nn.Module, device: torch.device) -> Iterator[None]:
    """One thread for a small model on a CPU: sharing out its tiny kernels costs more than it brings."""
    before = torch.get_num_threads()
    if device.type == "cpu" and sum(p.numel() for p in model.parameters()) < SMALL_MODEL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def resolve_device(name: str) -> torch.device:
    """The device of that name; ``auto`` is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"unknown device {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no CUDA device is available: use --device cpu")
    return device


def load_data(config: TrainConfig, root: Path | None = None, *, download: bool = False) -> Data:
    """The task's data as the run sees it."""
    tokenizer = config.model.removeprefix("hf:") if config.model.startswith("hf:") else None
    options: dict[str, Any] = {"validation": config.validation, "noise": config.noise, "max_length": config.max_length}
    return tasks.load(config.task, root=root, seed=config.seed, tokenizer=tokenizer, download=download, **options)


def load_model(record: Record, data: Data) -> nn.Module:
    """A run's model, trained as far as it is."""
    model = _build(record.config(), data)
    model.load_state_dict(record.model())
    return model


def _build(config: TrainConfig, data: Data) -> nn.Module:
    try:
        return build(config.model, data)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _generator(device: torch.device | str, seed: int, epoch: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(1_000_003 * seed + epoch)


def _clip(model: nn.Module, longest: float) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), longest)
