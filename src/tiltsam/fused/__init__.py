"""The Triton backend of :mod:`tiltsam.space`: one kernel for each stage of a sample, over all parameters at once.

:func:`parameter_space` chooses it once, when the space is built; everywhere else the two have the same methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tiltsam.space.parameter_space import ParameterSpace

__all__ = ["parameter_space"]


def parameter_space(groups: Sequence[Sequence[Tensor]], **options: Any) -> ParameterSpace:
    """Return the space over these parameters: with Triton kernels if they can take them, else with torch's.

    Args:
        groups: The parameters by group.
        **options: As for :class:`~tiltsam.space.parameter_space.ParameterSpace`.
    """
    first = next((p for group in groups for p in group if p.requires_grad), None)
    if first is not None and first.is_cuda:
        from tiltsam.fused.fused_space import FusedSpace

        if FusedSpace.supports(groups):
            return FusedSpace(groups, **options)
    return ParameterSpace(groups, **options)
