"""One run, several processes: started by torchrun, equal to one process, and alive again after a kill."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from helpers.lab_processes import files_named, start_on_ranks, wait_for
from tiltsam.cli import main
from tiltsam.lab import models
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.data import load
from tiltsam.lab.devices import DistributedContext, connect_ranks
from tiltsam.lab.errors import ConfigError
from tiltsam.lab.records import Record
from tiltsam.lab.train import Trainer

METHOD = ("--method", "tsam", "--rho", "0.5", "--num-samples", "3")


def model_without_batchnorm(name, data, init):
    """Return a model whose outputs do not depend on how a batch is divided."""
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))


def command(arguments, build):
    """Run a command with another model, and return its exit code."""
    with mock.patch("tiltsam.lab.train.build", build):
        return main(arguments)


def command_of_rank(arguments, build):
    """Run a command on a rank, and return its exit code; one that leaves a thread of gloo fails.

    With such a thread the exit of a process sometimes aborts.
    """
    code = command(arguments, build)
    names = [Path(f"/proc/self/task/{t}/comm").read_text() for t in os.listdir("/proc/self/task")]
    return code or int(any("gloo" in name for name in names))


def run_on_two_ranks(out, *flags, build=models.build):
    """Run ``tiltsam train digits`` on two ranks; return their exit codes and output."""
    output = out.with_suffix(".log")
    arguments = ["train", "digits", *METHOD, *flags, "--out", str(out)]
    processes = start_on_ranks(2, command_of_rank, arguments, build, output=output)
    for process in processes:
        process.join(600)
    return [process.exitcode for process in processes], output.read_text()


def result(out):
    (path,) = Path(out).rglob("result.json")
    return Record(path.parent).result(), load_file(path.with_name("model.safetensors"))


def children(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize(("split", "build"), [("samples", models.build), ("data", model_without_batchnorm)])
def test_two_ranks_train_what_one_process_trains(tmp_path, split, build):
    flags = ["--epochs", "1", "--batch-size", "32"]  # the longer, the likelier that rounding switches some ReLU
    codes, output = run_on_two_ranks(tmp_path / "two", *flags, "--parallel", split, build=build)
    assert codes == [0, 0], output
    assert output.count("test accuracy") >= 1
    assert command(["train", "digits", *METHOD, *flags, "--out", str(tmp_path / "one")], build) == 0
    (numbers, model), (expected_numbers, expected) = result(tmp_path / "two"), result(tmp_path / "one")
    assert numbers["steps"] == expected_numbers["steps"]
    assert numbers["train_loss"] == pytest.approx(expected_numbers["train_loss"], rel=1e-4)
    for name, value in expected.items():
        torch.testing.assert_close(model[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_killed_rank_is_restarted_from_the_checkpoint(tmp_path):
    """By torchrun, as a user starts it."""
    flags = ["--epochs", "4", "--batch-size", "256"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    torchrun += ["--max-restarts", "3", "--monitor-interval", "0.2"]
    killed = subprocess.Popen(
        [*torchrun, "-m", "tiltsam", "train", "digits", *METHOD, *flags, "--out", str(tmp_path / "killed")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TILTSAM_CHECKPOINT_SECONDS": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(lambda: killed.poll() is not None or files_named("manifest.json", tmp_path / "killed"))
    assert killed.poll() is None  # it has its first checkpoint, and is at work
    os.kill(children(killed.pid)[1], signal.SIGKILL)
    codes, output = run_on_two_ranks(tmp_path / "unbroken", *flags)
    assert codes == [0, 0], output
    output, _ = killed.communicate(timeout=600)
    assert killed.returncode == 0, output
    numbers, model = result(tmp_path / "killed")
    expected_numbers, expected = result(tmp_path / "unbroken")
    assert all(torch.equal(model[name], value) for name, value in expected.items())
    assert {k: v for k, v in numbers.items() if k != "seconds"} == {
        k: v for k, v in expected_numbers.items() if k != "seconds"
    }


@pytest.mark.slow
def test_error_is_printed_once(tmp_path):
    codes, output = run_on_two_ranks(tmp_path / "runs", "--batch-size", "63")
    assert codes == [2, 2]
    assert output.count("divisible by 2 processes, got 63") == 1


@pytest.mark.parametrize("local", [0, 1])
def test_connect_ranks_refuses_more_processes_than_gpus(local, monkeypatch):
    variables = {"RANK": local, "LOCAL_RANK": local, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="got 2 processes and 1 GPU"):
        connect_ranks("data", "auto").__enter__()


def test_local_rank_0_of_every_host_prints_errors(monkeypatch, capsys):
    for rank, local in ((0, 0), (1, 1), (2, 0), (3, 1)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(local))
        assert main(["train", "nothing"]) == 2
        assert ("'nothing'" in capsys.readouterr().err) == (local == 0)


def test_default_context_is_one_rank():
    distributed = DistributedContext()
    assert distributed.is_main
    assert distributed.parallel() is None
    assert distributed.broadcast(0.25) == 0.25
    assert distributed.broadcast_object("x") == "x"
    x = torch.arange(6)
    assert torch.equal(distributed.local_batch((x,))[0], x)


def test_local_batches_partition_the_batch():
    x = torch.arange(6)
    parts = [DistributedContext(rank, 3).local_batch((x,))[0] for rank in range(3)]
    assert sorted(torch.cat(parts).tolist()) == x.tolist()
    assert all(len(part) == 2 for part in parts)
    with pytest.raises(ConfigError, match="divisible by 3 processes, got 7"):
        DistributedContext(0, 3).check_config(7)


def masks(rank, folder, split, epochs):
    """What a layer of a run's model draws, epoch by epoch, in training."""
    drawn = []

    class Drawing(torch.nn.Linear):
        def forward(self, x):
            if self.training:
                drawn.append(torch.rand(()).item())
            return super().forward(x.flatten(1))

    config = TrainConfig(task="digits", method="sam", epochs=epochs, batch_size=512)
    with mock.patch("tiltsam.lab.train.build", side_effect=lambda *_: Drawing(64, 10)):
        Trainer(config, Record(Path(folder)), load(config), DistributedContext(rank, 2, split)).run(
            lambda progress: None, 0.0
        )
    return drawn


