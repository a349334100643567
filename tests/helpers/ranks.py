"""Processes that run one job after another, connected by torch.distributed."""

import os
import tempfile
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing  # so that pipes can send tensors

from helpers.lab_processes import CONTEXT

TIMEOUT = 300  # seconds that ranks wait for each other


class Ranks:
    """Processes on this machine, connected by gloo.

    Calling it runs a picklable function on every rank and returns the results.
    """

    def __init__(self, size):
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(size):
            mine, theirs = CONTEXT.Pipe()
            store = os.path.join(self._folder.name, "store")
            process = CONTEXT.Process(target=_serve, args=(rank, size, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def send(self, function, *args):
        for pipe in self.pipes:
            pipe.send((function, args))

    def receive(self, rank):
        """Return the result of a rank's job, or raise its error."""
        if not self.pipes[rank].poll(2 * TIMEOUT):
            raise TimeoutError(f"rank {rank} did not answer in {2 * TIMEOUT} s")
        result, error = self.pipes[rank].recv()
        if error is not None:
            raise RuntimeError(error)
        return result

    def __call__(self, function, *args):
        self.send(function, *args)
        return [self.receive(rank) for rank in range(self.size)]

    def close(self):
        for process in self.processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(rank, size, store, pipe):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT)
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((function(rank, *args), None))
        except Exception as error:
            notes = "\n".join(getattr(error, "__notes__", []))
            pipe.send((None, f"{traceback.format_exc()}\n{notes}"))
