"""Several processes, one step: equal to one process, and bitwise equal among themselves."""

import pytest
import torch

import tiltsam
from helpers import jobs
from helpers.cases import METHODS
from helpers.ranks import Ranks

pytestmark = [
    pytest.mark.xdist_group("ranks"),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed"),
]
names = [m.name for m in METHODS]
every_method = pytest.mark.parametrize("method", names)
CLOSE = {"rtol": 0, "atol": 1e-10}


@pytest.fixture(scope="module", params=[2, 3], ids=["2ranks", "3ranks"])
def ranks(request):
    world = Ranks(request.param)
    yield world
    world.close()


@pytest.fixture(scope="module")
def four():
    world = Ranks(4)
    yield world
    world.close()


def same(results):
    return all(torch.equal(results[0], other) for other in results[1:])


# ---------------------------------------------------------------- data-parallel


@every_method
def test_ddp_ranks_are_bitwise_alike_and_equal_one_process(ranks, method):
    found = [weights for weights, _ in ranks(jobs.data_parallel, method, "sgd", 50, {})]
    assert same(found)
    torch.testing.assert_close(found[0], jobs.alone(method, "sgd", 50), **CLOSE)


@every_method
def test_ddp_ranks_stay_alike_with_batchnorm_dropout_and_unused_parameters(ranks, method):
    assert same(ranks(jobs.data_parallel_with_everything, method, 10))


def test_weights_from_local_losses_drift_apart(ranks):
    """What parallel=None does under DDP: every rank weighs its samples by its own losses. Do not reintroduce it."""
    tilt = {"t": 50.0}
    drifted = ranks(jobs.data_parallel, "tsam", "sgd", 20, {"parallel": None, **tilt})
    assert (drifted[0][0] - drifted[1][0]).abs().max() > 1e-4
    kept = ranks(jobs.data_parallel, "tsam", "sgd", 20, tilt)
    assert same([weights for weights, _ in kept])
    assert same([losses for _, losses in kept])


def test_a_user_who_does_not_pass_the_model_is_safe(ranks):
    found = ranks(jobs.without_the_model, "tsam", 10)
    assert same(found)
    torch.testing.assert_close(found[0], jobs.alone("tsam", "sgd", 10), **CLOSE)


@pytest.mark.parametrize("clip", [False, True], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("kind", ["bare", "inside", "by hand", "alone"])
def test_first_step_refuses_gradients_that_are_not_averaged(ranks, kind, clip):
    """The closure calls a model without DDP, or the one inside it. A hook of the base may average instead."""
    for error, untouched in ranks(jobs.gradients_of_their_own, kind, clip):
        if kind in ("bare", "inside"):
            assert "parallel=None" in error
            assert untouched
        else:
            assert error is None


def test_local_ascent_is_m_sam(ranks):
    found = ranks(jobs.local_ascent, 10)
    assert same(found)
    torch.testing.assert_close(found[0], jobs.local_ascent_by_hand(10, ranks.size), **CLOSE)


def test_what_ddp_cannot_do_in_a_step_is_refused(ranks):
    """Inside ``join`` losses and gradients would be paired with each other; static graphs break in ``no_sync``."""
    everywhere, local = tiltsam.Parallel(), tiltsam.Parallel(ascent="local")
    assert ranks(jobs.what_ddp_cannot, {"static_graph": True}, False, everywhere) == [None] * ranks.size
    for error in ranks(jobs.what_ddp_cannot, {}, True, everywhere):
        assert "give every rank as many batches" in error
    for error in ranks(jobs.what_ddp_cannot, {"static_graph": True}, False, local):
        assert "without static_graph" in error


# ---------------------------------------------------------------- sharded


@pytest.mark.parametrize(
    ("method", "base"), [*((name, "sgd") for name in names), ("sam", "adamw"), ("tsam", "adamw"), ("rsam", "adamw")]
)
def test_fsdp_equals_one_process(ranks, method, base):
    found = ranks(jobs.sharded, method, base, 20, {})
    torch.testing.assert_close(found[0], jobs.alone(method, base, 20), **CLOSE)


def test_fsdp_without_foreach(ranks):
    found = ranks(jobs.sharded, "tsam", "sgd", 5, {"foreach": False})
    torch.testing.assert_close(found[0], jobs.alone("tsam", "sgd", 5), **CLOSE)


def test_an_error_leaves_no_gathered_copy_perturbed(ranks):
    for (at_theta, perturbed), after in ranks(jobs.raise_after_a_forward):
        assert abs(perturbed - at_theta) > 0.1
        assert after == pytest.approx(at_theta, abs=1e-12)


def test_averaged_weights_leave_no_gathered_copy(ranks):
    model = jobs.mlp()
    wanted = jobs.outputs_along(model, tiltsam.SAM(jobs.sgd(model.parameters())), 4)
    for found in ranks(jobs.averaged, 4):
        torch.testing.assert_close(found, wanted, **CLOSE)


# ---------------------------------------------------------------- sample-parallel


@pytest.mark.parametrize("num_samples", [1, 2, 3, 5])
def test_samples_on_several_ranks_equal_one_process(ranks, num_samples):
    """More ranks than samples, as many, fewer; BatchNorm's statistics and dropout as in one process."""
    options = {"num_samples": num_samples}
    found = ranks(jobs.split_samples, "tsam", 20, options)
    expected, numbers = jobs.samples_of_one("tsam", 20, options)
    for weights, info in found:
        torch.testing.assert_close(weights, expected, **CLOSE)
        torch.testing.assert_close(info, numbers, rtol=0, atol=1e-9)
        assert all(torch.equal(weights[k], found[0][0][k]) for k in weights)


@every_method
def test_every_method_runs_with_its_samples_on_several_ranks(ranks, method):
    found = ranks(jobs.split_samples, method, 5, {})
    expected, _ = jobs.samples_of_one(method, 5, {})
    for weights, _ in found:
        torch.testing.assert_close(weights, expected, **CLOSE)


def test_samples_may_have_gradients_of_different_parameters(ranks):
    found = ranks(jobs.other_parameters_on_other_ranks, 4)
    assert same([weights for weights, _ in found])
    assert all(moved for _, moved in found)


def test_ranks_that_share_samples_have_to_begin_with_the_same_weights(ranks):
    for error in ranks(jobs.samples_of_different_models):
        assert "weights differ among the ranks that share samples" in error


def test_samples_without_the_model_are_warned_about(ranks):
    for ((message, where_the_step_was_taken),) in ranks(jobs.samples_without_the_model):
        assert "divided among ranks without model=" in message
        assert where_the_step_was_taken


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "said"])
def test_ranks_that_share_samples_cannot_see_different_batches(ranks, kind):
    """DDP would average gradients from different points, and wait for passes that the other rank does not run."""
    for error in ranks(jobs.samples_among_data_ranks, kind):
        who = "ranks 0 and 1" if ranks.size == 2 else "ranks 0, 1 and 2"
        assert error.startswith(f"{who} share the samples of one batch, and average gradients")


