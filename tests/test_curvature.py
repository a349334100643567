"""Eigenvalues, trace and density against the dense Hessian; kernels without a second derivative; precision."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from measuring import Bowl, Loss, call, convnet, cross_entropy, dense_hessian, images, mse, unequal_batches
from tiltsam.curvature import by_layer, spectral_density, top_eigenvalues, trace
from tiltsam.flatness.evaluation import LossSurface, layers
from tiltsam.flatness.hessian import HessianOperator
from tiltsam.flatness.lanczos import quadrature, thick_restart

ONE = [torch.ones(1)]


class Attention(nn.Module):
    """One head of scaled dot-product attention, then a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 12)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x)[:, None].chunk(3, dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v)[:, 0]).mean(1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(3, 4, batch_first=True)
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cell(x)[0][:, -1])


class Tied(nn.Module):
    """The same weight in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.outer = nn.Linear(3, 3)
        self.outer.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))


class Unused(nn.Module):
    """Parameters that the loss does not see, and one that it sees linearly."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.linear = nn.Parameter(torch.tensor([3.0]))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, _: Any) -> Tensor:
        return self.used.pow(4).sum() + self.linear.sum()


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.SiLU(), nn.Linear(5, 3))


def problems() -> dict[str, tuple[nn.Module, Loss, list[Any]]]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(20, 4, generator=random)
    y = torch.randint(3, (20,), generator=random)
    torch.manual_seed(2)
    return {
        "mlp, one batch": (mlp(), cross_entropy, [(x, y)]),
        "mlp, unequal batches": (mlp(), cross_entropy, [(x[:3], y[:3]), (x[3:12], y[3:12]), (x[12:], y[12:])]),
        "convnet with BatchNorm and SiLU": (convnet(torch.float32), cross_entropy, unequal_batches(torch.float32)),
        "tied": (Tied(), mse, [(x[:, :3], x[:, 1:])]),
        "unused and linear": (Unused(), call, ONE),
    }


PROBLEMS = problems()


def whole(batches: list[Any]) -> Any:
    """All batches as one."""
    if isinstance(batches[0], Tensor):
        return batches[0]
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_top_eigenvalues_and_trace_agree_with_the_dense_hessian(name: str, dtype: torch.dtype) -> None:
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


def test_layers_are_the_blocks_of_the_dense_hessian() -> None:
    model, loss_fn, batches = problems()["mlp, unequal batches"]
    model.double()
    batches = [(x.double(), y) for x, y in batches]
    tops = by_layer(top_eigenvalues, model, loss_fn, batches, k=2)
    densities = by_layer(spectral_density, model, loss_fn, batches, num_probes=2, num_steps=30)
    traces = trace(model, loss_fn, batches, num_samples=400).layers
    for layer, names in layers(model).items():
        block = dense_hessian(model, loss_fn, whole(batches), names)
        torch.testing.assert_close(tops[layer].values, torch.linalg.eigvalsh(block).flip(0)[:2], rtol=1e-4, atol=1e-8)
        assert abs(traces[layer].value - float(block.trace())) < 3 * traces[layer].error
        assert densities[layer].nodes.max() == pytest.approx(float(tops[layer].values[0]), rel=1e-3)


def test_deflation_takes_the_outliers_out_of_the_error() -> None:
    model, loss_fn, batches = problems()["mlp, one batch"]
    exact = float(dense_hessian(model, loss_fn, whole(batches)).trace())
    plain = trace(model, loss_fn, batches, num_samples=100)
    known = top_eigenvalues(model, loss_fn, batches, k=8, tol=1e-5)
    deflated = trace(model, loss_fn, batches, num_samples=100, deflate=known)
    assert abs(deflated.value - exact) < 3 * deflated.error + 1e-4 * exact
    assert deflated.error < 0.75 * plain.error
    assert sum(layer.value for layer in deflated.layers.values()) == pytest.approx(deflated.value, rel=1e-5)
    with pytest.raises(ValueError, match="other parameters"):
        trace(model, loss_fn, batches, deflate=by_layer(top_eigenvalues, model, loss_fn, batches)["0"])


