"""The search space of a sweep: grids and ranges of settings, and the part of them that each method has."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from tiltsam.lab.config import TILT_SETTINGS, TrainConfig, ignores_tilt, warn_if_tilt_has_no_effect
from tiltsam.lab.errors import ConfigError
from tiltsam.lab.flags import SAME_FOR_ALL, check_distinct, method_configs, parse_method

__all__ = [
    "PAPER",
    "ChoiceName",
    "Entry",
    "Grid",
    "PrunerName",
    "Range",
    "TrialSamplerName",
    "Values",
    "make_entries",
    "parse_grid",
]

TrialSamplerName = Literal["grid", "random", "tpe"]
PrunerName = Literal["none", "halving"]
ChoiceName = Literal["loss", "score", "balanced"]

PAPER: dict[str, tuple[Any, ...]] = {
    "lr": (1e-4, 3e-4, 0.001, 0.003, 0.01, 0.03, 0.1),
    "rho": (0.05, 0.1, 0.5, 1.0, 5.0, 15.0),
    "t": (0.0, 1.0, 5.0, 20.0, 100.0),
    "num_samples": (3, 5),
}
"""The grids of the paper; each method uses the settings that it has."""

NOT_TUNABLE = (*SAME_FOR_ALL, "method", "epochs", "passes", "seconds")  # a larger budget would win


@dataclass(frozen=True)
class Range:
    """A range of values, sampled log-uniformly."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (isinstance(self.low, float) and isinstance(self.high, float) and 0 < self.low < self.high < math.inf):
            raise ConfigError(f"a range must be LOW..HIGH with floats 0 < LOW < HIGH, got {self.low}..{self.high}")


Values = tuple[Any, ...] | Range
Grid = Mapping[str, Sequence[Any] | Range]


@dataclass(frozen=True)
class Entry:
    """A method with its own settings, and what is tried for it."""

    name: str
    config: TrainConfig
    space: dict[str, Values]
    trials: int


def parse_grid(texts: Sequence[str], methods: Sequence[str]) -> dict[str, Values]:
    """Parse ``NAME=VALUE,VALUE,…``, ``NAME=LOW..HIGH``, ``METHOD:NAME=…`` and ``paper``; later texts win.

    The methods of the sweep define the types of the values.

    Raises:
        ConfigError: If an entry of ``methods`` or a grid is wrong, or no method has its setting.

    Example:
        >>> parse_grid(["lr=0.1,0.3", "tsam:t=1,20", "rho=0.01..1"], ["sam", "tsam:num_samples=3"])
        {'lr': (0.1, 0.3), 'tsam:t': (1.0, 20.0), 'rho': Range(low=0.01, high=1.0)}
    """
    grid: dict[str, Values] = {}
    names = list(dict.fromkeys(parse_method(text)["method"] for text in methods))
    for text in texts:
        if text == "paper":
            grid |= PAPER
            continue
        name, equals, values = text.partition("=")
        name = name.strip().replace("-", "_")
        owner, colon, setting = name.rpartition(":")
        if not equals or not values.strip():
            raise ConfigError(f"--grid must be NAME=VALUE,VALUE,… or NAME=LOW..HIGH or paper, got {text!r}")
        low, dots, high = values.partition("..")
        parse = partial(_parse_value, [owner] if colon else names, setting)
        if dots:
            grid[name] = Range(parse(low), parse(high))
        else:
            grid[name] = tuple(dict.fromkeys(parse(value) for value in values.split(",")))
    return grid


def _parse_value(methods: Sequence[str], setting: str, text: str) -> Any:
    """Parse a value as the first method does that has the setting."""
    errors = []
    for method in methods:
        try:
            return parse_method(f"{method}:{setting}={text.strip()}")[setting]
        except ConfigError as error:
            errors.append(error)
    raise ConfigError(f"--grid {setting}: {errors[0] if errors else 'no methods'}")


