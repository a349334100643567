"""Networks of the paper's experiments in plain torch, and what builds or loads the model of a run.

Inputs are (batch, channels, height, width), outputs are logits. The first convolution of a residual network is 3×3; its
stride is 1 for images of up to 32 pixels, and 2 for larger ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from tiltsam.lab.data.dataset import Data
from tiltsam.lab.errors import ConfigError, DataError, first_line
from tiltsam.lab.pretrained import ImageEncoder, TextEncoder, source_of, text_source
from tiltsam.lab.records import Record

__all__ = [
    "MODELS",
    "ResNet",
    "ViT",
    "WideResNet",
    "build",
    "cnn",
    "load_model",
    "mlp",
    "resnet18",
    "resnet34",
    "resolve_name",
    "vit_small",
    "wrn16_8",
]


class _BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut (He et al. 2016)."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(h)) + self.shortcut(x))


def _he_normal(model: nn.Module) -> None:
    """Initialise the convolutions by He's method, as the networks were published.

    PyTorch's default weights are shorter, 2.2 times for a ResNet-18. Before BatchNorm that does not change the
    function, but makes a perturbation of a given length as much stronger.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class ResNet(nn.Module):
    """A residual network of basic blocks.

    Args:
        depths: Blocks in each of the four stages.
        num_classes: Number of logits.
        image_size: 32 or 64: the stem's stride.
    """

    def __init__(self, depths: tuple[int, int, int, int], num_classes: int = 100, *, image_size: int = 32) -> None:
        super().__init__()
        stride = 1 if image_size <= 32 else 2
        self.stem = nn.Conv2d(3, 64, 3, stride, 1, bias=False)
        self.bn = nn.BatchNorm2d(64)
        blocks, width_in = [], 64
        for stage, depth in enumerate(depths):
            for block in range(depth):
                blocks.append(_BasicBlock(width_in, 64 * 2**stage, 2 if stage and not block else 1))
                width_in = 64 * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width_in, num_classes)
        _he_normal(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        h: Tensor = self.blocks(torch.relu(self.bn(self.stem(x))))
        logits: Tensor = self.head(h.mean((2, 3)))
        return logits


class _PreActivationBlock(nn.Module):
    """BatchNorm and ReLU before each convolution (Zagoruyko and Komodakis 2016)."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(width_in)
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(width_in, width, 1, stride, bias=False) if width_in != width or stride != 1 else None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.bn1(x))
        skip = x if self.shortcut is None else self.shortcut(h)
        out: Tensor = self.conv2(torch.relu(self.bn2(self.conv1(h)))) + skip
        return out


class WideResNet(nn.Module):
    """A wide residual network of depth 6n+4.

    Args:
        depth: 6n+4, such as 16.
        widen: Multiple of 16, 32 and 64 channels.
        num_classes: Number of logits.
    """

    def __init__(self, depth: int = 16, widen: int = 8, num_classes: int = 100) -> None:
        super().__init__()
        if (depth - 4) % 6:
            raise ValueError(f"depth must be 6n+4, got {depth}")
        widths = [16 * widen, 32 * widen, 64 * widen]
        self.stem = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        blocks, width_in = [], 16
        for stage, width in enumerate(widths):
            for block in range((depth - 4) // 6):
                blocks.append(_PreActivationBlock(width_in, width, 2 if stage and not block else 1))
                width_in = width
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(width_in)
        self.head = nn.Linear(width_in, num_classes)
        _he_normal(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        h = torch.relu(self.bn(self.blocks(self.stem(x))))
        logits: Tensor = self.head(h.mean((2, 3)))
        return logits


class ViT(nn.Module):
    """The vision transformer ViT-S with pre-norm blocks and a class token (Dosovitskiy et al. 2021).

    Args:
        num_classes: Number of logits.
        image_size: Height and width of the input.
        patch_size: Height and width of a patch; divides the image.
    """

    def __init__(self, num_classes: int = 100, *, image_size: int = 32, patch_size: int = 4) -> None:
        super().__init__()
        width, depth, heads = 384, 12, 6
        if image_size % patch_size:
            raise ValueError(f"patch_size must divide image_size {image_size}, got {patch_size}")
        self.patches = nn.Conv2d(3, width, patch_size, patch_size)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, 1 + (image_size // patch_size) ** 2, width))
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, num_classes)
        # TransformerEncoder copies one block, weights included. Draw those of each, as published.
        for name, p in self.blocks.named_parameters():
            if p.ndim > 1:
                nn.init.xavier_uniform_(p)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1) + self.position
        logits: Tensor = self.head(self.blocks(tokens)[:, 0])
        return logits


def resnet18(num_classes: int = 100, *, image_size: int = 32) -> ResNet:
    """ResNet-18; 11.2 million parameters at 100 classes."""
    return ResNet((2, 2, 2, 2), num_classes, image_size=image_size)


def resnet34(num_classes: int = 100, *, image_size: int = 32) -> ResNet:
    """ResNet-34; 21.3 million parameters at 100 classes."""
    return ResNet((3, 4, 6, 3), num_classes, image_size=image_size)


def wrn16_8(num_classes: int = 100, *, image_size: int = 32) -> WideResNet:
    """WideResNet-16-8; 11.0 million parameters at 100 classes. Any image size."""
    del image_size
    return WideResNet(16, 8, num_classes)


def vit_small(num_classes: int = 100, *, image_size: int = 32) -> ViT:
    """ViT-S: 64 patches, 12 blocks of width 384, 21.4 million parameters."""
    if image_size < 8:
        raise ValueError(f"vit-s needs images of at least 8 pixels, got {image_size}")
    return ViT(num_classes, image_size=image_size, patch_size=image_size // 8)


def mlp(num_inputs: int, num_classes: int) -> nn.Sequential:
    """Two hidden layers of width 256, the first with BatchNorm."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(num_inputs, 256),
        nn.BatchNorm1d(256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, num_classes),
    )


