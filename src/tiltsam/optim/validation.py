"""Checks of what users pass to a method, with messages that show what to write."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from tiltsam.distributed import Parallel, local_part
from tiltsam.samplers import Sampler
from tiltsam.space.evaluator import Closure
from tiltsam.space.validation import warn

__all__ = [
    "NEEDS_SCALER",
    "add_hint",
    "check_arguments",
    "check_base",
    "check_call",
    "check_minimizes",
    "check_not_lightning",
    "check_sampler",
    "instances",
    "is_state_initialization",
    "warn_changed_weights",
    "warn_low_precision",
    "warn_missing_model",
    "warn_missing_scaler",
    "warn_sharded_without_model",
    "warn_split_samples_without_model",
]

_T = TypeVar("_T")

NEEDS_SCALER = """scaler.step(optimizer, ...) cannot step {name}, which runs several passes a step. Write:

    def closure():
        with torch.autocast("cuda", torch.float16):
            loss = criterion(model(inputs), targets)
        scaler.scale(loss).backward()
        return loss

    loss = optimizer.step(closure, scaler=scaler)
    scaler.update()"""


_SEVERAL_CALLS = (
    "tiltsam: a step calls the closure several times. Compute everything that depends on the weights inside it, not "
    "only loss.backward()."
)
_GRAPH_OUTSIDE = ("backward through the graph a second time", "has been modified by an inplace operation")

_REFUSED = {
    torch.optim.LBFGS: "evaluates the closure itself, several times a step",
    torch.optim.SparseAdam: "takes sparse gradients only: use Adam, and sparse=False in the embedding",
}
_NOT_OF_A_BASE = {"adaptive", "base_optimizer", "perturb_eps", "use_gc"}  # arguments of other packages' SAM
_LARGE = 1000.0  # GradScaler starts at a scale of 65536


def check_call(
    cls: type[Optimizer], wrapper_class: type[Optimizer], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Reject a call written for another package, ``SAM(params, SGD, adaptive=True, lr=0.1)``, with the lines to write.

    Python itself would only reject the first argument that it does not know.
    """
    parameters = inspect.signature(cls.__init__).parameters
    names = list(parameters)[1:]
    if names[:1] != ["base"] or not (args or "base" in kwargs):  # nothing is given when a copy is made
        return
    given = args[0] if args else kwargs["base"]
    adaptive = cls.__name__ == "SAM" and bool(kwargs.get("adaptive"))
    ours = {name: value for name, value in kwargs.items() if name in names[1:]}
    method = _call("tiltsam.ASAM" if adaptive else cls.__name__, "base", ours | {"model": None})  # model=model
    if not isinstance(given, Optimizer | type):
        theirs = {name: value for name, value in kwargs.items() if name not in {*names, *_NOT_OF_A_BASE}}
        base = args[1] if len(args) > 1 else kwargs.get("base_optimizer")
        base_name = base.__name__ if isinstance(base, type) else "SGD"
        raise TypeError(
            f"base must be a torch.optim.Optimizer instance, got {type(given).__name__}. Write:\n\n"
            f"    base = {_call(f'torch.optim.{base_name}', 'model.parameters()', theirs or {'lr': 0.1})}\n"
            f"    optimizer = {method}"
        )
    check_base(given, cls.__name__, wrapper_class)
    if len(args) > 1 and parameters[names[1]].kind is inspect.Parameter.KEYWORD_ONLY:
        name = "model" if isinstance(args[1], torch.nn.Module) else names[1]
        raise TypeError(f"settings must be given by name, as in {_call(cls.__name__, 'base', {name: args[1]})}")
    if modules := [name for name, value in kwargs.items() if isinstance(value, torch.nn.Module) and name != "model"]:
        raise TypeError(f"{modules[0]} must not be a module; write {_call(cls.__name__, 'base', {'model': None})}")
    if adaptive:
        raise TypeError(f"{cls.__name__} has no adaptive=True. Write:\n\n    optimizer = {method}")


