"""How much SAM's ascent raises the loss of a batch, by rho; run it from benchmarks with ``PYTHONPATH=.``."""

import statistics
import tempfile
from pathlib import Path

import torch

from tiltsam.lab.config import TrainConfig
from tiltsam.lab.data import load
from tiltsam.lab.records import Record
from tiltsam.lab.train import Trainer
from timing import environment

SHOWN = (1, 5, 15, 30, 60)


def rises(config: TrainConfig) -> list[str]:
    """Mean loss of an epoch's batches before and after the ascent."""
    with tempfile.TemporaryDirectory() as folder:
        run = Trainer(config, Record(Path(folder)), load(config))
        run.model.train()
        found = []
        for epoch in range(max(SHOWN)):
            before, after = [], []
            for batch in run.batches.epoch(config.seed, epoch):
                run.take_step(batch)
                before.append(float(run.optimizer.info.start_losses))
                after.append(float(run.optimizer.info.losses))
            if epoch + 1 in SHOWN:
                found.append(f"{statistics.fmean(before):.2f} to {statistics.fmean(after):.2f}")
        return found


torch.set_num_threads(1)
print(environment(torch.device("cpu")))
print("rho, then the loss before and after the ascent, means over epochs", *SHOWN)
base = TrainConfig("digits", "sam", "mlp", lr=0.03, label_smoothing=0.1, validation=0.3, device="cpu")
for rho in (0.05, 0.1, 0.3, 0.5, 0.7, 0.8, 1.0):
    print(rho, *rises(base.with_settings({"rho": rho})), sep="  ", flush=True)
