"""The numbers of a step (rho, radius, tilt and a method's own), kept where the kernels read them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["DeviceSettings"]


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
