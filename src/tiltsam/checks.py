"""Arguments that cannot be right, refused in words that say what to write instead."""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from tiltsam.distributed import Parallel, World, local_part
from tiltsam.warning import warn

__all__ = [
    "NEEDS_CLOSURE",
    "NEEDS_SCALER",
    "changes_nothing",
    "check_automatic",
    "check_base",
    "check_count",
    "check_gradient",
    "check_kept",
    "check_kind",
    "check_minimizes",
    "check_model",
    "check_nonnegative",
    "check_parallel",
    "check_sampler",
    "check_seed",
    "check_storage",
    "warn_low_precision",
    "warn_missing_model",
    "warn_missing_scaler",
]

_T = TypeVar("_T")

NEEDS_CLOSURE = """{name}.step() needs a closure, because it evaluates the loss at several points of one step. Write:

    def closure():
        loss = criterion(model(inputs), targets)
        loss.backward()
        return loss

    loss = optimizer.step(closure)

To accumulate gradients, loop over micro-batches inside the closure: a step clears those it finds."""

NEEDS_SCALER = """scaler.step(optimizer, ...) cannot step {name}, which runs several passes a step. Write:

    def closure():
        with torch.autocast("cuda", torch.float16):
            loss = criterion(model(inputs), targets)
        scaler.scale(loss).backward()
        return loss

    loss = optimizer.step(closure, scaler=scaler)
    scaler.update()"""


def check_nonnegative(name: str, value: Any) -> None:
    """Raise unless ``value`` is a finite number >= 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")


def check_count(name: str, value: Any) -> None:
    """Raise unless ``value`` is an integer >= 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}")


def check_seed(seed: Any) -> None:
    """Raise unless ``seed`` is an integer >= 0."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be an integer >= 0, got {seed!r}")


def check_base(base: Any, name: str, engine: type[Optimizer]) -> None:
    """Raise unless a method can wrap ``base``.

    Args:
        base: What was given.
        name: The method's.
        engine: The class of all methods, which do not wrap each other.
    """
    if isinstance(base, type):
        raise TypeError(
            f"{name} wraps an instance, got the class {base.__name__}: write {name}({base.__name__}(params, ...), ...)"
        )
    if isinstance(base, engine):
        raise TypeError(f"{name} cannot wrap {type(base).__name__}, which is sharpness-aware itself: wrap its base")
    if not isinstance(base, Optimizer):
        raise TypeError(
            f"base must be a torch.optim.Optimizer instance, got {type(base).__name__}: write "
            f"{name}(torch.optim.SGD(model.parameters(), lr=0.1), ...)"
        )
    if isinstance(base, torch.optim.LBFGS):
        raise TypeError(f"{name} cannot wrap LBFGS: it evaluates the closure itself, several times a step")


def check_minimizes(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise if the base climbs the loss: the neighbours that a method looks for are the best ones then, not the worst.

    Args:
        groups: The base's parameter groups.
    """
    if any(group.get("maximize") for group in groups):
        raise ValueError(
            "maximize=True would seek the sharpest maximum: leave it out, and let the closure run backward on the "
            "negative of the objective and return that"
        )


