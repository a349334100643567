"""Bounds of numbers, and what parameters must be."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import tiltsam
from helpers.cases import Problem, sgd
from tiltsam.space.validation import check_count, check_fraction, check_nonnegative, check_positive, check_storage, warn


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, "0.1", True, None])
def test_check_nonnegative_refuses(value):
    with pytest.raises(ValueError, match=f"size.*got {value!r}"):
        check_nonnegative("size", value)


@pytest.mark.parametrize("value", [0.0, -1, math.nan, math.inf, "0.1", True, None])
def test_check_positive_refuses(value):
    with pytest.raises(ValueError, match=f"size.*got {value!r}"):
        check_positive("size", value)


def test_checks_accept_numbers_of_numpy():
    check_nonnegative("size", np.float32(0.1))
    check_positive("size", np.float32(0.1))
    check_fraction("size", np.float32(0.1))
    check_count("number", np.int64(3))


@pytest.mark.parametrize("value", [0, 1.5, True, "3"])
def test_check_count_refuses(value):
    with pytest.raises(ValueError, match=f"number.*got {value!r}"):
        check_count("number", value)


def test_check_storage_refuses_aliases_and_integers():
    weight = nn.Parameter(torch.ones(4, 4))
    check_storage([weight, nn.Parameter(torch.ones(4, 4))])
    with pytest.raises(ValueError, match=r"\(4, 4\)"):
        check_storage([weight, nn.Parameter(weight.data)])
    with pytest.raises(TypeError, match=r"torch\.int64"):
        check_storage([torch.ones(2, dtype=torch.int64)])


def test_warn_names_the_line_of_the_caller():
    with pytest.warns(RuntimeWarning, match="planted") as found:
        warn("planted")
    assert found[0].filename == __file__


def test_low_precision_weights_are_warned_about_once():
    model = nn.Linear(6, 3)
    problem = Problem(model, dtype=torch.bfloat16)
    optimizer = tiltsam.SAM(sgd(model.parameters()))
    with pytest.warns(RuntimeWarning, match="bfloat16") as found:
        optimizer.step(problem.closure)
    assert found[0].filename == __file__  # where the step is taken
    optimizer.step(problem.closure)  # a second warning would be an error
