"""Public image data sets, from small files in their published formats."""

import gzip
import struct

import pytest
import torch

from helpers.lab_files import check, cifar, dtd, fashion, load, rows, tiny
from tiltsam.lab.errors import DataError


def test_digits():
    noisy, clean = load("digits"), load("digits", noise=0.0)
    check(noisy)
    assert rows(noisy) == (1078, 120, 599)
    assert torch.equal(noisy.train.inputs["image"], clean.train.inputs["image"])
    assert torch.equal(noisy.test.targets, clean.test.targets)
    wrong = sum(int((getattr(noisy, s).targets != getattr(clean, s).targets).sum()) for s in ("train", "validation"))
    assert wrong == round(0.2 * 1198)
    assert noisy.train.inputs["image"].max() == 240


@pytest.mark.parametrize("fine", [True, False])
def test_cifar(tmp_path, fine):
    cifar(tmp_path, fine)
    data = load("cifar100" if fine else "cifar10", tmp_path)
    check(data)
    assert rows(data) == ((36, 4, 40) if fine else (180, 20, 40))
    assert data.num_classes == (100 if fine else 10)
    for split in (data.train, data.test):  # images still match their labels, channels are in order
        assert torch.equal(split.inputs["image"][:, 0, 31, 31].long(), 2 * split.targets)
        assert torch.equal(split.inputs["image"][:, 1, 0, 0].long(), 2 * split.targets + 1)
    x = data.train.inputs["image"].double() / 255
    assert data.mean == pytest.approx(x.mean((0, 2, 3)).tolist())
    assert data.std == pytest.approx(x.std((0, 2, 3), correction=0).tolist())


def test_cifar100_noisy_has_a_clean_test_set(tmp_path):
    cifar(tmp_path, True, n=200)
    data = load("cifar100-noisy", tmp_path)
    truth = [split.inputs["image"][:, 0, 0, 0].long() // 2 for split in (data.train, data.validation, data.test)]
    wrong = [int((s.targets != y).sum()) for s, y in zip((data.train, data.validation, data.test), truth, strict=True)]
    assert wrong[0] + wrong[1] == 40
    assert wrong[2] == 0
    assert load("cifar100-noisy", tmp_path, noise=0.5).name == "cifar100-noisy"


@pytest.mark.parametrize("unpacked", [False, True])
def test_fashion_mnist(tmp_path, unpacked):
    folder = fashion(tmp_path)
    if unpacked:
        for path in folder.glob("*.gz"):
            path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
            path.unlink()
    data = load("fashion-mnist", tmp_path)
    check(data)
    assert rows(data) == (27, 3, 30)
    assert data.train.inputs["image"].shape[1:] == (1, 28, 28)
    assert torch.equal(data.train.inputs["image"][:, 0, 5, 5].long(), data.train.targets)


def test_tiny_imagenet(tmp_path):
    tiny(tmp_path)
    calls = []
    data = load("tiny-imagenet", tmp_path, progress=lambda *a: calls.append(a))
    check(data)
    assert rows(data) == (9, 1, 4)
    assert data.test.targets.tolist() == [1, 0, 1, 0]  # classes are sorted by name
    assert (data.test.inputs["image"][:, 0, 9, 9] > 100).tolist() == [True, False, True, False]
    assert ("reading training images", 10, 10) in calls


def test_dtd_uses_the_published_validation_set(tmp_path):
    dtd(tmp_path)
    data = load("dtd", tmp_path, image_size=16, validation=0.5)
    check(data)
    assert rows(data) == (6, 4, 2)
    for split in (data.train, data.validation, data.test):
        assert torch.equal(split.inputs["image"][:, 0, 8, 8] > 100, split.targets == 1)
    assert load("dtd", tmp_path).train.inputs["image"].shape[1:] == (3, 224, 224)


def truncate(path, keep=0.5):
    path.write_bytes(path.read_bytes()[: int(len(path.read_bytes()) * keep)])


def poke(path, offset, value):
    raw = bytearray(path.read_bytes())
    raw[offset] = value
    path.write_bytes(raw)


def labels_idx(root, magic, n, content, images=30):
    folder = fashion(root, images)
    with gzip.open(folder / "train-labels-idx1-ubyte.gz", "wb") as f:
        f.write(struct.pack(">2I", magic, n) + content)


DAMAGE = [
    ("cifar100", lambda r: truncate(cifar(r, True) / "train.bin", 0.51), r"train\.bin.* 3074 "),
    ("cifar100", lambda r: (cifar(r, True) / "test.bin").write_bytes(b""), r"test\.bin.* got 0"),
    ("cifar100", lambda r: poke(cifar(r, True) / "test.bin", 3075, 100), r"test\.bin.* got 100 in record 1"),
    ("cifar10", lambda r: poke(cifar(r, False) / "data_batch_3.bin", 0, 10), r"data_batch_3\.bin.* got 10 in record 0"),
    ("fashion-mnist", lambda r: truncate(fashion(r) / "t10k-images-idx3-ubyte.gz"), "t10k-images"),
    ("fashion-mnist", lambda r: poke(fashion(r) / "train-labels-idx1-ubyte.gz", 0, 0), "train-labels"),
    ("fashion-mnist", lambda r: labels_idx(r, 2050, 30, bytes(30)), "train-labels.* 0x00000801, got 0x00000802"),
    ("fashion-mnist", lambda r: labels_idx(r, 2049, 30, bytes(29)), "train-labels.* 30 bytes"),
    ("fashion-mnist", lambda r: labels_idx(r, 2049, 30, bytes(31)), "train-labels.* 30 bytes"),
    ("fashion-mnist", lambda r: labels_idx(r, 2049, 2**32 - 1, bytes(9)), "train-labels.* 4294967295 bytes"),
    ("fashion-mnist", lambda r: labels_idx(r, 2049, 29, bytes(29)), "30 images.* 29 labels"),
    ("fashion-mnist", lambda r: labels_idx(r, 2049, 2, b"\x00\x0a", images=2), "train-labels.* got 10 in record 1"),
    ("tiny-imagenet", lambda r: truncate(tiny(r) / "val/images/val_2.JPEG"), r"val_2\.JPEG"),
    ("tiny-imagenet", lambda r: (tiny(r) / "val/images/val_1.JPEG").unlink(), r"val_1\.JPEG is missing"),
    ("tiny-imagenet", lambda r: (tiny(r) / "wnids.txt").write_text("n01\n"), r"wnids\.txt.* n02"),
    ("tiny-imagenet", lambda r: (tiny(r) / "val/val_annotations.txt").write_text("a.JPEG\n"), "annotations.* line 1 "),
    ("dtd", lambda r: (dtd(r) / "images/banded/banded_val1_0.jpg").write_text("no"), r"banded_val1_0\.jpg"),
    ("dtd", lambda r: (dtd(r) / "labels/val1.txt").write_text("../x\n"), r"val1\.txt.* '\.\./x'"),
    ("dtd", lambda r: (dtd(r) / "labels/val1.txt").write_text("banded\n"), r"val1\.txt.* line 1 .*'banded'"),
    ("dtd", lambda r: (dtd(r) / "labels/val1.txt").write_text("\n"), r"val1\.txt"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGE, ids=[f"{n}-{m[:30]}" for n, _, m in DAMAGE])
def test_damaged_file_is_named(tmp_path, name, damage, message):
    damage(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        load(name, tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
