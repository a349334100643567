"""The benchmarks measure what their labels say."""

import re

import pytest
import torch

import bench_overhead
import bench_step
import tiltsam
from helpers.cases import Problem, sgd


@pytest.mark.parametrize("name", bench_step.our_methods((1, 3)))
def test_bench_step_rows_cost_the_passes_they_state(name):
    key, options, passes = bench_step.our_methods((1, 3))[name]
    problem = Problem(dropout=0.0)
    optimizer = tiltsam.METHODS[key](sgd(problem.model.parameters()), model=problem.model, **options)
    optimizer.step(problem.closure)
    info = optimizer.info
    forwards_alone = info.num_forwards - info.num_backwards
    assert info.num_backwards + forwards_alone / 3 == pytest.approx(passes)
    if samples := re.search(r"s=(\d)", name):
        assert info.losses.shape == torch.Size([int(samples[1])])


def test_bench_overhead_times_a_network_of_22_tensors():
    assert len(list(bench_overhead.Problem().model.parameters())) == 22
    for step in bench_overhead.candidates().values():
        step()
