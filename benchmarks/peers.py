"""What a step is compared with: a plain SAM loop, Algorithm 2 with stored gradients, packages that are installed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Closure = Callable[[], Tensor]


def sam_loop(base: torch.optim.Optimizer, rho: float) -> Callable[[Closure], Tensor]:
    """Return a step of SAM as people write it by hand: two passes, one copy of the weights, fused kernels, one norm."""
    params = [p for group in base.param_groups for p in group["params"]]

    def step(closure: Closure) -> Tensor:
        base.zero_grad()
        closure()
        with torch.no_grad():
            grads = [p.grad for p in params if p.grad is not None]
            scale = rho / (torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads))) + 1e-12)
            kept = [p.clone() for p in params]
            torch._foreach_mul_(grads, scale)
            torch._foreach_add_(params, grads)
        base.zero_grad()
        loss = closure()
        with torch.no_grad():
            torch._foreach_copy_(params, kept)
        base.step()
        return loss

    return step


def tsam_loop(base: torch.optim.Optimizer, t: float, rho: float, radius: float, s: int) -> Callable[[Closure], Tensor]:
    """Return a step of Algorithm 2 as printed: tensor by tensor, the s gradients stored and weighted at the end."""
    params = [p for group in base.param_groups for p in group["params"]]
    dim = sum(p.numel() for p in params)

    def norm(tensors: list[Tensor]) -> Tensor:
        total: Tensor = torch.stack([x.square().sum() for x in tensors]).sum().sqrt()
        return total

    def gradient(closure: Closure) -> tuple[Tensor, list[Tensor]]:
        base.zero_grad()
        loss = closure()
        return loss.detach(), [p.grad.clone() for p in params if p.grad is not None]

    def step(closure: Closure) -> Tensor:
        kept = [p.detach().clone() for p in params]
        losses, grads = [], []
        for _ in range(s):
            noise = [torch.randn_like(p) for p in params]
            length = radius * torch.rand((), device=kept[0].device) ** (1 / dim) / norm(noise)
            with torch.no_grad():
                for p, k, n in zip(params, kept, noise, strict=True):
                    p.copy_(k + length * n)
            _, ascent = gradient(closure)
            scale = rho / (norm(ascent) + 1e-12)
            with torch.no_grad():
                for p, g in zip(params, ascent, strict=True):
                    p.add_(scale * g)
            loss, mine = gradient(closure)
            losses.append(loss)
            grads.append(mine)
        weights = torch.softmax(0.5 * t * torch.stack(losses), 0)
        with torch.no_grad():
            for i, (p, k) in enumerate(zip(params, kept, strict=True)):
                p.copy_(k)
                p.grad = torch.stack([w * g[i] for w, g in zip(weights, grads, strict=True)]).sum(0)
        base.step()
        return losses[-1]

    return step


def pytorch_optimizer_sam(
    params: list[torch.nn.Parameter], rho: float, lr: float
) -> Callable[[Closure], Tensor] | None:
    """Return a step of SAM of the package pytorch_optimizer, or ``None`` if it is not installed."""
    try:
        from pytorch_optimizer import SAM
    except ImportError:
        return None
    optimizer = SAM(params, torch.optim.SGD, rho=rho, lr=lr, momentum=0.9)

    def step(closure: Closure) -> Tensor:
        loss = closure()
        optimizer.first_step(zero_grad=True)
        closure()
        optimizer.second_step(zero_grad=True)
        return loss

    return step
