"""Ranks that divide the samples of a step among them."""

import pytest
import torch

from helpers import jobs
from helpers.cases import METHODS

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed"),
]
CLOSE = {"rtol": 0, "atol": 1e-10}


@pytest.mark.parametrize("num_samples", [1, 2, 3, 5])
def test_split_samples_equal_one_process(ranks, num_samples):
    """More ranks than samples, as many, fewer; BatchNorm statistics and dropout as in one process."""
    options = {"num_samples": num_samples}
    found = ranks(jobs.split_samples, "tsam", 4, options)
    expected, numbers = jobs.unsplit_samples("tsam", 4, options)
    for weights, info in found:
        torch.testing.assert_close(weights, expected, **CLOSE)
        torch.testing.assert_close(info, numbers, rtol=0, atol=1e-9)
        assert all(torch.equal(weights[k], found[0][0][k]) for k in weights)


@pytest.mark.parametrize(
    ("ranks", "method"), [*((2, m.name) for m in METHODS), (3, "sam"), (3, "tsam")], indirect=["ranks"]
)
def test_split_samples_of_every_method(ranks, method):
    found = ranks(jobs.split_samples, method, 4, {})
    expected, _ = jobs.unsplit_samples(method, 4, {})
    for weights, _ in found:
        torch.testing.assert_close(weights, expected, **CLOSE)


@pytest.mark.parametrize("num_samples", [2, 4])
def test_split_samples_with_own_weighting(ranks, num_samples):
    options = {"t": 0.0, "num_samples": num_samples}
    found = ranks(jobs.split_samples, jobs.ByIndex, 3, options)
    expected, numbers = jobs.unsplit_samples(jobs.ByIndex, 3, options)
    assert numbers["weights"].tolist() == pytest.approx(
        [(j + 1) / sum(range(num_samples + 1)) for j in range(num_samples)]
    )
    for weights, info in found:
        torch.testing.assert_close(weights, expected, **CLOSE)
        torch.testing.assert_close(info, numbers, rtol=0, atol=1e-9)


def test_split_samples_with_gradients_of_different_parameters(ranks):
    found = ranks(jobs.experts_by_rank, 4)
    assert all(torch.equal(found[0][0], weights) for weights, _ in found)
    assert all(moved for _, moved in found)


def test_split_samples_refuse_different_weights(ranks):
    for error in ranks(jobs.split_samples_of_different_models):
        assert "weights" in error


def test_split_samples_without_model_warn(ranks):
    for ((message, at_the_step),) in ranks(jobs.split_samples_without_model):
        assert "model=" in message
        assert at_the_step


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "data"])
def test_split_samples_refuse_different_batches(ranks, kind):
    """DDP would average gradients of different points, and wait for passes that the other rank does not run."""
    for error in ranks(jobs.split_samples_among_data_ranks, kind):
        who = "ranks 0 and 1" if ranks.size == 2 else "ranks 0, 1 and 2"
        assert error.startswith(who)


def test_split_samples_require_the_data_group(four_ranks):
    for message in four_ranks(jobs.split_samples_without_data_group):
        assert message.startswith("2 of 4 processes")
