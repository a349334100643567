"""The example scripts run, and the minimal one computes what the library computes."""

import copy
import importlib.util
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tiltsam
from helpers.lab_processes import start_on_ranks
from tiltsam.space.randomness import derive_seed

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("num_samples", [1, 3])
def test_tsam_minimal_equals_tsam(num_samples):
    settings = {"t": 20.0, "rho": 0.1, "radius": 0.2}
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    inputs, targets = torch.randn(4, 8, 6, dtype=torch.float64), torch.randint(3, (4, 8))
    twin = copy.deepcopy(model)
    base, twin_base = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4) for m in (model, twin))
    tsam = tiltsam.TSAM(base, num_samples=num_samples, seed=7, **settings)
    minimal = load("tsam_minimal")

    for step in range(30):

        def closure(network, batch=step % 4):
            loss = nn.functional.cross_entropy(network(inputs[batch]), targets[batch])
            loss.backward()
            return loss

        tsam.step(lambda: closure(model))
        noise = [torch.Generator().manual_seed(derive_seed(7, step, j, 0)) for j in range(num_samples)]
        losses = minimal.tsam_step(twin_base, lambda: closure(twin), noise, **settings)
        torch.testing.assert_close(losses, tsam.info.losses, rtol=0, atol=1e-10)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-10)


def test_tsam_minimal_fits_on_a_page():
    assert len((EXAMPLES / "tsam_minimal.py").read_text().splitlines()) <= 60


def run_example(name, *arguments):
    sys.argv = [name, *arguments]
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.fixture
def run_script(monkeypatch, capsys):
    """Return a function that runs an example as a script, and returns what it prints."""

    def run(*command):
        monkeypatch.setattr(sys, "argv", sys.argv)  # to be restored
        run_example(*command)
        return capsys.readouterr().out

    return run


def test_tsam_minimal_runs(run_script):
    printed = run_script("tsam_minimal.py")
    assert "SGD ends at x = 0.36" in printed
    assert float(re.findall(r"TSAM ends at x = (\d\.\d+)", printed)[0]) > 0.8  # in a flatter minimum


def test_digits_runs(run_script):
    printed = run_script("digits.py", "--epochs", "1", "--seeds", "1")
    assert all(f" {method} " in printed for method in ("erm", "sam", "tsam"))
    assert "nan" not in printed  # one seed has no standard error
    assert "at equal epochs" in printed


def losses(output):
    return [float(value) for value in re.findall(r"loss (\d+\.\d+)", output)]


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_finetune_fsdp2_runs(tmp_path):
    pytest.importorskip("transformers")
    options = ["--steps", "8", "--num-samples", "2", "--out", str(tmp_path / "checkpoint")]
    log = tmp_path / "log"
    processes = start_on_ranks(2, run_example, "finetune_fsdp2.py", *options, output=log)
    for process in processes:
        process.join(300)
        assert process.exitcode == 0, log.read_text()
    first, last = losses(log.read_text())
    assert last < first
    assert (tmp_path / "checkpoint" / ".metadata").exists()


@pytest.mark.slow
def test_finetune_lora_runs(tmp_path, run_script):
    pytest.importorskip("peft")
    printed = run_script("finetune_lora.py", "--steps", "8", "--out", str(tmp_path))
    first, last = losses(printed)
    assert last < first
    assert "17,408 of 132,416 weights are trained" in printed
    assert (tmp_path / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_quickstart_notebook_runs():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    cells = json.loads((EXAMPLES / "quickstart.ipynb").read_text())["cells"]
    namespace = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] or cell["source"][0].startswith("PASSES")  # committed with its output
            exec("".join(cell["source"]), namespace)
    pyplot.close("all")
    last = {name: curve[-1][1] for name, (_, curve) in namespace["runs"].items()}
    assert last["SGD"] < min(last["SAM"], last["TSAM, one sample"])  # what the notebook says