def _call(function: str, first: str, kwargs: Mapping[str, Any]) -> str:
    """Return the text of a call; values with a long form, such as a model, are shown by their name."""
    values = {
        name: repr(value) if isinstance(value, int | float | str | tuple) else name for name, value in kwargs.items()
    }
    return f"{function}({', '.join([first, *(f'{name}={value}' for name, value in values.items())])})"


def check_base(base: Any, name: str, wrapper_class: type[Optimizer]) -> None:
    """Raise TypeError unless the method ``name`` can wrap ``base``, which must not be a ``wrapper_class`` itself."""
    if isinstance(base, type):
        raise TypeError(
            f"{name} wraps an instance, got the class {base.__name__}: write {name}({base.__name__}(params, ...), ...)"
        )
    if isinstance(base, wrapper_class):
        raise TypeError(f"{name} cannot wrap {type(base).__name__}, which is sharpness-aware itself: wrap its base")
    if not isinstance(base, Optimizer):
        raise TypeError(
            f"base must be a torch.optim.Optimizer instance, got {type(base).__name__}: write "
            f"{name}(torch.optim.SGD(model.parameters(), lr=0.1), ...)"
        )
    for refused, reason in _REFUSED.items():
        if isinstance(base, refused):
            raise TypeError(f"{name} cannot wrap {refused.__name__}, which {reason}")
    if getattr(base, "_overlap_with_ddp", False):
        raise TypeError(f"{name} cannot wrap {type(base).__name__} with overlap_with_ddp=True, which steps in backward")


def add_hint(error: BaseException) -> None:
    """Add a note to torch's errors about a graph that was built outside the closure."""
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _GRAPH_OUTSIDE):
        error.add_note(_SEVERAL_CALLS)


def check_arguments(base: Optimizer, model: Any, parallel: Any) -> None:
    """Raise on common arguments of a wrong type; warn if ``model`` is not the one that ``base`` trains."""
    if parallel is not None and not isinstance(parallel, Parallel):
        raise TypeError(f"parallel must be a tiltsam.Parallel or None, got {type(parallel).__name__}")
    if model is None:
        return
    if not isinstance(model, torch.nn.Module):
        several = isinstance(model, list | tuple) and all(isinstance(m, torch.nn.Module) for m in model)
        hint = ": wrap them in a torch.nn.ModuleList" if several else ""
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}{hint}")
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    if trainable and trainable.isdisjoint(id(p) for group in base.param_groups for p in group["params"]):
        warn("none of the optimizer's parameters belongs to model=: is it another copy of the model?")


def check_sampler(sampler: Any) -> None:
    """Raise unless ``sampler`` is a :class:`Sampler` that can be hashed."""
    if isinstance(sampler, type):
        raise TypeError(f"sampler must be an instance, got the class {sampler.__name__}: write {sampler.__name__}()")
    name = type(sampler).__name__
    if not isinstance(sampler, Sampler):
        raise TypeError(f"sampler must be a tiltsam.samplers.Sampler, got {name}")
    if isinstance(sampler.state_names, str):
        names = sampler.state_names
        raise TypeError(f"{name}.state_names must be a tuple of names, got {names!r}: write ({names!r},)")
    if sampler.state_names and sampler.independent:
        raise ValueError(f"{name} keeps state between samples; set independent = False")
    try:
        hash(sampler)
    except TypeError:
        raise TypeError(f"samplers must be hashable: declare {name} with @dataclass(frozen=True)") from None


def check_minimizes(groups: Sequence[Mapping[str, Any]]) -> None:
    """Reject ``maximize=True``: the ascent would find the best neighbour instead of the worst."""
    if any(group.get("maximize") for group in groups):
        raise ValueError(
            "maximize=True is not supported: negate the objective in the closure, call backward on it and return it"
        )


