"""Label noise, random splits, and the seed's part in them."""

import pytest
import torch

from helpers.lab_files import check, cifar, load, rows
from tiltsam.lab.data.dataset import long_tail, noisy_labels, split_at_random


@pytest.mark.parametrize("num_classes", [2, 10])
def test_noisy_labels_are_uniform_over_other_classes(num_classes):
    labels = torch.arange(20000) % num_classes
    noisy = noisy_labels(labels, 0.2, num_classes, torch.Generator().manual_seed(0))
    wrong = noisy != labels
    assert wrong.sum() == 4000  # none of the replaced labels is the old one
    shift = ((noisy - labels) % num_classes)[wrong].bincount(minlength=num_classes)[1:]
    expected = 4000 / (num_classes - 1)
    assert (shift - expected).abs().max() <= 5 * expected**0.5
    again = noisy_labels(labels, 0.2, num_classes, torch.Generator().manual_seed(0))
    assert torch.equal(noisy, again)
    assert torch.equal(labels, torch.arange(20000) % num_classes)


@pytest.mark.parametrize(
    ("n", "fraction", "size"), [(10, 0.1, 1), (10, 0.0, 0), (3, 0.01, 1), (2, 0.99, 1), (100, 0.25, 25)]
)
def test_split_at_random_sizes(n, fraction, size):
    first, second = split_at_random(n, fraction, torch.Generator().manual_seed(0))
    assert len(second) == size
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(n))


def test_seed_changes_validation_split_but_not_test_set():
    one, same, other = load("digits", seed=1), load("digits", seed=1), load("digits", seed=2)
    assert torch.equal(one.train.targets, same.train.targets)
    assert torch.equal(one.validation.inputs["image"], same.validation.inputs["image"])
    assert not torch.equal(one.validation.inputs["image"], other.validation.inputs["image"])
    assert torch.equal(one.test.inputs["image"], other.test.inputs["image"])


@pytest.mark.parametrize("seed", [0, 1])
def test_mislabelled_training_examples_are_known(seed):
    noisy, clean = (load("digits", seed=seed, noise=noise) for noise in (0.4, 0.0))
    assert clean.mislabelled is None
    assert torch.equal(noisy.mislabelled, noisy.train.targets != clean.train.targets)
    assert 0.35 < noisy.mislabelled.double().mean() < 0.45
    assert noisy.to("meta").mislabelled.is_meta
    assert clean.to("meta").mislabelled is None


def test_long_tail_sizes_are_exponential():
    labels = torch.arange(5000) % 100  # 50 of each class
    kept = long_tail(labels, 10.0, 100, torch.Generator().manual_seed(0))
    assert labels[kept].bincount().tolist() == [round(50 * 10 ** (-c / 99)) for c in range(100)]
    assert torch.equal(kept, kept.unique())  # sorted, each once
    assert (kept[labels[kept] == 99] > 1000).any()  # not just the first of a class


@pytest.mark.parametrize("seed", range(10))
def test_digits_lt_has_five_examples_of_the_rarest_class(seed):
    data = load("digits-lt", seed=seed)
    check(data)
    assert data.mislabelled is None
    both = torch.cat([data.train.targets, data.validation.targets]).bincount()
    assert both.tolist() == [127, *(round(128 * 15 ** (-c / 9)) for c in range(1, 10))]  # the largest class has 128
    assert data.train.targets.bincount().min() >= 5
    usual = load("digits")
    assert torch.equal(data.test.inputs["image"], usual.test.inputs["image"])


def test_long_tail_is_the_same_for_every_seed():
    def images(**settings):
        data = load("digits-lt", **settings)
        both = torch.cat([data.train.inputs["image"], data.validation.inputs["image"]])
        return sorted(image.flatten().tolist() for image in both)

    assert images(seed=0) == images(seed=1) == images(seed=2, noise=0.2, validation=0.3)


def test_cifar100_lt_keeps_the_test_set_balanced(tmp_path):
    cifar(tmp_path, True, n=2000)
    data = load("cifar100-lt", tmp_path, validation=0.0)
    sizes = data.train.targets.bincount(minlength=100)
    assert sizes.tolist() == [round(20 * 100 ** (-c / 99)) for c in range(100)]
    assert data.test.targets.bincount().tolist() == [20] * 100
    assert len(load("cifar100", tmp_path, validation=0.0).train) == 2000


def test_validation_fraction_may_be_zero():
    data = load("digits", validation=0.0)
    check(data)
    assert rows(data) == (1198, 0, 599)


def test_fixed_permutation_is_the_same_in_every_call():
    split = load("digits").train
    order = split.fixed_permutation()
    assert torch.equal(order, split.fixed_permutation())
    assert torch.equal(order.sort().values, torch.arange(len(split)))
