"""What a captured step has to know of its base: where the learning rate is read, how the state lies in memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["FUSABLE", "arrange_state", "places_of_state", "reads_rate_from_device"]

FUSABLE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)  # fused kernels that take the rate from the device


def reads_rate_from_device(base: Optimizer) -> bool:
    """Whether the base can read its learning rate from the device; if not, a new rate means a new graph."""
    return type(base) in FUSABLE or "capturable" in base.defaults


def arrange_state(base: Optimizer) -> None:
    """The state as fused kernels want it: counters on the device, vectors laid out in memory as their parameters are.

    A state that was loaded has lost the layout: torch keeps the one it was saved in.
    """
    for p, state in base.state.items():
        for name, value in state.items():
            if not isinstance(value, Tensor):
                continue
            if value.dim() == 0:
                state[name] = value.to(p.device)
            elif value.shape == p.shape:
                like = torch.empty_like(p, dtype=value.dtype, requires_grad=False)
                if value.stride() != like.stride():
                    state[name] = like.copy_(value)


def places_of_state(base: Optimizer) -> tuple[int, ...]:
    """Where the vectors of an optimizer's state lie; counters may move to the device when a step is captured."""
    values = (value for state in base.state.values() for value in state.values())
    return tuple(value.data_ptr() for value in values if isinstance(value, Tensor) and value.dim())
