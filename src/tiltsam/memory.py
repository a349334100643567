"""What a sampler keeps from step to step: vectors over the parameters, which checkpoints hold beside the base's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tiltsam import vectors
from tiltsam.distributed import local_part
from tiltsam.warning import warn

__all__ = ["Memory"]

_PREFIX = "tilt_"  # no base's own entry begins so


class Memory:
    """Vectors over the parameters, zero at first.

    In a state dict they are entries ``tilt_<name>`` of each parameter's state, sharded as it is. In the base's own they
    cannot be: a base takes a parameter whose state is empty for a new one, and breaks on a state that holds nothing but
    ours.

    Args:
        names: What the sampler calls them.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        self._kept: dict[Tensor, dict[str, Tensor]] = {}
        self._params: Sequence[Tensor] = ()  # of the present space
        self._before: list[Tensor] = []

    def check_base(self, base: Optimizer) -> None:
        """Raise if vectors are kept and the base's state dict has no place for them."""
        if self.names and "state" not in base.state_dict():
            raise TypeError(
                f"{type(base).__name__} cannot be the base of a method that keeps {', '.join(self.names)} between "
                'steps: its state_dict() has no "state"'
            )

    def fill(self, params: Sequence[Tensor]) -> None:
        """Let every vector be there, over these parameters and where they are."""
        self._params = params
        self._make(params)

    def _make(self, params: Sequence[Tensor]) -> None:
        for p in params if self.names else ():
            mine = self._kept.setdefault(p, {})
            for name in self.names:
                if name not in mine:
                    mine[name] = torch.zeros_like(p, requires_grad=False)
                elif (mine[name].device, mine[name].dtype) != (p.device, p.dtype):
                    mine[name] = mine[name].to(p.device, p.dtype)

    def vector(self, name: str) -> list[Tensor]:
        """One of them, as a vector of a space."""
        if name not in self.names:
            raise LookupError(f"the sampler keeps no {name!r}: name it in keeps, as in keeps = ({name!r},)")
        return [vectors.real(local_part(self._kept[p][name])) for p in self._params]

    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [x for name in self.names for x in self.vector(name)]

    def begin_step(self) -> None:
        """Save the vectors, for :meth:`roll_back`."""
        here = self.tensors()
        if [(x.shape, x.dtype, x.device) for x in self._before] != [(x.shape, x.dtype, x.device) for x in here]:
            self._before = [torch.empty_like(x) for x in here]
        for kept, x in zip(self._before, here, strict=True):
            kept.copy_(x)

    def roll_back(self) -> None:
        """Restore the vectors saved by :meth:`begin_step`; safe to repeat."""
        for x, kept in zip(self.tensors(), self._before, strict=True):
            x.copy_(kept)

    # ---------------------------------------------------------------- checkpoints

    def save(self, base: Optimizer) -> dict[str, Any]:
        """The state dict of the base, and in it what is kept."""
        saved: dict[str, Any] = base.state_dict()
        if not self.names:
            return saved  # of any form: that of a base around another optimizer may have no "state"
        state = dict(saved["state"])
        numbered = _numbered(saved, base)
        self._make([p for _, p in numbered if p.requires_grad])  # what loads a checkpoint asks what there is
        for i, p in numbered:
            entries = {_PREFIX + name: value for name, value in self._kept.get(p, {}).items()}
            if entries:
                state[i] = {**state.get(i, {}), **entries}
        return {**saved, "state": state}

    def load(self, base: Optimizer, saved: dict[str, Any]) -> None:
        """Let the base load what is its own, and take over what was kept; of that zero is what is not there.

        In place: a captured step knows its vectors by their addresses.
        """
        if "state" not in saved:
            base.load_state_dict(saved)
            return
        apart = {i: _apart(state) for i, state in saved["state"].items()}
        base.load_state_dict(
            {**saved, "state": {i: theirs for i, (theirs, ours) in apart.items() if theirs or not ours}}
        )
        begun = any(group.get("steps_taken") for group in saved["param_groups"])  # by one of ours, not by the bare base
        if begun and (gone := [n for n in self.names if not any(_PREFIX + n in ours for _, ours in apart.values())]):
            told = f"the checkpoint holds no {', '.join(gone)}, which the sampler keeps from step to step"
            warn(f"{told}: it begins at zero", RuntimeWarning)  # whoever called load_state_dict
        for i, p in _numbered(saved, base) if self.names else ():
            for name in self.names:
                value = apart[i][1].get(_PREFIX + name) if i in apart else None
                if value is not None:
                    mine = self._kept.setdefault(p, {})
                    mine.setdefault(name, torch.empty_like(p, requires_grad=False)).copy_(value)
                elif name in self._kept.get(p, {}):
                    self._kept[p][name].zero_()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_params": (), "_before": []}  # what is found again at the next step


def _numbered(saved: dict[str, Any], base: Optimizer) -> list[tuple[Any, Tensor]]:
    """The parameters, each with what stands for it in a state dict."""
    groups = zip(saved["param_groups"], base.param_groups, strict=True)
    return [pair for theirs, ours in groups for pair in zip(theirs["params"], ours["params"], strict=True)]


def _apart(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """What is the base's own in the state of a parameter, and what is ours."""
    if not isinstance(state, dict):
        return state, {}
    ours = {k: v for k, v in state.items() if isinstance(k, str) and k.startswith(_PREFIX)}
    return {k: v for k, v in state.items() if k not in ours}, ours
