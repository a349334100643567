"""The networks and batches that steps are timed on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from tiltsam.lab.models import MODELS

LR = 1e-3  # small: the weights must stay where they are while we measure
# cl: convolutions in channels-last order; compiled: the model goes through torch.compile
PRECISIONS = ("fp32", "tf32", "tf32-cl", "bf16-cl", "bf16-cl-compiled")


class Bert6(nn.Module):
    """BERT's encoder at six layers: width 768, 12 heads, 30,522 tokens, dropout 0.1, two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(30522, 768)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 512, 768))
        self.norm = nn.LayerNorm(768)
        layer = nn.TransformerEncoderLayer(768, 12, 3072, 0.1, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(768, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.tokens(x) + self.positions[:, : x.shape[1]])
        logits: Tensor = self.head(self.layers(h)[:, 0])
        return logits


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: MODELS["resnet18"](100),
    "wrn16-8": lambda: MODELS["wrn16-8"](100),
    "vit-s": lambda: MODELS["vit-s"](100),
    "bert6": Bert6,
}


class Workload:
    """A model, a batch and the closure of a training step.

    Args:
        network: A name of :data:`NETWORKS`.
        batch: Examples: images of 32 pixels, or texts of 64 tokens.
        device: Where.
        precision: One of :data:`PRECISIONS`.
    """

    def __init__(self, network: str, batch: int, device: torch.device, precision: str = "fp32") -> None:
        torch.manual_seed(0)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "fp32"
        torch.backends.cudnn.benchmark = True
        self.model = NETWORKS[network]().to(device)
        self.device = device
        self.bf16 = precision.startswith("bf16")
        self.call: Callable[[Tensor], Tensor] = self.model
        if precision.endswith("-compiled"):
            self.call = torch.compile(self.model)
        if network == "bert6":
            self.x = torch.randint(30522, (batch, 64), device=device)
            self.y = torch.randint(2, (batch,), device=device)
        else:
            self.x = torch.randn(batch, 3, 32, 32, device=device)
            self.y = torch.randint(100, (batch,), device=device)
            if "-cl" in precision:
                self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                self.x = self.x.to(memory_format=torch.channels_last)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        autocast: AbstractContextManager[object] = nullcontext()
        if self.bf16:
            autocast = torch.autocast(self.device.type, torch.bfloat16)
        with autocast:
            logits = self.call(x)
        return nn.functional.cross_entropy(logits.float(), y)

    def closure(self) -> Tensor:
        loss = self.loss(self.x, self.y)
        loss.backward()
        return loss

    def one_pass(self) -> None:
        """Run a forward and a backward pass, and nothing else."""
        for p in self.model.parameters():
            p.grad = None
        self.closure()

    def captured_passes(self, count: int) -> Callable[[], None]:
        """Return ``count`` passes as one CUDA graph: the least that a captured step can cost."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.one_pass()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(count):
                self.one_pass()
        return graph.replay

    def sgd(self) -> torch.optim.SGD:
        return torch.optim.SGD(self.model.parameters(), lr=LR, momentum=0.9)
