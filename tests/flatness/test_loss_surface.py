"""LossSurface, and what every measurement promises: a restored model, numbers by seed, errors."""

from __future__ import annotations

import copy
import dis
import gc
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

from helpers.interrupting import CONTEXTS, interrupted_everywhere
from helpers.lazy import Lazy
from helpers.measuring import MEASUREMENTS, Bowl, call, convnet, cross_entropy, images, mse, unequal_batches
from tiltsam import curvature, sharpness
from tiltsam.flatness import loss_surface
from tiltsam.flatness.loss_surface import LossSurface, supervised, trainable

dtensor = Lazy("torch.distributed.tensor")

FORWARD = ("neighborhood", "slice_1d", "slice_2d", "between")  # what takes no gradients
every = pytest.mark.parametrize("measure", MEASUREMENTS.values(), ids=MEASUREMENTS)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that a measurement must not change, copied."""
    return copy.deepcopy(
        {
            "state": model.state_dict(),
            "grads": [p.grad for p in model.parameters()],
            "requires": [p.requires_grad for p in model.parameters()],
            "modes": [m.training for m in model.modules()],
            "rng": torch.get_rng_state(),
        }
    )


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name, tensor in before["state"].items():
        assert torch.equal(tensor, after["state"][name]), name
    for old, new in zip(before["grads"], after["grads"], strict=True):
        assert (old is None and new is None) or torch.equal(old, new)
    assert before["requires"] == after["requires"]
    assert before["modes"] == after["modes"]
    assert torch.equal(before["rng"], after["rng"])


def unusual_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Training mode but for one module, gradients on some parameters, one of them frozen."""
    model = convnet(dtype)
    model.train()
    model[1].eval()
    model[0].weight.requires_grad_(False)
    model[5].weight.grad = torch.full_like(model[5].weight, 0.25)
    return model


@every
@pytest.mark.filterwarnings("ignore:low-precision weights")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_model_is_restored(measure: Any, dtype: torch.dtype) -> None:
    model = unusual_model(dtype)
    pointers = [t.data_ptr() for t in model.state_dict().values()]
    before = snapshot(model)
    result = measure(model, cross_entropy, unequal_batches(dtype))
    assert_same(before, snapshot(model))
    assert pointers == [t.data_ptr() for t in model.state_dict().values()]
    assert not result.requires_grad
    assert result.isfinite().all()


@every
@pytest.mark.parametrize("fatal_call", [1, 2, 3, 4, 5])
def test_model_is_restored_when_the_loss_raises(measure: Any, fatal_call: int) -> None:
    model = unusual_model()
    before = snapshot(model)
    calls = 0

    def failing(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        # a rude loss: it changes mode and buffers on the way
        model.train()
        loss = cross_entropy(model, batch)
        if calls == fatal_call:
            raise KeyError("the loss failed")
        return loss

    with pytest.raises(KeyError, match="the loss failed"):
        measure(model, failing, unequal_batches())
    assert_same(before, snapshot(model))


def test_expanded_buffer_is_restored() -> None:
    model = unusual_model()
    model.register_buffer("mask", torch.ones(1, 1).expand(32, 1))
    before = snapshot(model)
    with LossSurface(model, cross_entropy, unequal_batches()) as surface:
        surface.mean_loss()
    assert_same(before, snapshot(model))


@every
def test_embedding_with_max_norm_is_restored(measure: Any) -> None:
    """It rescales its rows in place in every forward pass."""
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=0.5), nn.Linear(4, 3)).double()
    before = snapshot(model)
    measure(model, cross_entropy, [(torch.arange(6), torch.arange(6) % 3)])
    assert_same(before, snapshot(model))


@every
def test_grads_are_restored_after_a_loss_that_calls_backward(measure: Any) -> None:
    def backward_inside(model: nn.Module, batch: Any) -> Tensor:
        loss = cross_entropy(model, batch)
        loss.backward(retain_graph=True)
        return loss

    model = unusual_model()
    own = model[5].weight.grad
    before = snapshot(model)
    measure(model, backward_inside, unequal_batches()[:1])
    assert_same(before, snapshot(model))
    assert model[5].weight.grad is own


