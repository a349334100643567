"""Means over runs: standard errors, paired differences with a confidence interval, and how they are printed."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

__all__ = [
    "Mean",
    "best_of",
    "confidence_interval",
    "count_of",
    "format_interval",
    "format_mean",
    "format_score",
    "is_significant",
    "mean_of",
    "paired_difference",
]

Seed = TypeVar("Seed", bound=Hashable)


class Mean(NamedTuple):
    """A mean over runs."""

    value: float
    error: float
    """Standard error: the standard deviation over √runs; NaN for one run."""
    runs: int


def mean_of(values: Iterable[float]) -> Mean:
    """Return the mean and its standard error; NaN without values or if one of them is NaN.

    Example:
        >>> mean_of([1.0, 2.0, 3.0])
        Mean(value=2.0, error=0.5773502691896257, runs=3)
    """
    values = list(values)
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
    """Return the two-sided 95% interval of Student's t distribution; NaN for fewer than two runs.

    Also NaN if all values are equal, as a few counts of errors may be: they do not show the spread.

    Example:
        >>> low, high = confidence_interval(mean_of([1.0, 2.0, 3.0]))
        >>> f"{low:.3f} {high:.3f}"
        '-0.484 4.484'
    """
    if mean.runs < 2 or mean.error <= 1e-9 * abs(mean.value):
        return math.nan, math.nan
    from scipy.special import stdtrit  # the quantile of Student's t; takes a moment to import

    half = float(stdtrit(mean.runs - 1, 0.975)) * mean.error
    return mean.value - half, mean.value + half


def is_significant(difference: Mean) -> bool:
    """Return whether the 95% confidence interval excludes 0; never if there is none.

    Example:
        >>> is_significant(mean_of([1.0, 2.0, 3.0]))
        False
        >>> is_significant(mean_of([2.0, 2.1, 2.2]))
        True
    """
    low, high = confidence_interval(difference)
    return low > 0 or high < 0


def best_of(samples: Sequence[Mapping[Seed, float]], *, highest: bool = True) -> int | None:
    """Return the index of the sample with the best mean if it is significantly ahead of the next.

    The difference is paired by seed, see :func:`paired_difference`. Without two common seeds no sample is best.

    Example:
        >>> best_of([{0: 90.0, 1: 80.0}, {0: 91.0, 1: 81.1}])
        1
        >>> best_of([{0: 90.0, 1: 80.0}, {0: 91.0, 1: 80.1}]) is None
        True
    """
    means = [mean_of(sample.values()).value for sample in samples]
    order = sorted((i for i, mean in enumerate(means) if math.isfinite(mean)), key=lambda i: means[i], reverse=highest)
    if len(order) < 2:
        return None
    lead = paired_difference(samples[order[0]], samples[order[1]])
    return order[0] if is_significant(lead) and (lead.value > 0) == highest else None


def format_interval(mean: Mean, digits: int = 2) -> str:
    """Return the 95% confidence interval as text; ``–`` if there is none.

    Example:
        >>> format_interval(mean_of([1.0, 2.0, 3.0]))
        '[-0.48, +4.48]'
    """
    low, high = confidence_interval(mean)
    return "–" if math.isnan(low) else f"[{low:+z.{digits}f}, {high:+z.{digits}f}]"


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
    size = max(abs(mean.value), error or 0.0)
    scientific = digits is None and size >= 1e6
    if digits is None:
        digits = _digits(error, 2) if error else 0 if float(mean.value).is_integer() else _digits(mean.value, 4)
    scientific = scientific or digits > 4  # a variance of 1e-5 is shorter with an exponent
    shown = max(digits, 0)
    if error is None or (error == 0 and shown == 0):  # a count that is the same in all runs needs no error
        return f"{mean.value:{sign}.3g}" if scientific else f"{mean.value:{sign}.{shown}f}"
    if not scientific:
        return f"{mean.value:{sign}.{shown}f} ± {error:.{shown}f}"
    power = math.floor(math.log10(size))
    more = max(power + digits, 0)
    return f"({mean.value / 10.0**power:{sign}.{more}f} ± {error / 10.0**power:.{more}f})e{power}"


def format_score(result: Mapping[str, Any]) -> str:
    """Return the metric and the score of a result as text: a correlation times 100, others in per cent.

    Example:
        >>> format_score({"metric": "accuracy", "score": 0.832}), format_score({"metric": "pearson", "score": 0.1439})
        ('accuracy 83.20', 'pearson ×100 14.39')
    """
    unit = "" if result["metric"] in ("accuracy", "f1") else " ×100"
    return f"{result['metric']}{unit} {100 * result['score']:.2f}"


def _digits(x: float, significant: int) -> int:
    """Return the digits after the point that show this many significant ones; negative for large numbers."""
    return significant - 1 - math.floor(math.log10(abs(x)))


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun, as in ``1 seed`` and ``3 seeds``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
