"""Batches: each example once an epoch, the same for the same key, however many are prepared at once."""

import pytest
import torch

from tiltsam.lab import batches as batching
from tiltsam.lab.augment import normalise
from tiltsam.lab.batches import Batches
from tiltsam.lab.data import Data, Split


def pictures(n=70, augment=()):
    """Images whose every pixel is their number, with the number as the target."""
    numbers = torch.arange(n)
    images = numbers.to(torch.uint8).view(n, 1, 1, 1).expand(n, 3, 8, 8).contiguous()
    split = Split({"image": images}, numbers)
    return Data("pictures", split, split, split, n, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7), augment=augment)


def collect(batches, seed=0, epoch=0):
    return list(batches.epoch(seed, epoch))


def test_every_example_comes_once_in_whole_batches():
    batches = Batches(pictures(), 16)
    found = collect(batches)
    assert len(found) == batches.per_epoch == 4  # 70 = 4 · 16 + 6
    assert {len(targets) for _, targets in found} == {16}
    targets = torch.cat([targets for _, targets in found])
    assert len(targets.unique()) == 64
    assert Batches(pictures(), 1000).size == 70


def test_order_and_augmentation_follow_from_seed_and_epoch():
    batches = Batches(pictures(augment=("crop", "flip")), 16)
    one, again = collect(batches, 3, 5), collect(Batches(pictures(augment=("crop", "flip")), 16), 3, 5)
    assert all(torch.equal(a, b) for x, y in zip(one, again, strict=True) for a, b in zip(x, y, strict=True))
    for other in (collect(batches, 3, 6), collect(batches, 4, 5)):
        assert not torch.equal(one[0][1], other[0][1])


def test_any_seed_has_batches_of_its_own():
    batches = Batches(pictures(), 16)
    last, before = (collect(batches, seed, 7)[0][1] for seed in (2**63 - 1, 2**63 - 2))
    assert not torch.equal(last, before)


@pytest.mark.parametrize("at_once", [1, 16 * 192, 2 * 16 * 192, 3 * 16 * 192 + 7, 1 << 24])
def test_what_is_prepared_at_once_makes_no_other_batches(at_once, monkeypatch):
    expected = collect(Batches(pictures(), 16))
    monkeypatch.setattr(batching, "AT_ONCE", at_once)
    calls = []
    monkeypatch.setattr(batching, "augment", lambda images, *_: calls.append(len(images)) or images)
    found = collect(Batches(pictures(), 16))
    assert sum(calls) == 64
    assert max(calls) == 16 * min(4, max(1, at_once // (16 * 192)))
    for (images, targets), (wanted, numbers) in zip(found, expected, strict=True):
        assert torch.equal(images, wanted)
        assert torch.equal(targets, numbers)


def test_images_are_normalised_and_augmented_only_for_training():
    data = pictures(augment=("crop",))
    batches = Batches(data, 16)
    (still,) = batches.inputs(data.train[slice(0, 5)])
    torch.testing.assert_close(still, normalise(data.train.inputs["image"][:5], data.mean, data.std))
    black = normalise(torch.zeros(1, 3, 1, 1, dtype=torch.uint8), data.mean, data.std)
    images, targets = collect(batches)[0]
    expected = normalise(targets.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 1, 1), data.mean, data.std)
    shifted = (images == black) & (expected != black)
    assert shifted.any()  # what comes in from outside
    torch.testing.assert_close(torch.where(shifted, expected, images), expected.expand_as(images))


def test_other_inputs_pass_as_they_are():
    tokens = {"input_ids": torch.arange(20).view(10, 2), "attention_mask": torch.ones(10, 2, dtype=torch.long)}
    split = Split(tokens, torch.arange(10.0))
    ids, mask, targets = collect(Batches(Data("texts", split, split, split, 1), 5))[1]
    assert torch.equal(ids[:, 0] // 2, targets.long())
    assert mask.dtype == torch.long


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_slices_on_a_gpu_are_channels_last():
    for images, _ in Batches(pictures().to("cuda"), 16).epoch(0, 0):
        assert images.is_contiguous(memory_format=torch.channels_last)
