"""Every table and figure of the paper: the recipes parse, run, count their passes, and print our numbers by theirs."""

import dataclasses
import json
import math
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here may ask the network

import pytest
import torch

from helpers import lab_files
from tiltsam.cli import main
from tiltsam.lab import compare as compare_module
from tiltsam.lab import models
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.data import GLUE, find_task, load
from tiltsam.lab.data.loader import normalise
from tiltsam.lab.errors import DataError
from tiltsam.lab.models import load_model
from tiltsam.lab.recipes import cost, measures, paper
from tiltsam.lab.recipes.book import RECIPES, find_recipe
from tiltsam.lab.recipes.measures import Thoroughness
from tiltsam.lab.recipes.reproduce import Outcome, Plan, reproduce
from tiltsam.lab.recipes.settings import COLUMNS, DISTILBERT, VIT, column_config
from tiltsam.lab.recipes.tables import ours, tables, write_json
from tiltsam.lab.record import Record
from tiltsam.lab.train import TrainError

# -------------------------------------------------------------------------------- two steps of every recipe

NEED_TRANSFORMERS = {"dtd-vit", *GLUE}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder to work in: small files in the real layouts, and small pretrained models under their real names."""
    root = tmp_path_factory.mktemp("recipes")
    lab_files.cifar(root / "data", fine=True, n=6)
    lab_files.tiny(root / "data")
    lab_files.dtd(root / "data")
    for task in GLUE:
        lab_files.glue(root / "data", task)
    return root


@pytest.fixture(scope="module")
def pretrained(here):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    vit = transformers.ViTConfig(
        image_size=224, patch_size=112, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    transformers.ViTForImageClassification(vit).save_pretrained(here / VIT.removeprefix("hf:"))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "he", "said", "no", "more", "reply", '"']
    bert = here / DISTILBERT.removeprefix("hf:")
    bert.mkdir(parents=True)
    (bert / "vocab.txt").write_text("\n".join(words))
    transformers.DistilBertTokenizerFast(vocab=str(bert / "vocab.txt")).save_pretrained(bert)
    config = transformers.DistilBertConfig(
        vocab_size=len(words), dim=16, n_layers=1, n_heads=2, hidden_dim=32, max_position_embeddings=64
    )
    transformers.DistilBertModel(config).save_pretrained(bert)


@pytest.fixture
def narrow(monkeypatch):
    """Two convolutions in place of many: all the steps of the real networks would take an hour."""
    for name in ("resnet18", "resnet34", "wrn16-8"):
        monkeypatch.setitem(models.MODELS, name, lambda classes, **_: models.cnn(classes, channels=3, width=4))


def scale_of_two_steps(config):
    """Where an epoch is one batch. ESAM1 goes on for s times its epochs."""
    return 2 / (config.epochs * (config.num_samples if config.method == "esam1" else 1))


@pytest.mark.parametrize(
    ("name", "column"), [(name, column) for name, make in RECIPES.items() for column in make().columns]
)
def test_every_recipe_runs_two_steps(name, column, here, narrow, request, monkeypatch):
    """All cells, with one seed; runs that recipes share are made once. Passes are counted before, and afterwards."""
    if column in NEED_TRANSFORMERS:
        request.getfixturevalue("pretrained")
    monkeypatch.chdir(here)
    recipe = find_recipe(f"{name}/{column}")
    seen = len(load(recipe.cells[0].config, here / "data").train)
    for scale in dict.fromkeys(scale_of_two_steps(cell.config) for cell in recipe.cells):
        cells = tuple(cell for cell in recipe.cells if scale_of_two_steps(cell.config) == scale)
        plan = Plan(dataclasses.replace(recipe, cells=cells), seeds=1, scale=scale, device="cpu")
        outcome = reproduce(plan, here / "runs", root=here / "data")
        for cell in cells:
            (config,) = plan.configs(cell)
            changed = {"epochs": cell.config.epochs * scale, "device": "cpu"}
            assert config == dataclasses.replace(cell.config, **changed)  # nothing else is changed by scaling
            (result,) = outcome.results(cell)
            assert result["steps"] == cost.num_steps(config, seen) == 2
            assert result["passes"] == pytest.approx(cost.num_passes(config, seen), abs=1e-3)
        shown = [table.rows for table in tables(outcome)]
        ratios = [row.pop(3) for rows in shown for row in rows] if recipe.kind == "minutes" else []  # to ERM, if here
        assert "not run" not in {text for rows in shown for row in rows for text in row}
        assert ratios or recipe.kind != "minutes"
        write_json(outcome, here / "numbers.json")
        assert len(json.loads((here / "numbers.json").read_text())["cells"]) == len(cells)


def test_a_real_network_takes_two_steps(here, tmp_path):
    recipe = find_recipe("images/cifar100-resnet18").only(methods=["erm"])
    outcome = reproduce(Plan(recipe, seeds=1, scale=0.01, device="cpu"), tmp_path, root=here / "data")
    (record,) = outcome.records(recipe.cells[0])
    assert record.result()["steps"] == 2
    assert sum(v.numel() for k, v in record.model().items() if "running" not in k) == pytest.approx(11.2e6, rel=0.01)


@pytest.mark.parametrize(
    ("column", "parameters"), [("cifar100-wrn", 11.0e6), ("dtd-wrn", 11.0e6), ("tiny-resnet34", 21.4e6)]
)
def test_the_other_networks_are_the_real_ones(column, parameters):
    config = COLUMNS[column].base
    model = models.build(config.model, cost._made_data(config, 1)).eval()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.01)


# -------------------------------------------------------------------------------- what the recipes say


def test_the_promised_tables_and_figures_are_there():
    assert list(RECIPES) == [
        *("images", "glue", "samples", "hmc-steps", "tilt", "schedule", "naive", "convergence", "runtime", "losses"),
        *("sharpness", "eigenvalues"),
    ]
    assert len(find_recipe("images").cells) == 8 * 7
    assert len(find_recipe("glue").cells) == 9 * 5
    assert [(c.row, c.config.num_samples, c.config.ascent_steps) for c in find_recipe("hmc-steps/dtd-vit").cells] == [
        ("TSAM, N=1 (s=3)", 3, 1),
        ("TSAM, N=1 (s=5)", 5, 1),
        ("TSAM, N=2 (s=3)", 3, 2),
        ("TSAM, N=3 (s=3)", 3, 3),
    ]
    for name in RECIPES:
        recipe = find_recipe(name)
        assert recipe.source
        assert recipe.about[0].endswith(".")
        for cell in recipe.cells:
            find_task(cell.config.task)
            assert cell.config.schedule == "constant"
            assert cell.config.momentum == 0.9
            assert cell.config.batch_size == 64


def test_settings_that_the_paper_states():
    cell = column_config("cifar100-resnet18", "sam")
    assert (cell.rho, cell.weight_decay, cell.label_smoothing, cell.epochs) == (0.05, 5e-4, 0.1, 200)
    assert column_config("dtd-vit", "sam").rho == column_config("noisy-wrn", "sam").rho == 0.1
    assert [column_config(c, "tsam").t for c in ("cifar100-wrn", "dtd-vit", "noisy-resnet18")] == [20, 5, 1]
    assert all(column_config(c, "tsam").delta is None for c in COLUMNS)  # t/2
    assert column_config("dtd-vit", "erm").epochs == 20
    assert column_config("rte", "erm").epochs == 10
    assert (column_config("rte", "erm").max_length, column_config("rte", "erm").clip) == (64, 1.0)
    # The main table's TSAM is the better of s=3 and s=5 where the table of s has both.
    for column, printed in paper.SAMPLES.items():
        better = max((3, 5), key=lambda s: printed[f"s={s}"][0].value)
        assert column_config(column, "tsam").num_samples == better
        assert printed[f"s={better}"][0].value == paper.IMAGES[column]["tsam"][0].value


@pytest.mark.parametrize("column", COLUMNS)
def test_equal_budgets_are_equal_passes(column):
    passes = {m: cost.num_passes(column_config(column, m)) for m in ("esam1", "esam2", "pgn", "rsam", "tsam")}
    assert passes == pytest.approx(dict.fromkeys(passes, passes["tsam"]))
    erm, sam = (cost.num_passes(column_config(column, m)) for m in ("erm", "sam"))
    assert 2 * COLUMNS[column].num_samples * erm == COLUMNS[column].num_samples * sam == passes["tsam"]


def test_the_papers_averages_are_those_of_its_numbers():
    """A slip in typing them would show: the eleven numbers of a row have the printed mean, but for rounding."""
    for method, (average,) in paper.GLUE_AVERAGE.items():
        numbers = [n.value for column in paper.GLUE.values() for n in column[method]]
        assert len(numbers) == 11
        assert sum(numbers) / 11 == pytest.approx(average.value, abs=0.025)
    # Two tables print the same numbers.
    for column, printed in paper.SAMPLES.items():
        assert printed["sam"][0].value == paper.IMAGES[column]["sam"][0].value
    for column, printed in paper.HMC_STEPS.items():
        for s in (3, 5):
            assert printed[f"1,{s}"][0].value == paper.SAMPLES[column][f"s={s}"][0].value


def test_the_papers_numbers_have_the_digits_that_it_prints(tmp_path):
    def shown(recipe):
        return [row for table in tables(Outcome(Plan(find_recipe(recipe)), tmp_path)) for row in table.rows]

    assert [row[2] for row in shown("glue/cola")][1:3] == ["52 / 80.34", "52 / 80.48"]
    assert [row[2] for row in shown("glue/mnli")][1:3] == ["79.6", "81.1"]
    assert [row[2] for row in shown("glue/stsb")][1:3] == ["86.6 / 86.3", "87.0 / 86.5"]
    assert [row[2] for row in shown("images/tiny-resnet34")][1] == "74.90 (0.1)"
    assert [row[2] for row in shown("runtime/dtd-vit")][1:3] == ["5", "6"]
    assert shown("losses")[1][2::2] == ["0.1283", "1.35", "3.48"]
    assert shown("eigenvalues")[1][2::2] == ["342.11", "232.60", "140.91"]


def test_passes_a_step():
    def passes(method, **options):
        return cost.passes_per_step(TrainConfig(method=method, **options))

    assert passes("erm") == 1
    assert passes("sam") == passes("pgn") == passes("rsam") == passes("esam1") == 2
    assert passes("esam2", num_points=12) == pytest.approx(6)
    assert passes("tsam", num_samples=5) == 10
    assert passes("tsam", num_samples=3, ascent_steps=3) == 12
    assert passes("tsam", num_samples=10, sampler="uniform") == 10
    assert passes("sam", every=4) == 1.25
    assert passes("sam", ascent_fraction=0.25) == 1.25
    assert passes("tsam", num_samples=4, split=True) == passes("sam", split=True) == 2


def test_published_sizes_give_the_steps():
    assert cost.num_steps(column_config("cifar100-resnet18", "erm"), 45_000) == 200 * 703
    assert cost.training_examples(column_config("cifar100-resnet18", "erm")) == 45_000
    assert cost.training_examples(column_config("dtd-vit", "erm")) == 1_880
    assert set(cost.EXAMPLES) == {column.base.task for column in COLUMNS.values()}


# -------------------------------------------------------------------------------- running, stopping, printing


@pytest.fixture
def two(here, tmp_path):
    return {"out": tmp_path / "runs", "root": here / "data"}


def test_runs_are_reused_and_averaged_over_seeds(here, narrow, two):
    recipe = find_recipe("images/cifar100-resnet18").only(methods=["erm", "sam"])
    plan = Plan(recipe, seeds=3, scale=0.01, device="cpu")
    outcome = reproduce(plan, **two)
    scores = [Record.of(two["out"], config).result()["score"] for config in plan.configs(recipe.cells[0])]
    (mean,) = ours(outcome, recipe.cells[0])
    assert mean.value == pytest.approx(100 * sum(scores) / 3)
    again = []
    reproduce(plan, **two, report=lambda config, progress: again.append(config))
    assert again == []
    (table,) = tables(outcome)
    assert table.rows[1][0] == "ERM"
    assert table.rows[1][2] == "71.39 (0.2)"
    assert table.rows[1][1].startswith(f"{mean.value:.2f} ± ")
    assert table.rows[1][-1] == "3"


def test_what_is_missing_is_not_run_and_the_rest_is(here, narrow, tmp_path, capsys):
    lab_files.cifar(tmp_path / "data", fine=True, n=6)
    said = []
    plan = Plan(find_recipe("images").only(columns=["tiny-resnet18", "cifar100-resnet18"], methods=["erm"]), 1, 0.01)
    outcome = reproduce(plan, tmp_path / "runs", root=tmp_path / "data", say=said.append)
    (problem,) = said
    assert "tiny-resnet18 is not run" in problem
    assert "tiny-imagenet-200" in problem
    first, second = tables(outcome)
    assert first.rows[1][1:] != ["not run"]
    assert second.rows[1][1] == "not run"
    assert second.rows[1][2] == "71.10 (0.2)"
    assert second.rows[1][-1] == "0 of 1"
    with pytest.raises(DataError, match="wnids"):
        reproduce(Plan(find_recipe("images/tiny-resnet18"), 1, 0.01), tmp_path / "runs", root=tmp_path / "none")


def test_what_is_missing_everywhere_is_said_once(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "samples", "--data-root", "nowhere", "--device", "cpu"]) == 2
    said = capsys.readouterr()
    columns = find_recipe("samples").columns
    assert (said.out + said.err).count(" is missing") == len(columns)
    assert "no column of samples was run" in said.err


def test_other_data_than_the_papers_is_told(here, narrow, tmp_path, capsys, monkeypatch):
    run = ["reproduce", "images/dtd-wrn", "--scale", "0.01", "--seeds", "1", "--methods", "erm"]
    run += ["--data-root", str(here / "data"), "--out", str(tmp_path), "--device", "cpu"]
    told = "dtd-wrn: not the paper's data: 2 classes of 47, 6 training examples of 1,880"
    assert main(run) == 0
    out = capsys.readouterr().out
    assert out.index("| ERM") < out.index(told)
    numbers = json.loads((tmp_path / "reproduced" / "images-dtd-wrn" / "numbers.json").read_text())
    assert numbers["data"] == {"dtd-wrn": told.removeprefix("dtd-wrn: ")}
    monkeypatch.setattr(measures, "load", None)  # would fail if called: it is remembered beside the run
    assert main(run) == 0
    assert told in capsys.readouterr().out


def test_the_papers_data_is_known_by_its_size():
    dtd, rte = column_config("dtd-wrn", "erm"), column_config("rte", "erm")
    assert cost.other_data(dtd, {"classes": 47, "examples": 1_880}) == ""
    assert cost.other_data(dtd, {"classes": 47, "examples": 400}).endswith("data: 400 training examples of 1,880")
    assert cost.other_data(rte, {"classes": 2, "examples": 2_241}) == ""
    assert "2,240 training examples of 2,241" in cost.other_data(rte, {"classes": 2, "examples": 2_240})


def test_runs_whose_data_is_gone_are_shown_with_a_word(here, narrow, tmp_path, two):
    plan = Plan(find_recipe("images/dtd-wrn").only(methods=["erm"]), 1, 0.01, "cpu")
    outcome = reproduce(plan, **two)
    (record,) = outcome.records(plan.recipe.cells[0])
    (record.folder / "reproduced.json").unlink()
    again = reproduce(plan, two["out"], root=tmp_path / "nowhere")
    assert "not known whether this is the paper's data" in again.data["dtd-wrn"]


def test_losses_are_those_of_the_objectives_and_remembered(here, narrow, two, monkeypatch):
    recipe = find_recipe("losses").only(methods=["erm", "tsam"])
    plan = Plan(recipe, seeds=2, scale=0.01, device="cpu")
    outcome = reproduce(plan, **two)
    for seed, found in enumerate(outcome.measured):
        for cell in recipe.cells:
            mine, result = found[cell.config.method], outcome.results(cell)[seed]
            assert mine["test"]["ERM"] == pytest.approx(result["test_loss"], rel=1e-4)  # as training reported it
    train, _ = tables(outcome)
    values = [found["tsam"]["train"]["SAM"] for found in outcome.measured]
    assert train.rows[2][:5] == ["TSAM", *train.rows[2][1:3], f"{sum(values) / 2:.4f} ± {error(values):.4f}", "0.27"]
    assert values[0] == pytest.approx(loss_uphill(*outcome.records(recipe.cells[1])[:1], two["root"], 0.05), rel=1e-4)
    monkeypatch.setattr(measures, "cross_runs", None)  # would fail if called
    assert reproduce(plan, **two).measured == outcome.measured


@pytest.mark.parametrize("name", ["losses", "sharpness", "eigenvalues"])
def test_measured_tables_say_how_many_runs_they_are_of(name, here, narrow, two):
    recipe = find_recipe(name).only(methods=["erm", "sam"])
    plan = Plan(recipe, seeds=2, scale=0.005, device="cpu")
    outcome = reproduce(plan, **two)
    sam = recipe.cells[1]

    def runs():
        (rows, *_) = [table.rows for table in tables(outcome)]
        if name == "losses":
            return [rows[0][-1], rows[1][-1], rows[2][-1]]
        return [text for text in rows[-1] if text]

    assert runs() == ["runs", "2", "2"]
    outcome.diverged[plan.configs(sam)[1]] = "it was too sharp"
    outcome.measured[1].pop("sam")
    assert runs() == ["runs", "2", "1 of 2, 1 diverged"]


def test_a_seed_that_is_not_measured_keeps_its_place_and_is_told(here, narrow, tmp_path, capsys, monkeypatch):
    real, calls = measures.cross_runs, []

    def sharp(*args, **options):
        calls.append(args)
        if len(calls) == 1:
            raise ValueError("the loss around tsam is not finite")
        return real(*args, **options)

    monkeypatch.setattr(measures, "cross_runs", sharp)
    run = ["reproduce", "losses", "--scale", "0.005", "--seeds", "2", "--methods", "tsam"]
    run += ["--data-root", str(here / "data"), "--out", str(tmp_path), "--device", "cpu"]
    assert main(run) == 0
    out = capsys.readouterr().out
    assert out.index("| TSAM") < out.rindex("seed 0 was not measured: the loss around tsam is not finite")
    assert "1 of 2" in out
    numbers = json.loads((tmp_path / "reproduced" / "losses" / "numbers.json").read_text())
    assert numbers["not_measured"] == {"0": "the loss around tsam is not finite"}
    first, second = numbers["measured"]
    assert first == {}
    assert set(second["tsam"]) == {"train", "test"}


def test_a_share_of_training_at_which_nothing_was_evaluated_has_no_number(here, narrow, two):
    recipe = find_recipe("convergence/cifar100-resnet18").only(methods=["erm"])
    outcome = reproduce(Plan(recipe, seeds=1, scale=0.01, device="cpu"), **two)  # two epochs
    ((heading, row),) = [table.rows for table in tables(outcome)]
    shown = dict(zip(heading, row, strict=True))
    assert shown["ours: at 25%"] == "–"
    assert "–" not in (shown["ours: at 50%"], shown["ours: at 75%"], shown["ours: at 100%"])


def test_all_that_the_tables_show_is_in_the_file(here, narrow, two, tmp_path):
    recipe = find_recipe("tilt/noisy-resnet18").only(methods=["sam"])
    outcome = reproduce(Plan(recipe, seeds=1, scale=0.01, device="cpu"), **two)
    write_json(outcome, tmp_path / "numbers.json")
    (cell,) = json.loads((tmp_path / "numbers.json").read_text())["cells"]
    (table,) = tables(outcome)
    assert list(cell["along"]) == ["0.25", "0.5", "0.75", "1"]
    assert f"{cell['along']['1']['value']:.2f}" == table.rows[1][4]
    assert f"{cell['at_best_validation']['value']:.2f}" == table.rows[1][5]
    assert cell["stopped_early"] == [{"value": 69.18, "source": "fig:multiple_t", "error": None, "digits": 2}]
    losses = find_recipe("losses").only(methods=["tsam"])
    write_json(reproduce(Plan(losses, seeds=1, scale=0.005, device="cpu"), **two), tmp_path / "numbers.json")
    (cell,) = json.loads((tmp_path / "numbers.json").read_text())["cells"]
    assert cell["paper_losses"]["train"] == {"ERM": 0.1763, "SAM": 0.27, "TSAM": 0.46}
    assert cell["paper_losses"]["test"] == {"ERM": 0.7163, "SAM": 0.9, "TSAM": 1.08}
    write_json(Outcome(Plan(find_recipe("glue")), two["out"]), tmp_path / "numbers.json")
    average = json.loads((tmp_path / "numbers.json").read_text())["average"]["tsam"]
    assert average["paper"]["value"] == 78.01
    assert average["ours"] == {"value": None, "error": None, "runs": 0}


def test_runs_are_called_as_their_rows(here, narrow, tmp_path, capsys, monkeypatch):
    """Five runs of one method and seed follow each other in a recipe; which of them diverged has to be told."""

    def bursts(config, record, **rest):
        raise TrainError("the loss is nan")

    monkeypatch.setattr(compare_module, "train", bursts)
    run = ["reproduce", "hmc-steps/cifar100-resnet18", "--scale", "0.005", "--seeds", "1"]
    assert main([*run, "--data-root", str(here / "data"), "--out", str(tmp_path), "--device", "cpu"]) == 0
    assert "cifar100 TSAM, N=2 (s=3) seed 0: the loss is nan" in capsys.readouterr().out


def loss_uphill(record, root, rho):
    """The training loss of a run's model after a step of that length along the gradient; there is one batch."""
    data = load(record.config(), root)
    model = load_model(record, data).eval()
    images = normalise(data.train.inputs["image"], data.mean, data.std)

    def loss():
        return torch.nn.functional.cross_entropy(model(images), data.train.targets)

    gradient = torch.autograd.grad(loss(), list(model.parameters()))
    length = torch.cat([g.flatten() for g in gradient]).norm()
    with torch.no_grad():
        for p, g in zip(model.parameters(), gradient, strict=True):
            p += rho * g / length
        return loss().item()


