"""FSDP2 in Accelerate and the Trainer: equal to one process on whole batches, also after evaluations, and resumed."""

import functools

import pytest
import torch

import tiltsam
from helpers.lazy import Lazy
from helpers.ranks import Ranks
from helpers.trainer_jobs import in_accelerate_fsdp2, in_transformers_fsdp2
from helpers.trainers import BATCH, CLIP, assert_close, flat, plain

pytestmark = pytest.mark.slow
hf = Lazy("helpers.transformers_trainer")


@pytest.fixture(scope="module")
def sharding_ranks():
    """Two processes of their own: Accelerate sets environment variables."""
    pytest.importorskip("accelerate")
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    ("method", "scaled", "options"),
    [
        ("sam", False, {}),
        ("tsam", False, {"parts": 3}),
        ("momentumsam", False, {"parts": 2}),
        ("tsam", False, {"dynamo_backend": "eager"}),
        ("tsam", True, {"parts": 2}),
        ("tsam", False, {"parts": 2, "mixed_precision": "bf16", "dtype": torch.float32}),
    ],
    ids=["sam", "accumulated", "with state", "compiled", "scaled", "bfloat16"],
)
def test_accelerate_with_fsdp2_equals_one_process(sharding_ranks, tmp_path, method, scaled, options):
    (whole, resumed), other = sharding_ranks(in_accelerate_fsdp2, str(tmp_path), method, scaled, options)
    for found, expected in zip((*whole, *resumed, *whole), (*other[0], *other[1], *resumed), strict=True):
        assert torch.equal(found, expected)
    if "mixed_precision" in options:
        expected, _ = plain(method, clip=CLIP, autocast=True, dtype=torch.float32)
        torch.testing.assert_close(whole[0], expected, rtol=0.05, atol=0.02)
    else:
        assert_close(whole[0], plain(method, clip=CLIP)[0])


@pytest.mark.parametrize("compiled", [False, True])
def test_trainer_with_fsdp2_equals_one_process(sharding_ranks, tmp_path, compiled):
    pytest.importorskip("transformers")
    options = {
        "wrap": functools.partial(tiltsam.TSAM, rho=0.1),
        "max_grad_norm": CLIP,
        "learning_rate": 0.02,
        "gradient_accumulation_steps": 3,
        "per_device_train_batch_size": BATCH // 3,
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    saved = {"save_strategy": "steps", "save_steps": 8, "torch_compile": compiled, "torch_compile_backend": "eager"}
    (whole, resumed), other = sharding_ranks(in_transformers_fsdp2, str(tmp_path), options | saved)
    assert torch.equal(whole, resumed)
    assert torch.equal(whole, other[0])
    hf.reset_state()
    alone = hf.trainer(tmp_path, **options)
    alone.train()
    hf.reset_state()
    assert_close(whole, flat(alone.model))
