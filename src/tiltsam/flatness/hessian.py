"""Products of the Hessian of a data set's mean loss with a vector, by reverse-over-reverse differentiation.

    H v = d/dtheta (grad L(theta) . v)

Exact up to rounding, one batch at a time: the graph of a batch is freed before the next one is built, so memory does
not grow with the data. Forward-over-reverse takes a little less work, but raises for every operation whose backward has
no forward derivative, such as SiLU; nearly all operations support double backward. For those that do not (fused
attention, fused recurrent kernels, compiled graphs) the operator switches to the plain kernel, warns once and lists it
in ``substitutes``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel

from tiltsam.flatness.loss_surface import LossSurface
from tiltsam.flatness.numerics import finite_losses
from tiltsam.space.validation import warn

__all__ = ["HessianOperator"]


class HessianOperator:
    """The Hessian of the mean loss on a :class:`~tiltsam.flatness.loss_surface.LossSurface`, as a matrix-free operator.

    Flat vectors are in ``dtype``: float64 if a parameter is, else float32. Half-precision models, and models under
    autocast, are differentiated in their own precision, so their products have errors of the order of its epsilon.

    Cost: one product is a forward, a backward and a double backward over the data. With ``keep_graph`` and a single
    batch, the first two run once, and a product is the double backward alone; the graph then lives as long as the
    operator.

    Args:
        surface: The loss; must be entered.
        keep_graph: Whether to keep the graph if there is a single batch.

    Attributes:
        num_products: The number of products so far.
        eps: The coarsest epsilon among the dtypes in which the loss is computed.
        substitutes: The kernels that were replaced because they have no second derivative.
    """

    def __init__(self, surface: LossSurface, *, keep_graph: bool = False) -> None:
        self.surface = surface
        self.keep_graph = keep_graph
        self.size = sum(p.numel() for p in surface.params)
        self.device = surface.device
        double = any(p.dtype == torch.float64 for p in surface.params)
        self.dtype = torch.float64 if double else torch.float32
        kinds = [torch.finfo(dtype) for dtype in {*surface.autocast.values(), *(p.dtype for p in surface.params)}]
        # The entries of a unit vector of size 1e7 are near the smallest float16: scale them to about 1 on the way in,
        # by a power of two, which is exact.
        self._scale = 2.0 ** round(math.log2(self.size) / 2) if any(kind.bits < 32 for kind in kinds) else 1.0
        self.eps = max(kind.eps for kind in kinds)
        self.num_products = 0
        self.substitutes: list[str] = []
        self._kept: list[GradientEdge | None] | None = None
        self._single = _length(surface.batches) == 1

    def __call__(self, v: Tensor, out: Tensor) -> None:
        """Write ``H v`` into ``out``, both flat."""
        self.num_products += 1
        if self._kept is not None:
            out.zero_()
            self._add_product(self._kept, self._split(v), self._split(out), 1.0, retain=True)
            return
        while True:
            with ExitStack() as stack:
                for name in self.substitutes:
                    stack.enter_context(_SUBSTITUTES[name][1]())
                try:
                    self._product(v, out)
                    return
                except RuntimeError as error:
                    self._substitute(error)  # and try again, with the same random numbers

    def _product(self, v: Tensor, out: Tensor) -> None:
        """Write the product over all batches into ``out``."""
        vector, result = self._split(v), self._split(out)
        out.zero_()
        total = 0.0
        losses: list[Tensor] = []
        for batch, size in self.surface.iterate():
            # A running weighted mean needs two vectors, whatever the number of batches.
            total += size
            if losses:
                out.mul_(1.0 - size / total)
            loss, edges = self._gradient_edges(batch)
            keep = self.keep_graph and self._single
            self._add_product(edges, vector, result, size / total, retain=keep)
            if keep:
                self._kept = edges
            losses.append(loss)
        if self.num_products == 1:  # later losses are the same, and reading them synchronizes the device
            finite_losses(losses)
        self._single = len(losses) == 1

    def _split(self, flat: Tensor) -> list[Tensor]:
        """Return views of a flat vector in the shapes of the parameters."""
        pieces = torch.split(flat, [p.numel() for p in self.surface.params])
        return [piece.view(p.shape) for piece, p in zip(pieces, self.surface.params, strict=True)]

    def _gradient_edges(self, batch: Any) -> tuple[Tensor, list[GradientEdge | None]]:
        """Return the loss of a batch and the graph node of each parameter's gradient.

        A node suffices for the double backward and frees the gradient itself. It is None for a gradient without a
        graph: the loss is linear in that parameter, and its row of H is zero.
        """
        loss = self.surface.differentiable_loss(batch)
        grads = torch.autograd.grad(loss, self.surface.params, create_graph=True, allow_unused=True)
        return loss.detach(), [get_gradient_edge(g) if g is not None and g.requires_grad else None for g in grads]

    def _add_product(
        self,
        edges: Sequence[GradientEdge | None],
        vector: list[Tensor],
        result: list[Tensor],
        weight: float,
        *,
        retain: bool,
    ) -> None:
        """Add ``weight`` times the product of one batch to ``result``."""
        params = self.surface.params
        scaled = vector if self._scale == 1.0 else [v * self._scale for v in vector]
        curved = [(e, v.to(p)) for e, v, p in zip(edges, scaled, params, strict=True) if e is not None]
        if not curved:
            return
        ends, seeds = zip(*curved, strict=True)
        products = torch.autograd.grad(ends, params, seeds, allow_unused=True, retain_graph=retain)
        for sum_, product in zip(result, products, strict=True):
            if product is not None:
                sum_.add_(product.to(sum_), alpha=weight / self._scale)

    def _substitute(self, error: RuntimeError) -> None:
        """Choose the plain kernel for the one that raised ``error``, or raise it again."""
        for name, (pattern, _) in _SUBSTITUTES.items():
            if name not in self.substitutes and re.search(pattern, str(error)):
                self.substitutes.append(name)
                warn(f"a kernel has no second derivative; measuring with {name}", UserWarning)
                return
        raise error


def _length(batches: Any) -> int | None:
    """Return the number of batches, or None if unknown (a loader of an iterable data set has no length)."""
    try:
        return len(batches)
    except TypeError:
        return None


# Name: the pattern of the error that a kernel without a second derivative raises, and a context without that kernel.
_SUBSTITUTES: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
    "the math kernel for scaled dot-product attention": (
        r"scaled_dot_product|efficient_attention|flash_attention",
        lambda: sdpa_kernel(SDPBackend.MATH),
    ),
    "recurrent layers without cuDNN": (
        r"_cudnn_rnn|cudnn RNN backward",
        lambda: torch.backends.cudnn.flags(enabled=False),
    ),
    "eager execution of compiled code": (
        r"aot_autograd|donated buffer",
        lambda: torch.compiler.set_stance("force_eager"),
    ),
}
