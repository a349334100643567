"""float16 with a GradScaler: the same training; an overflow costs one sample or one step."""

import pytest
import torch
from torch import nn

import tiltsam
from helpers.cases import METHODS, Problem, assert_same, sgd

BY_NAME = {method.name: method for method in METHODS}
every_method = pytest.mark.parametrize("method", METHODS, ids=repr)
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def scaler_of(scale=1024.0, **options):
    return torch.amp.GradScaler("cpu", init_scale=scale, **options)


class Scaled:
    """A problem whose closure scales its loss; at chosen passes the gradient overflows."""

    def __init__(self, method, scaler, base=sgd, **options):
        self.problem = Problem()
        self.scaler = scaler
        self.optimizer = method(base(self.problem.model.parameters()), model=self.problem.model, **options)
        self.passes = 0
        self.overflow_at = set()

    def closure(self):
        loss = self.problem.loss()
        self.scaler.scale(loss).backward()
        if self.passes in self.overflow_at:
            self.problem.model.last.weight.grad[0, 0] = torch.inf
        self.passes += 1
        return loss

    def step(self):
        loss = self.optimizer.step(self.closure, scaler=self.scaler)
        self.scaler.update()
        return loss


@every_method
def test_scaled_training_equals_plain_training(method):
    """Up to the 1e-12 in a normalised gradient."""
    scaled, plain = Scaled(method, scaler_of()), Problem()
    optimizer = method(sgd(plain.model.parameters()), model=plain.model)
    for _ in range(10):
        torch.manual_seed(5)
        a = scaled.step()
        torch.manual_seed(5)
        b = optimizer.step(plain.closure)
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(
            scaled.optimizer.info.gradient_norms, optimizer.info.gradient_norms, rtol=1e-6, atol=0
        )
    torch.testing.assert_close(scaled.problem.weights(), plain.weights(), rtol=1e-8, atol=1e-9)


def test_hooks_of_the_base_see_unscaled_gradients():
    seen = []
    for scale in (1.0, 4096.0):
        scaled = Scaled(BY_NAME["tsam"], scaler_of(scale))
        params = [p for p in scaled.problem.model.parameters() if p.requires_grad]
        clip = lambda *_, params=params: seen.append(nn.utils.clip_grad_norm_(params, 0.1).item())  # noqa: E731
        scaled.optimizer.base.register_step_pre_hook(clip)
        scaled.step()
    assert seen[0] == pytest.approx(seen[1], rel=1e-6)


def test_overflow_of_one_sample():
    scaled = Scaled(BY_NAME["tsam"], scaler_of())
    scaled.overflow_at = {3}  # the second pass of the second of three samples
    before = scaled.problem.weights()
    scaled.step()
    info = scaled.optimizer.info
    with pytest.warns(RuntimeWarning, match=r"^1 sample had"):
        scaled.optimizer.check_nonfinite()
    assert info.weights[1] == 0
    assert info.weights.sum().item() == pytest.approx(1)
    assert not torch.equal(scaled.problem.weights()["last.weight"], before["last.weight"])
    assert scaled.scaler.get_scale() == 512.0


@pytest.mark.parametrize("method", [BY_NAME["sam"], BY_NAME["tsam"]], ids=repr)
def test_overflow_of_all_samples_skips_the_step(method):
    """Weights and momentum stay; the next step uses half the scale."""
    scaled = Scaled(method, scaler_of())
    scaled.step()
    weights = {k: v for k, v in scaled.problem.weights().items() if "running" not in k and "batches" not in k}
    momenta = [s["momentum_buffer"].clone() for s in scaled.optimizer.state.values()]
    scaled.overflow_at = set(range(scaled.passes, scaled.passes + method.backwards))
    assert scaled.step().isnan()
    assert_same({k: v for k, v in scaled.problem.weights().items() if k in weights}, weights)
    for state, momentum in zip(scaled.optimizer.state.values(), momenta, strict=True):
        assert torch.equal(state["momentum_buffer"], momentum)
    assert scaled.scaler.get_scale() == 512.0
    assert scaled.step().isfinite()
    assert scaled.scaler.get_scale() == 512.0


def test_scale_grows_without_overflow():
    scaled = Scaled(BY_NAME["tsam"], scaler_of(growth_interval=3))
    for _ in range(3):
        scaled.step()
    assert scaled.scaler.get_scale() == 2048.0


def test_disabled_scaler():
    scaled = Scaled(BY_NAME["tsam"], torch.amp.GradScaler("cpu", enabled=False))
    plain = Problem()
    optimizer = BY_NAME["tsam"](sgd(plain.model.parameters()), model=plain.model)
    torch.manual_seed(5)
    scaled.step()
    torch.manual_seed(5)
    optimizer.step(plain.closure)
    assert_same(scaled.problem.weights(), plain.weights())


def test_scaler_step_is_refused():
    scaled = Scaled(BY_NAME["tsam"], scaler_of())
    scaled.step()
    before = scaled.problem.weights()
    for call in (
        lambda: scaled.scaler.step(scaled.optimizer, scaled.closure),
        lambda: scaled.scaler.step(scaled.optimizer),
    ):
        scaled.closure()
        with pytest.raises(RuntimeError, match=r"optimizer.step\(closure, scaler=scaler\)"):
            call()
    assert_same(
        {k: v for k, v in scaled.problem.weights().items() if "weight" in k},
        {k: v for k, v in before.items() if "weight" in k},
    )


@cuda
@pytest.mark.parametrize("method", ["sam", "tsam", "rsam", "pgn"])
def test_float16_on_a_gpu(method):
    """The initial scale overflows; the scaler lowers it, and training goes on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4)).cuda()
    x = torch.randn(256, 20, device="cuda")
    y = x[:, :4].argmax(1)
    optimizer = tiltsam.METHODS[method](torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model=model)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24)
    losses = []

    def closure():
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        return loss

    for _ in range(60):
        losses.append(optimizer.step(closure, scaler=scaler).item())
        scaler.update()
    assert scaler.get_scale() < 2.0**24
    assert all(p.isfinite().all() for p in model.parameters())
    assert losses[-1] < 0.5 * next(v for v in losses if v == v)


def test_unused_scaler_is_an_error():
    problem = Problem()
    optimizer = tiltsam.SAM(sgd(problem.model.parameters()), model=problem.model)
    before = problem.weights()
    with pytest.raises(RuntimeError, match=r"scaler\.scale"):
        optimizer.step(problem.closure, scaler=scaler_of())
    assert_same(problem.weights(), before)
    optimizer.step(problem.closure, scaler=scaler_of(enabled=False))