def make_entries(
    base: TrainConfig,
    methods: Sequence[str],
    grid: Grid,
    trials: int | None,
    sampler: TrialSamplerName,
    settings: Mapping[str, Any] | None = None,
) -> tuple[list[Entry], list[str]]:
    """Return the entries, and notes on those with less to try than others; see :func:`tiltsam.lab.sweep.sweep`.

    Raises:
        ConfigError: If an entry, a name or a value cannot be used, or two entries are equal.
    """
    if not methods or isinstance(methods, str):
        raise ConfigError(f"methods must be a list of at least one method, got {methods!r}")
    if not grid:
        raise ConfigError("pass at least one --grid NAME=VALUE,VALUE,…")
    if sampler == "grid" and (ranges := [name for name, values in grid.items() if isinstance(values, Range)]):
        raise ConfigError(f"--grid {ranges[0]}: a range needs --sampler random or tpe")
    if sampler != "grid" and trials is None:
        raise ConfigError(f"pass --trials N with --sampler {sampler}")
    if trials is not None and trials < 1:
        raise ConfigError(f"--trials must be at least 1, got {trials}")
    fixed = {text: parse_method(text) for text in methods}
    configs = method_configs(base, methods, settings)
    spaces = _spaces(configs, fixed, grid)
    unused = {name: _unused_tilts(configs[name], space) for name, space in spaces.items()}
    spaces = {name: {k: v for k, v in space.items() if k not in unused[name]} for name, space in spaces.items()}
    sizes = {name: _check_points(name, configs[name], space) for name, space in spaces.items()}
    most = trials or int(max(sizes.values()))
    entries = [Entry(name, configs[name], spaces[name], int(min(most, sizes[name]))) for name in fixed]
    check_distinct({entry.name: f"{entry.config.key()} {entry.space}" for entry in entries})
    notes = [
        f"{e.name}: its grid allows {e.trials} of {most} trials"
        + ("" if "lr" in fixed[e.name] else f"; add values: --grid {e.config.method}:lr=…")
        for e in entries
        if e.trials < most
    ]
    if sampler == "grid":
        notes += _uneven_coverage(entries, sizes)
    notes += [
        f"{name}: its tilt has no effect, so {' and '.join(names)} {'is' if len(names) == 1 else 'are'} not tuned"
        for name, names in unused.items()
        if names
    ]
    for entry in entries:
        names = {n.rpartition(":")[2] for n in grid if n.rpartition(":")[0] in ("", entry.config.method)}
        if ignored := [name for name in fixed[entry.name] if name in names]:
            notes.append(f"{entry.name}: sets {', '.join(ignored)} itself, the grid is not used")
        if not entry.space.keys() & {"num_samples", "sampler"}:
            warn_if_tilt_has_no_effect(entry.config, entry.name)
    return entries, notes


def _uneven_coverage(entries: Sequence[Entry], sizes: Mapping[str, float]) -> list[str]:
    """Return a note if less than a quarter of the grid of an entry is tried while that of another is covered fully."""
    few = [e for e in entries if 4 * e.trials < sizes[e.name]]
    full = [e for e in entries if e.trials == sizes[e.name]]
    if not few or not full:
        return []
    tried = [f"{e.name}: tries {e.trials} of the {sizes[e.name]:g} points of its grid" for e in few]
    tried += [f"{e.name}: all {e.trials}" for e in full]
    return [f"{'; '.join(tried)} (fairer: smaller grids, or more --trials)"]


def _spaces(
    configs: Mapping[str, TrainConfig], fixed: Mapping[str, Mapping[str, Any]], grid: Grid
) -> dict[str, dict[str, Values]]:
    """Return what is tried for each entry: the part of the grid that its method has and that it does not set."""
    spaces: dict[str, dict[str, Values]] = {name: {} for name in configs}
    for name, values in sorted(grid.items(), key=lambda item: ":" in item[0]):  # those of one method replace others
        owner, _, setting = name.rpartition(":")
        if setting in NOT_TUNABLE:
            raise ConfigError(f"--grid {name}: {setting} must be the same for all trials of a method")
        if not isinstance(values, Range) and not len(values):
            raise ConfigError(f"--grid {name} must have values")
        entries = [entry for entry, config in configs.items() if owner in ("", config.method)]
        if not entries:
            raise ConfigError(f"--grid {name}: methods must include {owner}, got {', '.join(configs)}")
        matching, errors = [], []
        for entry in entries:
            try:
                configs[entry].with_settings({setting: values.low if isinstance(values, Range) else values[0]})
                matching.append(entry)
            except ConfigError as error:
                errors.append(f"--grid {name}: {error}")
        if not matching and (isinstance(values, Range) or tuple(values) != PAPER.get(name)):
            raise ConfigError(errors[0])
        for entry in matching:
            if setting not in fixed[entry]:
                spaces[entry][setting] = values if isinstance(values, Range) else tuple(dict.fromkeys(values))
    return spaces


def _unused_tilts(config: TrainConfig, space: Mapping[str, Values]) -> list[str]:
    """Return the settings of the tilt in a space if they have no effect at any point of it."""
    if not ignores_tilt(config) or "num_samples" in space or "sampler" in space:
        return []
    return [name for name in TILT_SETTINGS if name in space]


def _check_points(name: str, config: TrainConfig, space: Mapping[str, Values]) -> float:
    """Let the method check all points, or the corners of ranges; return their number, infinite for a range."""
    axes = [(v.low, v.high) if isinstance(v, Range) else v for v in space.values()]
    for point in itertools.product(*axes):
        try:
            config.with_settings(dict(zip(space, point, strict=True))).check_options()
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
    return math.inf if any(isinstance(v, Range) for v in space.values()) else math.prod(map(len, axes))
