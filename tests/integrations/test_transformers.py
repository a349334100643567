"""The Trainer of transformers equals the loop written by hand, and keeps its features."""

import functools

import pytest
import torch
from torch import nn

import tiltsam
from helpers.lazy import Lazy
from helpers.trainers import (
    BATCH,
    CLIP,
    STEPS,
    Rows,
    accuracy,
    assert_close,
    averages,
    example,
    flat,
    halving,
    loss_of,
    net,
    optimizer_for,
    plain,
)

transformers = Lazy("transformers")
hf = Lazy("helpers.transformers_trainer")


@pytest.fixture(autouse=True)
def _fresh_state():
    """Reset the state that accelerators of a process share."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    hf.reset_state()
    yield
    hf.reset_state()


@pytest.mark.parametrize("method", ["sam", "esam2", "pgn", "tsam"])
def test_trainer_equals_loop(method, tmp_path):
    t = hf.trainer(tmp_path, method=method, max_grad_norm=CLIP)
    t.train()
    expected, firsts = plain(method, clip=CLIP)
    assert_close(flat(t.model), expected)
    assert t.model.calls == STEPS * t.sharpness_aware.info.num_forwards
    logged = [row["loss"] for row in t.state.log_history if "loss" in row]
    assert logged == pytest.approx(firsts, rel=1e-6)


@pytest.mark.parametrize("parts", [2, 3])
def test_trainer_accumulation_equals_the_full_batch(parts, tmp_path):
    t = hf.trainer(tmp_path, parts=parts, max_grad_norm=CLIP)
    t.train()
    expected, firsts = plain(clip=CLIP)
    assert_close(flat(t.model), expected)
    assert [row["loss"] for row in t.state.log_history if "loss" in row] == pytest.approx(firsts, rel=1e-6)


def test_callbacks_and_norms_see_the_aggregate_once_a_step(tmp_path):
    class Count(transformers.TrainerCallback):
        seen = ()

        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
            Count.seen = (*Count.seen, gradient.norm().item())

    t = hf.trainer(tmp_path, parts=2, callbacks=[Count()], max_grad_norm=CLIP)
    t.train()
    norms = [row["grad_norm"] for row in t.state.log_history if "grad_norm" in row]
    assert len(Count.seen) == len(norms) == STEPS
    assert max(norms) > CLIP
    assert max(Count.seen) == pytest.approx(CLIP, rel=1e-4)


def test_method_wraps_the_optimizer_of_the_trainer(tmp_path):
    """AdamW with the Trainer's schedule and decay groups equals the same by hand."""
    options = {"learning_rate": 0.02, "warmup_steps": 4, "weight_decay": 0.1, "lr_scheduler_type": "cosine"}
    t = hf.trainer(tmp_path, wrap=functools.partial(tiltsam.SAM, rho=0.05), optim="adamw_torch", **options)
    t.train()
    model, data = hf.Classifier(), Rows()
    decayed = [p for name, p in model.named_parameters() if name.endswith("weight")]
    others = [p for name, p in model.named_parameters() if not name.endswith("weight")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    base = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.999), eps=1e-8)
    optimizer = tiltsam.SAM(base, rho=0.05, model=model)
    scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, 4, STEPS)
    for step in range(STEPS):
        rows = slice(step % 5 * BATCH, (step % 5 + 1) * BATCH)

        def closure(rows=rows):
            loss = loss_of(model.net, data.x[rows], data.y[rows])
            loss.backward()
            return loss

        optimizer.step(closure)
        scheduler.step()
    assert_close(flat(t.model), flat(model))


@pytest.mark.parametrize("wrap", [None, functools.partial(tiltsam.MomentumSAM, rho=0.3)], ids=["optimizers", "method"])
@pytest.mark.parametrize("parts", [1, 2])
def test_trainer_resumed_inside_an_epoch_is_bitwise_equal(parts, wrap, tmp_path):
    """Also with a method whose sampler keeps a vector between steps."""
    # Saved three batches into the second epoch.
    whole = hf.trainer(tmp_path, parts=parts, wrap=wrap, save_strategy="steps", save_steps=8)
    whole.train()
    resumed = hf.trainer(tmp_path, parts=parts, wrap=wrap)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert resumed.model.calls < whole.model.calls
    assert torch.equal(flat(resumed.model), flat(whole.model))
    assert resumed.sharpness_aware.param_groups[0]["steps_taken"] == STEPS
    assert resumed.state.global_step == STEPS


