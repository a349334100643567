"""A Trainer of transformers on the problem of :mod:`helpers.trainers`."""

import torch
import transformers
from torch import nn
from torch.utils.data import SequentialSampler
from transformers import TrainingArguments

from helpers.accelerate_training import reset_state
from helpers.trainers import BATCH, STEPS, Rows, halving, net, optimizer_for
from tiltsam.integrations.transformers import SharpnessAwareTrainer

__all__ = ["Classifier", "InOrder", "SharpnessAwareTrainer", "reset_state", "trainer"]


class Classifier(nn.Module):
    """A model for the Trainer: takes labels, returns the loss and logits."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.net = net(dtype)
        self.calls = 0
        self.config = transformers.PreTrainedConfig()

    def forward(self, x, labels=None):
        self.calls += 1
        logits = self.net(x)
        return {"logits": logits} | ({} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)})


class InOrder(SharpnessAwareTrainer):
    """A Trainer that takes examples in order."""

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)


def trainer(tmp_path, parts=1, method="tsam", wrap=None, callbacks=(), dtype=torch.float64, cls=InOrder, **options):
    """Return a Trainer whose method is passed as an optimizer, or wraps the Trainer's own."""
    model = Classifier(dtype)
    optimizers = (None, None)
    if wrap is None:
        optimizer = optimizer_for(model.net, method)
        optimizers = (optimizer, halving(optimizer))
    arguments = TrainingArguments(
        **{
            "output_dir": str(tmp_path),
            "use_cpu": True,
            "max_steps": STEPS,
            "per_device_train_batch_size": BATCH // parts,
            "gradient_accumulation_steps": parts,
            "max_grad_norm": 0.0,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            **options,
        }
    )
    data = Rows(as_dict=True, dtype=dtype)
    sets = {"train_dataset": data, "eval_dataset": data}
    return cls(model, arguments, optimizers=optimizers, callbacks=list(callbacks), method=wrap, **sets)
