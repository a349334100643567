"""The space a sampler moves in: a vector θ, a point near it, and the loss and gradient at that point.

Samplers are written against the :class:`Space` protocol and nothing else. ``tiltsam.parameters`` implements it for the
weights of a network, ``tiltsam.toys.chain_space`` for many chains on a function with a known density, so that the same
samplers can be tested against exact answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

__all__ = ["EPS", "Evaluation", "Space", "Spread", "Vector"]

EPS = 1e-12  # n(v) = v / (‖v‖ + EPS)

Vector: TypeAlias = Any
"""A vector of a :class:`Space`, opaque to samplers: only the space's own methods work on it."""


class Evaluation(NamedTuple):
    """The loss at the point being visited and what came with it."""

    loss: Tensor
    gradient: Vector
    norm: Tensor
    """The gradient's norm; 0 where it is not finite."""
    finite: Tensor
    """Whether loss and gradient are."""


class Spread(NamedTuple):
    """How far noise reaches: uniform in a ball of ``radius``, or of standard deviation ``std``, at most ``longest``."""

    radius: Tensor | None = None
    std: Tensor | None = None
    longest: Tensor | None = None

    def scale(self, norm: Tensor, uniform: Callable[[], Tensor], dim: int) -> Tensor:
        """What Gaussian noise of that norm is multiplied by: ``R U^(1/d)/norm``, or ``min(std, longest/norm)``."""
        if self.radius is not None:
            return self.radius * uniform() ** (1 / dim) / (norm + EPS)
        assert self.std is not None
        return self.std if self.longest is None else torch.minimum(self.std, self.longest / (norm + EPS))


class Space(Protocol):
    """What a sampler may do. Scalars are 0-dim tensors (or one entry per chain, or per block of ``rho``)."""

    dim: int
    """Number of real coordinates d."""
    point: Vector
    """Where the next evaluation happens; samplers write it."""
    noisy: bool
    """Whether ``radius`` is nonzero, known to the host: a neighbourhood of no size needs no draws."""
    ascending: bool
    """Whether any ``rho`` is nonzero, known to the host: without ascent no gradient is spent on it."""

    @property
    def center(self) -> Vector:
        """θ."""
        ...

    @property
    def rho(self) -> Tensor:
        """Length of the ascent; one entry per parameter group where they differ."""
        ...

    @property
    def radius(self) -> Tensor:
        """Radius R of the neighbourhood that noise is drawn from."""
        ...

    @property
    def delta(self) -> Tensor:
        """The tilt δ that a tilted sampler draws with."""
        ...

    def evaluate(self, *, ascent: bool = False, after: Evaluation | None = None) -> Evaluation:
        """Forward and backward at ``point``. The gradient lives until the next call, and is free to be overwritten.

        ``ascent`` says that it will only point the way up, for which part of the batch may do. ``after`` is what led
        here: unless that was finite, this does not count as finite either.
        """
        ...

    def forward(self) -> Tensor:
        """Forward at ``point``, without a gradient; the last gradient stays valid."""
        ...

    def go_home(self) -> None:
        """``point <- θ``."""
        ...

    def scatter(self, sample: int, spread: Spread) -> None:
        """``point <- θ + noise`` of the given sample's stream, as far as ``spread`` says."""
        ...

    def climb(self, at: Evaluation, rho: Tensor) -> None:
        """``point <- point + rho n(gradient)``, or nothing where ``at`` is not finite; uses the gradient up."""
        ...

    def normal_(self, x: Vector, sample: int) -> None:
        """Fill with independent N(0, 1) draws of the given sample's stream."""
        ...

    def uniform(self, sample: int) -> Tensor:
        """The next U(0, 1) scalar of the given sample's stream."""
        ...

    def vector(self, name: str) -> Vector:
        """A scratch vector of that name. What it holds at the start of a step is nobody's business: see ``kept``."""
        ...

    def kept(self, name: str) -> Vector:
        """The vector of that name that the sampler keeps from step to step (see its ``keeps``): zero at the first.

        It is written in place, in the optimizer's ``state_dict``, and what it was before if the step raises.
        """
        ...

    def save(self, name: str, x: Vector) -> Vector:
        """A copy of ``x`` in the scratch vector of that name."""
        ...

    def setting(self, name: str) -> Tensor:
        """A method's own number, such as RSAM's ``gamma``."""
        ...

    def norm(self, x: Vector) -> Tensor:
        """Euclidean norm."""
        ...

    def dot(self, x: Vector, y: Vector) -> Tensor:
        """Inner product."""
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
        """``x <- x + scale y``; uses ``y`` up."""
        ...

    def stretch_(self, x: Vector, w: Vector, eta: Tensor) -> None:
        """``x <- (|w| + eta) x``, element by element."""
        ...

    def keep_(self, x: Vector, mask: Tensor) -> None:
        """``x <- x`` where ``mask``, else 0."""
        ...

    def select_(self, x: Vector, y: Vector, mask: Tensor) -> None:
        """``x <- y`` where ``mask``."""
        ...

    def map_(self, x: Vector, function: Callable[..., Tensor], *others: Vector | Tensor) -> None:
        """``x_i <- function(x_i, others_i...)`` tensor by tensor; the others are vectors, or scalars."""
        ...

    def filter_norms(self, x: Vector) -> Vector:
        """The norm of each filter, shaped to be multiplied with it.

        A filter is a slice along a tensor's first dimension; a tensor of one dimension (a bias) is one filter.
        """
        ...
