"""The command ``tiltsam sharpness`` on runs of the lab."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from tiltsam.cli import main
from tiltsam.lab import flat as lab_flat
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.data import load as load_task
from tiltsam.lab.errors import ConfigError, RecordError
from tiltsam.lab.flat import find_runs, measure_runs
from tiltsam.lab.flatness import FlatnessPlan
from tiltsam.lab.flatness_plots import plot_slices
from tiltsam.lab.records import Record
from tiltsam.lab.report import write_report
from tiltsam.lab.train import train
from tiltsam.landscape import Slice1D

QUICK = FlatnessPlan(
    std=(0.01,), num_samples=4, num_ascent_steps=1, num_eigenvalues=1, num_trace_samples=2, num_density_probes=0
)


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
    found = {flat.name: flat for flat, _ in measure_runs(runs, plan=QUICK, **options)}
    return [found[name] for name in runs]


def sharpness_of(folder, *more):
    return main(["sharpness", str(folder), "--examples", "40", "--samples", "2", "--no-figures", *more])


def test_measures_every_run_on_the_same_examples(runs):
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
    original = lab_flat.measure

    def measure(*args, **options):
        seen.append(torch.get_num_threads())
        return original(*args, **options)

    monkeypatch.setattr(lab_flat, "measure", measure)
    torch.set_num_threads(2)
    try:
        for _ in measure_runs(find_runs([runs]), plan=QUICK, examples=40):
            assert torch.get_num_threads() == 2  # the caller's code keeps its own number
    finally:
        torch.set_num_threads(1)
    assert seen == [1, 1]


def test_a_run_is_measured_with_the_labels_it_was_trained_on(tmp_path):
    """A fifth of the labels is wrong, which ones is the seed's choice: the loss on them tells whose were taken."""
    for seed in (0, 1):
        config = TrainConfig(method="erm", epochs=40, batch_size=128, seed=seed)
        train(config, Record.of(tmp_path, config))
    found = find_runs([tmp_path])
    together = flats_of(found)
    for name, flat in zip(found, together, strict=True):
        (apart,) = flats_of({name: found[name]})
        assert flat.loss == apart.loss
    assert abs(together[0].loss - together[1].loss) < 0.2


def test_the_command_prints_a_table_and_draws(runs, tmp_path, capsys):
    folder = next(runs.rglob("config.json")).parent
    arguments = ["sharpness", str(folder), "--examples", "60", "--samples", "3", "--out", str(tmp_path / "figures")]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "variance" in out
    assert "λ5" in out
    assert sorted(p.name for p in (tmp_path / "figures").glob("*.png")) == [
        "neighborhood.png",
        "slices.png",
        "spectrum.png",
    ]
    saved = json.loads((folder / "flatness.json").read_text())
    on = {"task": "digits", "split": "train", "examples": 60}
    assert saved["about"] == on | {"num_samples": 3, "t": 1.0, "rho": 0.05, "adaptive_rho": 0.5}
    assert len(saved["neighborhood"]["std"]) == len(saved["neighborhood"]["variance_error"]) == 9
    assert f"{saved['eigenvalues']['values'][0]:.4g}"[:3] in out
    assert [line["label"] for line in saved["slices"]] == ["random direction", "top eigenvector"]
    report = write_report([folder], tmp_path / "report", figures=False)
    assert "on 60 train examples of digits" in report.page.read_text()
    assert "largest rise within a radius of 0.05 (adaptive: 0.5)" in report.page.read_text()


def test_a_run_is_saved_before_the_next_is_measured(copied, monkeypatch, capsys):
    loaded = []

    def load(record, data):
        if loaded:
            raise KeyboardInterrupt
        loaded.append(record.folder)
        return train_model(record, data)

    train_model = lab_flat.load_model
    monkeypatch.setattr(lab_flat, "load_model", load)
    assert sharpness_of(copied) == 130
    assert [path.parent for path in copied.rglob("flatness.json")] == loaded


