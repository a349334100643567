"""The grids of a sweep: the paper's, one's own, and the same number of points for every entry."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import tiltsam
from tiltsam.lab.config import (
    TILT_HAS_NO_EFFECT,
    TrainConfig,
    field_types,
    has_setting,
    method_options,
    tilt_has_no_effect,
)
from tiltsam.lab.errors import ConfigError, SweepError
from tiltsam.lab.flags import parse_method, parse_setting

__all__ = ["PAPER", "GridPoint", "parse_grid", "points"]

PAPER: dict[str, tuple[Any, ...]] = {
    "lr": (1e-4, 3e-4, 0.001, 0.003, 0.01, 0.03, 0.1),
    "rho": (0.05, 0.1, 0.5, 1.0, 5.0, 15.0),
    "t": (0.0, 1.0, 5.0, 20.0, 100.0),
    "num_samples": (3, 5),
}
"""The paper's grids; each method takes the settings that are its own."""

# A sweep compares validation scores, so nothing may change what they are measured on.
FIXED = ("task", "method", "seed", "device", "validation", "noise")


@dataclass(frozen=True)
class GridPoint:
    """One place of a grid."""

    config: TrainConfig
    settings: dict[str, Any]
    """What the grid set: name to value."""


def parse_grid(texts: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """The grid that ``--grid`` options spell: ``paper``, ``NAME=V,V,…`` or, for one method, ``METHOD:NAME=V,V,…``.

    A later option replaces what an earlier one says of the same name.

    Example:
        >>> parse_grid(["lr=0.1,0.3", "tsam:t=1,20"])
        {'lr': (0.1, 0.3), 'tsam:t': (1.0, 20.0)}
    """
    grid: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        if text == "paper":
            grid |= PAPER
            continue
        name, equals, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not values.strip():
            raise SweepError(f"--grid {text}: write NAME=VALUE,VALUE,… or METHOD:NAME=VALUE,… or paper")
        setting = _setting(name)
        owner = name.rpartition(":")[0] or next(m for m in tiltsam.METHODS if has_setting(m, setting))
        grid[name] = tuple(dict.fromkeys(_value(owner, setting, v.strip()) for v in values.split(",")))
    return grid


def points(
    base: TrainConfig,
    methods: Sequence[str],
    grid: Mapping[str, Sequence[Any]],
    trials: int | None = None,
    *,
    draw_seed: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> tuple[dict[str, list[GridPoint]], list[str]]:
    """The points to try: distinct ones, and as many for every entry.

    Of a grid with more points than ``trials``, that many are drawn; the draw for a smaller number is part of that for
    a larger one. Of a grid with fewer, all are taken, and the rest lies between its learning rates, which are divided
    evenly on a logarithmic scale.

    Args:
        base: Everything that is not in the grid.
        methods: The entries: methods, each bare or with settings of its own, as in ``"tsam:num_samples=3"``
            (:func:`tiltsam.lab.flags.parse_method`). No grid holds for what an entry sets.
        grid: Values by the setting's name, or by ``METHOD:NAME`` for all entries of one method, which goes before. A
            method takes the settings that are its own; one that no method has is a mistake.
        trials: Points an entry; by default all, for which the grids must be of one size.
        draw_seed: Of the draw, which is the same for entries of one method whose grids are.
        settings: Settings of all methods that have them, as in ``{"rho": 0.2}``; entries and grids go first.

    Returns:
        The points by entry, and a line for each entry a part of whose grid was left out, whose grid was drawn from or
        made finer, or that has a tilt that does nothing. Two entries may have points in common.

    Raises:
        SweepError: A name, a value or a number that cannot be; two entries that are the same.
    """
    fixed = _entries(methods)
    _check_grid(fixed, grid)
    rows, notes = {}, []
    for name, own in fixed.items():
        axes = _axes(own["method"], grid)
        rows[name] = _Row(name, own, {setting: values for setting, values in axes.items() if setting not in own})
        if taken := [setting for setting in axes if setting in own]:
            notes.append(f"{name}: the grid's {', '.join(taken)} left out, which it sets itself")
    bases = {name: _base(base, row, settings or {}) for name, row in rows.items()}
    everything = {name: _product(bases[name], row) for name, row in rows.items()}
    _check_rows(everything)
    sizes = {name: len(found) for name, found in everything.items()}
    if trials is None:
        if len(set(sizes.values())) > 1:
            told = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise SweepError(
                f"the grids differ in size ({told}): say --trials N, so that every method gets the same number"
            )
        trials = max(sizes.values(), default=0)
    if trials < 1:
        raise SweepError(f"--trials must be at least 1, got {trials}")
    chosen = {}
    for name, found in everything.items():
        if len(found) > trials:
            notes.append(f"{name}: {trials} of the {len(found)} points of its grid, drawn with seed {draw_seed}")
            chosen[name] = _draw(found, trials, draw_seed)
        elif len(found) < trials:
            finer = _finer(bases[name], rows[name], trials)
            between = [p for p in finer if p.config not in {q.config for q in found}]
            chosen[name] = found + _draw(between, trials - len(found), draw_seed)
            notes.append(
                f"{name}: all {len(found)} points of its grid, and {trials - len(found)} with learning rates between"
            )
        else:
            chosen[name] = found
    for name, found in chosen.items():
        if any(tilt_has_no_effect(point.config) for point in found):
            notes.append(f"{name} has {TILT_HAS_NO_EFFECT}")
        for config in {repr(point.config.options): point.config for point in found}.values():
            _try_out(name, config)
    return chosen, notes


@dataclass(frozen=True)
class _Row:
    """An entry: what it is called, what it sets (its method, too), and what is varied."""

    name: str
    fixed: Mapping[str, Any]
    axes: Mapping[str, tuple[Any, ...]]


def _entries(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What each entry sets, by the entry's text."""
    if not methods:
        raise SweepError("a sweep needs a method")
    if isinstance(methods, str):  # which is a sequence, too, of its letters
        raise SweepError(f"methods are a list, as in [{methods!r}]")
    found: dict[str, dict[str, Any]] = {}
    for text in methods:
        if text in found:
            raise SweepError(f"{text} is given twice")
        try:
            found[text] = parse_method(text)
        except ConfigError as error:
            raise SweepError(str(error)) from None
        for name in found[text]:
            if name in FIXED and name != "method":
                raise SweepError(f"{text!r}: {name} is the same for all trials")
    return found


def _check_rows(everything: Mapping[str, Sequence[GridPoint]]) -> None:
    """Entries may have points in common, but not all of them."""
    seen: dict[frozenset[str], str] = {}
    for name, found in everything.items():
        first = seen.setdefault(frozenset(point.config.key() for point in found), name)
        if first != name:
            raise SweepError(f"{first} and {name} are the same runs: leave one out")


def _check_grid(entries: Mapping[str, Mapping[str, Any]], grid: Mapping[str, Sequence[Any]]) -> None:
    methods = list(dict.fromkeys(own["method"] for own in entries.values()))
    if not grid:
        raise SweepError("a sweep needs a grid: --grid NAME=VALUE,VALUE,… or --grid paper")
    for name, values in grid.items():
        setting = _setting(name)
        owner = name.rpartition(":")[0]
        if not len(values):
            raise SweepError(f"--grid {name}: no values")
        if owner and owner not in methods:
            raise SweepError(f"--grid {name}: {owner} is not among the methods: {', '.join(entries)}")
        takers = [owner] if owner else methods
        # The paper's grid holds the settings of all methods; what none of these has is not asked of them.
        if not any(has_setting(m, setting) for m in takers) and tuple(values) != PAPER.get(name):
            raise SweepError(f"--grid {name}: {', '.join(takers)} ha{'s' if len(takers) == 1 else 've'} no {setting}")


def _setting(name: str) -> str:
    """The field that a name of the grid means."""
    owner, colon, setting = name.rpartition(":")
    if colon and owner not in tiltsam.METHODS:
        raise SweepError(f"--grid {name}: unknown method {owner!r}: one of {', '.join(tiltsam.METHODS)}")
    options = (option for method in tiltsam.METHODS for option in method_options(method))
    fields = [field for field in dict.fromkeys((*field_types(), *options)) if field not in FIXED]
    if setting in FIXED:
        raise SweepError(f"--grid {name}: {setting} is the same for all trials")
    if setting not in fields:
        raise SweepError(f"--grid {name}: unknown setting {setting!r}: one of {', '.join(fields)}")
    return setting


def _value(method: str, setting: str, text: str) -> Any:
    try:
        return parse_setting(setting, text, method)
    except ConfigError as error:
        raise SweepError(f"--grid {setting}: {error}") from None


def _axes(method: str, grid: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
    shared = {name: tuple(values) for name, values in grid.items() if ":" not in name and has_setting(method, name)}
    own = {name.partition(":")[2]: tuple(v) for name, v in grid.items() if name.startswith(f"{method}:")}
    return shared | own


def _base(base: TrainConfig, row: _Row, settings: Mapping[str, Any]) -> TrainConfig:
    """The settings of an entry that neither it nor its grid sets."""
    method = row.fixed["method"]
    mine = {name: value for name, value in settings.items() if has_setting(method, name)}
    return base.with_settings({**mine, "method": method})


def _product(base: TrainConfig, row: _Row) -> list[GridPoint]:
    """All combinations, each run once."""
    found: dict[str, GridPoint] = {}
    for values in itertools.product(*row.axes.values()):
        settings = dict(zip(row.axes, values, strict=True))
        try:
            config = base.with_settings({**row.fixed, **settings})
        except ConfigError as error:
            raise SweepError(f"{row.name}: {error}") from None
        found.setdefault(config.key(), GridPoint(config, settings))
    return list(found.values())


def _finer(base: TrainConfig, row: _Row, trials: int) -> list[GridPoint]:
    """The grid with as many learning rates between its own as make it large enough."""
    rates = sorted(row.axes.get("lr", ()))
    if len(rates) < 2:
        raise SweepError(
            f"{row.name} has {len(_product(base, row))} points in its grid and {trials} trials to make: "
            "give it more values, or two learning rates to go between"
        )
    for parts in range(2, trials + 2):
        steps = [(low * (high / low) ** (k / parts)) for low, high in itertools.pairwise(rates) for k in range(parts)]
        # Three digits, so that a person can read the value and type it; the ends stay as they were given.
        finer = dict.fromkeys([*rates, *(float(f"{x:.3g}") for x in steps)])
        found = _product(base, dataclasses.replace(row, axes={**row.axes, "lr": tuple(finer)}))
        if len(found) >= trials:
            return found
    raise SweepError(
        f"{row.name}: there are not {trials} learning rates of three digits between {rates[0]} and the next"
    )


def _draw(found: Sequence[GridPoint], number: int, seed: int) -> list[GridPoint]:
    """A draw that is the same on every machine, and grows without changing."""

    def ticket(point: GridPoint) -> str:
        text = json.dumps([seed, point.config.method, point.settings], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    return sorted(found, key=ticket)[:number]


def _try_out(name: str, config: TrainConfig) -> None:
    """Let the method itself say whether it takes the values, before anything is trained."""
    parameter = torch.zeros(2, requires_grad=True)
    try:
        config.wrap(torch.optim.SGD([parameter], lr=config.lr))
    except ConfigError as error:
        raise SweepError(f"{name}: {error}") from None
