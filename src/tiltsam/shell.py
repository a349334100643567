"""A torch optimizer around another, and one with it in all that schedulers, hooks and checkpoints look at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from tiltsam.memory import Memory
from tiltsam.settings import GroupSettings

__all__ = ["Shell"]


class Shell(Optimizer):
    """An optimizer whose groups and state are those of another; settings of its own are entries of these groups.

    Args:
        base: The optimizer inside.
        settings: Own settings and their initial values, see :class:`~tiltsam.settings.GroupSettings`.
        per_group: Those that may differ between groups.
        memory: Vectors that are kept beside the base's state.
    """

    def __init__(self, base: Optimizer, settings: Mapping[str, Any], per_group: frozenset[str], memory: Memory) -> None:
        self.base = base
        self._memory = memory
        memory.check_base(base)
        # Optimizer.__init__ would build groups and state of its own; torch's unpickling path sets up the rest of what
        # an Optimizer is (hooks, the profiled step) around ours.
        Optimizer.__setstate__(self, {"defaults": {**base.defaults}})
        self._zero_grad_profile_name = f"Optimizer.zero_grad#{type(self).__name__}.zero_grad"
        self._settings = GroupSettings(base, settings, per_group)

    def check_settings(self) -> None:
        """Called when groups have changed; raises on a value out of bounds."""

    def setting(self, name: str) -> Any:
        """A setting that is one value for the whole step, as it stands in the parameter groups."""
        return self._settings[name]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The base's parameter groups."""
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.base.param_groups = value

    @property
    def state(self) -> Any:
        """The base's state."""
        return self.base.state

    @state.setter
    def state(self, value: Any) -> None:
        self.base.state = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base, with this method's settings where it does not bring its own."""
        self.base.add_param_group(param_group)
        try:
            self._settings.fill()
            self.check_settings()
        except Exception:
            self.param_groups.pop()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients. Never needed: a step clears them before each pass."""
        self.base.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The base's state and what the sampler keeps, the groups carrying this method's settings and step count.

        It has the form of the base's own, whatever that is.
        """
        self._settings.fill()
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state = self._memory.save(self.base)
        for post in self._optimizer_state_dict_post_hooks.values():
            replaced = post(self, state)
            state = state if replaced is None else replaced
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, or a checkpoint of the bare base (own settings then stay as they are).

        One of another method brings the settings that both have, as a rate comes with any: SAM then has ASAM's rho.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        self._settings.fill()
        before = [dict(group) for group in self.param_groups]
        self._memory.load(self.base, state_dict)
        self._settings.fill(before)
        for post in self._optimizer_load_state_dict_post_hooks.values():
            post(self)
        self.check_settings()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings},\n  base={self.base!r})"