class Merging(nn.Module):
    """Folds its second layer into the first one for evaluation, as some low-rank adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
        self.merged = False

    def train(self, mode: bool = True) -> Merging:
        if mode == self.merged:
            with torch.no_grad():
                for p, q in zip(self.first.parameters(), self.second.parameters(), strict=True):
                    p.add_(q, alpha=-1 if mode else 1)
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) if self.merged else self.first(x) + self.second(x)


@every
def test_merging_adapter_is_restored(measure: Any) -> None:
    model = nn.Sequential(Merging(), nn.Tanh(), nn.Linear(3, 4).double(), Merging())
    model[3].eval()  # inside a model in training mode
    modes, merged = [m.training for m in model.modules()], [getattr(m, "merged", None) for m in model]
    before = copy.deepcopy(model.state_dict())
    measure(model, cross_entropy, [(torch.randn(6, 4).double(), torch.arange(6) % 3)])
    assert modes == [m.training for m in model.modules()]
    assert merged == [getattr(m, "merged", None) for m in model]
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=1e-12)


@pytest.mark.parametrize("when", ["before", "after"])
def test_restore_completes_despite_keyboard_interrupt(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = convnet()
    before, restore, calls = snapshot(model), LossSurface.restore, []

    def interrupted(self: LossSurface) -> None:
        calls.append(self)
        if when == "after":
            restore(self)
        if len(calls) == 1:
            raise KeyboardInterrupt
        restore(self)

    monkeypatch.setattr(LossSurface, "restore", interrupted)
    with pytest.raises(KeyboardInterrupt):
        MEASUREMENTS["between"](model, cross_entropy, unequal_batches())
    assert_same(before, snapshot(model))


def test_modes_and_random_state_are_restored_if_weights_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> None:
        raise MemoryError("no room")

    model = unusual_model()
    before = snapshot(model)
    surface = LossSurface(model, cross_entropy, unequal_batches())
    monkeypatch.setattr(surface, "restore", failing)
    surface.__enter__()
    surface.mean_loss()
    model[1].running_mean.add_(1.0)
    with pytest.raises(MemoryError):
        surface.__exit__(None, None, None)
    assert_same(before, snapshot(model))


@every
def test_no_graph_is_kept(measure: Any) -> None:
    model = convnet()
    result = measure(model, cross_entropy, unequal_batches()[:1])
    gc.collect()
    alive = [x for x in gc.get_objects() if type(x) is Tensor and x.grad_fn is not None]
    assert not alive
    del result


@every
def test_eval_mode_is_used(measure: Any) -> None:
    model = convnet()
    numbers = []
    for mode in (True, False):
        model.train(mode)
        numbers.append(measure(model, cross_entropy, unequal_batches()))
    assert torch.equal(*numbers)


@every
def test_seed_determines_numbers_with_shuffling_loader(measure: Any) -> None:
    model = convnet()
    loader = DataLoader(TensorDataset(*images()), batch_size=5, shuffle=True)
    numbers = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        numbers.append(measure(model, cross_entropy, loader))
    assert torch.equal(*numbers)


@every
@pytest.mark.parametrize(
    "odd_defaults",
    [
        ("meta", torch.float64),
        pytest.param(("cuda", torch.float64), marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
    ],
    ids=["meta", "cuda"],
    indirect=True,
)
def test_torch_defaults_are_ignored(measure: Any, odd_defaults: tuple[str, torch.dtype]) -> None:
    """Results are on the host, whatever the default device."""
    model, data = convnet(torch.float32), unequal_batches(torch.float32)
    plain = measure(model, cross_entropy, data)
    torch.set_default_device(odd_defaults[0])
    torch.set_default_dtype(odd_defaults[1])
    odd = measure(model, cross_entropy, data)
    assert odd.device.type == "cpu"
    assert torch.equal(plain, odd.to(plain.dtype))


@every
def test_loader_generator_is_pinned_and_restored(measure: Any) -> None:
    model, own = convnet(), torch.Generator()
    loader = DataLoader(TensorDataset(*images()), batch_size=5, shuffle=True, drop_last=True, generator=own)
    numbers = []
    for seed in (1, 2):
        state = own.manual_seed(seed).get_state()
        numbers.append(measure(model, cross_entropy, loader))
        assert torch.equal(own.get_state(), state)
    assert torch.equal(*numbers)


class Shaken(TensorDataset):
    """Augmentation by the global generators of numpy and of the standard library."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        return x + np.random.rand() + random.random(), y


