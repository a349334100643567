"""Tasks, the data root, and the cache of loaded data."""

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.lab_files import cifar, load, rows
from tiltsam.lab import data as lab_data
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.data import TASKS, data_key, data_loader, data_root, download
from tiltsam.lab.data.download import SOURCES
from tiltsam.lab.errors import ConfigError, DataError


def test_tasks_are_described_in_one_line():
    for name, task in TASKS.items():
        assert task.name == name
        assert task.description
        assert task.files
        assert "\n" not in task.description + task.files


@pytest.mark.parametrize("name", ["cifr100", "glue/", "images:", "images:PATH", "", "zip:x"])
def test_find_task_lists_known_tasks(name):
    with pytest.raises(DataError, match=rf"{name!r}.*digits, digits-lt, fashion-mnist"):
        load(name)


@pytest.mark.parametrize(
    ("name", "meant"), [("cifr100", "cifar100"), ("x.npz", "npz:x.npz"), ("a/x.csv", "text:a/x.csv")]
)
def test_find_task_suggests_what_was_meant(name, meant):
    with pytest.raises(DataError, match=rf"{name!r}: did you mean {meant}\?"):
        load(name)


def test_find_task_suggests_images_for_a_folder(tmp_path):
    with pytest.raises(DataError, match=f"images:{tmp_path}"):
        load(str(tmp_path))


@pytest.mark.parametrize("name", [name for name in TASKS if not name.startswith("digits") and ":" not in name])
def test_load_missing_data_names_file_and_source(tmp_path, name):
    with pytest.raises(DataError) as caught:
        load(name, tmp_path)
    message = str(caught.value)
    assert message.startswith(str(tmp_path))
    assert SOURCES[name.removesuffix("-noisy").removesuffix("-lt")][0].url in message
    assert "--download" in message
    assert TASKS[name].files in message
    assert "\n" not in message


def test_load_downloads_missing_data_once(tmp_path, monkeypatch):
    fetched = []

    def fetch(remotes, folder, progress):
        fetched.append((remotes, folder))
        cifar(tmp_path, True)

    monkeypatch.setattr(download, "fetch", fetch)
    assert rows(load("cifar100", tmp_path, download=True)) == (36, 4, 40)
    load("cifar100", tmp_path, download=True)
    assert fetched == [(SOURCES["cifar100"], tmp_path)]


@pytest.mark.parametrize(
    ("task", "size"), [("digits", 16), ("cifar10", 16), ("glue/rte", 16), ("npz:a.npz", 16), ("dtd", 5000)]
)
def test_load_refuses_image_size(task, size, tmp_path):
    with pytest.raises(ConfigError, match=f"image_size.*{5000 if size == 5000 else task}"):
        load(task, tmp_path, image_size=size)


def test_data_root_order(tmp_path, monkeypatch):
    monkeypatch.setenv("TILTSAM_DATA", str(tmp_path / "variable"))
    assert data_root(tmp_path) == tmp_path
    assert data_root() == tmp_path / "variable"
    with pytest.raises(DataError, match=r"variable/cifar-100-binary/train.bin"):
        load("cifar100")
    monkeypatch.delenv("TILTSAM_DATA")
    assert data_root() == Path("data")


def test_data_key_ignores_what_does_not_change_the_data():
    config = TrainConfig("digits", "sam", model="cnn", lr=0.3, seed=1)
    assert data_key(config) == data_key(replace(config, method="erm", model="mlp", lr=0.1))
    for change in ({"seed": 2}, {"noise": 0.1}, {"validation": 0.2}, {"model": "hf:folder"}):
        assert data_key(config) != data_key(replace(config, **change))


def test_data_loader_caches_the_last_data_set(monkeypatch):
    loaded = []
    original = lab_data.load
    monkeypatch.setattr(lab_data, "load", lambda key, *a, **k: loaded.append(key.seed) or original(key, *a, **k))
    data = data_loader()
    for seed, method in ((0, "sam"), (0, "erm"), (1, "sam"), (1, "erm")):
        data(TrainConfig("digits", method, seed=seed))
    assert loaded == [0, 1]
