"""Accelerate equals the loop written by hand, with accumulation, clipping, float16 and resume."""

from contextlib import nullcontext

import pytest
import torch

import tiltsam
from helpers.lazy import Lazy
from helpers.trainers import (
    BATCH,
    CLIP,
    STEPS,
    accuracy,
    assert_close,
    averages,
    example,
    flat,
    loader,
    loss_of,
    net,
    optimizer_for,
    plain,
)

loop = Lazy("helpers.accelerate_training")


@pytest.fixture(autouse=True)
def _fresh_state():
    pytest.importorskip("accelerate")
    loop.reset_state()
    yield
    loop.reset_state()


@pytest.mark.parametrize("method", ["sam", "esam2", "pgn", "tsam"])
def test_accelerate_equals_loop(method):
    training = loop.Training(method)
    assert torch.equal(training.run(clip=CLIP), plain(method, clip=CLIP)[0])
    assert training.calls == STEPS * training.optimizer.optimizer.info.num_forwards


def test_prepared_optimizer_takes_a_plain_closure():
    """With neither accumulation nor float16, what prepare returns is stepped like any optimizer with a closure."""
    training = loop.Training()
    for _ in range(4):
        for x, y in training.loader:

            def closure(x=x, y=y):
                loss = loss_of(training.model, x, y)
                training.accelerator.backward(loss)
                return loss

            training.optimizer.step(closure)
            training.scheduler.step()
    assert torch.equal(flat(training.model), plain()[0])


@pytest.mark.parametrize("parts", [2, 3])
def test_accelerate_accumulation_equals_the_full_batch(parts):
    training = loop.Training(parts=parts)
    assert_close(training.run(clip=CLIP), plain(clip=CLIP)[0])
    assert training.calls == STEPS * parts * training.optimizer.optimizer.info.num_forwards


@pytest.mark.parametrize(("each", "unsynchronized"), [(False, 2), (True, 0)])
def test_sync_each_batch(each, unsynchronized, monkeypatch):
    training, entered = loop.Training("erm", parts=3), []
    accelerator = training.accelerator
    accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = each

    def no_sync(model):
        if accelerator.sync_gradients:  # entered by step, not by accumulate
            entered.append(model)
        return nullcontext()

    monkeypatch.setattr(accelerator, "no_sync", no_sync)
    training.run(1)
    assert len(entered) == unsynchronized


def test_loss_of_a_window_is_that_of_the_full_batch():
    losses = []
    for parts in (1, 3):
        training = loop.Training(parts=parts)
        training.run()
        losses.append(torch.stack(training.losses))
        loop.reset_state()
    assert_close(*losses)


def test_bfloat16():
    weights = loop.Training(dtype=torch.float32, mixed_precision="bf16").run()
    expected, _ = plain(autocast=True, dtype=torch.float32)
    # Accelerate makes the model's output float32, so that the loss is computed in it.
    torch.testing.assert_close(weights, expected, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("method", ["sam", "pgn", "tsam-hmc"])
def test_float16_logic_on_a_cpu(method, parts):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=6)
    training = loop.Training(method, parts=parts, scaler=scaler)
    torch.testing.assert_close(training.run(clip=CLIP), plain(method, clip=CLIP)[0], rtol=1e-7, atol=1e-8)
    assert scaler.get_scale() == 1024.0 * 2**3


def test_overflow_skips_step_and_schedule():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    training = loop.Training("sam", scaler=scaler)
    before, rate = flat(training.model), training.scheduler.scheduler.last_epoch
    training.overflow_at = {1, 2}
    training.run(1)
    assert torch.equal(flat(training.model), before)
    assert training.accelerator.optimizer_step_was_skipped
    assert training.scheduler.scheduler.last_epoch == rate
    assert scaler.get_scale() == 512.0
    training.run(2)
    assert not training.accelerator.optimizer_step_was_skipped
    assert training.scheduler.scheduler.last_epoch == rate + 1
    assert not torch.equal(flat(training.model), before)


