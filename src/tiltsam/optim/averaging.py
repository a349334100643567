"""An average of the weights along training: a second way to flat minima, for any optimizer.

    optimizer = tiltsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1))
    average = tiltsam.WeightAverage(model)
    for batch in loader:
        optimizer.step(closure)
        average.update()
    with average.applied():
        torch.optim.swa_utils.update_bn(loader, model)  # if it has BatchNorm
        test(model)

Training is not affected. The cost is a copy of the weights and one pass over them a step.
:class:`torch.optim.swa_utils.AveragedModel` keeps a second model; this swaps the averaged weights into the same model
and back, bit for bit, and averages half-precision weights in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tiltsam.distributed import is_sharded, local_part, reshard
from tiltsam.optim.sharpness_aware import SharpnessAware
from tiltsam.optim.validation import instances
from tiltsam.space.model_state import BufferSnapshot, uninterrupted
from tiltsam.space.validation import check_nonnegative

__all__ = ["WeightAverage"]


class WeightAverage:
    """Average of a model's weights over all updates so far, with most weight on the last ones.

    Update k moves the average by ``(p + 1)/(k + p)`` of the distance to the weights, p being the power (polynomial
    decay, Shamir and Zhang 2013). Update i then has a weight of about ``i**p``, and the mean age is ``1/(p + 2)`` of
    all updates at any time, so the length of training need not be known in advance.

    Args:
        model: The model whose parameters are averaged, trainable or not; on the device where it is trained.
        power: p >= 0; 0 is the plain average of all updates, 8 averages about the last tenth.

    Attributes:
        count: Number of updates.

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

    def __init__(self, model: nn.Module, *, power: float = 8.0) -> None:
        check_nonnegative("power", power)
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        self.model, self.power, self.count = model, float(power), 0
        self._applied = False
        reshard(model)  # otherwise copies that FSDP gathered would be taken for its parameters
        self._parameters = _parameters(model)
        if not self._parameters:
            raise ValueError(f"{type(model).__name__} has no parameters to average")
        # In half precision an average would stop moving: its steps become smaller than the spacing of the numbers.
        self._average = {
            name: p.detach().clone().to(torch.promote_types(p.dtype, torch.float32))
            for name, p in self._parameters.items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights. Call it after every step, not in a closure, where the weights are perturbed.

        Raises:
            RuntimeError: Inside :meth:`applied`, where the weights are the average itself; or if the first call is in
                a closure.
        """
        if self._applied:
            raise RuntimeError("update() must not be called inside applied(), where the weights are the average")
        if self.count == 0:
            self._check_not_perturbed()
        self.count += 1
        if self.count == 1:  # a copy: a mean would keep a NaN from before the weights were loaded
            _write(self._average, self._parameters)
            return
        share = (self.power + 1) / (self.count + self.power)
        average = [local_part(a) for a in self._average.values()]  # FSDP may leave some parameters whole
        weights = [local_part(p).to(a.dtype) for p, a in zip(self._parameters.values(), average, strict=True)]
        torch._foreach_lerp_(average, weights, share)

    def _check_not_perturbed(self) -> None:
        own = {id(p) for p in self._parameters.values()}
        for optimizer in instances(SharpnessAware):
            stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if optimizer.is_perturbed and not own.isdisjoint(stepped):
                raise RuntimeError("update() must be called after step(): in the closure the weights are perturbed")

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Give the model its averaged weights inside; restore its own and its buffers on exit, bit for bit.

        Before the first update the weights stay as they are.

        Raises:
            RuntimeError: If the model's parameters have been replaced.
        """
        reshard(self.model)  # FSDP must not reuse copies gathered of other weights
        found = _parameters(self.model)
        if found.keys() != self._parameters.keys() or any(found[name] is not p for name, p in self._parameters.items()):
            raise RuntimeError(
                "the model's parameters have been replaced: make the WeightAverage after the model is complete, "
                "sharded or loaded with assign=True"
            )
        own = {name: p.detach().clone() for name, p in self._parameters.items()}
        already, failed = self._applied, False
        buffers = BufferSnapshot()
        buffers.save(self.model.modules())

        def restore() -> None:
            _write(self._parameters, own)
            buffers.restore()
            reshard(self.model, after_error=failed)
            self._applied = already

        try:
            self._applied = True
            if self.count:
                _write(self._parameters, self._average)
            yield self.model
            restore()
        except BaseException:  # also an interrupt in restore itself, which may be repeated
            failed = True
            uninterrupted(restore)
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; the tensors are the average's own."""
        return {"count": self.count, "power": self.power, "average": dict(self._average)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state dict of a model with the same parameter names and shapes, and of the same power.

        Raises:
            ValueError: If names, shapes or the power differ, or if sharded weights are those of another rank.
        """
        if "average" not in state:
            raise ValueError(f"state must be that of a WeightAverage, got the keys {', '.join(list(state)[:3])}")
        loaded = state["average"]
        shapes = [{name: tuple(a.shape) for name, a in each.items()} for each in (loaded, self._average)]
        if shapes[0] != shapes[1]:
            raise ValueError("names or shapes of the averaged parameters differ from those of the model")
        if state["power"] != self.power:
            raise ValueError(f"power must be {self.power}, got a state of power {state['power']}")
        if any(_part(a) != _part(self._average[name]) for name, a in loaded.items() if is_sharded(a)):
            raise ValueError(
                "the state has another rank's parts of the averaged weights: save and load it by "
                "torch.distributed.checkpoint"
            )
        self.count = int(state["count"])
        _write(self._average, loaded)


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that can be averaged, by name."""
    return {name: p for name, p in model.named_parameters() if p.is_floating_point() or p.is_complex()}


def _part(a: Any) -> list[int] | None:
    """Return which part of a sharded tensor this is, by its rank in each dimension of the mesh."""
    return list(a.device_mesh.get_coordinate()) if is_sharded(a) else None


def _write(places: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, place in places.items():
        place.detach().copy_(values[name].detach())  # an interrupted no_grad() would leave gradients disabled
