"""TSAM in the Trainer of transformers: pass the method, and leave the rest unchanged."""

from functools import partial
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import TrainingArguments

import tiltsam
from tiltsam.integrations.transformers import SharpnessAwareTrainer


class Model(nn.Module):  # or any model of transformers
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


digits = zip(*load_digits(return_X_y=True), strict=True)
data: Any = [{"x": torch.from_numpy(x).float() / 16, "labels": int(y)} for x, y in digits]
args = TrainingArguments("runs/trainer", num_train_epochs=1, per_device_train_batch_size=32, learning_rate=0.01)
trainer = SharpnessAwareTrainer(Model(), args, train_dataset=data, method=partial(tiltsam.TSAM, rho=0.1))
trainer.train()
