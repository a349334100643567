"""What a user is told when data is missing, damaged or wrong, and what is done about it."""

import gzip
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from lab_files import PUBLISHED, cifar, dtd, fashion, glue, rows, tiny
from tiltsam.lab import published, tasks
from tiltsam.lab.download import SOURCES
from tiltsam.lab.errors import DataError
from tiltsam.lab.tasks import TASKS, load


@pytest.mark.parametrize("name", [name for name in TASKS if name != "digits" and ":" not in name])
def test_missing_data_says_what_to_put_where(tmp_path, name):
    with pytest.raises(DataError) as caught:
        load(name, root=tmp_path)
    message = str(caught.value)
    source = SOURCES[name.removesuffix("-noisy")][0].url
    assert message.startswith(str(tmp_path))
    assert "is missing" in message
    assert source in message
    assert "--download" in message
    assert TASKS[name].files in message
    assert "\n" not in message


def test_the_root_is_the_argument_then_the_variable_then_data(tmp_path, monkeypatch):
    monkeypatch.setenv("TILTSAM_DATA", str(tmp_path / "variable"))
    assert tasks.data_root(tmp_path) == tmp_path
    assert tasks.data_root() == tmp_path / "variable"
    with pytest.raises(DataError, match=r"variable/cifar-100-binary/train.bin is missing"):
        load("cifar100")
    monkeypatch.delenv("TILTSAM_DATA")
    assert tasks.data_root() == Path("data")


@pytest.mark.parametrize("name", ["cifr100", "glue/", "images:", "images:PATH", "", "zip:x"])
def test_an_unknown_task_lists_the_known(name):
    with pytest.raises(DataError, match=r"no task named .* tasks are digits, "):
        load(name)
    with pytest.raises(DataError, match="did you mean cifar100"):
        load("cifr100")


def test_download_fetches_and_reads_on(tmp_path, monkeypatch):
    asked = []

    def fetched(remotes, folder, progress):
        asked.append((remotes, folder))
        cifar(tmp_path, True)

    monkeypatch.setattr(published, "fetch", fetched)
    assert rows(load("cifar100", root=tmp_path, download=True)) == (36, 4, 40)
    load("cifar100", root=tmp_path, download=True)
    assert asked == [(SOURCES["cifar100"], tmp_path)]  # once: then it is there


def test_mrpc_is_put_together_from_what_is_distributed(tmp_path, monkeypatch):
    def fetched(remotes, folder, progress):
        folder.mkdir(parents=True)
        lines = [f"{i % 2}\t{i}\t{i + 100}\tfirst {i}\tsecond {i}" for i in range(20)]
        header = "\ufeff" + PUBLISHED["mrpc"][0]
        (folder / "msr_paraphrase_train.txt").write_text("\r\n".join([header, *lines]) + "\r\n", encoding="utf-8")
        (folder / "mrpc_dev_ids.tsv").write_text("3\t103\n8\t108\n")

    monkeypatch.setattr(published, "fetch", fetched)
    data = load("glue/mrpc", root=tmp_path, download=True)
    assert rows(data) == (16, 2, 2)
    assert data.test.targets.tolist() == [1, 0]


def test_nothing_is_unpickled(tmp_path):
    class Evil:
        def __reduce__(self):
            return (pytest.fail, ("it was unpickled",))

    for name, y in (("object.npz", np.array([Evil()], dtype=object)),):
        np.savez(tmp_path / name, x=np.zeros((1, 2)), y=y)
    (tmp_path / "pickle.npz").write_bytes(pickle.dumps({"x": 1}))
    for name in ("object.npz", "pickle.npz"):
        with pytest.raises(DataError, match=name):
            load(f"npz:{tmp_path / name}")


def truncate(path, keep=0.5):
    path.write_bytes(path.read_bytes()[: int(len(path.read_bytes()) * keep)])


def poke(path, offset, value):
    raw = bytearray(path.read_bytes())
    raw[offset] = value
    path.write_bytes(raw)


