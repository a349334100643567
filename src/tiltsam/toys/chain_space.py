"""A :class:`~tiltsam.space.Space` of many independent chains on a known function.

The samplers of :mod:`tiltsam.samplers` run here unchanged, thousands of copies at once, so that they can be tested
against exact densities and exact gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from tiltsam.samplers import Draw, Sampler
from tiltsam.space import EPS, Evaluation, Spread

__all__ = ["ChainSpace", "Loss", "sample_chains"]

Loss: TypeAlias = Callable[[Tensor], Tensor]
"""A differentiable function from points (chains, d) to losses (chains,)."""


class ChainSpace:
    """``num_chains`` copies of one center θ. A vector is a tensor (chains, d), a scalar a tensor (chains,).

    Args:
        loss: The function, differentiable by autograd.
        center: θ, of shape (d,).
        num_chains: Number of chains.
        rho: Length of the ascent.
        radius: Radius of the neighbourhood.
        delta: Tilt of the sampler.
        seed: Seed of the one generator that all chains draw from.
        settings: Further numbers that a sampler reads by name.
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
        self._settings = {"rho": rho, "radius": radius, "delta": delta, **(settings or {})}
        self._generator = torch.Generator(center.device).manual_seed(seed)
        self._vectors: dict[str, Tensor] = {}

    @property
    def rho(self) -> Tensor:
        """Length of the ascent, one entry per chain."""
        return self.setting("rho")

    @property
    def radius(self) -> Tensor:
        """Radius of the neighbourhood, one entry per chain."""
        return self.setting("radius")

    def setting(self, name: str) -> Tensor:
        """Return a setting by name, one entry per chain."""
        return self.center.new_full((len(self.center),), self._settings[name])

    def evaluate(self, *, ascent: bool = False, after: Evaluation | None = None) -> Evaluation:
        """Return loss and gradient at ``point``; not finite where ``after`` is not."""
        with torch.enable_grad():
            point = self.point.detach().requires_grad_()
            loss = self.loss(point)
            (gradient,) = torch.autograd.grad(loss.sum(), point)
        gradient = gradient.contiguous()  # autograd may return an expanded tensor, which cannot be overwritten
        norm = self.norm(gradient)
        finite = loss.isfinite() & norm.isfinite()
        if after is not None:
            finite = finite & after.finite
        return Evaluation(loss.detach(), gradient, norm.masked_fill(~finite, 0.0), finite)

    def forward(self) -> Tensor:
        """Return the loss at ``point``."""
        return self.loss(self.point)

    def reset_to_center(self) -> None:
        """Set ``point`` to the center."""
        self.point.copy_(self.center)

    def add_noise(self, sample: int, spread: Spread) -> None:
        """Set ``point`` to the center plus noise."""
        self.normal_(self.point, sample)
        self.scale_(self.point, spread.scale(lambda: self.norm(self.point), lambda: self.uniform(sample), self.dim))
        self.point.add_(self.center)

    def ascend(self, at: Evaluation, rho: Tensor) -> None:
        """Move ``point`` by ``rho`` along the normalised gradient, where ``at`` is finite."""
        self.zero_unless_(at.gradient, at.finite)
        self.add_scaled_(self.point, at.gradient, rho / (at.norm + EPS))

    def add_filter_noise(self, sample: int, gamma: Tensor) -> None:
        """Set ``point`` to the center plus noise of size ``gamma`` times its norm; a chain is one filter."""
        self.normal_(self.point, sample)
        self.scale_(self.point, gamma * self.norm(self.center))
        self.point.add_(self.center)

    def ascend_adaptive(self, at: Evaluation, rho: Tensor, eta: Tensor) -> None:
        """Move ``point`` by ``rho T²g/‖Tg‖`` with ``T = |center| + eta``, where ``at`` is finite."""
        metric = self.center.abs() + eta[:, None]
        self.zero_unless_(at.gradient, at.finite)
        scaled = metric * at.gradient
        self.point.add_(metric * scaled * (rho / (self.norm(scaled) + EPS))[:, None])

    def normal_(self, x: Tensor, sample: int) -> None:
        """Fill ``x`` with N(0, 1) draws."""
        x.normal_(generator=self._generator)

    def uniform(self, sample: int) -> Tensor:
        """Return a U(0, 1) draw per chain."""
        num_chains, like = len(self.center), self.center
        return torch.rand(num_chains, generator=self._generator, dtype=like.dtype, device=like.device)

    def vector(self, name: str) -> Tensor:
        """Return the scratch vector of that name."""
        return self._vectors.setdefault(name, torch.zeros_like(self.point))

    def copy_to(self, name: str, x: Tensor) -> Tensor:
        """Copy ``x`` into the scratch vector of that name and return it."""
        return self.vector(name).copy_(x)

    def state_vector(self, name: str) -> Tensor:
        """Return the vector of that name that a sampler keeps between steps, initially zero."""
        return self.vector(f"kept {name}")

    def norm(self, x: Tensor) -> Tensor:
        """Return the Euclidean norm of each chain."""
        norms: Tensor = torch.linalg.vector_norm(x, dim=1)
        return norms

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the inner product of each chain."""
        return (x * y).sum(1)

    def copy_(self, x: Tensor, y: Tensor) -> None:
        """Set ``x`` to ``y``."""
        x.copy_(y)

    def scale_(self, x: Tensor, scale: Tensor) -> None:
        """Multiply ``x`` by ``scale``."""
        x.mul_(scale[:, None])

    def add_(self, x: Tensor, y: Tensor, alpha: float = 1.0) -> None:
        """Add ``alpha * y`` to ``x``."""
        x.add_(y, alpha=alpha)

    def add_scaled_(self, x: Tensor, y: Tensor, scale: Tensor) -> None:
        """Add ``scale * y`` to ``x``."""
        x.add_(y * scale[:, None])

    def zero_unless_(self, x: Tensor, mask: Tensor) -> None:
        """Zero the chains of ``x`` that are not in ``mask``."""
        x.masked_fill_(~mask[:, None], 0.0)

    def zero_unperturbed_(self, x: Tensor) -> None:
        """Do nothing: all coordinates of a chain have one ``rho``."""

    def select_(self, x: Tensor, y: Tensor, mask: Tensor) -> None:
        """Set ``x`` to ``y`` on the chains in ``mask``."""
        x.copy_(torch.where(mask[:, None], y, x))

    def map_(self, x: Tensor, function: Callable[..., Tensor], *others: Tensor) -> None:
        """Apply ``function`` to each chain of ``x`` and ``others``, and write the result to ``x``."""
        x.copy_(torch.vmap(function)(x, *others))


def sample_chains(sampler: Sampler, space: ChainSpace, num_samples: int = 1) -> tuple[list[Draw], Tensor]:
    """Draw ``num_samples`` samples on every chain.

    Returns:
        The draws, and the perturbations ε of shape (num_samples, chains, d).
    """
    with torch.no_grad():
        common = sampler.begin(space)
        draws, points = [], []
        for j in range(num_samples):
            space.point.fill_(torch.nan)  # a sampler must not rely on where the one before it ended
            draw = sampler.sample(space, j, common)
            draws.append(draw._replace(gradient=draw.gradient.clone()))
            points.append(space.point - space.center)
    return draws, torch.stack(points)
