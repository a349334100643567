"""Eigenvalues, trace and density against the dense Hessian."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.measuring import (
    Bowl,
    Unused,
    call,
    convnet,
    cross_entropy,
    dense_hessian,
    images,
    mlp,
    mse,
    problems,
    unequal_batches,
    whole,
)
from tiltsam.curvature import by_layer, spectral_density, top_eigenvalues, trace
from tiltsam.flatness.hessian import HessianOperator
from tiltsam.flatness.loss_surface import LossSurface

ONE = [torch.ones(1)]


@pytest.mark.parametrize("name", problems())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_top_eigenvalues_and_trace_match_dense_hessian(name: str, dtype: torch.dtype) -> None:
    model, loss_fn, batches = problems()[name]
    model.to(dtype)
    batches = [
        tuple(t.to(dtype) if t.is_floating_point() else t for t in b) if isinstance(b, tuple) else b for b in batches
    ]
    dense = dense_hessian(model, loss_fn, whole(batches)).double()
    exact = torch.linalg.eigvalsh(dense).flip(0)
    found = top_eigenvalues(model, loss_fn, batches, k=4)
    assert found.converged.all()
    torch.testing.assert_close(found.values, exact[:4], rtol=1e-4, atol=1e-5)
    smallest = top_eigenvalues(model, loss_fn, batches, k=2, which="smallest").values
    torch.testing.assert_close(smallest, exact.flip(0)[:2], rtol=1e-4, atol=1e-5)
    largest = top_eigenvalues(model, loss_fn, batches, k=2, which="magnitude").values
    torch.testing.assert_close(largest.abs(), exact.abs().sort(descending=True).values[:2], rtol=1e-4, atol=1e-5)
    # the vectors are what they claim to be, and so are the residuals
    vectors = found.vectors.double()
    torch.testing.assert_close(vectors @ vectors.T, torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-5)
    residuals = (vectors @ dense - found.values[:, None] * vectors).norm(dim=1)
    assert (residuals <= found.residuals + 1e-5 * exact.abs().max()).all()

    estimate = trace(model, loss_fn, batches, num_samples=200)
    assert abs(estimate.value - float(dense.trace())) < 3 * estimate.error + 1e-4 * float(dense.trace().abs())
    assert sum(layer.value for layer in estimate.layers.values()) == pytest.approx(estimate.value, rel=1e-5)


def test_by_layer_matches_blocks_of_dense_hessian() -> None:
    model, loss_fn, batches = problems()["mlp, unequal batches"]
    model.double()
    batches = [(x.double(), y) for x, y in batches]
    tops = by_layer(top_eigenvalues, model, loss_fn, batches, k=2)
    assert list(tops) == ["0", "2", "4"]
    densities = by_layer(spectral_density, model, loss_fn, batches, num_probes=2, num_steps=30)
    traces = trace(model, loss_fn, batches, num_samples=400).layers
    for layer in ("0", "2", "4"):
        names = [f"{layer}.weight", f"{layer}.bias"]
        block = dense_hessian(model, loss_fn, whole(batches), names)
        torch.testing.assert_close(tops[layer].values, torch.linalg.eigvalsh(block).flip(0)[:2], rtol=1e-4, atol=1e-8)
        assert abs(traces[layer].value - float(block.trace())) < 3 * traces[layer].error
        assert densities[layer].nodes.max() == pytest.approx(float(tops[layer].values[0]), rel=1e-3)


def test_deflation_reduces_trace_error() -> None:
    model, loss_fn, batches = problems()["mlp, one batch"]
    exact = float(dense_hessian(model, loss_fn, whole(batches)).trace())
    plain = trace(model, loss_fn, batches, num_samples=100)
    known = top_eigenvalues(model, loss_fn, batches, k=8, tol=1e-5)
    deflated = trace(model, loss_fn, batches, num_samples=100, deflate=known)
    assert abs(deflated.value - exact) < 3 * deflated.error + 1e-4 * exact
    assert deflated.error < 0.75 * plain.error
    assert sum(layer.value for layer in deflated.layers.values()) == pytest.approx(deflated.value, rel=1e-5)
    with pytest.raises(ValueError, match="deflate"):
        trace(model, loss_fn, batches, deflate=by_layer(top_eigenvalues, model, loss_fn, batches)["0"])


def test_errors_shrink_with_num_samples() -> None:
    model, loss_fn, batches = problems()["mlp, one batch"]
    few, many = (trace(model, loss_fn, batches, num_samples=n).error for n in (40, 640))
    assert 2.5 < few / many < 6.5  # sqrt(16) = 4
    narrow, wide = (spectral_density(model, loss_fn, batches, n, 10, width=0.1) for n in (4, 64))
    assert wide.moment(1).error < narrow.moment(1).error


@pytest.mark.parametrize("reorthogonalize", [True, False])
def test_spectral_density_moments_match_dense_hessian(reorthogonalize: bool) -> None:
    model, loss_fn, batches = problems()["mlp, one batch"]
    model.double()
    batches = [(x.double(), y) for x, y in batches]
    exact = torch.linalg.eigvalsh(dense_hessian(model, loss_fn, batches[0]))
    found = spectral_density(model, loss_fn, batches, 12, 25, reorthogonalize=reorthogonalize)
    torch.testing.assert_close(found.weights.sum(1), torch.ones(12, dtype=torch.float64))
    for power in (1, 2, 3):
        estimate = found.moment(power)
        assert abs(estimate.value - float((exact**power).mean())) < 3.5 * estimate.error
    assert float(torch.trapezoid(found.values, found.grid)) == pytest.approx(1, abs=1e-3)
    assert found.nodes.max() == pytest.approx(float(exact.max()), rel=1e-6)
    assert (found.error >= 0).all()
    assert spectral_density(model, loss_fn, batches, 1, 5).error.isnan().all()


def test_top_eigenvalues_in_bfloat16_have_explicit_residuals() -> None:
    model = convnet(torch.float32)
    exact = top_eigenvalues(model, cross_entropy, unequal_batches(torch.float32), k=2).values
    model.bfloat16()
    found = top_eigenvalues(model, cross_entropy, unequal_batches(torch.bfloat16), k=2, max_products=60)
    torch.testing.assert_close(found.values, exact, rtol=0.1, atol=0)
    assert (found.residuals > 1e-4 * found.values).all()  # the explicit residual, not the recurrence's wishful one
    estimate = trace(model, cross_entropy, unequal_batches(torch.bfloat16), num_samples=20)
    assert estimate.value > 0


def test_mixed_precision_residuals_are_those_of_the_coarser() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1).double())

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model[2](model[1](model[0](batch[0])).double()), batch[1])

    batch = (torch.randn(8, 3), torch.randn(8, 1, dtype=torch.float64))
    found = top_eigenvalues(model, loss_fn, [batch], k=2, tol=1e-12, max_products=60)
    hessian = dense_hessian(model.double(), loss_fn, (batch[0].double(), batch[1]))
    exact = torch.linalg.eigvalsh(hessian)
    distance = (found.values[:, None] - exact).abs().amin(1)
    assert (distance > 1e-10).all()
    assert (distance <= found.residuals).all()
    assert not found.converged.any()


def test_top_eigenvalues_under_autocast_have_explicit_residuals() -> None:
    model, data = convnet(torch.float32), unequal_batches(torch.float32)
    exact = top_eigenvalues(model, cross_entropy, data, k=2).values
    with torch.autocast("cpu", torch.bfloat16):
        found = top_eigenvalues(model, cross_entropy, data, k=2, max_products=60)
        with LossSurface(model, cross_entropy, data) as surface:
            hessian, residuals = HessianOperator(surface), []
            for value, vector in zip(found.values.tolist(), found.vectors, strict=True):
                out = torch.empty_like(vector)
                hessian(vector, out)
                residuals.append(float((out - value * vector).norm()))
    torch.testing.assert_close(found.values, exact, rtol=0.1, atol=0)
    assert found.residuals.tolist() == pytest.approx(residuals, rel=1e-4)


def test_top_eigenvalues_reports_not_converged() -> None:
    model, loss_fn, batches = problems()["mlp, one batch"]
    found = top_eigenvalues(model, loss_fn, batches, k=3, tol=1e-12, max_products=5)
    assert found.num_products == 5
    assert not found.converged.all()


def test_top_eigenvalues_clamps_k_to_num_parameters() -> None:
    found = top_eigenvalues(Bowl([1.0, 3.0], [0.0, 1.0]), call, ONE, k=5)
    torch.testing.assert_close(found.values, torch.tensor([3.0, 1.0], dtype=torch.float64))
    zero = top_eigenvalues(Unused(), lambda m, _: m.linear.sum(), ONE, k=2)
    assert zero.values.tolist() == [0.0, 0.0]


def test_eigenpairs_direction_has_parameter_shapes() -> None:
    model, loss_fn, batches = problems()["mlp, one batch"]
    found = top_eigenvalues(model, loss_fn, batches, k=1)
    direction = found.direction(0)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: d.shape for n, d in direction.items()}
    assert torch.cat([d.flatten() for d in direction.values()]).norm() == pytest.approx(1, rel=1e-5)


def test_nonfinite_second_derivative_raises() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theta = nn.Parameter(torch.zeros(2))

        def forward(self, _: Any) -> Tensor:
            return self.theta.abs().pow(1.5).sum()

    for measure in (top_eigenvalues, trace, spectral_density):
        with pytest.raises(ValueError, match="no second derivative"):
            measure(Root(), call, ONE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_spectral_density_width_of_identity_hessian(dtype: torch.dtype) -> None:
    """Inputs in orthonormal columns: the Hessian is a multiple of the identity, but for rounding."""
    columns = torch.linalg.qr(torch.randn(64, 8, generator=torch.Generator().manual_seed(0), dtype=dtype)).Q
    data = [(columns * 8, torch.zeros(64, 1, dtype=dtype))]
    found = spectral_density(nn.Linear(8, 1, bias=False, dtype=dtype), mse, data)
    assert found.width == pytest.approx(2 / 100, rel=1e-3)
    assert float(torch.trapezoid(found.values, found.grid)) == pytest.approx(1, abs=1e-3)


def test_trace_rejects_eigenpairs_of_other_shapes() -> None:
    model, wider = nn.Linear(2, 1), nn.Linear(3, 1)
    pairs = top_eigenvalues(wider, mse, [(torch.randn(8, 3), torch.randn(8, 1))], k=1)
    with pytest.raises(ValueError, match="deflate"):
        trace(model, mse, [(torch.randn(8, 2), torch.randn(8, 1))], num_samples=2, deflate=pairs)


def test_trace_deflates_with_eigenpairs_of_other_dtype() -> None:
    model, data = nn.Linear(2, 1).double(), [(torch.randn(8, 2).double(), torch.randn(8, 1).double())]
    pairs = top_eigenvalues(copy.deepcopy(model).float(), mse, [(x.float(), y.float()) for x, y in data], k=3)
    found = trace(model, mse, data, num_samples=2, deflate=pairs)
    assert found.value == pytest.approx(float(dense_hessian(model, mse, data[0]).trace()), rel=1e-6)


@pytest.mark.parametrize(
    ("measure", "options"),
    [
        (top_eigenvalues, {"k": 0}),
        (top_eigenvalues, {"k": True}),
        (top_eigenvalues, {"max_products": 0}),
        (top_eigenvalues, {"tol": -1.0}),
        (top_eigenvalues, {"basis_size": 4, "k": 4}),
        (top_eigenvalues, {"which": "middle"}),
        (trace, {"num_samples": 1}),
        (spectral_density, {"num_probes": 0}),
        (spectral_density, {"num_steps": 1.5}),
        (spectral_density, {"num_points": 1}),
        (spectral_density, {"width": 0.0}),
    ],
)
def test_curvature_rejects_bad_arguments(measure: Any, options: dict[str, Any]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"{name} must be .*got {value!r}"):
        measure(mlp(), cross_entropy, ONE, **options)


def test_convnet_hessian_is_not_trivial() -> None:
    """The fixture has outliers to find: guards the tests above against a trivial Hessian."""
    assert top_eigenvalues(convnet(), cross_entropy, [images()], k=1).values[0] > 0.1
