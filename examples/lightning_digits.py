"""TSAM in Lightning: a mixin before the LightningModule; the Trainer is unchanged."""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tiltsam
from tiltsam.integrations.lightning import SharpnessAwareMixin


class Model(SharpnessAwareMixin, L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return tiltsam.TSAM(torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9), rho=0.1, model=self)


x, y = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
loader = DataLoader(TensorDataset(x.float() / 16, y), batch_size=32, shuffle=True)
trainer = L.Trainer(max_epochs=2, accelerator="cpu", gradient_clip_val=1.0, accumulate_grad_batches=2, logger=False)
trainer.fit(Model(), loader)
