import math
import statistics

import pytest

from tiltsam.lab.stats import Mean, best_of, confidence_interval, format_mean, mean_of, paired_difference


def test_mean_of():
    values = [0.2, 0.5, 0.9, 0.4]
    mean = mean_of(values)
    assert mean.value == pytest.approx(statistics.fmean(values), rel=1e-15)
    assert mean.error == pytest.approx(statistics.stdev(values) / 2, rel=1e-14)
    assert math.isnan(mean_of([1.0]).error)
    assert math.isnan(mean_of([]).value)
    assert math.isnan(mean_of([1.0, math.nan]).value)


def test_best_of_needs_a_lead_beyond_the_error():
    clear = [Mean(90.0, 0.3, 3), Mean(91.0, 0.4, 3), Mean(80.0, 9.0, 3)]
    assert best_of(clear) == 1
    assert best_of(clear, highest=False) == 2
    assert best_of([Mean(90.0, 0.6, 3), Mean(91.0, 0.81, 3)]) is None  # 1 < √(.6² + .81²)
    assert best_of([Mean(90.0, math.nan, 1), Mean(99.0, math.nan, 1)]) is None
    assert best_of([Mean(90.0, 0.1, 3), mean_of([])]) is None


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
    values = [0.2, 0.5, 0.9, 0.4]
    low, high = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert confidence_interval(mean_of(values)) == pytest.approx((low, high), rel=1e-12)
    assert all(math.isnan(bound) for bound in confidence_interval(mean_of([1.0])))
