"""Adaptive quadrature against closed forms."""

import math

import pytest
import torch

from tiltsam.toys.quadrature import adaptive_nodes, gauss_legendre

F64 = {"dtype": torch.float64}


@pytest.mark.parametrize("order", [2, 5, 16])
def test_gauss_legendre_is_exact_to_its_degree(order):
    x, w = gauss_legendre(order)
    for k in range(2 * order):
        monomial = 0 if k % 2 else 2 / (k + 1)
        assert float((w * x**k).sum()) == pytest.approx(monomial, abs=1e-12)


def test_adaptive_nodes_resolve_a_needle_and_a_jump():
    def integrand(row, x):
        needle = -(((x - 0.3) / 1e-5) ** 2) / 2
        step = (x > 1 / 3).double()
        return torch.where(row == 0, needle, torch.zeros_like(x)), torch.stack([torch.ones_like(x), step])

    nodes = adaptive_nodes(integrand, torch.linspace(0, 1, 9, **F64).expand(2, -1), num_judged=2)
    sums = [(nodes.weight * nodes.log_weight.exp() * f)[nodes.row == r].sum() for r, f in enumerate(nodes.factors)]
    assert float(sums[0]) == pytest.approx(1e-5 * math.sqrt(2 * math.pi), rel=1e-11)
    assert float(sums[1]) == pytest.approx(2 / 3, rel=1e-11)


def test_adaptive_nodes_raise_on_random_integrand():
    def noise(row, x):
        return torch.zeros_like(x), torch.stack([torch.ones_like(x), torch.rand_like(x)])

    with pytest.raises(ArithmeticError, match="not resolved"):
        adaptive_nodes(noise, torch.linspace(0, 1, 5, **F64)[None], num_judged=2)
