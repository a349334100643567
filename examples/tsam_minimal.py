"""Tilted sharpness-aware minimisation in plain torch (Algorithm 2). With the same noise it equals tiltsam.TSAM.

for j = 1..s:
    δ_j = uniform in the ball of radius R
    ε_j = δ_j + ρ n(∇L(θ + δ_j))                   n(v) = v/‖v‖
w = softmax((t − δ) L(θ + ε_j))                    δ = t/2
the base optimizer steps from θ with Σ_j w_j ∇L(θ + ε_j)
"""

from collections.abc import Callable

import torch
from torch import Generator, Tensor, optim
from torch.nn.functional import normalize
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def tsam_step(
    base: optim.Optimizer, closure: Callable[[], Tensor], noise: list[Generator], t: float, rho: float, radius: float
) -> Tensor:
    """Step the optimizer ``base`` with one sample per generator in ``noise``; return the losses of the samples."""
    params = [p for group in base.param_groups for p in group["params"]]
    theta = parameters_to_vector(params).detach()

    def evaluate(point: Tensor) -> tuple[Tensor, Tensor]:
        vector_to_parameters(point, params)
        base.zero_grad()
        loss = closure().detach()
        return loss, parameters_to_vector([p.grad for p in params])

    samples = []
    for generator in noise:
        normal = torch.cat([torch.randn(p.shape, generator=generator, dtype=p.dtype).flatten() for p in params])
        uniform = torch.rand((), generator=generator, dtype=theta.dtype)
        start = theta + radius * uniform ** (1 / len(theta)) * normalize(normal, dim=0)
        _, ascent = evaluate(start)
        samples.append(evaluate(start + rho * normalize(ascent, dim=0)))
    losses, gradients = (torch.stack(column) for column in zip(*samples, strict=True))
    weights = torch.softmax((t - t / 2) * losses, dim=0)
    vector_to_parameters(theta, params)
    vector_to_parameters(weights @ gradients, [p.grad for p in params])
    base.step()
    return losses


if __name__ == "__main__":
    x = torch.nn.Parameter(torch.empty(1))

    def closure() -> Tensor:
        """Evaluate the paper's first toy loss: further right its minima are higher but flatter."""
        loss = (torch.sin(4 * torch.pi * x) / x + 0.005 * (x - 1) ** 2).sum()
        loss.backward()
        return loss

    for name, rho, radius, note in (("SGD", 0.0, 0.0, "the sharpest minimum"), ("TSAM", 0.1, 0.2, "a flatter one")):
        x.data.fill_(0.5)
        sgd, noise = optim.SGD([x], lr=0.002), [Generator().manual_seed(j) for j in range(3)]
        for _ in range(700):
            tsam_step(sgd, closure, noise, t=20.0, rho=rho, radius=radius)
        print(f"{name} ends at x = {x.item():.2f}, {note}")
