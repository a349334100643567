"""Every task, from small files in its authors' layout; one's own data; noise and splits."""

import csv
import gzip
import hashlib
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.ExifTags import Base

from lab_files import check, cifar, dtd, fashion, glue, picture, rows, tiny
from tiltsam.lab import own, readers, text
from tiltsam.lab.errors import DataError
from tiltsam.lab.splits import noisy_labels, split_at_random
from tiltsam.lab.tables import GLUE
from tiltsam.lab.tasks import TASKS, load

RNG = np.random.default_rng(0)


# --- the tasks ---


def test_digits_need_nothing_and_a_fifth_of_their_labels_is_wrong():
    noisy, clean = load("digits"), load("digits", noise=0)
    check(noisy)
    assert rows(noisy) == (1078, 120, 599)
    assert torch.equal(noisy.train.inputs["image"], clean.train.inputs["image"])
    assert torch.equal(noisy.test.targets, clean.test.targets)
    wrong = sum(int((getattr(noisy, s).targets != getattr(clean, s).targets).sum()) for s in ("train", "validation"))
    assert wrong == round(0.2 * 1198)
    assert noisy.train.inputs["image"].max() == 240


def test_the_seed_moves_validation_and_noise_but_not_the_test_set():
    one, same, other = load("digits", seed=1), load("digits", seed=1), load("digits", seed=2)
    assert torch.equal(one.train.targets, same.train.targets)
    assert torch.equal(one.validation.inputs["image"], same.validation.inputs["image"])
    assert not torch.equal(one.validation.inputs["image"], other.validation.inputs["image"])
    assert torch.equal(one.test.inputs["image"], other.test.inputs["image"])


@pytest.mark.parametrize("fine", [True, False])
def test_cifar(tmp_path, fine):
    cifar(tmp_path, fine)
    data = load("cifar100" if fine else "cifar10", root=tmp_path)
    check(data)
    assert rows(data) == ((36, 4, 40) if fine else (180, 20, 40))
    assert data.num_classes == (100 if fine else 10)
    for split in (data.train, data.test):  # images and labels still belong together, channels in their order
        assert torch.equal(split.inputs["image"][:, 0, 31, 31].long(), 2 * split.targets)
        assert torch.equal(split.inputs["image"][:, 1, 0, 0].long(), 2 * split.targets + 1)
    x = data.train.inputs["image"].double() / 255
    assert data.mean == pytest.approx(x.mean((0, 2, 3)).tolist())
    assert data.std == pytest.approx(x.std((0, 2, 3), correction=0).tolist())


