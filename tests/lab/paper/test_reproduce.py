"""Every recipe trains, stops, continues and measures."""

import dataclasses
import json

import pytest
import torch

from helpers import lab_files
from helpers.displays import Told
from tiltsam.cli import main
from tiltsam.lab import compare as compare_module
from tiltsam.lab import data as lab_data
from tiltsam.lab import files
from tiltsam.lab.data import GLUE
from tiltsam.lab.data import load as load_data
from tiltsam.lab.data.loader import normalise
from tiltsam.lab.errors import ConfigError, DataError, TrainError
from tiltsam.lab.models import load_model
from tiltsam.lab.paper import cost, settings
from tiltsam.lab.paper import reproduce as reproduce_module
from tiltsam.lab.paper.recipes import RECIPES, find_recipe
from tiltsam.lab.paper.reproduce import ReproductionPlan, reproduce
from tiltsam.lab.paper.tables import comparison_tables, our_scores, write_numbers
from tiltsam.lab.records import Record

NEED_TRANSFORMERS = {"dtd-vit", *GLUE}


def scale_of_two_steps(config):
    """Return the scale at which a run takes two steps if an epoch is one batch."""
    return 2 / config.epochs


@pytest.mark.parametrize(
    ("name", "column"), [(name, column) for name, make in RECIPES.items() for column in make().columns]
)
def test_recipe_runs_two_steps(name, column, here, narrow, request, monkeypatch):
    """All cells with one seed. Recipes share runs. Predicted steps and passes equal those taken."""
    if column in NEED_TRANSFORMERS:
        request.getfixturevalue("pretrained")
    monkeypatch.chdir(here)
    recipe = find_recipe(f"{name}/{column}")
    examples = len(load_data(recipe.cells[0].config, here / "data").train)
    for scale in dict.fromkeys(scale_of_two_steps(cell.config) for cell in recipe.cells):
        cells = tuple(cell for cell in recipe.cells if scale_of_two_steps(cell.config) == scale)
        plan = ReproductionPlan(dataclasses.replace(recipe, cells=cells), seeds=1, scale=scale, device="cpu")
        found = reproduce(plan, here / "runs", root=here / "data")
        for cell in cells:
            (config,) = plan.configs(cell)
            changed = {"epochs": cell.config.epochs * scale, "device": "cpu"}
            assert config == dataclasses.replace(cell.config, **changed)  # scaling changes nothing else
            (result,) = found.results(cell)
            assert result["steps"] == cost.num_steps(config, examples) == 2
            assert result["passes"] == pytest.approx(cost.num_passes(config, examples), abs=1e-3)
        shown = comparison_tables(found).values()
        ratios = (
            [row.pop(3) for rows in shown for row in rows] if recipe.kind == "minutes" else []
        )  # ERM may be missing
        assert "not run" not in {text for rows in shown for row in rows for text in row}
        assert ratios or recipe.kind != "minutes"
        write_numbers(found, here / "numbers.json")
        assert len(json.loads((here / "numbers.json").read_text())["cells"]) == len(cells)


def test_real_resnet18_takes_two_steps(here, tmp_path):
    recipe = find_recipe("images/cifar100-resnet18").select(methods=["erm"])
    found = reproduce(ReproductionPlan(recipe, seeds=1, scale=0.01, device="cpu"), tmp_path, root=here / "data")
    (record,) = found.records(recipe.cells[0])
    assert record.result()["steps"] == 2
    assert sum(v.numel() for k, v in record.model().items() if "running" not in k) == pytest.approx(11.2e6, rel=0.01)


# -------------------------------------------------------------------------------- the plan


def test_plan_scales_to_whole_epochs():
    """200 · 0.07 is 14.000000000000002 in floating point: a fifteenth epoch of one step."""
    recipe = find_recipe("images/tiny-resnet18")
    (config,) = ReproductionPlan(recipe, seeds=1, scale=0.07).configs(recipe.cells[0])
    assert config.epochs == 14


