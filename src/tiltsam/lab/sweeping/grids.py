"""The grids of a sweep: the paper's, one's own, and the same number of points for every method."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiltsam.lab.config import METHOD_SETTINGS, NOTHING_TO_WEIGH, ConfigError, TrainConfig, settings_of, tilts_nothing
from tiltsam.lab.config import methods as all_methods
from tiltsam.lab.flags import parse_setting

__all__ = ["PAPER", "Point", "SweepError", "parse_grid", "points"]

PAPER: dict[str, tuple[Any, ...]] = {
    "lr": (1e-4, 3e-4, 0.001, 0.003, 0.01, 0.03, 0.1),
    "rho": (0.05, 0.1, 0.5, 1.0, 5.0, 15.0),
    "t": (0.0, 1.0, 5.0, 20.0, 100.0),
    "num_samples": (3, 5),
}
"""The paper's grids; each method takes the settings that are its own."""

# A sweep compares validation scores, so nothing may change what they are measured on.
FIXED = ("task", "method", "seed", "device", "validation", "noise")


class SweepError(Exception):
    """A sweep that cannot be, or cannot go on, told in one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


@dataclass(frozen=True)
class Point:
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
        grid[name] = tuple(dict.fromkeys(_value(setting, v.strip()) for v in values.split(",")))
    return grid


def points(
    base: TrainConfig,
    methods: Sequence[str],
    grid: Mapping[str, Sequence[Any]],
    trials: int | None = None,
    *,
    draw_seed: int = 0,
) -> tuple[dict[str, list[Point]], list[str]]:
    """The points to try: distinct ones, and as many for every method.

    Of a grid with more points than ``trials``, that many are drawn; the draw for a smaller number is part of that for
    a larger one. Of a grid with fewer, all are taken, and the rest lies between its learning rates, which are divided
    evenly on a logarithmic scale.

    Args:
        base: Everything that is not in the grid.
        methods: The methods.
        grid: Values by the setting's name, or by ``METHOD:NAME`` for one method alone, which goes before. A method
            takes the settings that are its own; one that no method has is a mistake.
        trials: Points a method; by default all, for which the grids must be of one size.
        draw_seed: Of the draw.

    Returns:
        The points of each method, and a line for each method whose grid was drawn from or made finer, or has a tilt
        that does nothing.

    Raises:
        SweepError: A name, a value or a number that cannot be.
    """
    _check_names(methods, grid)
    axes = {method: _axes(method, grid) for method in dict.fromkeys(methods)}
    everything = {method: _product(base, method, values) for method, values in axes.items()}
    sizes = {method: len(found) for method, found in everything.items()}
    if trials is None:
        if len(set(sizes.values())) > 1:
            told = ", ".join(f"{method} {size}" for method, size in sizes.items())
            raise SweepError(
                f"the grids differ in size ({told}): say --trials N, so that every method gets the same number"
            )
        trials = max(sizes.values(), default=0)
    if trials < 1:
        raise SweepError(f"--trials must be at least 1, got {trials}")
    chosen, notes = {}, []
    for method, found in everything.items():
        if len(found) > trials:
            notes.append(f"{method}: {trials} of the {len(found)} points of its grid, drawn with seed {draw_seed}")
            chosen[method] = _draw(found, trials, draw_seed)
        elif len(found) < trials:
            finer = _finer(base, method, axes[method], trials)
            between = [p for p in finer if p.config not in {q.config for q in found}]
            chosen[method] = found + _draw(between, trials - len(found), draw_seed)
            notes.append(
                f"{method}: all {len(found)} points of its grid, and {trials - len(found)} with learning rates between"
            )
        else:
            chosen[method] = found
    if any(tilts_nothing(point.config, point.settings) for found in chosen.values() for point in found):
        notes.append(NOTHING_TO_WEIGH)
    everyone = [point.config for found in chosen.values() for point in found]
    for config in {(c.method, repr(c.method_options())): c for c in everyone}.values():
        _try_out(config)
    return chosen, notes


def _check_names(methods: Sequence[str], grid: Mapping[str, Sequence[Any]]) -> None:
    if not methods:
        raise SweepError("a sweep needs a method")
    for method in methods:
        if method not in all_methods():
            raise SweepError(f"unknown method {method!r}: one of {', '.join(all_methods())}")
    if not grid:
        raise SweepError("a sweep needs a grid: --grid NAME=VALUE,VALUE,… or --grid paper")
    for name, values in grid.items():
        setting = _setting(name)
        owner = name.rpartition(":")[0]
        if not len(values):
            raise SweepError(f"--grid {name}: no values")
        if owner and owner not in methods:
            raise SweepError(f"--grid {name}: {owner} is not among the methods: {', '.join(methods)}")
        takers = [owner] if owner else list(methods)
        # The paper's grid holds the settings of all methods; what none of these has is not asked of them.
        if not any(_takes(m, setting) for m in takers) and tuple(values) != PAPER.get(name):
            raise SweepError(f"--grid {name}: {', '.join(takers)} ha{'s' if len(takers) == 1 else 've'} no {setting}")


def _setting(name: str) -> str:
    """The field that a name of the grid means."""
    owner, colon, setting = name.rpartition(":")
    if colon and owner not in all_methods():
        raise SweepError(f"--grid {name}: unknown method {owner!r}: one of {', '.join(all_methods())}")
    fields = [f.name for f in dataclasses.fields(TrainConfig) if f.name not in FIXED]
    if setting in FIXED:
        raise SweepError(f"--grid {name}: {setting} is the same for all trials")
    if setting not in fields:
        raise SweepError(f"--grid {name}: unknown setting {setting!r}: one of {', '.join(fields)}")
    return setting


def _value(setting: str, text: str) -> Any:
    try:
        return parse_setting(setting, text)
    except ConfigError as error:
        raise SweepError(f"--grid {setting}: {error}") from None


def _takes(method: str, setting: str) -> bool:
    """Whether a setting is this method's: its own, or one of training itself."""
    return setting in settings_of(method) or all(setting not in own for own in METHOD_SETTINGS.values())


