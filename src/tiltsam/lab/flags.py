"""The flags of commands that train: one for every field of the config, and settings of single methods."""

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

from tiltsam.lab.config import TILT_HAS_NO_EFFECT, TrainConfig, settings_of_others, tilt_has_no_effect
from tiltsam.lab.errors import ConfigError

__all__ = ["add_arguments", "field_docs", "from_arguments", "given", "parse_method", "parse_setting", "remarks"]

_SHARED_SETTINGS = ("task", "seed", "device")  # cannot be set for one method


def field_docs(cls: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            docs[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return docs


# The first field of each section of the help, and its heading.
_PARTS = {
    "task": "task and model",
    "epochs": "budget (whichever limit is reached first)",
    "lr": "base optimizer and loss",
    "rho": "settings of the methods",
    "seed": "the run",
}


def add_arguments(parser: ArgumentParser, *, leave_out: tuple[str, ...] = ()) -> None:
    """Add a flag for every field of the config, except those to leave out."""
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
    """Return the config given by the flags of :func:`add_arguments`."""
    return TrainConfig(**given(args) | fixed)


def given(args: Any) -> dict[str, Any]:
    """Return the settings given by flags."""
    everything = {f.name: getattr(args, f.name, None) for f in dataclasses.fields(TrainConfig)}
    return {name: value for name, value in everything.items() if value is not None}


def remarks(args: Any, config: TrainConfig) -> list[str]:
    """Return a remark for each kind of given flag that has no effect: another method's, or the tilt of one sample."""
    names = given(args)
    others = [name for name in names if name in settings_of_others(config.method)]
    found = [f"{config.method} has no {', '.join(others)}: ignored"] if others else []
    return found + ([f"{config.method} has {TILT_HAS_NO_EFFECT}"] if tilt_has_no_effect(config, names) else [])


def parse_method(text: str) -> dict[str, Any]:
    """Parse a method and its own settings.

    Args:
        text: The name, and settings after a colon, as in ``asam:rho=5`` or ``tsam:num_samples=3,t=100``.

    Raises:
        ConfigError: If the syntax is wrong, or the method has no such setting.

    Example:
        >>> parse_method("tsam:num_samples=3,t=100")
        {'method': 'tsam', 'num_samples': 3, 't': 100.0}
    """
    method, colon, rest = text.partition(":")
    TrainConfig(method=method)  # raises if the method is unknown
    found: dict[str, Any] = {"method": method}
    fields = [field.name for field in dataclasses.fields(TrainConfig)]
    for pair in rest.split(",") if colon else ():
        name, equals, value = (part.strip() for part in pair.partition("="))
        name = name.replace("-", "_")
        if not equals or name in found:
            raise ConfigError(f"methods must be written as asam:rho=5 or tsam:num_samples=3,t=100, got {text!r}")
        if name in _SHARED_SETTINGS:
            raise ConfigError(f"{text!r}: {name} cannot be set for a single method")
        if name not in fields:
            known = (f for f in fields if f not in ("method", *_SHARED_SETTINGS, *settings_of_others(method)))
            raise ConfigError(f"{text!r}: unknown setting {name!r}: one of {', '.join(known)}")
        try:
            found[name] = parse_setting(name, value)
        except ConfigError as error:
            raise ConfigError(f"{text!r}: {name}: {error}") from None
    if others := [name for name in found if name in settings_of_others(method)]:
        raise ConfigError(f"{text!r}: {method} has no {', '.join(others)}")
    return found


def parse_setting(name: str, text: str) -> Any:
    """Parse the value of a setting; ``none`` is accepted for optional ones.

    Raises:
        ConfigError: If the text is not a valid value. The message does not name the setting.
    """
    hint = get_type_hints(TrainConfig)[name]
    if get_origin(hint) is Literal:
        if text not in get_args(hint):
            raise ConfigError(f"must be one of {', '.join(get_args(hint))}, got {text!r}")
        return text
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"must be true or false, got {text!r}")
        return text.lower() == "true"
    if type(None) in get_args(hint) and text.lower() == "none":
        return None
    try:
        value = _parser_of(hint)(text)
    except ArgumentTypeError as error:
        raise ConfigError(str(error)) from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"must be finite, got {text}")
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
