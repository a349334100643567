"""Vectors that a sampler keeps between steps."""

import pytest
import torch
from torch import nn

from helpers.cases import sgd
from tiltsam.space.sampler_state import SamplerState


def state_over(*params, names=("mean",)):
    state = SamplerState(names)
    state.allocate(params)
    return state


def test_vectors_are_zero_at_first_and_kept():
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    state = state_over(p)
    assert state.vector("mean", [p])[0].tolist() == [0.0] * 3
    state.vector("mean", [p])[0].fill_(2)
    state.allocate([p, q])
    assert [x.tolist() for x in state.vector("mean", [p, q])] == [[2.0] * 3, [0.0] * 2]


def test_complex_vectors_are_pairs_of_reals():
    p = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    assert state_over(p).vector("mean", [p])[0].shape == (3, 2)


def test_unknown_vector_is_refused():
    p = nn.Parameter(torch.ones(3))
    with pytest.raises(LookupError, match="'velocity'"):
        state_over(p).vector("velocity", [p])


def test_roll_back_restores_and_may_be_repeated():
    p = nn.Parameter(torch.ones(3))
    state = state_over(p)
    (vector,) = state.vector("mean", [p])
    for _ in range(2):
        state.begin_step([p])
        vector.add_(1)
        for _ in range(2):
            state.roll_back([p])
            assert vector.tolist() == [0.0] * 3


def test_vectors_follow_the_dtype_of_their_parameter():
    p = nn.Parameter(torch.ones(3))
    state = state_over(p)
    state.vector("mean", [p])[0].fill_(2)
    p.data = p.data.double()
    state.allocate([p])
    assert state.vector("mean", [p])[0].dtype == torch.float64
    assert state.vector("mean", [p])[0].tolist() == [2.0] * 3


def test_state_dict_holds_the_vectors_and_loads_in_place():
    p = nn.Parameter(torch.ones(3))
    base = sgd([p])
    state = state_over(p)
    (vector,) = state.vector("mean", [p])
    vector.fill_(2)
    saved = state.state_dict(base)
    assert saved["state"][0]["tilt_mean"].tolist() == [2.0] * 3
    saved = {**saved, "state": {0: {"tilt_mean": torch.full((3,), 5.0)}}}
    state.load_state_dict(base, saved)
    assert vector.tolist() == [5.0] * 3
    assert "tilt_mean" not in base.state[p]


def test_loading_a_checkpoint_without_vectors_warns_and_zeroes():
    p = nn.Parameter(torch.ones(3))
    base = sgd([p])
    state = state_over(p)
    (vector,) = state.vector("mean", [p])
    vector.fill_(2)
    saved = base.state_dict()
    saved["param_groups"][0]["steps_taken"] = 4
    with pytest.warns(RuntimeWarning, match=r"mean.*flatten_optimizer_state_dict"):
        state.load_state_dict(base, saved)
    assert vector.tolist() == [0.0] * 3