def _axes(method: str, grid: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
    shared = {name: tuple(values) for name, values in grid.items() if ":" not in name and _takes(method, name)}
    own = {name.partition(":")[2]: tuple(v) for name, v in grid.items() if name.startswith(f"{method}:")}
    return shared | own


def _product(base: TrainConfig, method: str, axes: Mapping[str, Sequence[Any]]) -> list[Point]:
    """All combinations, each run once."""
    found: dict[str, Point] = {}
    for values in itertools.product(*axes.values()):
        settings = dict(zip(axes, values, strict=True))
        try:
            config = dataclasses.replace(base, method=method, **settings)
        except ConfigError as error:
            raise SweepError(f"--grid: {error}") from None
        found.setdefault(config.key(), Point(config, settings))
    return list(found.values())


def _finer(base: TrainConfig, method: str, axes: Mapping[str, tuple[Any, ...]], trials: int) -> list[Point]:
    """The grid with as many learning rates between its own as make it large enough."""
    rates = sorted(axes.get("lr", ()))
    if len(rates) < 2:
        raise SweepError(
            f"{method} has {len(_product(base, method, axes))} points in its grid and {trials} trials to make: "
            "give it more values, or two learning rates to go between"
        )
    for parts in range(2, trials + 2):
        steps = [(low * (high / low) ** (k / parts)) for low, high in itertools.pairwise(rates) for k in range(parts)]
        # Three digits, so that a person can read the value and type it; the ends stay as they were given.
        finer = dict.fromkeys([*rates, *(float(f"{x:.3g}") for x in steps)])
        found = _product(base, method, {**axes, "lr": tuple(finer)})
        if len(found) >= trials:
            return found
    raise SweepError(f"{method}: there are not {trials} learning rates of three digits between {rates[0]} and the next")


def _draw(found: Sequence[Point], number: int, seed: int) -> list[Point]:
    """A draw that is the same on every machine, and grows without changing."""

    def ticket(point: Point) -> str:
        text = json.dumps([seed, point.config.method, point.settings], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    return sorted(found, key=ticket)[:number]


def _try_out(config: TrainConfig) -> None:
    """Let the method itself say whether it takes the values, before anything is trained."""
    parameter = torch.zeros(2, requires_grad=True)
    try:
        config.constructor()(torch.optim.SGD([parameter], lr=config.lr), **config.method_options())
    except ValueError as error:
        raise SweepError(f"{config.method}: {error}") from None