def test_samples_and_unknown_data_ranks_are_refused(four):
    for message in four(jobs.samples_without_a_word_about_the_data):
        assert "of 4 processes 2 share samples: say which ones see different batches" in message


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hybrid"])
def test_meshes_of_two_dimensions(four, kind):
    found = four(jobs.on_a_mesh, kind, 10)
    assert same(found)
    torch.testing.assert_close(found[0], jobs.alone("tsam", "sgd", 10), **CLOSE)


# ---------------------------------------------------------------- checkpoints and deaths


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # what we want when one process loads alone
@pytest.mark.parametrize("method", ["tsam", "friendly"])
def test_a_checkpoint_of_one_world_size_is_resumed_by_another(ranks, tmp_path, method):
    """Saved by two or three ranks, resumed by as many, by others, and by one process without any sharding.

    The base holds all state there is, and the wrapper can stand for it; where a sampler keeps a vector, it has to.
    """
    folder = str(tmp_path / "checkpoint")
    ranks(jobs.save_sharded, method, folder, 5)
    expected = jobs.alone(method, "adamw", 10)
    others = Ranks(5 - ranks.size)
    through_the_base = [(ranks, True)] if method == "tsam" else []
    try:
        for world, by_base in (*through_the_base, (ranks, False), (others, False)):
            for weights, steps in world(jobs.resume_sharded, method, folder, 5, 5, by_base):
                torch.testing.assert_close(weights, expected, **CLOSE)
                assert steps == 10
    finally:
        others.close()
    model = jobs.mlp()
    optimizer = jobs.BY_NAME[method](jobs.adamw(model.parameters()), model=model)
    jobs.load(model, optimizer, folder)
    jobs.train(model, optimizer, range(5, 10))
    torch.testing.assert_close(jobs.flat(model), expected, **CLOSE)


@pytest.mark.parametrize("kind", ["ddp", "samples"])
def test_a_rank_that_dies_leaves_the_others_with_a_clear_error(kind):
    world = Ranks(2)
    try:
        world.send(jobs.die_in_a_step, kind)
        seconds, untouched, note = world.receive(0)
    finally:
        world.close()
    assert seconds < 60  # it does not sit out gloo's time
    assert untouched
    assert "step 2 broke off on rank 0 of 2" in note
    assert "another rank died" in note


# ---------------------------------------------------------------- arguments


def test_bad_arguments():
    with pytest.raises(ValueError, match="ascent must be 'global' or 'local', got 'both'"):
        tiltsam.Parallel(ascent="both")
    with pytest.raises(TypeError, match=r"samples must be a process group, got int: take mesh\['samples'\]"):
        tiltsam.Parallel(samples=2)
    with pytest.raises(TypeError, match=r"parallel must be a tiltsam\.Parallel or None, got str"):
        tiltsam.SAM(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]), parallel="ddp")
