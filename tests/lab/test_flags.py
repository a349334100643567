import argparse
import math
from functools import partial

import pytest

import tiltsam
from helpers.vasso import VaSSO
from tiltsam.cli import build_parser, main
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.errors import ConfigError
from tiltsam.lab.flags import (
    add_arguments,
    from_arguments,
    given_settings,
    method_configs,
    parse_method,
    split_settings,
)


def parsed(*flags):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(flags)


def help_of(flag):
    """Return the help of a flag on one line."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    (action,) = [action for action in parser._actions if flag in action.option_strings]
    return action.help


@pytest.mark.parametrize("limit", ["passes", "seconds"])
def test_limit_on_passes_or_seconds_leaves_epochs_unlimited(limit):
    """The default number of epochs would end ERM before SAM has used its passes."""
    args = parsed(f"--{limit}", "900", "--method", "sam")
    assert from_arguments(args).epochs == split_settings(args)[0].epochs == math.inf
    args = parsed(f"--{limit}", "900", "--epochs", "3")
    assert from_arguments(args).epochs == split_settings(args)[0].epochs == 3
    assert from_arguments(parsed(f"--{limit}", "900", "--method", "sam:epochs=4")).epochs == 4
    assert from_arguments(parsed()).epochs == 60


def test_budget_of_an_entry_leaves_its_epochs_unlimited():
    """The default of 60 epochs would end ERM before it has used its passes."""
    config = from_arguments(parsed("--method", "erm:passes=2000"))
    assert (config.epochs, config.passes) == (math.inf, 2000)
    assert from_arguments(parsed("--method", "erm:passes=2000", "--epochs", "3")).epochs == 3
    assert from_arguments(parsed("--method", "erm:passes=2000,epochs=4")).epochs == 4
    entries = ["sam", "erm:passes=2000", "erm:seconds=9,epochs=4"]
    assert [c.epochs for c in method_configs(TrainConfig(), entries).values()] == [60, math.inf, 4]
    assert [c.epochs for c in method_configs(TrainConfig(epochs=3), entries).values()] == [3, 3, 4]


def test_epochs_given_limit_every_entry_even_if_they_are_the_default():
    for epochs in (60, 61):
        config, settings = split_settings(parsed("--epochs", str(epochs)))
        assert [c.epochs for c in method_configs(config, ["erm:passes=30"], settings).values()] == [epochs]


def test_parse_method_reads_none():
    assert parse_method("tsam:radius=none,t=5") == {"method": "tsam", "radius": None, "t": 5.0}


def test_parse_method_reads_values_by_annotation(monkeypatch):
    monkeypatch.setitem(tiltsam.METHODS, "slow", partial(VaSSO, rate=0.01))
    assert parse_method("slow:rate=1") == {"method": "slow", "rate": 1.0}
    text = "tsam:sampler=hmc,share-ascent=true,num_samples=5,average=false"
    values = {"sampler": "hmc", "share_ascent": True, "num_samples": 5, "average": False}
    assert parse_method(text) == {"method": "tsam", **values}
    with pytest.raises(ConfigError, match="slow has no t; its options: rho, rate"):
        parse_method("slow:t=1")
    with pytest.raises(ConfigError, match=r"num_samples must be an integer, got '2\.5'"):
        parse_method("tsam:num_samples=2.5")


def test_parse_method_guesses_without_annotation(monkeypatch):
    def made(base, a=1, b=None, c="x", d=False):
        return tiltsam.SAM(base)

    monkeypatch.setitem(tiltsam.METHODS, "made", made)
    assert parse_method("made:a=2,b=0.5,c=none,d=True") == {"method": "made", "a": 2, "b": 0.5, "c": None, "d": True}
    assert parse_method("made:c=mean") == {"method": "made", "c": "mean"}


def test_flags_have_the_help_of_the_constructors(monkeypatch):
    monkeypatch.setitem(tiltsam.METHODS, "vasso", VaSSO)
    assert help_of("--eta").startswith("asam: η >= 0 in T = |w| + η")
    assert help_of("--eta").endswith("(default: 0.01)")
    shared = (
        "sam, gsam, looksam, friendlysam, wsam, vasso: Length of the ascent, >= 0. asam: Length in the adaptive metric"
    )
    assert help_of("--rho").startswith(shared)  # VaSSO has no words of its own
    assert "(default: 0.05 for sam" in help_of("--rho")  # methods have their own
    assert "0.5 for asam" in help_of("--rho")
    assert help_of("--lam").startswith(
        "rsam: λ >= 0, weight of the gradient in the direction. friendlysam: λ in [0, 1)"
    )
    assert "`" not in "".join(help_of(flag) for flag in ("--delta", "--ascent-steps", "--sampler"))


def test_help_of_an_option_is_one_sentence(monkeypatch):
    class Mine(tiltsam.SAM):
        """Take SAM's step.

        Args:
            base: The optimizer.
            width: Width of 0.5 i.e. wide. The rest is for readers of the docstring.
            depth: Depth
        """

        def __init__(self, base, *, width: float = 1.0, depth: float | None = None, model=None):
            super().__init__(base, model=model)

    monkeypatch.setitem(tiltsam.METHODS, "mine", Mine)
    assert help_of("--width") == "mine: Width of 0.5 i.e. wide (default: 1.0)"
    assert help_of("--depth") == "mine: Depth"


def test_method_flag_accepts_options():
    config = from_arguments(parsed("--method", "tsam:num_samples=1,rho=0.5,average=true", "--lr", "0.1"))
    assert config == TrainConfig(method="tsam", lr=0.1, average=True, options={"num_samples": 1, "rho": 0.5})
    with pytest.raises(ConfigError, match="tsam has no num_sample; its options: t, rho"):
        from_arguments(parsed("--method", "tsam:num_sample=1"))
    with pytest.raises(ConfigError, match="rho must be given once"):
        from_arguments(parsed("--method", "tsam:rho=0.5", "--rho", "0.2"))


def test_only_given_flags_are_settings():
    args = parsed("--method", "tsam", "--rho", "0.1", "--no-average", "--num-samples", "5", "--radius", "none")
    assert given_settings(args) == {"method": "tsam", "rho": 0.1, "average": False, "num_samples": 5, "radius": None}
    assert from_arguments(args) == TrainConfig(method="tsam", options={"num_samples": 5})


def test_split_settings_separates_those_of_some_methods():
    config, settings = split_settings(parsed("--lr", "0.1", "--rho", "0.2", "--eta", "1", "--split"))
    assert config == TrainConfig(lr=0.1)
    assert settings == {"rho": 0.2, "eta": 1.0, "split": True}


def test_flags_refuse_other_types(capsys):
    for flags in (["--rho", "big"], ["--num-samples", "1.5"], ["--sampler", "best"]):
        with pytest.raises(SystemExit):
            parsed(*flags)
        assert flags[1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["train", "digits", "--ephocs", "3"], "unrecognized arguments: --ephocs 3; did you mean --epochs?"),
        (["compare", "digits", "--ephocs=3", "--seed", "1"], "--ephocs=3 --seed 1; did you mean --epochs and --seeds?"),
        (["train", "digits", "--zzz"], "unrecognized arguments: --zzz"),
        (["train", "digits", "--tau=-1"], "unrecognized arguments: --tau=-1; did you mean --example-tilt?"),
        (["toys", "--no-fig"], "unrecognized arguments: --no-fig; did you mean --no-figures?"),
        (["report", "runs", "--ou", "page"], "unrecognized arguments: --ou page; did you mean --out?"),
        (["train", "digits", "--passes", "abc"], "argument --passes: must be a number, got 'abc'"),
        (["train", "digits", "--batch-size", "2.5"], "argument --batch-size: must be an integer, got '2.5'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_in_flags_are_explained(arguments, error, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert capsys.readouterr().err.rstrip().endswith(error)


def test_help_has_no_double_percent_signs(capsys):
    for command in build_parser()[1]:
        with pytest.raises(SystemExit):
            main([command, "--help"])
    assert "%%" not in capsys.readouterr().out


def test_help_of_reproduce_names_two_tilts_as_ours(capsys):
    with pytest.raises(SystemExit):
        main(["reproduce", "two-tilts", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "TABLE-OR-FIGURE" not in out
    assert "two-tilts, an experiment of our own" in out