DAMAGE = [
    ("cifar100", lambda r: truncate(cifar(r, True) / "train.bin", 0.51), "train.bin is damaged: .* no whole number"),
    ("cifar100", lambda r: (cifar(r, True) / "test.bin").write_bytes(b""), "test.bin is damaged"),
    ("cifar100", lambda r: poke(cifar(r, True) / "test.bin", 3075, 100), "test.bin is damaged: record 1 has label 100"),
    ("cifar10", lambda r: poke(cifar(r, False) / "data_batch_3.bin", 0, 10), "data_batch_3.bin .* label 10"),
    ("fashion-mnist", lambda r: truncate(fashion(r) / "t10k-images-idx3-ubyte.gz"), "t10k-images.* is damaged"),
    ("fashion-mnist", lambda r: poke(fashion(r) / "train-labels-idx1-ubyte.gz", 0, 0), "train-labels.* is damaged"),
    ("fashion-mnist", lambda r: idx(r, 2050, 30, bytes(30)), "train-labels.* 0x00000802, not with 0x00000801"),
    ("fashion-mnist", lambda r: idx(r, 2049, 30, bytes(29)), "train-labels.* promises 30 bytes"),
    ("fashion-mnist", lambda r: idx(r, 2049, 30, bytes(31)), "train-labels.* promises 30 bytes"),
    ("fashion-mnist", lambda r: idx(r, 2049, 29, bytes(29)), "30 images, .* 29 labels"),
    ("fashion-mnist", lambda r: idx(r, 2049, 2, b"\x00\x0a", images=2), "label 10"),
    ("tiny-imagenet", lambda r: truncate(tiny(r) / "val/images/val_2.JPEG"), "val_2.JPEG is damaged: .* decoded"),
    ("tiny-imagenet", lambda r: (tiny(r) / "val/images/val_1.JPEG").unlink(), "val_1.JPEG is missing"),
    ("tiny-imagenet", lambda r: (tiny(r) / "wnids.txt").write_text("n01\n"), "wnids.txt is damaged: .* n02"),
    ("tiny-imagenet", lambda r: (tiny(r) / "val/val_annotations.txt").write_text("a.JPEG\n"), "line 1 names no class"),
    ("dtd", lambda r: (dtd(r) / "images/banded/banded_val1_0.jpg").write_text("no"), "banded_val1_0.jpg is damaged"),
    ("dtd", lambda r: (dtd(r) / "labels/val1.txt").write_text("../x\n"), "val1.txt is damaged: .* outside"),
    ("dtd", lambda r: (dtd(r) / "labels/val1.txt").write_text("banded\n"), "val1.txt is damaged: line 1"),
    ("dtd", lambda r: (dtd(r) / "labels/val1.txt").write_text("\n"), "val1.txt is damaged: it is empty"),
    ("glue/rte", lambda r: (glue(r, "rte") / "dev.tsv").write_text("0\ta\n"), "dev.tsv: no column sentence1"),
    ("glue/rte", lambda r: append(glue(r, "rte"), b"0\ta\n"), "train.tsv is damaged: line 22 has fewer"),
    ("glue/rte", lambda r: append(glue(r, "rte"), b"0\ta\tb\tperhaps\n"), "train.tsv, line 22: label 'perhaps'"),
    ("glue/rte", lambda r: append(glue(r, "rte"), b"0\ta\t\xff\t0\n"), "train.tsv is damaged: byte .* no UTF-8"),
    ("glue/rte", lambda r: (glue(r, "rte") / "dev.tsv").write_text(""), "dev.tsv is damaged: it is empty"),
    ("glue/cola", lambda r: (glue(r, "cola") / "dev.tsv").write_text("a\tb\n"), "dev.tsv: no header .* no 4 columns"),
    ("glue/stsb", lambda r: append(glue(r, "stsb"), b"\t" * 9 + b"nan\n"), "train.tsv, line 22: 'nan' is no finite"),
]  # fmt: skip


def idx(root, magic, n, content, images=30):
    folder = fashion(root, images)
    with gzip.open(folder / "train-labels-idx1-ubyte.gz", "wb") as f:
        f.write(struct.pack(">2I", magic, n) + content)


