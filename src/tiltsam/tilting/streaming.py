"""Exponential tilting of losses: the soft maximum that TSAM descends.

For losses ``x_1 .. x_s`` and a real tilt ``t``

    tilted loss      (1/t) log (1/s) sum_j exp(t x_j)      (Eq. 3 of the paper, its mean over μ by s draws)
    tilted weights   w_j = exp(t x_j) / sum_k exp(t x_k)
    tilted mean      sum_j w_j x_j
    tilted variance  sum_j w_j (x_j - tilted mean)^2       (Definitions 3.4, 3.5: t-sharpness)

At ``t = 0`` these are the plain mean, uniform weights, the mean and the (biased) variance; as ``t`` grows the tilted
loss tends to the maximum. As t → −∞ it tends to the minimum, because tilted_loss(x, −t) = −tilted_loss(−x, t).
Everything is computed by :class:`StreamingTilt`, a log-sum-exp shifted by the running maximum of the *losses* (not of
``t`` times the losses: the difference of two losses is exact where the difference of two huge products is rounding
error), so ``t = 1e6`` with losses of 1e4 stays finite and accurate. A tilt beyond the range of float32 is clamped to
it, which gives the limit to the last digit. Losses of +inf share all the weight if ``t > 0``, and make the tilted loss
and mean infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

__all__ = [
    "StreamingTilt",
    "check_tilt",
    "effective_sample_size",
    "tilted_loss",
    "tilted_mean",
    "tilted_var",
    "tilted_weights",
    "to_working_dtype",
]

Tilt: TypeAlias = float | Tensor
"""A tilt: a number, or a 0-dim tensor where the value must stay on the device."""

_TINY = 1e-30  # keeps 0/0 away where nothing valid was added; any mass of a valid loss is at least 1


class StreamingTilt:
    """Streaming log-sum-exp of ``t * loss`` over losses that arrive one by one or in chunks, in any order.

    Keeps six scalars whatever the number of losses, and reads no value back to the host.

    Args:
        t: The tilt. A 0-dim tensor must be ``>= 0``, and is not checked.

    Example:
        >>> tilt = StreamingTilt(t=2.0)
        >>> for loss in torch.tensor([0.0, 1.0, 0.5]):
        ...     share = tilt.add(loss)
        >>> torch.testing.assert_close(tilt.loss(), tilted_loss(torch.tensor([0.0, 1.0, 0.5]), 2.0))
    """

    def __init__(self, t: Tilt) -> None:
        self.t = t if isinstance(t, Tensor) else check_tilt(t)
        self._negative = not isinstance(t, Tensor) and t < 0
        self._tilt: Tilt = -self.t if self._negative else self.t  # applied to -losses if t < 0
        self._state: _State | None = None

    def add(self, losses: Tensor, valid: Tensor | None = None) -> Tensor:
        """Add a loss or a chunk of losses.

        Args:
            losses: A scalar or a tensor of any shape.
            valid: Mask of the losses that count (same shape, bool); the others get no weight, whatever their value.

        Returns:
            The share of the added losses in the total weight so far, a scalar in [0, 1]. A running weighted mean is
            ``mean += share * (new - mean)``.
        """
        old = self._state
        losses = -to_working_dtype(losses) if self._negative else to_working_dtype(losses)
        if valid is not None and valid.dim() == 0 and valid.device.type == "cpu" and valid:
            valid = None  # as in a step: reading one flag on the host is cheaper than masking
        top = losses.detach() if valid is None else losses.detach().masked_fill(~valid, -math.inf)
        top = _total(top, Tensor.amax)
        if old is not None:
            top = torch.maximum(old.top, top)
        shift = _finite(top)
        gap = _finite(losses if valid is None else torch.where(valid, losses, shift)) - shift
        arg = self._tilt * gap
        masses, excesses = arg.exp(), arg.expm1()
        if valid is None:
            number = torch.full_like(top, losses.numel())
        else:
            masses, excesses = masses.masked_fill(~valid, 0.0), excesses.masked_fill(~valid, 0.0)
            number = valid.sum().to(losses.dtype)
        added = mass = _total(masses)
        excess, weighted = _total(excesses), _total(gap * masses)
        if old is not None:
            down = torch.where(old.number > 0, old.shift, shift) - shift
            fade = self._tilt * down
            faded = fade.exp()
            weighted = weighted + faded * (old.weighted + down * old.mass)
            excess = excess + old.excess * faded + old.number * fade.expm1()
            mass = mass + old.mass * faded
            number = number + old.number
        self._state = _State(top, shift, mass, excess, weighted, number)
        return added / mass.clamp_min(_TINY)

    def loss(self) -> Tensor:
        """Return the tilted loss of all added losses: their mean at ``t = 0``; NaN if none was valid."""
        state = self._added()
        # log(mass/count): by log1p of the excess if that is small (small t), else directly.
        ratio = state.excess / state.number
        log_mean = torch.where(ratio > -0.5, ratio.clamp_min(-0.5).log1p(), (state.mass / state.number).log())
        if isinstance(self._tilt, Tensor) and self._tilt.device.type != "cpu":  # reading it would wait for the device
            tilted = state.top + log_mean / self._tilt.masked_fill(self._tilt == 0, 1.0)
            return torch.where(self._tilt == 0, self.mean(), tilted)
        if self._tilt == 0:
            return self.mean()
        tilted = state.top + log_mean / self._tilt
        return -tilted if self._negative else tilted

    def mean(self) -> Tensor:
        """Return the tilted mean of all added losses; NaN if none was valid."""
        state = self._added()
        mean = state.top + state.weighted / state.mass
        return -mean if self._negative else mean

    def weights(self, losses: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the weights of ``losses`` relative to all added losses; 0 where not valid."""
        state = self._added()
        losses = -to_working_dtype(losses) if self._negative else to_working_dtype(losses)
        ok = torch.ones_like(losses, dtype=torch.bool) if valid is None else valid
        arg = self._tilt * (_finite(torch.where(ok, losses, state.shift)) - state.shift)
        return torch.where(ok, arg.exp() / state.mass.clamp_min(_TINY), 0.0)

    def subset(self, samples: Sequence[int], /) -> StreamingTilt:
        """Return an empty one with the same tilt, for a rank that draws only some of the samples of a step."""
        del samples  # weights depend on losses only
        return StreamingTilt(self.t)

    def _added(self) -> _State:
        if self._state is None:
            raise ValueError("no loss was added yet")
        return self._state


