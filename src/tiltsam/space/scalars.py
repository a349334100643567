"""Numbers of a step on the device, written by the host and read by kernels, so that a graph can be replayed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["DeviceScalars"]


class DeviceScalars:
    """Named 0-dim tensors, and one ``rho`` per parameter group.

    Args:
        num_groups: Number of parameter groups.
        dtype: Dtype of the numbers.
        device: Device of the numbers.
    """

    def __init__(self, num_groups: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._values: dict[str, float] = {}
        self._tensors: dict[str, Tensor] = {}
        self._rho_values = [0.0] * num_groups
        self._rho = torch.zeros(num_groups, dtype=dtype, device=device)
        self.set("radius", 0.0)

    def set(self, name: str, value: float) -> None:
        """Write a number, clamped to the range of the dtype. Fills in place, so it never waits for the device."""
        value = min(value, torch.finfo(self.dtype).max)
        if name not in self._tensors:
            self._tensors[name] = torch.full((), value, dtype=self.dtype, device=self.device)
        elif self._values[name] != value:
            self._tensors[name].fill_(value)
        self._values[name] = value

    def __getitem__(self, name: str) -> Tensor:
        """Return a number on the device."""
        if name not in self._tensors:
            raise LookupError(f"the method has no number {name!r}; it has {', '.join(sorted(self._tensors))}")
        return self._tensors[name]

    def set_rho(self, values: Sequence[float]) -> None:
        """Write one ``rho`` per parameter group."""
        for g, value in enumerate(values):
            if value != self._rho_values[g]:
                self._rho[g].fill_(value)
        self._rho_values = list(values)

    @property
    def rho(self) -> Tensor:
        """``rho``; a 0-dim tensor if all groups agree, so that one kernel serves them all."""
        return self._rho[0] if self.same_rho else self._rho

    @property
    def same_rho(self) -> bool:
        """Whether all groups have the same ``rho``."""
        return self._rho_values.count(self._rho_values[0]) == len(self._rho_values)

    @property
    def ascending(self) -> bool:
        """Whether any ``rho`` is nonzero."""
        return any(self._rho_values)

    @property
    def noisy(self) -> bool:
        """Whether the radius is nonzero."""
        return self._values["radius"] != 0

    def structure(self) -> tuple[bool, bool, bool]:
        """Return what the host decides by: equal structures may share a captured graph."""
        return self.noisy, self.ascending, self.same_rho