def append(folder, row):
    with (folder / "train.tsv").open("ab") as f:
        f.write(row)


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGE, ids=[f"{n}-{m[:30]}" for n, _, m in DAMAGE])
def test_a_damaged_file_is_named(tmp_path, name, damage, message):
    damage(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        load(name, root=tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((3, 2))}, "no array y"),
        ({"x_train": np.zeros((3, 2)), "y_train": np.zeros(3, int)}, "no array x_test"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(4, int)}, r"\(3, 2\) and y \(4,\)"),
        ({"x": np.zeros(3), "y": np.zeros(3, int)}, r"must be \(n, …\)"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0, int)}, "n > 0"),
        ({"x": np.zeros((9, 3, 8, 8)), "y": np.arange(9)}, "images are uint8"),
        ({"x": np.full((9, 2), np.nan), "y": np.arange(9)}, "NaN"),
        ({"x": np.full((9, 2), 1e39), "y": np.arange(9)}, "x holds .* beyond float32"),
        ({"x": np.zeros((9, 2)), "y": np.full(9, 1e39)}, "y holds .* beyond float32"),
        ({"x": np.zeros((9, 2)), "y": np.arange(9) - 1}, "holds -1"),
        ({"x": np.zeros((9, 2)), "y": np.arange(9) * 10**9}, "holds 8000000000; .* numbered from 0"),
        ({"x": np.zeros((9, 2)), "y": np.arange(9, dtype=np.uint64) + 2**63}, "holds 9223372036854775808;"),
        ({"x": np.zeros((9, 2)), "y": np.zeros(9, int)}, "one class"),
        ({"x": np.zeros((9, 2)), "y": np.ones(9, int)}, "one class"),
        ({"x": np.zeros((9, 2)), "y": np.full(9, 0.5)}, "one value"),
        (
            {"x_train": np.zeros((9, 2)), "y_train": np.zeros(9, int), "x_test": np.zeros((2, 2)), "y_test": [0, 1]},
            "y_train holds one class",
        ),
        ({"x": np.zeros((9, 2)), "y": np.array(["a"] * 9)}, "must be numbers"),
        ({"x": np.zeros((3, 2)), "y": np.arange(3)}, "too few"),
        (
            {"x_train": np.zeros((3, 2)), "y_train": np.arange(3), "x_test": np.zeros((3, 4)), "y_test": np.arange(3)},
            "train and test differ",
        ),
        ({"x": np.zeros((9, 2)), "y": np.arange(9) % 2, "x_test": np.zeros((9, 2))}, "has x_test and no x_train: name"),
    ],
)
def test_wrong_arrays_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=message):
        load(f"npz:{tmp_path / 'a.npz'}")


@pytest.mark.parametrize("labels", [(0, 1000, 2000), (3, 7)])
def test_labels_with_large_gaps_are_refused(tmp_path, labels):
    path = tmp_path / "a.npz"
    y = np.array(labels).repeat(20)
    np.savez(path, x=np.zeros((len(y), 2)), y=y)
    with pytest.raises(DataError, match=rf"a.npz.*{len(labels)} .*{labels[-1]}.*np\.unique"):
        load(f"npz:{path}")
    np.savez(path, x=np.zeros((len(y), 2)), y=np.unique(y, return_inverse=True)[1])
    assert load(f"npz:{path}").num_classes == len(labels)


@pytest.mark.parametrize("absent", [(7,), (0,), (1, 2, 3, 4, 5)])
def test_labels_may_lack_some_classes(tmp_path, absent):
    y = np.array([label for label in range(10) if label not in absent]).repeat(20)
    x = np.zeros((len(y), 2))
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x[:4], y_test=[1, 2, 7, 9])
    assert load(f"npz:{tmp_path / 'a.npz'}").num_classes == 10


def malformed_arrays():
    """Contents of ``x.npy`` that are no array."""

    def array(shape, descr="'<f8'"):
        text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}"
        raw = (text + " " * (-(11 + len(text)) % 64) + "\n").encode()
        return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(raw)) + raw + bytes(80)

    return {
        "empty": b"",
        "garbage": b"not an array",
        "pickle": pickle.dumps([1, 2]),
        "objects": array("(1,)", "'|O'"),
        "10^13 floats": array("(10000000000000,)"),
        "10^30 floats": array(f"({10**30},)"),
        "10^13 bytes an entry": array("(1,)", "'|V10000000000000'"),
        "negative": array("(-5,)"),
        "nested": array("(" * 3000 + ")" * 3000),
        "nested type": array("(1,)", "[('a', " * 900 + "'<f8'" + ")]" * 900),
        "no header": b"\x93NUMPY\x01\x00\xff\xff",
        "cut off": array("(11,)"),
        "another version": b"\x93NUMPY\x09\x00" + bytes(100),
    }


@pytest.mark.parametrize("kind", malformed_arrays())
def test_malformed_arrays_are_refused(tmp_path, kind):
    path = tmp_path / "a.npz"
    np.savez(path, y=np.arange(9) % 2)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x.npy", malformed_arrays()[kind])
    with pytest.raises(DataError, match=r"a\.npz"):
        load(f"npz:{path}")


def test_an_encrypted_array_is_refused(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.zeros((9, 2)), y=np.arange(9) % 2)
    raw = bytearray(path.read_bytes())
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        raw[raw.index(mark) + flags] |= 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"a\.npz"):
        load(f"npz:{path}")


def test_a_split_that_is_not_read_is_told(tmp_path):
    x, y = np.zeros((20, 2)), np.arange(20) % 2
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y, x_val=x, y_val=y, names=np.array(["a", "b"]))
    with pytest.warns(UserWarning, match="a.npz: x_val is not read: what is held out is cut from train"):
        load(f"npz:{tmp_path / 'a.npz'}")
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("train.csv", "test.csv", "dev.csv"):
        (folder / name).write_text("text,label\n" + "a,b\nc,d\n" * 5)
    with pytest.warns(UserWarning, match="dev.csv is not read: what is held out is cut from train"):
        load(f"text:{folder}")


