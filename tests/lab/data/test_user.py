"""The user's own data: images:PATH, text:PATH and npz:PATH."""

import csv
import hashlib
import pickle
import struct
import zipfile

import numpy as np
import pytest
import torch

from helpers.lab_files import check, load, picture, rows, tokenizer
from tiltsam.lab.data.user import fingerprint
from tiltsam.lab.errors import DataError

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tokenizer(tmp_path_factory.mktemp("tokenizer"))


# ------------------------------------------------------------------------------------------------------------ images:


def test_images_with_and_without_test_folder(tmp_path):
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


def test_images_split_folders_are_not_classes(tmp_path):
    for part in ("train", "val"):
        for name in ("cats", "dogs"):
            picture(tmp_path / part / name / "0.png", 10)
    with pytest.raises(DataError, match="train and test, got train and val"):
        load(f"images:{tmp_path}")
    for name in ("cats", "dogs"):
        picture(tmp_path / "test" / name / "0.png", 10)
    with pytest.warns(UserWarning, match="val"):
        assert rows(load(f"images:{tmp_path}", image_size=8, validation=0.0)) == (2, 0, 2)
    for name in ("train", "bicycle"):
        for i in range(5):
            picture(tmp_path / "vehicles" / name / f"{i}.png", 10)
    assert load(f"images:{tmp_path / 'vehicles'}", image_size=8).num_classes == 2


def test_images_skip_hidden_folders(tmp_path):
    for name in ("control/0.png", "control/1.png", "test/0.png", "test/1.png", "test/.ipynb_checkpoints/0.png"):
        picture(tmp_path / name, 10)
    assert sum(rows(load(f"images:{tmp_path}", image_size=8, validation=0.0))) == 4


@pytest.mark.parametrize("names", [("Train", "Test"), ("training", "testing"), ("train", "other"), ("train",)])
def test_images_refuse_split_folders_of_another_name(tmp_path, names):
    for part in names:
        for name in ("cats", "dogs"):
            picture(tmp_path / part / name / "0.png", 10)
    with pytest.raises(DataError, match="train and test, got"):
        load(f"images:{tmp_path}")


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((3, 8, 8), (3, 8, 8)),
        ((8, 8, 3), (3, 8, 8)),
        ((8, 6, 1), (1, 8, 6)),
        ((8, 8, 4), (4, 8, 8)),
        ((4, 8, 8), (4, 8, 8)),
        ((13, 8, 8), (13, 8, 8)),
        ((8, 8, 13), (13, 8, 8)),
        ((8, 6, 4), (4, 8, 6)),
        ((4, 8, 6), (4, 8, 6)),
        ((8, 8, 8), (8, 8, 8)),
        ((32, 8, 8), (32, 8, 8)),
        ((20, 9, 11), (20, 9, 11)),
    ],
)
def test_arrays_find_the_axis_of_channels(tmp_path, shape, expected):
    images = np.random.default_rng(0).integers(256, size=(20, *shape), dtype=np.uint8)
    np.savez(tmp_path / "x.npz", x=images, y=np.arange(20) % 2)
    data = load(f"npz:{tmp_path / 'x.npz'}", validation=0.0)
    assert data.train.inputs["image"].shape[1:] == expected
    first = torch.from_numpy(images if shape == expected else images.transpose(0, 3, 1, 2))
    assert all(any(torch.equal(image, x) for x in first) for image in data.train.inputs["image"])


def test_images_refuses_wrong_folders(tmp_path):
    with pytest.raises(DataError, match="no is missing"):
        load(f"images:{tmp_path / 'no'}")
    (tmp_path / "a.zip").write_text("")
    with pytest.raises(DataError, match=r"a\.zip is not a folder"):
        load(f"images:{tmp_path / 'a.zip'}")
    with pytest.raises(DataError, match="got 0"):
        load(f"images:{tmp_path}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty has no images"):
        load(f"images:{tmp_path}")
    (tmp_path / "empty").rmdir()
    for name in ("train/a", "train/b", "test/a", "test/c"):
        picture(tmp_path / name / "0.png", 10)
    with pytest.raises(DataError, match=r"test/c is a class that .*train lacks"):
        load(f"images:{tmp_path}")


# -------------------------------------------------------------------------------------------------------------- text:


