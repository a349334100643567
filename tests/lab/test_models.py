"""The lab's networks."""

import math
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from tiltsam.lab import models
from tiltsam.lab.data import Data, Split
from tiltsam.lab.errors import ConfigError, DataError


@pytest.mark.parametrize("make", [models.resnet18, models.wrn16_8])
def test_residual_networks_have_he_initialisation(make):
    # The effect of a given rho depends on the length of the weights.
    convolutions = [m for m in make().modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) > 12
    for m in convolutions:
        expected = math.sqrt(2 / (m.out_channels * math.prod(m.kernel_size)))
        # The standard deviation of n normals is known to 1/sqrt(2n).
        assert m.weight.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * m.weight.numel()))


def test_vit_draws_the_weights_of_each_block():
    first, second = (dict(block.named_parameters()) for block in models.vit_small().blocks.layers[:2])
    for name, p in first.items():
        assert torch.equal(p, second[name]) == (p.ndim == 1), name


def images(*shape):
    split = Split({"image": torch.zeros(4, *shape, dtype=torch.uint8)}, torch.arange(4))
    return Data("images", split, split, split, 4)


@pytest.mark.parametrize("name", ["resnet18", "wrn16-8"])
def test_init_torch_draws_convolutions_as_torch_does(name):
    convolutions = [m for m in models.build(name, images(3, 32, 32), "torch").modules() if isinstance(m, nn.Conv2d)]
    for m in convolutions:
        # Uniform with the bound 1/sqrt(fan_in).
        bound = 1 / math.sqrt(m.in_channels * math.prod(m.kernel_size))
        assert 0.9 * bound < m.weight.abs().max().item() <= bound


def test_init_does_not_change_other_models():
    weights = []
    for init in ("published", "torch"):
        torch.manual_seed(0)
        weights.append(models.build("cnn", images(3, 32, 32), init).state_dict())
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


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


class FakeTimm(ModuleType):
    """The functions of timm that the lab calls, with one network for images of at least 8 pixels."""

    def list_models(self):
        return ["tiny"]

    def create_model(self, name, *, num_classes, in_chans):
        assert name == "tiny"
        return nn.Sequential(
            nn.Conv2d(in_chans, 2, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, num_classes)
        )


@pytest.mark.parametrize("channels", [1, 3])
def test_timm_model_fits_the_task(channels, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", FakeTimm("timm"))
    model = models.build("timm:tiny", images(channels, 8, 8))
    assert model(torch.zeros(2, channels, 8, 8)).shape == (2, 4)


@pytest.mark.parametrize(
    ("name", "size", "value"),
    [
        ("timm:huge", 8, "'huge'"),
        ("timm:tiny.in1k", 8, "hf:timm/tiny.in1k"),
        ("timm:tiny", 4, "timm:tiny cannot take images of 4x4"),
    ],
)
def test_timm_model_that_does_not_fit(name, size, value, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", FakeTimm("timm"))
    with pytest.raises(ConfigError, match=value):
        models.build(name, images(3, size, size))


def test_missing_timm_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(DataError, match=r"timm:tiny .*pip install '\.\[timm\]'"):
        models.build("timm:tiny", images(3, 8, 8))
