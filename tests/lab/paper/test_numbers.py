import pytest

from tiltsam.lab.paper import numbers


def test_glue_average_is_the_mean_of_its_row():
    """A typing error in one of the eleven numbers would change their mean by more than rounding does."""
    for method, (average,) in numbers.GLUE_AVERAGE.items():
        row = [n.value for column in numbers.GLUE.values() for n in column[method]]
        assert len(row) == 11
        assert sum(row) / 11 == pytest.approx(average.value, abs=0.025)


def test_tables_agree_where_they_print_the_same_number():
    for column, printed in numbers.SAMPLES.items():
        assert printed["sam"][0].value == numbers.IMAGES[column]["sam"][0].value
    for column, printed in numbers.HMC_STEPS.items():
        for s in (3, 5):
            assert printed[f"1,{s}"][0].value == numbers.SAMPLES[column][f"s={s}"][0].value
