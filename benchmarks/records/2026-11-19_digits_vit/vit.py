"""The lab with a small vision transformer for digits: ``python vit.py sweep digits-vit.toml``."""

import sys

import torch
from torch import Tensor, nn

from tiltsam.cli import main
from tiltsam.lab import models

NAME = "vit-digits"


class DigitsViT(nn.Module):
    """A pre-norm vision transformer: 16 patches of 2×2 pixels, a class token, 4 blocks of width 48, 78,000 weights."""

    def __init__(self, num_classes: int, width: int = 48, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
                for _ in range(depth)
            )
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1) + self.position
        logits: Tensor = self.head(self.blocks(tokens)[:, 0])
        return logits


_image_model = models._image_model


def image_model(name: str, image: Tensor, num_classes: int) -> nn.Module:
    """Build a model for images by name."""
    return DigitsViT(num_classes) if name == NAME else _image_model(name, image, num_classes)


models._image_model = image_model

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
