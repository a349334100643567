"""Modules, callbacks and a Trainer of Lightning on the problem of :mod:`helpers.trainers`."""

import lightning
import torch
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, RunningMean

import tiltsam
from helpers.trainers import STEPS, flat, halving, loss_of, net, optimizer_for
from tiltsam.integrations.lightning import SharpnessAwareMixin

__all__ = [
    "Averaging",
    "MaxMetric",
    "MeanMetric",
    "MetricCollection",
    "MixedPrecision",
    "Model",
    "Notes",
    "Polynomial",
    "RunningMean",
    "SaveAt8",
    "SharpnessAwareMixin",
    "StochasticWeightAveraging",
    "Validated",
    "WithoutMixin",
    "lightning",
    "trainer",
]


class Model(SharpnessAwareMixin, lightning.LightningModule):
    def __init__(self, method="tsam", dtype=torch.float64, **options):
        super().__init__()
        self.net = net(dtype)
        self.method, self.options = method, options
        self.seen = MeanMetric()
        self.passes, self.skip_at = 0, set()

    def training_step(self, batch, batch_idx):
        self.passes += 1
        loss = loss_of(self.net, *batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.seen(loss.detach())
        return None if self.global_step in self.skip_at else loss

    def configure_optimizers(self):
        optimizer = optimizer_for(self.net, self.method, **self.options)
        return [optimizer], [{"scheduler": halving(optimizer), "interval": "step"}]


class Notes(Callback):
    """What callbacks see of the training."""

    def __init__(self):
        self.logged, self.epochs, self.norms, self.metrics = [], [], [], []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        gradients = [p.grad for p in module.parameters()]
        self.norms.append(torch.cat([g.flatten() for g in gradients]).norm().item())

    def on_train_batch_end(self, trainer, module, *_):
        if "loss_step" in trainer.callback_metrics and (not self.logged or trainer.global_step > len(self.logged)):
            self.logged.append(trainer.callback_metrics["loss_step"].item())

    def on_train_epoch_end(self, trainer, module):
        self.epochs.append(trainer.callback_metrics["loss_epoch"].item())
        self.metrics.append(module.seen.compute().item())
        module.seen.reset()


def trainer(tmp_path, **options):
    return lightning.Trainer(
        **{
            "accelerator": "cpu",
            "default_root_dir": tmp_path,
            "max_steps": STEPS,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        }
    )


class Polynomial(WeightAveraging):
    """Lightning's own callback, with the decay of tiltsam's average."""

    def __init__(self):
        super().__init__(avg_fn=lambda average, weights, n: average + (weights - average) * 9 / (n + 9))


class Averaging(Callback):
    """tiltsam's average in Lightning's hooks."""

    average = state = None

    def on_fit_start(self, trainer, module):
        self.average = tiltsam.WeightAverage(module)
        if self.state is not None:
            self.average.load_state_dict(self.state)

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step > self.average.count:
            self.average.update()

    def on_validation_start(self, *_):
        self.applied = self.average.applied()
        self.applied.__enter__()

    def on_validation_end(self, *_):
        self.applied.__exit__(None, None, None)

    def on_train_end(self, trainer, module):
        self.on_validation_start()

    def state_dict(self):
        return self.average.state_dict()

    def load_state_dict(self, state):
        self.state = state


class Validated(Model):
    def __init__(self):
        super().__init__()
        self.tested = []

    def validation_step(self, batch, batch_idx):
        if batch_idx == 0:
            self.tested.append(flat(self.net))


class SaveAt8(Callback):
    """Three batches into the second epoch, before another window begins."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 8 and not trainer.fit_loop._should_accumulate():
            trainer.save_checkpoint(f"{trainer.default_root_dir}/half.ckpt", weights_only=False)


class WithoutMixin(lightning.LightningModule):
    def __init__(self, method, automatic=True):
        super().__init__()
        self.net, self.method, self.automatic_optimization = net(torch.float64), method, automatic

    def training_step(self, batch, batch_idx):
        if self.automatic_optimization:
            return loss_of(self.net, *batch)

        def closure():
            loss = loss_of(self.net, *batch)
            self.manual_backward(loss)
            return loss

        self.optimizers().step(closure)
        return None

    def configure_optimizers(self):
        return optimizer_for(self.net, self.method)
