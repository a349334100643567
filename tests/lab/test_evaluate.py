"""Losses and metrics of the tasks, and BatchNorm statistics for an evaluation."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from helpers.lazy import Lazy
from tiltsam.lab.data.dataset import Data, Split
from tiltsam.lab.evaluate import (
    METRICS,
    calibration_error,
    class_accuracies,
    evaluate,
    few_shot_accuracy,
    prior_shift,
    reestimate_batchnorm,
    silenced_examples,
    silenced_scores,
    task_loss,
)
from tiltsam.tilting import ExampleTilt

stats = Lazy("scipy.stats")
reference = Lazy("sklearn.metrics")


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


def naive_calibration_error(outputs, targets, num_bins=15):
    """Return the error of Guo et al. 2017, equation 3: bin m is ((m - 1) / M, m / M]."""
    probabilities = outputs.double().softmax(1)
    total = 0.0
    for m in range(num_bins):
        inside = [p for p in range(len(targets)) if m / num_bins < probabilities[p].max() <= (m + 1) / num_bins]
        if inside:
            accuracy = sum(int(probabilities[p].argmax() == targets[p]) for p in inside) / len(inside)
            confidence = sum(probabilities[p].max().item() for p in inside) / len(inside)
            total += len(inside) / len(targets) * abs(accuracy - confidence)
    return total


@pytest.mark.parametrize("num_classes", [2, 10])
@pytest.mark.parametrize("scale", [0.1, 1.0, 20.0])
def test_calibration_error_equals_naive_twin(num_classes, scale):
    outputs = scale * torch.randn(300, num_classes)
    targets = torch.randint(num_classes, (300,))
    assert calibration_error(outputs, targets) == pytest.approx(naive_calibration_error(outputs, targets), abs=1e-6)


def test_calibration_error_of_known_confidences():
    certain = torch.tensor([[100.0, 0.0]] * 4)
    assert calibration_error(certain, torch.tensor([0, 0, 0, 0])) == 0
    assert calibration_error(certain, torch.tensor([0, 0, 0, 1])) == pytest.approx(0.25)
    even = torch.zeros(4, 2)  # confidence 1/2, class 0 predicted
    assert calibration_error(even, torch.tensor([0, 1, 0, 1])) == 0
    assert calibration_error(even, torch.tensor([0, 0, 0, 0])) == pytest.approx(0.5)


def test_class_accuracies_agree_with_recall():
    true, chosen = torch.randint(5, (2, 97))
    outputs = logits_of(chosen, 6, torch.Generator().manual_seed(0))  # class 5 has no examples
    found = class_accuracies(outputs, true)
    assert found[:5].tolist() == pytest.approx(reference.recall_score(true, chosen, average=None))
    assert math.isnan(found[5])


def test_few_shot_accuracy_is_of_the_rarest_third():
    targets = torch.tensor([0] * 9 + [1] * 2 + [2] * 5 + [3] * 4 + [4] * 8 + [6])  # 5 has none, 6 one
    accuracies = torch.tensor([0.9, 0.1, 0.8, 0.4, 0.7, 0.3, 0.2])
    assert few_shot_accuracy(accuracies, targets) == pytest.approx((0.3 + 0.2) / 2)
    accuracies[5] = torch.nan  # no test examples
    assert few_shot_accuracy(accuracies, targets) == pytest.approx(0.2)
    assert few_shot_accuracy(torch.tensor([0.9, 0.5]), torch.tensor([0, 0, 1])) == 0.5


@pytest.mark.parametrize("num_classes", [1, 5])
def test_evaluate_adds_metrics_of_classifications(num_classes):
    outputs = torch.randn(1000, num_classes)
    targets = torch.randint(4, (1000,)) if num_classes > 1 else torch.randn(1000)
    split = Split({"x": outputs}, targets)
    metrics = ("accuracy",) if num_classes > 1 else ("pearson",)
    found = evaluate(lambda part: part.inputs["x"], Data("made", split, split, split, num_classes, metrics), split)
    assert list(found)[:2] == [*metrics, "loss"]
    if num_classes == 1:
        assert len(found) == 2
    else:
        assert found["ece"] == calibration_error(outputs, targets)
        assert found["worst_class_accuracy"] == class_accuracies(outputs, targets)[:4].min()
        assert found["balanced_accuracy"] == class_accuracies(outputs, targets)[:4].mean()


def labelled(num_wrong):
    """Return data of 50 examples whose first labels are wrong, and whose inputs are logits."""
    split = Split({"x": 3 * torch.randn(50, 4)}, torch.randint(4, (50,)))
    wrong = None if num_wrong is None else torch.arange(50) < num_wrong
    return Data("made", split, split[:0], split, 4, mislabelled=wrong)


@pytest.mark.parametrize("t", [-1.0, 0.5])
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_silenced_examples_equal_naive_twin(t, groups, smoothing):
    data = labelled(20)
    tilt = ExampleTilt(t, group_tilt=0.0, num_groups=4) if groups else ExampleTilt(t)
    found = silenced_examples(
        lambda part: part.inputs["x"], data, tilt, 16, partial(task_loss, num_classes=4, label_smoothing=smoothing)
    )
    x, y = data.train.inputs["x"], data.train.targets
    losses = nn.functional.cross_entropy(x, y, label_smoothing=smoothing, reduction="none").double()
    plain = nn.functional.cross_entropy(x, y, reduction="none")
    silenced = set()
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0)).tolist()
    for batch in (order[:16], order[16:32], order[32:48], order[48:]):
        for i in batch:
            others = [k for k in batch if y[k] == y[i]] if groups else batch
            share = math.exp(t * losses[i]) / sum(math.exp(t * losses[k]) for k in others)
            if share * len(others) < 0.5:  # classes count by their size
                silenced.add(i)
    hits = len([i for i in silenced if i < 20])
    assert 0 < hits < len(silenced)
    assert found.indices.tolist() == sorted(silenced, key=lambda i: -plain[i])
    assert torch.equal(found.predicted, x.argmax(1)[found.indices])
    assert torch.equal(found.losses, plain[found.indices])
    scores = {"silenced_precision": hits / len(silenced), "silenced_recall": hits / 20}
    assert silenced_scores(found, data.mislabelled) == scores


def test_silenced_scores_without_any():
    loss_fn, data = partial(task_loss, num_classes=4), labelled(20)
    found = silenced_examples(lambda part: part.inputs["x"], data, ExampleTilt(0.0), 16, loss_fn)
    assert not len(found.indices)  # equal weights
    assert silenced_scores(found, data.mislabelled) == {"silenced_recall": 0}
    assert silenced_scores(found, torch.zeros(50, dtype=torch.bool)) == {}


def test_task_loss_by_number_of_classes():
    values, targets = torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 1.0])
    assert task_loss(values, targets, 1).item() == 2.5
    logits, classes = torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.tensor([1, 1])
    for smoothing in (0.0, 0.1):
        expected = nn.functional.cross_entropy(logits, classes, label_smoothing=smoothing)
        assert torch.equal(task_loss(logits, classes, 2, smoothing), expected)


def naive_losses(logits, targets, q, tau, counts):
    """Return the loss of each example, written from the formulas: GCE if q is given, on logits shifted by priors."""
    found = []
    for row, y in zip(logits.tolist(), targets.tolist(), strict=True):
        shifted = [x + tau * math.log(n / sum(counts)) for x, n in zip(row, counts, strict=True)]
        p = math.exp(shifted[y]) / sum(map(math.exp, shifted))
        found.append(-math.log(p) if q is None else (1 - p**q) / q)
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("t", [None, -0.7, 1.5])
@pytest.mark.parametrize(("q", "tau"), [(0.7, 0.0), (1.0, 0.0), (0.01, 0.0), (None, 1.0), (None, 0.4), (0.5, 1.0)])
def test_task_loss_equals_naive_twin(q, tau, t):
    logits = 2 * torch.randn(30, 4, dtype=torch.float64, requires_grad=True)
    targets, seen = torch.randint(4, (30,)), torch.tensor([0] * 50 + [1] * 20 + [3] * 7)
    shift = prior_shift(seen, 4, tau).double()
    losses = naive_losses(logits, targets, q, tau, [50, 20, 1, 7])  # a class without examples counts as one
    loss = task_loss(logits, targets, 4, tilt=None if t is None else ExampleTilt(t), gce_q=q, logit_shift=shift)
    expected = losses.mean() if t is None else (t * losses).exp().mean().log() / t
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-6, atol=1e-7)  # the priors are float32


def test_gce_gradient_is_that_of_the_cross_entropy_times_a_power_of_the_probability():
    logits, targets = torch.randn(20, 5, dtype=torch.float64, requires_grad=True), torch.randint(5, (20,))
    (gradient,) = torch.autograd.grad(task_loss(logits, targets, 5, gce_q=0.7), logits)
    (plain,) = torch.autograd.grad(task_loss(logits, targets, 5), logits)
    p = logits.detach().softmax(1).gather(1, targets[:, None])
    torch.testing.assert_close(gradient, plain * p**0.7, rtol=1e-10, atol=0.0)


def test_gce_of_impossible_labels_is_finite():
    logits = torch.tensor([[0.0, 1e4], [1e4, 0.0]], requires_grad=True)
    loss = task_loss(logits, torch.tensor([0, 0]), 2, gce_q=0.5)
    loss.backward()
    assert loss.item() == 1.0  # (2 + 0) / 2
    assert logits.grad.abs().max() == 0


def test_reestimate_batchnorm_draws_from_all_classes():
    torch.manual_seed(0)
    targets = torch.arange(60).repeat_interleave(500)  # as a folder of images is read; 40 batches see two thirds of it
    x = targets[:, None].float() + torch.randn(len(targets), 1)
    layer = nn.BatchNorm1d(1)
    reestimate_batchnorm(layer, lambda part: layer(part.inputs["x"]), Split({"x": x}, targets))
    torch.testing.assert_close(layer.running_mean, x.mean(0), rtol=0.02, atol=0.0)
    torch.testing.assert_close(layer.running_var, x.var(0), rtol=0.02, atol=0.0)
