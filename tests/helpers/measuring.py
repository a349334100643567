"""Small problems with known curvature, and the table of measurements that must all keep the same promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tiltsam import curvature, landscape, sharpness
from tiltsam.flatness.loss_surface import supervised
from tiltsam.lab import flatness

Loss = Callable[[nn.Module, Any], Tensor]
mse = supervised(F.mse_loss)
cross_entropy = supervised(F.cross_entropy)


class Bowl(nn.Module):
    """``loss = 1/2 sum lambda theta^2``: everything is known in closed form. The batch is ignored."""

    def __init__(self, lambdas: list[float], theta: list[float]) -> None:
        super().__init__()
        self.register_buffer("lambdas", torch.tensor(lambdas, dtype=torch.float64))
        self.theta = nn.Parameter(torch.tensor(theta, dtype=torch.float64))

    def forward(self, _: Any) -> Tensor:
        return 0.5 * (self.lambdas * self.theta.square()).sum()


def call(model: nn.Module, batch: Any) -> Tensor:
    """The loss is what the model returns."""
    return model(batch)


def images(num: int = 12, *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    return torch.randn(num, 2, 6, 6, generator=random).to(dtype), torch.arange(num) % 3


def convnet(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Convolution, BatchNorm with statistics of its own, SiLU, dropout: all that eval mode is about."""
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.SiLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(48, 3)
    ).to(dtype)
    model(images(dtype=dtype)[0])  # moves the running statistics away from 0 and 1
    return model


def unequal_batches(dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    x, y = images(dtype=dtype)
    return [(x[:7], y[:7]), (x[7:], y[7:])]


def dense_hessian(model: nn.Module, loss_fn: Loss, batch: Any, names: list[str] | None = None) -> Tensor:
    """The Hessian in eval mode by brute force, one row per parameter."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    params = [p for n, p in model.named_parameters() if p.requires_grad and (names is None or n in names)]
    grads = torch.autograd.grad(loss_fn(model, batch), params, create_graph=True, allow_unused=True)
    flat = torch.cat(
        [(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in zip(grads, params, strict=True)]
    )
    rows = []
    for entry in flat:
        if entry.requires_grad:
            row = torch.autograd.grad(entry, params, retain_graph=True, allow_unused=True)
        else:
            row = (None,) * len(params)
        rows.append(
            torch.cat([(torch.zeros_like(p) if r is None else r).reshape(-1) for r, p in zip(row, params, strict=True)])
        )
    for module, mode in modes:
        module.training = mode
    return torch.stack(rows).detach()


class Slope(nn.Module):
    """``loss = a . theta``."""

    def __init__(self, a: list[float], theta: list[float]) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(theta, dtype=torch.float64))
        self.register_buffer("a", torch.tensor(a, dtype=torch.float64))

    def forward(self, _: Any) -> Tensor:
        return self.a @ self.theta


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
        "unused and linear": (Unused(), call, [torch.ones(1)]),
    }


def whole(batches: list[Any]) -> Any:
    """All batches as one."""
    if isinstance(batches[0], Tensor):
        return batches[0]
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def _slice(model: nn.Module, loss_fn: Loss, batches: Any) -> Any:
    return landscape.slice_1d(model, loss_fn, batches, landscape.random_direction(model), num_points=3).losses


def _plane(model: nn.Module, loss_fn: Loss, batches: Any) -> Any:
    x, y = (landscape.random_direction(model, index=i) for i in (0, 1))
    return landscape.slice_2d(model, loss_fn, batches, x, y, num_points=2).losses


def _between(model: nn.Module, loss_fn: Loss, batches: Any) -> Any:
    other = {name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in model.state_dict().items()}
    return landscape.between(model, loss_fn, batches, model, other, num_points=3).losses


MEASUREMENTS: dict[str, Callable[[nn.Module, Loss, Any], Any]] = {
    "neighborhood": lambda m, f, b: sharpness.neighborhood(m, f, b, std=0.1, num_samples=3, t=1.0).losses,
    "m_sharpness": lambda m, f, b: sharpness.m_sharpness(m, f, b, rho=0.1).rises,
    "adaptive": lambda m, f, b: sharpness.m_sharpness(m, f, b, rho=0.1, adaptive=True, random_start=True).rises,
    "random_start": lambda m, f, b: sharpness.m_sharpness(m, f, b, rho=0.1, random_start=True).rises,
    "cross_objectives": lambda m, f, b: torch.tensor(
        [e.loss for e in sharpness.cross_objectives({"": m}, f, b).entries], device="cpu"
    ),
    "top_eigenvalues": lambda m, f, b: curvature.top_eigenvalues(m, f, b, k=2, tol=0.1).values,
    "trace": lambda m, f, b: curvature.trace(m, f, b, num_samples=3).samples,
    "spectral_density": lambda m, f, b: curvature.spectral_density(m, f, b, num_probes=2, num_steps=4).nodes,
    "slice_1d": _slice,
    "slice_2d": _plane,
    "between": _between,
    "measure": lambda m, f, b: (
        flatness.measure(
            "x",
            m,
            f,
            b,
            flatness.FlatnessPlan(
                std=(0.1,),
                num_samples=2,
                num_ascent_steps=2,
                bits=(4,),
                num_eigenvalues=1,
                num_trace_samples=2,
                num_density_steps=4,
                num_points=3,
            ),
        ).neighborhood.losses
    ),
}
