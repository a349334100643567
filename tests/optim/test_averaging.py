"""WeightAverage: its weights, that training is not affected, and the lab's use of it."""

import gc
import math
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import tiltsam
from helpers.interrupting import CONTEXTS, interrupted_everywhere
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.data import load
from tiltsam.lab.data.loader import TrainingBatches
from tiltsam.lab.evaluate import evaluate, reestimate_batchnorm
from tiltsam.lab.models import load_model
from tiltsam.lab.records import Record
from tiltsam.lab.train import train
from tiltsam.optim import averaging
from tiltsam.space import model_state


def walk(model, steps, seed=0):
    """Random weights after each of some steps."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
        yield [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("power", [0, 1, 8, 2.5])
def test_weight_of_an_update_is_its_number_to_the_power(power):
    model = nn.Linear(3, 2, dtype=torch.float64)
    average = tiltsam.WeightAverage(model, power=power)
    seen = []
    for weights in walk(model, 30):
        average.update()
        seen.append(weights)
    # i to the power, with rising factorials: i (i + 1) ... (i + p - 1)
    share = [math.exp(math.lgamma(i + power) - math.lgamma(i)) for i in range(1, 31)]
    with average.applied():
        for k, p in enumerate(model.parameters()):
            wanted = sum(w * s[k] for w, s in zip(share, seen, strict=True)) / sum(share)
            torch.testing.assert_close(p.detach(), wanted)


def test_power_8_averages_the_last_tenth():
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    average = tiltsam.WeightAverage(model)
    for step in range(1, 1001):
        nn.init.constant_(model.weight, step)
        average.update()
    with average.applied():
        assert model.weight.item() == pytest.approx(900, rel=1e-2)


def test_update_inside_a_closure_is_refused():
    model = nn.Linear(3, 1)
    average = tiltsam.WeightAverage(model)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = tiltsam.SAM(base)
    before = [p.detach().clone() for p in model.parameters()]

    def closure():
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        average.update()
        return loss

    with pytest.raises(RuntimeError, match="after step"):
        optimizer.step(closure)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    base.register_step_post_hook(lambda *_: average.update())
    optimizer.step(lambda: _backward(model))
    assert average.count == 1


def _backward(model):
    loss = model(torch.ones(2, 3)).square().sum()
    loss.backward()
    return loss


def test_state_of_something_else_is_refused():
    model = nn.Linear(3, 1)
    with pytest.raises(ValueError, match="weight"):
        tiltsam.WeightAverage(model).load_state_dict(model.state_dict())


def test_update_inside_applied_is_refused():
    model = nn.Linear(3, 2)
    average = tiltsam.WeightAverage(model)
    for _ in walk(model, 2):
        average.update()
    with pytest.raises(RuntimeError, match=r"applied\(\)"), average.applied(), average.applied():
        average.update()
    assert average.count == 2
    average.update()
    assert average.count == 3


def test_model_must_be_a_module():
    with pytest.raises(TypeError, match=r"model .*generator"):
        tiltsam.WeightAverage(nn.Linear(3, 2).parameters())


def test_model_without_parameters_is_refused():
    with pytest.raises(ValueError, match="BatchNorm1d"):
        tiltsam.WeightAverage(nn.BatchNorm1d(3, affine=False))


def test_applied_restores_weights_and_buffers_after_an_error():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    average = tiltsam.WeightAverage(model)
    for _ in walk(model, 3):
        average.update()
    before = {name: x.clone() for name, x in model.state_dict().items()}

    def use():
        with average.applied() as averaged:
            assert averaged is model
            assert not torch.equal(model[0].weight, before["0.weight"])
            model(torch.randn(8, 3))
            assert not torch.equal(model[1].running_mean, before["1.running_mean"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        use()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("name", ["0.bias", "1.running_var"])
def test_interrupt_while_applied_restores_waits(name):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    average = tiltsam.WeightAverage(model)
    for _ in walk(model, 3):
        average.update()
    before = {key: x.clone() for key, x in model.state_dict().items()}
    place, pressed = model.state_dict()[name].data_ptr(), []

    class CtrlC(TorchFunctionMode):
        """Interrupts before anything is copied to that place."""

        def __torch_function__(self, func, types, args=(), kwargs=None):
            written = args[0] if func is torch._foreach_copy_ else args[:1]
            if "copy_" in func.__name__ and not pressed and any(x.data_ptr() == place for x in written):
                pressed.append(func)
                raise KeyboardInterrupt
            return func(*args, **(kwargs or {}))

    def use():
        with ExitStack() as stack, average.applied():
            model(torch.randn(8, 3))
            stack.enter_context(CtrlC())

    with pytest.raises(KeyboardInterrupt):
        use()
    assert pressed
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    average.update()


def test_applied_in_inference_mode_leaves_a_trainable_model():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    average = tiltsam.WeightAverage(model)
    for _ in walk(model, 2):
        average.update()
    with torch.inference_mode(), average.applied():
        torch.optim.swa_utils.update_bn([torch.randn(8, 3)], model)
    model(torch.randn(8, 3)).square().sum().backward()
    assert not any(x.is_inference() for x in (*model.parameters(), *model.buffers()))


def test_half_precision_weights_are_averaged_in_float32():
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    average = tiltsam.WeightAverage(model, power=0)
    for step in range(4000):
        nn.init.constant_(model.weight, 1.0 if step < 2000 else 3.0)
        average.update()
    with average.applied():
        assert model.weight.item() == 2.0
        assert model.weight.dtype is torch.bfloat16


def test_tied_weights_stay_tied():
    model = nn.ModuleDict({"one": nn.Linear(2, 2, bias=False), "two": nn.Linear(2, 2, bias=False)})
    model["two"].weight = model["one"].weight
    average = tiltsam.WeightAverage(model)
    for _ in walk(model, 3):
        average.update()
    with average.applied():
        assert torch.equal(model["one"].weight, model["two"].weight)


def test_state_dict_resumes():
    one, two = nn.Linear(3, 2), nn.Linear(3, 2)
    unbroken, broken = tiltsam.WeightAverage(one), tiltsam.WeightAverage(one)
    for k, _ in enumerate(walk(one, 6)):
        if k == 3:
            state = broken.state_dict()
            broken = tiltsam.WeightAverage(two)
            broken.load_state_dict(state)
        with torch.no_grad():
            for a, b in zip(two.parameters(), one.parameters(), strict=True):
                a.copy_(b)
        unbroken.update()
        broken.update()
    with unbroken.applied(), broken.applied():
        assert torch.equal(one.weight, two.weight)
    with pytest.raises(ValueError, match="shapes"):
        tiltsam.WeightAverage(nn.Linear(3, 3)).load_state_dict(broken.state_dict())


def test_state_dict_of_another_power_is_refused():
    model = nn.Linear(3, 2)
    state = tiltsam.WeightAverage(model, power=8).state_dict()
    average = tiltsam.WeightAverage(model, power=0)
    with pytest.raises(ValueError, match=r"power .*0\.0.*8\.0"):
        average.load_state_dict(state)
    assert average.count == 0


def assigned(model):
    model.load_state_dict({name: torch.zeros_like(x) for name, x in model.state_dict().items()}, assign=True)


def parametrized(model):
    nn.utils.parametrizations.weight_norm(model[0])


def grown(model):
    model.append(nn.Linear(2, 2))


@pytest.mark.parametrize("change", [assigned, parametrized, grown])
def test_applied_refuses_replaced_parameters(change):
    model = nn.Sequential(nn.Linear(2, 2))
    average = tiltsam.WeightAverage(model)
    change(model)
    average.update()
    with pytest.raises(RuntimeError, match="parameters have been replaced"), average.applied():
        pass


def test_applied_before_any_update():
    model = nn.Linear(1, 1)
    average = tiltsam.WeightAverage(model)
    nn.init.constant_(model.weight, 5.0)
    with average.applied():
        assert model.weight.item() == 5.0


def test_first_update_forgets_the_initial_weights():
    model = nn.utils.skip_init(nn.Linear, 1, 1)
    nn.init.constant_(model.weight, math.nan)
    average = tiltsam.WeightAverage(model)
    for value in (5.0, 5.0):
        nn.init.constant_(model.weight, value)
        average.update()
    with average.applied():
        assert model.weight.item() == 5.0


def test_power_must_be_named():
    with pytest.raises(TypeError, match="positional"):
        tiltsam.WeightAverage(nn.Linear(1, 1), 0.999)  # what an EMA calls decay


@pytest.mark.parametrize("power", [-1, math.inf, "8"])
def test_bad_power_is_refused(power):
    with pytest.raises(ValueError, match=f"power .*{power}"):
        tiltsam.WeightAverage(nn.Linear(1, 1), power=power)


# ---------------------------------------------------------------- in the lab

CONFIG = TrainConfig("digits", "sam", epochs=4, batch_size=128, average=True)


def test_lab_tests_and_saves_the_average(tmp_path):
    plain, averaged = Record(tmp_path / "plain"), Record(tmp_path / "averaged")
    train(replace(CONFIG, average=False), plain)
    result = train(CONFIG, averaged)
    rows = [record.metrics() for record in (plain, averaged)]
    assert [row["train_loss"] for row in rows[0]] == [row["train_loss"] for row in rows[1]]
    assert all(a["validation_loss"] != b["validation_loss"] for a, b in zip(*rows, strict=True))
    data = load(CONFIG)
    model, batches = load_model(averaged, data).eval(), TrainingBatches(data, CONFIG.batch_size)
    assert any(not torch.equal(a, b) for a, b in zip(plain.model().values(), averaged.model().values(), strict=True))
    found = evaluate(lambda part: model(*batches.inputs(part)), data, data.test)
    assert found["accuracy"] == pytest.approx(result["score"])


def test_lab_resumes_the_average(tmp_path):
    unbroken, broken = Record(tmp_path / "unbroken"), Record(tmp_path / "broken")
    train(CONFIG, unbroken)
    train(CONFIG, broken, until=0.5)
    train(CONFIG, broken)
    one, two = unbroken.model(), broken.model()
    assert all(torch.equal(one[name], two[name]) for name in one)


def with_batchnorm(folder):
    x = np.random.default_rng(0).integers(256, size=(64, 8, 8, 3), dtype=np.uint8)
    np.savez(folder / "a.npz", x=x, y=np.arange(64) % 2)
    return TrainConfig(
        f"npz:{folder / 'a.npz'}", "erm", "resnet18", epochs=2, batch_size=16, average=True, device="cpu"
    )


def test_lab_saves_the_tested_model_of_a_paused_run(tmp_path):
    config, record = with_batchnorm(tmp_path), Record(tmp_path / "run")
    row = train(config, record, until=0.5)
    data = load(config)
    model, batches = load_model(record, data).eval(), TrainingBatches(data, config.batch_size)
    found = evaluate(lambda part: model(*batches.inputs(part)), data, data.test)
    assert found["loss"] == pytest.approx(row["test_loss"], rel=1e-5)
    train(config, record)


def test_lab_batchnorm_statistics_are_those_of_the_average(tmp_path):
    config, record = with_batchnorm(tmp_path), Record(tmp_path / "run")
    train(config, record)
    data = load(config)
    model = load_model(record, data)
    kept = {name: b.clone() for name, b in model.named_buffers() if "running" in name}
    assert kept
    batches = TrainingBatches(data, config.batch_size)
    reestimate_batchnorm(model, lambda part: model(*batches.inputs(part)), data.train)
    for name, b in model.named_buffers():
        if name in kept:
            torch.testing.assert_close(b, kept[name])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_average_of_captured_steps():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).cuda()
    x, y = torch.randn(32, 8, device="cuda"), torch.randint(3, (32,), device="cuda")
    optimizer = tiltsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1))
    step = tiltsam.capture(optimizer, lambda x, y: nn.functional.cross_entropy(model(x), y))
    average, seen = tiltsam.WeightAverage(model, power=0), []
    for _ in range(12):
        step(x, y)
        average.update()
        seen.append(model[0].weight.detach().clone())
    assert step.reason is None
    with average.applied():
        torch.testing.assert_close(model[0].weight.detach(), torch.stack(seen).mean(0))
    assert torch.equal(model[0].weight, seen[-1])
    step(x, y)
    average.update()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # interrupted generators
def test_applied_can_be_interrupted_at_every_bytecode():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    average = tiltsam.WeightAverage(model)
    for _ in walk(model, 3):
        average.update()
    before = {k: v.clone() for k, v in model.state_dict().items()}

    def use():
        with average.applied():
            model(torch.randn(8, 3))

    for place in interrupted_everywhere(use, (averaging.__file__, model_state.__file__, *CONTEXTS)):
        if average._applied:  # the with statement was interrupted before it reached the generator
            gc.collect()
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()), place
        assert torch.is_grad_enabled(), place
        assert not average._applied, place
