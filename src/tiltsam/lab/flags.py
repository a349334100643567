"""The flags of a command that trains: one for every number of a run, and settings that one method alone gets."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import textwrap
import types
import typing
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, _ActionsContainer
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tiltsam.lab.config import NOTHING_TO_WEIGH, TrainConfig, settings_of_others, tilts_nothing
from tiltsam.lab.errors import ConfigError

__all__ = ["add_arguments", "field_docs", "from_arguments", "given", "parse_method", "parse_setting", "remarks"]

_FOR_ALL = ("task", "seed", "device")  # not for one method alone


def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            docs[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return docs


# Where a part of the help begins, and its heading.
_PARTS = {
    "task": "what is trained",
    "epochs": "how long (whichever is reached first)",
    "lr": "base optimizer and loss",
    "rho": "settings of the methods",
    "seed": "the run",
}


def add_arguments(parser: ArgumentParser, *, leave_out: tuple[str, ...] = ()) -> None:
    """A flag for every field."""
    docs, hints = field_docs(TrainConfig), get_type_hints(TrainConfig)
    part: _ActionsContainer = parser
    for field in dataclasses.fields(TrainConfig):
        if field.name in _PARTS:
            part = parser.add_argument_group(_PARTS[field.name])
        if field.name in leave_out:
            continue
        flag = f"--{field.name.replace('_', '-')}"
        default = "" if field.default is None else f" (default: {field.default})"
        text = docs[field.name].replace("%", "%%") + default
        hint = hints[field.name]
        if hint is bool:
            part.add_argument(flag, action=BooleanOptionalAction, help=text, default=None)
        elif get_origin(hint) is Literal:
            part.add_argument(flag, choices=get_args(hint), help=text, default=None)
        else:
            name = "NAME" if hint is str else _plain(hint).__name__.upper()
            part.add_argument(flag, type=_parser_of(hint), metavar=name, help=text)


def from_arguments(args: Any, **fixed: Any) -> TrainConfig:
    """The config that the flags of :func:`add_arguments` ask for."""
    return TrainConfig(**given(args) | fixed)


def given(args: Any) -> dict[str, Any]:
    """The settings that flags gave."""
    everything = {f.name: getattr(args, f.name, None) for f in dataclasses.fields(TrainConfig)}
    return {name: value for name, value in everything.items() if value is not None}


def remarks(args: Any, config: TrainConfig) -> list[str]:
    """What is to be said of settings given by flags that do nothing: another method's, or the tilt of one sample."""
    names = given(args)
    others = [name for name in names if name in settings_of_others(config.method)]
    found = [f"{config.method} has no {', '.join(others)}: left out"] if others else []
    return found + ([f"{config.method} has {NOTHING_TO_WEIGH}"] if tilts_nothing(config, names) else [])


def parse_method(text: str) -> dict[str, Any]:
    """A method, and the settings that it alone gets.

    Args:
        text: Its name, and after a colon what is set, as in ``asam:rho=5`` or ``tsam:num_samples=3,t=100``.

    Raises:
        ConfigError: It is not written so, there is no such setting, or the method has none.

    Example:
        >>> parse_method("tsam:num_samples=3,t=100")
        {'method': 'tsam', 'num_samples': 3, 't': 100.0}
    """
    method, colon, rest = text.partition(":")
    TrainConfig(method=method)  # one that is unknown is refused
    found: dict[str, Any] = {"method": method}
    fields = [field.name for field in dataclasses.fields(TrainConfig)]
    for pair in rest.split(",") if colon else ():
        name, equals, value = (part.strip() for part in pair.partition("="))
        name = name.replace("-", "_")
        if not equals or name in found:
            raise ConfigError(f"{text!r}: after the colon settings, as in asam:rho=5 or tsam:num_samples=3,t=100")
        if name in _FOR_ALL:
            raise ConfigError(f"{text!r}: {name} cannot be set for one method alone")
        if name not in fields:
            known = (f for f in fields if f not in ("method", *_FOR_ALL, *settings_of_others(method)))
            raise ConfigError(f"{text!r}: unknown setting {name!r}: one of {', '.join(known)}")
        try:
            found[name] = parse_setting(name, value)
        except ConfigError as error:
            raise ConfigError(f"{text!r}: {name}: {error}") from None
    if others := [name for name in found if name in settings_of_others(method)]:
        raise ConfigError(f"{text!r}: {method} has no {', '.join(others)}")
    return found


def parse_setting(name: str, text: str) -> Any:
    """A value of a setting, from its text; ``none`` where there may be none.

    Raises:
        ConfigError: The text is no such value; the message does not name the setting.
    """
    hint = get_type_hints(TrainConfig)[name]
    if get_origin(hint) is Literal:
        if text not in get_args(hint):
            raise ConfigError(f"{text!r} is none of {', '.join(get_args(hint))}")
        return text
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{text!r} is neither true nor false")
        return text.lower() == "true"
    if type(None) in get_args(hint) and text.lower() == "none":
        return None
    try:
        value = _parser_of(hint)(text)
    except ArgumentTypeError as error:
        raise ConfigError(str(error)) from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{text} is not finite")
    return value


def _plain(hint: Any) -> type:
    if get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    assert isinstance(hint, type)
    return hint


def _parser_of(hint: Any) -> Callable[[str], Any]:
    plain = _plain(hint)

    def parse(text: str) -> Any:
        try:
            return plain(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not {'an' if plain is int else 'a'} {plain.__name__}") from None

    return parse