def test_numpy_and_random_are_pinned_and_restored() -> None:
    model, own = convnet(), torch.Generator()
    loader = DataLoader(Shaken(*images()), batch_size=5, shuffle=True, drop_last=True, generator=own)
    before = np.random.get_state(), random.getstate()
    with LossSurface(model, cross_entropy, loader) as surface:
        assert len({surface.mean_loss() for _ in range(3)}) == 1
    after = np.random.get_state(), random.getstate()
    assert np.array_equal(before[0][1], after[0][1])
    assert before[0][2:] == after[0][2:]
    assert before[1] == after[1]


def under_autocast(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return cross_entropy(model, batch)


@every
def test_outer_autocast_applies_to_the_loss_only(measure: Any) -> None:
    """Its cached low-precision copies of the weights must not be used after the weights change."""
    model, (x, _), data = convnet(torch.float32).eval(), images(dtype=torch.float32), unequal_batches(torch.float32)
    expected = measure(model, under_autocast, data)
    with torch.autocast("cpu", torch.bfloat16):
        before = model(x)
        found = measure(model, cross_entropy, data)
        assert torch.is_autocast_enabled("cpu")
        assert torch.equal(model(x), before)
    assert torch.equal(found, expected)


def penalized(model: nn.Module, batch: Any) -> Tensor:
    """A loss that differentiates inside and draws a random number."""
    x = batch[0].clone().requires_grad_()
    loss = cross_entropy(model, (x, batch[1]))
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().sum() * torch.rand(())


@every
def test_loss_may_differentiate_inside(measure: Any) -> None:
    model = convnet()
    expected = measure(model, torch.enable_grad()(penalized), unequal_batches())
    found = measure(model, penalized, unequal_batches())
    assert torch.equal(found, expected)
    assert not found.requires_grad


@every
def test_model_may_use_the_graph(measure: Any) -> None:
    """Its activations keep their gradient, or have a hook."""
    expected = measure(convnet(), cross_entropy, unequal_batches())
    model = convnet()
    model[0].register_forward_hook(lambda module, inputs, output: output.retain_grad())
    model[2].register_forward_hook(lambda module, inputs, output: output.register_hook(lambda g: None) and None)
    assert torch.equal(measure(model, cross_entropy, unequal_batches()), expected)


@every
def test_error_of_the_loss_is_raised_at_once(measure: Any) -> None:
    """Only a pass that needs a graph is tried again."""
    calls = []

    def fails_once(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("of the loss")
        return cross_entropy(model, batch)

    with pytest.raises(RuntimeError, match="of the loss"):
        measure(convnet(), fails_once, unequal_batches())


@every
def test_works_inside_no_grad_and_inference_mode(measure: Any) -> None:
    model = convnet()
    expected = measure(model, cross_entropy, unequal_batches())
    with torch.no_grad():
        assert torch.equal(measure(model, cross_entropy, unequal_batches()), expected)
        assert not torch.is_grad_enabled()
    batches = unequal_batches()  # made outside: an inference tensor cannot take part in a backward pass
    with torch.inference_mode():
        assert torch.equal(measure(model, cross_entropy, batches), expected)
        assert torch.is_inference_mode_enabled()


@every
def test_frozen_parameters_are_ignored(measure: Any) -> None:
    """A frozen parameter gives the same numbers as a buffer of that name."""
    frozen = convnet()
    frozen[0].weight.requires_grad_(False)
    fixed = convnet()
    weight = fixed[0].weight.detach().clone()
    del fixed[0].weight
    fixed[0].register_buffer("weight", weight)
    expected = measure(fixed, cross_entropy, unequal_batches())
    torch.testing.assert_close(measure(frozen, cross_entropy, unequal_batches()), expected)


@every
@pytest.mark.parametrize(
    ("batches", "message"),
    [([], "batches"), ([(torch.ones(0, 2), torch.ones(0, 1))], "got 0 for batch 0")],
    ids=["no batch", "empty batch"],
)
def test_bad_batches_raise(measure: Any, batches: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(nn.Linear(2, 1), mse, batches)


def test_tensor_batch_raises_in_supervised() -> None:
    x = torch.ones(2, 1)
    with pytest.raises(ValueError, match=r"got a Tensor.*\[\(inputs, targets\)\]"):
        sharpness.neighborhood(nn.Linear(1, 1), mse, (x, x), std=0.1)


@pytest.mark.parametrize("measure", [MEASUREMENTS["neighborhood"], MEASUREMENTS["trace"]])
def test_exhausted_iterator_raises(measure: Any) -> None:
    stream, iterator = iter(unequal_batches()), iter(unequal_batches())
    for batches in (iterator, lambda: stream):
        with pytest.raises(ValueError, match="exhausted"):
            measure(convnet(), cross_entropy, batches)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_supervised_rejects_reduction(reduction: str) -> None:
    with pytest.raises(ValueError, match=f"got '{reduction}'"):
        supervised(nn.MSELoss(reduction=reduction))


@pytest.mark.parametrize("name", [name for name in MEASUREMENTS if name not in FORWARD])
def test_detached_loss_raises(name: str) -> None:
    model = convnet()
    before = snapshot(model)
    with pytest.raises(ValueError, match="require grad"):
        MEASUREMENTS[name](model, lambda m, b: cross_entropy(m, b).detach(), unequal_batches())
    assert_same(before, snapshot(model))


@every
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_loss_raises(measure: Any, bad: float) -> None:
    model = convnet()
    before = snapshot(model)
    good, second = unequal_batches()
    second = (second[0] * bad, second[1])
    with pytest.raises(ValueError, match=r"not finite.* on batch 1"):
        measure(model, cross_entropy, [good, second])
    assert_same(before, snapshot(model))


@every
def test_model_without_trainable_parameters_raises(measure: Any) -> None:
    for model in (nn.Flatten(), nn.Linear(1, 1).requires_grad_(False)):
        with pytest.raises(ValueError, match="trainable"):
            measure(model, mse, [(torch.ones(2, 1), torch.ones(2, 1))])


@every
def test_complex_parameter_raises(measure: Any) -> None:
    model = nn.Linear(1, 1, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"complex64 for weight"):
        measure(model, lambda m, b: m(b[0].cfloat()).abs().mean(), [(torch.ones(2, 1), torch.ones(2, 1))])


@every
def test_shared_storage_raises(measure: Any) -> None:
    """Each of them would undo the other's move, and have half of the gradient."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    model[2].weight.data = model[0].weight.data
    with pytest.raises(ValueError, match="share memory"):
        measure(model, mse, [(torch.ones(2, 2), torch.ones(2, 2))])


def test_sharded_parameter_raises(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = nn.Linear(1, 1)
        model.weight = nn.Parameter(
            dtensor.distribute_tensor(model.weight.detach(), init_device_mesh("cpu", (1,)), [dtensor.Shard(0)])
        )
        for measure in MEASUREMENTS.values():
            with pytest.raises(ValueError, match="parameter weight is sharded"):
                measure(model, mse, [(torch.ones(2, 1), torch.ones(2, 1))])
    finally:
        dist.destroy_process_group()


@every
def test_loss_per_example_raises(measure: Any) -> None:
    with pytest.raises(ValueError, match=r"got \(2, 1\)"):
        measure(nn.Linear(2, 1), lambda model, batch: model(batch[0]), [(torch.ones(2, 2), torch.ones(2, 1))])


@every
@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), nn.functional.cross_entropy])
def test_criterion_as_loss_fn_raises(measure: Any, criterion: Any) -> None:
    with pytest.raises(TypeError, match="supervised"):
        measure(convnet(), criterion, unequal_batches())


@every
def test_dict_batches_from_a_function(measure: Any) -> None:
    model = convnet()
    expected = measure(model, cross_entropy, unequal_batches())
    dicts = [{"y": y, "x": [x]} for x, y in unequal_batches()]
    found = measure(model, lambda m, b: nn.functional.cross_entropy(m(b["x"][0]), b["y"]), lambda: iter(dicts))
    torch.testing.assert_close(found, expected)


def test_mean_loss_weights_batches_by_size() -> None:
    model = convnet().eval()
    with LossSurface(model, cross_entropy, unequal_batches()) as surface:
        found = surface.mean_loss()
    with torch.no_grad():
        expected = cross_entropy(model, images())
    assert found == pytest.approx(float(expected), rel=1e-12)
    with LossSurface(model, cross_entropy, unequal_batches(), size_of=lambda _: 1.0) as surface:
        assert surface.mean_loss() != pytest.approx(found, rel=1e-6)


def test_parameters_are_chosen_by_name() -> None:
    model = nn.Linear(2, 1)
    assert LossSurface(model, mse, [], parameters=["bias", "weight", "bias"]).names == ["weight", "bias"]
    assert LossSurface(model, mse, [], parameters="weight").names == ["weight"]
    for bad in ("weights", ["weight", "weights"], []):
        with pytest.raises(ValueError, match=r"parameters must"):
            LossSurface(model, mse, [], parameters=bad)


def test_tied_parameter_is_trainable_once() -> None:
    tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    tied[1].weight = tied[0].weight
    assert list(trainable(tied)) == ["0.weight"]


def test_model_of_other_type_raises() -> None:
    with pytest.raises(TypeError, match="function"):
        LossSurface(cross_entropy, convnet(), unequal_batches())  # type: ignore[arg-type]


def test_runtime_error_of_loss_propagates() -> None:
    """It is raised at once: only an error of autograd is retried with a graph."""
    calls = []

    def failing(model: nn.Module, batch: Any) -> Tensor:
        calls.append(torch.is_grad_enabled())
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    model = convnet()
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="mat1"):
        sharpness.neighborhood(model, failing, unequal_batches(), std=0.1)
    assert calls == [False]
    assert_same(before, snapshot(model))


def test_forward_only_loss_builds_no_graph() -> None:
    modes = []

    def noting(model: nn.Module, batch: Any) -> Tensor:
        modes.append(torch.is_grad_enabled())
        return cross_entropy(model, batch)

    with LossSurface(convnet(), noting, unequal_batches()) as surface:
        surface.mean_loss()
    assert modes == [False, False]


def test_move_to_and_move_by() -> None:
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    with LossSurface(model, mse, []) as surface:
        surface.move_by([torch.ones(1, 2)])
        surface.move_by([torch.ones(1, 2)])
        assert torch.equal(model.weight, before + 1 + 1)
        surface.move_to([torch.full((1, 2), 3.0)])
        assert torch.equal(model.weight, before + 3)
    assert torch.equal(model.weight, before)


def test_progress_reaches_total() -> None:
    bowl = Bowl([1.0, 2.0], [1.0, 1.0])
    for run in (
        lambda tell: sharpness.neighborhood(bowl, call, [torch.ones(1)], [0.1, 0.2], 3, progress=tell),
        lambda tell: curvature.trace(bowl, call, [torch.ones(1)], 4, progress=tell),
        lambda tell: curvature.spectral_density(bowl, call, [torch.ones(1)], 2, 2, progress=tell),
        lambda tell: sharpness.cross_objectives({"a": bowl}, call, [torch.ones(1)], progress=tell),
    ):
        told: list[tuple[int, int]] = []
        run(lambda done, total, told=told: told.append((done, total)))
        assert told[-1][0] == told[-1][1]
        assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_supervised_calls_model_and_criterion() -> None:
    line = nn.Linear(1, 1)
    x, y = torch.ones(2, 1), torch.zeros(2, 1)
    assert torch.equal(supervised(nn.functional.mse_loss)(line, (x, y)), nn.functional.mse_loss(line(x), y))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@every
@pytest.mark.filterwarnings("ignore:low-precision weights")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_measurements_on_a_gpu(measure: Any, dtype: torch.dtype) -> None:
    """Batches on the host are moved, and the GPU's random state is restored."""
    model = unusual_model(dtype).cuda()
    before, state = snapshot(model), torch.cuda.get_rng_state()
    first, again = (measure(model, cross_entropy, unequal_batches(dtype)) for _ in range(2))
    torch.testing.assert_close(first, again, rtol=1e-3, atol=1e-5)  # atomic adds come in any order
    assert_same(before, snapshot(model))
    assert torch.equal(state, torch.cuda.get_rng_state())


def test_surface_restores_model_when_interrupted_at_any_bytecode() -> None:
    model = unusual_model()
    before = snapshot(model)

    def use() -> None:
        with LossSurface(model, cross_entropy, unequal_batches()[:1]) as surface:
            surface.save_all()
            torch.rand(())
            for tensor in model.state_dict().values():
                tensor.add_(1)

    enter, exit_ = LossSurface.__enter__.__code__, LossSurface.__exit__.__code__
    for place in interrupted_everywhere(use, (loss_surface.__file__, *CONTEXTS)):
        code, position = place or (None, 0)
        returns = code is enter and dis.opname[code.co_code[position]] == "RETURN_VALUE"
        if returns or (code is exit_ and position <= 4):  # outside their try blocks nothing can be done
            model = unusual_model()
        assert torch.is_grad_enabled(), place
        assert_same(before, snapshot(model))