def error(values):
    return torch.tensor(values).double().std().item() / len(values) ** 0.5


def test_a_scaled_run_ends_with_an_epoch():
    """200 · 0.07 is 14.000000000000002 in floating point: a fifteenth epoch of one step."""
    recipe = find_recipe("images/tiny-resnet18")
    (config,) = Plan(recipe, seeds=1, scale=0.07).configs(recipe.cells[0])
    assert config.epochs == 14


def test_the_command_says_what_was_scaled(here, narrow, tmp_path, capsys):
    run = ["reproduce", "sharpness", "--scale", "0.01", "--seeds", "1", "--methods", "erm", "tsam"]
    run += ["--data-root", str(here / "data"), "--out", str(tmp_path), "--device", "cpu"]
    assert main(run) == 0
    out = capsys.readouterr().out
    for line in (
        "scaled to 0.01: epochs 200 → 2",
        "scaled to 0.01: examples measured on 5000 → 100",
        "scaled to 0.01: draws at each std 500 → 5",
        "not scaled: training examples",
    ):
        assert out.count(line) == 2  # before and after
    assert "mean of the training loss around the minimum (fig:sharpness" in out
    page = tmp_path / "reproduced" / "sharpness" / "report.html"
    assert f"report: {page}" in out
    assert page.exists()
    numbers = json.loads((tmp_path / "reproduced" / "sharpness" / "numbers.json").read_text())
    assert numbers["scale"] == 0.01
    assert numbers["changes"]
    assert [cell["row"] for cell in numbers["cells"]] == ["ERM", "TSAM"]
    whole = Plan(find_recipe("losses"), scale=0.01).changes()[-1]  # as many examples as ever
    assert whole == "not scaled: training examples, batch size, learning rate, samples, model, examples measured on"
    full = Plan(find_recipe("sharpness"))
    assert full.changes() == []
    half = Plan(find_recipe("sharpness"), precision="bf16")
    assert half.changes() == ["precision: bf16, where the recipe has fp32"]
    assert half.configs(half.recipe.cells[0])[0].precision == "bf16"
    assert full.much == Thoroughness()


