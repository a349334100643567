"""Batches of an epoch, augmentation and normalisation."""

import pytest
import torch
from torch.nn import functional as F

from tiltsam.lab.data import Data, Split, loader
from tiltsam.lab.data.loader import TrainingBatches, crop, flip, normalise


def pictures(n=70, augment=()):
    """Return images whose every pixel is their number, with the number as the target."""
    numbers = torch.arange(n)
    images = numbers.to(torch.uint8).view(n, 1, 1, 1).expand(n, 3, 8, 8).contiguous()
    split = Split({"image": images}, numbers)
    return Data("pictures", split, split, split, n, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7), augment=augment)


def collect(batches, seed=0, epoch=0):
    return list(batches.epoch(seed, epoch))


def test_epoch_yields_each_example_once_in_whole_batches():
    batches = TrainingBatches(pictures(), 16)
    found = collect(batches)
    assert len(found) == batches.per_epoch == 4  # 70 = 4 · 16 + 6
    assert {len(targets) for _, targets in found} == {16}
    targets = torch.cat([targets for _, targets in found])
    assert len(targets.unique()) == 64
    assert TrainingBatches(pictures(), 1000).size == 70


def test_epoch_order_and_augmentation_depend_on_seed_and_epoch():
    batches = TrainingBatches(pictures(augment=(crop, flip)), 16)
    one, again = collect(batches, 3, 5), collect(TrainingBatches(pictures(augment=(crop, flip)), 16), 3, 5)
    assert all(torch.equal(a, b) for x, y in zip(one, again, strict=True) for a, b in zip(x, y, strict=True))
    for other in (collect(batches, 3, 6), collect(batches, 4, 5)):
        assert not torch.equal(one[0][1], other[0][1])


def test_epoch_accepts_large_seeds():
    batches = TrainingBatches(pictures(), 16)
    last, before = (collect(batches, seed, 7)[0][1] for seed in (2**63 - 1, 2**63 - 2))
    assert not torch.equal(last, before)


@pytest.mark.parametrize("values", [1, 16 * 192, 2 * 16 * 192, 3 * 16 * 192 + 7, 1 << 24])
def test_epoch_does_not_depend_on_prepared_values(values, monkeypatch):
    expected = collect(TrainingBatches(pictures(), 16))
    monkeypatch.setattr(loader, "PREPARED_VALUES", values)
    calls = []
    found = collect(TrainingBatches(pictures(augment=(lambda images, _: calls.append(len(images)) or images,)), 16))
    assert sum(calls) == 64
    assert max(calls) == 16 * min(4, max(1, values // (16 * 192)))
    for (images, targets), (wanted, numbers) in zip(found, expected, strict=True):
        assert torch.equal(images, wanted)
        assert torch.equal(targets, numbers)


def test_inputs_are_augmented_only_with_a_generator():
    data = pictures(augment=(crop,))
    batches = TrainingBatches(data, 16)
    (still,) = batches.inputs(data.train[slice(0, 5)])
    torch.testing.assert_close(still, normalise(data.train.inputs["image"][:5], data.mean, data.std))
    black = normalise(torch.zeros(1, 3, 1, 1, dtype=torch.uint8), data.mean, data.std)
    images, targets = collect(batches)[0]
    expected = normalise(targets.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 1, 1), data.mean, data.std)
    shifted = (images == black) & (expected != black)
    assert shifted.any()  # black pixels from the padding
    torch.testing.assert_close(torch.where(shifted, expected, images), expected.expand_as(images))


def test_epoch_passes_tokens_unchanged():
    tokens = {"input_ids": torch.arange(20).view(10, 2), "attention_mask": torch.ones(10, 2, dtype=torch.long)}
    split = Split(tokens, torch.arange(10.0))
    ids, mask, targets = collect(TrainingBatches(Data("texts", split, split, split, 1), 5))[1]
    assert torch.equal(ids[:, 0] // 2, targets.long())
    assert mask.dtype == torch.long


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_epoch_on_gpu_is_channels_last():
    for images, _ in TrainingBatches(pictures().to("cuda"), 16).epoch(0, 0):
        assert images.is_contiguous(memory_format=torch.channels_last)


# --------------------------------------------------------------------------------------- augmentation, normalisation


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def random_images(n=64, size=12, dtype=torch.uint8):
    images = torch.randint(1, 256, (n, 3, size, size), generator=generator(9))
    return images.to(dtype) if dtype == torch.uint8 else images.to(dtype) / 255


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("augment", [crop, flip])
def test_augmentations_follow_the_generator_and_keep_the_input(augment, dtype):
    images = random_images(dtype=dtype)
    before = images.clone()
    one, two, other = (augment(images, generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert not torch.equal(one, images)
    assert torch.equal(images, before)
    assert one.dtype == dtype
    assert one.shape == images.shape
    assert one.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_crop_shifts_each_image_independently(dtype):
    images, seen = random_images(n=400, dtype=dtype), set()
    padded = F.pad(images, (4, 4, 4, 4))
    for i, image in enumerate(crop(images, generator())):
        found = [(y, x) for y in range(9) for x in range(9) if torch.equal(padded[i, :, y : y + 12, x : x + 12], image)]
        assert len(found) == 1
        seen |= set(found)
    assert len(seen) > 75  # of 81 shifts: 400 draws miss 81·(80/81)^400 = 0.6 on average


def test_crop_is_uniform():
    images = torch.zeros(20000, 1, 9, 9)
    images[:, 0, 4, 4] = 1
    counts = crop(images, generator()).sum(0)[0]
    assert counts.sum() == 20000
    expected = 20000 / 81  # standard deviation 15.6; five of them
    assert (counts - expected).abs().max() < 80


def test_flip_mirrors_half_of_the_images():
    images = random_images(n=2000)
    flipped = flip(images, generator())
    same = (flipped == images).flatten(1).all(1)
    mirrored = (flipped == images.flip(3)).flatten(1).all(1)
    assert (same ^ mirrored).all()
    assert 900 < mirrored.sum() < 1100


def test_augmentations_are_applied_in_order():
    data, two = pictures(augment=(flip, crop)), generator(3)
    (images,) = TrainingBatches(data, 16).inputs(data.train, generator(3))
    assert torch.equal(images, normalise(crop(flip(data.train.inputs["image"], two), two), data.mean, data.std))


def test_normalise():
    images = random_images(n=200)
    x = images.double() / 255
    mean, std = x.mean((0, 2, 3)), x.std((0, 2, 3), correction=0)
    wanted = (x - mean.view(1, 3, 1, 1)) / std.view(1, 3, 1, 1)
    for given in (images, x):
        out = normalise(given, mean.tolist(), std.tolist())
        torch.testing.assert_close(out, wanted.float(), atol=1e-5, rtol=0)
