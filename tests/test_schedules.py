"""Schedules of settings."""

import pickle

import pytest

from tiltsam.schedules import _Linear, late_phase, linear_down, linear_up


def test_linear_schedules():
    assert [linear_up(8.0, 4)(k) for k in (0, 1, 4, 9)] == [0.0, 2.0, 8.0, 8.0]
    assert [linear_down(8.0, 4)(k) for k in (0, 1, 4, 9)] == [8.0, 6.0, 0.0, 0.0]
    assert _Linear(1.0, 3.0, 2)(1) == 2.0
    assert [_Linear(20.3, 0.1, 4)(k) for k in (0, 4, 9)] == [20.3, 0.1, 0.1]
    assert {_Linear(0.3, 0.3, 10)(k) for k in range(12)} == {0.3}
    for schedule in (linear_up, linear_down, late_phase):
        for num_steps in (0, 2.5):
            with pytest.raises(ValueError, match=f"num_steps .*got {num_steps}"):
                schedule(1.0, num_steps)


def test_late_phase_schedule():
    assert [late_phase(0.5, 4)(k) for k in range(5)] == [0.0, 0.0, 0.0, 0.5, 0.5]
    assert [late_phase(0.5, 30, fraction=0.1)(k) for k in (2, 3)] == [0.0, 0.5]  # 0.1 · 30 is above 3
    for fraction in (-0.1, 1.1):
        with pytest.raises(ValueError, match=f"fraction .*{fraction}"):
            late_phase(0.5, 4, fraction)


def test_schedules_can_be_pickled():
    for schedule in (linear_up(1.0, 4), linear_down(1.0, 4), late_phase(1.0, 4)):
        assert pickle.loads(pickle.dumps(schedule)) == schedule