def test_noisy_cifar_is_cifar_with_wrong_labels_outside_the_test_set(tmp_path):
    cifar(tmp_path, True, n=200)
    data = load("cifar100-noisy", root=tmp_path)
    truth = [split.inputs["image"][:, 0, 0, 0].long() // 2 for split in (data.train, data.validation, data.test)]
    wrong = [int((s.targets != y).sum()) for s, y in zip((data.train, data.validation, data.test), truth, strict=True)]
    assert wrong[0] + wrong[1] == 40
    assert wrong[2] == 0
    assert load("cifar100-noisy", root=tmp_path, noise=0.5).name == "cifar100-noisy"


@pytest.mark.parametrize("unpacked", [False, True])
def test_fashion_mnist(tmp_path, unpacked):
    folder = fashion(tmp_path)
    if unpacked:
        for path in folder.glob("*.gz"):
            path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
            path.unlink()
    data = load("fashion-mnist", root=tmp_path)
    check(data)
    assert rows(data) == (27, 3, 30)
    assert data.train.inputs["image"].shape[1:] == (1, 28, 28)
    assert torch.equal(data.train.inputs["image"][:, 0, 5, 5].long(), data.train.targets)


def test_tiny_imagenet(tmp_path):
    tiny(tmp_path)
    told = []
    data = load("tiny-imagenet", root=tmp_path, progress=lambda *a: told.append(a))
    check(data)
    assert rows(data) == (9, 1, 4)
    assert data.test.targets.tolist() == [1, 0, 1, 0]  # classes in the order of their names
    assert (data.test.inputs["image"][:, 0, 9, 9] > 100).tolist() == [True, False, True, False]
    assert ("reading training images", 10, 10) in told


def test_dtd_has_its_own_validation_set(tmp_path):
    dtd(tmp_path)
    data = load("dtd", root=tmp_path, image_size=16, validation=0.5)
    check(data)
    assert rows(data) == (6, 4, 2)
    for split in (data.train, data.validation, data.test):
        assert torch.equal(split.inputs["image"][:, 0, 8, 8] > 100, split.targets == 1)
    assert load("dtd", root=tmp_path).train.inputs["image"].shape[1:] == (3, 224, 224)


@pytest.mark.parametrize("layout", ["published", "hub"])
@pytest.mark.parametrize("task", GLUE)
def test_glue(tmp_path, task, layout):
    glue(tmp_path, task, layout=layout)
    data = load(f"glue/{task}", root=tmp_path)
    check(data)
    assert rows(data) == (18, 2, 20)
    assert data.num_classes == {"stsb": 1, "mnli": 3}.get(task, 2)
    if task == "stsb":
        assert data.test.targets[:3].tolist() == pytest.approx([0, 0.76, 1])
    else:
        assert data.test.targets.tolist() == [i % data.num_classes for i in range(20)]
    first = ["he", "said", '"', "no", "0", "more"]
    pair = ["reply", "0"] if GLUE[task].second else None
    wanted = [text.CLS, *map(text.hash_token, first), text.SEP]
    wanted += [*map(text.hash_token, pair), text.SEP] if pair else []
    assert data.test.inputs["input_ids"][0].tolist()[: len(wanted)] == wanted


def test_glue_counts_what_the_paper_reports():
    main = {name: spec.metrics[0] for name, spec in GLUE.items()}
    assert main == {**dict.fromkeys(GLUE, "accuracy"), "cola": "matthews", "stsb": "pearson"}


def test_glue_labels_as_numbers(tmp_path):
    folder = glue(tmp_path, "rte", layout="hub")
    for path in folder.iterdir():
        path.write_text(path.read_text().replace("not_entailment", "1").replace("entailment", "0"))
    assert load("glue/rte", root=tmp_path).test.targets.tolist() == [0, 1] * 10


def test_glue_without_its_dev_set_says_what_stands_in(tmp_path):
    (glue(tmp_path, "qqp") / "dev.tsv").unlink()
    with pytest.warns(UserWarning, match=r"dev\.tsv is missing: a tenth of train\.tsv stands in"):
        data = load("glue/qqp", root=tmp_path)
    assert rows(data) == (16, 2, 2)


def test_broken_rows_of_qqp_are_left_out_and_counted(tmp_path):
    folder = glue(tmp_path, "qqp", n=400)
    with (folder / "train.tsv").open("a") as f:
        f.write("7\t8\n")
    with pytest.warns(UserWarning, match="1 of 401 rows lack a column"):
        assert rows(load("glue/qqp", root=tmp_path)) == (360, 40, 400)


# --- one's own data ---


def test_an_interrupt_does_not_wait_for_all_images_that_are_asked_for(monkeypatch):
    asked, decoded = threading.Event(), []

    class Interrupted(list):
        def __iter__(self):
            yield from super().__iter__()
            asked.set()
            raise KeyboardInterrupt

    def decode(path, size):
        asked.wait()
        time.sleep(0.01)
        decoded.append(path)
        return np.zeros((size, size, 3), np.uint8)

    monkeypatch.setattr(readers, "_decode", decode)
    with pytest.raises(KeyboardInterrupt):
        readers.read_images(Interrupted(range(1000)), 2)
    assert len(decoded) < 1000


def test_own_images_in_one_folder_and_in_two(tmp_path):
    for part in ("", "train", "test"):
        for i in range(6):
            picture(tmp_path / (part or "flat") / "cats" / f"{i}.png", 10, size=(30, 20))
            picture(tmp_path / (part or "flat") / "dogs" / "more" / f"{i}.jpeg", 200, size=(20, 50))
    flat, two = load(f"images:{tmp_path / 'flat'}"), load(f"images:{tmp_path}", image_size=8)
    check(flat)
    check(two)
    assert rows(flat) == (9, 1, 2)
    assert rows(two) == (11, 1, 12)
    assert flat.train.inputs["image"].shape[1:] == (3, 64, 64)
    assert torch.equal(two.test.inputs["image"][:, 0, 4, 4] > 100, two.test.targets == 1)


def test_splits_of_other_names_are_no_classes(tmp_path):
    for part in ("train", "val"):
        for name in ("cats", "dogs"):
            picture(tmp_path / part / name / "0.png", 10)
    with pytest.raises(DataError, match="train and val: name the folder to test on test"):
        load(f"images:{tmp_path}")
    for name in ("cats", "dogs"):
        picture(tmp_path / "test" / name / "0.png", 10)
    with pytest.warns(UserWarning, match="val is not read"):
        assert rows(load(f"images:{tmp_path}", image_size=8)) == (1, 1, 2)
    for name in ("train", "bicycle"):
        picture(tmp_path / "vehicles" / name / "0.png", 10)
        picture(tmp_path / "vehicles" / name / "1.png", 10)
    assert load(f"images:{tmp_path / 'vehicles'}", image_size=8).num_classes == 2


@pytest.mark.parametrize("name", ["grey.png", "grey.tif", "grey.pgm"])
def test_grey_levels_of_16_bits_keep_their_shades(name, tmp_path):
    levels = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1024
    Image.fromarray(levels).save(tmp_path / name)
    (image,) = readers.read_images([tmp_path / name], 8)
    assert torch.equal(image, torch.from_numpy(levels // 256).to(torch.uint8).expand(3, 8, 8))


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
@pytest.mark.parametrize("level", [1e6, 200])
def test_grey_levels_without_a_white_are_refused(level, dtype, tmp_path):
    Image.fromarray(np.full((8, 8), level, dtype)).save(tmp_path / "grey.tif")
    with pytest.raises(DataError, match=r"grey.tif .* save it with 8 or 16 bits"):
        readers.read_images([tmp_path / "grey.tif"], 8)


QUARTERS = np.kron(np.array([[10, 80], [160, 240]], np.uint8), np.ones((8, 8), np.uint8))


@pytest.mark.parametrize(
    ("name", "mode"),
    [("a.jpg", "RGB"), ("a.png", "RGB"), ("a.tif", "RGB"), ("a.webp", "RGB"), ("a.png", "I;16"), ("a.tif", "I;16")],
)
@pytest.mark.parametrize("orientation", range(10))
def test_pictures_stand_upright(name, mode, orientation, tmp_path):
    exif = Image.Exif()
    exif[Base.Orientation] = orientation
    levels = QUARTERS if mode == "RGB" else QUARTERS.astype(np.uint16) << 8
    picture = Image.fromarray(levels).convert(mode)
    picture.save(tmp_path / name, exif=exif, **({"lossless": True} if name == "a.webp" else {}))
    (image,) = readers.read_images([tmp_path / name], 16)
    # What EXIF says of each number: where the first row and the first column of the file are to be seen.
    turn = {2: np.fliplr, 3: lambda x: np.rot90(x, 2), 4: np.flipud, 5: np.transpose, 6: lambda x: np.rot90(x, -1)}
    turn |= {7: lambda x: np.rot90(x, 2).T, 8: np.rot90}
    upright = torch.from_numpy(turn.get(orientation, np.asarray)(QUARTERS).astype(np.float32))
    torch.testing.assert_close(image.float(), upright.expand(3, 16, 16), atol=3, rtol=0)


def test_a_damaged_note_on_orientation_is_no_damaged_picture(tmp_path):
    Image.fromarray(QUARTERS).save(tmp_path / "a.jpg", exif=b"Exif\x00\x00nothing of the kind")
    (image,) = readers.read_images([tmp_path / "a.jpg"], 16)
    torch.testing.assert_close(image[0].float(), torch.from_numpy(QUARTERS).float(), atol=3, rtol=0)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "RGB"])
def test_what_is_transparent_is_seen_on_white(mode, tmp_path):
    levels = np.full((8, 8), 200, np.uint8)
    levels[:, 4:] = 40  # what a transparent pixel hides is nobody's to see
    picture, options = Image.fromarray(levels), {}
    if mode in ("RGBA", "LA"):
        alpha = np.where(levels == 40, 0, 255).astype(np.uint8)
        alpha[0, 0] = 51  # a fifth: 200 / 5 + 255 * 4 / 5
        picture.putalpha(Image.fromarray(alpha))
        picture = picture.convert(mode)
    else:
        picture = picture.convert(mode)
        options["transparency"] = (40, 40, 40) if mode == "RGB" else int(np.asarray(picture)[0, 7])
    picture.save(tmp_path / "a.png", **options)
    (image,) = readers.read_images([tmp_path / "a.png"], 8)
    expected = torch.full((3, 8, 8), 200, dtype=torch.uint8)
    expected[:, :, 4:] = 255
    if mode in ("RGBA", "LA"):
        expected[:, 0, 0] = 244
    assert torch.equal(image, expected)


def test_own_text(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text('text,text2,label\n"one, ""two""\nthree",b,yes\n' + "x,y,no\nx,z,maybe\n" * 5)
    data = load(f"text:{path}", validation=0.2)
    check(data)
    assert rows(data) == (7, 2, 2)
    assert data.num_classes == 3
    folder = tmp_path / "both"
    folder.mkdir()
    (folder / "train.tsv").write_text("label\ttext\n" + "10\ta\n2\tb\n" * 5)
    (folder / "test.tsv").write_text("text\tlabel\nb\t2\na\t10\n")
    data = load(f"text:{folder}")
    assert data.test.targets.tolist() == [0, 1]  # whole numbers in their order
    (folder / "train.tsv").write_text("text\tlabel\n" + "a\t1\na\t01\na\t001\na\t0001\n")
    (folder / "test.tsv").write_text("text\tlabel\na\t0001\na\t001\na\t01\na\t1\n")
    assert load(f"text:{folder}").test.targets.tolist() == [0, 1, 2, 3]  # in every process
    (folder / "train.tsv").write_text("text\tlabel\n" + "a\t--1\na\t1\n")
    (folder / "test.tsv").write_text("text\tlabel\na\t1\n")
    assert load(f"text:{folder}").num_classes == 2
    (folder / "train.tsv").write_text("text\tscore\n" + "a\t1.5\nb\t2\n" * 5)
    (folder / "test.tsv").write_text("text\tscore\na\t-1\n")
    data = load(f"text:{folder}")
    check(data)
    assert (data.num_classes, data.metrics, data.test.targets.tolist()) == (1, ("pearson", "spearman"), [-1.0])


def test_a_text_may_be_as_long_as_a_book(tmp_path):
    path, before = tmp_path / "books.csv", csv.field_size_limit()
    path.write_text("text,label\n" + f"{'word ' * 40_000},a\nshort,b\n" * 3)
    assert rows(load(f"text:{path}")) == (4, 1, 1)
    assert csv.field_size_limit() == before


@pytest.mark.parametrize(
    ("shape", "dtype", "wanted"),
    [
        ((20, 3, 8, 8), np.uint8, (3, 8, 8)),
        ((20, 8, 8, 3), np.uint8, (3, 8, 8)),
        ((20, 8, 8), np.uint8, (1, 8, 8)),
        ((20, 5), np.float64, (5,)),
        ((20, 5), np.int16, (5,)),
    ],
)
def test_own_arrays(tmp_path, shape, dtype, wanted):
    x, y = (RNG.random(shape) * 200).astype(dtype), np.arange(20, dtype=np.int32) % 3
    np.savez(tmp_path / "one.npz", x=x, y=y)
    np.savez(tmp_path / "two.npz", x_train=x, y_train=y, x_test=x[:5], y_test=y[:5])
    for name, sizes in (("one", (14, 2, 4)), ("two", (18, 2, 5))):
        data = load(f"npz:{tmp_path / name}.npz")
        check(data)
        assert rows(data) == sizes
        assert next(iter(data.train.inputs.values())).shape[1:] == wanted
        assert data.num_classes == 3
    np.savez(tmp_path / "values.npz", x=x, y=RNG.random(20))
    data = load(f"npz:{tmp_path / 'values.npz'}")
    check(data)
    assert data.num_classes == 1
    with pytest.raises(DataError, match="label noise does not apply"):
        load(f"npz:{tmp_path / 'values.npz'}", noise=0.1)


def test_a_fingerprint_tells_ones_own_data_from_edited_ones(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((9, 2)), y=np.arange(9))
    (tmp_path / "text").mkdir()
    for name in ("train", "test"):
        (tmp_path / "text" / f"{name}.csv").write_text("text,label\na,x\nb,y\n")
    for name in ("one", "two"):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "0.png").write_bytes(b"0000")
    names = [f"npz:{tmp_path / 'a.npz'}", f"text:{tmp_path / 'text'}", f"images:{tmp_path / 'images'}"]
    before = [own.fingerprint(name) for name in names]
    (tmp_path / "images" / "notes.txt").write_text("no image")
    assert [own.fingerprint(name) for name in names] == before
    assert load(names[0]).fingerprint == before[0]
    np.savez(tmp_path / "a.npz", x=np.ones((9, 2)), y=np.arange(9))
    (tmp_path / "text" / "test.csv").write_text("text,label\na,x\nb,x\n")
    (tmp_path / "images" / "one" / "0.png").rename(tmp_path / "images" / "one" / "1.png")
    for name, old in zip(names, before, strict=True):
        assert own.fingerprint(name) not in ("", old)
    assert own.fingerprint("digits") == own.fingerprint(f"npz:{tmp_path / 'no.npz'}") == ""
    assert load("digits").fingerprint == ""


def test_a_file_is_read_for_its_fingerprint_once(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.zeros((9, 2)), y=np.arange(9))
    own.fingerprint(f"npz:{path}")
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("read again"))
    own.fingerprint(f"npz:{path}")


