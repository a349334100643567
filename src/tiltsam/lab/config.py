"""Every number of a run, in one frozen place; the command line is made from it (:mod:`tiltsam.lab.flags`)."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from textwrap import shorten
from typing import Any, Literal, get_args, get_origin, get_type_hints

from torch.optim import Optimizer

import tiltsam
from tiltsam.lab.errors import ConfigError
from tiltsam.samplers import Center, Sampler

__all__ = ["TrainConfig", "check_types", "methods", "settings_of", "settings_of_others", "tilts_nothing"]

NOTHING_TO_WEIGH = "one sample and nothing to weigh, so t has no effect: pass --num-samples 3"

# The settings of each method; ``esam1`` is SAM with TSAM's budget.
METHOD_SETTINGS: dict[str, tuple[str, ...]] = {
    "erm": (),
    "sam": ("rho", "rho_schedule", "ascent_fraction"),
    "esam1": ("rho", "rho_schedule", "ascent_fraction"),
    "asam": ("rho", "rho_schedule", "eta", "ascent_fraction"),
    "esam2": ("rho", "rho_schedule", "num_points", "ascent_fraction"),
    "pgn": ("rho", "rho_schedule", "alpha"),
    "rsam": ("rho", "rho_schedule", "gamma", "lam", "ascent_fraction"),
    "tsam": (
        "rho",
        "rho_schedule",
        "t",
        "radius",
        "num_samples",
        "delta",
        "sampler",
        "share_ascent",
        "ascent_steps",
        "t_schedule",
        "ascent_fraction",
        "split",
        "concurrent",
    ),
}

# Those among them that are the training loop's business, not the constructor's.
_OF_THE_LOOP = ("rho_schedule", "t_schedule", "ascent_fraction", "split", "concurrent")

# Fields that came later: at these values a run is the one it was before them, and has the same name.
_SAYS_NOTHING: dict[str, Any] = {
    "image_size": None,
    "ascent_steps": 1,
    "rho_schedule": "constant",
    "t_schedule": "constant",
    "compile": False,
    "evaluate_every": 1,
    "ascent_fraction": 1.0,
    "split": False,
    "concurrent": False,
    "average": False,
}


# Networks that no longer begin with the weights they once began with: their runs are others than those of that time.
_BEGIN_ANEW = ("resnet18", "resnet34", "wrn16-8")
_IMAGES = ("cifar", "tiny-imagenet", "dtd", "images:", "npz:")  # where "auto" may pick one of them


@dataclass(frozen=True)
class TrainConfig:
    """A training run. Two runs with equal configs are the same run."""

    task: str = "digits"
    """What to learn: a name of `tiltsam tasks`, or images:PATH, text:PATH, npz:PATH."""
    method: str = "tsam"
    """erm, sam, esam1, asam, esam2, pgn, rsam or tsam."""
    model: str = "auto"
    """mlp, cnn, resnet18, resnet34, wrn16-8, vit-s; pretrained: minilm, hf:FOLDER-OR-NAME; auto chooses by the task."""

    epochs: float = 60.0
    """How long, in passes through the training examples; with a budget below, how long at most."""
    passes: float | None = None
    """Stop after this many forward+backward passes; a forward pass alone counts a third."""
    seconds: float | None = None
    """Stop after this many seconds of training, evaluation not counted."""

    lr: float = 0.05
    """Learning rate."""
    schedule: Literal["constant", "step", "cosine", "linear"] = "constant"
    """Constant as in the paper; step divides by 10 at half and three quarters; cosine and linear fall to zero."""
    warmup: float = 0.0
    """Share of the budget over which the rate rises from zero; cosine and linear fall over the rest."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """The base optimizer."""
    momentum: float = 0.9
    """Of SGD."""
    weight_decay: float = 5e-4
    """Of the base optimizer."""
    batch_size: int = 64
    """Examples a step."""
    label_smoothing: float = 0.0
    """Share of the target spread over all classes; 0.1 in the paper's image experiments."""
    clip: float | None = None
    """Longest aggregated gradient; 1 in the paper's text experiments."""

    rho: float | None = None
    """Length of the ascent; by default the method's own (sam 0.05, tsam 0.1, asam 0.5). Of tsam's samplers "ascent" has
    one, and no other."""
    rho_schedule: Literal["constant", "up", "down"] = "constant"
    """Whether rho stays, rises from zero over the budget, or falls to zero."""
    t: float = 20.0
    """Tilt of tsam; has no effect with one sample."""
    t_schedule: Literal["constant", "up", "down"] = "constant"
    """Whether the tilt stays, rises from zero to t over the budget, or falls from t to zero."""
    radius: float | None = None
    """Radius of tsam's random start; by default 0.003 √d."""
    num_samples: int = 3
    """Samples s of tsam, and of the budget of esam1; one makes tsam SAM from a random start, at SAM's cost."""
    delta: float | None = None
    """The sampler's part of the tilt; by default t/2."""
    sampler: Literal["ascent", "uniform", "gaussian", "hmc"] = "ascent"
    """Where tsam looks."""
    share_ascent: bool = False
    """One ascent gradient for all samples of tsam: s+1 passes a step in place of 2s."""
    ascent_steps: int = 1
    """Ascents a sample of tsam, of rho/N each (the paper's N): s(N+1) passes a step."""
    ascent_fraction: float = 1.0
    """Fraction of the batch used for the ascent gradient: its first rows."""
    split: bool = False
    """Give each sample of tsam its own part of the batch: s samples for two passes (with t 0, radius 0: m-SAM)."""
    every: int = 1
    """Take a step of the method at each k-th step only, and plain steps (one pass) between."""
    eta: float = 0.01
    """Of asam."""
    alpha: float = 0.5
    """Of pgn."""
    gamma: float = 5e-4
    """Of rsam."""
    lam: float = 2.0
    """Of rsam."""
    num_points: int = 10
    """Of esam2."""

    seed: int = 0
    """Of the initial weights, the order of examples, label noise, augmentation and perturbations."""
    noise: float | None = None
    """Share of wrong training labels; by default the task's own."""
    validation: float = 0.1
    """Share of the training examples held out for choosing."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 runs the model under autocast."""
    compile: bool = False
    """torch.compile the model: a minute or so at the start, shorter passes after it."""
    concurrent: bool = False
    """On a GPU, let tsam's samples run beside each other: s copies of weights, gradients and activations in memory."""
    evaluate_every: int = 1
    """Epochs from one look at validation and test to the next; after the last epoch there is always one."""
    device: str = "auto"
    """cpu, cuda, cuda:1; auto takes a GPU if there is one."""
    reestimate_batchnorm: bool = True
    """Before each test, estimate BatchNorm's statistics anew at the weights themselves, on training examples."""
    average: bool = False
    """Test and keep an average of the weights, mostly over the last tenth of the steps so far, not the weights
    themselves."""
    max_length: int = 64
    """Tokens of a text."""
    image_size: int | None = None
    """Pixels that image files are brought to; by default the task's own (see: tiltsam tasks)."""

    def __post_init__(self) -> None:
        if self.method not in methods():
            raise ConfigError(f"unknown method {self.method!r}: one of {', '.join(methods())}")
        for name in ("epochs", "batch_size", "lr", "num_samples", "every", "ascent_steps", "evaluate_every"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be > 0, got {getattr(self, name)}")
        for name in ("passes", "seconds", "clip", "image_size"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be > 0, got {getattr(self, name)}")
        bounds = dict.fromkeys(("validation", "label_smoothing", "warmup", "noise"), (0, 1))
        for name, (low, high) in {**bounds, "momentum": (0, math.inf), "weight_decay": (0, math.inf)}.items():
            value = getattr(self, name)
            if value is not None and not low <= value < high:
                raise ConfigError(f"{name} must be in [{low}, {high}), got {value}")
        if math.isinf(self.lr):
            raise ConfigError(f"lr must be finite, got {self.lr}")
        if math.isinf(min(limit for limit in (self.epochs, self.passes, self.seconds) if limit is not None)):
            raise ConfigError("one of epochs, passes or seconds must be finite")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be in [0, 2^63), got {self.seed}")
        if not 0 < self.ascent_fraction <= 1:
            raise ConfigError(f"ascent_fraction must be in (0, 1], got {self.ascent_fraction}")
        if self.split and (self.share_ascent or self.ascent_fraction < 1 or self.every > 1):
            raise ConfigError("split goes with neither share_ascent nor ascent_fraction nor every")
        if self.concurrent and self.share_ascent:
            raise ConfigError("concurrent does not go with share_ascent: samples wait for an ascent that they share")
        if self.t_schedule != "constant" and self.delta is not None:
            raise ConfigError(f"delta goes with t, which the schedule {self.t_schedule!r} moves: leave it out")
        if self.ascent_steps > 1 and (self.sampler != "ascent" or self.share_ascent):
            raise ConfigError("ascent_steps above 1 is for the sampler ascent, without share_ascent")

    def method_options(self) -> dict[str, Any]:
        """Return the settings that the method's constructor receives."""
        own = {name: getattr(self, name) for name in settings_of(self.method)}
        if self.rho is None:
            own.pop("rho", None)
        for name in _OF_THE_LOOP:
            own.pop(name, None)
        if own.pop("ascent_steps", 1) > 1:
            own["sampler"] = tiltsam.samplers.Ascent(num_steps=self.ascent_steps)
        return own

    def smallest_share(self) -> float:
        """The smallest share of a batch that a pass sees."""
        if self.splits():
            return 1 / self.num_samples
        return self.ascent_fraction if "ascent_fraction" in settings_of(self.method) else 1.0

    def splits(self) -> bool:
        """Whether the samples of a step share the batch out among them."""
        return self.split and "split" in settings_of(self.method)

    def wrap(self, base: Optimizer, **options: Any) -> tiltsam.SharpnessAware:
        """Return the method around a base optimizer; ``esam1`` is SAM, longer.

        Args:
            base: The optimizer.
            **options: ``model``, ``seed`` and ``parallel``; those that the constructor does not have are left out.

        Raises:
            ConfigError: If a setting is out of bounds, or processes train together and the method has no ``parallel``.
        """
        method = tiltsam.METHODS["sam" if self.method == "esam1" else self.method]
        parameters = inspect.signature(method).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            if options.get("parallel") and "parallel" not in parameters:
                raise ConfigError(f"{self.method} has no option parallel: train it in one process")
            options = {name: value for name, value in options.items() if name in parameters}
        if self.every > 1:
            method = _with_plain_steps(method, self.every)
        try:
            return method(base, **self.method_options(), **options)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def key(self) -> str:
        """A short name of everything but the seed: runs that differ in the seed alone are averaged."""
        body = {k: v for k, v in dataclasses.asdict(self).items() if k not in ("seed", "device")}
        others = settings_of_others(self.method)
        # Another method's settings make no other run, nor does 2 for 2.0, nor a field added later that says nothing.
        body = {k: v for k, v in body.items() if k not in others and (k not in _SAYS_NOTHING or v != _SAYS_NOTHING[k])}
        body = {k: float(v) if isinstance(v, int) else v for k, v in body.items()}
        if self.model in _BEGIN_ANEW or (self.model == "auto" and self.task.startswith(_IMAGES)):
            body["begins"] = "he"
        if self.method == "tsam" and self.radius is None:
            body["radius"] = "0.003 sqrt(d)"  # what None meant was another radius once
        if self.warmup and self.schedule in ("cosine", "linear"):  # which once fell from the start of the run
            body["falls"] = "after warmup"
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:10]
        return f"{self.method}-{digest}"


def _with_plain_steps(
    method: Callable[..., tiltsam.SharpnessAware], every: int
) -> Callable[..., tiltsam.SharpnessAware]:
    """Return a method that takes plain steps, except at each ``every``-th one."""
    if isinstance(method, partial):
        return partial(_with_plain_steps(method.func, every), *method.args, **method.keywords)
    if not isinstance(method, type) or not issubclass(method, tiltsam.SharpnessAware):
        raise ConfigError(f"every above 1 needs a method that is a class or a functools.partial of one, got {method!r}")
    cls: type[tiltsam.SharpnessAware] = method

    def plan(self: tiltsam.SharpnessAware) -> tuple[Sampler, int]:
        return (Center(), 1) if self.setting("steps_taken") % every else cls.plan(self)

    return type(cls.__name__, (cls,), {"plan": plan})


def check_types(settings: Mapping[str, Any]) -> None:
    """Raise if a setting is not of its field's type; a JSON file may hold anything.

    Raises:
        ConfigError: The setting, its type and its value.
    """
    for name, hint in get_type_hints(TrainConfig).items():
        if name in settings and not _is_a(settings[name], hint):
            wanted = hint.__name__ if isinstance(hint, type) else str(hint)
            raise ConfigError(f"{name} must be {wanted}, got {shorten(repr(settings[name]), 60)}")


def _is_a(value: object, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if options := get_args(hint):  # X | None
        return any(_is_a(value, option) for option in options)
    if hint is float:
        hint = int | float
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def tilts_nothing(config: TrainConfig, names: Collection[str]) -> bool:
    """Whether a tilt is among the settings that were given, and without effect."""
    alone = config.method == "tsam" and config.num_samples == 1 and config.sampler != "hmc"  # which samples by it
    tilts = {"t": config.t, "delta": config.delta, "t_schedule": config.t_schedule != "constant"}
    return alone and any(tilts[name] for name in tilts.keys() & set(names))


def methods() -> list[str]:
    """The names of all methods: ours, and what somebody has put into :data:`tiltsam.METHODS`."""
    return list(METHOD_SETTINGS | tiltsam.METHODS)


def settings_of(method: str) -> tuple[str, ...]:
    """The settings of a method; one of somebody's own has those of SAM if it takes a rho, and else none."""
    if method in METHOD_SETTINGS:
        return METHOD_SETTINGS[method]
    return METHOD_SETTINGS["sam"] if "rho" in inspect.signature(tiltsam.METHODS[method]).parameters else ()


def settings_of_others(method: str) -> set[str]:
    """What another method has and this one does not."""
    others = set().union(*METHOD_SETTINGS.values()) - set(settings_of(method))
    return others - {"num_samples"} if method == "esam1" else others
