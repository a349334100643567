import math
import statistics

import pytest

from tiltsam.lab.stats import (
    Mean,
    best_of,
    confidence_interval,
    format_mean,
    is_significant,
    mean_of,
    paired_difference,
)


def test_mean_of():
    values = [0.2, 0.5, 0.9, 0.4]
    mean = mean_of(values)
    assert mean.value == pytest.approx(statistics.fmean(values), rel=1e-15)
    assert mean.error == pytest.approx(statistics.stdev(values) / 2, rel=1e-14)
    assert math.isnan(mean_of([1.0]).error)
    assert math.isnan(mean_of([]).value)
    assert math.isnan(mean_of([1.0, math.nan]).value)


def by_seed(*values):
    return dict(enumerate(values))


def test_best_of_needs_a_significant_paired_lead():
    clear = [by_seed(90, 80, 70), by_seed(91, 81.1, 70.9), by_seed(50, 20, 40)]
    assert best_of(clear) == 1  # although the scores vary more than they differ
    assert best_of(clear, highest=False) == 2
    assert best_of([by_seed(90, 80, 70), by_seed(92, 80.5, 70.1)]) is None  # [-1.7, 3.4]
    assert best_of([by_seed(90.0), by_seed(99.0)]) is None
    assert best_of([by_seed(90.0, 91.0), {2: 99.0, 3: 99.0}]) is None  # no common seed
    assert best_of([by_seed(90.0, 91.0), {}]) is None
    assert best_of([by_seed(90.0, 91.0), by_seed(math.nan, 99.0)]) is None
    # The mean is higher because of seed 2; on the common seeds it is lower.
    assert best_of([by_seed(90, 91), by_seed(89, 90, 99)]) is None


def test_is_significant_needs_an_interval_without_zero():
    assert is_significant(mean_of([1.0, 1.1, 0.9]))
    assert is_significant(mean_of([-1.0, -1.1, -0.9]))
    assert not is_significant(mean_of([1.0, 2.0, -0.9]))
    assert not is_significant(mean_of([0.0, 0.0]))
    assert not is_significant(mean_of([0.1, 0.1, 0.1]))  # of equal differences, the spread is unknown
    assert not is_significant(mean_of([1.0]))


@pytest.mark.parametrize(
    ("value", "error", "digits", "text"),
    [
        (95.486, 0.6712, 2, "95.49 ± 0.67"),
        (95.486, math.nan, 2, "95.49"),
        (math.nan, math.nan, 2, "–"),
        (480.0, 0.0, 0, "480"),
        (0.4999, 0.0, 3, "0.500 ± 0.000"),
        (14.2013, 0.9712, None, "14.20 ± 0.97"),
        (253.4, 16.2, None, "253 ± 16"),
        (1.163e-4, 4.2e-5, None, "(1.16 ± 0.42)e-4"),
        (-1.163e-4, 4.2e-5, None, "(-1.16 ± 0.42)e-4"),
        (0.0, 4.2e-5, None, "(0.0 ± 4.2)e-5"),
        (0.0, 0.0, None, "0"),
        (0.4, 1.0, None, "0.4 ± 1.0"),
        (7.5, 12.0, None, "8 ± 12"),
        (253_412.0, 16_211.0, None, "253412 ± 16211"),
        (2583521886.2, 1684779143.5, None, "(2.6 ± 1.7)e9"),
        (1263407680717.0, 60419073638.0, None, "(1.263 ± 0.060)e12"),
        (4286956.7, math.nan, None, "4.29e+06"),
        (45_730_820.0, 0.0, 0, "45730820"),
        (1.2345e-7, math.nan, None, "1.23e-07"),
    ],
)
def test_format_mean(value, error, digits, text):
    assert format_mean(Mean(value, error, 2), digits) == text


def test_paired_difference_uses_the_shared_seeds():
    difference = paired_difference({0: 3.0, 1: 5.0, 3: 9.0}, {0: 1.0, 1: 2.0, 2: 7.0})
    assert difference == mean_of([2.0, 3.0])
    assert paired_difference({0: 1.0}, {1: 1.0}).runs == 0


def test_confidence_interval_is_students():
    stats = pytest.importorskip("scipy.stats")
    values = [0.2, 0.5, 0.9, 0.4, 0.8, -3.0, 1.7, 1.1] * 20
    for count in (2, 3, 4, 5, 8, 31, 160):
        low, high = stats.ttest_1samp(values[:count], 0.0).confidence_interval(0.95)
        assert confidence_interval(mean_of(values[:count])) == pytest.approx((low, high), rel=1e-12)
    assert all(math.isnan(bound) for bound in confidence_interval(mean_of([1.0])))