def test_prepared_optimizer_refuses_float16_closure():
    """What prepare returns hands the scaler a closure; no weight moves by a scaled gradient."""
    training = loop.Training("sam", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    before = flat(training.model)

    def closure():
        loss = loss_of(training.model, *next(iter(training.loader)))
        training.accelerator.backward(loss)
        return loss

    closure()
    with pytest.raises(RuntimeError, match="scaler=scaler"):
        training.optimizer.step(closure)
    assert torch.equal(flat(training.model), before)
    batch = next(iter(training.loader))
    loop.step(training.accelerator, training.optimizer, training.loss, *batch)  # the right way goes on from there
    assert not torch.equal(flat(training.model), before)


@pytest.mark.parametrize("parts", [1, 2])
def test_accelerate_resumed_inside_an_epoch_is_bitwise_equal(parts, tmp_path):
    whole = loop.Training(parts=parts).run()
    loop.reset_state()
    half = loop.Training(parts=parts)
    half.run(8)  # three batches into the second epoch
    half.accelerator.save_state(tmp_path / "half")
    loop.reset_state()
    resumed = loop.Training(parts=parts)
    resumed.accelerator.load_state(tmp_path / "half")
    resumed.done = 8
    assert torch.equal(resumed.run(), whole)
    assert resumed.optimizer.param_groups[0]["steps_taken"] == STEPS


@pytest.mark.parametrize("parts", [1, 2])
def test_weights_are_averaged_after_each_step(parts, tmp_path):
    half = loop.Training(parts=parts)
    half.run(8)
    half.accelerator.save_state(tmp_path / "half")
    loop.reset_state()
    resumed = loop.Training(parts=parts)
    resumed.accelerator.load_state(tmp_path / "half")
    resumed.done = 8
    expected = averages()
    for training, steps in ((half, 8), (resumed, 8), (resumed, STEPS)):
        training.run(steps)
        with training.average.applied():
            assert_close(flat(training.model), expected[steps])
    assert resumed.average.count == STEPS


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_float16_on_a_gpu():
    accelerator = loop.accelerate.Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
    model = net(torch.float32)
    optimizer = optimizer_for(model)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(2, dtype=torch.float32))
    for _ in range(4):
        for x, y in batches:
            with accelerator.accumulate(model):
                loop.step(accelerator, optimizer, lambda x, y: loss_of(model, x, y), x, y, max_grad_norm=CLIP)
    expected, _ = plain(clip=CLIP, dtype=torch.float32, scheduled=False)
    torch.testing.assert_close(flat(model).cpu(), expected, rtol=0.1, atol=0.1)


def test_other_optimizers_are_refused():
    accelerator, model = loop.accelerate.Accelerator(cpu=True), net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="got SGD"):
        loop.step(accelerator, optimizer, lambda: None)


def test_prepared_base_is_refused():
    """It lacks the hooks in which gradients are clipped."""
    accelerator, model = loop.accelerate.Accelerator(cpu=True), net()
    model, base = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"accelerator\.prepare\(SAM\(base, \.\.\.\)\)"):
        loop.step(accelerator, tiltsam.SAM(base, model=model), lambda: None)


def test_wrong_arguments_are_refused():
    training = loop.Training()
    x, y = torch.zeros(BATCH, 6, dtype=torch.float64), torch.zeros(BATCH, dtype=torch.long)
    with pytest.raises(TypeError, match=r"loss_fn.*got Tensor"):
        loop.step(training.accelerator, training.optimizer, training.loss(x, y))
    with pytest.raises(TypeError, match=r"loss_fn.*got tuple"):
        loop.step(training.accelerator, training.optimizer, lambda *batch: (training.loss(*batch), x), x, y)
    with pytest.raises(ValueError, match="got -1"):
        loop.step(training.accelerator, training.optimizer, training.loss, x, y, max_grad_norm=-1)


@pytest.mark.parametrize(("kind", "says"), [("DEEPSPEED", "DDP or FSDP2"), ("FSDP", "fsdp_version=2")])
def test_unsupported_distributions_are_refused(kind, says, monkeypatch):
    training = loop.Training()
    monkeypatch.setattr(type(training.accelerator), "distributed_type", loop.accelerate.DistributedType[kind])
    monkeypatch.setattr(type(training.accelerator), "is_fsdp2", False)
    with pytest.raises(ValueError, match=says):
        loop.step(training.accelerator, training.optimizer, training.loss, torch.zeros(BATCH, 6), torch.zeros(BATCH))


def test_example_learns_digits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert accuracy(example("accelerate_digits.py")["net"]) > 0.9