def test_sources_of_training_examples(tmp_path, model):
    path = tmp_path / "mine.csv"
    path.write_text("text,label\n" + "".join(f"reply {i},{'yes' if i % 3 else 'no'}\n" for i in range(20)))
    for name in ("cats", "dogs"):
        for i in range(9):
            picture(tmp_path / "pets" / name / f"{i}.png", 10)
    texts, images = load(f"text:{path}", model=model), load(f"images:{tmp_path / 'pets'}", image_size=8)
    assert (texts.class_names, images.class_names) == (("no", "yes"), ("cats", "dogs"))
    for data in (texts, images):
        assert len(data.rows) == len(data.train) < len(data.sources)
        for row, target in zip(data.rows.tolist(), data.train.targets.tolist(), strict=True):
            if data is texts:
                assert (data.sources[row], target) == (f"reply {row}", int(row % 3 > 0))
            else:
                folder = tmp_path / "pets" / data.class_names[target]
                assert data.sources[row] == str(folder / f"{row % 9}.png")


def test_text_csv_of_pairs(tmp_path, model):
    path = tmp_path / "mine.csv"
    path.write_text('text,text2,label\n"he, ""said""\nno",more,yes\n' + "he,no,no\nhe,more,maybe\n" * 5)
    data = load(f"text:{path}", validation=0.2, model=model)
    check(data)
    assert rows(data) == (7, 2, 2)
    assert data.num_classes == 3


def write_tables(folder, train, test):
    folder.mkdir(exist_ok=True)
    (folder / "train.tsv").write_text(train)
    (folder / "test.tsv").write_text(test)


@pytest.mark.parametrize(
    ("train", "test", "targets"),
    [
        ("label\ttext\n" + "10\ta\n2\tb\n" * 5, "text\tlabel\nb\t2\na\t10\n", [0, 1]),  # in numerical order
        (
            "text\tlabel\n" + "a\t1\na\t01\na\t001\na\t0001\n",
            "text\tlabel\na\t0001\na\t001\na\t01\na\t1\n",
            [0, 1, 2, 3],
        ),
        ("text\tlabel\n" + "a\t--1\na\t1\n", "text\tlabel\na\t1\n", [1]),
    ],
)
def test_text_class_order(tmp_path, model, train, test, targets):
    write_tables(tmp_path / "both", train, test)
    assert load(f"text:{tmp_path / 'both'}", model=model, validation=0.0).test.targets.tolist() == targets


def test_text_score_is_a_regression(tmp_path, model):
    write_tables(tmp_path / "both", "text\tscore\n" + "a\t1.5\nb\t2\n" * 5, "text\tscore\na\t-1\n")
    with pytest.warns(UserWarning, match="single value: its correlation"):
        data = load(f"text:{tmp_path / 'both'}", model=model)
    check(data)
    assert (data.num_classes, data.metrics, data.test.targets.tolist()) == (1, ("pearson", "spearman"), [-1.0])


def test_text_cells_may_be_long(tmp_path, model):
    path, before = tmp_path / "books.csv", csv.field_size_limit()
    path.write_text("text,label\n" + f"{'word ' * 40_000},a\nshort,b\n" * 3)
    assert rows(load(f"text:{path}", model=model)) == (4, 1, 1)
    assert csv.field_size_limit() == before


def test_text_ignores_empty_cells_beyond_the_header(tmp_path, model):
    (tmp_path / "a.csv").write_text("text,label\n" + "a,b,,\nc,d,\n" * 5)
    assert load(f"text:{tmp_path / 'a.csv'}", model=model).num_classes == 2


def test_text_warns_of_an_ignored_validation_table(tmp_path, model):
    for name in ("train.csv", "test.csv", "dev.csv"):
        (tmp_path / name).write_text("text,label\n" + "a,b\nc,d\n" * 5)
    with pytest.warns(UserWarning, match=r"dev\.csv"):
        load(f"text:{tmp_path}", model=model)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text,label\n", "no examples"),
        ("a.csv", "words,label\na,b\n", "column text, got words, label"),
        ("a.csv", "text,class\na,b\n", "column label, got text, class"),
        ("a.csv", "text,label\na,b\nc\n", "row 3 "),
        ("a.csv", "text,label\na,b\n\nc,d\n", "row 3 is empty"),
        ("a.csv", "text,label\na,b\nc,b\n", "only 'b'"),
        ("a.csv", 'text,label\na,"b\n', "damaged"),
        ("a.csv", "text,score\na,1\nb,high\n", "row 3: .*'high'"),
        ("a.csv", "text,score\n" + "a,1\nb,1.0\n" * 5, "score .* only 1"),
        ("a.csv", "text,score\na,1\nb,1e39\n", "row 3: .*'1e39'"),
        ("a.csv", "text,label\na,b\nc,d\ne,\n", "row 4 has no label"),
        ("a.csv", "text,label\na,b\nc, b\n", "only 'b'"),
        ("a.csv", "text,label\na,b\nc, d,b\n", "row 3 must have 2 cells, got 3"),
        ("a.tsv", "text\tlabel\n" + "a\tb\nc\td\n" * 3 + "e\tf\tb\n", "row 8 must have 2 cells, got 3"),
    ],
)
def test_text_refuses_wrong_tables(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=rf"{name}.*{message}"):
        load(f"text:{tmp_path / name}")