@pytest.mark.parametrize("parts", [1, 2])
def test_weights_are_averaged_after_each_step(parts, tmp_path):
    """As in docs/trainers.md: updated and saved by a callback, evaluated by the Trainer, resumed at step 8."""

    class Averaging(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, model, **kwargs):
            self.average = tiltsam.WeightAverage(model)
            if state.global_step:
                self.average.load_state_dict(torch.load(self.file(args, state)))

        def on_step_end(self, args, state, control, **kwargs):
            self.average.update()

        def on_save(self, args, state, control, **kwargs):
            if args.should_save:
                torch.save(self.average.state_dict(), self.file(args, state))

        def file(self, args, state):
            return f"{args.output_dir}/checkpoint-{state.global_step}/average.pt"

    class Averaged(hf.InOrder):
        def evaluate(self, *args, **kwargs):
            with averaging.average.applied():
                self.tested = [*getattr(self, "tested", []), flat(self.model)]
                return super().evaluate(*args, **kwargs)

    expected = averages()
    often = {"save_strategy": "steps", "save_steps": 8, "eval_strategy": "steps", "eval_steps": 4}
    for path, steps in ((None, range(4, 21, 4)), (str(tmp_path / "checkpoint-8"), range(12, 21, 4))):
        averaging = Averaging()
        t = hf.trainer(tmp_path, parts=parts, cls=Averaged, callbacks=[averaging], **often)
        t.train(resume_from_checkpoint=path)
        assert_close(flat(t.model), plain()[0])
        for found, step in zip(t.tested, steps, strict=True):
            assert_close(found, expected[step])
        losses = [row["eval_loss"] for row in t.state.log_history if "eval_loss" in row]
        model, data = hf.Classifier(), Rows()
        nn.utils.vector_to_parameters(expected[-1], model.parameters())
        assert losses[-1] == pytest.approx(loss_of(model.net, data.x, data.y).item(), rel=1e-6)
        hf.reset_state()


def test_label_smoothing(tmp_path):
    t = hf.trainer(tmp_path, label_smoothing_factor=0.1, parts=2, method="sam")
    t.train()
    twin, data = net(), Rows()
    optimizer = optimizer_for(twin, "sam")
    scheduler = halving(optimizer)
    for step in range(STEPS):
        rows = slice(step % 5 * BATCH, (step % 5 + 1) * BATCH)

        def closure(rows=rows):
            loss = nn.functional.cross_entropy(twin(data.x[rows]), data.y[rows], label_smoothing=0.1)
            loss.backward()
            return loss

        optimizer.step(closure)
        scheduler.step()
    torch.testing.assert_close(flat(t.model), flat(twin), rtol=1e-6, atol=1e-7)  # the Trainer smooths in float32


def test_bfloat16(tmp_path):
    t = hf.trainer(tmp_path, bf16=True, dtype=torch.float32)
    t.train()
    expected, _ = plain(autocast=True, dtype=torch.float32)
    torch.testing.assert_close(flat(t.model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["sam", "pgn", "tsam-hmc"])
def test_float16_logic_on_a_cpu(method, tmp_path):
    """The Trainer unscales, clips and steps with a scaler."""
    t = hf.trainer(tmp_path, method=method, parts=2, max_grad_norm=CLIP)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=6)
    t.accelerator.scaler, t.accelerator.native_amp, t.accelerator.state._mixed_precision = scaler, True, "fp16"
    t.accelerator.prepare_model = lambda model, **_: model  # autocast would turn float64 into float16
    t.train()
    torch.testing.assert_close(flat(t.model), plain(method, clip=CLIP)[0], rtol=1e-7, atol=1e-8)
    assert scaler.get_scale() == 1024.0 * 2**3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_float16_on_a_gpu(tmp_path):
    t = hf.trainer(tmp_path, use_cpu=False, fp16=True, parts=2, max_grad_norm=CLIP, dtype=torch.float32)
    t.train()
    expected, _ = plain(clip=CLIP, dtype=torch.float32)
    torch.testing.assert_close(flat(t.model).cpu(), expected, rtol=0.1, atol=0.1)


def test_epoch_stopped_inside_a_window_drops_its_batches(tmp_path):
    class Stop(transformers.TrainerCallback):
        stopped = False

        def on_substep_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step == 2 and not self.stopped
            self.stopped = self.stopped or control.should_epoch_stop

    t = hf.trainer(tmp_path, parts=2, callbacks=[Stop()], max_steps=-1, num_train_epochs=2)
    t.train()
    assert t.state.global_step == 2 + 5
    assert t.model.calls == (2 + 5) * 2 * t.sharpness_aware.info.num_forwards


def test_train_twice(tmp_path):
    t = hf.trainer(tmp_path, max_steps=3)
    t.train()
    before = flat(t.model)
    t.train()
    assert t.sharpness_aware.param_groups[0]["steps_taken"] == 6
    assert not torch.equal(flat(t.model), before)


def test_trainer_without_a_method_is_refused(tmp_path):
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match=r"method=tiltsam\.TSAM"):
        hf.SharpnessAwareTrainer(hf.Classifier(), arguments)
    hf.SharpnessAwareTrainer(hf.Classifier(), arguments, method=tiltsam.TSAM)


def test_two_methods_are_refused(tmp_path):
    model = hf.Classifier()
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match="not both"):
        hf.InOrder(model, arguments, optimizers=(optimizer_for(model.net), None), method=tiltsam.SAM)


def test_method_instance_is_refused(tmp_path):
    """The error comes before training begins."""
    model = hf.Classifier()
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(TypeError, match=r"got SAM.*optimizers=\(SAM\(\.\.\.\), None\)"):
        hf.SharpnessAwareTrainer(model, arguments, method=optimizer_for(model.net, "sam"))
    with pytest.raises(TypeError, match="got 'tsam'"):
        hf.SharpnessAwareTrainer(model, arguments, method="tsam")


# Without a GPU torch warns that there is no memory to pin.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
def test_example_learns_digits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert accuracy(example("trainer_digits.py")["trainer"].model.net) > 0.9