def test_plan_lists_deviations():
    full = ReproductionPlan(find_recipe("sharpness"))
    assert full.deviations() == []
    assert (full.num_examples, full.num_draws) == (5000, 500)
    epochs, examples, draws, rest = ReproductionPlan(find_recipe("sharpness"), scale=0.01).deviations()
    assert epochs.endswith("epochs 200 → 2")
    assert examples.endswith("5000 → 100")
    assert draws.endswith("500 → 5")
    assert "batch size" in rest
    assert "measure" in ReproductionPlan(find_recipe("losses"), scale=0.01).deviations()[-1]  # on all examples
    half = ReproductionPlan(find_recipe("sharpness"), precision="bf16")
    assert ["bf16" in line for line in half.deviations()] == [True]
    assert half.configs(half.recipe.cells[0])[0].precision == "bf16"


def test_plan_changes_settings():
    recipe = find_recipe("images/cifar100-resnet18")
    changes = {"batch_size": 128, "rho": 0.1, "tsam:rho": 0.2, "num_samples": 3, "validation": 0.1}
    plan = ReproductionPlan(recipe, seeds=1, changes=changes)
    configs = {cell.method: plan.configs(cell)[0] for cell in recipe.cells}
    assert {config.batch_size for config in configs.values()} == {128}
    rho = {method: config.all_options().get("rho") for method, config in configs.items()}
    assert rho == {"erm": None, "tsam": 0.2} | dict.fromkeys(("sam", "esam1", "esam2", "pgn", "rsam"), 0.1)
    assert configs["tsam"] == recipe.cells[-1].config.with_settings({"batch_size": 128, "rho": 0.2, "num_samples": 3})
    assert plan.deviations() == ["batch_size 64 → 128", "rho 0.05 → 0.1", "tsam: rho 0.1 → 0.2", "num_samples 5 → 3"]
    several = ReproductionPlan(find_recipe("samples"), changes={"sam:rho": 0.2, "compile": True})
    assert several.deviations() == ["sam: rho 0.05, 0.1 → 0.2", "compile false → true"]
    own = ReproductionPlan(recipe, changes={"esam1:lr": 0.1})  # a run of SAM, but not the row SAM
    assert [c.method for c in recipe.cells if own.configs(c)[0].lr == 0.1] == ["esam1"]


@pytest.mark.parametrize(
    ("name", "changes", "value"),
    [
        *(("images", {setting: 1}, setting) for setting in ("task", "method", "seed", "device", "precision")),
        *(("images", {f"sam:{setting}": 1}, "--scale") for setting in ("epochs", "passes", "seconds")),
        ("tilt", {"t": 5.0}, "differ in t"),
        ("samples", {"tsam:num_samples": 3}, "differ in num_samples"),
        ("samples", {"alpha": 0.3}, "'alpha'"),
        ("samples", {"batch_size": 0}, "got 0"),
    ],
)
def test_plan_refuses_changes(name, changes, value):
    with pytest.raises(ConfigError, match=value):
        ReproductionPlan(find_recipe(name), changes=changes)


# -------------------------------------------------------------------------------- training


def test_reproduce_reuses_runs_and_averages_over_seeds(narrow, places):
    recipe = find_recipe("images/cifar100-resnet18").select(methods=["erm", "sam"])
    plan = ReproductionPlan(recipe, seeds=3, scale=0.01, device="cpu")
    found = reproduce(plan, **places)
    scores = [Record.of(places["out"], config).result()["score"] for config in plan.configs(recipe.cells[0])]
    (mean,) = our_scores(found, recipe.cells[0])
    assert mean.value == pytest.approx(100 * sum(scores) / 3)
    trained = []
    reproduce(plan, **places, display=Told(report=lambda config, progress: trained.append(config)))
    assert trained == []
    (rows,) = comparison_tables(found).values()
    assert rows[1][0] == "ERM"
    assert rows[1][1].startswith(f"{mean.value:.2f} ± ")
    assert rows[1][2] == "71.39 (0.2)"
    assert rows[1][-1] == "3"


@pytest.fixture
def loads(monkeypatch):
    """Return the list of data sets that are loaded, as (task, seed)."""
    found, load = [], lab_data.load

    def counted(config, *args, **options):
        found.append((config.task, config.seed))
        return load(config, *args, **options)

    monkeypatch.setattr(lab_data, "load", counted)
    return found


def test_columns_share_their_data(narrow, places, loads):
    recipe = find_recipe("images").select(columns=["tiny-resnet18", "tiny-resnet34"], methods=["erm"])
    reproduce(ReproductionPlan(recipe, seeds=2, scale=0.005, device="cpu"), **places)
    assert loads == [("tiny-imagenet", 0), ("tiny-imagenet", 1)]


