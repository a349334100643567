"""Write small files in the published formats of the data sets, load them, and check the result."""

import gzip
import struct

import numpy as np
import pytest
import torch
from PIL import Image

from tiltsam.lab import data as lab_data
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.data.glue import GLUE
from tiltsam.lab.data.loader import crop, flip
from tiltsam.lab.evaluate import METRICS

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "he", "said", "no", "more", "reply", '"', *map(str, range(20))]


def load(task, root=None, *, download=False, progress=None, **settings):
    """Load a task with some settings of a config."""
    return lab_data.load(TrainConfig(task, **settings), root, download=download, progress=progress)


def tokenizer(folder):
    """Save a tokenizer of a few words; return the name of a model that has it."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[text]'")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    return f"hf:{folder}"


def bert(folder, **settings):
    """Save a BERT of 2 layers without an output layer, and its tokenizer; return its name as a model."""
    name = tokenizer(folder)
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, **sizes, **settings)
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    return name


def cifar(root, fine, n=40):
    folder = root / ("cifar-100-binary" if fine else "cifar-10-batches-bin")
    folder.mkdir(parents=True)
    names = ["train.bin", "test.bin"] if fine else [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    for name in names:
        labels = np.arange(n) % (100 if fine else 10)
        head = np.column_stack([labels % 20, labels] if fine else [labels])
        pixels = np.repeat(labels[:, None] * 2, 3072, 1)  # every pixel shows the label
        pixels[:, 1024:2048] += 1
        np.column_stack([head, pixels]).astype(np.uint8).tofile(folder / name)
    return folder


def fashion(root, n=30):
    folder = root / "fashion-mnist"
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        labels = (np.arange(n) % 10).astype(np.uint8)
        images = np.repeat(labels, 28 * 28)
        with gzip.open(folder / f"{part}-images-idx3-ubyte.gz", "wb") as f:
            f.write(struct.pack(">4I", 2051, n, 28, 28) + images.tobytes())
        with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz", "wb") as f:
            f.write(struct.pack(">2I", 2049, n) + labels.tobytes())
    return folder


def picture(path, level, size=(64, 64), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, level if mode == "L" else (level, 0, 255 - level)).save(path)


def tiny(root):
    folder = root / "tiny-imagenet-200"
    wnids = ["n02", "n01"]
    for wnid in wnids:
        for i in range(5):
            mode = "L" if i == 0 else "RGB"  # some of the published images are grey
            picture(folder / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", 10 if wnid == "n01" else 200, mode=mode)
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text("")
    lines = []
    for i in range(4):
        picture(folder / "val" / "images" / f"val_{i}.JPEG", 10 if i % 2 else 200)
        lines.append(f"val_{i}.JPEG\t{wnids[i % 2]}\t0\t0\t62\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    (folder / "wnids.txt").write_text("\n".join(wnids) + "\n")
    return folder


def dtd(root):
    folder = root / "dtd"
    (folder / "labels").mkdir(parents=True)
    for part, n in (("train1", 3), ("val1", 2), ("test1", 1)):
        lines = []
        for level, name in ((200, "zigzagged"), (10, "banded")):
            for i in range(n):
                picture(folder / "images" / name / f"{name}_{part}_{i}.jpg", level, size=(50, 40 + i))
                lines.append(f"{name}/{name}_{part}_{i}.jpg\n")
        (folder / "labels" / f"{part}.txt").write_text("".join(lines))
    return folder


PUBLISHED = {  # header and row of each published file; {s} and {t} are sentences, {y} the label
    "cola": (None, "gj04\t{y}\t\t{s}"),
    "sst2": ("sentence\tlabel", "{s}\t{y}"),
    "mrpc": ("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", "{y}\t1\t2\t{s}\t{t}"),
    "stsb": (
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
        "0\tmain\tMSR\t2012\t1\tnone\tnone\t{s}\t{t}\t{y}",
    ),
    "qqp": ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "0\t1\t2\t{s}\t{t}\t{y}"),
    "mnli": (
        "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
        "sentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label",
        "0\t1\t1n\tfiction\t(\t(\t(\t(\t{s}\t{t}\tneutral\t{y}",
    ),
    "qnli": ("index\tquestion\tsentence\tlabel", "0\t{s}\t{t}\t{y}"),
    "rte": ("index\tsentence1\tsentence2\tlabel", "0\t{s}\t{t}\t{y}"),
    "wnli": ("index\tsentence1\tsentence2\tlabel", "0\t{s}\t{t}\t{y}"),
}


def glue(root, task, n=20, layout="published"):
    spec = GLUE[task]
    header, row = PUBLISHED[task]
    labels = spec.classes or ("0.000", "3.800", "5.000")
    names = (spec.train, spec.dev[0])
    folder = root / "glue" / spec.folder
    if layout == "hub":
        header = "\t".join([spec.first[-1], *spec.second[-1:], spec.label[-1]])
        row = "{s}\t{t}\t{y}" if spec.second else "{s}\t{y}"
        folder, names = root / "glue" / task, (spec.train, spec.dev[1])
    folder.mkdir(parents=True)
    for name in names:
        lines = [header] if header else []
        for i in range(n):
            # An unpaired quote and a Unicode line separator belong to the sentence.
            s, t, y = f'He said "no {i}\u2028more', f"Reply {i}", labels[i % len(labels)]
            lines.append(row.format(s=s, t=t, y=y))
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def rows(data):
    return len(data.train), len(data.validation), len(data.test)


def check(data):
    """Check what holds for every task."""
    splits = [data.train, data.validation, data.test]
    assert {tuple(split.inputs) for split in splits} == {tuple(data.train.inputs)}
    for split in splits:
        for name, x in split.inputs.items():
            assert len(x) == len(split)
            assert x.shape[1:] == data.train.inputs[name].shape[1:]
            wanted = {"image": torch.uint8, "x": torch.float32}.get(name, torch.int64)
            assert x.dtype == wanted
        if data.num_classes == 1:
            assert split.targets.dtype == torch.float32
        else:
            assert split.targets.dtype == torch.int64
            assert not len(split) or (split.targets.min() >= 0 and split.targets.max() < data.num_classes)
    assert set(data.metrics) <= set(METRICS)
    assert set(data.augment) <= {crop, flip}
    channels = data.train.inputs["image"].shape[1] if "image" in data.train.inputs else 0
    assert len(data.mean) == len(data.std) == channels
    assert all(std > 0 for std in data.std)
