"""Naive twins of every method, written from the paper with stored gradients and no tricks.

They share with the library nothing but the stream of random numbers: normals tensor by tensor, then one uniform.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tiltsam.space.randomness import derive_seed

EPS = 1e-12
Grad = Callable[[list[Tensor]], tuple[Tensor, list[Tensor]]]


def norm(v: list[Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in v]).norm()


def unit(v: list[Tensor]) -> list[Tensor]:
    length = norm(v) + EPS
    return [x / length for x in v]


def dot(a: list[Tensor], b: list[Tensor]) -> Tensor:
    return torch.stack([(x * y).sum() for x, y in zip(a, b, strict=True)]).sum()


def plus(a: list[Tensor], b: list[Tensor], scale: float | Tensor = 1.0) -> list[Tensor]:
    return [x + scale * y for x, y in zip(a, b, strict=True)]


def weighted(weights: Tensor, grads: list[list[Tensor]]) -> list[Tensor]:
    return [sum(w * g[i] for w, g in zip(weights, grads, strict=True)) for i in range(len(grads[0]))]


class Noise:
    def __init__(self, theta: list[Tensor], seed: int, step: int, sample: int) -> None:
        self.theta = theta
        self.generator = torch.Generator().manual_seed(derive_seed(seed, step, sample, 0))

    def normal(self) -> list[Tensor]:
        return [torch.empty_like(w).normal_(generator=self.generator) for w in self.theta]

    def uniform(self) -> Tensor:
        return torch.rand((), generator=self.generator, dtype=self.theta[0].dtype)

    def ball(self, radius: float) -> list[Tensor]:
        direction, u = unit(self.normal()), self.uniform()
        d = sum(w.numel() for w in self.theta)
        return [radius * u ** (1 / d) * x for x in direction]


def erm(grad: Grad, theta: list[Tensor], step: int) -> list[Tensor]:
    return grad(theta)[1]


def sam(grad: Grad, theta: list[Tensor], step: int, rho: float = 0.05) -> list[Tensor]:
    return grad(plus(theta, unit(grad(theta)[1]), rho))[1]


def asam(grad: Grad, theta: list[Tensor], step: int, rho: float = 0.5, eta: float = 0.01) -> list[Tensor]:
    g = grad(theta)[1]
    scale = [w.abs() + eta for w in theta]
    length = norm([s * x for s, x in zip(scale, g, strict=True)])
    return grad(plus(theta, [rho * s**2 * x / length for s, x in zip(scale, g, strict=True)]))[1]


def esam2(grad: Grad, theta: list[Tensor], step: int, rho: float = 0.05, num_points: int = 4) -> list[Tensor]:
    direction = unit(grad(theta)[1])
    found = [grad(plus(theta, direction, rho * k / num_points)) for k in range(1, num_points + 1)]
    return max(found, key=lambda pair: pair[0].item())[1]


def pgn(grad: Grad, theta: list[Tensor], step: int, rho: float = 0.05, alpha: float = 0.7) -> list[Tensor]:
    g = grad(theta)[1]
    return plus([(1 - alpha) * x for x in g], grad(plus(theta, unit(g), rho))[1], alpha)


def rsam(
    grad: Grad, theta: list[Tensor], step: int, rho: float = 0.05, gamma: float = 0.05, lam: float = 2.0
) -> list[Tensor]:
    noise = []
    for z, w in zip(Noise(theta, 0, step, 0).normal(), theta, strict=True):
        rows = torch.stack([row.norm() for row in w])  # of a vector: its entries' sizes, which then make one norm
        size = rows.view(-1, *[1] * (w.dim() - 1)) if w.dim() > 1 else rows.norm()
        noise.append(gamma * size * z)
    g = grad(plus(theta, noise))[1]
    return grad(plus(theta, unit(plus(noise, g, lam)), rho))[1]


def gsam(grad: Grad, theta: list[Tensor], step: int, rho: float = 0.05, alpha: float = 0.4) -> list[Tensor]:
    g = grad(theta)[1]
    perturbed = grad(plus(theta, unit(g), rho))[1]
    along = unit(perturbed)
    orthogonal = plus(g, along, -dot(g, along))
    return plus(perturbed, orthogonal, -alpha)


class LookSAM:
    def __init__(self, rho: float = 0.05, alpha: float = 0.7, k: int = 3) -> None:
        self.rho, self.alpha, self.k = rho, alpha, k

    def __call__(self, grad: Grad, theta: list[Tensor], step: int) -> list[Tensor]:
        g = grad(theta)[1]
        if step % self.k:
            return plus(g, self.kept, self.alpha * norm(g) / norm(self.kept))
        perturbed = grad(plus(theta, unit(g), self.rho))[1]
        cosine = dot(perturbed, g) / norm(perturbed) / norm(g)
        self.kept = plus(perturbed, unit(g), -norm(perturbed) * cosine)
        return perturbed


class FriendlySAM:
    def __init__(self, rho: float = 0.05, sigma: float = 1.0, lam: float = 0.9) -> None:
        self.rho, self.sigma, self.lam = rho, sigma, lam
        self.mean: list[Tensor] | None = None

    def __call__(self, grad: Grad, theta: list[Tensor], step: int) -> list[Tensor]:
        g = grad(theta)[1]
        mean = self.mean or [torch.zeros_like(x) for x in g]
        self.mean = [self.lam * m + (1 - self.lam) * x for m, x in zip(mean, g, strict=True)]
        return grad(plus(theta, unit(plus(g, self.mean, -self.sigma)), self.rho))[1]


def wsam(grad: Grad, theta: list[Tensor], step: int, rho: float = 0.05, gamma: float = 0.7) -> list[Tensor]:
    g = grad(theta)[1]
    perturbed = grad(plus(theta, unit(g), rho))[1]
    return plus([(1 - 2 * gamma) / (1 - gamma) * x for x in g], perturbed, gamma / (1 - gamma))


def usam(grad: Grad, theta: list[Tensor], step: int, rho: float = 0.05, power: float = 1.0) -> list[Tensor]:
    g = grad(theta)[1]
    return grad(plus(theta, unit(g), rho * norm(g) ** power))[1]


class MomentumSAM:
    """With the sum of the paper, not a mean: the direction is the same."""

    def __init__(self, rho: float = 0.05, momentum: float = 0.9) -> None:
        self.rho, self.momentum = rho, momentum
        self.velocity: list[Tensor] | None = None

    def __call__(self, grad: Grad, theta: list[Tensor], step: int) -> list[Tensor]:
        velocity = self.velocity or [torch.zeros_like(x) for x in theta]
        g = grad(plus(theta, unit(velocity), -self.rho))[1]
        self.velocity = [self.momentum * v + x for v, x in zip(velocity, g, strict=True)]
        return g


def tsam(
    grad: Grad,
    theta: list[Tensor],
    step: int,
    t: float = 5.0,
    rho: float = 0.05,
    radius: float = 0.1,
    num_samples: int = 3,
    sampler: str = "ascent",
    shared: bool = False,
) -> list[Tensor]:
    losses, grads = [], []
    dim = sum(w.numel() for w in theta)
    for j in range(num_samples):
        noise = Noise(theta, 0, step, j)
        if sampler == "gaussian":
            point = plus(theta, noise.normal(), radius / dim**0.5)
        else:
            point = plus(theta, noise.ball(radius))
        if sampler == "ascent":
            point = plus(point, unit(grad(theta if shared else point)[1]), rho)
        loss, g = grad(point)
        losses.append(loss)
        grads.append(g)
    tilt = t / 2 if sampler == "ascent" else t
    return weighted(torch.softmax(tilt * torch.stack(losses), 0), grads)