@pytest.mark.filterwarnings("ignore:.* y has a mean of")
def test_classes_saved_as_floats_are_told(tmp_path):
    x, path = np.zeros((60, 2)), tmp_path / "a.npz"
    np.savez(path, x=x, y=np.arange(60) % 3 / 1)
    with pytest.warns(UserWarning, match=r"a.npz: y is float: a regression; save integers for classes"):
        assert load(f"npz:{path}").num_classes == 1
    for y in (np.arange(60) / 1, np.arange(60) % 3 / 2):  # numbers to predict
        np.savez(path, x=x, y=y)
        load(f"npz:{path}")


def test_numbers_too_large_to_learn_at_the_usual_rate_are_told(tmp_path):
    prices = 200_000 + 1000.5 * np.arange(60)
    np.savez(tmp_path / "a.npz", x=np.zeros((60, 2)), y=prices)
    with pytest.warns(UserWarning, match=r"a.npz: y has a mean of 2.3e\+05 and .* 1.7e\+04: .* about 0 and 1"):
        load(f"npz:{tmp_path / 'a.npz'}")
    (tmp_path / "a.csv").write_text("text,score\n" + "".join(f"a,{price}\n" for price in prices))
    with pytest.warns(UserWarning, match="a.csv: score has a mean of"):
        load(f"text:{tmp_path / 'a.csv'}")
    (tmp_path / "a.csv").write_text("text,score\n" + "a,0\nb,2.5\nc,5\n" * 5)  # warnings are errors
    load(f"text:{tmp_path / 'a.csv'}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,label\n", "no examples"),
        ("words,label\na,b\n", "no column text"),
        ("text,class\na,b\n", "no column label"),
        ("text,label\na,b\nc\n", "row 3"),
        ("text,label\na,b\nc,b\n", "nothing to learn"),
        ('text,label\na,"b\n', "damaged"),
        ("text,score\na,1\nb,high\n", "line 3: 'high'"),
        ("text,score\n" + "a,1\nb,1.0\n" * 5, "one score"),
        ("text,score\na,1\nb,1e39\n", "line 3: '1e39' is no finite"),
        ("text,label\na,b\nc,d\ne,\n", "row 4 has no label"),
        ("text,label\na,b\nc, b\n", "nothing to learn"),
        ("text,label\na,b\nc, d,b\n", "row 3 has 3 cells, and the header 2: put a text that holds commas in quotes"),
    ],
)
def test_wrong_tables_are_refused(tmp_path, content, message):
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(DataError, match=message):
        load(f"text:{tmp_path / 'a.csv'}")


def test_another_encoding_is_told(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\ncafé,a\nthé,b\n", encoding="cp1252")
    with pytest.raises(DataError, match=r"a.csv .* byte 14 is no UTF-8; .* save it as UTF-8"):
        load(f"text:{tmp_path / 'a.csv'}")


def test_a_tab_inside_a_text_is_refused(tmp_path):
    (tmp_path / "a.tsv").write_text("text\tlabel\n" + "a\tb\nc\td\n" * 3 + "e\tf\tb\n")
    with pytest.raises(DataError, match="row 8 has 3 cells, and the header 2: a text cannot hold a tab"):
        load(f"text:{tmp_path / 'a.tsv'}")


def test_empty_cells_beyond_the_header_say_nothing(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\n" + "a,b,,\nc,d,\n" * 5)
    assert load(f"text:{tmp_path / 'a.csv'}").num_classes == 2


def test_wrong_folders_are_refused(tmp_path):
    for name in (f"images:{tmp_path / 'no'}", f"text:{tmp_path / 'no.csv'}", f"npz:{tmp_path / 'no.npz'}"):
        with pytest.raises(DataError, match=r"no.* is missing: "):
            load(name)
    with pytest.raises(DataError, match=r"train.csv .* is missing"):
        load(f"text:{tmp_path}")
    with pytest.raises(DataError, match=r"is a folder: name the .npz file itself"):
        load(f"npz:{tmp_path}")
    (tmp_path / "a.zip").write_text("")
    with pytest.raises(DataError, match=r"a.zip is no folder: make it one with one folder of images per class"):
        load(f"images:{tmp_path / 'a.zip'}")
    with pytest.raises(DataError, match="holds 0 classes"):
        load(f"images:{tmp_path}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty holds no image"):
        load(f"images:{tmp_path}")
