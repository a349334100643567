"""Pretrained models: tiny ones, saved by the tests and loaded like real ones."""

import importlib
import json
import shutil
import sys
import warnings

import pytest
import torch

from helpers.lab_files import WORDS, bert, check, glue, load, tokenizer
from helpers.lab_files import dtd as dtd_files
from helpers.lazy import Lazy
from tiltsam.cli import main
from tiltsam.lab import data as lab_data
from tiltsam.lab import pretrained
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.errors import ConfigError, DataError
from tiltsam.lab.files import save_tensors
from tiltsam.lab.models import build, load_model
from tiltsam.lab.pretrained import tokenize
from tiltsam.lab.records import Record
from tiltsam.lab.train import train

transformers = Lazy("transformers")


@pytest.fixture(autouse=True, scope="module")
def _needs_transformers():
    pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("bert")
    bert(place)
    return place


def test_tokenize_pairs_and_padding(folder):
    out = tokenize(["he said no", "no"], ["reply", "reply 1 2"], model=f"hf:{folder}")
    words = [[WORDS[i] for i in row] for row in out["input_ids"].tolist()]
    assert words == [
        ["[CLS]", "he", "said", "no", "[SEP]", "reply", "[SEP]"],
        ["[CLS]", "no", "[SEP]", "reply", "1", "2", "[SEP]"],
    ]
    assert out["token_type_ids"].tolist() == [[0, 0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1, 1]]
    single = tokenize(["he said no", "no"], model=f"hf:{folder}")
    assert set(single) == {"input_ids", "attention_mask"}  # a single type is left out
    assert single["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert tokenize(["no " * 40], model=f"hf:{folder}", max_length=8)["input_ids"].shape == (1, 8)
    with pytest.raises(ConfigError, match="got 4"):
        tokenize(["no"], model=f"hf:{folder}", max_length=4)


def test_tokenize_in_chunks(folder, monkeypatch):
    sentences = [f"he said {i % 20}" for i in range(25)]
    whole = tokenize(sentences, sentences, model=f"hf:{folder}")
    monkeypatch.setattr(pretrained, "_CHUNK", 7)
    parts = tokenize(sentences, sentences, model=f"hf:{folder}")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_text_encoder_has_pretrained_weights_and_a_new_head(folder, tmp_path):
    glue(tmp_path, "rte")
    data = load("glue/rte", tmp_path, model=f"hf:{folder}", max_length=16)
    check(data)
    model = build(f"hf:{folder}", data).eval()
    inputs = list(data.train[slice(0, 4)].inputs.values())
    body = transformers.BertModel.from_pretrained(folder).eval()
    expected = body(*inputs[:2], token_type_ids=inputs[2]).pooler_output
    torch.testing.assert_close(model(*inputs), model.model.classifier(expected))
    assert not torch.equal(model(*inputs), model(*inputs[:2]))  # token types matter


@pytest.mark.parametrize("task", ["cola", "mrpc", "stsb", "mnli"])
def test_cli_fine_tunes_a_text_encoder(task, folder, tmp_path, capfd):
    glue(tmp_path, task)
    run = ["train", f"glue/{task}", "--model", f"hf:{folder}", "--data-root", str(tmp_path), "--out", str(tmp_path)]
    run += ["--method", "tsam", "--num-samples", "2", "--epochs", "2", "--batch-size", "6", "--max-length", "24"]
    run += ["--optimizer", "adamw", "--lr", "0.01", "--schedule", "linear", "--clip", "1"]
    assert main(run) == 0
    out, err = capfd.readouterr()
    assert "after 2 epochs" in out
    assert err == ""  # no progress bars or reports of transformers
    record = Record(next(tmp_path.rglob("result.json")).parent)
    rows = record.metrics()
    assert rows[-1]["lr"] < 0.01
    before = transformers.BertModel.from_pretrained(folder).state_dict()["encoder.layer.0.output.dense.weight"]
    after = record.model()["model.bert.encoder.layer.0.output.dense.weight"]
    assert (after - before).abs().max() > 1e-4  # not only the new head is trained


def test_example_tilt_silences_wrong_labels_of_texts(folder, tmp_path):
    glue(tmp_path, "sst2", n=200)
    run = ["train", "glue/sst2", "--model", f"hf:{folder}", "--data-root", str(tmp_path), "--out", str(tmp_path)]
    run += ["--noise", "0.2", "--example-tilt", "-0.5", "--method", "sam", "--epochs", "2", "--max-length", "24"]
    assert main([*run, "--optimizer", "adamw", "--lr", "0.001"]) == 0
    record = Record(next(tmp_path.rglob("result.json")).parent)
    assert "silenced_recall" in record.result()
    assert (record.folder / "suspects.csv").read_text().startswith("index,example,label,predicted,loss\n")
    assert json.loads((record.folder / "setup.json").read_text())["noise"] == 0.2
    clean, noisy = (load("glue/sst2", tmp_path, model=f"hf:{folder}", noise=noise) for noise in (0.0, 0.2))
    labels = [torch.cat([data.train.targets, data.validation.targets]) for data in (clean, noisy)]
    assert (labels[0] != labels[1]).sum() == 40
    assert noisy.mislabelled.sum() == (clean.train.targets != noisy.train.targets).sum()
    assert torch.equal(clean.test.targets, noisy.test.targets)  # the test set stays as it is


def test_load_model_of_a_text_encoder(folder, tmp_path):
    glue(tmp_path, "cola")
    config = TrainConfig("glue/cola", "erm", f"hf:{folder}", epochs=1, batch_size=6, max_length=24)
    record = Record(tmp_path / "run")
    train(config, record, data=lambda config: lab_data.load(config, tmp_path))
    data = lab_data.load(config, tmp_path)
    model = load_model(record, data)
    saved = record.model()
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(x, saved[name]) for name, x in model.state_dict().items())
    extra = {name: b for name, b in model.named_buffers() if name not in saved}
    assert extra
    save_tensors(record.folder / "model.safetensors", saved | extra)
    load_model(record, data)


