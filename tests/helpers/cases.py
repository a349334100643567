"""Tables that drive the tests: every method, problems to run it on, and arguments that must be refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import tiltsam
from helpers import vasso
from tiltsam import samplers


@dataclass(frozen=True)
class Method:
    """A way to wrap a base optimizer, and what one step of it costs."""

    name: str
    cls: type[tiltsam.SharpnessAware]
    kwargs: dict[str, Any] = field(default_factory=dict)
    forwards: int = 2
    backwards: int = 2
    period: int = 1
    """Steps from one of these to the next; those between take one pass."""

    def forwards_at(self, step: int) -> int:
        """Return the forward passes of a step, 0 being the first."""
        return self.forwards if step % self.period == 0 else 1

    def __call__(self, base: torch.optim.Optimizer, **more: Any) -> tiltsam.SharpnessAware:
        return self.cls(base, **{**self.kwargs, **more})

    def __repr__(self) -> str:
        return self.name


TSAM_METHODS = [
    Method("tsam", tiltsam.TSAM, {"t": 5.0, "rho": 0.05, "radius": 0.1, "num_samples": 3}, 6, 6),
    Method("tsam-s1", tiltsam.TSAM, {"num_samples": 1, "rho": 0.05}, 2, 2),
    Method("tsam-shared", tiltsam.TSAM, {"share_ascent": True, "rho": 0.05, "num_samples": 3}, 4, 4),
    Method("tsam-uniform", tiltsam.TSAM, {"sampler": "uniform", "radius": 0.1, "num_samples": 3}, 3, 3),
    Method("tsam-gaussian", tiltsam.TSAM, {"sampler": "gaussian", "radius": 0.1, "num_samples": 3}, 3, 3),
    Method(
        "tsam-gaussian-start",
        tiltsam.TSAM,
        {"sampler": samplers.Ascent(samplers.Gaussian(clip=True)), "radius": 0.1, "num_samples": 3},
        6,
        6,
    ),
    Method(
        "tsam-hmc",
        tiltsam.TSAM,
        {"sampler": samplers.HMC(num_steps=2, step_size=0.02), "radius": 0.1, "num_samples": 2},
        6,
        6,
    ),
]
METHODS = [
    Method("erm", tiltsam.ERM, {}, 1, 1),
    Method("sam", tiltsam.SAM, {"rho": 0.05}),
    Method("asam", tiltsam.ASAM, {"rho": 0.5}),
    Method("esam2", tiltsam.LineSearchSAM, {"rho": 0.05, "num_points": 4}, 6, 2),
    Method("pgn", tiltsam.PGN, {"rho": 0.05, "alpha": 0.7}),
    Method("rsam", tiltsam.RSAM, {"rho": 0.05, "gamma": 0.05}),
    *TSAM_METHODS,
    Method("gsam", tiltsam.GSAM, {"rho": 0.05}),
    Method("looksam", tiltsam.LookSAM, {"rho": 0.05, "k": 3}, period=3),
    Method("friendlysam", tiltsam.FriendlySAM, {"rho": 0.05}),
    Method("wsam", tiltsam.WSAM, {"rho": 0.05, "gamma": 0.7}),
    Method("usam", tiltsam.USAM, {"rho": 0.05}),
    Method("momentumsam", tiltsam.MomentumSAM, {"rho": 0.05}, 1, 1),
    Method("vasso", vasso.VaSSO, {"rho": 0.05}),  # a user's method, with a state vector
]


def sgd(params: Any, **kwargs: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, **{"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4, **kwargs})


class Net(nn.Module):
    """Small, with everything a step can trip over: BatchNorm, dropout, a tied, a frozen, an unused, an empty tensor."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.tied = nn.Linear(8, 8, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(8, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(5))
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.norm(self.first(x)))
        h = self.tied(self.dropout(torch.tanh(self.tied(h))))
        return self.last(h) * self.frozen + self.empty.sum()


