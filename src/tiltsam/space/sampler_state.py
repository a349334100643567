"""Vectors that a sampler keeps between steps, saved in checkpoints next to the base optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tiltsam.distributed import local_part
from tiltsam.space.tensor_lists import as_real
from tiltsam.space.validation import warn

__all__ = ["SamplerState"]

_PREFIX = "tilt_"  # no base uses entries of this prefix


class SamplerState:
    """Vectors over the parameters, zero at first.

    In a state dict they are entries ``tilt_<name>`` of each parameter's state, sharded as the parameter is. They are
    kept out of ``base.state``: a base treats an empty state as a new parameter and fails on one that holds only our
    entries.

    Args:
        names: Names of the vectors.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        self._vectors: dict[Tensor, dict[str, Tensor]] = {}
        self._before: list[Tensor] = []

    def check_base(self, base: Optimizer) -> None:
        """Raise TypeError if there are vectors and the base's state dict has no place for them."""
        if self.names and "state" not in base.state_dict():
            raise TypeError(
                f"{type(base).__name__} cannot be the base of a method that keeps {', '.join(self.names)} between "
                'steps: its state_dict() has no "state"'
            )

    def allocate(self, params: Sequence[Tensor]) -> None:
        """Allocate missing vectors over these parameters."""
        for p in params if self.names else ():
            vectors = self._vectors.setdefault(p, {})
            for name in self.names:
                if name not in vectors:
                    vectors[name] = torch.zeros_like(p, requires_grad=False)
                elif (vectors[name].device, vectors[name].dtype) != (p.device, p.dtype):
                    vectors[name] = vectors[name].to(p.device, p.dtype)

    def vector(self, name: str, params: Sequence[Tensor]) -> list[Tensor]:
        """Return a vector over these parameters, as a vector of a space."""
        if name not in self.names:
            raise LookupError(f"the sampler keeps no vector {name!r}: write state_names = ({name!r},)")
        return [as_real(local_part(self._vectors[p][name])) for p in params]

    def tensors(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of all vectors over these parameters."""
        return [x for name in self.names for x in self.vector(name, params)]

    def begin_step(self, params: Sequence[Tensor]) -> None:
        """Save the vectors for :meth:`roll_back`."""
        here = self.tensors(params)
        if [(x.shape, x.dtype, x.device) for x in self._before] != [(x.shape, x.dtype, x.device) for x in here]:
            self._before = [torch.empty_like(x) for x in here]
        for saved, x in zip(self._before, here, strict=True):
            saved.copy_(x)

    def roll_back(self, params: Sequence[Tensor]) -> None:
        """Restore the vectors of :meth:`begin_step`; safe to repeat."""
        for x, saved in zip(self.tensors(params), self._before, strict=True):
            x.copy_(saved)

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self, base: Optimizer) -> dict[str, Any]:
        """Return the base's state dict with the vectors added to the parameters' states."""
        saved: dict[str, Any] = base.state_dict()
        if not self.names:
            return saved  # a base that wraps an optimizer may have a state dict of another form
        state = dict(saved["state"])
        numbered = _numbered_params(saved, base)
        self.allocate([p for _, p in numbered if p.requires_grad])  # loaders read which entries exist
        for i, p in numbered:
            entries = {_PREFIX + name: value for name, value in self._vectors.get(p, {}).items()}
            if entries:
                state[i] = {**state.get(i, {}), **entries}
        return {**saved, "state": state}

    def load_state_dict(self, base: Optimizer, saved: dict[str, Any]) -> None:
        """Let the base load its own entries and copy the vectors, in place; a vector that is missing becomes zero."""
        if "state" not in saved:
            base.load_state_dict(saved)
            return
        split = {i: _split(state) for i, state in saved["state"].items()}
        base.load_state_dict(
            {**saved, "state": {i: theirs for i, (theirs, ours) in split.items() if theirs or not ours}}
        )
        started = any(group.get("steps_taken") for group in saved["param_groups"])
        missing = [n for n in self.names if not any(_PREFIX + n in ours for _, ours in split.values())]
        if started and missing:
            warn(
                f"the checkpoint has no {', '.join(missing)}: the sampler starts from zero. Save the state dict of the "
                "method, not of its base, and without flatten_optimizer_state_dict, which drops these vectors"
            )
        for i, p in _numbered_params(saved, base) if self.names else ():
            for name in self.names:
                value = split[i][1].get(_PREFIX + name) if i in split else None
                if value is not None:
                    vectors = self._vectors.setdefault(p, {})
                    vectors.setdefault(name, torch.empty_like(p, requires_grad=False)).copy_(value)
                elif name in self._vectors.get(p, {}):
                    self._vectors[p][name].zero_()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_before": []}  # saved again at the next step


def _numbered_params(saved: dict[str, Any], base: Optimizer) -> list[tuple[Any, Tensor]]:
    """Return each parameter with its key in the state dict."""
    groups = zip(saved["param_groups"], base.param_groups, strict=True)
    return [pair for theirs, ours in groups for pair in zip(theirs["params"], ours["params"], strict=True)]


def _split(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Split the state of a parameter into the base's entries and ours."""
    if not isinstance(state, dict):
        return state, {}
    ours = {k: v for k, v in state.items() if isinstance(k, str) and k.startswith(_PREFIX)}
    return {k: v for k, v in state.items() if k not in ours}, ours
