"""What every measurement promises: the model as it was, the same seed the same numbers, clear errors."""

from __future__ import annotations

import copy
import gc
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from measuring import MEASUREMENTS, Bowl, call, convnet, cross_entropy, images, mse, unequal_batches
from tiltsam.flatness.evaluation import LossSurface, batch_size, generator, layers, supervised, trainable
from tiltsam.flatness.progress import Bars

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
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_leaves_no_trace(measure: Any, dtype: torch.dtype) -> None:
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
def test_leaves_no_trace_when_the_loss_raises(measure: Any, fatal_call: int) -> None:
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


@every
def test_keeps_no_graph(measure: Any) -> None:
    model = convnet()
    result = measure(model, cross_entropy, unequal_batches()[:1])
    gc.collect()
    alive = [x for x in gc.get_objects() if type(x) is Tensor and x.grad_fn is not None]
    assert not alive
    del result


@every
def test_runs_in_eval_mode_whatever_the_mode(measure: Any) -> None:
    model = convnet()
    numbers = []
    for mode in (True, False):
        model.train(mode)
        numbers.append(measure(model, cross_entropy, unequal_batches()))
    assert torch.equal(*numbers)


@every
def test_same_seed_same_numbers_whatever_the_global_state(measure: Any) -> None:
    """Also under a loader that shuffles: every walk over the data is the same walk."""
    model = convnet()
    loader = DataLoader(TensorDataset(*images()), batch_size=5, shuffle=True)
    numbers = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        numbers.append(measure(model, cross_entropy, loader))
    assert torch.equal(*numbers)


@every
def test_works_inside_no_grad_and_inference_mode(measure: Any) -> None:
    model = convnet()
    expected = measure(model, cross_entropy, unequal_batches())
    with torch.no_grad():
        assert torch.equal(measure(model, cross_entropy, unequal_batches()), expected)
        assert not torch.is_grad_enabled()
    batches = unequal_batches()  # made outside: a tensor made inside can never take part in a backward pass
    with torch.inference_mode():
        assert torch.equal(measure(model, cross_entropy, batches), expected)
        assert torch.is_inference_mode_enabled()


@every
def test_frozen_parameters_are_left_out(measure: Any) -> None:
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
    [([], "empty"), (iter([(torch.ones(2, 1), torch.ones(2, 1))]), "only once"), ([(torch.ones(0, 1),) * 2], "size 0")],
    ids=["no batch", "iterator", "empty batch"],
)
def test_bad_data_is_a_clear_error(measure: Any, batches: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(nn.Linear(1, 1), mse, batches)


@every
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_a_clear_error(measure: Any, bad: float) -> None:
    model = convnet()
    before = snapshot(model)
    good, second = unequal_batches()
    second = (second[0] * bad, second[1])
    with pytest.raises(ValueError, match=r"not finite.* on batch 1"):
        measure(model, cross_entropy, [good, second])
    assert_same(before, snapshot(model))


@every
def test_a_model_without_parameters_is_a_clear_error(measure: Any) -> None:
    for model in (nn.Flatten(), nn.Linear(1, 1).requires_grad_(False)):
        with pytest.raises(ValueError, match="no trainable parameters"):
            measure(model, mse, [(torch.ones(2, 1), torch.ones(2, 1))])


@every
def test_a_loss_per_example_is_a_clear_error(measure: Any) -> None:
    with pytest.raises(ValueError, match="scalar"):
        measure(nn.Linear(1, 1), lambda model, batch: model(batch[0]), [(torch.ones(2, 1), torch.ones(2, 1))])


@every
def test_dict_batches_and_functions_of_them(measure: Any) -> None:
    model = convnet()
    expected = measure(model, cross_entropy, unequal_batches())
    dicts = [{"y": y, "x": [x]} for x, y in unequal_batches()]
    found = measure(model, lambda m, b: nn.functional.cross_entropy(m(b["x"][0]), b["y"]), lambda: iter(dicts))
    torch.testing.assert_close(found, expected)


def test_loss_weighs_batches_by_size() -> None:
    model = convnet().eval()
    with LossSurface(model, cross_entropy, unequal_batches()) as surface:
        found = surface.loss()
    with torch.no_grad():
        expected = cross_entropy(model, images())
    assert found == pytest.approx(float(expected), rel=1e-12)
    with LossSurface(model, cross_entropy, unequal_batches(), size_of=lambda _: 1.0) as surface:
        assert surface.loss() != pytest.approx(found, rel=1e-6)


def test_names_layers_and_sizes() -> None:
    tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    tied[1].weight = tied[0].weight
    assert list(trainable(tied)) == ["0.weight"]
    assert list(layers(convnet())) == ["0", "1", "5"]
    assert batch_size({"a": 3, "b": [torch.ones(()), torch.ones(4, 1)]}) == 4
    with pytest.raises(ValueError, match="size_of"):
        batch_size("text")
    with pytest.raises(ValueError, match="no trainable parameter named nothing"):
        LossSurface(tied, mse, [], parameters=["nothing"])


def test_generators_do_not_share_streams() -> None:
    keys = [("a", 0, 1), ("a", 1, 0), ("a", 0, 0), ("b", 0, 0)]
    draws = torch.stack([torch.randn(64, generator=generator(torch.device("cpu"), *key)) for key in keys])
    assert torch.corrcoef(draws).fill_diagonal_(0).abs().max() < 0.5
    again = torch.randn(64, generator=generator(torch.device("cpu"), *keys[0]))
    assert torch.equal(again, draws[0])


def test_progress_counts_up_to_the_total() -> None:
    from tiltsam import curvature, sharpness

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


@pytest.mark.parametrize("terminal", [True, False])
def test_bars(terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with Bars() as bars:
        tell = bars("a model")
        tell(1, 4)
    out, err = capsys.readouterr()
    assert out == ""
    assert "25%" in err if terminal else err == "measuring a model\n"


def test_supervised_calls_the_model() -> None:
    line = nn.Linear(1, 1)
    x, y = torch.ones(2, 1), torch.zeros(2, 1)
    assert torch.equal(supervised(nn.functional.mse_loss)(line, (x, y)), nn.functional.mse_loss(line(x), y))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(measure: Any, dtype: torch.dtype) -> None:
    """Batches on the host are moved; nothing is left behind; the GPU's own random state is as it was."""
    model = unusual_model(dtype).cuda()
    before, state = snapshot(model), torch.cuda.get_rng_state()
    first, again = (measure(model, cross_entropy, unequal_batches(dtype)) for _ in range(2))
    torch.testing.assert_close(first, again, rtol=1e-3, atol=1e-5)  # atomic adds come in any order
    assert_same(before, snapshot(model))
    assert torch.equal(state, torch.cuda.get_rng_state())
