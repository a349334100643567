"""Measurements of models and of runs, their table, and the command ``tiltsam sharpness``."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers.displays import Told
from helpers.measuring import convnet, cross_entropy, unequal_batches
from tiltsam.cli import main
from tiltsam.lab import flatness as lab_flatness
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.data import load as load_task
from tiltsam.lab.errors import ConfigError, RecordError
from tiltsam.lab.flatness import (
    FlatnessPlan,
    find_runs,
    flatness_cells,
    measure,
    measure_runs,
    save_flatness,
)
from tiltsam.lab.records import Record
from tiltsam.lab.report.tables import FLATTER
from tiltsam.lab.stats import Mean, format_mean
from tiltsam.lab.train import train

QUICK = FlatnessPlan(std=(0.01, 0.1), num_samples=4, num_trace_samples=3, num_density_probes=2, num_points=5)
FAST = FlatnessPlan(
    std=(0.01,), num_samples=4, num_ascent_steps=1, num_eigenvalues=1, num_trace_samples=2, num_density_probes=0
)


def cells_by_label(flats, **options):
    headings, *rows = flatness_cells(flats, **options)
    return headings, {label: cells for label, *cells in rows}


def test_flatness_cells():
    flats = [measure(name, convnet(), cross_entropy, unequal_batches(), QUICK) for name in ("a", "b")]
    headings, rows = cells_by_label(flats, std=0.1)
    assert headings == ["model", "a", "b"]
    assert all(a == b for a, b in rows.values())
    around = flats[0].neighborhood
    assert rows["variance at 0.1"][0] == format_mean(
        Mean(float(around.variance[1]), float(around.variance_error[1]), 1)
    )
    assert float(rows["λ1"][0]) == pytest.approx(float(flats[0].eigenpairs.values[0]), rel=1e-3)
    assert {"loss", "t-variance at 0.1", "worst case", "adaptive", "trace"} <= rows.keys()
    assert abs(float(rows["4-bit rise"][0])) > abs(float(rows["8-bit rise"][0])) > 0
    plan = FlatnessPlan((0.1,), 2, 1.0, 0.05, 0.5, 0, (), 0, 0, 0, 1, 0)
    few = measure("a", convnet(), cross_entropy, unequal_batches(), plan)
    assert not {"λ1", "4-bit rise"} & cells_by_label([few])[1].keys()


def test_flatness_cells_average_models_with_the_same_name():
    flat = measure("a", convnet(), cross_entropy, unequal_batches(), FAST)
    flats = [replace(flat, loss=1.0), replace(flat, loss=2.0), replace(flat, name="b", loss=math.inf)]
    headings, rows = cells_by_label(flats)
    assert headings == ["model", "a", "b"]
    assert rows["loss"] == ["1.50 ± 0.50", "–"]
    assert "±" not in rows["trace"][1]  # a single model has no error of a mean


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    for method in ("erm", "sam"):
        config = TrainConfig(method=method, epochs=6, batch_size=128)
        train(config, Record.of(out, config))
    return out


@pytest.fixture
def copied(runs, tmp_path):
    """The same runs, not measured yet."""
    return shutil.copytree(runs, tmp_path / "runs", ignore=shutil.ignore_patterns("flatness.json"))


def flats_of(runs, **options):
    """What is measured, in the order of the runs."""
    found = {flat.name: flat for flat, _ in measure_runs(runs, plan=FAST, **options)}
    return [found[name] for name in runs]


def sharpness_of(folder, *more):
    return main(["sharpness", str(folder), "--examples", "40", "--samples", "2", "--no-figures", *more])


def test_measure_runs_uses_the_same_examples(runs):
    found = find_runs([runs])
    assert list(found) == ["erm seed 0", "sam seed 0"]
    flats = flats_of(found, examples=200)
    again = flats_of(find_runs([record.folder for record in found.values()]), examples=200)
    assert [flat.loss for flat in flats] == [flat.loss for flat in again]
    other = flats_of(found, split="test", examples=200)
    assert other[0].loss != flats[0].loss


def test_measure_runs_uses_one_thread_for_small_models(runs, monkeypatch):
    """Two threads for tiny kernels are many times slower on a busy machine."""
    seen = []
    original = lab_flatness.measure

    def measure(*args, **options):
        seen.append(torch.get_num_threads())
        return original(*args, **options)

    monkeypatch.setattr(lab_flatness, "measure", measure)
    torch.set_num_threads(2)
    try:
        for _ in measure_runs(find_runs([runs]), plan=FAST, examples=40):
            assert torch.get_num_threads() == 2  # the caller's code keeps its own number
    finally:
        torch.set_num_threads(1)
    assert seen == [1, 1]


def test_measure_runs_uses_the_labels_of_the_seed(tmp_path):
    """A fifth of the labels is wrong, and the seed decides which: the loss shows whose labels were used."""
    for seed in (0, 1):
        config = TrainConfig(method="erm", epochs=40, batch_size=128, seed=seed, evaluate_every=40)
        train(config, Record.of(tmp_path, config))
    found = find_runs([tmp_path])
    together = flats_of(found)
    for name, flat in zip(found, together, strict=True):
        (apart,) = flats_of({name: found[name]})
        assert flat.loss == apart.loss
    assert abs(together[0].loss - together[1].loss) < 0.2


def test_sharpness_saves_what_it_measured(runs, tmp_path, capsys):
    folder = next(runs.rglob("config.json")).parent
    arguments = ["sharpness", str(folder), "--examples", "60", "--samples", "3", "--no-figures"]
    assert main([*arguments, "--out", str(tmp_path / "report")]) == 0
    out = capsys.readouterr().out
    assert not (tmp_path / "report" / "figures").exists()
    saved = json.loads((folder / "flatness.json").read_text())
    on = {"task": "digits", "split": "train", "examples": 60, "num_samples": 3, "t": 1.0, "rho": 0.05}
    assert saved["about"].items() >= on.items()
    assert len(saved["neighborhood"]["std"]) == len(saved["neighborhood"]["variance_error"]) == 9
    assert f"{saved['eigenvalues']['values'][0]:.4g}"[:3] in out
    assert [line["label"] for line in saved["slices"]] == ["random direction", "top eigenvector"]
    assert "on 60 train examples of digits" in (tmp_path / "report" / "report.html").read_text()


def test_sharpness_reuses_measurements_of_the_same_model(copied, tmp_path, monkeypatch, capsys):
    arguments = ["sharpness", str(copied), "--examples", "40", "--samples", "3", "--out", str(tmp_path / "report")]
    assert main(arguments) == 0
    table = capsys.readouterr().out
    saved = {path: path.read_bytes() for path in copied.rglob("flatness.json")}
    figures = {path: path.read_bytes() for path in (tmp_path / "report" / "figures").iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(lab_flatness, "measure", None)
        assert main(arguments) == 0
    out = capsys.readouterr().out
    assert out == f"already measured: erm seed 0\nalready measured: sam seed 0\n{table}"
    assert {path: path.read_bytes() for path in saved} == saved
    assert {path: path.read_bytes() for path in figures} == figures


def test_measure_runs_measures_again_what_has_changed(copied):
    runs = find_runs([copied])

    def reused(plan=FAST, **options):
        lines = []
        told = {"reuse": True, "display": Told(print=lines.append)}
        for flat, about in measure_runs(runs, plan=plan, examples=40, **told, **options):
            assert not any(flat.name in line for line in lines)
            save_flatness(runs[flat.name], flat, about)
        return [line.removeprefix("already measured: ") for line in lines]

    assert reused() == []
    assert reused() == list(runs) == ["erm seed 0", "sam seed 0"]
    erm, sam = (record.folder for record in runs.values())
    (erm / "flatness.json").write_text("{}")
    assert reused() == ["sam seed 0"]
    shutil.copy(sam / "model.safetensors", erm / "model.safetensors")
    assert reused() == ["sam seed 0"]
    assert reused(split="test") == []
    assert reused(replace(FAST, t=2.0), split="test") == []
    assert reused(replace(FAST, t=2.0), split="test") == list(runs)


def test_sharpness_prints_means_over_seeds(copied, capsys):
    config = TrainConfig(method="sam", epochs=6, batch_size=128, seed=1)
    train(config, Record.of(copied, config))
    assert sharpness_of(copied) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "digits: flatness, mean ± standard error over seeds" in lines
    rows = {line.split()[1]: line for line in lines if line.startswith("| ")}
    assert list(rows) == ["method", "erm", "sam"]
    assert "±" not in rows["erm"]
    assert "±" in rows["sam"]


def test_sharpness_ends_in_the_report(copied, capsys):
    assert main(["sharpness", str(copied), "--examples", "40", "--samples", "2"]) == 0
    out = capsys.readouterr().out
    report = copied / "report"
    assert f"|\n\n{FLATTER}\n" in out
    assert out.endswith(f"\nreport: {report / 'report.html'}\n")
    assert {"noise-variance.png", "spectrum.png", "slice-0.png"} <= {path.name for path in report.glob("figures/*")}
    headings = next(line for line in out.splitlines() if line.startswith("| method"))
    assert all(name in headings for name in ("loss", "t-variance at 0.01", "worst case", "λ1", "trace"))
    assert not any(name in headings for name in (" variance", "adaptive", "bits"))
    page = (report / "tables" / "flatness.md").read_text()
    assert all(name in page for name in (" variance at 0.01", "t-variance at 0.01", "adaptive", "4 bits"))
    assert "exp(t·loss), t = 1;" in page
    assert "largest rise within a radius of 0.05 (adaptive: 0.5)" in page


def test_sharpness_names_entries_as_compare_does(tmp_path, capsys):
    typed = ["erm:average=true,example_tilt=-0.4", "erm", "sam:rho=0.05"]
    command = ["compare", "digits", "--epochs", "0.2", "--seeds", "1", "--out", str(tmp_path), "--methods", *typed]
    assert main(command) == 0
    capsys.readouterr()
    assert sharpness_of(tmp_path / "digits") == 0
    printed = capsys.readouterr()
    names = [line.split()[1] for line in printed.out.splitlines() if line.startswith("| ")][1:]
    assert sorted(names) == sorted(typed)
    assert sorted(printed.err.splitlines()) == sorted(f"measuring {name} seed 0" for name in typed)


def test_sharpness_saves_each_run_before_the_next(copied, monkeypatch, capsys):
    loaded = []

    def load(record, data):
        if loaded:
            raise KeyboardInterrupt
        loaded.append(record.folder)
        return train_model(record, data)

    train_model = lab_flatness.load_model
    monkeypatch.setattr(lab_flatness, "load_model", load)
    assert sharpness_of(copied) == 130
    assert [path.parent for path in copied.rglob("flatness.json")] == loaded


def test_sharpness_skips_runs_it_cannot_measure(copied, tmp_path, capsys):
    good = next(copied.rglob("erm-*/seed-0"))
    for name in ("unfinished", "damaged", "torn"):
        (copied / name).mkdir()
    for name in ("unfinished", "torn"):
        config = json.loads((good / "config.json").read_text()) | {"seed": len(name)}
        (copied / name / "config.json").write_text(json.dumps(config))
    (copied / "damaged" / "config.json").write_text("[]")
    (copied / "torn" / "model.safetensors").write_bytes((good / "model.safetensors").read_bytes()[:1000])
    shutil.rmtree(next(copied.rglob("sam-*")))
    assert sharpness_of(copied) == 0
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("skipped: ")]
    assert sorted(line.split()[1].removesuffix(":") for line in lines) == [
        str(copied / "damaged" / "config.json"),
        str(copied / "torn"),
        str(copied / "unfinished"),
    ]
    assert "has no model" in out
    assert [path.parent for path in copied.rglob("flatness.json")] == [good]
    shutil.rmtree(good)
    assert sharpness_of(copied) == 2
    assert "none of the runs" in capsys.readouterr().err
    with pytest.raises(RecordError, match="is damaged"):
        find_runs([copied])
    with pytest.raises(RecordError, match="unfinished"):
        list(measure_runs({"it": Record(copied / "unfinished")}, plan=FAST))


@pytest.mark.filterwarnings("default:erm seed 0")  # the command prints it
def test_unfinished_run_is_measured_again_once_finished(tmp_path, capsys):
    config = TrainConfig(method="erm", epochs=4, batch_size=128)
    record = Record.of(tmp_path, config)
    train(config, record, until=0.5)
    assert sharpness_of(tmp_path) == 0
    assert "warning: erm seed 0: training has not finished" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--no-figures"]) == 0
    assert "flatness" not in capsys.readouterr().out
    train(config, record)
    assert main(["report", str(tmp_path), "--no-figures"]) == 0
    out = capsys.readouterr().out
    assert f"{record.folder}/flatness.json: " in out
    assert "Not measured yet" in (tmp_path / "report" / "report.html").read_text()
    assert sharpness_of(tmp_path) == 0
    assert "warning" not in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--no-figures"]) == 0
    assert "Not measured yet" not in (tmp_path / "report" / "report.html").read_text()


def test_measure_runs_describes_what_was_measured(runs):
    found = dict(list(find_runs([runs]).items())[:1])
    ((_, about),) = measure_runs(found, examples=5000, plan=FAST)
    assert about["examples"] == 1078
    ((_, about),) = measure_runs(found, examples=5000, split="test", plan=replace(FAST, t=2.0))
    assert about.items() >= {"task": "digits", "split": "test", "examples": 599, "num_samples": 4, "t": 2.0}.items()


def test_find_runs_gives_unique_names(tmp_path):
    configs = [TrainConfig(method="sam", options={"rho": rho}, seed=seed) for rho in (0.05, 0.2) for seed in (0, 1)]
    for config in (*configs, TrainConfig(method="erm")):
        Record.of(tmp_path / "a", config).begin(config, torch.device("cpu"))
    names = ["erm seed 0", *(f"sam:rho={rho} seed {seed}" for rho in (0.05, 0.2) for seed in (0, 1))]
    found = find_runs([tmp_path])
    assert list(found) == names
    assert all(found[name].config() == config for name, config in zip(names[1:], configs, strict=True))
    Record.of(tmp_path / "b", configs[0]).begin(configs[0], torch.device("cpu"))  # the same once more
    again = find_runs([tmp_path])
    assert len(again) == 6
    assert {name.partition(" in ")[0] for name in again} == set(names)


def test_find_runs_names_settings_as_typed(tmp_path):
    tilted = TrainConfig(method="erm", average=True, example_tilt=-0.2)
    for config in (tilted, TrainConfig(method="sam")):
        Record.of(tmp_path, config).begin(config, torch.device("cpu"))
    assert list(find_runs([tmp_path])) == ["erm:example_tilt=-0.2,average=true seed 0", "sam seed 0"]
    entries = {"erm:average=true,example_tilt=-0.2": tilted, "sam": TrainConfig(method="sam")}
    tests = {
        name: [{"run": str(Record.of(tmp_path, config).folder.relative_to(tmp_path)), "seed": 0, "state": "done"}]
        for name, config in entries.items()
    }
    sweep = tmp_path / "sweeps" / "study"
    sweep.mkdir(parents=True)
    content = {"methods": {name: {"test": {"runs": runs}} for name, runs in tests.items()}}
    (sweep / "sweep.json").write_text(json.dumps(content))
    for folder in (sweep, tmp_path, tmp_path / "digits"):
        assert list(find_runs([folder])) == [f"{name} seed 0" for name in entries]


def test_sharpness_refuses_wrong_arguments(runs, tmp_path, capsys):
    with pytest.raises(RecordError, match="no run in"):
        find_runs([tmp_path])
    assert main(["sharpness", str(tmp_path / "nowhere"), "--out", str(tmp_path / "report")]) == 2
    assert "no run in" in capsys.readouterr().err
    assert not (tmp_path / "report").exists()  # nothing is left of a mistyped name
    assert main(["sharpness", str(runs), "--samples", "1", "--no-figures"]) == 2
    assert "--samples at least 2" in capsys.readouterr().err
    for t in ("-1", "nan", "inf"):
        assert main(["sharpness", str(runs), f"--t={t}", "--no-figures"]) == 2
        printed = capsys.readouterr()
        assert "--t must be a finite number of at least 0" in printed.err
        assert not printed.out  # no run is to blame
    other = replace(TrainConfig(method="erm", epochs=1), task="npz:elsewhere.npz")
    Record.of(tmp_path, other).begin(other, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"several tasks .*: pass the folders of one task"):
        list(measure_runs(find_runs([runs, tmp_path])))


def test_batches_of_sorted_data_have_many_classes(tmp_path):
    targets = np.repeat(np.arange(5), 80)
    np.savez(tmp_path / "sorted.npz", x=np.random.default_rng(0).normal(size=(400, 3)), y=targets)
    data = load_task(TrainConfig(task=f"npz:{tmp_path / 'sorted.npz'}"))
    for split, whole in (("train", data.train), ("test", data.test)):
        some = [y for _, y in lab_flatness._batches(data, split, 40, 20, torch.device("cpu"))]
        assert [len(y) for y in some] == [20, 20]
        assert all(len(y.unique()) >= 4 for y in some)
        every = torch.cat([y for _, y in lab_flatness._batches(data, split, 1000, 20, torch.device("cpu"))])
        assert torch.equal(every.sort().values, whole.targets)
