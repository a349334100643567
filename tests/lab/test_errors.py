"""The errors that the command line prints as one line."""

import pickle
from unittest.mock import Mock

import pytest

from tiltsam.cli import main
from tiltsam.lab import errors

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.LabError)]


@pytest.mark.parametrize("kind", KINDS)
def test_cli_prints_lab_errors_as_one_line(kind, capsys, monkeypatch):
    monkeypatch.setattr("tiltsam.cli._methods", Mock(side_effect=kind("bad\n  value")))
    assert main(["methods"]) == 2
    assert capsys.readouterr().err == "tiltsam methods: bad value\n"


@pytest.mark.parametrize("kind", KINDS)
def test_lab_errors_can_be_pickled(kind):
    copy = pickle.loads(pickle.dumps(kind("message")))
    assert (type(copy), str(copy)) == (kind, "message")
