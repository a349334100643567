"""The lab's networks."""

import math

import pytest
import torch
from torch import nn

from tiltsam.lab import models
from tiltsam.lab.data import Data, Split
from tiltsam.lab.errors import ConfigError


@pytest.mark.parametrize("make", [models.resnet18, models.wrn16_8])
def test_residual_networks_have_he_initialisation(make):
    # The effect of a given rho depends on the length of the weights.
    convolutions = [m for m in make().modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) > 12
    for m in convolutions:
        expected = math.sqrt(2 / (m.out_channels * math.prod(m.kernel_size)))
        # The standard deviation of n normals is known to 1/sqrt(2n).
        assert m.weight.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * m.weight.numel()))


def images(*shape):
    split = Split({"image": torch.zeros(4, *shape, dtype=torch.uint8)}, torch.arange(4))
    return Data("images", split, split, split, 4)


@pytest.mark.parametrize(
    ("name", "data", "value"),
    [
        ("resnet99", images(3, 8, 8), "'resnet99'"),
        ("resnet18", images(1, 8, 8), "got 1"),
        ("vit-s", images(3, 8, 16), "got 8x16"),
        ("vit-s", images(3, 4, 4), "got 4"),
        ("cnn", Data("rows", *[Split({"x": torch.zeros(4, 2)}, torch.arange(4))] * 3, 4), "'cnn'"),
    ],
)
def test_build_refuses_models_that_do_not_fit(name, data, value):
    with pytest.raises(ConfigError, match=value):
        models.build(name, data)