@pytest.mark.parametrize("name", ["losses", "sharpness"])
def test_measuring_uses_the_data_of_training(name, narrow, places, loads):
    recipe = find_recipe(name).select(methods=["erm"])
    plan = ReproductionPlan(recipe, seeds=1, scale=0.005, device="cpu")
    reproduce(plan, **places)
    reproduce(plan, **places)  # all is done: nothing is loaded
    assert loads == [("cifar100", 0)]


def test_missing_data_skips_the_column(narrow, tmp_path):
    lab_files.cifar(tmp_path / "data", fine=True, n=6)
    said = []
    recipe = find_recipe("images").select(columns=["tiny-resnet18", "cifar100-resnet18"], methods=["erm"])
    plan, display = ReproductionPlan(recipe, 1, 0.01), Told(print=said.append)
    found = reproduce(plan, tmp_path / "runs", root=tmp_path / "data", display=display)
    (line,) = said
    assert "tiny-resnet18" in line
    assert "tiny-imagenet-200" in line
    first, second = comparison_tables(found).values()
    assert first[1][1] != "not run"
    assert second[1][1:3] == ["not run", "71.10 (0.2)"]
    assert second[1][-1] == "0 of 1"
    with pytest.raises(DataError, match="wnids"):
        reproduce(
            ReproductionPlan(find_recipe("images/tiny-resnet18"), 1, 0.01), tmp_path / "runs", root=tmp_path / "none"
        )


def test_missing_data_of_all_columns_is_an_error(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "samples", "--data-root", "nowhere", "--device", "cpu"]) == 2
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count(" is missing") == len(find_recipe("samples").columns) + 1
    assert "no column of samples" in printed.err


def test_data_of_another_size_is_reported(here, narrow, tmp_path, capsys):
    run = ["reproduce", "images/dtd-wrn", "--scale", "0.01", "--seeds", "1", "--methods", "erm", "--device", "cpu"]
    for root in (here / "data", tmp_path / "gone"):  # the second time the finished run is enough
        assert main([*run, "--data-root", str(root), "--out", str(tmp_path)]) == 0
        out = capsys.readouterr().out
        assert out.index("| ERM") < out.index("dtd-wrn: not the paper's data: steps per epoch 1 instead of 29")
    numbers = json.loads((tmp_path / "reproduced" / "images-dtd-wrn" / "numbers.json").read_text())
    assert "29" in numbers["data"]["dtd-wrn"]


def test_data_of_the_published_size_is_not_reported(narrow, places, monkeypatch):
    monkeypatch.setattr(reproduce_module, "training_examples", lambda config: 6)
    plan = ReproductionPlan(find_recipe("images/dtd-wrn").select(methods=["erm", "esam1"]), 1, 0.01, "cpu")
    assert reproduce(plan, **places).data_differences == {}


def test_data_of_the_published_size_with_changed_batches_and_validation(narrow, places, monkeypatch):
    monkeypatch.setitem(settings.PUBLISHED_EXAMPLES, "cifar100", 6)
    recipe = find_recipe("images/cifar100-resnet18").select(methods=["erm"])
    found = reproduce(ReproductionPlan(recipe, 1, 0.01, "cpu", changes={"batch_size": 3, "validation": 0.0}), **places)
    (result,) = found.results(recipe.cells[0])
    assert result["steps"] == 2 * 2
    assert found.data_differences == {}
    monkeypatch.setitem(settings.PUBLISHED_EXAMPLES, "cifar100", 9)
    assert found.data_differences["cifar100-resnet18"].endswith("2 instead of 3")


