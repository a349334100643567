"""m-sharpness against known maxima."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.measuring import Bowl, Slope, call, convnet, cross_entropy, images, mse, unequal_batches
from tiltsam.flatness.objectives import ErmLoss, SamLoss, TsamLoss, cross_objectives
from tiltsam.flatness.worst_case import m_sharpness

ONE = [torch.ones(1)]
LAMBDAS, THETA = [3.0, 1.0, 0.5], [0.2, -1.0, 0.4]


@pytest.mark.parametrize("num_steps", [1, 5])
def test_m_sharpness_of_linear_loss(num_steps: int) -> None:
    slope, rho, eta = Slope([3.0, 4.0], [2.0, -0.5]), 0.1, 0.01
    plain = m_sharpness(slope, call, ONE, rho=rho, num_steps=num_steps)
    assert plain.value == pytest.approx(rho * 5.0, rel=1e-9)
    adaptive = m_sharpness(slope, call, ONE, rho=rho, adaptive=True, eta=eta, num_steps=num_steps)
    assert adaptive.value == pytest.approx(rho * math.hypot(3 * (2 + eta), 4 * (0.5 + eta)), rel=1e-9)


def test_m_sharpness_of_quadratic_is_top_eigenvalue() -> None:
    bowl, rho = Bowl([4.0, 1.0, 0.5], [0.0, 0.0, 0.0]), 0.3
    assert m_sharpness(bowl, call, ONE, rho=rho).value == 0.0  # no gradient to climb from the very bottom
    found = m_sharpness(bowl, call, ONE, rho=rho, num_steps=20, random_start=True)
    assert found.value == pytest.approx(0.5 * 4.0 * rho**2, rel=1e-3)


def noisy(model: nn.Module, batch: Any) -> Tensor:
    """A loss that draws: the same at all weights, but for the noise."""
    return torch.randn((), dtype=torch.float64) + 0.0 * call(model, batch)


def test_random_loss_adds_no_sharpness() -> None:
    bowl, data = Bowl(LAMBDAS, THETA), ONE * 3
    assert m_sharpness(bowl, noisy, data, rho=0.3, random_start=True).rises.tolist() == [0.0] * 3
    objectives = {"ERM": ErmLoss(), "SAM": SamLoss(0.3), "TSAM": TsamLoss(rho=0.3)}
    table = cross_objectives({"bowl": bowl}, noisy, data, objectives)
    erm, sam, tsam = (table.entry("bowl", name).loss for name in objectives)
    assert sam == erm
    assert tsam == pytest.approx(erm, rel=1e-12)


class Sum(nn.Module):
    """Two parameters that count as their sum: autograd gives both the same tensor for their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.tensor(x, dtype=torch.float64)) for x in ([1.0, -2.0], [0.5, 0.5]))

    def forward(self, _: Any) -> Tensor:
        return (self.a + self.b).square().sum()


def test_m_sharpness_with_aliased_gradients() -> None:
    model, rho = Sum(), 0.3
    length = float((model.a + model.b).detach().norm())
    # along the gradient each of the two moves by rho/sqrt(2), so their sum by rho sqrt(2)
    found = m_sharpness(model, call, ONE, rho=rho, num_steps=1)
    assert found.value == pytest.approx((length + rho * math.sqrt(2)) ** 2 - length**2)