def test_more_samples_smaller_error_bars() -> None:
    model, loss_fn, batches = problems()["mlp, one batch"]
    few, many = (trace(model, loss_fn, batches, num_samples=n).error for n in (40, 640))
    assert 2.5 < few / many < 6.5  # sqrt(16) = 4
    narrow, wide = (spectral_density(model, loss_fn, batches, n, 10, width=0.1) for n in (4, 64))
    assert wide.moment(1).error < narrow.moment(1).error


@pytest.mark.parametrize("reorthogonalize", [True, False])
def test_density_has_the_moments_of_the_dense_spectrum(reorthogonalize: bool) -> None:
    model, loss_fn, batches = problems()["mlp, one batch"]
    model.double()
    batches = [(x.double(), y) for x, y in batches]
    exact = torch.linalg.eigvalsh(dense_hessian(model, loss_fn, batches[0]))
    found = spectral_density(model, loss_fn, batches, 60, 25, reorthogonalize=reorthogonalize)
    torch.testing.assert_close(found.weights.sum(1), torch.ones(60, dtype=torch.float64))
    for power in (1, 2, 3):
        estimate = found.moment(power)
        assert abs(estimate.value - float((exact**power).mean())) < 3.5 * estimate.error
    assert float(torch.trapezoid(found.values, found.grid)) == pytest.approx(1, abs=1e-3)
    assert found.nodes.max() == pytest.approx(float(exact.max()), rel=1e-6)
    assert (found.error >= 0).all()
    assert spectral_density(model, loss_fn, batches, 1, 5).error.isnan().all()


def test_attention_switches_to_the_math_kernel_and_says_so() -> None:
    torch.manual_seed(4)
    net, x, y = Attention(), torch.randn(3, 5, 4), torch.zeros(3, 2)
    with pytest.warns(UserWarning, match="math kernel") as caught:
        found = top_eigenvalues(net, mse, [(x, y)], k=2)
    assert len(caught) == 1  # once, not per product
    assert any("math kernel" in name for name in found.substitutes)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        dense = dense_hessian(net, mse, (x, y))
    torch.testing.assert_close(found.values, torch.linalg.eigvalsh(dense.double()).flip(0)[:2], rtol=1e-4, atol=1e-6)
    with pytest.warns(UserWarning, match="math kernel"):
        assert trace(net, mse, [(x, y)], num_samples=2).substitutes == found.substitutes


def test_a_loss_that_draws_is_the_same_loss_after_the_switch() -> None:
    torch.manual_seed(0)
    model, batch = Attention().double(), (torch.randn(6, 5, 4).double(), torch.zeros(6, 2).double())

    def noisy(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x + torch.randn_like(x)), y)

    with pytest.warns(UserWarning, match="math kernel"):
        found = top_eigenvalues(model, noisy, [batch], k=1, tol=1e-6)
    with sdpa_kernel(SDPBackend.MATH):
        expected = top_eigenvalues(model, noisy, [batch], k=1, tol=1e-6)
    assert found.num_products == expected.num_products
    torch.testing.assert_close(found.values, expected.values, rtol=1e-10, atol=0)


