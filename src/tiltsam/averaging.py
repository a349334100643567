"""An average of the weights along training: a second way to flat minima, beside any optimizer.

    optimizer = tiltsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1))
    average = tiltsam.WeightAverage(model)
    for batch in loader:
        optimizer.step(closure)
        average.update()
    with average.applied():
        torch.optim.swa_utils.update_bn(loader, model)  # where it has BatchNorm
        test(model)

Training does not notice it. It costs a copy of the weights, and one walk over them a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tiltsam.buffers import KeptBuffers, to_the_end
from tiltsam.checks import check_nonnegative
from tiltsam.distributed import reshard

__all__ = ["WeightAverage"]


class WeightAverage:
    """The average of a model's weights over all updates so far, of which the last ones count most.

    Update k moves it by ``(p + 1)/(k + p)`` of the way to the weights, p being the power (polynomial decay, Shamir and
    Zhang 2013). Those of update i then count about as ``i**p``, and have a mean age of ``1/(p + 2)`` of all updates at
    any time: nobody has to know beforehand when training ends.

    Args:
        model: Whose parameters are averaged, trainable or not; complete, and on the device where it is trained.
        power: p >= 0; 0 is the plain average of all updates, 8 one of about the last tenth.

    Attributes:
        count: How many updates there were.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> average = WeightAverage(model, power=0)
        >>> for value in (1.0, 2.0, 6.0):
        ...     _ = nn.init.constant_(model.weight, value)
        ...     average.update()
        >>> with average.applied():
        ...     print(model.weight.item())
        3.0
        >>> model.weight.item()
        6.0
    """

    def __init__(self, model: nn.Module, power: float = 8.0) -> None:
        check_nonnegative("power", power)
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        self.model, self.power, self.count = model, float(power), 0
        self._applied = False
        reshard(model)  # or the copies that FSDP gathered would be taken for its parameters
        self._parameters = _parameters(model)
        if not self._parameters:
            raise ValueError(f"{type(model).__name__} has no parameters to average")
        # In half precision an average would stop moving: its steps become smaller than the spacing of the numbers.
        self._average = {name: p.detach().clone().to(_wide(p.dtype)) for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are; call it after every step, not in a closure, where they are perturbed.

        Raises:
            RuntimeError: Inside :meth:`applied`, where they are the average itself.
        """
        if self._applied:
            raise RuntimeError(
                "the model has its averaged weights: update() belongs after a step, outside of applied()"
            )
        self.count += 1
        if self.count == 1:  # all the way: a mean would keep the NaN that weights may have been before they were loaded
            _write(self._average, self._parameters)
            return
        share = (self.power + 1) / (self.count + self.power)
        average = list(self._average.values())
        weights = [p.to(a.dtype) for p, a in zip(self._parameters.values(), average, strict=True)]
        torch._foreach_lerp_(average, weights, share)

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """The model with the averaged weights; afterwards it has its own, and its buffers as they were, bit for bit.

        Before the first update they are its own.

        Raises:
            RuntimeError: If parameters of the model are not those it had at first.
        """
        reshard(self.model)  # or FSDP would go on with the copies it gathered of other weights
        found = _parameters(self.model)
        if found.keys() != self._parameters.keys() or any(found[name] is not p for name, p in self._parameters.items()):
            raise RuntimeError(
                "the model has other parameters than its WeightAverage: make one after the model is complete, sharded "
                "or loaded with assign=True"
            )
        own = {name: p.detach().clone() for name, p in self._parameters.items()}
        already = self._applied
        buffers = KeptBuffers()
        buffers.keep(self.model.modules())

        def give_back() -> None:
            _write(self._parameters, own)
            buffers.put_back()
            reshard(self.model)
            self._applied = already

        try:
            self._applied = True
            if self.count:
                _write(self._parameters, self._average)
            yield self.model
            give_back()
        except BaseException:  # also an interrupt in give_back itself, which may be repeated
            to_the_end(give_back)
            raise

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs; the tensors are the average's own."""
        return {"count": self.count, "power": self.power, "average": dict(self._average)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint.

        Args:
            state: What :meth:`state_dict` gave, of a model with parameters of the same names and shapes and of the
                same power.

        Raises:
            ValueError: If they are others.
        """
        loaded = state["average"]
        shapes = [{name: tuple(a.shape) for name, a in each.items()} for each in (loaded, self._average)]
        if shapes[0] != shapes[1]:
            raise ValueError("the state is that of another model: names or shapes of its parameters differ")
        if state["power"] != self.power:
            raise ValueError(f"the state is that of an average of power {state['power']}, not {self.power}")
        self.count = int(state["count"])
        _write(self._average, loaded)


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Those that can be averaged, by name."""
    return {name: p for name, p in model.named_parameters() if p.is_floating_point() or p.is_complex()}


def _write(places: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, place in places.items():
        place.detach().copy_(values[name].detach())  # an interrupted no_grad() would leave gradients switched off


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
