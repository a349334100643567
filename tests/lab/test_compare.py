"""Comparing methods from Python."""

import pytest

from tiltsam.lab.compare import compare, comparison_cells
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.errors import ConfigError

SMALL = TrainConfig("digits", epochs=0.2, batch_size=128)


def test_compare_trains_each_method_with_each_seed_once(tmp_path):
    trained = []
    rows = compare(
        SMALL,
        ["erm", "sam:rho=0.1"],
        tmp_path,
        seeds=2,
        report=lambda config, progress: trained.append((config.method, config.seed)),
    )
    assert [(row.method, row.runs) for row in rows] == [("erm", 2), ("sam:rho=0.1", 2)]
    assert trained == [("erm", 0), ("sam", 0), ("erm", 1), ("sam", 1)]
    assert compare(SMALL, ["erm"], tmp_path, seeds=2, report=lambda *_: pytest.fail("trained again")) == rows[:1]


def test_comparison_cells_keep_the_first_of_equal_methods():
    assert list(comparison_cells(SMALL, ["sam", "sam:rho_schedule=constant", "erm"], 1)) == ["sam", "erm"]


@pytest.mark.parametrize(
    ("methods", "seeds", "value"), [(["sgd"], 1, "sgd"), (["erm:rho=1"], 1, "rho"), (["erm"], 0, "0")]
)
def test_compare_refuses_unknown_methods_settings_and_seeds(methods, seeds, value, tmp_path):
    with pytest.raises(ConfigError, match=value):
        compare(SMALL, methods, tmp_path, seeds=seeds)
    assert not list(tmp_path.iterdir())