@pytest.mark.filterwarnings("ignore:a kernel has no second derivative")
def test_recurrent_layers() -> None:
    torch.manual_seed(4)
    net, x, y = Recurrent(), torch.randn(3, 5, 3), torch.zeros(3, 1)
    found = top_eigenvalues(net, mse, [(x, y)], k=2)
    exact = torch.linalg.eigvalsh(dense_hessian(net, mse, (x, y)).double()).flip(0)[:2]
    torch.testing.assert_close(found.values, exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dynamic", [False, True])  # torch complains of either in words of its own
def test_compiled_models_are_measured_eagerly(dynamic: bool) -> None:
    model, loss_fn, batches = problems()["mlp, one batch"]
    expected = top_eigenvalues(model, loss_fn, batches, k=1).values
    compiled = torch.compile(model, backend="aot_eager", dynamic=dynamic)
    with pytest.warns(UserWarning, match="eager"):
        found = top_eigenvalues(compiled, loss_fn, batches, k=1).values
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_an_unrelated_runtime_error_comes_through() -> None:
    def failing(model: nn.Module, batch: Any) -> Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        top_eigenvalues(mlp(), failing, ONE)


def test_bfloat16_is_measured_in_its_own_precision_and_says_how_well() -> None:
    model = convnet(torch.float32)
    exact = top_eigenvalues(model, cross_entropy, unequal_batches(torch.float32), k=2).values
    model.bfloat16()
    found = top_eigenvalues(model, cross_entropy, unequal_batches(torch.bfloat16), k=2, max_products=60)
    torch.testing.assert_close(found.values, exact, rtol=0.1, atol=0)
    assert (found.residuals > 1e-4 * found.values).all()  # the explicit residual, not the recurrence's wishful one
    estimate = trace(model, cross_entropy, unequal_batches(torch.bfloat16), num_samples=20)
    assert estimate.value > 0


def test_a_model_of_two_precisions_has_residuals_of_the_coarser() -> None:
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


def test_a_flat_bowl_of_many_halves_does_not_vanish() -> None:
    """A unit vector of 1e6 entries times a curvature of 1e-4 is 1e-7, next to the smallest float16."""
    bowl = Bowl([0.0], [0.0])
    bowl.theta = nn.Parameter(torch.zeros(1_000_000, dtype=torch.float16))
    with LossSurface(bowl, lambda m, _: 0.5e-4 * m.theta.float().square().sum(), ONE) as surface:
        hessian = HessianOperator(surface)
        v = torch.full((hessian.size,), hessian.size**-0.5)
        out = torch.empty_like(v)
        hessian(v, out)
    torch.testing.assert_close(out, 1e-4 * v, rtol=1e-2, atol=0)


def test_autocast_is_measured_in_its_own_precision_and_says_how_well() -> None:
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


def test_a_kept_graph_changes_nothing() -> None:
    model, loss_fn, batches = problems()["mlp, one batch"]
    kept, fresh = (top_eigenvalues(model, loss_fn, batches, keep_graph=keep).values for keep in (True, False))
    torch.testing.assert_close(kept, fresh, rtol=1e-6, atol=0)
    calls = 0

    def counting(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return loss_fn(model, batch)

    top_eigenvalues(model, counting, batches, k=3, keep_graph=True)
    assert calls == 1
    calls = 0
    top_eigenvalues(model, counting, lambda: iter(batches), k=3, keep_graph=True)  # of unknown length at first
    assert calls == 2
    calls = 0
    assert top_eigenvalues(model, counting, batches, k=3).num_products == calls


class Stream(torch.utils.data.IterableDataset[Any]):
    """Examples of which nobody knows how many there are."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __iter__(self) -> Any:
        return zip(*self.batch, strict=True)


def test_a_loader_that_does_not_know_its_length() -> None:
    model, batch = convnet(), images()
    loader = torch.utils.data.DataLoader(Stream(batch), batch_size=5)
    found = top_eigenvalues(model, cross_entropy, loader, k=2, keep_graph=True)
    expected = top_eigenvalues(model, cross_entropy, [batch], k=2)
    torch.testing.assert_close(found.values, expected.values, rtol=1e-8, atol=1e-10)


def test_products_are_linear_and_symmetric() -> None:
    model, loss_fn, batches = problems()["convnet with BatchNorm and SiLU"]
    with LossSurface(model, loss_fn, batches) as surface:
        hessian = HessianOperator(surface)
        u, v = torch.randn(2, hessian.size)
        hu, hv, both = (torch.empty(hessian.size) for _ in range(3))
        hessian(u, hu)
        hessian(v, hv)
        hessian(u + 2 * v, both)
    torch.testing.assert_close(both, hu + 2 * hv, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(u @ hv, v @ hu, rtol=1e-3, atol=1e-3)


def test_not_converged_is_said() -> None:
    model, loss_fn, batches = problems()["mlp, one batch"]
    found = top_eigenvalues(model, loss_fn, batches, k=3, tol=1e-12, max_products=5)
    assert found.num_products == 5
    assert not found.converged.all()


def test_more_eigenvalues_than_parameters_are_all_of_them() -> None:
    found = top_eigenvalues(Bowl([1.0, 3.0], [0.0, 1.0]), call, ONE, k=5)
    torch.testing.assert_close(found.values, torch.tensor([3.0, 1.0], dtype=torch.float64))
    zero = top_eigenvalues(Unused(), lambda m, _: m.linear.sum(), ONE, k=2)
    assert zero.values.tolist() == [0.0, 0.0]


def test_direction_has_the_shapes_of_the_parameters() -> None:
    model, loss_fn, batches = problems()["mlp, one batch"]
    found = top_eigenvalues(model, loss_fn, batches, k=1)
    direction = found.direction(0)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: d.shape for n, d in direction.items()}
    assert torch.cat([d.flatten() for d in direction.values()]).norm() == pytest.approx(1, rel=1e-5)


def test_a_second_derivative_that_is_not_finite_is_a_clear_error() -> None:
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
def test_rounding_is_not_taken_for_a_range_of_eigenvalues(dtype: torch.dtype) -> None:
    """Inputs in orthonormal columns: the Hessian is a multiple of the identity, but for rounding."""
    columns = torch.linalg.qr(torch.randn(64, 8, generator=torch.Generator().manual_seed(0), dtype=dtype)).Q
    data = [(columns * 8, torch.zeros(64, 1, dtype=dtype))]
    found = spectral_density(nn.Linear(8, 1, bias=False, dtype=dtype), mse, data)
    assert found.width == pytest.approx(2 / 100, rel=1e-3)
    assert float(torch.trapezoid(found.values, found.grid)) == pytest.approx(1, abs=1e-3)


def test_eigenpairs_of_other_shapes_do_not_deflate() -> None:
    model, wider = nn.Linear(2, 1), nn.Linear(3, 1)
    pairs = top_eigenvalues(wider, mse, [(torch.randn(8, 3), torch.randn(8, 1))], k=1)
    with pytest.raises(ValueError, match="other parameters"):
        trace(model, mse, [(torch.randn(8, 2), torch.randn(8, 1))], num_samples=2, deflate=pairs)


def test_eigenpairs_of_another_precision_deflate() -> None:
    model, data = nn.Linear(2, 1).double(), [(torch.randn(8, 2).double(), torch.randn(8, 1).double())]
    pairs = top_eigenvalues(copy.deepcopy(model).float(), mse, [(x.float(), y.float()) for x, y in data], k=3)
    found = trace(model, mse, data, num_samples=2, deflate=pairs)
    assert found.value == pytest.approx(float(dense_hessian(model, mse, data[0]).trace()), rel=1e-6)


@pytest.mark.parametrize(
    ("measure", "options"),
    [
        (top_eigenvalues, {"k": 0}),
        (top_eigenvalues, {"k": 3, "basis_size": 3}),
        (top_eigenvalues, {"which": "middle"}),
        (trace, {"num_samples": 1}),
        (spectral_density, {"num_probes": 0}),
        (spectral_density, {"width": 0.0}),
    ],
)
def test_bad_arguments(measure: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        measure(mlp(), cross_entropy, ONE, **options)


# ---------------------------------------------------------------- the iteration itself


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
def test_restarts_keep_what_was_found(basis_size: int) -> None:
    random = torch.Generator().manual_seed(0)
    bulk = torch.rand(5000, generator=random, dtype=torch.float64) * 150
    operator = Diagonal(torch.cat([torch.tensor([342.0, 304.0, 260.0, 252.0, 210.0, 205.0]).double(), bulk]))
    found = thick_restart(operator, fill, 5, basis_size=basis_size, tol=1e-6, max_products=2000)
    assert found.converged.all()
    torch.testing.assert_close(found.values, operator.values[:5], rtol=1e-9, atol=0)
    torch.testing.assert_close(found.vectors[:, :5].abs(), torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-3)


def test_float32_sums_over_millions_keep_their_digits() -> None:
    """One naive float32 norm over 4e6 entries is off by more than this."""
    values = torch.full((4_000_000,), 0.01)
    values[:3] = torch.tensor([30.0, 20.0, 10.0])
    found = thick_restart(Diagonal(values), fill, 2, basis_size=6, tol=1e-4, max_products=40)
    torch.testing.assert_close(found.values, torch.tensor([30.0, 20.0]).double(), rtol=3e-6, atol=0)


def test_an_exhausted_krylov_space_is_refilled() -> None:
    """Three distinct eigenvalues: one start sees three; the copies need fresh directions.

    It has no part at all in the copies: of a random start rounding brings some in, other ones on other processors.
    """
    operator = Diagonal(torch.tensor([5.0, 2.0, 1.0, 5.0, 5.0, 2.0, 1.0, 1.0], dtype=torch.float64))

    def start(vector: Tensor) -> None:
        fill(vector.zero_()[:3])

    found = thick_restart(operator, start, 4, basis_size=8, tol=1e-8, max_products=100)
    torch.testing.assert_close(found.values, torch.tensor([5.0, 5.0, 5.0, 2.0], dtype=torch.float64))


@pytest.mark.parametrize("k", [1, 2])
def test_an_outlier_is_not_taken_for_the_bulk(k: int) -> None:
    """A random start is an eigenvector of the bulk to within the tolerance, and the outlier is not in it."""
    values = torch.ones(10_000, dtype=torch.float64)
    values[3] = 1.05
    found = thick_restart(Diagonal(values), fill, k, basis_size=6, tol=1e-3, max_products=100)
    assert found.values[0].item() == pytest.approx(1.05)


@pytest.mark.parametrize("which", ["largest", "smallest"])
@pytest.mark.parametrize("size", [10, 30, 100, 300])
def test_a_residual_is_no_less_than_rounding(size: int, which: Any) -> None:
    """Some eigenvalue lies within the residual of each value, in float32 too, on whatever processor."""
    for seed in range(10):
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


def test_agrees_with_curvlinops_where_installed() -> None:
    curvlinops = pytest.importorskip("curvlinops", exc_type=ImportError)
    model, loss_fn, batches = problems()["mlp, unequal batches"]
    model = nn.Sequential(*[nn.Tanh() if isinstance(m, nn.SiLU) else m for m in model])  # its product has no SiLU
    params = [p for p in model.parameters() if p.requires_grad]
    theirs = curvlinops.HessianLinearOperator(model, nn.CrossEntropyLoss(), params, batches)
    with LossSurface(model, loss_fn, batches) as surface:
        hessian = HessianOperator(surface)
        v, out = torch.randn(hessian.size), torch.empty(hessian.size)
        hessian(v, out)
    torch.testing.assert_close(theirs @ v, out, rtol=1e-4, atol=1e-5)


def test_images_are_seen() -> None:
    """The fixture has outliers to find: guards the tests above against a trivial Hessian."""
    assert top_eigenvalues(convnet(), cross_entropy, [images()], k=1).values[0] > 0.1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(
    "make", [Attention, Recurrent, lambda: convnet(torch.float32)], ids=["attention", "lstm", "conv"]
)
@pytest.mark.filterwarnings("ignore:a kernel has no second derivative")
def test_a_gpu_agrees_with_the_dense_hessian(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(4)
    net = make()
    batch = {Attention: (torch.randn(3, 5, 4), torch.zeros(3, 2)), Recurrent: (torch.randn(3, 5, 3), torch.zeros(3, 1))}
    loss_fn, data = (mse, batch[make]) if make in batch else (cross_entropy, images(dtype=torch.float32))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        exact = torch.linalg.eigvalsh(dense_hessian(net, loss_fn, data).double()).flip(0)[:2]
    found = top_eigenvalues(net.cuda(), loss_fn, [data], k=2)
    torch.testing.assert_close(found.values, exact, rtol=1e-4, atol=1e-6)
    assert found.vectors.is_cuda
    assert bool(found.substitutes) == (make in batch)
