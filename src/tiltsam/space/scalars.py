"""Numeric settings on the device, written by the host and read by kernels, so that a graph can be replayed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["DeviceScalars"]


class DeviceScalars:
    """Numeric settings: named 0-dim tensors, and one ``rho`` per parameter group.

    Args:
        num_groups: Number of parameter groups.
        dtype: Dtype of the settings.
        device: Device of the settings.
    """

    def __init__(self, num_groups: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._values: dict[str, float] = {}
        self.tensors: dict[str, Tensor] = {}
        """The settings by name."""
        self._rho_values = [0.0] * num_groups
        self._rho = torch.zeros(num_groups, dtype=dtype, device=device)
        self.rho = self._rho[0]
        """``rho``: a 0-dim tensor if all groups agree, so that one kernel serves them all; else one entry per group."""
        self.ascending = False
        """Whether any ``rho`` is nonzero."""
        self.unperturbed: frozenset[int] = frozenset()
        """The groups whose ``rho`` is 0 while that of others is not."""
        self.noisy = False
        """Whether the radius is nonzero."""
        self.set("radius", 0.0)

    def set(self, name: str, value: float) -> None:
        """Write a setting, clamped to the range of the dtype. Fills in place, so it never waits for the device."""
        value = min(value, torch.finfo(self.dtype).max)
        if name not in self.tensors:
            self.tensors[name] = torch.full((), value, dtype=self.dtype, device=self.device)
        elif self._values[name] != value:
            self.tensors[name].fill_(value)
        self._values[name] = value
        self.noisy = self._values["radius"] != 0

    def set_rho(self, values: Sequence[float]) -> None:
        """Write one ``rho`` per parameter group."""
        for g, value in enumerate(values):
            if value != self._rho_values[g]:
                self._rho[g].fill_(value)
        self._rho_values = list(values)
        self.rho = self._rho[0] if len(set(values)) == 1 else self._rho
        self.ascending = any(values)
        self.unperturbed = frozenset(g for g, value in enumerate(values) if self.ascending and not value)

    def structure(self) -> tuple[bool, bool, bool, frozenset[int]]:
        """Return what Python branches depend on: steps in which it is equal may share a captured graph."""
        return self.noisy, self.ascending, self.rho.dim() == 0, self.unperturbed
