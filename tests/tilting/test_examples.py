"""The tilt over the examples of a batch equals its formula, in one process and in several."""

import math
from decimal import Decimal, localcontext

import pytest
import torch
from torch import nn

import tiltsam
from helpers import jobs
from tiltsam.tilting import ExampleTilt

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TILTS = (-1e4, -10.0, -1.0, -1e-3, -1e-8, 0.0, 1e-8, 1e-3, 1.0, 10.0, 1e4)


def twin(losses, t):
    """Weights and tilted loss in 60 digits."""
    with localcontext() as context:
        context.prec = 60
        x, t = [Decimal(v) for v in losses.tolist()], Decimal(t)
        if t == 0:
            return [1 / len(x)] * len(x), float(sum(x) / len(x))
        top = max(t * v for v in x)
        masses = [(t * v - top).exp() for v in x]
        return [float(m / sum(masses)) for m in masses], float(((sum(masses) / len(x)).ln() + top) / t)


@pytest.mark.parametrize("t", TILTS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e2, 1e4])
def test_gradient_and_value_equal_the_twin(t, scale):
    losses = (scale * torch.rand(50, dtype=torch.float64)).requires_grad_()
    tilt = ExampleTilt(t)
    value = tilt(losses)
    value.backward()
    weights, expected = twin(losses.detach(), t)
    torch.testing.assert_close(losses.grad, torch.tensor(weights, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(value.item(), expected, rtol=1e-12, atol=1e-12 * scale)
    torch.testing.assert_close(tilt.weights, losses.grad, rtol=0, atol=0)
    size = 1 / losses.grad.square().sum()
    torch.testing.assert_close(tilt.effective_sample_size, size, rtol=1e-10, atol=0)


@pytest.mark.parametrize("num_examples", [1, 3, 64, 127, 1000, 4096])
def test_zero_tilt_is_the_mean_bitwise(num_examples):
    losses = torch.randn(num_examples, dtype=torch.float64, requires_grad=True)
    value, mean = ExampleTilt(0.0)(losses), losses.mean()
    assert torch.equal(value, mean)
    assert torch.equal(torch.autograd.grad(value, losses)[0], torch.autograd.grad(mean, losses)[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("t", [-2.0, 0.0, 2.0])
def test_losses_that_are_not_finite_get_no_weight(t, bad):
    losses = torch.tensor([0.5, bad, 1.5, bad], dtype=torch.float64, requires_grad=True)
    tilt = ExampleTilt(t, min_ess=0.1)
    value = tilt(losses)
    value.backward()
    expected = ExampleTilt(t, min_ess=0.1)
    others = losses.detach()[[0, 2]].requires_grad_()
    torch.testing.assert_close(value, expected(others))
    assert losses.grad.tolist() == [expected.weights[0], 0.0, expected.weights[1], 0.0]
    assert tilt.num_nonfinite == 2


def test_no_finite_loss_gives_nan_and_no_weights():
    tilt = ExampleTilt(-1.0, min_ess=0.5)
    assert tilt(torch.full((3,), math.nan)).isnan()
    assert tilt.weights.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("t", [-100.0, 100.0])
@pytest.mark.parametrize("min_ess", [0.1, 0.5, 0.9])
def test_min_ess_bounds_the_effective_sample_size(t, min_ess):
    losses = torch.rand(128, dtype=torch.float64) * 3
    tilt = ExampleTilt(t, min_ess=min_ess)
    tilt(losses)
    torch.testing.assert_close(tilt.effective_sample_size.item(), 128 * min_ess, rtol=1e-3, atol=0)
    assert math.copysign(1, tilt.t_used) == math.copysign(1, t)


def test_min_ess_leaves_smaller_tilts_alone():
    losses = torch.rand(64)
    tilt, free = ExampleTilt(-0.1, min_ess=0.5), ExampleTilt(-0.1)
    assert torch.equal(tilt(losses), free(losses))
    assert tilt.t_used == torch.tensor(-0.1)


def test_min_ess_of_equal_losses_keeps_the_tilt():
    tilt = ExampleTilt(-3.0, min_ess=0.9)
    assert tilt(torch.full((8,), 2.0)) == 2
    assert tilt.t_used == -3


def test_groups_with_one_tilt_equal_no_groups():
    losses, groups = torch.rand(40, dtype=torch.float64) * 3, torch.randint(5, (40,))
    plain, grouped = ExampleTilt(-1.5), ExampleTilt(-1.5, num_groups=6)  # one group stays empty
    torch.testing.assert_close(grouped(losses, groups), plain(losses))
    torch.testing.assert_close(grouped.weights, plain.weights)
    torch.testing.assert_close(grouped.effective_sample_size, plain.effective_sample_size)


@pytest.mark.parametrize("group_tilt", [-2.0, 0.0, 3.0])
@pytest.mark.parametrize("t", [-1.0, 0.0, 2.0])
def test_groups_equal_the_hierarchical_formula(t, group_tilt):
    losses = (3 * torch.rand(40, dtype=torch.float64)).requires_grad_()
    groups = torch.arange(40) % 4 * torch.arange(40) // 30  # of different sizes

    def tilted(x, weights, t):
        if t == 0:
            return (weights * x).sum()
        return (weights * (t * x).exp()).sum().log() / t

    parts = [losses[groups == k] for k in groups.unique()]
    risks = torch.stack([tilted(x, torch.full_like(x, 1 / len(x)), t) for x in parts])
    expected = tilted(risks, torch.tensor([len(x) / 40 for x in parts], dtype=torch.float64), group_tilt)
    found = ExampleTilt(t, group_tilt=group_tilt, num_groups=5)(losses, groups)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(*(torch.autograd.grad(x, losses)[0] for x in (found, expected)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_effective_sample_size_with_an_empty_group(dtype):
    tilt = ExampleTilt(-1.0, group_tilt=1.0, num_groups=4)
    tilt(torch.rand(30, dtype=dtype), torch.arange(30) % 3)
    torch.testing.assert_close(tilt.effective_sample_size, 1 / tilt.weights.square().sum())


def test_half_precision_losses_are_tilted_in_float32():
    losses = torch.rand(16).bfloat16().requires_grad_()
    value = ExampleTilt(-1.0)(losses)
    value.backward()
    assert value.dtype == torch.float32
    assert losses.grad.dtype == torch.bfloat16


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="t must be a number, got str"):
        ExampleTilt("a")
    for options in ({"t": math.inf}, {"t": math.nan}, {"t": -1.0, "min_ess": 1.0}, {"t": 1.0, "group_tilt": 2.0}):
        with pytest.raises(ValueError):
            ExampleTilt(**options)
    with pytest.raises(ValueError, match="num_groups"):
        ExampleTilt(1.0, num_groups=3, min_ess=0.5)
    with pytest.raises(TypeError, match="losses must be a tensor, got list"):
        ExampleTilt(1.0)([1.0, 2.0])
    with pytest.raises(ValueError, match="reduction"):
        ExampleTilt(1.0)(torch.tensor(2.0))
    logits, targets = torch.rand(3, 5), torch.zeros(3, dtype=torch.long)
    for call in (lambda: ExampleTilt(-0.4)(logits, targets), lambda: ExampleTilt(-0.4)(logits)):
        with pytest.raises(ValueError, match=r"\(3, 5\).*cross_entropy\(logits, targets, reduction='none'\)"):
            call()
    with pytest.raises(ValueError, match="together"):
        ExampleTilt(1.0)(torch.rand(3), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="shape"):
        ExampleTilt(1.0, num_groups=2)(torch.rand(3), torch.zeros(2, dtype=torch.long))


def test_negative_tilt_silences_wrong_labels():
    """Labels that are wrong on one side of a linear problem turn its solution; a negative tilt halves the error."""
    generator = torch.Generator().manual_seed(0)
    x, true = torch.randn(400, 5, generator=generator), torch.ones(5)
    y = (x @ true > 0).float()
    wrong = (x[:, 0] > 0.8) & (torch.rand(400, generator=generator) < 0.6)
    y[wrong] = 1 - y[wrong]
    errors = []
    for t in (0.0, -1.0):
        weights = torch.zeros(5, requires_grad=True)
        optimizer, tilt = torch.optim.SGD([weights], lr=0.5), ExampleTilt(t, min_ess=0.3)
        for _ in range(200):
            optimizer.zero_grad()
            tilt(nn.functional.binary_cross_entropy_with_logits(x @ weights, y, reduction="none")).backward()
            optimizer.step()
        errors.append(1 - nn.functional.cosine_similarity(weights, true, dim=0).item())
    assert errors[1] < 0.5 * errors[0]
    assert tilt.weights[wrong].mean() < 0.5 * tilt.weights.mean()


# ---------------------------------------------------------------- several processes


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.parametrize(
    ("ranks", "steps", "sharded", "options"),
    [
        (2, 50, False, {}),
        (3, 10, False, {}),
        (2, 10, True, {}),
        (3, 10, True, {}),
        (2, 10, False, {"min_ess": 0.6}),
        (2, 10, False, {"num_groups": 3, "group_tilt": 2.0}),
    ],
    indirect=["ranks"],
    ids=["2 ddp", "3 ddp", "2 fsdp2", "3 fsdp2", "2 ddp min_ess", "2 ddp groups"],
)
def test_ranks_equal_one_process_with_the_whole_batch(ranks, steps, sharded, options):
    found = ranks(jobs.example_tilt, steps, sharded, options)
    assert all(torch.equal(found[0], other) for other in found[1:])
    torch.testing.assert_close(found[0], jobs.example_tilt_alone(steps, options), rtol=0, atol=1e-10)


# ---------------------------------------------------------------- capture


@cuda
def test_captured_step_sees_later_tilts():
    def batch(k):
        x, y = jobs.batch(k)
        return x.float().cuda(), y.cuda()

    weights = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).cuda()
        optimizer = tiltsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1))
        tilt = ExampleTilt(0.0, min_ess=0.5)

        def loss_fn(x, y, model=model, tilt=tilt):
            return tilt(nn.functional.cross_entropy(model(x), y, reduction="none"))

        step = tiltsam.capture(optimizer, loss_fn) if captured else None
        for k in range(10):
            x, y = batch(k)
            tilt.t = -0.3 * k
            if step is not None:
                step(x, y)
                continue

            def closure(x=x, y=y, model=model, loss_fn=loss_fn):
                loss = loss_fn(x, y)
                loss.backward()
                return loss

            optimizer.step(closure)
        weights.append(jobs.flat(model))
        assert step is None or step.reason is None
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("groups", [None, torch.tensor([0, 1, 1])])
def test_no_finite_loss_gives_no_weight(groups):
    tilt = ExampleTilt(-1.0, num_groups=None if groups is None else 2)
    losses = torch.full((3,), torch.nan, requires_grad=True)
    value = tilt(losses, groups)
    value.backward()
    assert value.isnan()
    assert tilt.weights.tolist() == [0.0, 0.0, 0.0]
    assert tilt.effective_sample_size == 0
    assert tilt.num_nonfinite == 3
    assert losses.grad.tolist() == [0.0, 0.0, 0.0]


def test_tilt_can_be_changed_after_inference_mode():
    tilt, losses = ExampleTilt(1.0), torch.tensor([0.0, 1.0])
    with torch.inference_mode():
        tilt(losses)
    tilt.t = 0.0
    assert tilt(losses) == 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_groups_are_weighted_in_float32_under_autocast(dtype):
    losses, groups = torch.rand(64), torch.randint(10, (64,))
    tilt = ExampleTilt(0.5, group_tilt=2.0, num_groups=10)
    tilt(losses, groups)
    expected = tilt.weights
    with torch.autocast("cpu", dtype):
        loss = tilt(losses, groups)
    assert loss.dtype == tilt.weights.dtype == torch.float32
    assert torch.equal(tilt.weights, expected)


@pytest.mark.parametrize("t", [1e6, -1e6, 1e12, -1e12])
def test_min_ess_is_reached_with_any_large_tilt(t):
    torch.manual_seed(0)
    losses = torch.randn(64, dtype=torch.float64).exp()
    tilt = ExampleTilt(t, min_ess=0.3)
    tilt(losses)
    assert 0.3 <= tilt.effective_sample_size / 64 < 0.3001


@pytest.mark.parametrize("t", [-1.3, 0.0, 4.0])
def test_second_derivatives_are_those_of_the_tilted_loss(t):
    x = torch.randn(6, dtype=torch.float64)
    hessian = torch.autograd.functional.hessian
    found = hessian(lambda z: ExampleTilt(t)(z**2), x)
    torch.testing.assert_close(found, hessian(lambda z: tiltsam.tilted_loss(z**2, t), x), rtol=0, atol=1e-12)


def test_second_derivatives_of_a_bounded_tilt():
    """The tilt that is used counts as constant."""
    x, tilt = torch.randn(6, dtype=torch.float64), ExampleTilt(-3.0, min_ess=0.6)
    found = torch.autograd.functional.hessian(lambda z: tilt(z**2), x)
    assert -3.0 < tilt.t_used < 0
    expected = torch.autograd.functional.hessian(lambda z: tiltsam.tilted_loss(z**2, tilt.t_used.item()), x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_gradients_of_torch_func():
    x = torch.randn(3, 6, dtype=torch.float64)
    found = torch.func.vmap(torch.func.grad(lambda row: ExampleTilt(-1.3)(row**2)))(x)
    torch.testing.assert_close(found, 2 * x * torch.softmax(-1.3 * x**2, dim=1))
