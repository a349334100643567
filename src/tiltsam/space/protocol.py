"""What a sampler may do with the weights: the :class:`Space` protocol.

Samplers use this protocol and nothing else. :class:`~tiltsam.space.parameter_space.ParameterSpace` implements it for
the weights of a network, ``tiltsam.toys.chain_space`` for many chains on a function with known answers, so that the
samplers that train networks are tested against exact densities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

__all__ = ["EPS", "Draw", "Evaluation", "Space", "Spread", "Vector", "default_radius", "draw_after_ascent", "draw_at"]

EPS = 1e-12  # n(v) = v / (‖v‖ + EPS)

Vector: TypeAlias = Any
"""A vector of a :class:`Space`, opaque to samplers: only methods of the space operate on it."""


def default_radius(dim: int) -> float:
    """Return 0.003 √d, the radius of TSAM's random start in d dimensions: 10 for a ResNet-18.

    The paper's 20 there is 0.006 √d. On CIFAR-100 with 20% noisy labels radii of 10, 20, 30 and 40 gave 64.16, 64.16,
    63.98 and 62.00 (rho 0.2, one seed: "radius" in benchmarks/records/2026-11-15_noisy/tables.md). When fine-tuning a
    transformer 0.01 √d was worse (docs/evidence.md, "A random start acts like a larger ρ").
    """
    return 0.003 * math.sqrt(dim)


class Evaluation(NamedTuple):
    """The loss and gradient at one point."""

    loss: Tensor
    """Loss of the mini-batch, a scalar."""
    gradient: Vector
    """Its gradient, valid until the next evaluation."""
    norm: Tensor
    """Norm of the gradient; 0 if it is not finite."""
    finite: Tensor
    """Whether loss and gradient are finite."""


class Draw(NamedTuple):
    """One sample: the loss and gradient at θ+ε_j."""

    loss: Tensor
    """Loss at θ+ε_j, a scalar."""
    gradient: Vector
    """Gradient at θ+ε_j. Adding it to the mean may overwrite it, except that of the first of several samples."""
    gradient_norm: Tensor
    """Norm of the gradient; 0 if it is not finite."""
    valid: Tensor
    """False if any loss or gradient of this sample was not finite."""
    start_loss: Tensor
    """The loss where the sample started: at θ for SAM, at θ+δ_j for TSAM; ``loss`` itself without an ascent."""
    info: Mapping[str, Tensor] = {}
    """Further numbers (HMC: acceptance, energy error, divergence), shown in ``StepInfo.sampler``."""


def draw_at(evaluation: Evaluation) -> Draw:
    """Return the draw of a sample without an ascent."""
    return Draw(evaluation.loss, evaluation.gradient, evaluation.norm, evaluation.finite, evaluation.loss)


def draw_after_ascent(first: Evaluation, last: Evaluation) -> Draw:
    """Return the draw of a sample that started at ``first`` and ascended to ``last``."""
    return Draw(last.loss, last.gradient, last.norm, last.finite, first.loss)


class Spread(NamedTuple):
    """Size of the noise: uniform in a ball of ``radius``, or Gaussian of ``std``, shortened to ``max_norm``."""

    radius: Tensor | None = None
    """Radius of the ball; ``None`` for Gaussian noise."""
    std: Tensor | None = None
    """Standard deviation of a coordinate of Gaussian noise."""
    max_norm: Tensor | None = None
    """Largest norm of Gaussian noise: longer draws are shortened to it; ``None`` for no bound."""

    def scale(self, norm: Callable[[], Tensor], uniform: Callable[[], Tensor], dim: int) -> Tensor:
        """Return the factor for standard normal noise of this norm, which is computed only if it counts.

        It is ``R U^(1/d)/norm`` for the ball and ``min(std, max_norm/norm)`` for the Gaussian.
        """
        if self.radius is not None:
            return self.radius * uniform() ** (1 / dim) / (norm() + EPS)
        assert self.std is not None
        return self.std if self.max_norm is None else torch.minimum(self.std, self.max_norm / (norm() + EPS))


class Space(Protocol):
    """The operations of a sampler. Scalars are 0-dim tensors, or have one entry per chain or parameter group."""

    dim: int
    """Number of real coordinates d."""

    @property
    def noisy(self) -> bool:
        """Whether ``radius`` is nonzero: a Python bool, so that reading it does not wait for the device."""
        ...

    @property
    def ascending(self) -> bool:
        """Whether any ``rho`` is nonzero: a Python bool, so that samplers can skip the gradient of the ascent."""
        ...

    @property
    def point(self) -> Vector:
        """The point that the next evaluation uses. Samplers write to it."""
        ...

    @property
    def center(self) -> Vector:
        """The weights θ at the start of the step. Read only."""
        ...

    @property
    def rho(self) -> Tensor:
        """Length ρ of the ascent; one entry per parameter group if they differ."""
        ...

    @property
    def radius(self) -> Tensor:
        """Radius R of the neighbourhood that noise is drawn from."""
        ...

    def setting(self, name: str) -> Tensor:
        """Return a numeric setting of the method, such as RSAM's ``gamma``."""
        ...

    # ---------------------------------------------------------------- passes

    def evaluate(self, *, ascent: bool = False, after: Evaluation | None = None) -> Evaluation:
        """Run forward and backward at ``point``.

        Args:
            ascent: The gradient only gives the direction of an ascent; the step's ``ascent_closure`` may be used, and
                the gradient of parameter groups whose ``rho`` is 0 is zero.
            after: The evaluation that led to this point. If it is not finite, neither is this one.

        Returns:
            The evaluation. Its gradient is valid until the next call and may be overwritten.
        """
        ...

    def forward(self) -> Tensor:
        """Run forward only at ``point`` and return the loss; the last gradient stays valid."""
        ...

    # ---------------------------------------------------------------- moving the point

    def reset_to_center(self) -> None:
        """``point <- θ``."""
        ...

    def add_noise(self, sample: int, spread: Spread) -> None:
        """``point <- θ + noise``, drawn from the generator of this sample."""
        ...

    def add_filter_noise(self, sample: int, gamma: Tensor) -> None:
        """``point <- θ + γ ‖w_filter‖ z`` with standard normal z (RSAM).

        A filter is a slice along a tensor's first dimension; a tensor of one dimension (a bias) is one filter.
        """
        ...

    def ascend(self, at: Evaluation, rho: Tensor) -> None:
        """``point <- point + ρ n(gradient)``, or nothing if ``at`` is not finite. Consumes the gradient.

        Parameter groups whose own ``rho`` is 0 do not count in the norm.
        """
        ...

    def ascend_adaptive(self, at: Evaluation, rho: Tensor, eta: Tensor) -> None:
        """``point <- point + ρ T²g/‖Tg‖`` with ``T = |θ| + η`` (ASAM). Consumes the gradient."""
        ...

    # ---------------------------------------------------------------- vectors

    def vector(self, name: str) -> Vector:
        """Return the scratch vector of this name. Its content at the start of a step is undefined."""
        ...

    def state_vector(self, name: str) -> Vector:
        """Return a vector that the sampler keeps between steps; zero at the first step.

        Its name is in ``Sampler.state_names``. Write to it in place. It is part of the optimizer's ``state_dict``
        and restored if the step raises.
        """
        ...

    def copy_to(self, name: str, x: Vector) -> Vector:
        """Copy ``x`` into the scratch vector of this name and return that."""
        ...

    def normal_(self, x: Vector, sample: int) -> None:
        """Fill ``x`` with standard normal numbers from the generator of this sample."""
        ...

    def uniform(self, sample: int) -> Tensor:
        """Draw a U(0, 1) scalar from the generator of this sample."""
        ...

    def norm(self, x: Vector) -> Tensor:
        """Return the Euclidean norm."""
        ...

    def dot(self, x: Vector, y: Vector) -> Tensor:
        """Return the inner product."""
        ...

    def copy_(self, x: Vector, y: Vector) -> None:
        """``x <- y``."""
        ...

    def scale_(self, x: Vector, scale: Tensor) -> None:
        """``x <- scale x``."""
        ...

    def add_(self, x: Vector, y: Vector, alpha: float = 1.0) -> None:
        """``x <- x + alpha y``."""
        ...

    def add_scaled_(self, x: Vector, y: Vector, scale: Tensor) -> None:
        """``x <- x + scale y``; ``y`` is scaled in place."""
        ...

    def zero_unless_(self, x: Vector, mask: Tensor) -> None:
        """``x <- x`` if the scalar ``mask`` is true, else 0, even where ``x`` is NaN or infinite."""
        ...

    def zero_unperturbed_(self, x: Vector) -> None:
        """``x <- 0`` in parameter groups whose ``rho`` is 0, so that they do not count in the norm of a perturbation.

        Nothing is done if ``rho`` is 0 in all groups.
        """
        ...

    def select_(self, x: Vector, y: Vector, mask: Tensor) -> None:
        """``x <- y`` if the scalar ``mask`` is true."""
        ...

    def map_(self, x: Vector, function: Callable[..., Tensor], *others: Vector | Tensor) -> None:
        """``x_i <- function(x_i, *others_i)`` for each tensor; ``others`` are vectors or scalars."""
        ...
