"""The data and the model of a run: what its config names, and what its record holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from torch import nn

from tiltsam.lab import download as downloads
from tiltsam.lab import encoders, tasks
from tiltsam.lab.config import ConfigError, TrainConfig
from tiltsam.lab.data import Data
from tiltsam.lab.models import build
from tiltsam.lab.record import Record

__all__ = ["build_model", "data_key", "data_loader", "load_data", "load_model"]


def load_data(
    config: TrainConfig,
    root: Path | None = None,
    *,
    download: bool = False,
    progress: downloads.Progress | None = None,
) -> Data:
    """The task's data as the run sees it: of a text, tokens of the model's own tokenizer.

    Raises:
        DataError: What is missing, and where to put it.
        ConfigError: A setting that does not suit the task.
    """
    source = encoders.source_of(config.model)
    if source is not None and download:
        encoders.fetch(source)
    try:
        return tasks.load(
            config.task,
            root=root,
            seed=config.seed,
            validation=config.validation,
            noise=config.noise,
            tokenizer=source,
            max_length=config.max_length,
            image_size=config.image_size,
            download=download,
            progress=progress,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def data_loader(
    root: Path | None = None, *, download: bool = False, progress: downloads.Progress | None = None
) -> Callable[[TrainConfig], Data]:
    """Return a :func:`load_data` that keeps the last data set, since decoding images is slow.

    One is enough: runs are ordered by seed, and the seed decides about the validation split and the label noise.
    """

    @lru_cache(1)
    def load(key: TrainConfig) -> Data:
        return load_data(key, root, download=download, progress=progress)

    return lambda config: load(data_key(config))


def data_key(config: TrainConfig) -> TrainConfig:
    """Return the part of a config that decides about its data: equal for configs whose data is the same."""
    names = ("task", "seed", "noise", "validation", "max_length", "image_size")
    model = config.model if encoders.source_of(config.model) else "auto"  # only an encoder has a tokenizer of its own
    return TrainConfig(model=model, **{name: getattr(config, name) for name in names})


def load_model(record: Record, data: Data) -> nn.Module:
    """A run's model, trained as far as it is; a RecordError is raised if the data are its own and have changed."""
    config = record.config()
    if config.task == data.name:
        record.check_data(data.fingerprint)
    model = build_model(config, data)
    beside = dict(model.named_buffers()).keys() - model.state_dict().keys()  # which a file may hold all the same
    model.load_state_dict({name: x for name, x in record.model().items() if name not in beside})
    return model


def build_model(config: TrainConfig, data: Data) -> nn.Module:
    """The model that a config names, for that data, with the weights it begins with.

    Raises:
        ConfigError: A model that does not suit the data.
    """
    try:
        return build(config.model, data)
    except ValueError as error:
        raise ConfigError(str(error)) from None