def check_not_lightning(closure: Closure, name: str) -> None:
    """Raise if Lightning's automatic optimization made the closure: it clips and calls hooks at every pass."""
    if not isinstance(closure, partial):
        return
    module_name = getattr(closure.func, "__module__", None) or ""
    if module_name.split(".")[0] not in ("lightning", "pytorch_lightning"):
        return
    for module in closure.args[:1]:
        if getattr(module, "automatic_optimization", False):
            raise RuntimeError(
                f"Lightning would clip and call hooks at every pass of {name}: write class {type(module).__name__}("
                "SharpnessAwareMixin, LightningModule), from tiltsam.integrations.lightning, and let your own "
                "optimizer_step call super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)"
            )


def is_state_initialization(param_groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a step of the base would change no weight: all rates and gradients are zero.

    ``torch.distributed.checkpoint`` calls ``step()`` so, to create the optimizer's state before loading it.
    """
    gradients = [p.grad for group in param_groups for p in group["params"] if p.grad is not None]
    rates = [group["lr"] for group in param_groups if "lr" in group]
    return bool(gradients) and not any(rates) and not any(local_part(g).any() for g in gradients)


def warn_missing_model(params: Sequence[Tensor]) -> None:
    """Warn if a BatchNorm layer of these parameters updates its statistics at every pass.

    Without ``model=`` the layers are found through the garbage collector, which takes tens of milliseconds: done only
    if two vectors of the same shape follow each other, as a layer's weight and bias do.
    """
    if not any(p.dim() == q.dim() == 1 and p.shape == q.shape for p, q in pairwise(params)):
        return
    ids = {id(p) for p in params}
    layers = [m for m in instances(_BatchNorm) if m.training and m.running_mean is not None and id(m.weight) in ids]
    if layers:
        warn(
            f"{type(layers[0]).__name__} updates its running statistics at every pass of a step, also at perturbed "
            "weights: pass model=, or buffers_once=False if that is intended"
        )


def warn_sharded_without_model() -> None:
    """Warn that weights which FSDP has gathered are dropped through the model."""
    warn(
        "parameters are sharded without model=: a pass may run with weights that FSDP gathered in an evaluation before "
        "it; pass model="
    )


def warn_split_samples_without_model() -> None:
    """Warn that ranks which share samples cannot agree on buffers without the model."""
    warn("samples are divided among ranks without model=: BatchNorm statistics may differ between ranks; pass model=")


def warn_low_precision(params: Sequence[Tensor]) -> None:
    """Warn if weights are stored in a dtype that rounds small perturbations away."""
    low = sorted({str(p.dtype).removeprefix("torch.") for p in params if p.dtype in (torch.bfloat16, torch.float16)})
    if low:
        warn(
            f"weights are {' and '.join(low)}: most coordinates of a small perturbation are rounded away. Keep the "
            "weights in float32 and run the model under torch.autocast"
        )


def warn_changed_weights(name: str) -> None:
    """Warn that the closure changes weights, as ``nn.Embedding(max_norm=...)`` does in its forward pass."""
    warn(
        f"the closure changes weights (max_norm, or a constraint in forward), which {name} restores after its passes: "
        "apply the constraint after each step, with optimizer.register_step_post_hook"
    )


def warn_missing_scaler(loss: Tensor, gradient_norms: Tensor) -> None:
    """Warn if the loss or a gradient is large and a GradScaler is in use. Waits for the device.

    A closure cannot be inspected, so this is a heuristic.
    """
    if not torch.maximum(loss.abs(), gradient_norms.max()).item() > _LARGE:  # NaN may have other causes
        return
    if any(scaler.is_enabled() and scaler._scale is not None for scaler in instances(torch.amp.GradScaler)):
        warn(f"a loss or gradient exceeds {_LARGE:g} and a GradScaler is in use: pass scaler= if the closure scales")


def instances(cls: type[_T]) -> list[_T]:
    """Return all living objects of a class or its subclasses, without touching any other object."""
    classes: set[type] = set()
    pending: list[type] = [cls]
    while pending:
        found = pending.pop()
        classes.add(found)
        pending += found.__subclasses__()
    return [x for x in gc.get_objects() if type(x) in classes]
