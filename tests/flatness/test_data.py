"""Size, device and parts of a batch."""

from __future__ import annotations

from collections import UserDict
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tiltsam.flatness.data import batch_size, chunks, tree_map


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def test_batch_size_is_length_of_first_tensor() -> None:
    assert batch_size({"a": 3, "b": [torch.ones(()), torch.ones(4, 1)]}) == 4
    with pytest.raises(ValueError, match="str"):
        batch_size("text")


def test_tree_map_keeps_structure() -> None:
    batch = {"pair": Pair(torch.ones(1), torch.ones(2)), "rest": [(torch.ones(3),), "text", 2]}
    doubled = tree_map(lambda x: 2 * x, batch)
    assert isinstance(doubled["pair"], Pair)
    assert doubled["pair"].y.tolist() == [2.0, 2.0]
    assert doubled["rest"][0][0].tolist() == [2.0] * 3
    assert doubled["rest"][1:] == ["text", 2]
    assert type(tree_map(lambda x: x, UserDict(x=torch.ones(1)))) is dict


def test_chunks_cut_tensors_with_one_row_per_example() -> None:
    x, weights = torch.arange(5), torch.ones(3)
    parts = list(chunks({"x": x, "weights": weights, "n": 7}, 2))
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4]]
    assert all(part["weights"] is weights and part["n"] == 7 for part in parts)
