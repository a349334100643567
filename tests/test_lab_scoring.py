"""BatchNorm's statistics for the weights that are scored."""

import torch
from torch import nn

from tiltsam.lab.data.dataset import Split
from tiltsam.lab.scoring import reestimate_batchnorm


def test_statistics_are_those_of_all_classes_though_one_comes_after_the_other():
    torch.manual_seed(0)
    targets = torch.arange(60).repeat_interleave(500)  # as a folder of images is read; 40 batches see two thirds of it
    x = targets[:, None].float() + torch.randn(len(targets), 1)
    layer = nn.BatchNorm1d(1)
    reestimate_batchnorm(layer, lambda part: layer(part.inputs["x"]), Split({"x": x}, targets))
    torch.testing.assert_close(layer.running_mean, x.mean(0), rtol=0.02, atol=0.0)
    torch.testing.assert_close(layer.running_var, x.var(0), rtol=0.02, atol=0.0)
