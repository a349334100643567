"""Metrics of the tasks, against scikit-learn and scipy."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics as reference

from tiltsam.lab.metrics import METRICS


def logits_of(classes, num_classes, generator):
    """Logits whose largest is that of the class, by no fixed margin."""
    logits = torch.rand(len(classes), num_classes, generator=generator)
    return logits.scatter_add(1, classes[:, None], torch.ones(len(classes), 1))


@pytest.mark.parametrize("num_classes", [2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_classification_agrees_with_scikit_learn(num_classes, seed):
    generator = torch.Generator().manual_seed(seed)
    true, chosen = torch.randint(num_classes, (2, 97), generator=generator)
    outputs = logits_of(chosen, num_classes, generator)
    assert METRICS["accuracy"](outputs, true).item() == pytest.approx(reference.accuracy_score(true, chosen))
    assert METRICS["matthews"](outputs, true).item() == pytest.approx(reference.matthews_corrcoef(true, chosen))
    if num_classes == 2:
        assert METRICS["f1"](outputs, true).item() == pytest.approx(reference.f1_score(true, chosen))


@pytest.mark.parametrize("levels", [3, 20, 10**9])
@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_correlations_agree_with_scipy_with_and_without_ties(levels, shape):
    generator = np.random.default_rng(levels)
    x = generator.integers(0, levels, 200) / 7
    y = np.round(x + generator.normal(size=200) * levels / 10)
    outputs, targets = torch.tensor(x, dtype=torch.float32).view(shape), torch.tensor(y, dtype=torch.float32)
    x, y = outputs.flatten().double().numpy(), targets.double().numpy()
    assert METRICS["pearson"](outputs, targets).item() == pytest.approx(stats.pearsonr(x, y)[0], abs=1e-12)
    assert METRICS["spearman"](outputs, targets).item() == pytest.approx(stats.spearmanr(x, y)[0], abs=1e-12)


def test_perfect_and_reversed():
    targets = torch.tensor([0, 1, 1, 0, 1])
    outputs = torch.nn.functional.one_hot(targets, 2).float()
    for name in ("accuracy", "f1", "matthews"):
        assert METRICS[name](outputs, targets).item() == 1
    assert METRICS["matthews"](-outputs, targets).item() == pytest.approx(-1)
    values = torch.tensor([0.1, 0.5, 0.2])
    for name in ("pearson", "spearman"):
        assert METRICS[name](values, values).item() == pytest.approx(1)
        assert METRICS[name](-values, values).item() == pytest.approx(-1)


def test_nothing_to_correlate_is_zero_and_nan_stays_nan():
    always = torch.tensor([[0.0, 1.0]] * 4)
    assert METRICS["matthews"](always, torch.tensor([0, 1, 0, 1])).item() == 0
    assert METRICS["f1"](-always, torch.zeros(4, dtype=torch.int64)).item() == 0
    for name in ("pearson", "spearman"):
        assert METRICS[name](torch.full((4,), 0.1), torch.arange(4.0)).item() == 0
        assert math.isnan(METRICS[name](torch.tensor([1, torch.nan, 2, 3]), torch.arange(4.0)).item())


@pytest.mark.parametrize("name", METRICS)
def test_wrong_shapes_are_refused(name):
    with pytest.raises(ValueError, match="got"):
        METRICS[name](torch.zeros(3, 4, 2), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="got"):
        METRICS[name](torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))


def test_f1_is_of_two_classes():
    with pytest.raises(ValueError, match="two classes"):
        METRICS["f1"](torch.zeros(3, 3), torch.zeros(3, dtype=torch.int64))
