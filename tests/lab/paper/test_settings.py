import pytest

from tiltsam.lab import models
from tiltsam.lab.paper import numbers
from tiltsam.lab.paper.settings import COLUMNS, PUBLISHED_EXAMPLES, column_config, training_examples


def test_column_config_has_the_stated_settings():
    def option(column, method, name):
        return column_config(column, method).all_options()[name]

    cell = column_config("cifar100-resnet18", "sam")
    assert (cell.all_options()["rho"], cell.weight_decay, cell.label_smoothing, cell.epochs) == (0.05, 5e-4, 0.1, 200)
    assert option("dtd-vit", "sam", "rho") == option("noisy-wrn", "sam", "rho") == 0.1
    assert [option(c, "tsam", "t") for c in ("cifar100-wrn", "dtd-vit", "noisy-resnet18")] == [20, 5, 1]
    assert all(option(c, "tsam", "delta") is None for c in COLUMNS)  # t/2
    assert column_config("dtd-vit", "erm").epochs == 20
    assert column_config("rte", "erm").epochs == 10
    assert (column_config("rte", "erm").max_length, column_config("rte", "erm").clip) == (64, 1.0)


def test_esam1_is_sam_for_the_budget_of_tsam():
    sam, esam1 = (column_config("noisy-resnet18", method) for method in ("sam", "esam1"))
    assert esam1 == sam.with_settings({"epochs": 5 * sam.epochs})


def test_num_samples_is_the_better_one_of_the_papers_table():
    for column, printed in numbers.SAMPLES.items():
        better = max((3, 5), key=lambda s: printed[f"s={s}"][0].value)
        assert column_config(column, "tsam").all_options()["num_samples"] == better
        assert printed[f"s={better}"][0].value == numbers.IMAGES[column]["tsam"][0].value


def test_training_examples_are_published_minus_validation():
    assert training_examples(column_config("cifar100-resnet18", "erm")) == 45_000
    assert training_examples(column_config("dtd-vit", "erm")) == 1_880
    assert training_examples(column_config("rte", "erm")) == 2_241
    assert set(PUBLISHED_EXAMPLES) == {column.base.task for column in COLUMNS.values()}


@pytest.mark.parametrize(("name", "parameters"), [("resnet18", 11.2e6), ("wrn16-8", 11.0e6), ("resnet34", 21.3e6)])
def test_networks_have_the_published_size(name, parameters):
    model = models.MODELS[name](100, image_size=32)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.01)
