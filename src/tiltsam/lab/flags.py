"""The flags of commands that train: one for every field of the config, and one for every option of a method."""

from __future__ import annotations

import ast
import inspect
import math
import re
import textwrap
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, BooleanOptionalAction, _ActionsContainer
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from types import NoneType
from typing import Any

import tiltsam
from tiltsam.lab.config import (
    DEFAULTS,
    TrainConfig,
    allowed_types,
    field_types,
    has_setting,
    method_options,
)
from tiltsam.lab.errors import ConfigError

__all__ = [
    "SAME_FOR_ALL",
    "add_arguments",
    "check_distinct",
    "field_docs",
    "format_value",
    "format_values",
    "from_arguments",
    "given_settings",
    "method_configs",
    "parse_method",
    "parse_setting",
    "split_settings",
]

SAME_FOR_ALL = ("task", "seed", "device", "validation", "noise")
"""Settings that cannot differ between methods: they change what is measured."""

# The first field of each section of the help, and its heading.
_PARTS = {
    "task": "task and model",
    "epochs": "budget (the first limit that is reached)",
    "lr": "base optimizer and loss",
    "options": "the method",
    "seed": "the run",
}


@cache
def field_docs(cls: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            docs[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return docs


def _argument_docs(constructor: Callable[..., Any]) -> dict[str, str]:
    """Return the first sentence about each argument in the section ``Args:`` of a docstring, without markup."""
    text = inspect.getdoc(constructor.func if isinstance(constructor, partial) else constructor) or ""
    section = re.search(r"^Args:\n((?: .*\n?|\n)*)", text, re.MULTILINE)
    entries = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", section[1], re.MULTILINE) if section else []
    plain = ((name, re.sub(r"(:\w+:)?`+~?([^`]*)`+", r"\2", words)) for name, words in entries)
    lines = ((name, " ".join(words.split())) for name, words in plain)
    return {name: re.split(r"(?<=[.!]) (?=[A-Z\"])", words)[0] for name, words in lines}


def add_arguments(parser: ArgumentParser, *, leave_out: tuple[str, ...] = ()) -> None:
    """Add a flag for every field of the config, and for every option of a method, except those to leave out."""
    docs, hints = field_docs(TrainConfig), field_types()
    part: _ActionsContainer = parser
    for name, field in TrainConfig.__dataclass_fields__.items():
        if name in _PARTS:
            part = parser.add_argument_group(_PARTS[name])
        if name == "options":
            _add_options(part, leave_out)
        elif name not in leave_out:
            default = "" if field.default is None else str(field.default)
            _add_flag(part, name, hints[name], docs[name], default)


def _add_options(part: _ActionsContainer, leave_out: tuple[str, ...]) -> None:
    owners: dict[str, list[str]] = {}
    for method in tiltsam.METHODS:
        for name in method_options(method):
            if name not in leave_out:
                owners.setdefault(name, []).append(method)
    for name, methods in owners.items():
        parameters = {method: method_options(method)[name] for method in methods}
        docs = {method: _argument_docs(tiltsam.METHODS[method]).get(name, "") for method in methods}
        sharing: dict[str, list[str]] = {}  # methods by what the option means in them
        for method in methods:
            sharing.setdefault(docs[method] or docs[methods[0]], []).append(method)
        text, default = " ".join(f"{', '.join(names)}: {words}" for words, names in sharing.items()), ""
        # What None means is in the docstring.
        if defaults := {m: str(p.default) for m, p in parameters.items() if p.default not in (None, p.empty)}:
            values = {value: [m for m in defaults if defaults[m] == value] for value in defaults.values()}
            by_method = [f"{value} for {', '.join(names)}" for value, names in values.items()]
            default = "; ".join(values if len(values) == 1 else by_method)
        _add_flag(part, name, parameters[methods[0]].annotation, text, default)


def _add_flag(part: _ActionsContainer, name: str, hint: Any, text: str, default: str) -> None:
    text = text.removesuffix(".") + (f" (default: {default})" if default else "")
    flag, text, allowed = f"--{name.replace('_', '-')}", text.replace("%", "%%"), allowed_types(hint)
    choices = [kind for kind in allowed if not isinstance(kind, type)]
    types = [kind for kind in allowed if isinstance(kind, type) and kind is not NoneType]
    if types == [bool]:
        part.add_argument(flag, action=BooleanOptionalAction, help=text, default=SUPPRESS)
        return
    if choices:
        metavar = f"{{{','.join(map(str, choices))}}}"
    else:
        metavar = "VALUE" if len(types) > 1 else "NAME" if types == [str] else types[0].__name__.upper()
    part.add_argument(flag, type=partial(_parse, hint), metavar=metavar, help=text, default=SUPPRESS)


def given_settings(args: Any) -> dict[str, Any]:
    """Return the settings given by flags: fields, and options of any method."""
    known = {*field_types(), *(name for m in tiltsam.METHODS for name in method_options(m))}
    return {name: value for name, value in vars(args).items() if name in known}


def from_arguments(args: Any) -> TrainConfig:
    """Return the config given by flags.

    Raises:
        ConfigError: If ``--method`` is not what :func:`parse_method` takes, or a flag sets what it also sets or does
            not have.
    """
    settings = given_settings(args)
    text = settings.pop("method", TrainConfig.method)
    if twice := parse_method(text).keys() & settings.keys():
        raise ConfigError(f"{', '.join(sorted(twice))} must be given once, got a flag and --method {text}")
    return method_configs(TrainConfig(), [text], settings)[text]


def split_settings(args: Any) -> tuple[TrainConfig, dict[str, Any]]:
    """Return the config that flags give to all methods, and the settings that only some methods have."""
    settings = _with_one_budget(given_settings(args))
    fields = {name: value for name, value in settings.items() if name in field_types()}
    shared = {name: v for name, v in fields.items() if all(has_setting(method, name) for method in tiltsam.METHODS)}
    # Epochs stay among the settings, too: a limit that was given is kept even if it equals the default.
    return TrainConfig(**shared), {name: v for name, v in settings.items() if name not in shared or name == "epochs"}


def _with_one_budget(settings: dict[str, Any]) -> dict[str, Any]:
    """Remove the limit of epochs if passes or seconds are limited: by default it would end cheap methods earlier."""
    limited = settings.get("passes") is not None or settings.get("seconds") is not None
    return {"epochs": math.inf, **settings} if limited else settings


def parse_method(text: str) -> dict[str, Any]:
    """Parse a method and its own settings: what :meth:`TrainConfig.with_settings` takes.

    Args:
        text: The name, and settings after a colon, as in ``asam:rho=5`` or ``tsam:num_samples=3,t=100``.

    Raises:
        ConfigError: If the syntax is wrong, or the method has no such setting.

    Example:
        >>> parse_method("tsam:num_samples=3,t=100")
        {'method': 'tsam', 'num_samples': 3, 't': 100.0}
    """
    method, colon, rest = text.partition(":")
    settings: dict[str, Any] = {"method": method}
    known = method_options(method)
    for pair in rest.split(",") if colon else ():
        name, equals, value = (part.strip() for part in pair.partition("="))
        name = name.replace("-", "_")
        if not equals or name in settings:
            raise ConfigError(f"methods must be written as asam:rho=5 or tsam:num_samples=3,t=100, got {text!r}")
        if name in SAME_FOR_ALL:
            raise ConfigError(f"{text!r}: {name} must be the same for all methods")
        if not has_setting(method, name):
            raise ConfigError(
                f"{text!r}: {method} has no {name}; its options: {', '.join(known) or 'none'}; and the flags of "
                "tiltsam train, such as lr or average"
            )
        try:
            settings[name] = parse_setting(name, value, method)
        except ConfigError as error:
            raise ConfigError(f"{text!r}: {name} {error}") from None
    return settings


def method_configs(
    config: TrainConfig, methods: Sequence[str], settings: Mapping[str, Any] | None = None
) -> dict[str, TrainConfig]:
    """Return the config of each method.

    Args:
        config: The settings that all methods share; its method is replaced.
        methods: Methods, optionally with settings, as :func:`parse_method` takes them.
        settings: Settings of all methods that have them, as in ``{"rho": 0.2}``; a method's own take precedence.

    Raises:
        ConfigError: If there is no such method or setting, two methods are the same, or no method has one of
            ``settings``.
    """
    own = {name: parse_method(name) for name in methods}
    if len(own) < len(methods):
        raise ConfigError(f"methods must differ, got {', '.join(methods)}")
    for name in settings or ():
        if not any(has_setting(entry["method"], name) for entry in own.values()):
            if len(used := {entry["method"] for entry in own.values()}) == 1:
                (method,) = used
                raise ConfigError(f"{method} has no {name}; its options: {', '.join(method_options(method)) or 'none'}")
            raise ConfigError(f"{name} is not a setting of {', '.join(methods)}")
    shared = {
        name: {k: v for k, v in (settings or {}).items() if has_setting(entry["method"], k)}
        for name, entry in own.items()
    }
    limit = {} if config.epochs == DEFAULTS["epochs"] else {"epochs": config.epochs}
    return {
        name: config.with_settings(_with_one_budget({**limit, **shared[name], **entry})) for name, entry in own.items()
    }


def check_distinct(keys: Mapping[str, str]) -> None:
    """Raise a ConfigError if two methods have the same key: their runs would be the same."""
    names: dict[str, str] = {}
    for name, key in keys.items():
        if (first := names.setdefault(key, name)) != name:
            raise ConfigError(f"{first} and {name} are the same runs: leave one out")


def parse_setting(name: str, text: str, method: str) -> Any:
    """Parse the value of a field, or of an option of a method; ``none`` is accepted for optional ones.

    Raises:
        ConfigError: If the text is not a valid value. The message does not name the setting.
    """
    option = method_options(method).get(name)
    try:
        return _parse(field_types()[name] if option is None else option.annotation, text)
    except ArgumentTypeError as error:
        raise ConfigError(str(error)) from None


def format_values(values: Mapping[str, Any]) -> str:
    """Return settings by name as text, such as ``rho=0.2 t=5``."""
    return " ".join(f"{name}={format_value(value)}" for name, value in values.items())


def format_value(value: Any) -> str:
    """Return the value of a setting as text."""
    if value is None:
        return "default"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _parse(hint: Any, text: str) -> Any:
    """Parse a value of an annotated type. Of several types, the first one that fits is taken, strings last."""
    allowed = allowed_types(hint)
    choices = {str(kind): kind for kind in allowed if not isinstance(kind, type)}
    choices |= {"true": True, "false": False} if bool in allowed else {}
    if text.lower() == "none" and NoneType in allowed:
        return None
    for spelling in (text, text.lower()):
        if spelling in choices:
            return choices[spelling]
    kinds_left = [kind for kind in (int, float, str) if kind in allowed]
    for kind in kinds_left:
        with suppress(ValueError):
            return kind(text)
    if choices:
        raise ArgumentTypeError(f"must be one of {', '.join(choices)}, got {text!r}")
    raise ArgumentTypeError(f"must be {'a number' if float in kinds_left else 'an integer'}, got {text!r}")