def test_runs_that_cannot_be_measured_are_left_out(copied, tmp_path, capsys):
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
    lines = [line for line in out.splitlines() if line.startswith("left out: ")]
    assert sorted(line.split()[2].removesuffix(":") for line in lines) == [
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
        list(measure_runs({"it": Record(copied / "unfinished")}, plan=QUICK))


@pytest.mark.filterwarnings("default:erm seed 0")  # the command prints it
def test_a_run_measured_before_its_end_is_told_and_once_finished_not_taken_for_measured(tmp_path, capsys):
    config = TrainConfig(method="erm", epochs=4, batch_size=128)
    record = Record.of(tmp_path, config)
    train(config, record, until=0.5)
    assert sharpness_of(tmp_path) == 0
    told = "warning: erm seed 0: training has not finished: the newest checkpoint is measured\n"
    assert told in capsys.readouterr().err
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


def test_what_was_measured_is_told_not_what_was_asked_for(runs):
    found = dict(list(find_runs([runs]).items())[:1])
    ((_, about),) = measure_runs(found, examples=5000, plan=QUICK)
    assert about["examples"] == 1078
    ((_, about),) = measure_runs(found, examples=5000, split="test", plan=replace(QUICK, num_ascent_steps=0))
    assert about == {"task": "digits", "split": "test", "examples": 599, "num_samples": 4, "t": 1.0}


def test_names_tell_runs_apart(tmp_path):
    configs = [TrainConfig(method="sam", options={"rho": rho}, seed=seed) for rho in (0.05, 0.2) for seed in (0, 1)]
    for config in (*configs, TrainConfig(method="erm")):
        Record.of(tmp_path / "a", config).begin(config, torch.device("cpu"))
    names = ["erm seed 0", *(f"sam rho={rho} seed {seed}" for rho in (0.05, 0.2) for seed in (0, 1))]
    found = find_runs([tmp_path])
    assert list(found) == names
    assert all(found[name].config() == config for name, config in zip(names[1:], configs, strict=True))
    Record.of(tmp_path / "b", configs[0]).begin(configs[0], torch.device("cpu"))  # the same once more
    again = find_runs([tmp_path])
    assert len(again) == 6
    assert {name.partition(" in ")[0] for name in again} == set(names)


def test_the_first_line_of_each_method_is_solid():
    line = Slice1D(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))
    names = ["erm seed 0", "erm seed 1", "sam seed 0", "sam seed 1", "mine", "yours"]
    drawn = plot_slices(dict.fromkeys(names, line)).get_lines()
    styles = [x._unscaled_dash_pattern for x in drawn]
    assert styles[0] == styles[2]
    assert styles[1] == styles[3] != styles[0]
    assert styles[4] != styles[5]


def test_mistakes(runs, tmp_path, capsys):
    with pytest.raises(RecordError, match="no run in"):
        find_runs([tmp_path])
    assert main(["sharpness", str(tmp_path / "nowhere"), "--out", str(tmp_path / "figures")]) == 2
    assert "no run in" in capsys.readouterr().err
    assert not (tmp_path / "figures").exists()  # nothing is left of a mistyped name
    assert main(["sharpness", str(runs), "--samples", "1", "--no-figures"]) == 2
    assert "--samples at least 2" in capsys.readouterr().err
    for t in ("-1", "nan", "inf"):
        assert main(["sharpness", str(runs), f"--t={t}", "--no-figures"]) == 2
        told = capsys.readouterr()
        assert "--t must be a finite number of at least 0" in told.err
        assert not told.out  # no run is to blame
    other = replace(TrainConfig(method="erm", epochs=1), task="npz:elsewhere.npz")
    Record.of(tmp_path, other).begin(other, torch.device("cpu"))
    with pytest.raises(ConfigError, match="several tasks"):
        list(measure_runs(find_runs([runs, tmp_path])))


def test_batches_are_of_many_classes_though_one_comes_after_the_other(tmp_path):
    targets = np.repeat(np.arange(5), 80)
    np.savez(tmp_path / "sorted.npz", x=np.random.default_rng(0).normal(size=(400, 3)), y=targets)
    data = load_task(TrainConfig(task=f"npz:{tmp_path / 'sorted.npz'}"))
    for split, whole in (("train", data.train), ("test", data.test)):
        some = [y for _, y in lab_flat._batches(data, split, 40, 20, torch.device("cpu"))]
        assert [len(y) for y in some] == [20, 20]
        assert all(len(y.unique()) >= 4 for y in some)
        every = torch.cat([y for _, y in lab_flat._batches(data, split, 1000, 20, torch.device("cpu"))])
        assert torch.equal(every.sort().values, whole.targets)
