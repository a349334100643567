"""Means over runs: standard errors, paired differences with a confidence interval, and how they are printed."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

__all__ = ["Mean", "best_of", "confidence_interval", "format_interval", "format_mean", "mean_of", "paired_difference"]

Seed = TypeVar("Seed", bound=Hashable)


class Mean(NamedTuple):
    """A mean over runs."""

    value: float
    error: float
    """Standard error: the standard deviation over √runs; NaN for one run."""
    runs: int


def mean_of(values: Sequence[float]) -> Mean:
    """Return the mean and its standard error; NaN without values or if one of them is NaN.

    Example:
        >>> mean_of([1.0, 2.0, 3.0])
        Mean(value=2.0, error=0.5773502691896257, runs=3)
    """
    count = len(values)
    if not count:
        return Mean(math.nan, math.nan, 0)
    value = math.fsum(values) / count
    if count == 1 or not math.isfinite(value):
        return Mean(value, math.nan, count)
    return Mean(value, math.sqrt(math.fsum([(v - value) ** 2 for v in values]) / (count * (count - 1))), count)


def paired_difference(scores: Mapping[Seed, float], reference: Mapping[Seed, float]) -> Mean:
    """Return the mean of ``scores[seed] - reference[seed]`` over the seeds that both have.

    Runs with the same seed share the data split, the label noise and the initial weights. Their differences vary less
    than the scores do.

    Example:
        >>> paired_difference({0: 91.0, 1: 93.0, 2: 90.0}, {0: 90.0, 1: 92.0})
        Mean(value=1.0, error=0.0, runs=2)
    """
    return mean_of([score - reference[seed] for seed, score in scores.items() if seed in reference])


def confidence_interval(mean: Mean) -> tuple[float, float]:
    """Return the two-sided 95% interval of Student's t distribution; NaN for fewer than two runs. Needs scipy.

    Example:
        >>> low, high = confidence_interval(mean_of([1.0, 2.0, 3.0]))
        >>> f"{low:.3f} {high:.3f}"
        '-0.484 4.484'
    """
    if mean.runs < 2:
        return math.nan, math.nan
    from scipy.stats import t

    half = float(t.ppf(0.975, mean.runs - 1)) * mean.error
    return mean.value - half, mean.value + half


def best_of(means: Sequence[Mean], *, highest: bool = True) -> int | None:
    """Return the index of the best mean if it leads the next by more than the standard error of their difference.

    That error is √(a² + b²) of the two standard errors. Single runs have none, so among them no mean is best.

    Example:
        >>> best_of([Mean(90.0, 0.3, 3), Mean(91.0, 0.4, 3)])
        1
        >>> best_of([Mean(90.0, 0.8, 3), Mean(91.0, 0.8, 3)]) is None
        True
    """
    order = sorted((i for i, m in enumerate(means) if math.isfinite(m.value)), key=lambda i: means[i].value)
    if len(order) < 2:
        return None
    first, second = (order[-1], order[-2]) if highest else (order[0], order[1])
    lead = abs(means[first].value - means[second].value)
    return first if lead > math.hypot(means[first].error, means[second].error) else None


def format_interval(mean: Mean, digits: int = 2) -> str:
    """Return the 95% confidence interval as text; ``–`` for fewer than two runs.

    Example:
        >>> format_interval(mean_of([1.0, 2.0, 3.0]))
        '[-0.48, +4.48]'
    """
    low, high = confidence_interval(mean)
    return "–" if math.isnan(low) else f"[{low:+.{digits}f}, {high:+.{digits}f}]"


def format_mean(mean: Mean, digits: int | None = None, sign: Literal["", "+"] = "") -> str:
    """Return ``value ± error``, without the error where it is not finite; ``–`` if the value is not finite.

    Args:
        mean: The mean.
        digits: Digits after the point; by default as many as are significant given the error.
        sign: ``"+"`` also marks positive values, such as differences.

    Example:
        >>> format_mean(Mean(4.87e-5, 2.04e-5, 3))
        '(4.9 ± 2.0)e-5'
        >>> format_mean(Mean(71.394, math.nan, 1), 2)
        '71.39'
    """
    if not math.isfinite(mean.value):
        return "–"
    error = mean.error if math.isfinite(mean.error) else None
    if digits is None:
        digits = _digits(error, 2) if error else 0 if float(mean.value).is_integer() else _digits(mean.value, 4)
    if error is None or (error == 0 and digits == 0):  # a count that is the same in all runs needs no error
        return f"{mean.value:{sign}.{digits}f}" if digits <= 4 else f"{mean.value:{sign}.3g}"
    if digits <= 4:
        return f"{mean.value:{sign}.{digits}f} ± {error:.{digits}f}"
    power = math.floor(math.log10(max(abs(mean.value), error)))  # a variance of 1e-5 is shorter with an exponent
    more = max(power + digits, 0)
    return f"({mean.value / 10**power:{sign}.{more}f} ± {error / 10**power:.{more}f})e{power}"


def _digits(x: float, significant: int) -> int:
    """Return the digits after the point that show this many significant ones."""
    return max(significant - 1 - math.floor(math.log10(abs(x))), 0)
