r"""Tilting over the examples of a batch: Tilted ERM (Li et al. 2021), to be used inside the closure of any optimizer.

For the losses ``l_1 .. l_n`` of a batch

.. code-block:: text

    F = (1/t) log (1/n) sum_i exp(t l_i)          dF/dl_i = w_i = exp(t l_i) / sum_k exp(t l_k)

t < 0 gives little weight to examples with large losses, such as those with noisy labels; t = 0 is the mean; t > 0
gives them more. With groups of examples (classes, say) there are two tilts, t inside the groups and ``group_tilt``
between them:

.. code-block:: text

    R_g = (1/t) log (1/n_g) sum_{i in g} exp(t l_i)
    F   = (1/group_tilt) log (1/n) sum_g n_g exp(group_tilt R_g)

which is the first formula again if both are equal.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tiltsam.space.validation import check_count, check_fraction
from tiltsam.tilting.streaming import check_tilt, to_working_dtype

__all__ = ["ExampleTilt"]

_CANDIDATES, _ROUNDS = 128, 3  # the search for the tilt: the first round finds its size, the others divide that by 127²
_SMALLEST = 1e-18  # the first candidate, as a fraction of t
_TINY = 1e-15  # keeps 0/0 away where no loss is finite; its square is a float32, too


class ExampleTilt:
    """Tilted loss of a batch: ``tilt(losses)`` instead of ``losses.mean()``. Costs no extra pass.

    The gradient is exact (with ``min_ess`` for the tilt that is used, held constant), nothing is read back to the host,
    and ``t`` may be changed between steps, also of a captured one (:func:`tiltsam.capture`). Examples whose loss is not
    finite get no weight; if there is no other, the value is NaN and the gradient zero. Second derivatives are exact,
    too, in one process and without groups; otherwise they take the weights as constant.

    With several processes the weights are computed over the batches of all ranks. This costs one all-gather of six
    scalars, or of six per group (``min_ess`` needs four more all-gathers of up to 384 numbers). DDP and FSDP2 average
    gradients; the loss is scaled so that this average is the gradient of the whole batch, as in one process. Gradient
    accumulation: the tilt is over each micro-batch, and the mean of their gradients approximates that of the whole
    batch (``group_tilt=0`` over micro-batches).

    Args:
        t: The tilt: negative, zero or positive.
        min_ess: Smallest effective sample size of the weights, as a fraction of the batch, in [0, 1). If t would give
            less, the tilt of the same sign that gives just this is used instead. A t of -100, say, then means "as much
            as ``min_ess`` allows". Must be 0 with ``num_groups``.
        group_tilt: Tilt between groups of examples; by default t. Needs ``num_groups``.
        num_groups: Number of groups; then pass the group of each example, in [0, num_groups), with the losses. An
            example of another group gets no weight.
        process_group: The ranks that see different examples; by default all processes of ``torch.distributed``, if it
            is initialised. Pass the data group if other ranks share samples of one batch.
        sync: Whether to use the losses of all these ranks; ``False`` tilts over the examples of this process alone.

    Attributes:
        weights: Weights of the last losses; over all ranks they sum to 1.
        effective_sample_size: Effective sample size of the last weights, over all ranks: a scalar tensor.
        num_nonfinite: Number of the last losses of this process that were not finite: a scalar tensor.
        t_used: The tilt of the last call: ``t``, or less because of ``min_ess``: a scalar tensor.

    Example:
        >>> tilt = ExampleTilt(t=-2.0)
        >>> losses = torch.tensor([0.1, 0.2, 3.0], requires_grad=True)  # from reduction="none"
        >>> tilt(losses).backward()
        >>> losses.grad
        tensor([0.5489, 0.4494, 0.0017])
        >>> tilt.effective_sample_size
        tensor(1.9869)
    """

    def __init__(
        self,
        t: float,
        *,
        min_ess: float = 0.0,
        group_tilt: float | None = None,
        num_groups: int | None = None,
        process_group: Any = None,
        sync: bool = True,
    ) -> None:
        check_fraction("min_ess", min_ess)
        if group_tilt is not None and num_groups is None:
            raise ValueError(f"group_tilt={group_tilt} needs num_groups")
        if num_groups is not None:
            check_count("num_groups", num_groups)
            if min_ess:
                raise ValueError(f"min_ess must be 0 with num_groups, got {min_ess}")
        self.min_ess, self.num_groups = min_ess, num_groups
        self.process_group, self.sync = process_group, sync
        self.group_tilt = None if group_tilt is None else check_tilt(group_tilt, "group_tilt")
        self._device_t: Tensor | None = None
        self.t = t
        self.weights: Tensor | None = None
        self.effective_sample_size: Tensor | None = None
        self.num_nonfinite: Tensor | None = None
        self.t_used: Tensor | None = None

    @property
    def t(self) -> float:
        """The tilt. Setting it takes effect at the next step, without waiting for the device."""
        return self._t

    @t.setter
    def t(self, value: float) -> None:
        self._t = check_tilt(value)
        if self._device_t is not None:
            self._device_t.fill_(self._t)

    def __repr__(self) -> str:
        groups = "" if self.num_groups is None else f", group_tilt={self.group_tilt}, num_groups={self.num_groups}"
        return f"ExampleTilt(t={self.t}, min_ess={self.min_ess}{groups})"

    def __call__(self, losses: Tensor, groups: Tensor | None = None) -> Tensor:
        """Return the tilted loss, a scalar whose gradient with respect to ``losses`` is ``weights`` times the ranks.

        Args:
            losses: (n,) the loss of each example, from a criterion with ``reduction="none"``.
            groups: (n,) the group of each example, integers; needs ``num_groups``.

        Raises:
            TypeError: If ``losses`` is not a tensor.
            ValueError: If ``losses`` is empty or not 1-D, or groups are missing, unexpected or of another shape.
        """
        if not isinstance(losses, Tensor):
            raise TypeError(f"losses must be a tensor, got {type(losses).__name__}")
        if losses.dim() != 1 or losses.numel() == 0:
            raise ValueError(
                f"losses must be 1-D and not empty, got shape {tuple(losses.shape)}: pass one loss per example, "
                "averaged over tokens or pixels: tilt(cross_entropy(logits, targets, reduction='none'))"
            )
        if (groups is None) != (self.num_groups is None):
            raise ValueError("groups and num_groups must be given together")
        if groups is not None and groups.shape != losses.shape:
            raise ValueError(f"groups must have the shape {tuple(losses.shape)} of losses, got {tuple(groups.shape)}")
        self.weights, value = self._tilt(losses.detach(), groups)
        used = torch.where(self.weights > 0, losses, 0.0).to(self.weights.dtype)
        change = used - used.detach()  # zero, with a gradient of one
        first, world_size = (self.weights * change).sum(), self._world_size()
        tilted = value + world_size * first
        if groups is None and world_size == 1:
            assert self.t_used is not None
            # Zero, as is its gradient. Its second derivative is that of the weights, which are constants above.
            tilted = tilted + self.t_used / 2 * ((self.weights * change.square()).sum() - first.square())
        return tilted

    def _tilt(self, losses: Tensor, groups: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the weights of the examples and the tilted loss of all ranks; set the attributes."""
        x = to_working_dtype(losses)
        finite = (x - x) == 0  # as isfinite, with two kernels instead of four
        x = torch.where(finite, x, 0.0)
        t = self._t_on(x.device, x.dtype)
        if self.min_ess:
            t = self._largest_tilt(x, finite, t)
        if groups is None:
            weights, value, _, squares = self._tilt_rows(x[None], finite[None], t)
            weights, value, squares = weights[0], value[0], squares[0]
        else:
            members = finite & (groups == torch.arange(self.num_groups or 1, device=x.device)[:, None])
            inside, risks, sizes, squares_inside = self._tilt_rows(x.expand(members.shape), members, t)
            group_tilt = t if self.group_tilt is None else torch.full_like(t, self.group_tilt)
            value, shares = _tilt_groups(risks, sizes, group_tilt)
            weights = (shares[:, None] * inside).sum(0)  # a product of matrices would be rounded by autocast
            squares = (shares.square() * squares_inside).sum()
        self.t_used, self.num_nonfinite = t, finite.numel() - finite.sum()
        self.effective_sample_size = (squares > 0) / squares.clamp_min(_TINY)
        return weights, value

    def _tilt_rows(self, x: Tensor, members: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tilt each row of ``x`` over its members on all ranks.

        Returns:
            The weights of this rank's elements; and of each row, over all ranks, the tilted loss, the number of
            members and the sum of squared weights.
        """
        top, masses, sums = _sum_rows(x, members, t)
        shift = top
        if self._world_size() > 1:
            tops, *gathered = self._gather(torch.stack([top, *sums])).unbind(1)
            each = _Sums(*gathered)
            shift = tops.amax(0)
            fade = t.abs() * (tops - shift)  # from each rank's shift to the common one
            faded = fade.exp()
            excess = each.excess * faded + each.number * fade.expm1()
            shifted = [each.mass * faded, each.squares * faded.square(), excess, each.number, each.total]
            sums = _Sums(*torch.stack(shifted).sum(1))
            masses = masses * (t.abs() * (top - shift)).exp()[:, None]
        mass = sums.mass.clamp_min(_TINY)
        return masses / mass[:, None], _tilted_value(t, shift, sums), sums.number, sums.squares / mass.square()

    def _largest_tilt(self, x: Tensor, finite: Tensor, t: Tensor) -> Tensor:
        """Return ``t``, or the largest tilt of its sign whose effective sample size is at least ``min_ess``.

        The size never increases with the tilt, so each round keeps one interval between candidates.
        """
        y = t.sign() * x
        top = _top(y[None], finite[None])
        gap = (y - top).clamp_max(0)
        low, high = torch.zeros_like(t), t.abs()
        smallest = self.min_ess * self._gather(finite.sum().to(x.dtype)).sum()
        linear = torch.linspace(0, 1, _CANDIDATES, dtype=x.dtype, device=x.device)
        geometric = torch.logspace(math.log10(_SMALLEST), 0, _CANDIDATES, dtype=x.dtype, device=x.device)
        for steps in (geometric, *[linear] * (_ROUNDS - 1)):
            tilts = torch.lerp(low, high, steps)
            masses = (tilts[:, None] * gap).exp() * finite
            mass, squares = masses.sum(1), masses.square().sum(1)
            if self._world_size() > 1:
                tops, masses, several = self._gather(torch.stack([top.expand(_CANDIDATES), mass, squares])).unbind(1)
                faded = (tilts * (tops - tops.amax(0))).exp()
                mass, squares = (masses * faded).sum(0), (several * faded.square()).sum(0)
            kept = (mass.square() >= smallest * squares).sum().clamp_min(1)  # the first candidates, and at least one
            both = torch.stack([kept - 1, kept]).clamp_max(_CANDIDATES - 1)
            low, high = tilts.index_select(0, both).unbind()  # a scalar index would be read by the host
        return t.sign() * low

    def _t_on(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return a copy of ``t``, read from memory that stays the same, so that a captured step sees later values."""
        if self._device_t is None or self._device_t.device != device or self._device_t.dtype != dtype:
            with torch.inference_mode(False):  # otherwise it could not be written to afterwards
                self._device_t = torch.full((), self._t, dtype=dtype, device=device)
        return self._device_t.clone()

    def _world_size(self) -> int:
        synced = self.sync and dist.is_available() and dist.is_initialized()
        return dist.get_world_size(self.process_group) if synced else 1

    def _gather(self, x: Tensor) -> Tensor:
        """Return the values of all ranks, stacked."""
        size = self._world_size()
        if size == 1:
            return x[None]
        every = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(every, x.contiguous(), group=self.process_group)
        return torch.stack(every)


def _tilt_groups(risks: Tensor, sizes: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tilted mean risk of groups, and dF/dR_g; empty groups do not count."""
    top, masses, sums = _sum_rows(torch.where(sizes > 0, risks, 0.0)[None], sizes[None], t)
    return _tilted_value(t, top, sums)[0], masses[0] / sums.mass.clamp_min(_TINY)


class _Sums(NamedTuple):
    """Sums over the elements of each row, which have a count (0 if they are no members) and a value x."""

    mass: Tensor
    """Sum of the masses ``counts * exp(t x)``, relative to the row's shift."""
    squares: Tensor
    """Sum of the squared masses."""
    excess: Tensor
    """Sum of masses - counts, accurate for a small t."""
    number: Tensor
    """Sum of the counts."""
    total: Tensor
    """Sum of ``counts * x``."""


def _sum_rows(x: Tensor, counts: Tensor, t: Tensor) -> tuple[Tensor, Tensor, _Sums]:
    """Return what the log-sum-exp of each row needs: its shift, the masses relative to it, and sums.

    A negative tilt of x is a positive one of -x.
    """
    y = t.sign() * x
    top = _top(y, counts > 0)
    arg = t.abs() * (y - top[:, None]).clamp_max(0)  # those above have count 0
    masses = arg.exp() * counts
    # One sum over all rows instead of five: kernels this small cost what launching them costs.
    columns = torch.stack([masses, masses.square(), arg.expm1() * counts, counts.to(x.dtype).expand_as(x), x * counts])
    return top, masses, _Sums(*columns.sum(-1))


def _tilted_value(t: Tensor, shift: Tensor, sums: _Sums) -> Tensor:
    """Return the tilted loss of each row from the sums of :func:`_sum_rows`."""
    ratio = sums.excess / sums.number  # as in StreamingTilt.loss
    log_mean = torch.where(ratio > -0.5, ratio.clamp_min(-0.5).log1p(), (sums.mass / sums.number).log())
    return torch.where(t == 0, sums.total / sums.number, t.sign() * shift + log_mean / t)


def _top(y: Tensor, members: Tensor) -> Tensor:
    """Return the largest member of each row; of a row without members, the lowest number."""
    return torch.where(members, y, torch.finfo(y.dtype).min / 4).amax(1)  # differences of two stay finite
