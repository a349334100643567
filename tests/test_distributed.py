"""Steps that several processes take together: equal to one process, and bitwise equal among themselves."""

import pytest
import torch

import tiltsam
from helpers import jobs
from helpers.cases import METHODS
from helpers.ranks import Ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed"),
]
names = [m.name for m in METHODS]
every_method = pytest.mark.parametrize("method", names)
# The number of ranks divides shards and batches in the same way for all methods, and neither two nor three ranks divide
# the tensors evenly: two ranks for all methods, three for a few.
two_ranks_and_three = pytest.mark.parametrize(
    ("ranks", "method"), [*((2, name) for name in names), *((3, name) for name in ("sam", "tsam"))], indirect=["ranks"]
)
# Four steps: one more than the period of LookSAM.
CLOSE = {"rtol": 0, "atol": 1e-10}


def same(results):
    return all(torch.equal(results[0], other) for other in results[1:])


# ---------------------------------------------------------------- data-parallel


@two_ranks_and_three
def test_ddp_equals_one_process(ranks, method):
    found = [weights for weights, _ in ranks(jobs.data_parallel, method, "sgd", 4, {})]
    assert same(found)
    torch.testing.assert_close(found[0], jobs.alone(method, "sgd", 4), **CLOSE)


@pytest.mark.parametrize("ranks", [2], indirect=True)
@every_method
def test_ddp_with_batchnorm_dropout_and_unused_parameters(ranks, method):
    assert same(ranks(jobs.data_parallel_net, method, 4))


def test_zero_redundancy_optimizer_equals_one_process_and_resumes(ranks):
    unbroken = [weights for weights, _ in ranks(jobs.data_parallel, "tsam", "zero", 4, {})]
    resumed = ranks(jobs.zero_redundancy_resumed, 4)
    for found in (unbroken, resumed):  # a new DDP sums gradients in another order at its first step
        assert same(found)
        torch.testing.assert_close(found[0], jobs.alone("tsam", "adamw", 4), **CLOSE)


def test_weights_from_local_losses_drift_apart(ranks):
    """With parallel=None under DDP every rank weights its samples by its own losses."""
    tilt = {"t": 50.0}
    drifted = ranks(jobs.data_parallel, "tsam", "sgd", 6, {"parallel": None, **tilt})
    assert (drifted[0][0] - drifted[1][0]).abs().max() > 1e-4
    kept = ranks(jobs.data_parallel, "tsam", "sgd", 6, tilt)
    assert same([weights for weights, _ in kept])
    assert same([losses for _, losses in kept])


def test_ddp_without_model_equals_one_process(ranks):
    found = ranks(jobs.data_parallel_without_model, "tsam", 4)
    assert same(found)
    torch.testing.assert_close(found[0], jobs.alone("tsam", "sgd", 4), **CLOSE)


