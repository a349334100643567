"""The loop of a user of Accelerate on the problem of :mod:`helpers.trainers`."""

import accelerate
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

import tiltsam
from helpers.trainers import STEPS, flat, halving, loader, loss_of, net, optimizer_for
from tiltsam.integrations.accelerate import step

__all__ = ["Training", "accelerate", "reset_state", "step"]


def reset_state():
    """Reset the state that accelerators of a process share."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class Training:
    """The loop of a user of Accelerate."""

    def __init__(self, method="tsam", parts=1, scaler=None, dtype=torch.float64, **options):
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=parts, **options)
        self.accelerator.scaler = scaler  # Accelerate itself makes one on a GPU alone
        model = net(dtype)
        optimizer = optimizer_for(model, method)
        scheduler = halving(optimizer)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader(parts, dtype=dtype), scheduler
        )
        self.average = tiltsam.WeightAverage(self.model)
        self.accelerator.register_for_checkpointing(self.average)
        self.losses, self.done, self.calls = [], 0, 0
        self.overflow_at = set()

    def loss(self, x, y):
        self.calls += 1
        loss = loss_of(self.model, x, y)
        return loss * torch.inf if self.calls in self.overflow_at else loss

    def run(self, steps=STEPS, clip=None):
        while self.done < steps:
            skip = self.done * self.accelerator.gradient_accumulation_steps % len(self.loader)
            for x, y in self.accelerator.skip_first_batches(self.loader, skip):
                with self.accelerator.accumulate(self.model):
                    loss = step(self.accelerator, self.optimizer, self.loss, x, y, max_grad_norm=clip)
                    self.scheduler.step()
                if self.accelerator.sync_gradients:
                    self.average.update()
                    self.losses.append(loss)
                    self.done += 1
                if self.done == steps:
                    break
        return flat(self.model)