def test_dropout_masks_differ_between_data_parallel_ranks(tmp_path, start_ranks):
    """Or dropout would repeat itself in every part of a batch; ranks that share the examples share the masks."""
    ranks = start_ranks(2)
    first, second = ranks(masks, str(tmp_path / "data"), "data", 2)
    assert len(first) == len(second)
    assert set(first).isdisjoint(second)
    one, other = ranks(masks, str(tmp_path / "samples"), "samples", 1)
    assert set(one) == set(other)


@pytest.mark.slow
def test_ranks_without_a_sample_are_reported(tmp_path):
    codes, output = run_on_two_ranks(
        tmp_path / "runs", "--epochs", "0.1", "--num-samples", "1", "--parallel", "samples"
    )
    assert codes == [0, 0], output
    assert output.count("2 processes share 1 sample: ") == 1
    assert (
        DistributedContext(0, 2, "samples").idle_ranks_warning(2)
        is DistributedContext(0, 2, "data").idle_ranks_warning(1)
        is None
    )
    assert "torchrun" in DistributedContext(0, 1, "samples").idle_ranks_warning(3)


def test_passes_are_refused_with_sample_parallel_ranks():
    """Each process counts its own, so that the run would be longer than that of one process, which has its name."""
    with pytest.raises(ConfigError, match="got 100"):
        DistributedContext(0, 3, "samples").check_config(64, passes=100)
    DistributedContext(0, 3, "samples").check_config(64)
    DistributedContext(0, 1, "samples").check_config(64, passes=100)
    DistributedContext(0, 2, "data").check_config(64, passes=100)