def test_text_refuses_other_encodings(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\ncafé,a\nthé,b\n", encoding="cp1252")
    with pytest.raises(DataError, match=r"a\.csv .*byte 14.* UTF-8"):
        load(f"text:{tmp_path / 'a.csv'}")


def test_text_refuses_missing_tables(tmp_path):
    with pytest.raises(DataError, match=r"no\.csv is missing"):
        load(f"text:{tmp_path / 'no.csv'}")
    with pytest.raises(DataError, match=r"train\.csv .*is missing"):
        load(f"text:{tmp_path}")


def test_text_checks_the_suffix_first(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)))
    with pytest.raises(DataError, match=r"a\.npz must be \.csv or \.tsv"):
        load(f"text:{tmp_path / 'a.npz'}")


# --------------------------------------------------------------------------------------------------------------- npz:


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
def test_npz_shapes(tmp_path, shape, dtype, wanted):
    x, y = (RNG.random(shape) * 200).astype(dtype), np.arange(20, dtype=np.int32) % 3
    np.savez(tmp_path / "one.npz", x=x, y=y)
    np.savez(tmp_path / "two.npz", x_train=x, y_train=y, x_test=x[:5], y_test=y[:5])
    for name, sizes in (("one", (14, 2, 4)), ("two", (18, 2, 5))):
        data = load(f"npz:{tmp_path / name}.npz")
        check(data)
        assert rows(data) == sizes
        assert next(iter(data.train.inputs.values())).shape[1:] == wanted
        assert data.num_classes == 3