# --- noise and splits ---


@pytest.mark.parametrize("num_classes", [2, 10])
def test_noise_goes_to_the_other_classes_evenly(num_classes):
    labels = torch.arange(20000) % num_classes
    noisy = noisy_labels(labels, 0.2, num_classes, torch.Generator().manual_seed(0))
    wrong = noisy != labels
    assert wrong.sum() == 4000  # none of those drawn kept its label
    shift = ((noisy - labels) % num_classes)[wrong].bincount(minlength=num_classes)[1:]
    expected = 4000 / (num_classes - 1)
    assert (shift - expected).abs().max() <= 5 * expected**0.5
    again = noisy_labels(labels, 0.2, num_classes, torch.Generator().manual_seed(0))
    assert torch.equal(noisy, again)
    assert torch.equal(labels, torch.arange(20000) % num_classes)


@pytest.mark.parametrize(
    ("n", "share", "size"), [(10, 0.1, 1), (10, 0.0, 0), (3, 0.01, 1), (2, 0.99, 1), (100, 0.25, 25)]
)
def test_a_split_divides(n, share, size):
    first, second = split_at_random(n, share, torch.Generator().manual_seed(0))
    assert len(second) == size
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(n))


@pytest.mark.parametrize("wrong", [{"validation": 1.0}, {"validation": -0.1}, {"noise": 1.5}, {"image_size": 0}])
def test_shares_have_bounds(wrong):
    with pytest.raises(ValueError, match="got"):
        load("digits", **wrong)


def test_every_task_is_described_in_one_line():
    for name, task in TASKS.items():
        assert task.name == name
        assert task.description
        assert task.files
        assert "\n" not in task.description + task.files
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(load("digits", validation=0))