class _State(NamedTuple):
    """State of a StreamingTilt, all scalars."""

    top: Tensor  # the largest valid loss; -inf while there is none
    shift: Tensor  # the same, clamped to finite numbers
    mass: Tensor  # sum of exp(t (loss - shift))
    excess: Tensor  # mass - count, kept separately because at small t it is tiny compared with both
    weighted: Tensor  # sum of exp(t (loss - shift)) (loss - shift)
    number: Tensor  # number of valid losses


def tilted_loss(losses: Tensor, t: Tilt) -> Tensor:
    """Return the tilted loss ``(1/t) log mean exp(t * losses)`` over all elements.

    Between the mean and the maximum for ``t > 0``, at least ``max - log(s)/t``; between the minimum and the mean for
    ``t < 0``. Differentiable: its gradient with respect to ``losses`` is :func:`tilted_weights`.

    Args:
        losses: Any shape, at least one element.
        t: The tilt; at 0 the plain mean.

    Raises:
        ValueError: If ``losses`` is empty or ``t`` is not finite.

    Example:
        >>> tilted_loss(torch.tensor([1.0, 3.0]), t=0.0)
        tensor(2.)
        >>> tilted_loss(torch.tensor([1.0, 3.0]), t=1e6)
        tensor(3.0000)
    """
    sign, _, tilt = _tilt_over(losses, t)
    return sign * tilt.loss()