@pytest.mark.parametrize("split", [False, True], ids=["split off", "own test set"])
def test_npz_features_are_standardised(tmp_path, split):
    x, y = RNG.normal(size=(60, 5)), np.arange(60) % 3

    def features(x):
        arrays = (
            {"x_train": x[:50], "y_train": y[:50], "x_test": x[50:], "y_test": y[50:]} if split else {"x": x, "y": y}
        )
        np.savez(tmp_path / "a.npz", **arrays)
        data = load(f"npz:{tmp_path / 'a.npz'}")
        return [part.inputs["x"] for part in (data.train, data.validation, data.test)]

    parts = features(x)
    train = parts[0].double()
    torch.testing.assert_close(train.mean(0), torch.zeros(5).double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(train.std(0, correction=0), torch.ones(5).double(), rtol=0, atol=1e-6)
    for part, other in zip(parts, features(x * [1e-27, 1e30, 1, 1, 1] + [0, 0, 1e6, -1e6, 0]), strict=True):
        torch.testing.assert_close(other, part, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_npz_constant_features_become_zero(tmp_path, dtype):
    x = RNG.normal(scale=100, size=(60, 2)).astype(dtype)
    x[:, 0] = 123456.7
    train, test = x[:50], x[50:].copy()
    test[0, 0] = 0
    np.savez(tmp_path / "a.npz", x_train=train, y_train=np.arange(50) % 2, x_test=test, y_test=np.arange(10) % 2)
    data = load(f"npz:{tmp_path / 'a.npz'}")
    for part in (data.train, data.validation, data.test):
        assert not part.inputs["x"][:, 0].any()
        assert part.inputs["x"][:, 1].abs().max() > 0.1


def test_npz_float_targets_are_a_regression(tmp_path):
    np.savez(tmp_path / "a.npz", x=RNG.random((20, 5)), y=RNG.random(20))
    data = load(f"npz:{tmp_path / 'a.npz'}")
    check(data)
    assert (data.num_classes, data.metrics) == (1, ("pearson", "spearman"))
    with pytest.raises(DataError, match=r"noise .*0\.1"):
        load(f"npz:{tmp_path / 'a.npz'}", noise=0.1)


def test_npz_warns_of_classes_saved_as_floats(tmp_path):
    x, y = np.zeros((200, 2)), np.arange(200) % 3
    np.savez(tmp_path / "a.npz", x=x, y=y.astype(float))
    with pytest.warns(UserWarning, match=r"y has 3 distinct whole numbers as floats: .* save y\.astype\(int\)"):
        assert load(f"npz:{tmp_path / 'a.npz'}").num_classes == 1
    np.savez(tmp_path / "a.npz", x=x, y=y + 0.5)
    load(f"npz:{tmp_path / 'a.npz'}")  # without a warning
    for values in (np.arange(200) % 150, np.arange(200) % 21):
        np.savez(tmp_path / "a.npz", x=x, y=values.astype(float))
        with pytest.warns(UserWarning, match="scale it"):  # and no other one
            load(f"npz:{tmp_path / 'a.npz'}")


def test_large_targets_of_a_regression_are_reported(tmp_path, model):
    values = 500 + 1000 * RNG.normal(size=200)
    np.savez(tmp_path / "a.npz", x=np.zeros((200, 2)), y=(values - values.mean()) / values.std())
    load(f"npz:{tmp_path / 'a.npz'}")  # without a warning
    np.savez(tmp_path / "a.npz", x=np.zeros((200, 2)), y=values)
    with pytest.warns(UserWarning, match=r"a\.npz: y has mean [\d.]+ and standard deviation [\d.]+: scale it to"):
        load(f"npz:{tmp_path / 'a.npz'}")
    (tmp_path / "a.csv").write_text("text,score\n" + "he,10\nno,30\n" * 5)
    with pytest.warns(UserWarning, match=r"a\.csv: score has mean 20 and standard deviation"):
        load(f"text:{tmp_path / 'a.csv'}", model=model)


def test_noise_warns_that_own_labels_are_replaced(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((200, 2)), y=np.arange(200) % 2)
    with pytest.warns(UserWarning, match=r"^noise 0\.3 replaces 30% of your"):
        assert load(f"npz:{tmp_path / 'a.npz'}", noise=0.3).mislabelled.any()
    for task, noise in ((f"npz:{tmp_path / 'a.npz'}", 0.0), ("digits", 0.3)):
        load(task, noise=noise)  # without a warning


def test_test_split_off(tmp_path):
    x, y = np.zeros((60, 2)), np.arange(60) % 3
    np.savez(tmp_path / "one.npz", x=x, y=y)
    np.savez(tmp_path / "two.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    assert load(f"npz:{tmp_path / 'one.npz'}").test_split_off == 0.2
    assert load(f"npz:{tmp_path / 'two.npz'}").test_split_off == load("digits").test_split_off == 0


def test_npz_warns_of_an_ignored_validation_set(tmp_path):
    x, y = np.zeros((20, 2)), np.arange(20) % 2
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y, x_val=x, y_val=y, names=np.array(["a", "b"]))
    with pytest.warns(UserWarning, match=r"a\.npz: x_val"):
        load(f"npz:{tmp_path / 'a.npz'}")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((3, 2))}, "y is missing"),
        ({"X": np.zeros((3, 2)), "Y": np.zeros(3, int)}, "x is missing; the file has X, Y;"),
        ({"x_train": np.zeros((3, 2)), "y_train": np.zeros(3, int)}, "x_test is missing"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(4, int)}, r"\(3, 2\) and \(4,\)"),
        ({"x": np.zeros(3), "y": np.zeros(3, int)}, r"\(3,\) and \(3,\)"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0, int)}, r"\(0, 2\) and \(0,\)"),
        (
            {"x": np.zeros((9, 3, 8, 8)), "y": np.arange(9)},
            r"uint8.* got float64 of shape \(9, 3, 8, 8\): save \(255 \* x\)",
        ),
        ({"x": np.full((9, 2), np.nan), "y": np.arange(9)}, "x .*NaN"),
        ({"x": np.full((9, 2), 1e39), "y": np.arange(9)}, "x .*float32"),
        ({"x": np.zeros((9, 2)), "y": np.full(9, 1e39)}, "y .*float32"),
        ({"x": np.zeros((9, 2)), "y": np.arange(9) - 1}, r"got -1: .*np\.unique\(y, return_inverse=True\)\[1\]"),
        ({"x": np.zeros((9, 2)), "y": np.arange(9) * 10**9}, "got 8000000000"),
        ({"x": np.zeros((9, 2)), "y": np.arange(9, dtype=np.uint64) + 2**63}, "got 9223372036854775808"),
        ({"x": np.zeros((9, 2)), "y": np.zeros(9, int)}, "y .*only 0"),
        ({"x": np.zeros((9, 2)), "y": np.ones(9, int)}, "y .*only 1"),
        ({"x": np.zeros((9, 2)), "y": np.full(9, 0.5)}, r"y .*only 0\.5"),
        (
            {"x_train": np.zeros((9, 2)), "y_train": np.zeros(9, int), "x_test": np.zeros((2, 2)), "y_test": [0, 1]},
            "y_train .*only 0",
        ),
        ({"x": np.zeros((9, 2)), "y": np.array(["a"] * 9)}, r"float64 and <U1: .*np\.unique\(y, return_inv"),
        (
            {"x": np.zeros((9, 2)), "y": np.array(["a"] * 9, dtype=object)},
            r"y has Python objects.* np\.unique\(y, return_inv",
        ),
        (
            {"x": np.array([["a", 1]] * 9, dtype=object), "y": np.arange(9)},
            r"x has Python objects.* save numbers \(n, features\), or uint8 images",
        ),
        ({"x": np.zeros((9, 2)), "y": np.eye(9, dtype=int)}, r"\(9, 9\): save y\.argmax\(1\)"),
        ({"x": np.array(1.0), "y": np.zeros((3, 2))}, r"got \(\) and \(3, 2\)$"),
        ({"x": np.zeros((9, 2)), "y": np.zeros((9, 1))}, r"\(9, 1\): save y\.ravel\(\)"),
        ({"x": np.zeros(9), "y": np.zeros(9)}, r"\(9,\): save x\.reshape\(-1, 1\)"),
        ({"x": np.zeros((3, 2)), "y": np.arange(3)}, "got 3"),
        (
            {"x_train": np.zeros((3, 2)), "y_train": np.arange(3), "x_test": np.zeros((3, 4)), "y_test": np.arange(3)},
            r"same shape and type, got \(3, 2\) float64, int64 and \(3, 4\) float64, int64",
        ),
        ({"x": np.zeros((9, 2)), "y": np.arange(9) % 2, "x_test": np.zeros((9, 2))}, "x_test but no x_train"),
    ],
)
def test_npz_refuses_wrong_arrays(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=rf"a\.npz.*{message}"):
        load(f"npz:{tmp_path / 'a.npz'}")