class Problem:
    """A model, a batch, and the closure a user would write."""

    def __init__(
        self,
        model: nn.Module | None = None,
        dtype: torch.dtype = torch.float64,
        batch: int = 16,
        dropout: float = 0.2,
    ) -> None:
        torch.manual_seed(1)
        self.model = (Net(dropout) if model is None else model).to(dtype)
        self.x = torch.randn(batch, 6, dtype=dtype)
        self.y = torch.randint(3, (batch,))

    def loss(self) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(self.x), self.y)

    def closure(self) -> torch.Tensor:
        loss = self.loss()
        loss.backward()
        return loss

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def backward(loss: torch.Tensor) -> torch.Tensor:
    """Run backward and return the loss, as a closure does."""
    loss.backward()
    return loss


def train(problem: Problem, optimizer: torch.optim.Optimizer, steps: int, scheduler: Any = None) -> None:
    for _ in range(steps):
        optimizer.step(problem.closure)
        if scheduler is not None:
            scheduler.step()


def lookahead(params: Any) -> Any:
    """A base whose state dict has neither "state" nor "param_groups"."""
    pytorch_optimizer = pytest.importorskip("pytorch_optimizer")
    return pytorch_optimizer.Lookahead(sgd(params), k=3)


def quadratic_problem(dtype: torch.dtype = torch.float64) -> tuple[nn.Parameter, Callable[[], torch.Tensor]]:
    """One vector, loss ½ θᵀ diag(1..5) θ."""
    theta = nn.Parameter(torch.linspace(-1, 1, 5, dtype=dtype))
    curvature = torch.arange(1.0, 6.0, dtype=dtype)

    def closure() -> torch.Tensor:
        loss = 0.5 * (curvature * theta.square()).sum()
        loss.backward()
        return loss

    return theta, closure


BAD_ARGUMENTS: list[tuple[type[tiltsam.SharpnessAware], dict[str, Any], str]] = [
    # The message names the argument and shows the value.
    (tiltsam.SAM, {"rho": -0.1}, "rho .*-0.1"),
    (tiltsam.SAM, {"rho": float("nan")}, "rho .*nan"),
    (tiltsam.SAM, {"rho": "0.1"}, "rho .*'0.1'"),
    (tiltsam.TSAM, {"t": -1.0}, "t .*-1.0"),
    (tiltsam.TSAM, {"t": float("inf")}, "t .*inf"),
    (tiltsam.TSAM, {"radius": -1.0}, "radius .*-1.0"),
    (tiltsam.TSAM, {"t": 1.0, "delta": 2.0}, "delta .*2.0 .*1.0"),
    (tiltsam.TSAM, {"delta": -2.0}, "delta .*-2.0"),
    (tiltsam.TSAM, {"num_samples": 0}, "num_samples .*got 0"),
    (tiltsam.TSAM, {"num_samples": 1.5}, "num_samples .*1.5"),
    (tiltsam.TSAM, {"sampler": "nuts"}, "sampler .*'nuts'"),
    (tiltsam.TSAM, {"sampler": "uniform", "share_ascent": True}, "share_ascent .*'uniform'"),
    (tiltsam.TSAM, {"seed": -1}, "seed .*-1"),
    (tiltsam.PGN, {"alpha": 1.5}, "alpha .*1.5"),
    (tiltsam.RSAM, {"gamma": -1.0}, "gamma .*-1.0"),
    (tiltsam.RSAM, {"lam": -1.0}, "lam .*-1.0"),
    (tiltsam.ASAM, {"eta": -1.0}, "eta .*-1.0"),
    (tiltsam.LineSearchSAM, {"num_points": 0}, "num_points .*got 0"),
    (tiltsam.GSAM, {"alpha": -1.0}, "alpha .*-1.0"),
    (tiltsam.LookSAM, {"alpha": -1.0}, "alpha .*-1.0"),
    (tiltsam.LookSAM, {"k": 0}, "k .*got 0"),
    (tiltsam.FriendlySAM, {"sigma": -1.0}, "sigma .*-1.0"),
    (tiltsam.FriendlySAM, {"lam": 1.0}, "lam .*1.0"),
    (tiltsam.WSAM, {"gamma": 1.0}, "gamma .*1.0"),
    (tiltsam.USAM, {"power": -1.0}, "power .*-1.0"),
    (tiltsam.MomentumSAM, {"beta": 1}, "beta .*got 1"),
]