def changes_nothing(param_groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a step of the base would leave all weights alone, and only make its state.

    So ``torch.distributed.checkpoint`` calls ``step()`` before it loads: rates and gradients are zero.
    """
    gradients = [p.grad for group in param_groups for p in group["params"] if p.grad is not None]
    rates = [group["lr"] for group in param_groups if "lr" in group]
    return bool(gradients) and not any(rates) and not any(local_part(g).any() for g in gradients)


def check_automatic(closure: Any, name: str) -> None:
    """Raise if Lightning's automatic optimization made the closure: it clips and calls hooks at every pass."""
    made_by = getattr(closure.func, "__module__", None) if isinstance(closure, partial) else None
    if (made_by or "").split(".")[0] not in ("lightning", "pytorch_lightning"):
        return
    for module in closure.args[:1]:
        if getattr(module, "automatic_optimization", False):
            raise RuntimeError(
                f"Lightning would clip and call hooks at every pass of {name}: write class {type(module).__name__}("
                "SharpnessAwareMixin, LightningModule), from tiltsam.integrations.lightning, and end an optimizer_step "
                "of your own in super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)"
            )


def check_model(model: Any, base: Optimizer) -> None:
    """Raise unless ``model`` is one, or ``None``; warn if all that ``base`` trains is outside what it could train."""
    if model is None:
        return
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    inside = {id(p) for p in model.parameters() if p.requires_grad}
    if inside and inside.isdisjoint(id(p) for group in base.param_groups for p in group["params"]):
        warn(
            "none of the optimizer's parameters is one of model=: is that another copy of the model?",
            RuntimeWarning,
        )


def check_parallel(parallel: Any) -> None:
    """Raise unless ``parallel`` is one, or ``None``."""
    if parallel is not None and not isinstance(parallel, Parallel):
        raise TypeError(f"parallel must be a tiltsam.Parallel or None, got {type(parallel).__name__}")


def check_sampler(sampler: Any) -> None:
    """Raise unless ``sampler`` can be one."""
    if isinstance(sampler, type):
        raise TypeError(f"sampler must be an instance, got the class {sampler.__name__}: write {sampler.__name__}()")
    name = type(sampler).__name__
    needed = ("begin", "sample", "tilted", "independent", "scale_free")
    if missing := [part for part in needed if not hasattr(sampler, part)]:
        raise TypeError(f"{name} is no sampler: it lacks {', '.join(missing)} (see tiltsam.samplers.Sampler)")
    if isinstance(keeps := getattr(sampler, "keeps", ()), str):
        raise TypeError(f"{name}.keeps must be a tuple of names, got {keeps!r}: write ({keeps!r},)")
    if keeps and sampler.independent:
        raise ValueError(f"{name} keeps vectors, so that its samples cannot be drawn apart: say independent = False")
    try:
        hash(sampler)
    except TypeError:
        raise TypeError(
            f"{name} cannot be hashed, so that nobody would notice if it changed: write @dataclass(frozen=True), with "
            "fields that can be"
        ) from None


def check_kept(names: Sequence[str], world: World) -> None:
    """Raise if every rank would keep vectors of its own, of which a checkpoint holds one."""
    if names and world.local_ascent:
        raise ValueError(f"ascent='local' would make each rank keep another {', '.join(names)}: leave it out")


def check_gradient(gradient: Sequence[Tensor | None]) -> None:
    """Raise if the closure left no gradient at all."""
    if all(g is None for g in gradient):
        raise RuntimeError(
            "the closure left no gradient on any trainable parameter: it has to call loss.backward() on a loss of "
            "the optimizer's own parameters, not of a copy (fully_shard makes new ones: make the optimizer after it), "
            "and must not clear the gradients afterwards"
        )


def check_kind(grad: Tensor, dtype: torch.dtype) -> None:
    """Raise unless the gradient of a parameter of that dtype is one of it, and dense."""
    if grad.layout != torch.strided:
        raise TypeError(f"gradients must be dense, got {grad.layout}: build the embedding with sparse=False")
    if grad.dtype != dtype:
        raise TypeError(
            f"a gradient must have the dtype of its parameter, {dtype}, got {grad.dtype}: leave the parameter's "
            "grad_dtype alone"
        )


def check_storage(params: Sequence[Tensor]) -> None:
    """Raise unless each parameter is of real or complex numbers, in memory of its own."""
    seen: dict[tuple[torch.device, int], Tensor] = {}
    for p in params:
        if not p.is_floating_point() and not p.is_complex():
            raise TypeError(f"parameters must be floating point or complex, got {p.dtype}")
        mine = local_part(p)
        if mine.numel() and seen.setdefault((mine.device, mine.data_ptr()), p) is not p:
            raise ValueError(
                f"two parameters of shape {tuple(p.shape)} share memory, so each would be perturbed twice: tie weights "
                "by using one Parameter object in both places"
            )


def warn_low_precision(params: Sequence[Tensor]) -> None:
    """Warn of weights that a small perturbation hardly moves."""
    low = sorted({str(p.dtype).removeprefix("torch.") for p in params if p.dtype in (torch.bfloat16, torch.float16)})
    if low:
        warn(
            f"weights in {' and '.join(low)}: most coordinates of a small perturbation are lost to rounding. Keep the "
            "weights in float32 and run the model under torch.autocast",
            RuntimeWarning,
        )


def warn_missing_model(params: Sequence[Tensor]) -> None:
    """Warn if a layer of BatchNorm among the parameters moves its statistics at every pass.

    Without ``model=`` the layers are found by the garbage collector, which takes some tens of milliseconds: only where
    two vectors of one shape follow each other, as a layer's weight and bias do.
    """
    if not any(p.dim() == q.dim() == 1 and p.shape == q.shape for p, q in pairwise(params)):
        return
    mine = {id(p) for p in params}
    layers = [
        layer
        for layer in _instances(_BatchNorm)
        if layer.training and layer.running_mean is not None and id(getattr(layer, "weight", None)) in mine
    ]
    if layers:
        warn(
            f"{type(layers[0]).__name__} updates its running statistics at every pass of a step, also at perturbed "
            "weights: pass model=, or buffers_once=False if that is meant",
            RuntimeWarning,
        )


def warn_missing_scaler(loss: Tensor, gradient_norms: Tensor) -> None:
    """Warn if the loss or a gradient is large and a GradScaler has scaled something. Waits for the device.

    What the closure does to its loss cannot be seen from outside, so this is a guess, made at the first step.
    """
    if torch.maximum(loss.abs(), gradient_norms.max()).item() <= _LARGE:
        return
    if any(scaler.is_enabled() and scaler._scale is not None for scaler in _instances(torch.amp.GradScaler)):
        warn(
            f"a loss or gradient above {_LARGE:g}, and a GradScaler is in use: pass scaler= if the closure scales its "
            "loss",
            RuntimeWarning,
        )


_LARGE = 1000.0  # GradScaler begins at a scale of 65536


def _instances(cls: type[_T]) -> list[_T]:
    """All living objects of a class or a subclass, without touching any other object."""
    classes: set[type] = set()
    new: list[type] = [cls]
    while new:
        found = new.pop()
        classes.add(found)
        new += found.__subclasses__()
    return [x for x in gc.get_objects() if type(x) in classes]