def test_failed_run_is_named_by_its_row(here, narrow, tmp_path, capsys, monkeypatch):
    def fail(config, record, **rest):
        raise TrainError("torch.compile failed")

    monkeypatch.setattr(compare_module, "train", fail)
    run = ["reproduce", "hmc-steps/cifar100-resnet18", "--scale", "0.005", "--seeds", "1"]
    assert main([*run, "--data-root", str(here / "data"), "--out", str(tmp_path), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "cifar100 TSAM, N=2 (s=3) seed 0: torch.compile failed" in out
    assert "0 of 1, 1 failed" in out
    assert "diverged" not in out


# -------------------------------------------------------------------------------- measuring


def loss_uphill(record, root, rho):
    """Return the training loss of a run's model after a step of length rho along the gradient; there is one batch."""
    data = load_data(record.config(), root)
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


def test_losses_are_measured_once(narrow, places, monkeypatch):
    recipe = find_recipe("losses").select(methods=["erm", "tsam"])
    plan = ReproductionPlan(recipe, seeds=2, scale=0.01, device="cpu")
    found = reproduce(plan, **places)
    for seed, measured in enumerate(found.measured):
        for cell in recipe.cells:
            losses, result = measured[cell.config.method], found.results(cell)[seed]
            assert losses["test"]["ERM"] == pytest.approx(result["test_loss"], rel=1e-4)  # as training reported it
    train, _ = comparison_tables(found).values()
    values = [measured["tsam"]["train"]["SAM"] for measured in found.measured]
    error = torch.tensor(values).double().std().item() / 2**0.5
    assert train[2][0] == "TSAM"
    assert train[2][3:5] == [f"{sum(values) / 2:.4f} ± {error:.4f}", "0.27"]
    assert values[0] == pytest.approx(loss_uphill(found.records(recipe.cells[1])[0], places["root"], 0.05), rel=1e-4)
    monkeypatch.setattr(reproduce_module, "cross_runs", None)  # fails if called
    assert reproduce(plan, **places).measured == found.measured


def test_objectives_have_the_changed_settings(narrow, places):
    recipe = find_recipe("losses").select(methods=["erm", "sam"])
    plan = ReproductionPlan(recipe, seeds=1, scale=0.005, device="cpu")
    (before,) = reproduce(plan, **places).measured
    found = reproduce(dataclasses.replace(plan, changes={"sam:rho": 0.2}), **places)
    (after,) = found.measured
    (record,) = found.records(recipe.cells[0])
    assert after["erm"]["train"]["SAM"] == pytest.approx(loss_uphill(record, places["root"], 0.2), rel=1e-4)
    assert after["erm"]["train"]["ERM"] == before["erm"]["train"]["ERM"]
    assert reproduce(plan, **places).measured == [before]


def test_adding_a_method_measures_its_model_only(narrow, places, monkeypatch):
    calls = []

    def cross_runs(runs, *args, **options):
        calls.append(set(runs))
        return measure(runs, *args, **options)

    measure = reproduce_module.cross_runs
    monkeypatch.setattr(reproduce_module, "cross_runs", cross_runs)
    for methods in (["erm"], ["erm", "sam"]):
        recipe = find_recipe("losses").select(methods=methods)
        (measured,) = reproduce(ReproductionPlan(recipe, seeds=1, scale=0.005, device="cpu"), **places).measured
        assert set(measured) == set(methods)
    assert calls == [{"erm"}, {"sam"}]


def test_retrained_model_is_measured_again(narrow, places):
    plan = ReproductionPlan(find_recipe("losses").select(methods=["erm"]), seeds=1, scale=0.005, device="cpu")
    (before,) = reproduce(plan, **places).measured
    (record,) = reproduce(plan, **places).records(plan.recipe.cells[0])
    files.save_tensors(record.folder / "model.safetensors", {k: 2 * v for k, v in record.model().items()})
    (after,) = reproduce(plan, **places).measured
    assert after["erm"]["train"]["ERM"] != before["erm"]["train"]["ERM"]


def test_unmeasured_seed_is_reported(here, narrow, tmp_path, capsys, monkeypatch):
    real, calls = reproduce_module.cross_runs, []

    def sharp(*args, **options):
        calls.append(args)
        if len(calls) == 1:
            raise ValueError("the loss around tsam is not finite")
        return real(*args, **options)

    monkeypatch.setattr(reproduce_module, "cross_runs", sharp)
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


# -------------------------------------------------------------------------------- the command


def test_reproduce_command_prints_deviations_and_writes_files(here, narrow, tmp_path, capsys):
    run = ["reproduce", "sharpness", "--scale", "0.01", "--seeds", "1", "--methods", "erm", "tsam"]
    run += ["--data-root", str(here / "data"), "--out", str(tmp_path), "--device", "cpu"]
    assert main(run) == 0
    out = capsys.readouterr().out
    deviations = ReproductionPlan(find_recipe("sharpness"), scale=0.01).deviations()
    assert all(out.count(line) == 2 for line in deviations)  # before and after
    assert "mean of the training loss around the minimum (fig:sharpness" in out
    folder = tmp_path / "reproduced" / "sharpness"
    assert f"report: {folder / 'report.html'}" in out
    assert (folder / "report.html").exists()
    numbers = json.loads((folder / "numbers.json").read_text())
    assert numbers["scale"] == 0.01
    assert numbers["changes"] == deviations
    assert [cell["row"] for cell in numbers["cells"]] == ["ERM", "TSAM"]


def test_reproduce_command_shows_finished_runs(here, narrow, tmp_path, capsys):
    run = ["reproduce", "samples/cifar100-resnet18", "--scale", "0.005", "--seeds", "1", "--out", str(tmp_path)]
    run += ["--set", "batch_size=3"]
    assert main([*run, "--finished"]) == 2
    assert "no finished run" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
    assert main([*run, "--methods", "sam", "--data-root", str(here / "data"), "--device", "cpu"]) == 0
    capsys.readouterr()
    before = sorted(tmp_path.glob("cifar100/*/*"))
    assert main([*run, "tsam:rho=0.2", "--finished", "--data-root", "nowhere"]) == 0
    assert sorted(tmp_path.glob("cifar100/*/*")) == before
    out = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("|")]
    shown = {cells[0]: cells[1:] for cells in lines}
    assert shown["SAM"][1] == "76.52"
    assert shown["SAM"][-1] == "1"
    assert shown["TSAM, s=1"] == ["not run", "–", "not run", "not run", "0 of 1"]
    assert shown["TSAM, s=3"] == ["not run", "77.40", "not run", "not run", "0 of 1"]
    assert "steps per epoch" in out  # of small data
    folder = tmp_path / "reproduced" / "samples-cifar100-resnet18"
    assert (folder / "report.html").exists()
    numbers = json.loads((folder / "numbers.json").read_text())
    assert numbers["changes"][-2:] == ["batch_size 64 → 3", "tsam: rho 0.1 → 0.2"]
    assert [cell["config"]["batch_size"] for cell in numbers["cells"]] == [3] * 4


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["nonsense"], "two-tilts"),
        (["two_tilts"], "did you mean two-tilts?"),
        ([], "images, glue, samples"),
        (["--list", "nonsense"], "'nonsense'"),
        (["--list", "--methods", "nonsense"], "'nonsense'"),
        (["images/nonsense"], "'nonsense'"),
        (["glue", "--methods", "pgn"], "'pgn'"),
        (["images", "--scale", "0"], "(0, 1], got 0"),
        (["images", "--scale", "nan"], "(0, 1], got nan"),
        (["images", "--seeds", "0"], "at least 1, got 0"),
        (["images/cifar100-resnet18", "--data-root", "nowhere"], "nowhere/cifar-100-binary/train.bin"),
        (["naive", "--device", "cuda:99"], "99"),
        (["images/dtd-wrn", "--workers", "2"], "--workers must be 1 for images/dtd-wrn, got 2"),
        (["two-tilts/nonsense"], "noise-0.4, noise-0.2, noise-0, long-tail"),
        (["two-tilts", "--methods", "pgn"], "'pgn'"),
        (["two-tilts", "--scale", "2"], "(0, 1], got 2"),
    ],
)
def test_reproduce_command_mistakes(arguments, value, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert value in line


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["samples", "--set", "rho"], "'rho'"),
        (["samples", "--set", "rho=big"], "'big'"),
        (["samples", "--set", "rho=-1", "--device", "cpu"], "got -1"),
        (["samples", "--set", "pgn:rho=1"], "'pgn:rho'; methods: sam, tsam"),
        (["samples", "--set", "nonsense=1"], "'nonsense'"),
        (["samples", "--set", "batch-size=1", "--set", "batch_size=2"], "batch_size must be given once"),
        (["samples", "--set", "seed=1"], "--seeds"),
        (["--list", "--set", "nonsense=1"], "'nonsense'"),
        (["losses", "--finished"], "--finished cannot show losses"),
        (["two-tilts", "--set", "lr=1"], "--set"),
        (["two-tilts", "--finished"], "--finished"),
    ],
)
def test_reproduce_command_refuses_changes_before_a_folder_is_made(arguments, value, tmp_path, capsys, monkeypatch):
    test_reproduce_command_mistakes(arguments, value, tmp_path, capsys, monkeypatch)
    assert not any(tmp_path.iterdir())
