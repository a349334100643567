"""GLUE, from small files in the published format and in that of Hugging Face."""

import pytest

from helpers.lab_files import PUBLISHED, WORDS, check, glue, load, rows, tokenizer
from tiltsam.lab.data import download
from tiltsam.lab.data.glue import GLUE
from tiltsam.lab.errors import DataError


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("layout", ["published", "hub"])
@pytest.mark.parametrize("task", GLUE)
def test_glue(tmp_path, task, layout, model):
    glue(tmp_path, task, layout=layout)
    data = load(f"glue/{task}", tmp_path, model=model)
    check(data)
    assert rows(data) == (18, 2, 20)
    assert data.num_classes == {"stsb": 1, "mnli": 3}.get(task, 2)
    if task == "stsb":
        assert data.test.targets[:3].tolist() == pytest.approx([0, 0.76, 1])
    else:
        assert data.test.targets.tolist() == [i % data.num_classes for i in range(20)]
    words = ["[CLS]", "he", "said", '"', "no", "0", "more", "[SEP]"]
    words += ["reply", "0", "[SEP]"] if GLUE[task].second else []
    assert [WORDS[i] for i in data.test.inputs["input_ids"][0].tolist()][: len(words)] == words


def test_glue_scores_are_those_of_the_paper():
    main = {name: task.metrics[0] for name, task in GLUE.items()}
    assert main == {**dict.fromkeys(GLUE, "accuracy"), "cola": "matthews", "stsb": "pearson"}


def test_glue_labels_as_numbers(tmp_path, model):
    folder = glue(tmp_path, "rte", layout="hub")
    for path in folder.iterdir():
        path.write_text(path.read_text().replace("not_entailment", "1").replace("entailment", "0"))
    assert load("glue/rte", tmp_path, model=model).test.targets.tolist() == [0, 1] * 10


def test_glue_without_dev_set_is_refused(tmp_path):
    (glue(tmp_path, "qqp") / "dev.tsv").unlink()
    with pytest.raises(DataError, match=r"QQP/dev\.tsv is missing: pass --download"):
        load("glue/qqp", tmp_path)


def test_glue_qqp_skips_short_rows(tmp_path, model):
    folder = glue(tmp_path, "qqp", n=400)
    with (folder / "train.tsv").open("a") as f:
        f.write("7\t8\n")
    with pytest.warns(UserWarning, match=r"train\.tsv.* 1 of 401 "):
        assert rows(load("glue/qqp", tmp_path, model=model)) == (360, 40, 400)


def test_glue_mrpc_is_assembled_from_the_distributed_files(tmp_path, monkeypatch, model):
    def fetch(remotes, folder, progress):
        folder.mkdir(parents=True)
        lines = [f"{i % 2}\t{i}\t{i + 100}\tfirst {i}\tsecond {i}" for i in range(20)]
        header = "\ufeff" + PUBLISHED["mrpc"][0]
        (folder / "msr_paraphrase_train.txt").write_text("\r\n".join([header, *lines]) + "\r\n", encoding="utf-8")
        (folder / "mrpc_dev_ids.tsv").write_text("3\t103\n8\t108\n")

    monkeypatch.setattr(download, "fetch", fetch)
    monkeypatch.setattr("tiltsam.lab.pretrained.fetch", lambda source: None)
    data = load("glue/mrpc", tmp_path, download=True, model=model)
    assert rows(data) == (16, 2, 2)
    assert data.test.targets.tolist() == [1, 0]


def append(folder, row):
    with (folder / "train.tsv").open("ab") as f:
        f.write(row)


DAMAGE = [
    ("rte", lambda r: (glue(r, "rte") / "dev.tsv").write_text("0\ta\n"), r"dev\.tsv.* sentence1"),
    ("rte", lambda r: append(glue(r, "rte"), b"0\ta\n"), r"train\.tsv.* line 22 .*4 columns"),
    ("rte", lambda r: append(glue(r, "rte"), b"0\ta\tb\tperhaps\n"), r"train\.tsv: row 22: .*'perhaps'"),
    ("rte", lambda r: append(glue(r, "rte"), b"0\ta\t\xff\t0\n"), r"train\.tsv.* UTF-8 \(byte"),
    ("rte", lambda r: (glue(r, "rte") / "dev.tsv").write_text(""), r"dev\.tsv"),
    ("cola", lambda r: (glue(r, "cola") / "dev.tsv").write_text("a\tb\n"), r"dev\.tsv.* 4 columns, got 2"),
    ("stsb", lambda r: append(glue(r, "stsb"), b"\t" * 9 + b"nan\n"), r"train\.tsv: row 22: .*'nan'"),
]  # fmt: skip


@pytest.mark.parametrize(("task", "damage", "message"), DAMAGE, ids=[f"{n}-{m[:30]}" for n, _, m in DAMAGE])
def test_damaged_file_is_named(tmp_path, task, damage, message):
    damage(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        load(f"glue/{task}", tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
