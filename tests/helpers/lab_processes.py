"""Start commands in processes that a server forks, which has imported everything."""

import multiprocessing
import os
import socket
import sys
import time
from pathlib import Path

import torch

from tiltsam.cli import main

CONTEXT = multiprocessing.get_context("forkserver")
# torch imports its compiler at an optimizer's first step.
CONTEXT.set_forkserver_preload(
    [
        *("tiltsam.lab.compare", "tiltsam.lab.sweep", "safetensors.torch", "sklearn.datasets"),
        *("optuna.storages._rdb.models", "torch._dynamo", "torch.distributed.fsdp"),
        "torch.distributed.checkpoint.state_dict",
    ]
)


def start(*arguments):
    """Start ``tiltsam ARGUMENTS`` with a checkpoint after every epoch; return the process."""
    process = CONTEXT.Process(target=_run, args=(arguments,))
    process.start()
    return process


def start_on_ranks(size, function, *arguments, output):
    """Start a function in the environment that torchrun gives to each rank; their output goes to one file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        CONTEXT.Process(target=_run_as_rank, args=(rank, size, port, output, function, arguments))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    return processes


def files_named(name, below):
    """Return the files of that name, not those of drafts; unlike ``rglob``, also while a run writes checkpoints."""
    found = [Path(place) / name for place, _, files in os.walk(below) if name in files]
    return [path for path in found if not path.parent.name.startswith(".")]


def wait_for(condition, seconds=300):
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


def _run(arguments):
    os.environ["TILTSAM_CHECKPOINT_SECONDS"] = "0"
    torch.set_num_threads(1)
    with open(os.devnull, "w") as sys.stdout:
        code = main(arguments)
    os._exit(code)


def _run_as_rank(rank, size, port, output, function, arguments):
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    torch.set_num_threads(1)
    with open(output, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(function(*arguments))
