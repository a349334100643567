"""The toy losses against their formulas in the paper (arXiv:2410.22656)."""

import math

import pytest
import torch

from tiltsam.toys import HMC_TEST, TOY1, TOY2, WAVE, erm, stationary_points

F64 = {"dtype": torch.float64}


def test_toy1_minima():
    found = stationary_points(lambda x: erm(TOY1, x).grad, 0.2, 2.5)[::2]
    torch.testing.assert_close(found, torch.tensor(TOY1.minima, **F64), rtol=0, atol=1e-11)
    point = erm(TOY1, found)
    assert [round(x, 4) for x in found.tolist()] == [0.3576, 0.8677, 1.3704, 1.8715, 2.3721]
    assert [round(x, 3) for x in point.value.tolist()] == [-2.728, -1.148, -0.728, -0.530, -0.412]
    assert [round(x) for x in point.hess.tolist()] == [431, 181, 115, 84, 67]


@pytest.mark.parametrize("problem", [TOY1, HMC_TEST, WAVE])
def test_peaks_are_local_maxima(problem):
    for theta, height in problem.peaks:
        point = erm(problem, theta)
        assert float(point.value) == pytest.approx(height, abs=1e-11)
        assert abs(float(point.grad)) < 1e-8
        assert float(point.hess) < 0


def test_toy1_derivatives_at_zero():
    theta = torch.tensor([-0.3 / (4 * math.pi), -1e-9, 0.0, 1e-4, 0.3 / (4 * math.pi)], **F64)
    loss, grad, hess = TOY1.derivatives(theta)
    z = 4 * math.pi * theta
    torch.testing.assert_close(loss, 4 * math.pi * torch.sinc(z / math.pi) + 0.005 * (theta - 1) ** 2)
    # sin(z)/theta = 4 pi (1 - z^2/6 + z^4/120 - ...)
    want_grad = (4 * math.pi) ** 2 * (-z / 3 + z**3 / 30 - z**5 / 840) + 0.01 * (theta - 1)
    want_hess = (4 * math.pi) ** 3 * (-1 / 3 + z**2 / 10 - z**4 / 168) + 0.01
    torch.testing.assert_close(grad, want_grad, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(hess, want_hess, rtol=1e-5, atol=0)


def test_toy2_values():
    theta = torch.tensor([0.0, 1.0, 2.0, 2.0 + 1e-9, 3.0, 4.0], **F64)
    torch.testing.assert_close(TOY2.loss(theta), torch.tensor([0.99, -0.01, 0.99, 1.0, 0.0, 1.0], **F64))
