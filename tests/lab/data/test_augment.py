"""Augmentation: every image is a shift, a mirror image or a copy with a hole of the one it came from."""

import pytest
import torch
from torch.nn import functional as F

from tiltsam.lab.augment import AUGMENTATIONS, augment, crop, cutout, flip, normalise


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def pictures(n=64, size=12, dtype=torch.uint8):
    images = torch.randint(1, 256, (n, 3, size, size), generator=generator(9))
    return images.to(dtype) if dtype == torch.uint8 else images.to(dtype) / 255


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_the_same_generator_gives_the_same_images_and_the_original_stays(name, dtype):
    images = pictures(dtype=dtype)
    before = images.clone()
    one, two, other = (AUGMENTATIONS[name](images, generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert not torch.equal(one, images)
    assert torch.equal(images, before)
    assert one.dtype == dtype
    assert one.shape == images.shape
    assert one.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_crop_shifts_each_image_on_its_own(dtype):
    images, seen = pictures(n=400, dtype=dtype), set()
    padded = F.pad(images, (4, 4, 4, 4))
    for i, image in enumerate(crop(images, generator())):
        found = [(y, x) for y in range(9) for x in range(9) if torch.equal(padded[i, :, y : y + 12, x : x + 12], image)]
        assert len(found) == 1
        seen |= set(found)
    assert len(seen) > 75  # of 81 shifts: 400 draws leave out 81·(80/81)^400 = 0.6 on average


def test_crop_is_uniform():
    images = torch.zeros(20000, 1, 9, 9)
    images[:, 0, 4, 4] = 1
    counts = crop(images, generator()).sum(0)[0]
    assert counts.sum() == 20000
    expected = 20000 / 81  # standard deviation 15.6; five of them
    assert (counts - expected).abs().max() < 80


def test_flip_mirrors_half():
    images = pictures(n=2000)
    flipped = flip(images, generator())
    same = (flipped == images).flatten(1).all(1)
    mirrored = (flipped == images.flip(3)).flatten(1).all(1)
    assert (same ^ mirrored).all()
    assert 900 < mirrored.sum() < 1100


@pytest.mark.parametrize("size", [None, 5])
def test_cutout_blacks_out_one_square(size):
    images = pictures(n=500, size=20)
    side, areas = size or 5, []
    for image, original in zip(cutout(images, generator(), size), images, strict=True):
        hole = (image == 0).all(0)
        assert torch.equal(image[:, ~hole], original[:, ~hole])
        rows, columns = hole.any(1).nonzero().flatten(), hole.any(0).nonzero().flatten()
        assert hole.sum() == len(rows) * len(columns)  # a filled rectangle ...
        assert rows[-1] - rows[0] + 1 == len(rows) <= side
        assert columns[-1] - columns[0] + 1 == len(columns) <= side
        areas.append(int(hole.sum()))
    assert max(areas) == side**2
    assert min(areas) < side**2  # ... that a border may cut


def test_names_are_applied_in_order():
    images, one, two = pictures(), generator(3), generator(3)
    assert torch.equal(augment(images, ("flip", "crop"), one), crop(flip(images, two), two))
    assert augment(images, (), one) is images
    with pytest.raises(ValueError, match="no augmentation named 'blur'"):
        augment(images, ("blur",), one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_normalise(dtype):
    images = pictures(n=200)
    x = images.double() / 255
    mean, std = x.mean((0, 2, 3)), x.std((0, 2, 3), correction=0)
    wanted = (x - mean.view(1, 3, 1, 1)) / std.view(1, 3, 1, 1)
    out = normalise(images, mean.tolist(), std.tolist(), dtype)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), wanted, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=0)
    torch.testing.assert_close(normalise(x, mean, std, torch.float64), wanted, atol=1e-12, rtol=0)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="channels, height, width"):
        flip(torch.zeros(3, 8, 8), generator())
    with pytest.raises(ValueError, match="3 channels"):
        normalise(pictures(), (0.5,), (0.5,))
