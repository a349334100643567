import pytest

from tiltsam.lab.data import find_task
from tiltsam.lab.errors import ConfigError
from tiltsam.lab.paper.recipes import RECIPES, find_recipe, parse_changes, select_methods


def test_recipes_cover_the_papers_tables_and_figures():
    assert list(RECIPES) == [
        *("images", "glue", "samples", "hmc-steps", "tilt", "schedule", "naive", "convergence", "runtime", "losses"),
        *("sharpness", "eigenvalues"),
    ]
    assert len(find_recipe("images").cells) == 8 * 7
    assert len(find_recipe("glue").cells) == 9 * 5
    cells = [(c.row, c.config.all_options()) for c in find_recipe("hmc-steps/dtd-vit").cells]
    assert [(row, options["num_samples"], options["ascent_steps"]) for row, options in cells] == [
        ("TSAM, N=1 (s=3)", 3, 1),
        ("TSAM, N=1 (s=5)", 5, 1),
        ("TSAM, N=2 (s=3)", 3, 2),
        ("TSAM, N=3 (s=3)", 3, 3),
    ]
    for column in find_recipe("samples").columns:
        cells = find_recipe(f"samples/{column}").cells
        rows = [(cell.row, cell.config.all_options().get("num_samples"), len(cell.paper)) for cell in cells]
        assert rows == [("SAM", None, 1), ("TSAM, s=1", 1, 0), ("TSAM, s=3", 3, 1), ("TSAM, s=5", 5, 1)]


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_cells_have_the_common_settings(name):
    recipe = find_recipe(name)
    assert recipe.source
    assert recipe.description[0].endswith(".")
    for cell in recipe.cells:
        find_task(cell.config.task)
        assert (cell.config.schedule, cell.config.momentum, cell.config.batch_size) == ("constant", 0.9, 64)


def test_select_restricts_columns_and_methods():
    recipe = find_recipe("images").select(columns=["dtd-vit", "dtd-wrn"], methods=["erm", "sam"])
    assert recipe.name == "images/dtd-vit+dtd-wrn"
    assert [(c.column, c.config.method) for c in recipe.cells] == [
        *(("dtd-vit", "erm"), ("dtd-vit", "sam"), ("dtd-wrn", "erm"), ("dtd-wrn", "sam"))
    ]
    with pytest.raises(ConfigError, match="nonsense"):
        recipe.select(columns=["nonsense"])
    with pytest.raises(ConfigError, match="tsam"):
        recipe.select(methods=["tsam"])


def test_select_takes_the_papers_names():
    (cell,) = find_recipe("images/dtd-vit").select(methods=["esam1"]).cells
    assert (cell.row, cell.method, cell.config.method) == ("ESAM1", "esam1", "sam")
    assert find_recipe("samples").methods == {"sam", "tsam"}


def test_select_methods_drops_recipes_without_them():
    recipes = [find_recipe(name) for name in ("images", "samples", "hmc-steps")]
    assert select_methods(recipes, None) == recipes
    selected = select_methods(recipes, ["erm", "sam"])
    assert [(r.name, sorted(r.methods)) for r in selected] == [("images", ["erm", "sam"]), ("samples", ["sam"])]
    with pytest.raises(ConfigError, match="nonsense"):
        select_methods(recipes, ["sam", "nonsense"])


def test_parse_changes_reads_values_by_type():
    texts = ["batch-size=128", "validation=0", "compile=true", "clip=none", "tsam:concurrent=true", "esam1:rho=0.2"]
    changes = {"batch_size": 128, "validation": 0.0, "compile": True, "clip": None}
    changes |= {"tsam:concurrent": True, "esam1:rho": 0.2}
    assert parse_changes(texts, [find_recipe("images")]) == changes
    assert parse_changes(["pgn:alpha=0.3"], [find_recipe("glue"), find_recipe("images")]) == {"pgn:alpha": 0.3}
    with pytest.raises(ConfigError, match="pgn:alpha"):
        parse_changes(["pgn:alpha=0.3"], [find_recipe("glue")])
