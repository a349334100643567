"""Many chains at once on a function that is known: the second implementation of :class:`~tiltsam.space.Space`.

The kernels of :mod:`tiltsam.samplers` run here unchanged, thousands of independent copies side by side, so that what
trains networks can be held against exact densities and exact gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from tiltsam.samplers import Draw, Sampler, drawn
from tiltsam.space import EPS, Evaluation, Spread
from tiltsam.tilting import tilted_weights

__all__ = ["ChainSpace", "sample_chains", "tilted_gradients"]

Loss: TypeAlias = Callable[[Tensor], Tensor]
"""Differentiable, from points (chains, d) to losses (chains,)."""


class ChainSpace:
    """``num_chains`` copies of one centre θ; a vector is a tensor (chains, d), a scalar a tensor (chains,).

    Args:
        loss: The function, differentiable by autograd.
        center: θ, of shape (d,).
        num_chains: How many.
        rho: Length of the ascent.
        radius: Radius of the neighbourhood.
        delta: Tilt of the sampler.
        seed: All chains draw from one stream.
        settings: Further numbers that a kernel asks for by name.
    """

    def __init__(
        self,
        loss: Loss,
        center: Tensor,
        num_chains: int,
        *,
        rho: float = 0.0,
        radius: float = 1.0,
        delta: float = 0.0,
        seed: int = 0,
        settings: Mapping[str, float] | None = None,
    ) -> None:
        self.loss = loss
        self.dim = center.numel()
        self.center = center.expand(num_chains, self.dim)
        self.point = self.center.clone()
        self.noisy, self.ascending = radius != 0, rho != 0
        self._numbers = {"rho": rho, "radius": radius, "delta": delta, **(settings or {})}
        self._generator = torch.Generator(center.device).manual_seed(seed)
        self._scratch: dict[str, Tensor] = {}

    @property
    def rho(self) -> Tensor:
        """See :class:`~tiltsam.space.Space`."""
        return self.setting("rho")

    @property
    def radius(self) -> Tensor:
        """See :class:`~tiltsam.space.Space`."""
        return self.setting("radius")

    @property
    def delta(self) -> Tensor:
        """See :class:`~tiltsam.space.Space`."""
        return self.setting("delta")

    def setting(self, name: str) -> Tensor:
        """See :class:`~tiltsam.space.Space`; one entry per chain."""
        return self.center.new_full((len(self.center),), self._numbers[name])

    def evaluate(self, *, ascent: bool = False, after: Evaluation | None = None) -> Evaluation:
        """See :class:`~tiltsam.space.Space`."""
        with torch.enable_grad():
            point = self.point.detach().requires_grad_()
            loss = self.loss(point)
            (gradient,) = torch.autograd.grad(loss.sum(), point)
        norm = self.norm(gradient)
        finite = loss.isfinite() & norm.isfinite()
        if after is not None:
            finite = finite & after.finite
        return Evaluation(loss.detach(), gradient, norm.masked_fill(~finite, 0.0), finite)

    def forward(self) -> Tensor:
        """See :class:`~tiltsam.space.Space`."""
        return self.loss(self.point)

    def go_home(self) -> None:
        """See :class:`~tiltsam.space.Space`."""
        self.point.copy_(self.center)

    def scatter(self, sample: int, spread: Spread) -> None:
        """See :class:`~tiltsam.space.Space`."""
        self.normal_(self.point, sample)
        self.scale_(self.point, spread.scale(self.norm(self.point), lambda: self.uniform(sample), self.dim))
        self.point.add_(self.center)

    def climb(self, at: Evaluation, rho: Tensor) -> None:
        """See :class:`~tiltsam.space.Space`."""
        self.keep_(at.gradient, at.finite)
        self.add_scaled_(self.point, at.gradient, rho / (at.norm + EPS))

    def normal_(self, x: Tensor, sample: int) -> None:
        """See :class:`~tiltsam.space.Space`."""
        x.normal_(generator=self._generator)

    def uniform(self, sample: int) -> Tensor:
        """See :class:`~tiltsam.space.Space`."""
        shape, like = len(self.center), self.center
        return torch.rand(shape, generator=self._generator, dtype=like.dtype, device=like.device)

    def vector(self, name: str) -> Tensor:
        """See :class:`~tiltsam.space.Space`."""
        return self._scratch.setdefault(name, torch.zeros_like(self.point))

    def save(self, name: str, x: Tensor) -> Tensor:
        """See :class:`~tiltsam.space.Space`."""
        return self.vector(name).copy_(x)

    def kept(self, name: str) -> Tensor:
        """See :class:`~tiltsam.space.Space`."""
        return self.vector(f"kept {name}")

    def norm(self, x: Tensor) -> Tensor:
        """See :class:`~tiltsam.space.Space`."""
        norms: Tensor = torch.linalg.vector_norm(x, dim=1)
        return norms

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        """See :class:`~tiltsam.space.Space`."""
        return (x * y).sum(1)

    def copy_(self, x: Tensor, y: Tensor) -> None:
        """See :class:`~tiltsam.space.Space`."""
        x.copy_(y)

    def scale_(self, x: Tensor, scale: Tensor) -> None:
        """See :class:`~tiltsam.space.Space`."""
        x.mul_(scale[:, None])

    def add_(self, x: Tensor, y: Tensor, alpha: float = 1.0) -> None:
        """See :class:`~tiltsam.space.Space`."""
        x.add_(y, alpha=alpha)

    def add_scaled_(self, x: Tensor, y: Tensor, scale: Tensor) -> None:
        """See :class:`~tiltsam.space.Space`."""
        x.add_(y * scale[:, None])

    def stretch_(self, x: Tensor, w: Tensor, eta: Tensor) -> None:
        """See :class:`~tiltsam.space.Space`."""
        x.mul_(w.abs() + eta)

    def keep_(self, x: Tensor, mask: Tensor) -> None:
        """See :class:`~tiltsam.space.Space`."""
        x.masked_fill_(~mask[:, None], 0.0)

    def select_(self, x: Tensor, y: Tensor, mask: Tensor) -> None:
        """See :class:`~tiltsam.space.Space`."""
        x.copy_(torch.where(mask[:, None], y, x))

    def map_(self, x: Tensor, function: Callable[..., Tensor], *others: Tensor) -> None:
        """See :class:`~tiltsam.space.Space`. Each chain is a vector of its own."""
        x.copy_(torch.vmap(function)(x, *others))

    def filter_norms(self, x: Tensor) -> Tensor:
        """See :class:`~tiltsam.space.Space`. Each chain is one filter."""
        return self.norm(x)[:, None]


def sample_chains(sampler: Sampler, space: ChainSpace, num_samples: int = 1) -> tuple[list[Draw], Tensor]:
    """Run a kernel for s samples on every chain.

    Returns:
        The draws, and the perturbations ε of shape (s, chains, d).
    """
    with torch.no_grad():
        state = sampler.begin(space)
        draws, points = [], []
        for j in range(num_samples):
            draw, state = drawn(sampler, space, j, state)
            draws.append(draw._replace(gradient=draw.gradient.clone()))
            points.append(space.point - space.center)
    return draws, torch.stack(points)


def tilted_gradients(sampler: Sampler, space: ChainSpace, t: float, num_samples: int) -> Tensor:
    """Each chain's estimate of the gradient of the tilted loss by Algorithm 1, of shape (chains, d).

    The weights are ``softmax((t − δ) L_j)`` with the space's δ. The spread over chains is the estimator's variance, the
    distance of their mean from the exact gradient its bias.
    """
    draws, _ = sample_chains(sampler, space, num_samples)
    losses = torch.stack([d.loss for d in draws])
    tilt = t - float(space.delta[0])
    weights = torch.vmap(lambda column: tilted_weights(column, tilt), in_dims=1, out_dims=1)(losses)
    return (weights[..., None] * torch.stack([d.gradient for d in draws])).sum(0)