@pytest.mark.parametrize("clip", [False, True], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("kind", ["bare", "inside", "by hand", "alone"])
def test_first_step_refuses_gradients_that_are_not_averaged(ranks, kind, clip):
    """The closure calls a model without DDP, or the one inside it; a hook of the base may average instead."""
    for error, untouched in ranks(jobs.gradients_not_averaged, kind, clip):
        if kind in ("bare", "inside"):
            assert "parallel=None" in error
            assert untouched
        else:
            assert error is None


def test_local_ascent_is_m_sam(ranks):
    found = ranks(jobs.local_ascent, 4)
    assert same(found)
    torch.testing.assert_close(found[0], jobs.local_ascent_by_hand(4, ranks.size), **CLOSE)


def test_unsupported_ddp_is_refused(ranks):
    """``join`` would pair our all-reduces with those of DDP; static graphs do not support ``no_sync``."""
    everywhere, local = tiltsam.Parallel(), tiltsam.Parallel(ascent="local")
    assert ranks(jobs.unsupported_ddp, {"static_graph": True}, False, everywhere) == [None] * ranks.size
    for error in ranks(jobs.unsupported_ddp, {}, True, everywhere):
        assert "drop_last=True" in error
    for error in ranks(jobs.unsupported_ddp, {"static_graph": True}, False, local):
        assert "static_graph" in error


# ---------------------------------------------------------------- sharded


@two_ranks_and_three
def test_fsdp_equals_one_process(ranks, method):
    found = ranks(jobs.sharded, method, "sgd", 4, {})
    assert same(found)
    torch.testing.assert_close(found[0], jobs.alone(method, "sgd", 4), **CLOSE)


@pytest.mark.parametrize(("ranks", "method"), [(2, "sam"), (2, "tsam"), (2, "rsam"), (3, "tsam")], indirect=["ranks"])
def test_fsdp_with_adamw_equals_one_process(ranks, method):
    found = ranks(jobs.sharded, method, "adamw", 4, {})
    torch.testing.assert_close(found[0], jobs.alone(method, "adamw", 4), **CLOSE)


def test_fsdp_without_model_warns(ranks):
    """The gathered weights can be dropped only through the model; without an ascent there is nothing to drop."""
    assert all(not found for found in ranks(jobs.sharded_without_model, "erm"))
    for (message,) in ranks(jobs.sharded_without_model, "tsam"):
        assert "model=" in message


def test_fsdp_refuses_ignored_gradients_that_are_not_averaged(ranks):
    found = ranks(jobs.ignored_by_fsdp, True, 4)
    assert same([weights for weights, _ in found])
    torch.testing.assert_close(found[0][0], jobs.alone("tsam", "sgd", 4), **CLOSE)
    for weights, error in ranks(jobs.ignored_by_fsdp, False, 4):
        assert "ignores" in error
        assert torch.equal(weights, jobs.flat(jobs.mlp()))


@pytest.mark.parametrize("place", ["forward", "after"])
def test_fsdp_drops_gathered_weights_on_error(ranks, place):
    for (at_theta, perturbed), after in ranks(jobs.raise_in_a_pass, place):
        assert abs(perturbed - at_theta) > 0.1
        assert after == pytest.approx(at_theta, abs=1e-12)
    for before, averaged, after in ranks(jobs.raise_with_averaged_weights, place):
        assert (averaged - before).abs().max() > 1e-3
        assert torch.equal(after, before)


@pytest.mark.parametrize("inside", [False, True], ids=["between", "inside"])
@pytest.mark.parametrize("method", ["sam", "tsam", "momentumsam"])
def test_fsdp_drops_weights_gathered_by_an_evaluation(ranks, method, inside):
    wanted = jobs.evaluated_between(0, method, 4, inside, sharded=False)
    for found in ranks(jobs.evaluated_between, method, 4, inside):
        torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("whole", [False, True], ids=["sharded", "partly"])
def test_fsdp_drops_gathered_averaged_weights(ranks, whole):
    model = jobs.mlp()
    wanted = jobs.outputs_by_step(model, tiltsam.SAM(jobs.sgd(model.parameters())), 4)
    for found in ranks(jobs.averaged_outputs, 4, whole):
        torch.testing.assert_close(found, wanted, **CLOSE)


def test_sharded_average_of_another_rank_is_refused(ranks, tmp_path):
    first, *others = ranks(jobs.average_of_first_rank, str(tmp_path / "average.pt"))
    assert first is None
    assert all("torch.distributed.checkpoint" in error for error in others)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hybrid"])
def test_meshes_of_two_dimensions(four_ranks, kind):
    found = four_ranks(jobs.train_on_mesh, kind, 4)
    assert same(found)
    torch.testing.assert_close(found[0], jobs.alone("tsam", "sgd", 4), **CLOSE)


# ---------------------------------------------------------------- checkpoints and failures


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process loads alone
@pytest.mark.parametrize(("ranks", "method"), [(2, "tsam"), (3, "tsam"), (2, "vasso")], indirect=["ranks"])
def test_checkpoint_is_resumed_by_another_number_of_ranks(ranks, start_ranks, tmp_path, method):
    """Saved by two or three ranks; resumed by as many, by another number, and by one process without sharding.

    The state dict of the base or that of the method may be saved; vectors of a sampler are only in the latter.
    """
    folder = str(tmp_path / "checkpoint")
    ranks(jobs.save_sharded, method, folder, 2)
    expected = jobs.alone(method, "adamw", 4)
    others = start_ranks(5 - ranks.size)
    through_the_base = [(ranks, True)] if method == "tsam" else []
    for world, by_base in (*through_the_base, (ranks, False), (others, False)):
        for weights, steps in world(jobs.resume_sharded, method, folder, 2, 2, by_base):
            torch.testing.assert_close(weights, expected, **CLOSE)
            assert steps == 4
    model = jobs.mlp()
    optimizer = jobs.BY_NAME[method](jobs.adamw(model.parameters()), model=model)
    jobs.load(model, optimizer, folder)
    jobs.train(model, optimizer, range(2, 4))
    torch.testing.assert_close(jobs.flat(model), expected, **CLOSE)


@pytest.mark.parametrize("kind", ["ddp", "samples"])
def test_failed_rank_is_reported_by_the_others(kind):
    world = Ranks(2)
    try:
        world.send(jobs.exit_in_step, kind)
        seconds, untouched, note = world.receive(0)
    finally:
        world.close()
    assert seconds < 60  # less than gloo's timeout
    assert untouched
    assert "failed on rank 0 of 2" in note


# ---------------------------------------------------------------- arguments


def test_parallel_refuses_bad_arguments():
    with pytest.raises(ValueError, match="'both'"):
        tiltsam.Parallel(ascent="both")
    with pytest.raises(TypeError, match=r"samples.*int.*mesh\['samples'\]"):
        tiltsam.Parallel(samples=2)
    with pytest.raises(TypeError, match=r"parallel.*str"):
        tiltsam.SAM(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]), parallel="ddp")
