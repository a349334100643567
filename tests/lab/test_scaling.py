"""The cost model counts what steps really run, hold and send."""

import json
from pathlib import Path

import pytest
import torch

import bench_step
from helpers import jobs
from tiltsam.lab.scaling import Layout, Machine, compare_layouts, step_cost

PARAMETERS = 2 * 32 * 64  # of the job's model


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_sent_bytes_are_those_of_real_steps(four_ranks):
    """Vectors exactly; next to them a step sends less than a kilobyte of numbers."""
    layouts = [Layout(data=4), Layout(shards=4), Layout(samples=4), Layout(data=2, samples=2)]
    layouts += [Layout(shards=2, samples=2), Layout(data=2, shards=2)]
    for number, layout in enumerate(layouts):
        options = {"num_samples": 3, "share_ascent": number % 2 == 1}  # each with data, shards and samples
        cost = step_cost(PARAMETERS, 2, layout=layout, **options)
        shape = (layout.data, layout.samples, layout.shards)
        passes, sent = four_ranks(jobs.sent_bytes, shape, options)[0]
        assert passes == cost.passes, (layout, options)
        assert sent["numbers"] < 1024
        assert sent["gathered"] == cost.gathered_bytes, (layout, options)
        others = cost.reduced_bytes + cost.replica_bytes + cost.exchanged_bytes
        assert sent["scattered"] + sent["reduced"] == others, (layout, options)


@pytest.mark.parametrize(
    ("options", "copies"),  # tests/optim/test_memory.py measures the same numbers
    [
        ({"num_samples": 1, "noise": False, "ascent": False}, 0),
        ({"num_samples": 1, "noise": False}, 1),
        ({"num_samples": 1}, 1),
        ({"num_samples": 3}, 2),
        ({"num_samples": 3, "share_ascent": True}, 3),
    ],
)
def test_bytes_above_the_base(options, copies):
    assert step_cost(100, 1, **options).bytes_above_base == 400 * copies
    assert step_cost(100, 1, layout=Layout(shards=4), weight_bytes=2, **options).bytes_above_base == 50 * copies


@pytest.mark.parametrize(
    ("name", "error", "number"), [("scale.json", 0.01, 11), ("later.json", 0.016, 11), ("more.json", 0.01, 2)]
)
def test_times_of_the_record_follow_from_those_of_its_passes(name, error, number):
    """Captured steps of SAM and TSAM on an H200: passes, and vectors at the bandwidth of a copy."""
    path = Path(bench_step.__file__).parent / "records/2026-11-18_scale_h200" / name
    rows = [row for row in json.loads(path.read_text())["rows"] if row["weights"] == "fp32"]
    captured = [row for row in rows if row["mode"] == "captured" and "ms" in row]
    alone = {row["size"]: row["ms"] for row in captured if row["step"] == "passes alone"}
    methods = {
        "sam": {"num_samples": 1, "noise": False},
        "tsam s=1": {"num_samples": 1},
        "tsam s=3": {"num_samples": 3},
    }
    steps = [row for row in captured if row["step"] in methods]
    for row in steps:
        cost = step_cost(row["parameters"], row["tokens"], **methods[row["step"]])
        assert cost.passes == row["passes"]
        vectors = 1e3 * cost.vector_bytes / Machine().memory_bandwidth
        ms = cost.passes * alone[row["size"]] + vectors
        assert ms == pytest.approx(row["ms"], rel=error), row
    assert len(steps) == number


def test_divided_samples_win_where_passes_wait_for_the_network():
    few, many = (compare_layouts(70e9, tokens, 512) for tokens in (2**18, 2**24))
    assert few[0].layout.samples == 4
    assert few[0].seconds() < 0.5 * min(cost.seconds() for cost in few if cost.layout.samples == 1)
    assert many[0].seconds() > 0.95 * min(cost.seconds() for cost in many if cost.layout.samples == 1)
    assert compare_layouts(70e9, 2**18, 8) == []  # 24 bytes a parameter do not fit
    assert all(cost.memory_bytes < Machine().memory for cost in few)


def test_compare_layouts_orders_by_the_given_machine():
    slow = Machine(network_bandwidth=1e8, node_bandwidth=1e9)
    seconds = [cost.seconds(slow) for cost in compare_layouts(1e9, 2**20, 16, machine=slow)]
    assert len(seconds) > 2
    assert seconds == sorted(seconds)
    assert compare_layouts(1e9, 2**20, 2)


def test_step_without_noise_and_ascent_has_one_sample():
    with pytest.raises(ValueError, match="num_samples must be 1"):
        step_cost(1e9, 4096, num_samples=3, noise=False, ascent=False)
    plain = step_cost(1e9, 4096, num_samples=1, noise=False, ascent=False)
    assert (plain.passes, plain.bytes_above_base) == (1, 0)