def test_image_encoder(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(image_size=16, patch_size=8, num_labels=5, **sizes)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    dtd_files(tmp_path)
    data = load("dtd", tmp_path, image_size=16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # replacing a head of 5 classes by one of 2 does not warn
        model = build(f"hf:{tmp_path / 'vit'}", data)
    assert model(torch.randn(3, 3, 16, 16)).shape == (3, 2)
    with pytest.raises(ConfigError, match=r"vit .*24x24.*--image-size"):
        build(f"hf:{tmp_path / 'vit'}", load("dtd", tmp_path, image_size=24))


def test_build_refuses_texts_that_are_too_long(folder, tmp_path):
    (tmp_path / "long.csv").write_text("text,label\n" + f"{'no ' * 60},a\n{'he ' * 60},b\n" * 5)
    for length in (32, 33):
        config = TrainConfig(task=f"text:{tmp_path / 'long.csv'}", model=f"hf:{folder}", max_length=length)
        data = lab_data.load(config)
        if length == 32:
            build(config.model, data)
    with pytest.raises(ConfigError, match=r"33 tokens.*--max-length"):
        build(config.model, data)


@pytest.fixture
def hub(folder, tmp_path, monkeypatch):
    """The hub's cache with the model org/bert; other models are not found, and there is no network."""
    snapshot = tmp_path / "snapshot"
    shutil.copytree(folder, snapshot)

    def snapshot_download(source, *, local_files_only):
        assert local_files_only
        if source != "org/bert":
            raise FileNotFoundError(source)
        return str(snapshot)

    def connect(*args, **options):
        pytest.fail("transformers uses the network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("socket.socket.connect", connect)
    monkeypatch.setattr("socket.getaddrinfo", connect)
    return snapshot


def test_cached_model_is_loaded_without_the_network(hub):
    assert tokenize(["he said no"], model="hf:org/bert")["input_ids"].shape == (1, 5)
    assert pretrained.TextEncoder("org/bert", 3).model.config.num_labels == 3


def test_cached_model_without_safetensors_is_named(hub):
    (hub / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"org/bert has no usable model.*model\.safetensors"):
        pretrained.TextEncoder("org/bert", 3)
    with pytest.raises(DataError, match=r"'org/other' on this machine.*--download"):
        pretrained.TextEncoder("org/other", 3)


def test_decoders_without_padding_are_refused(tmp_path):
    folder = tmp_path / "gpt"
    name, sizes = tokenizer(folder), {"n_embd": 16, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(vocab_size=len(WORDS), num_labels=2, **sizes)
    transformers.GPT2ForSequenceClassification(config).save_pretrained(folder)
    glue(tmp_path, "cola")
    data = load("glue/cola", tmp_path, model=name)
    with pytest.raises(ConfigError, match=r"gpt cannot take .*padding"):
        build(name, data)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": None}))
    with pytest.raises(DataError, match=r"gpt has no padding token"):
        load("glue/cola", tmp_path, model=name)


@pytest.mark.parametrize("model", ["auto", "minilm"])
def test_tokenize_without_the_packaged_model(model, monkeypatch):
    monkeypatch.setitem(pretrained.PACKAGED, "minilm", ("carrier-on-the-index", "no_such_carrier/model"))
    with pytest.raises(DataError, match="carrier-on-the-index"):
        tokenize(["no"], model=model)


def test_source_of_packaged_models(tmp_path, monkeypatch):
    (tmp_path / "carrier" / "model").mkdir(parents=True)
    (tmp_path / "carrier" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    monkeypatch.setitem(pretrained.PACKAGED, "carried", ("carrier-on-the-index", "carrier/model"))
    assert pretrained.source_of("carried") == str(tmp_path / "carrier" / "model")
    monkeypatch.setitem(pretrained.PACKAGED, "carried", ("carrier-on-the-index", "no_such_carrier/model"))
    with pytest.raises(DataError, match="carrier-on-the-index"):
        pretrained.source_of("carried")


def test_cli_missing_model_is_one_line(folder, tmp_path, capsys, monkeypatch):
    glue(tmp_path, "rte")
    run = ["train", "glue/rte", "--data-root", str(tmp_path), "--out", str(tmp_path / "runs"), "--epochs", "1"]

    def says(*more):
        assert main([*run, *more]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        return line

    assert "no tokenizer 'no/such'" in says("--model", "hf:no/such")
    assert "'no/such' cannot be downloaded" in says("--model", "hf:no/such", "--download")
    (tmp_path / "empty").mkdir()
    assert f"{tmp_path / 'empty'} has no usable tokenizer" in says("--model", f"hf:{tmp_path / 'empty'}")
    assert "got 'resnet18'" in says("--model", "resnet18")
    (folder / "model.safetensors").rename(folder / "gone")
    try:
        assert f"{folder} has no usable model" in says("--model", f"hf:{folder}")
    finally:
        (folder / "gone").rename(folder / "model.safetensors")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install '.[text]'" in says("--model", f"hf:{folder}")


def test_text_encoder_warns_of_missing_weights(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    kept = {k: v for k, v in load_file(folder / "model.safetensors").items() if "layer.1" not in k}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=r" 16 weights .*bert\.encoder\.layer\.1"):
        pretrained.TextEncoder(str(tmp_path), 2)
