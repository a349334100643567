"""Hessian products: kernels without a second derivative, precision, kept graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from helpers.measuring import Bowl, convnet, cross_entropy, dense_hessian, images, mlp, mse, problems
from tiltsam.curvature import top_eigenvalues, trace
from tiltsam.flatness.hessian import HessianOperator
from tiltsam.flatness.loss_surface import LossSurface

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


def test_attention_uses_math_kernel_and_warns_once() -> None:
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


def test_random_loss_is_repeated_after_substitution() -> None:
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
def test_recurrent_layers_match_dense_hessian() -> None:
    torch.manual_seed(4)
    net, x, y = Recurrent(), torch.randn(3, 5, 3), torch.zeros(3, 1)
    found = top_eigenvalues(net, mse, [(x, y)], k=2)
    exact = torch.linalg.eigvalsh(dense_hessian(net, mse, (x, y)).double()).flip(0)[:2]
    torch.testing.assert_close(found.values, exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dynamic", [False, True])  # torch complains of either in words of its own
def test_compiled_model_runs_eagerly(dynamic: bool) -> None:
    model, loss_fn, batches = problems()["mlp, one batch"]
    expected = top_eigenvalues(model, loss_fn, batches, k=1).values
    compiled = torch.compile(model, backend="aot_eager", dynamic=dynamic)
    with pytest.warns(UserWarning, match="eager"):
        found = top_eigenvalues(compiled, loss_fn, batches, k=1).values
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_unrelated_runtime_error_propagates() -> None:
    def failing(model: nn.Module, batch: Any) -> Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        top_eigenvalues(mlp(), failing, ONE)


def test_float16_product_does_not_underflow() -> None:
    """A unit vector of 1e6 entries times a curvature of 1e-4 is 1e-7, next to the smallest float16."""
    bowl = Bowl([0.0], [0.0])
    bowl.theta = nn.Parameter(torch.zeros(1_000_000, dtype=torch.float16))
    with LossSurface(bowl, lambda m, _: 0.5e-4 * m.theta.float().square().sum(), ONE) as surface:
        hessian = HessianOperator(surface)
        v = torch.full((hessian.size,), hessian.size**-0.5)
        out = torch.empty_like(v)
        hessian(v, out)
    torch.testing.assert_close(out, 1e-4 * v, rtol=1e-2, atol=0)


def test_keep_graph_gives_equal_products() -> None:
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


def test_loader_without_length() -> None:
    model, batch = convnet(), images()
    loader = torch.utils.data.DataLoader(Stream(batch), batch_size=5)
    found = top_eigenvalues(model, cross_entropy, loader, k=2, keep_graph=True)
    expected = top_eigenvalues(model, cross_entropy, [batch], k=2)
    torch.testing.assert_close(found.values, expected.values, rtol=1e-8, atol=1e-10)


def test_product_matches_curvlinops() -> None:
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(
    "make", [Attention, Recurrent, lambda: convnet(torch.float32)], ids=["attention", "lstm", "conv"]
)
@pytest.mark.filterwarnings("ignore:a kernel has no second derivative")
def test_gpu_matches_dense_hessian(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
