import json

import pytest

from tiltsam.lab.paper.recipes import find_recipe
from tiltsam.lab.paper.reproduce import Reproduction, ReproductionPlan, reproduce
from tiltsam.lab.paper.tables import comparison_tables, write_numbers


def test_tables_print_the_papers_digits(tmp_path):
    def rows(recipe):
        found = Reproduction(ReproductionPlan(find_recipe(recipe)), tmp_path)
        return [row for rows in comparison_tables(found).values() for row in rows]

    assert [row[2] for row in rows("glue/cola")][1:3] == ["52 / 80.34", "52 / 80.48"]
    assert [row[2] for row in rows("glue/mnli")][1:3] == ["79.6", "81.1"]
    assert [row[2] for row in rows("glue/stsb")][1:3] == ["86.6 / 86.3", "87.0 / 86.5"]
    assert [row[2] for row in rows("images/tiny-resnet34")][1] == "74.90 (0.1)"
    assert [row[2] for row in rows("runtime/dtd-vit")][1:3] == ["5", "6"]
    assert rows("losses")[1][2::2] == ["0.1283", "1.35", "3.48"]
    assert rows("eigenvalues")[1][2::2] == ["342.11", "232.60", "140.91"]


@pytest.mark.parametrize("name", ["losses", "sharpness", "eigenvalues"])
def test_measured_tables_count_their_runs(name, narrow, places):
    recipe = find_recipe(name).select(methods=["erm", "sam"])
    plan = ReproductionPlan(recipe, seeds=2, scale=0.005, device="cpu")
    found = reproduce(plan, **places)
    sam = recipe.cells[1]

    def runs():
        (rows, *_) = comparison_tables(found).values()
        if name == "losses":
            return [rows[0][-1], rows[1][-1], rows[2][-1]]
        return [text for text in rows[-1] if text]

    assert runs() == ["runs", "2", "2"]
    found.failed[plan.configs(sam)[1]] = "too sharp"
    found.measured[1].pop("sam")
    assert runs() == ["runs", "2", "1 of 2, 1 failed"]


def test_curve_table_before_the_first_evaluation(narrow, places):
    recipe = find_recipe("convergence/cifar100-resnet18").select(methods=["erm"])
    found = reproduce(ReproductionPlan(recipe, seeds=1, scale=0.01, device="cpu"), **places)  # two epochs
    ((heading, row),) = comparison_tables(found).values()
    shown = dict(zip(heading, row, strict=True))
    assert shown["ours: at 25%"] == "–"
    assert "–" not in (shown["ours: at 50%"], shown["ours: at 75%"], shown["ours: at 100%"])


def test_write_numbers_holds_what_the_tables_show(narrow, places, tmp_path):
    def written(found):
        write_numbers(found, tmp_path / "numbers.json")
        return json.loads((tmp_path / "numbers.json").read_text())

    recipe = find_recipe("tilt/noisy-resnet18").select(methods=["sam"])
    found = reproduce(ReproductionPlan(recipe, seeds=1, scale=0.01, device="cpu"), **places)
    (cell,) = written(found)["cells"]
    (rows,) = comparison_tables(found).values()
    assert list(cell["along"]) == ["0.25", "0.5", "0.75", "1"]
    assert f"{cell['along']['1']['value']:.2f}" == rows[1][4]
    assert f"{cell['at_best_validation']['value']:.2f}" == rows[1][5]
    assert cell["stopped_early"] == [{"value": 69.18, "source": "fig:multiple_t", "error": None, "digits": 2}]
    losses = find_recipe("losses").select(methods=["tsam"])
    (cell,) = written(reproduce(ReproductionPlan(losses, seeds=1, scale=0.005, device="cpu"), **places))["cells"]
    assert cell["paper_losses"]["train"] == {"ERM": 0.1763, "SAM": 0.27, "TSAM": 0.46}
    assert cell["paper_losses"]["test"] == {"ERM": 0.7163, "SAM": 0.9, "TSAM": 1.08}
    average = written(Reproduction(ReproductionPlan(find_recipe("glue")), places["out"]))["average"]["tsam"]
    assert average["paper"]["value"] == 78.01
    assert average["ours"] == {"value": None, "error": None, "runs": 0}