@pytest.mark.parametrize("labels", [(0, 1000, 2000), (3, 7)])
def test_npz_refuses_labels_with_large_gaps(tmp_path, labels):
    path = tmp_path / "a.npz"
    y = np.array(labels).repeat(20)
    np.savez(path, x=np.zeros((len(y), 2)), y=y)
    with pytest.raises(DataError, match=rf"a\.npz.*{len(labels)} .*{labels[-1]}.*np\.unique"):
        load(f"npz:{path}")
    np.savez(path, x=np.zeros((len(y), 2)), y=np.unique(y, return_inverse=True)[1])
    assert load(f"npz:{path}").num_classes == len(labels)


@pytest.mark.parametrize("absent", [(7,), (1, 2, 3, 4, 5)])
def test_npz_labels_may_lack_some_classes(tmp_path, absent):
    y = np.array([label for label in range(10) if label not in absent]).repeat(20)
    x = np.zeros((len(y), 2))
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x[:4], y_test=[1, 2, 7, 9])
    with pytest.warns(UserWarning, match="classes of the test set: (7|1, 2)$"):
        assert load(f"npz:{tmp_path / 'a.npz'}").num_classes == 10


def test_npz_warns_of_classes_without_training_examples(tmp_path):
    x, y = np.zeros((60, 2)), np.arange(60) % 3
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y + 5)
    with pytest.warns(UserWarning, match=r"a\.npz has no training examples of .*: 5, 6, 7$"):
        load(f"npz:{tmp_path / 'a.npz'}")
    np.savez(tmp_path / "a.npz", x=np.zeros((100, 2)), y=np.arange(100))
    with pytest.warns(UserWarning, match=r": \d+(, \d+){7}, … \(20 in all\)$"):
        load(f"npz:{tmp_path / 'a.npz'}")


def test_images_without_training_examples_are_named(tmp_path):
    for i in range(12):
        picture(tmp_path / f"animal-{i:02}" / "0.png", 10)
    with pytest.warns(UserWarning, match="animal-"):
        load(f"images:{tmp_path}", image_size=8)