class Total(nn.Module):
    """The sum of its parameter: autograd's gradient is one number, spread out."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, _: Any) -> Tensor:
        return self.a.sum()


@pytest.mark.parametrize("adaptive", [False, True])
def test_m_sharpness_with_expanded_gradient(adaptive: bool) -> None:
    found = m_sharpness(Total(), call, ONE, rho=0.3, num_steps=1, adaptive=adaptive, eta=1.0)
    assert found.value == pytest.approx(0.3 * 2)  # rho times the length of (1, 1, 1, 1)


def test_m_sharpness_with_sparse_gradient() -> None:
    table = nn.Embedding(5, 2, sparse=True, dtype=torch.float64)
    rows = torch.tensor([1, 3, 3])
    found = m_sharpness(table, lambda model, batch: model(batch).sum(), [rows], rho=0.3, num_steps=1)
    assert found.value == pytest.approx(0.3 * math.sqrt(10))  # the gradient is 1 in two places, 2 in two


@pytest.mark.parametrize("random_start", [False, True])
def test_adaptive_m_sharpness_keeps_zero_weights_for_eta_zero(random_start: bool) -> None:
    """With ``eta = 0`` they cannot move, and the rest is the ball of the others."""
    rho, lambdas, theta = 0.3, [1.0, 4.0], [0.5, -0.25]
    options = {"rho": rho, "adaptive": True, "eta": 0.0, "num_steps": 20, "random_start": random_start}
    with_zeros = m_sharpness(Bowl([*lambdas, 9.0, 9.0], [*theta, 0.0, 0.0]), call, ONE, **options)
    without = m_sharpness(Bowl(lambdas, theta), call, ONE, **options)
    assert without.value > 0.1
    assert with_zeros.value == pytest.approx(without.value, rel=1e-6)


def test_m_sharpness_one_step_is_sam() -> None:
    model, data = convnet(), unequal_batches()
    one = m_sharpness(model, cross_entropy, data, rho=0.2, num_steps=1)
    table = cross_objectives({"m": model}, cross_entropy, data, {"ERM": ErmLoss(), "SAM": SamLoss(0.2)})
    erm, sam = table.entry("m", "ERM").loss, table.entry("m", "SAM").loss
    assert one.value == pytest.approx(sam - erm, rel=1e-9)
    assert one.loss == pytest.approx(erm, rel=1e-12)
    many = m_sharpness(model, cross_entropy, data, rho=0.2, num_steps=8)
    assert (many.rises >= one.rises - 1e-9).all()
    assert (many.rises > one.rises + 1e-6).any()


def test_m_sharpness_cuts_chunks_of_m_examples() -> None:
    model, (x, y) = convnet(), images(10)
    found = m_sharpness(model, cross_entropy, [(x, y)], rho=0.1, m=4)
    assert found.sizes.tolist() == [4, 4, 2]
    by_hand = [
        m_sharpness(model, cross_entropy, [(x[i:j], y[i:j])], rho=0.1).value for i, j in [(0, 4), (4, 8), (8, 10)]
    ]
    torch.testing.assert_close(found.rises, torch.tensor(by_hand, dtype=torch.float64))
    assert found.value == pytest.approx((4 * by_hand[0] + 4 * by_hand[1] + 2 * by_hand[2]) / 10)
    # smaller chunks, each with a worst case of its own, are sharper than the whole
    assert found.value > m_sharpness(model, cross_entropy, [(x, y)], rho=0.1).value
    assert math.isnan(m_sharpness(model, cross_entropy, [(x, y)], rho=0.1).error)
    halves = m_sharpness(model, cross_entropy, [(x, y)], rho=0.1, m=5)
    assert halves.error == pytest.approx(float(halves.rises.std()) / math.sqrt(2))
    with pytest.raises(ValueError, match="got 11"):
        m_sharpness(model, cross_entropy, [(x, y)], rho=0.1, m=11)


@pytest.mark.parametrize(
    "options", [{"rho": 0.0}, {"num_steps": 0, "rho": 1.0}, {"m": 0, "rho": 1.0}, {"eta": -1.0, "rho": 1.0}], ids=str
)
def test_m_sharpness_rejects_bad_arguments(options: dict[str, Any]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"{name} must be .*got {value}"):
        m_sharpness(convnet(), cross_entropy, unequal_batches(), **options)


@pytest.mark.parametrize("adaptive", [False, True])
def test_ascent_warns_if_bfloat16_rounds_it_away(adaptive: bool) -> None:
    """Else a model would seem flat whose weights just cannot move by so little."""
    model = nn.Linear(16, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    data = [(torch.ones(4, 16, dtype=torch.bfloat16), torch.ones(4, 1, dtype=torch.bfloat16))]

    def climb(rho: float) -> None:
        m_sharpness(model, mse, data, rho=rho, adaptive=adaptive)

    def objectives(rho: float) -> None:
        for objective in (SamLoss(rho), TsamLoss(rho=0.0, radius=rho)):
            cross_objectives({"": model}, mse, data, {"": objective})

    for measure in (climb, objectives):
        with pytest.warns(UserWarning, match="low-precision"):
            measure(1e-3)
        measure(1.0)
