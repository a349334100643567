"""TSAM with Accelerate: prepare the optimizer as usual, and take steps with the helper."""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tiltsam
from tiltsam.integrations.accelerate import step

accelerator = Accelerator(gradient_accumulation_steps=2)  # on a GPU also mixed_precision="fp16"
net = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))
model = accelerator.prepare(net)
tsam = tiltsam.TSAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rho=0.1, model=model)
x, y = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
loader = DataLoader(TensorDataset(x.float() / 16, y), batch_size=32, shuffle=True)
optimizer, loader = accelerator.prepare(tsam, loader)


def loss_fn(x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


for epoch in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            step(accelerator, optimizer, loss_fn, x, y, max_grad_norm=1.0)
    accelerator.print(f"epoch {epoch}: loss {tsam.info.loss:.3f}")
