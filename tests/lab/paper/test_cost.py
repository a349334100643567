import math
from functools import lru_cache

import pytest

from tiltsam.cli import main
from tiltsam.lab.paper import cost
from tiltsam.lab.paper.recipes import RECIPES, find_recipe
from tiltsam.lab.paper.reproduce import ReproductionPlan
from tiltsam.lab.paper.settings import COLUMNS, column_config


@pytest.fixture
def timed(monkeypatch):
    """Replace the timing by 0.36 s per pass; return what was timed."""
    keys = []
    monkeypatch.setattr(cost, "_time_pass", lru_cache(lambda *key: keys.append(key) or 0.36))
    return keys


@pytest.mark.parametrize("column", COLUMNS)
def test_equal_budgets_are_equal_passes(column):
    passes = {m: cost.num_passes(column_config(column, m)) for m in ("esam1", "esam2", "pgn", "rsam", "tsam")}
    assert passes == pytest.approx(dict.fromkeys(passes, passes["tsam"]))
    erm, sam = (cost.num_passes(column_config(column, m)) for m in ("erm", "sam"))
    assert 2 * COLUMNS[column].num_samples * erm == COLUMNS[column].num_samples * sam == passes["tsam"]


def test_num_steps_of_published_size():
    assert cost.num_steps(column_config("cifar100-resnet18", "erm"), 45_000) == 200 * 703


def test_measuring_passes_scale_with_the_plan():
    full, tenth = (ReproductionPlan(find_recipe("sharpness"), scale=scale) for scale in (1.0, 0.1))
    config = full.recipe.cells[0].config
    assert cost.measuring_passes(full, config) / cost.measuring_passes(tenth, config) == pytest.approx(100, rel=0.01)
    assert cost.measuring_passes(ReproductionPlan(find_recipe("images")), config) == 0


def list_rows(out):
    """Return the cells of the printed table by name."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines()]
    return {cells[0]: cells[1:] for cells in lines if len(cells) == 5}


def test_reproduce_list_shows_passes_and_hours(capsys, timed):
    assert main(["reproduce", "--list", "--seeds", "1", "--device", "cpu"]) == 0
    rows = list_rows(capsys.readouterr().out)
    assert set(RECIPES) <= set(rows)
    passes = 703 * 200 * (1 + 2 + 5 * 10)
    assert rows["images/cifar100-resnet18"] == ["7", f"{passes:,}", "", f"{passes / 1e4:.3g}"]
    assert rows["sharpness"][2]
    assert len({key[:2] for key in timed}) == len(timed) == 6  # each model once per size of its inputs


def test_reproduce_list_of_methods(capsys, timed):
    assert main(["reproduce", "--list", "--methods", "erm", "sam", "--device", "cpu"]) == 0
    rows = list_rows(capsys.readouterr().out)
    assert rows["images"][0] == str(8 * 2 * 3)
    assert rows["samples"][0] == str(3 * 3)  # without ERM
    assert "hmc-steps" not in rows


def test_seconds_per_pass_times_the_model(narrow, capsys):
    cost._time_pass.cache_clear()
    seconds = [cost.seconds_per_pass(column_config("dtd-wrn", method), "cpu") for method in ("tsam", "sam")]
    assert 0 < seconds[0] == seconds[1] < 60
    assert capsys.readouterr().err.count("timing") == 1
    cost._time_pass.cache_clear()


def test_seconds_per_pass_without_transformers(monkeypatch, capsys):
    def missing(name):
        raise ImportError(name)

    cost._time_pass.cache_clear()
    monkeypatch.setattr(cost.importlib, "import_module", missing)
    assert math.isnan(cost.seconds_per_pass(column_config("rte", "erm"), "cpu"))
    assert main(["reproduce", "--list", "glue/rte", "--device", "cpu"]) == 0
    assert list_rows(capsys.readouterr().out)["glue/rte"][-1] == "?"
    cost._time_pass.cache_clear()