def test_the_list_shows_all_with_passes_and_hours(capsys, monkeypatch):
    timed = []
    monkeypatch.setattr(cost, "_timed", lambda config, device: timed.append((config.model, config.task)) or 0.36)
    monkeypatch.setattr(cost, "_TIMES", {})
    assert main(["reproduce", "--list", "--seeds", "1", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    rows = {cells[1].strip(): cells[2:-1] for line in out.splitlines() if len(cells := line.split("|")) > 5}
    assert set(RECIPES) <= set(rows)
    passes = 703 * 200 * (1 + 2 + 5 * 10)
    assert [cell.strip() for cell in rows["images/cifar100-resnet18"]] == [
        "7",
        f"{passes:,}",
        "",
        f"{passes / 1e4:.3g}",
    ]
    assert len(timed) == len(set(timed)) == 6  # each model once at each size of its inputs


def test_the_list_of_some_methods_has_the_recipes_that_have_any(capsys, monkeypatch):
    monkeypatch.setattr(cost, "_timed", lambda config, device: 0.36)
    monkeypatch.setattr(cost, "_TIMES", {})
    assert main(["reproduce", "--list", "--methods", "erm", "sam", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    rows = {cells[1].strip(): cells[2].strip() for line in out.splitlines() if len(cells := line.split("|")) > 5}
    assert rows["images"] == str(8 * 2 * 3)
    assert rows["samples"] == str(3 * 3)  # no ERM there
    assert "hmc-steps" not in rows
    assert main(["reproduce", "--list", "--methods", "erm", "nonsense", "--device", "cpu"]) == 2
    assert "no recipe has a method 'nonsense'" in capsys.readouterr().err


def test_the_timing_is_of_the_model(narrow):
    seconds = cost.seconds_per_pass(column_config("dtd-wrn", "tsam"), "cpu")
    assert 0 < seconds < 60
    assert math.isfinite(cost.hours([column_config("dtd-wrn", "tsam", epochs=1.0)], "cpu"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense"], "no recipe 'nonsense': one of images, glue, samples"),
        ([], "which table or figure? One of images"),
        (["images/nonsense"], "images has no column 'nonsense': it has cifar100-resnet18"),
        (["glue", "--methods", "pgn"], "glue has no method 'pgn'"),
        (["images", "--scale", "0"], "--scale must be in (0, 1], got 0"),
        (["images", "--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["images/cifar100-resnet18", "--data-root", "nowhere"], "nowhere/cifar-100-binary/train.bin is missing"),
        (["naive", "--device", "cuda:99"], "no CUDA device 99"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(arguments, says, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line
