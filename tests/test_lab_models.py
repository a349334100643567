"""The lab's networks."""

import math

import pytest
from torch import nn

from tiltsam.lab import models


@pytest.mark.parametrize("make", [models.resnet18, models.wrn16_8])
def test_residual_networks_begin_as_published(make):
    """He's initialisation: what a rho means depends on the length of the weights."""
    convolutions = [m for m in make().modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) > 12
    for m in convolutions:
        expected = math.sqrt(2 / (m.out_channels * math.prod(m.kernel_size)))
        # The standard deviation of n normals is known to 1/sqrt(2n).
        assert m.weight.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * m.weight.numel()))


def test_a_transformer_says_which_images_it_takes():
    with pytest.raises(ValueError, match="images of 8 pixels and more, got 4"):
        models.vit_small(image_size=4)