@pytest.mark.parametrize("labels", [(1, 2, 3), (1, 2, 3, 4, 5, 6, 7, 8, 9)])
def test_npz_warns_of_labels_without_class_0(tmp_path, labels):
    y = np.array(labels).repeat(20)
    np.savez(tmp_path / "a.npz", x=np.zeros((len(y), 2)), y=y)
    with pytest.warns(UserWarning, match=rf"y has no class 0.*{len(labels) + 1} in all.* subtract 1"):
        assert load(f"npz:{tmp_path / 'a.npz'}").num_classes == len(labels) + 1


def malformed_arrays():
    """Contents of ``x.npy`` that are not an array."""

    def array(shape, descr="'<f8'"):
        text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}"
        raw = (text + " " * (-(11 + len(text)) % 64) + "\n").encode()
        return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(raw)) + raw + bytes(80)

    return {
        "empty": b"",
        "garbage": b"not an array",
        "pickle": pickle.dumps([1, 2]),
        "objects": array("(1,)", "'|O'"),
        "negative": array("(-5,)"),
        "nested": array("(" * 3000 + ")" * 3000),
        "nested type": array("(1,)", "[('a', " * 900 + "'<f8'" + ")]" * 900),
        "no header": b"\x93NUMPY\x01\x00\xff\xff",
        "cut off": array("(11,)"),
        "another version": b"\x93NUMPY\x09\x00" + bytes(100),
    }


@pytest.mark.parametrize("kind", malformed_arrays())
def test_npz_refuses_malformed_arrays(tmp_path, kind):
    path = tmp_path / "a.npz"
    np.savez(path, y=np.arange(9) % 2)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x.npy", malformed_arrays()[kind])
    with pytest.raises(DataError, match=r"a\.npz"):
        load(f"npz:{path}")


def test_npz_refuses_encrypted_arrays(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.zeros((9, 2)), y=np.arange(9) % 2)
    raw = bytearray(path.read_bytes())
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        raw[raw.index(mark) + flags] |= 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"a\.npz"):
        load(f"npz:{path}")


def test_npz_is_never_unpickled(tmp_path):
    class Evil:
        def __reduce__(self):
            return (pytest.fail, ("it was unpickled",))

    np.savez(tmp_path / "object.npz", x=np.zeros((1, 2)), y=np.array([Evil()], dtype=object))
    (tmp_path / "pickle.npz").write_bytes(pickle.dumps({"x": 1}))
    for name in ("object.npz", "pickle.npz"):
        with pytest.raises(DataError, match=name):
            load(f"npz:{tmp_path / name}")


def test_npz_refuses_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(DataError, match=r"no\.npz is missing"):
        load(f"npz:{tmp_path / 'no.npz'}")
    with pytest.raises(DataError, match=rf"{tmp_path.name} is a folder"):
        load(f"npz:{tmp_path}")


# -------------------------------------------------------------------------------------------------------- fingerprint


def test_fingerprint_changes_with_the_files(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((9, 2)), y=np.arange(9) % 2)
    (tmp_path / "text").mkdir()
    for name in ("train", "test"):
        (tmp_path / "text" / f"{name}.csv").write_text("text,label\na,x\nb,y\n")
    for name in ("one", "two"):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "0.png").write_bytes(b"0000")
    names = [f"npz:{tmp_path / 'a.npz'}", f"text:{tmp_path / 'text'}", f"images:{tmp_path / 'images'}"]
    before = [fingerprint(name) for name in names]
    (tmp_path / "images" / "notes.txt").write_text("not an image")
    assert [fingerprint(name) for name in names] == before
    assert load(names[0]).fingerprint == before[0]
    np.savez(tmp_path / "a.npz", x=np.ones((9, 2)), y=np.arange(9))
    (tmp_path / "text" / "test.csv").write_text("text,label\na,x\nb,x\n")
    (tmp_path / "images" / "one" / "0.png").rename(tmp_path / "images" / "one" / "1.png")
    for name, old in zip(names, before, strict=True):
        assert fingerprint(name) not in ("", old)
    assert fingerprint("digits") == fingerprint(f"npz:{tmp_path / 'no.npz'}") == ""
    assert load("digits").fingerprint == ""


def test_fingerprint_reads_a_file_once(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.zeros((9, 2)), y=np.arange(9))
    fingerprint(f"npz:{path}")
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("read again"))
    fingerprint(f"npz:{path}")
