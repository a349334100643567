"""Settings of a method, stored in the parameter groups of the base optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from types import NoneType
from typing import Any

from torch.optim import Optimizer

from tiltsam.schedules import Schedule
from tiltsam.space.validation import warn

__all__ = ["Hyperparameters"]

_METHOD = "tilt_method"  # the entry that names the method in checkpoints
_PLAIN = (bool, int, float, NoneType)


class Hyperparameters:
    """The settings of a method as entries of ``param_groups``, where users, schedulers and checkpoints find them.

    If the base already uses a name, the entry is called ``tilt_<name>``. ``rho`` may differ between groups; an entry
    ``own_rho`` marks the groups that brought their own. All other settings have one value for the whole step. An entry
    ``tilt_method`` names the method. If the base was wrapped before, the new settings replace the earlier ones, except
    the step count and the ``rho`` of groups that brought their own.

    Args:
        base: The optimizer that owns the groups.
        method: Name of the method.
        initial: Names and initial values; a callable is a schedule.
    """

    per_group = frozenset({"own_rho", "rho"})

    def __init__(self, base: Optimizer, method: str, initial: Mapping[str, Any]) -> None:
        if "rho" in initial:
            initial = {"own_rho": False, **initial}
        self._base = base
        self._method = method
        self._schedules: dict[str, Schedule] = {name: value for name, value in initial.items() if callable(value)}
        self._initial = {name: _as_python(value(0) if callable(value) else value) for name, value in initial.items()}
        self._keys = {name: f"tilt_{name}" if name in base.defaults else name for name in initial}
        for group in base.param_groups:  # before fill, which would copy what group 0 brought to the others
            wrapped = self._keys["steps_taken"] in group
            if "rho" in self and group.get("own_rho") is False:
                group.pop(self._keys["rho"], None)
            for name, key in self._keys.items():
                if name not in self.per_group and name != "steps_taken":
                    group[key] = self._initial[name] if wrapped else group.get(key, self._initial[name])
        self.fill()

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def __getitem__(self, name: str) -> Any:
        """Return a setting that has one value for the whole step."""
        key = self._keys[name]
        first, *others = self._base.param_groups
        value = first.get(key, self._initial[name])
        for group in others:
            if group.get(key, value) != value:
                raise ValueError(f"{key} must be the same in all parameter groups, got {value} and {group[key]}")
        return value

    def per_group_values(self, name: str) -> list[Any]:
        """Return a setting, one value per group."""
        return [group[self._keys[name]] for group in self._base.param_groups]

    def values(self) -> tuple[Any, ...]:
        """Return all settings except the step count, to detect changes."""
        keys = [key for name, key in self._keys.items() if name != "steps_taken"]
        return tuple(group.get(key) for group in self._base.param_groups for key in keys)

    def entries(self) -> frozenset[str]:
        """Return the names of the entries in the groups."""
        return frozenset((_METHOD, *self._keys.values()))

    def fill(self, before: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Give groups that lack a setting its value: that of group 0, or for ``rho`` the initial one.

        Numbers of numpy are converted.

        Args:
            before: The groups before a state dict was loaded; their values then count as initial.
        """
        groups = self._base.param_groups
        for i, group in enumerate(groups):
            brought_rho = "rho" in self._keys and self._keys["rho"] in group
            for name, key in self._keys.items():
                if key in group:
                    if type(group[key]) not in _PLAIN:
                        group[key] = _as_python(group[key])
                    continue
                if name not in self.per_group and key in groups[0]:
                    group[key] = groups[0][key]
                elif before is not None:
                    group[key] = before[i][key]
                elif name == "own_rho":
                    group[key] = brought_rho
                else:
                    group[key] = self._initial[name]
        key = self._keys["steps_taken"]
        taken = max((group[key] for group in groups), default=0)
        for group in groups:
            group[key] = taken  # a group that was removed for a while has fallen behind
            group[_METHOD] = self._method

    def drop_foreign_settings(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state dict; of another method's settings keep only rho, seed and steps_taken, and warn."""
        groups = state_dict.get("param_groups", ())  # a base that wraps an optimizer may have none
        found = next((group[_METHOD] for group in groups if _METHOD in group), self._method)
        if found == self._method:
            return state_dict
        warn(f"the checkpoint is of {found}: {self._method} loads only its rho, seed and steps_taken")
        kept = {*self.per_group, "seed", "steps_taken"}
        dropped = {key for name, key in self._keys.items() if name not in kept}
        return {**state_dict, "param_groups": [{k: v for k, v in g.items() if k not in dropped} for g in groups]}

    def update(self) -> None:
        """Fill groups that were added to the base, and give scheduled settings their values at the coming step."""
        self.fill()
        if self._schedules:
            step = self["steps_taken"]
            for name, schedule in self._schedules.items():
                value = _as_python(schedule(step))
                for group in self._base.param_groups:
                    if name != "rho" or not group["own_rho"]:
                        group[self._keys[name]] = value

    def count_step(self) -> None:
        """Increment the step count."""
        for group in self._base.param_groups:
            group[self._keys["steps_taken"]] += 1

    def __str__(self) -> str:
        shown: dict[str, Any] = {}
        if "rho" in self:
            key, initial = self._keys["rho"], self._initial["rho"]
            rho = sorted({group.get(key, initial) for group in self._base.param_groups})
            shown["rho"] = rho[0] if len(rho) == 1 else rho
        for name in self._keys:
            if name != "steps_taken" and name not in self.per_group:
                shown[name] = self._schedules.get(name, self[name])
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


def _as_python(value: Any) -> Any:
    """Convert a numpy number: ``torch.load`` would refuse it in a checkpoint."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)
