"""The command ``tiltsam sharpness`` on runs of the lab."""

import json
from dataclasses import replace

import pytest

from tiltsam.cli import main
from tiltsam.flatness.comparison import Plan
from tiltsam.lab.config import ConfigError, TrainConfig
from tiltsam.lab.flat import find_runs, measure_runs
from tiltsam.lab.record import Record, RecordError
from tiltsam.lab.report import write_report
from tiltsam.lab.train import train

QUICK = Plan(
    std=(0.01,), num_samples=4, num_ascent_steps=1, num_eigenvalues=1, num_trace_samples=2, num_density_probes=0
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    for method in ("erm", "sam"):
        config = TrainConfig(method=method, epochs=6, batch_size=128)
        train(config, Record.of(out, config))
    return out


def test_measures_every_run_on_the_same_examples(runs):
    found = find_runs([runs])
    assert list(found) == ["erm seed 0", "sam seed 0"]
    flats = measure_runs(found, examples=200, plan=QUICK)
    assert [flat.name for flat in flats] == list(found)
    again = measure_runs(find_runs([record.folder for record in found.values()]), examples=200, plan=QUICK)
    assert [flat.loss for flat in flats] == [flat.loss for flat in again]
    other = measure_runs(found, split="test", examples=200, plan=QUICK)
    assert other[0].loss != flats[0].loss


def test_a_run_is_measured_with_the_labels_it_was_trained_on(tmp_path):
    """A fifth of the labels is wrong, which ones is the seed's choice: the loss on them tells whose were taken."""
    for seed in (0, 1):
        config = TrainConfig(method="erm", epochs=40, batch_size=128, seed=seed)
        train(config, Record.of(tmp_path, config))
    found = find_runs([tmp_path])
    together = measure_runs(found, plan=QUICK)
    for name, flat in zip(found, together, strict=True):
        (apart,) = measure_runs({name: found[name]}, plan=QUICK)
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
    assert saved["about"] == {"task": "digits", "split": "train", "examples": 60}
    assert len(saved["neighborhood"]["std"]) == len(saved["neighborhood"]["variance_error"]) == 9
    assert f"{saved['eigenvalues']['values'][0]:.4g}"[:3] in out
    assert [line["label"] for line in saved["slices"]] == ["random direction", "top eigenvector"]
    report = write_report([folder], tmp_path / "report", figures=False)
    assert "on 60 train examples of digits" in report.page.read_text()


def test_mistakes(runs, tmp_path, capsys):
    with pytest.raises(RecordError, match="no run in"):
        find_runs([tmp_path])
    assert main(["sharpness", str(tmp_path / "nowhere"), "--no-figures"]) == 2
    assert "no run in" in capsys.readouterr().err
    assert main(["sharpness", str(runs), "--samples", "1", "--no-figures"]) == 2
    assert "--samples at least 2" in capsys.readouterr().err
    other = replace(TrainConfig(method="erm", epochs=1), task="npz:elsewhere.npz")
    Record.of(tmp_path, other).begin(other, __import__("torch").device("cpu"))
    with pytest.raises(ConfigError, match="several tasks"):
        measure_runs(find_runs([runs, tmp_path]))
