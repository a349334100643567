"""From sentences to token numbers: a tokenizer of ``transformers``, or a small built-in one that needs nothing.

The built-in one splits at white space and punctuation and gives each word the number its hash says, so that there is no
vocabulary to learn or to ship: the same on every machine, good enough to compare methods, no match for a pretrained
model's own.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tiltsam.lab.encoders import tokenizer_of

__all__ = ["CLS", "PAD", "SEP", "VOCABULARY", "encode", "hash_token"]

VOCABULARY = 8192
"""Numbers that the built-in tokenizer gives: 0…8191."""
PAD = 0
"""Fills up short sentences; not attended to."""
CLS = 1
"""Starts every example."""
SEP = 2
"""Ends a sentence."""
_RESERVED = 3
_KEPT = ("input_ids", "attention_mask", "token_type_ids")  # in the order that encoders take them
_CHUNK = 8192  # texts at a time: a tokenizer's lists take ten times the memory of a tensor

_WORD = re.compile(r"\w+|[^\w\s]")


def hash_token(word: str) -> int:
    """The number of a word, 3…8191: its CRC-32, folded.

    Example:
        >>> hash_token("sharpness") == hash_token("sharpness")
        True
    """
    return _RESERVED + zlib.crc32(word.encode()) % (VOCABULARY - _RESERVED)


def encode(
    first: Sequence[str], second: Sequence[str] | None = None, *, tokenizer: str | None = None, max_length: int = 64
) -> dict[str, Tensor]:
    """Sentences, or pairs of them, as token numbers.

    Args:
        first: A sentence per example.
        second: Its companion, where examples are pairs.
        tokenizer: Local folder or hub name for ``transformers``; None or ``"hash"`` for the built-in one.
        max_length: Tokens kept of an example, counting those that start it and end its sentences; of a pair, the
            longer sentence is cut first.

    Returns:
        ``input_ids`` and ``attention_mask``, int64 (n, length), padded on the right to the longest example;
        ``token_type_ids`` too where the tokenizer tells the sentences of a pair apart.

    Raises:
        DataError: ``transformers`` is not installed, or has no such tokenizer.
        ValueError: ``max_length`` leaves no room for a word, or the sequences differ in length.

    Example:
        >>> encode(["a b", "c"])["attention_mask"]
        tensor([[1, 1, 1, 1],
                [1, 1, 1, 0]])
    """
    if max_length < 5:
        raise ValueError(f"max_length must be 5 or more (a pair takes 3 tokens before any word), got {max_length}")
    if second is not None and len(second) != len(first):
        raise ValueError(f"{len(first)} first sentences and {len(second)} second ones")
    if tokenizer is None or tokenizer == "hash":
        tokens = _encode_hash(first, second, max_length)
    else:
        tokens = _encode_transformers(first, second, tokenizer, max_length)
    longest = max(1, int(tokens["attention_mask"].sum(1).max())) if len(first) else 1
    return {name: x[:, :longest].clone() for name, x in tokens.items()}


def _encode_hash(first: Sequence[str], second: Sequence[str] | None, max_length: int) -> dict[str, Tensor]:
    number = functools.cache(hash_token)  # most words come again

    def numbers(sentence: str) -> list[int]:
        return [number(word) for word in _WORD.findall(sentence.lower())[:max_length]]

    ids = np.full((len(first), max_length), PAD, dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, sentence in enumerate(first):
        tokens = numbers(sentence)
        if second is None:
            tokens = [CLS, *tokens[: max_length - 2], SEP]
        else:
            one, two = _fit(tokens, numbers(second[row]), max_length - 3)
            tokens = [CLS, *one, SEP, *two, SEP]
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
    return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}


def _fit(one: list[int], two: list[int], room: int) -> tuple[list[int], list[int]]:
    """Cut the longer first until both fit."""
    if len(one) + len(two) <= room:
        return one, two
    half = room // 2
    if len(one) <= half:
        return one, two[: room - len(one)]
    if len(two) <= room - half:
        return one[: room - len(two)], two
    return one[:half], two[: room - half]


def _encode_transformers(
    first: Sequence[str], second: Sequence[str] | None, tokenizer: str, max_length: int
) -> dict[str, Tensor]:
    made = tokenizer_of(tokenizer)
    if not len(first):
        empty = torch.zeros(0, max_length, dtype=torch.int64)
        return {"input_ids": empty, "attention_mask": empty.clone()}
    parts = []
    for i in range(0, len(first), _CHUNK):
        texts = [list(x[i : i + _CHUNK]) for x in (first, second) if x is not None]
        out = made(*texts, padding="max_length", truncation=True, max_length=max_length)
        parts.append({name: torch.tensor(out[name], dtype=torch.int64) for name in _KEPT if name in out})
    tokens = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if not tokens.get("token_type_ids", torch.ones(1)).any():
        del tokens["token_type_ids"]  # a model that is told nothing takes them to be 0
    return tokens
