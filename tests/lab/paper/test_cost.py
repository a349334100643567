import pytest

from tiltsam.cli import main
from tiltsam.lab.paper import cost
from tiltsam.lab.paper.recipes import RECIPES, find_recipe
from tiltsam.lab.paper.reproduce import ReproductionPlan
from tiltsam.lab.paper.settings import COLUMNS, column_config
from tiltsam.lab.two_tilts import SEEDS, STUDIES, num_runs


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
    return {cells[0]: cells[1:] for cells in lines if len(cells) == 4}


def test_reproduce_list_shows_passes(capsys):
    assert main(["reproduce", "--list", "--seeds", "1"]) == 0
    rows = list_rows(capsys.readouterr().out)
    assert set(RECIPES) <= set(rows)
    passes = 703 * 200 * (1 + 2 + 5 * 10)
    assert rows["images/cifar100-resnet18"] == ["7", f"{passes:,}", ""]
    assert rows["sharpness"][2]


def test_reproduce_list_with_changed_settings(capsys):
    run = ["reproduce", "--list", "--seeds", "1", "--methods", "erm", "sam", "pgn"]
    assert main([*run, "--set", "batch_size=128", "validation=0", "--set", "pgn:every=2"]) == 0
    rows = list_rows(capsys.readouterr().out)
    steps = 390 * 200  # 50,000 // 128 per epoch
    assert rows["images/cifar100-resnet18"] == ["3", f"{steps * (1 + 2) + 5 * steps * 3 // 2:,}", ""]
    assert rows["samples/cifar100-resnet18"] == ["1", f"{steps * 2:,}", ""]  # without PGN


def test_reproduce_list_of_methods(capsys):
    assert main(["reproduce", "--list", "--methods", "erm", "sam"]) == 0
    rows = list_rows(capsys.readouterr().out)
    assert rows["images"][0] == str(8 * 2 * 3)
    assert rows["samples"][0] == str(3 * 3)  # without ERM
    assert "hmc-steps" not in rows


def test_reproduce_list_has_a_row_of_two_tilts(capsys):
    assert main(["reproduce", "--list"]) == 0
    out = capsys.readouterr().out
    rows = list_rows(out)
    numbers = [num_runs(study, SEEDS) for study in STUDIES.values()]
    assert rows["two-tilts"] == [f"{sum(numbers)}", f"{520 * sum(numbers):,}", ""]
    assert [rows[f"two-tilts/{name}"][0] for name in STUDIES] == [f"{number}" for number in numbers]
    assert "seeds 3 (two-tilts: 5), scale 1" in out
    assert main(["reproduce", "--list", "--methods", "pgn"]) == 0
    assert "two-tilts" not in capsys.readouterr().out
