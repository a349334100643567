"""Losses and metrics of the tasks, and BatchNorm statistics for an evaluation."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics as reference
from torch import nn

from tiltsam.lab.data.dataset import Split
from tiltsam.lab.evaluate import METRICS, reestimate_batchnorm, task_loss


def logits_of(classes, num_classes, generator):
    """Logits whose largest is that of the class, by no fixed margin."""
    logits = torch.rand(len(classes), num_classes, generator=generator)
    return logits.scatter_add(1, classes[:, None], torch.ones(len(classes), 1))


@pytest.mark.parametrize("num_classes", [2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_classification_metrics_agree_with_scikit_learn(num_classes, seed):
    generator = torch.Generator().manual_seed(seed)
    true, chosen = torch.randint(num_classes, (2, 97), generator=generator)
    outputs = logits_of(chosen, num_classes, generator)
    assert METRICS["accuracy"](outputs, true) == pytest.approx(reference.accuracy_score(true, chosen))
    assert METRICS["matthews"](outputs, true) == pytest.approx(reference.matthews_corrcoef(true, chosen))
    if num_classes == 2:
        assert METRICS["f1"](outputs, true) == pytest.approx(reference.f1_score(true, chosen))


@pytest.mark.parametrize("levels", [3, 20, 10**9])
@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_correlations_agree_with_scipy(levels, shape):
    generator = np.random.default_rng(levels)
    x = generator.integers(0, levels, 200) / 7
    y = np.round(x + generator.normal(size=200) * levels / 10)
    outputs, targets = torch.tensor(x, dtype=torch.float32).view(shape), torch.tensor(y, dtype=torch.float32)
    x, y = outputs.flatten().double().numpy(), targets.double().numpy()
    assert METRICS["pearson"](outputs, targets) == pytest.approx(stats.pearsonr(x, y)[0], abs=1e-12)
    assert METRICS["spearman"](outputs, targets) == pytest.approx(stats.spearmanr(x, y)[0], abs=1e-12)


def test_metrics_of_perfect_and_reversed_outputs():
    targets = torch.tensor([0, 1, 1, 0, 1])
    outputs = torch.nn.functional.one_hot(targets, 2).float()
    for name in ("accuracy", "f1", "matthews"):
        assert METRICS[name](outputs, targets) == 1
    assert METRICS["matthews"](-outputs, targets) == pytest.approx(-1)
    values = torch.tensor([0.1, 0.5, 0.2])
    for name in ("pearson", "spearman"):
        assert METRICS[name](values, values) == pytest.approx(1)
        assert METRICS[name](-values, values) == pytest.approx(-1)


def test_metrics_of_constants_are_zero_and_of_nan_nan():
    always = torch.tensor([[0.0, 1.0]] * 4)
    assert METRICS["matthews"](always, torch.tensor([0, 1, 0, 1])) == 0
    assert METRICS["f1"](-always, torch.zeros(4, dtype=torch.int64)) == 0
    for name in ("pearson", "spearman"):
        assert METRICS[name](torch.full((4,), 0.1), torch.arange(4.0)) == 0
        assert math.isnan(METRICS[name](torch.tensor([1, torch.nan, 2, 3]), torch.arange(4.0)))


@pytest.mark.parametrize("name", METRICS)
def test_metrics_refuse_wrong_shapes(name):
    with pytest.raises(ValueError, match="got"):
        METRICS[name](torch.zeros(3, 4, 2), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="got"):
        METRICS[name](torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))


def test_f1_refuses_three_classes():
    with pytest.raises(ValueError, match="3, 3"):
        METRICS["f1"](torch.zeros(3, 3), torch.zeros(3, dtype=torch.int64))


def test_task_loss_by_number_of_classes():
    values, targets = torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 1.0])
    assert task_loss(values, targets, 1).item() == 2.5
    logits, classes = torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.tensor([1, 1])
    for smoothing in (0.0, 0.1):
        expected = nn.functional.cross_entropy(logits, classes, label_smoothing=smoothing)
        assert torch.equal(task_loss(logits, classes, 2, smoothing), expected)


def test_reestimate_batchnorm_draws_from_all_classes():
    torch.manual_seed(0)
    targets = torch.arange(60).repeat_interleave(500)  # as a folder of images is read; 40 batches see two thirds of it
    x = targets[:, None].float() + torch.randn(len(targets), 1)
    layer = nn.BatchNorm1d(1)
    reestimate_batchnorm(layer, lambda part: layer(part.inputs["x"]), Split({"x": x}, targets))
    torch.testing.assert_close(layer.running_mean, x.mean(0), rtol=0.02, atol=0.0)
    torch.testing.assert_close(layer.running_var, x.var(0), rtol=0.02, atol=0.0)
