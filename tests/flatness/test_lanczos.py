"""Lanczos iterations on operators with a known spectrum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tiltsam.flatness.lanczos import quadrature, thick_restart


class Diagonal:
    """An operator with a spectrum of our choice, large enough to need restarts and to lose digits in naive sums."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.size, self.dtype, self.device = len(values), values.dtype, values.device

    def __call__(self, v: Tensor, out: Tensor, /) -> None:
        torch.mul(self.values, v, out=out)


def fill(vector: Tensor) -> None:
    vector.normal_(generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("basis_size", [7, 12, 20])
def test_thick_restart_converges_for_any_basis_size(basis_size: int) -> None:
    random = torch.Generator().manual_seed(0)
    bulk = torch.rand(5000, generator=random, dtype=torch.float64) * 150
    operator = Diagonal(torch.cat([torch.tensor([342.0, 304.0, 260.0, 252.0, 210.0, 205.0]).double(), bulk]))
    found = thick_restart(operator, fill, 5, basis_size=basis_size, tol=1e-6, max_products=2000)
    assert found.converged.all()
    torch.testing.assert_close(found.values, operator.values[:5], rtol=1e-9, atol=0)
    torch.testing.assert_close(found.vectors[:, :5].abs(), torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-3)


def test_thick_restart_is_accurate_in_float32_for_large_vectors() -> None:
    """One naive float32 norm over 4e6 entries is off by more than this."""
    values = torch.full((4_000_000,), 0.01)
    values[:3] = torch.tensor([30.0, 20.0, 10.0])
    found = thick_restart(Diagonal(values), fill, 2, basis_size=6, tol=1e-4, max_products=40)
    torch.testing.assert_close(found.values, torch.tensor([30.0, 20.0]).double(), rtol=3e-6, atol=0)


def test_thick_restart_refills_exhausted_krylov_space() -> None:
    """Three distinct eigenvalues: one start sees three; the copies need fresh directions.

    It has no part at all in the copies: of a random start rounding brings some in, other ones on other processors.
    """
    operator = Diagonal(torch.tensor([5.0, 2.0, 1.0, 5.0, 5.0, 2.0, 1.0, 1.0], dtype=torch.float64))

    def start(vector: Tensor) -> None:
        fill(vector.zero_()[:3])

    found = thick_restart(operator, start, 4, basis_size=8, tol=1e-8, max_products=100)
    torch.testing.assert_close(found.values, torch.tensor([5.0, 5.0, 5.0, 2.0], dtype=torch.float64))


@pytest.mark.parametrize("k", [1, 2])
def test_thick_restart_finds_outlier_of_flat_spectrum(k: int) -> None:
    """A random start is an eigenvector of the bulk to within the tolerance, and the outlier is not in it."""
    values = torch.ones(10_000, dtype=torch.float64)
    values[3] = 1.05
    found = thick_restart(Diagonal(values), fill, k, basis_size=6, tol=1e-3, max_products=100)
    assert found.values[0].item() == pytest.approx(1.05)


@pytest.mark.parametrize("which", ["largest", "smallest"])
@pytest.mark.parametrize("size", [10, 30, 100, 300])
def test_thick_restart_residuals_bound_the_error(size: int, which: Any) -> None:
    """Some eigenvalue lies within the residual of each value, in float32 too, on whatever processor."""
    for seed in range(3):
        values = torch.rand(size, generator=torch.Generator().manual_seed(seed))
        tol = 1e-3 if size <= 30 else 1e-6  # the smaller ones are solved whole
        k = min(size, 30)
        found = thick_restart(Diagonal(values), fill, k, basis_size=k + 20, tol=tol, max_products=1000, which=which)
        distance = (found.values[:, None] - values.double()).abs().amin(1)
        assert (distance <= found.residuals).all()
        assert (found.residuals < 1e-5).all()  # and no more than need be


def test_quadrature_integrates_polynomials_exactly() -> None:
    operator = Diagonal(torch.linspace(-1, 3, 50, dtype=torch.float64))
    start = torch.empty(50, dtype=torch.float64)
    fill(start)
    start /= start.norm()
    nodes, weights = quadrature(operator, fill, 4)
    for degree in range(8):
        exact = (start.square() * operator.values**degree).sum()
        torch.testing.assert_close((weights * nodes**degree).sum(), exact, rtol=1e-9, atol=1e-12)
