"""Trainers on two ranks: the same weights on both, equal to one process on whole batches."""

import pytest
import torch

from helpers.ranks import Ranks
from helpers.trainer_jobs import count_synchronizations, in_accelerate, in_lightning, in_transformers
from helpers.trainers import CLIP, STEPS, assert_close, net, optimizer_for, plain

pytestmark = pytest.mark.slow


def test_trainers_on_two_ranks_equal_one_process(tmp_path):
    """Each rank has half of every batch, in three parts that accumulate.

    One test, because importing the trainers in each process takes most of the time.
    """
    for name in ("lightning", "accelerate", "transformers"):
        pytest.importorskip(name)
    expected, _ = plain(clip=CLIP)
    passes = STEPS * 2 * optimizer_for(net()).num_samples
    ranks = Ranks(2)
    try:
        for job in (in_lightning, in_accelerate, in_transformers):
            (first, synchronizations), (second, _) = ranks(count_synchronizations, job, str(tmp_path / job.__name__), 3)
            assert synchronizations == passes, job.__name__  # not after each part
            assert torch.equal(first, second), job.__name__
            assert_close(first, expected)
        # An optimizer that was made with the bare model; and FSDP2.
        for job in (in_accelerate, in_lightning):
            first, second = ranks(job, str(tmp_path), 3, True)
            assert torch.equal(first, second), job.__name__
            assert_close(first, expected)
    finally:
        ranks.close()
