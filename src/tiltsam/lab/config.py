"""The config of a run. The flags of the command line are made from it (:mod:`tiltsam.lab.flags`)."""

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

__all__ = ["TrainConfig", "check_types", "methods", "settings_of", "settings_of_others", "tilt_has_no_effect"]

TILT_HAS_NO_EFFECT = "one sample, so t has no effect: pass --num-samples 3"

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

# The settings that the training loop uses, not the constructor.
_LOOP_SETTINGS = ("rho_schedule", "t_schedule", "ascent_fraction", "split", "concurrent")

# Fields added later. At these values they are left out of the key, so that earlier runs keep their names.
_LATER_DEFAULTS: dict[str, Any] = {
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
    "example_tilt": 0.0,
    "example_ess": 0.0,
    "example_tilt_warmup": 0.0,
    "class_tilt": None,
}


# Networks whose initialisation changed: their runs have other keys than earlier ones.
_REINITIALISED = ("resnet18", "resnet34", "wrn16-8")
_IMAGES = ("cifar", "tiny-imagenet", "dtd", "images:", "npz:")  # tasks for which "auto" may choose one of them


@dataclass(frozen=True)
class TrainConfig:
    """The config of a training run. Runs with equal configs are the same run."""

    task: str = "digits"
    """The task: a name printed by `tiltsam tasks`, or images:PATH, text:PATH, npz:PATH."""
    method: str = "tsam"
    """erm, sam, esam1, asam, esam2, pgn, rsam or tsam."""
    model: str = "auto"
    """mlp, cnn, resnet18, resnet34, wrn16-8, vit-s; pretrained: minilm, hf:FOLDER-OR-NAME; auto depends on the task."""

    epochs: float = 60.0
    """Epochs to train; with a limit on passes or seconds, at most this many."""
    passes: float | None = None
    """Stop after this many forward+backward passes; a forward pass alone counts a third."""
    seconds: float | None = None
    """Stop after this many seconds of training, evaluation not counted."""

    lr: float = 0.05
    """Learning rate."""
    schedule: Literal["constant", "step", "cosine", "linear"] = "constant"
    """Learning-rate schedule: constant as in the paper; step divides by 10 at 50 % and 75 % of the budget; cosine and
    linear decay to zero."""
    warmup: float = 0.0
    """Fraction of the budget with linear warm-up; cosine and linear decay over the rest."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """The base optimizer."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 5e-4
    """Weight decay of the base optimizer."""
    batch_size: int = 64
    """Examples per step."""
    label_smoothing: float = 0.0
    """Label smoothing of the cross-entropy; 0.1 in the paper's image experiments."""
    clip: float | None = None
    """Maximum norm of the aggregated gradient; 1 in the paper's text experiments."""

    example_tilt: float = 0.0
    """Tilt over the examples of a batch: a negative one silences wrong labels, a positive one favours hard examples."""
    example_ess: float = 0.0
    """Smallest effective sample size that the example tilt may leave, as a fraction of the batch; 0 sets no bound."""
    example_tilt_warmup: float = 0.0
    """Fraction of the budget over which the tilt over examples rises from 0."""
    class_tilt: float | None = None
    """Tilt between the classes of a batch; the example tilt is then inside each class. Positive: favour hard classes."""

    rho: float | None = None
    """Norm of the ascent step; by default the method's (sam 0.05, tsam 0.1, asam 0.5). TSAM: used by the sampler ascent
    only."""
    rho_schedule: Literal["constant", "up", "down"] = "constant"
    """Schedule of rho over the budget: constant, up from zero, or down to zero."""
    t: float = 20.0
    """TSAM: tilt t; has no effect with one sample."""
    t_schedule: Literal["constant", "up", "down"] = "constant"
    """TSAM: schedule of the tilt over the budget: constant, up from zero to t, or down from t to zero."""
    radius: float | None = None
    """TSAM: radius of the random start; by default 0.003 √d."""
    num_samples: int = 3
    """TSAM: samples s per step; 1 is SAM from a random start. ESAM1: samples of the TSAM whose budget it gets."""
    delta: float | None = None
    """TSAM: the part δ of the tilt that the sampler applies; by default t/2."""
    sampler: Literal["ascent", "uniform", "gaussian", "hmc"] = "ascent"
    """TSAM: how the perturbed weights are sampled."""
    share_ascent: bool = False
    """TSAM: share one ascent gradient among all samples: s+1 passes per step instead of 2s."""
    ascent_steps: int = 1
    """TSAM: ascent steps N per sample, of norm rho/N each: s(N+1) passes per step."""
    ascent_fraction: float = 1.0
    """Fraction of the batch used for the ascent gradient."""
    split: bool = False
    """TSAM: give each sample its own part of the batch: s samples for two passes (with t=0 and radius=0: m-SAM)."""
    every: int = 1
    """Take a step of the method at every k-th step, and plain steps of one pass otherwise."""
    eta: float = 0.01
    """ASAM: η in the normalisation |w| + η."""
    alpha: float = 0.5
    """PGN: weight α of the perturbed gradient, 1-α of the plain one."""
    gamma: float = 5e-4
    """RSAM: size γ of the noise relative to the norm of each filter."""
    lam: float = 2.0
    """RSAM: weight λ of the gradient in the ascent direction."""
    num_points: int = 10
    """ESAM2: points on the ascent line; the step uses the one with the largest loss."""

    seed: int = 0
    """Seed of the initial weights, the order of examples, label noise, augmentation and perturbations."""
    noise: float | None = None
    """Fraction of wrong training labels; by default the task's."""
    validation: float = 0.1
    """Fraction of the training examples held out for validation."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 runs the model under autocast."""
    compile: bool = False
    """Compile the model with torch.compile: a minute or so at the start, then shorter passes."""
    concurrent: bool = False
    """TSAM: run the samples concurrently on the GPU; needs memory for s copies of weights, gradients, activations."""
    evaluate_every: int = 1
    """Epochs between evaluations on validation and test; the last epoch is always evaluated."""
    device: str = "auto"
    """cpu, cuda or cuda:1; auto uses a GPU if there is one."""
    reestimate_batchnorm: bool = True
    """Before each evaluation, re-estimate BatchNorm's statistics at the current weights, on training examples."""
    average: bool = False
    """Evaluate and save averaged weights (mostly over the last tenth of the steps) instead of the last ones."""
    max_length: int = 64
    """Maximum number of tokens of a text."""
    image_size: int | None = None
    """Width and height in pixels that image files are resized to; by default the task's (see: tiltsam tasks)."""

    def __post_init__(self) -> None:
        if self.method not in methods():
            raise ConfigError(f"unknown method {self.method!r}: one of {', '.join(methods())}")
        for name in ("epochs", "batch_size", "lr", "num_samples", "every", "ascent_steps", "evaluate_every"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be > 0, got {getattr(self, name)}")
        for name in ("passes", "seconds", "clip", "image_size"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be > 0, got {getattr(self, name)}")
        bounds = dict.fromkeys(
            ("validation", "label_smoothing", "warmup", "noise", "example_ess", "example_tilt_warmup"), (0, 1)
        )
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
        for name in ("example_tilt", "class_tilt"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ConfigError(f"{name} must be finite, got {value}")
        if (self.example_ess or self.example_tilt_warmup) and not self.example_tilt:
            raise ConfigError(
                "example_ess and example_tilt_warmup need example_tilt, for instance -100 with example_ess"
            )
        if self.example_ess and self.class_tilt is not None:
            raise ConfigError("example_ess cannot be combined with class_tilt")
        if self.split and (self.share_ascent or self.ascent_fraction < 1 or self.every > 1):
            raise ConfigError("split=True cannot be combined with share_ascent, ascent_fraction or every")
        if self.concurrent and self.share_ascent:
            raise ConfigError("concurrent=True cannot be combined with share_ascent: samples wait for it")
        if self.t_schedule != "constant" and self.delta is not None:
            raise ConfigError(f"delta must be None with t_schedule={self.t_schedule!r}, got {self.delta:g}")
        if self.ascent_steps > 1 and (self.sampler != "ascent" or self.share_ascent):
            raise ConfigError(
                f"ascent_steps must be 1 unless the sampler is ascent without share_ascent, got {self.ascent_steps}"
            )

    def method_options(self) -> dict[str, Any]:
        """Return the settings that the method's constructor receives."""
        own = {name: getattr(self, name) for name in settings_of(self.method)}
        if self.rho is None:
            own.pop("rho", None)
        for name in _LOOP_SETTINGS:
            own.pop(name, None)
        if own.pop("ascent_steps", 1) > 1:
            own["sampler"] = tiltsam.samplers.Ascent(num_steps=self.ascent_steps)
        return own

    def with_settings(self, settings: Mapping[str, Any]) -> TrainConfig:
        """Return the config with some fields, or options of its method, replaced.

        Args:
            settings: Values by name; ``method`` may be among them.

        Raises:
            ConfigError: If neither the config nor the method has a setting of that name.
        """
        method = str(settings.get("method", self.method))
        known = {field.name for field in dataclasses.fields(self)}
        if unknown := [name for name in settings if name not in known or name in settings_of_others(method)]:
            raise ConfigError(f"{method} has no {', '.join(unknown)}")
        return dataclasses.replace(self, **settings)

    def smallest_share(self) -> float:
        """Return the smallest fraction of a batch that a pass sees."""
        if self.splits():
            return 1 / self.num_samples
        return self.ascent_fraction if "ascent_fraction" in settings_of(self.method) else 1.0

    def splits(self) -> bool:
        """Return whether each sample of a step has its own part of the batch."""
        return self.split and "split" in settings_of(self.method)

    def wrap(self, base: Optimizer, **options: Any) -> tiltsam.SharpnessAware:
        """Return the method around a base optimizer; ``esam1`` is SAM with a longer budget.

        Args:
            base: The optimizer.
            **options: ``model``, ``seed`` and ``parallel``; those that the constructor does not accept are dropped.

        Raises:
            ConfigError: If a setting is out of bounds, or ranks train together and the method has no ``parallel``.
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
        """Return a short name of all settings but the seed: runs that differ only in the seed are averaged."""
        body = {k: v for k, v in dataclasses.asdict(self).items() if k not in ("seed", "device")}
        others = settings_of_others(self.method)
        # Other methods' settings, 2 instead of 2.0, and later fields at their defaults do not change the key.
        later = _LATER_DEFAULTS
        body = {k: v for k, v in body.items() if k not in others and (k not in later or v != later[k])}
        body = {k: float(v) if isinstance(v, int) else v for k, v in body.items()}
        if self.model in _REINITIALISED or (self.model == "auto" and self.task.startswith(_IMAGES)):
            body["begins"] = "he"
        if self.method == "tsam" and self.radius is None:
            body["radius"] = "0.003 sqrt(d)"  # the default was once another radius
        if self.warmup and self.schedule in ("cosine", "linear"):  # these once decayed from the start
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
    """Raise if a setting read from a file is not of its field's type.

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


def tilt_has_no_effect(config: TrainConfig, names: Collection[str]) -> bool:
    """Return whether a tilt is among the given settings and has no effect."""
    single = config.method == "tsam" and config.num_samples == 1 and config.sampler != "hmc"  # HMC samples with it
    tilts = {"t": config.t, "delta": config.delta, "t_schedule": config.t_schedule != "constant"}
    return single and any(tilts[name] for name in tilts.keys() & set(names))


def methods() -> list[str]:
    """Return the names of all methods, with those that users add to :data:`tiltsam.METHODS`."""
    return list(METHOD_SETTINGS | tiltsam.METHODS)


def settings_of(method: str) -> tuple[str, ...]:
    """Return the settings of a method; a user's method has those of SAM if it has a rho, and none otherwise."""
    if method in METHOD_SETTINGS:
        return METHOD_SETTINGS[method]
    return METHOD_SETTINGS["sam"] if "rho" in inspect.signature(tiltsam.METHODS[method]).parameters else ()


def settings_of_others(method: str) -> set[str]:
    """Return the settings that only other methods have."""
    others = set().union(*METHOD_SETTINGS.values()) - set(settings_of(method))
    return others - {"num_samples"} if method == "esam1" else others