def tilted_weights(losses: Tensor, t: Tilt, valid: Tensor | None = None) -> Tensor:
    """Return the weights ``exp(t * losses) / sum exp(t * losses)``, in the shape of ``losses``.

    Args:
        losses: Any shape, at least one element.
        t: The tilt; at 0 the weights are uniform.
        valid: Mask of the losses that count; the others get weight 0. If none counts, all weights are 0.

    Example:
        >>> tilted_weights(torch.tensor([0.0, 0.0]), t=5.0)
        tensor([0.5000, 0.5000])
    """
    _, losses, tilt = _tilt_over(losses, t, valid)
    return tilt.weights(losses, valid)


def tilted_mean(x: Tensor, t: Tilt) -> Tensor:
    """Return the tilted mean ``sum w x`` with ``w`` proportional to ``exp(t * x)`` (Definition 3.4)."""
    sign, _, tilt = _tilt_over(x, t)
    return sign * tilt.mean()


def tilted_var(x: Tensor, t: Tilt) -> Tensor:
    """Return the tilted variance ``sum w (x - tilted mean)^2``, ``w`` proportional to ``exp(t * x)`` (Def. 3.4).

    A point is *t-sharper* than another if the tilted variance of the losses around it is larger. Computed about
    the mean, not as ``sum w x^2 - mean^2``, which loses all digits when losses are large and close together.
    """
    _, losses, tilt = _tilt_over(x, t)
    weights = tilt.weights(losses)
    # A loss without weight may be infinite: 0 times inf would be NaN.
    return (weights * torch.where(weights > 0, losses - tilt.mean(), 0.0).square()).sum()


def effective_sample_size(weights: Tensor) -> Tensor:
    """Return ``(sum w)^2 / sum w^2``: s for equal weights, 1 if one sample has all the weight."""
    return weights.sum().square() / weights.square().sum().clamp_min(_TINY)


def check_tilt(t: float, name: str = "t") -> float:
    """Return a tilt clamped to the range of float32, at whose ends results equal their limits; 0 if subnormal."""
    if not isinstance(t, Real):
        raise TypeError(f"{name} must be a number, got {type(t).__name__}")
    if not math.isfinite(t):
        raise ValueError(f"{name} must be finite, got {t}")
    limits = torch.finfo(torch.float32)
    return 0.0 if abs(t) < limits.tiny else math.copysign(min(abs(t), limits.max), t)


def to_working_dtype(losses: Tensor) -> Tensor:
    """Convert losses to float32, unless they are float64."""
    return losses if losses.dtype == torch.float64 else losses.float()


def _tilt_over(losses: Tensor, t: Tilt, valid: Tensor | None = None) -> tuple[Tensor | float, Tensor, StreamingTilt]:
    """Return ``sign``, ``sign * losses`` and a tilt to which these were added.

    The sign is 1, or that of a tensor ``t``: StreamingTilt takes negative numbers, but tensors ``>= 0`` only.
    """
    sign, size = (torch.where(t < 0, -1.0, 1.0), t.abs()) if isinstance(t, Tensor) else (1.0, t)
    tilt = StreamingTilt(size)
    if losses.numel() == 0:
        raise ValueError("losses must have at least one element, got an empty tensor")
    losses = sign * to_working_dtype(losses)
    tilt.add(losses, valid)
    return sign, losses, tilt


def _finite(x: Tensor) -> Tensor:
    """Clamp infinities to the largest finite numbers, whose differences are never NaN; NaN stays."""
    limit = torch.finfo(x.dtype).max
    return x.clamp(-limit, limit)


def _total(x: Tensor, reduce: Callable[[Tensor], Tensor] = torch.sum) -> Tensor:
    """Reduce all elements. A step adds its losses one by one: a scalar needs no kernel."""
    return reduce(x) if x.dim() else x