def cnn(num_classes: int, *, channels: int = 1, width: int = 32) -> nn.Sequential:
    """Two convolutions and a linear layer, for images of 8 pixels and more."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, num_classes),
    )


def build(name: str, data: Data, init: Literal["published", "torch"] = "published") -> nn.Module:
    """Build a model with the inputs and outputs of a task and its initial weights.

    Args:
        name: Name of the model, as in a config; ``auto`` chooses one that fits the task.
        data: The task's data.
        init: Initial convolutions of residual networks: as they were published, or torch's defaults.

    Raises:
        ConfigError: If there is no such model, or it does not fit the inputs.
        DataError: If the files of a pretrained model, or the package that has the model, are missing.
    """
    inputs = data.train.inputs
    name = resolve_name(name, data)
    try:
        if "image" in inputs:
            model = _image_model(name, inputs["image"][0], data.num_classes)
        elif "input_ids" in inputs:
            model = TextEncoder(text_source(name), data.num_classes)
        elif name == "mlp":
            model = mlp(inputs["x"][0].numel(), data.num_classes)
        else:
            raise ConfigError(f"model must be mlp for rows of features, got {name!r}")
        if isinstance(model, (ImageEncoder, TextEncoder)) or name.startswith("timm:"):
            _check_inputs(model, name, inputs)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if init == "torch" and isinstance(model, ResNet | WideResNet):
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.reset_parameters()
    return model


def resolve_name(name: str, data: Data) -> str:
    """Return the name of a model; for ``auto``, that of the model that fits the task."""
    if name != "auto":
        return name
    inputs = data.train.inputs
    if "image" not in inputs:
        return "minilm" if "input_ids" in inputs else "mlp"
    channels, _, width = inputs["image"].shape[1:]
    return "mlp" if width < 16 else "cnn" if width < 32 or channels != 3 else "resnet18"


def load_model(record: Record, data: Data) -> nn.Module:
    """Load the model of a run with its trained weights; those of the newest checkpoint if training has not finished.

    Raises:
        RecordError: If the run's data are the user's own, and have changed.
    """
    config = record.data_config()
    if config.task == data.name:
        record.check_data(data.fingerprint)
    model = build(config.model, data)
    not_saved = dict(model.named_buffers()).keys() - model.state_dict().keys()  # a file may contain them nevertheless
    model.load_state_dict({name: x for name, x in record.model().items() if name not in not_saved})
    return model


@torch.no_grad()
def _check_inputs(model: nn.Module, name: str, inputs: Mapping[str, Tensor]) -> None:
    """Run a model of another package on two examples: each kind has its own errors for a wrong size, or for a batch."""
    if "image" in inputs:
        height, width = inputs["image"].shape[2:]
        what, advice = f"images of {height}x{width}", "choose another --image-size or --model"
    else:
        what, advice = f"texts of {inputs['input_ids'].shape[1]} tokens", "lower --max-length or choose another --model"
    try:
        model.eval()(*(x[:2] if x.dtype == torch.int64 else x[:2].float() for x in inputs.values()))
    except (ValueError, IndexError, RuntimeError) as error:
        raise ConfigError(f"{name} cannot take {what} ({first_line(error)}): {advice}") from error


def _image_model(name: str, image: Tensor, num_classes: int) -> nn.Module:
    channels, height, width = image.shape
    if name == "cnn":
        return cnn(num_classes, channels=channels)
    if name == "mlp":
        return mlp(image.numel(), num_classes)
    if name.startswith("timm:"):
        return _timm_model(name.removeprefix("timm:"), channels, num_classes)
    if name not in MODELS and not name.startswith("hf:"):
        raise ConfigError(
            f"model must be mlp, cnn, {', '.join(MODELS)}, timm:NAME or hf:FOLDER-OR-NAME for images, got {name!r}"
        )
    if channels != 3:
        raise ConfigError(f"{name} needs images with 3 channels, got {channels}: use cnn or mlp")
    if name == "vit-s" and height != width:
        raise ConfigError(f"vit-s needs square images, got {height}x{width}")
    if name in MODELS:
        return MODELS[name](num_classes, image_size=width)
    return ImageEncoder(str(source_of(name)), num_classes)


def _timm_model(name: str, channels: int, num_classes: int) -> nn.Module:
    """Build a model of timm with random weights."""
    try:
        timm = importlib.import_module("timm")
    except ModuleNotFoundError as error:
        raise DataError(f"timm:{name} needs timm: pip install '.[timm]'") from error
    if "." in name:
        raise ConfigError(
            f"models of timm start from random weights: leave out the tag of timm:{name}, or pass hf:timm/{name}"
        )
    if name not in timm.list_models():
        raise ConfigError(f"timm has no model {name!r}; timm.list_models() has {len(timm.list_models())} others")
    model: nn.Module = timm.create_model(name, num_classes=num_classes, in_chans=channels)
    return model


MODELS: dict[str, Callable[..., nn.Module]] = {
    "resnet18": resnet18,
    "resnet34": resnet34,
    "wrn16-8": wrn16_8,
    "vit-s": vit_small,
}
"""Names for the command line: each takes ``num_classes`` and ``image_size``."""
