"""The numbers of a step (rho, radius, tilt and a method's own): where users write them, and where kernels read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["DeviceSettings", "GroupSettings", "Schedule", "default_radius"]

Schedule: TypeAlias = Callable[[int], float]
"""A value as a function of the step, 0 at the first; see :mod:`tiltsam.tilting` for ready ones."""


def default_radius(dim: int) -> float:
    """Of the ball that random starts are drawn from: 0.003 √d, 10 for a ResNet-18.

    The paper's 20 there is 0.006 √d, which did no better, and fine-tuning a transformer worse (docs/evidence.md).

    Args:
        dim: The number d of trainable coordinates.
    """
    return 0.003 * math.sqrt(dim)


class GroupSettings:
    """A method's settings as entries of the base's parameter groups, so that checkpoints and users find them there.

    Where the base already uses a name, the entry is called ``tilt_<name>``. ``rho`` may differ between groups, and an
    entry ``own_rho`` says which of them brought theirs; the others are one value for the whole step.

    Args:
        base: The optimizer whose groups they live in.
        initial: Their names and initial values; a callable is a schedule.
        per_group: Those that may differ between groups.
    """

    def __init__(self, base: Optimizer, initial: Mapping[str, Any], per_group: frozenset[str]) -> None:
        if "rho" in initial:
            initial = {"own_rho": False, **initial}  # ahead of rho: who brought one is asked before all are given one
        for name, value in initial.items():
            if isinstance(value, torch.nn.Module):
                raise TypeError(f"{name} is a model ({type(value).__name__}): write model=, by name")
        self._base, self._per_group = base, per_group
        self._schedules: dict[str, Schedule] = {name: value for name, value in initial.items() if callable(value)}
        self._initial = {name: _plain(value(0) if callable(value) else value) for name, value in initial.items()}
        self._keys = {name: f"tilt_{name}" if name in base.defaults else name for name in initial}
        self._forget_last_method()
        for group in base.param_groups:  # or the others would follow what group 0 brought
            for name, key in self._keys.items():
                if name not in per_group and name != "steps_taken":
                    group.setdefault(key, self._initial[name])
        self.fill()

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def __getitem__(self, name: str) -> Any:
        """A setting that is one value for the whole step."""
        key = self._keys[name]
        first, *others = self._base.param_groups
        value = first.get(key, self._initial[name])
        for group in others:
            if group.get(key, value) != value:
                raise ValueError(
                    f"{key} is one number for the whole step, but parameter groups have {value} and {group[key]}"
                )
        return value

    def in_groups(self, name: str) -> list[Any]:
        """A setting, group by group."""
        return [group[self._keys[name]] for group in self._base.param_groups]

    def entries(self) -> frozenset[str]:
        """What they are called in the groups."""
        return frozenset(self._keys.values())

    def _forget_last_method(self) -> None:
        """Of a method that wrapped the base before, keep how many steps were taken and the groups' own rho."""
        for group in self._base.param_groups:
            if self._keys["steps_taken"] not in group:
                continue
            for name, key in self._keys.items():
                if name not in ("own_rho", "steps_taken") and (name != "rho" or group.get("own_rho") is False):
                    group.pop(key, None)

    def fill(self, before: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Give groups that lack a setting its initial value; global ones follow group 0, which may have moved on.

        Numbers that were written into the groups become Python's own.

        Args:
            before: The groups as they were before a state was loaded: their values then count as initial.
        """
        groups = self._base.param_groups
        for i, group in enumerate(groups):
            for name, key in self._keys.items():
                if key not in group:
                    known = group if name in self._per_group else groups[0]
                    if before is not None:
                        value = before[i][key]
                    else:
                        value = self._keys["rho"] in group if name == "own_rho" else self._initial[name]
                    group[key] = known.get(key, value)
                elif type(group[key]) not in _PLAIN:
                    group[key] = _plain(group[key])
        key = self._keys["steps_taken"]
        taken = max((group[key] for group in groups), default=0)
        for group in groups:
            group[key] = taken  # one that was taken out for a while has fallen behind

    def follow_schedules(self) -> None:
        """Give scheduled settings their values at the coming step, but no group a rho that brought its own."""
        step = self["steps_taken"]
        for name, schedule in self._schedules.items():
            for group in self._base.param_groups:
                if name != "rho" or not group["own_rho"]:
                    group[self._keys[name]] = _plain(schedule(step))

    def count_step(self) -> None:
        """One more step was taken."""
        for group in self._base.param_groups:
            group[self._keys["steps_taken"]] += 1

    def __str__(self) -> str:
        shown: dict[str, Any] = {}
        if "rho" in self:
            key, initial = self._keys["rho"], self._initial["rho"]
            rho = sorted({_plain(group.get(key, initial)) for group in self._base.param_groups})
            shown["rho"] = rho[0] if len(rho) == 1 else rho
        for name in self._keys:
            if name != "steps_taken" and name not in self._per_group:
                shown[name] = self._schedules.get(name, _plain(self[name]))
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


_PLAIN = frozenset({bool, int, float, type(None)})  # looked up for each group at each step: no need to ask further


def _plain(value: Any) -> Any:
    """A number as Python's own: ``torch.load`` would refuse one of numpy's in a checkpoint."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


class DeviceSettings:
    """Numbers that the host writes before a step and kernels read from the device, so that a graph can be replayed.

    Args:
        num_groups: How many parameter groups there are, each with a ``rho`` of its own.
        dtype: Of the numbers.
        device: Where they lie.
    """

    def __init__(self, num_groups: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._scalars: dict[str, tuple[float, Tensor]] = {}
        self._rho = torch.zeros(num_groups, dtype=dtype, device=device)
        self._rho_values: list[float] = [0.0] * num_groups
        self.ascending = False
        self.set_radius(0.0)

    def set(self, name: str, value: float) -> None:
        """Put a number on the device, if it is not there already (a fill, never a copy that would wait).

        One beyond the range of the dtype counts as the end of that range.
        """
        value = min(value, torch.finfo(self.dtype).max)
        known = self._scalars.get(name)
        if known is None:
            self._scalars[name] = (value, torch.full((), value, dtype=self.dtype, device=self.device))
        elif known[0] != value:
            known[1].fill_(value)
            self._scalars[name] = (value, known[1])

    def setting(self, name: str) -> Tensor:
        """The number on the device."""
        if name not in self._scalars:
            known = ", ".join(sorted(self._scalars))
            raise LookupError(f"the method has no setting {name!r} that is a number; it has {known}")
        return self._scalars[name][1]

    def set_rho(self, values: list[float]) -> None:
        """One rho per parameter group."""
        for g, value in enumerate(values):
            if value != self._rho_values[g]:
                self._rho[g].fill_(value)
        self._rho_values = list(values)
        self.ascending = any(value != 0 for value in values)

    @property
    def rho(self) -> Tensor:
        """See :class:`Space`. A scalar where all groups agree, so that one kernel serves them all."""
        return self._rho[0] if len(set(self._rho_values)) == 1 else self._rho

    def set_radius(self, value: float) -> None:
        """The radius of the neighbourhood."""
        self.set("radius", value)
        self.noisy = value != 0

    @property
    def radius(self) -> Tensor:
        """See :class:`Space`."""
        return self.setting("radius")

    @property
    def delta(self) -> Tensor:
        """See :class:`Space`."""
        return self.setting("delta")

    def shape_of_settings(self) -> tuple[bool, bool, bool]:
        """What the host knows of the numbers, and decides by: is there noise, is there ascent, does rho differ."""
        return self.noisy, self.ascending, len(set(self._rho_values)) > 1
