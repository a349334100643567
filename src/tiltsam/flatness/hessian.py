"""Products of the Hessian of a data set's mean loss with a vector, by reverse-over-reverse differentiation.

    H v = d/dtheta (grad L(theta) . v)

exact up to rounding, one batch at a time: the graph of a batch is freed before the next one is built, so
memory does not grow with the data. Forward-over-reverse would need a little less work, but raises for every
operation whose backward has no forward derivative, SiLU among them; double backward is there for nearly all.
Where it is not (fused attention, the fused recurrent kernels, compiled graphs), the operator switches to the
plain kernel by itself, warns once and lists it in ``substitutes``.
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

from tiltsam.flatness.evaluation import LossSurface
from tiltsam.flatness.losses import check_finite
from tiltsam.warning import warn

__all__ = ["HessianOperator"]


class HessianOperator:
    """The Hessian of the mean loss on a :class:`~tiltsam.flatness.evaluation.LossSurface`, as a matrix-free operator.

    Flat vectors are in ``dtype``: float32, or float64 if a parameter is. Half-precision models, and models under
    autocast, are differentiated in their own precision, so their products carry errors of the order of the dtype's
    epsilon.

    Cost: one product is a forward, a backward and a double backward over the data. With ``keep_graph`` and the data
    in a single batch, the first two are done once, and a product is the double backward alone; the graph then lives,
    whole, until :meth:`close`.

    Args:
        surface: The loss; must be entered.
        keep_graph: Whether to keep the graph when there is a single batch.

    Attributes:
        num_products: Products done so far.
        substitutes: Which kernels had to be replaced to be differentiated twice.
    """

    def __init__(self, surface: LossSurface, *, keep_graph: bool = False) -> None:
        self.surface = surface
        self.keep_graph = keep_graph
        self.size = sum(p.numel() for p in surface.params)
        self.device = surface.device
        wide = any(p.dtype == torch.float64 for p in surface.params)
        self.dtype = torch.float64 if wide else torch.float32
        kinds = [torch.finfo(dtype) for dtype in {*surface.autocast.values(), *(p.dtype for p in surface.params)}]
        # Entries of a unit vector of 1e7 elements are near the smallest halves: lift them to about 1 on the way in,
        # by a power of two, which rounds nothing.
        self._lift = 2.0 ** round(math.log2(self.size) / 2) if any(kind.bits < 32 for kind in kinds) else 1.0
        self.eps = max(kind.eps for kind in kinds)
        self.num_products = 0
        self.substitutes: list[str] = []
        self._kept: list[GradientEdge | None] | None = None
        self._single = _length(surface.batches) == 1

    def __call__(self, v: Tensor, out: Tensor) -> None:
        """Write ``H v`` into ``out``, both flat."""
        self.num_products += 1
        vector, result = self.split(v), self.split(out)
        if self._kept is not None:
            out.zero_()
            self._add(self._kept, vector, result, 1.0, retain=True)
            return
        while True:
            with ExitStack() as stack:
                for name in self.substitutes:
                    stack.enter_context(_SUBSTITUTES[name][1]())
                try:
                    self._walk(vector, out, result)
                    return
                except RuntimeError as error:
                    self._substitute(error)  # then a new walk, which sees the random numbers of all others

    def _walk(self, vector: list[Tensor], out: Tensor, result: list[Tensor]) -> None:
        """The product over all the data; ``result`` are views of ``out``."""
        out.zero_()
        total = 0.0
        losses: list[Tensor] = []
        for batch, size in self.surface.walk():
            # The weighted mean is kept up to date batch by batch: two vectors, however many batches.
            total += size
            if losses:
                out.mul_(1.0 - size / total)
            losses.append(self._batch_product(batch, vector, result, size / total))
        if self.num_products == 1:  # the loss is the same every time, and looking at it makes a device wait
            check_finite(torch.stack(losses).cpu())
        self._single = len(losses) == 1

    def split(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat vector in the shapes of the parameters."""
        pieces = torch.split(flat, [p.numel() for p in self.surface.params])
        return [piece.view(p.shape) for piece, p in zip(pieces, self.surface.params, strict=True)]

    def close(self) -> None:
        """Drop the graph of a single batch, if kept."""
        self._kept = None

    def _batch_product(self, batch: Any, vector: list[Tensor], result: list[Tensor], weight: float) -> Tensor:
        # Where the data does not tell its length, the first product finds out that there is one batch only.
        keep = self.keep_graph and self._single
        loss, slopes = self._gradient(batch)
        self._add(slopes, vector, result, weight, retain=keep)
        if keep:
            self._kept = slopes
        return loss

    def _gradient(self, batch: Any) -> tuple[Tensor, list[GradientEdge | None]]:
        """The loss of a batch and, for each parameter, where in the graph its gradient comes out."""
        loss = self.surface.sloping(batch)
        grads = torch.autograd.grad(loss, self.surface.params, create_graph=True, allow_unused=True)
        # Only the graph matters, not the gradient itself: an edge of it spares a copy of the weights. A gradient
        # without a graph is constant: the loss is linear in that parameter, and its row of H is zero.
        curved = [g is not None and g.requires_grad for g in grads]
        return loss.detach(), [get_gradient_edge(g) if c else None for g, c in zip(grads, curved, strict=True)]

    def _add(
        self,
        slopes: Sequence[GradientEdge | None],
        vector: list[Tensor],
        result: list[Tensor],
        weight: float,
        *,
        retain: bool,
    ) -> None:
        params = self.surface.params
        lifted = vector if self._lift == 1.0 else [v * self._lift for v in vector]
        curved = [(e, v.to(p)) for e, v, p in zip(slopes, lifted, params, strict=True) if e is not None]
        if not curved:
            return
        products = torch.autograd.grad(
            [edge for edge, _ in curved],
            params,
            [v for _, v in curved],
            allow_unused=True,
            retain_graph=retain,
        )
        for place, product in zip(result, products, strict=True):
            if product is not None:
                place.add_(product.to(place), alpha=weight / self._lift)

    def _substitute(self, error: RuntimeError) -> None:
        """Choose the plain kernel for the one that ``error`` complains about, or raise it again."""
        for name, (pattern, _) in _SUBSTITUTES.items():
            if name not in self.substitutes and re.search(pattern, str(error)):
                self.substitutes.append(name)
                warn(f"a kernel has no second derivative; measuring with {name}")
                return
        raise error


def _length(batches: Any) -> int | None:
    """How many batches there are, where that is known; a loader of a stream has a length and cannot tell it."""
    try:
        return len(batches)
    except TypeError:
        return None


def _eager() -> AbstractContextManager[Any]:
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


_SUBSTITUTES: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
    "the math kernel for scaled dot-product attention": (
        r"scaled_dot_product|efficient_attention|flash_attention",
        lambda: sdpa_kernel(SDPBackend.MATH),
    ),
    "recurrent layers without cuDNN": (
        r"_cudnn_rnn|cudnn RNN backward",
        lambda: torch.backends.cudnn.flags(enabled=False),
    ),
    "eager execution of compiled code": (r"aot_autograd|donated buffer", _eager),
}
