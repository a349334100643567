"""Means with errors, norms, random signs, rounding."""

from __future__ import annotations

import math

import pytest
import torch

from tiltsam.flatness.numerics import finite_losses, rademacher_, total_norm, weighted_mean, write_sum


def test_weighted_mean_error_is_that_of_independent_values() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    for weights in (None, [7.0] * 4):
        mean, error = weighted_mean(values, weights)
        assert mean == pytest.approx(3.75)
        assert error == pytest.approx(float(values.std()) / 2)
    mean, error = weighted_mean(values[:2], [3.0, 1.0])
    assert mean == pytest.approx(1.25)
    # shares 3/4 and 1/4: (9 (1/4)^2 + (3/4)^2) / 16 over 1 - 10/16
    assert error == pytest.approx((18 / 256 / (6 / 16)) ** 0.5)
    assert math.isnan(weighted_mean(values[:1]).error)


def test_finite_losses_names_the_batch() -> None:
    losses = [torch.tensor(1.0), torch.tensor(math.inf), torch.tensor(math.nan)]
    assert finite_losses(losses[:1]).dtype == torch.float64
    with pytest.raises(ValueError, match="at a: got inf on batch 1"):
        finite_losses(losses, " at a")


def test_total_norm_is_accurate_in_float32() -> None:
    x = torch.rand(4_000_000, generator=torch.Generator().manual_seed(0))
    exact = float(x.double().norm()) * math.sqrt(2)
    assert float(total_norm([x, x])) == pytest.approx(exact, rel=3e-6)
    assert total_norm([x.bfloat16()]).dtype == torch.float32


def test_rademacher_fills_with_signs() -> None:
    signs = rademacher_(torch.empty(10_000), torch.Generator().manual_seed(0))
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert abs(float(signs.mean())) < 0.05


def test_write_sum_warns_if_rounded_away() -> None:
    out = [torch.zeros(3, dtype=torch.bfloat16)]
    start = [torch.ones(3, dtype=torch.bfloat16)]
    write_sum(out, start, [torch.full((3,), 0.5)])
    assert out[0].tolist() == [1.5] * 3
    with pytest.warns(UserWarning, match="low-precision"):
        write_sum(out, start, [torch.full((3,), 1e-4)])
    write_sum([torch.zeros(3)], [torch.ones(3)], [torch.full((3,), 1e-4)])
