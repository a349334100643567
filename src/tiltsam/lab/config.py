"""The config of a run. The flags of the command line are made from it (:mod:`tiltsam.lab.flags`)."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from inspect import Parameter
from pathlib import PurePosixPath
from textwrap import shorten
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

import tiltsam
from tiltsam.lab.errors import ConfigError
from tiltsam.lab.files import json_digest
from tiltsam.samplers import Center, Sampler

__all__ = [
    "COMPARED",
    "DEFAULTS",
    "NEEDED_LOSS",
    "NEEDED_OPTION",
    "TrainConfig",
    "allowed_types",
    "field_types",
    "has_setting",
    "ignores_tilt",
    "method_options",
    "tilt_defaults",
    "warn_if_tilt_has_no_effect",
]

COMPARED = ("erm", "sam", "asam", "esam2", "pgn", "rsam", "tsam")
"""The methods that are compared by default: the paper's, and ASAM."""

DATA_FIELDS = ("task", "seed", "noise", "validation", "max_length", "image_size")  # they determine a run's data

TILT_SETTINGS = ("t", "delta", "t_schedule")  # they have no effect with one sample

_PLAIN = (bool, int, float, str, NoneType)  # what a setting can be

# Arguments of a constructor that the training loop sets, or that are not tuned.
_NOT_OPTIONS = ("model", "seed", "parallel", "buffers_once", "same_dropout", "skip_nonfinite")

# Defaults for a negative tilt over examples. Without a warm-up SAM lost two points on clean labels; the bound changes
# nothing where training learns, and helps where it would collapse (benchmarks/records/*_two_tilts, *_two_tilts_digits).
TILT_ESS = 0.3
TILT_WARMUP = 0.3

# Fields that only methods with a certain option have.
NEEDED_OPTION = {
    "rho_schedule": "rho",
    "rho_from": "rho",
    "perturb": "rho",
    "t_schedule": "t",
    "ascent_fraction": "rho",
    "split": "num_samples",
    "concurrent": "num_samples",
}

# Bounds of fields, where they are not None.
_POSITIVE = ("epochs", "passes", "seconds", "lr", "batch_size", "clip", "every", "evaluate_every", "image_size")
_UPPER_BOUNDS = {
    "validation": 1,
    "label_smoothing": 1,
    "warmup": 1,
    "noise": 1,
    "rho_from": 1,
    "example_ess": 1,
    "example_tilt_warmup": 1,
    "momentum": math.inf,
    "weight_decay": math.inf,
    "logit_tau": math.inf,
}

# Fields that only a certain loss has.
NEEDED_LOSS = {"gce_q": "gce", "logit_tau": "logit-adjusted"}


@dataclass(frozen=True)
class TrainConfig:
    """The config of a training run. Runs with equal configs are the same run."""

    task: str = "digits"
    """The task: a name printed by `tiltsam tasks`, or images:PATH, text:PATH, npz:PATH."""
    method: str = "tsam"
    """A name printed by `tiltsam methods`; the flag also takes options, as in tsam:num_samples=1,rho=0.5."""
    model: str = "auto"
    """mlp, cnn, resnet18, resnet34, wrn16-8, vit-s; timm:NAME (untrained); minilm or hf:FOLDER-OR-NAME (pretrained);
    auto depends on the task."""
    init: Literal["published", "torch"] = "published"
    """How residual networks initialise their convolutions. published: He's method; torch: PyTorch's default, whose
    norm is 2.2 times smaller in a ResNet-18, so that a given rho perturbs 2.2 times as strongly. Other models ignore
    it."""

    epochs: float = 60.0
    """Epochs to train; unlimited if --passes or --seconds is given without --epochs."""
    passes: float | None = None
    """Stop after this many forward+backward passes; a forward pass alone counts a third."""
    seconds: float | None = None
    """Stop after this many seconds of training, evaluation not counted."""

    lr: float = 0.05
    """Learning rate."""
    schedule: Literal["constant", "step", "cosine", "linear"] = "constant"
    """Learning-rate schedule: constant as in the paper; step divides by 10 at 50% and 75% of the budget; cosine and
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
    loss: Literal["cross-entropy", "gce", "logit-adjusted"] = "cross-entropy"
    """Loss of an example: cross-entropy; gce, the generalized cross-entropy, for noisy labels; logit-adjusted, with the
    logarithms of the classes' frequencies added to the logits, for long tails."""
    gce_q: float = 0.7
    """q in (0, 1] of the generalized cross-entropy (1 - p^q) / q; towards 0 it becomes the cross-entropy."""
    logit_tau: float = 1.0
    """Factor of the logarithms that logit-adjusted adds."""
    label_smoothing: float = 0.0
    """Label smoothing of the cross-entropy; 0.1 in the paper's image experiments."""
    clip: float | None = None
    """Maximum norm of the aggregated gradient; 1 in the paper's text experiments."""

    example_tilt: float = 0.0
    """Tilt τ over the examples of a batch; negative: down-weight examples with a high loss, such as mislabelled ones;
    positive: up-weight them."""
    example_ess: float | None = None
    """Smallest effective sample size that the example tilt may leave, as a fraction of the batch; 0 sets no bound. By
    default 0.3 for a negative example tilt without a class tilt, else 0."""
    example_tilt_warmup: float | None = None
    """Fraction of the budget over which the tilt over examples rises from 0; by default 0.3 for a negative one, else
    0."""
    class_tilt: float | None = None
    """Tilt between the classes of a batch, with the example tilt inside each class; positive: favour hard classes."""

    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Arguments of the method's constructor, such as {"rho": 0.5}. Those at their default are left out."""
    rho_schedule: Literal["constant", "up", "down"] = "constant"
    """Schedule of rho over the budget: constant, up from zero, or down to zero."""
    rho_from: float = 0.0
    """Fraction of the budget up to which rho is 0: late-phase SAM, with plain steps of one pass before."""
    perturb: Literal["all", "norm"] = "all"
    """Weights that rho applies to: all, or those of normalisation layers only (SAM-ON)."""
    t_schedule: Literal["constant", "up", "down"] = "constant"
    """Schedule of the tilt over the budget: constant, up from zero to t, or down from t to zero."""
    ascent_fraction: float = 1.0
    """Fraction of the batch used for the ascent gradient."""
    split: bool = False
    """Give each of the s samples its own part of the batch: s samples for two passes (with t=0 and radius=0: m-SAM)."""
    every: int = 1
    """Take a step of the method at every k-th step, and plain steps of one pass otherwise."""

    seed: int = 0
    """Seed of the initial weights, the order of examples, label noise, augmentation and perturbations."""
    noise: float | None = None
    """Replace this fraction of the training and validation labels with wrong ones, for experiments; it does not
    describe noise already in your data. By default the task's, or 0 for your data."""
    validation: float = 0.1
    """Fraction of the training examples held out for validation."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 runs the model under autocast."""
    compile: bool = False
    """Compile the model and any tilt over examples with torch.compile: a minute at the start, then faster passes."""
    concurrent: bool = False
    """Run the samples concurrently on the GPU; needs memory for s copies of the weights, gradients and activations."""
    evaluate_every: int = 1
    """Epochs between evaluations on validation and test; the last epoch is always evaluated."""
    device: str = "auto"
    """cpu, cuda or cuda:1; auto uses a GPU if there is one."""
    reestimate_batchnorm: bool = True
    """Before each evaluation, re-estimate BatchNorm's statistics at the current weights, on training examples."""
    average: bool = False
    """Evaluate and save averaged weights (mostly over the last tenth of the steps) instead of the last ones."""
    max_length: int = 64
    """Maximum number of tokens per text."""
    image_size: int | None = None
    """Width and height in pixels that image files are resized to; by default the task's (see: tiltsam tasks)."""

    def __post_init__(self) -> None:
        for name, hint in field_types().items():
            _check_type(name, getattr(self, name), hint)
        kind, _, path = self.task.partition(":")
        if path:  # ./data.npz and data.npz are one file; a/../data.npz need not be, as a may be a link
            object.__setattr__(self, "task", f"{kind}:{PurePosixPath(path)}")
        for name, value in tilt_defaults(self.example_tilt, self.class_tilt).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        object.__setattr__(self, "options", self._changed_options())
        self._check_bounds()
        self._check_loss()
        self._check_tilts()
        self._check_passes()

    def _check_bounds(self) -> None:
        for name in _POSITIVE:
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ConfigError(f"{name} must be > 0, got {value}")
        for name, high in _UPPER_BOUNDS.items():
            if (value := getattr(self, name)) is not None and not 0 <= value < high:
                raise ConfigError(f"{name} must be in [0, {high}), got {value}")
        if self.optimizer != "sgd" and self.momentum != DEFAULTS["momentum"]:
            raise ConfigError(f"momentum needs optimizer sgd, got {self.optimizer}")
        if math.isinf(self.lr):
            raise ConfigError(f"lr must be finite, got {self.lr}")
        if math.isinf(min(limit for limit in (self.epochs, self.passes, self.seconds) if limit is not None)):
            raise ConfigError("one of epochs, passes or seconds must be finite")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be in [0, 2^63), got {self.seed}")

    def _check_loss(self) -> None:
        for name, loss in NEEDED_LOSS.items():
            if getattr(self, name) != DEFAULTS[name] and self.loss != loss:
                raise ConfigError(f"{name} needs loss {loss}, got {self.loss}")
        if not 0 < self.gce_q <= 1:
            raise ConfigError(f"gce_q must be in (0, 1], got {self.gce_q}")
        if self.loss == "gce" and self.label_smoothing:
            raise ConfigError(f"label_smoothing must be 0 with loss gce, got {self.label_smoothing}")

    def _check_tilts(self) -> None:
        if not math.isfinite(self.example_tilt) or not math.isfinite(self.class_tilt or 0.0):
            raise ConfigError(f"tilts must be finite, got {self.example_tilt} and {self.class_tilt}")
        if (self.example_ess or self.example_tilt_warmup) and not self.example_tilt:
            raise ConfigError("example_ess and example_tilt_warmup need an example_tilt, got 0")
        if self.example_ess and self.class_tilt is not None:
            raise ConfigError("example_ess cannot be combined with class_tilt")
        if self.t_schedule != "constant" and (delta := self.options.get("delta")) is not None:
            raise ConfigError(f"delta must be None with t_schedule={self.t_schedule!r}, got {delta:g}")

    def _check_passes(self) -> None:
        if not 0 < self.ascent_fraction <= 1:
            raise ConfigError(f"ascent_fraction must be in (0, 1], got {self.ascent_fraction}")
        if self.split and (self.options.get("share_ascent") or self.ascent_fraction < 1 or self.every > 1):
            raise ConfigError("split=True cannot be combined with share_ascent, ascent_fraction or every")
        if self.concurrent and self.options.get("share_ascent"):
            raise ConfigError("concurrent=True cannot be combined with share_ascent: samples wait for it")

    def _changed_options(self) -> dict[str, Any]:
        """Check the names and types of the options, and return those that differ from their defaults."""
        if not isinstance(self.options, Mapping):
            raise ConfigError(f"options must be a mapping, got {shorten(repr(self.options), 60)}")
        known = method_options(self.method)
        unknown = [n for n in NEEDED_OPTION if not has_setting(self.method, n) and getattr(self, n) != DEFAULTS[n]]
        if unknown := unknown + [name for name in self.options if name not in known]:
            raise ConfigError(f"{self.method} has no {', '.join(unknown)}; its options: {', '.join(known) or 'none'}")
        for name, value in self.options.items():
            _check_type(name, value, known[name].annotation)
        if missing := [name for name, p in known.items() if p.default is p.empty and name not in self.options]:
            raise ConfigError(f"{self.method} needs {', '.join(missing)}")
        floats = {name for name, p in known.items() if float in allowed_types(p.annotation)}
        options = {name: float(v) if name in floats and type(v) is int else v for name, v in self.options.items()}
        return {name: value for name, value in options.items() if value != known[name].default}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> TrainConfig:
        """Return the config with the given fields, and options of its method, by name.

        Raises:
            ConfigError: If the method does not have one of them.
        """
        fields = {name: value for name, value in settings.items() if name in field_types()}
        return cls(**fields, options={name: value for name, value in settings.items() if name not in fields})

    def settings(self) -> dict[str, Any]:
        """Return the fields and options that differ from their defaults, by name."""
        defaults = DEFAULTS | tilt_defaults(self.example_tilt, self.class_tilt)
        changed = {name: value for name, default in defaults.items() if (value := getattr(self, name)) != default}
        return {**changed, **self.options}

    def with_settings(self, settings: Mapping[str, Any]) -> TrainConfig:
        """Return the config with some fields, or options of its method, replaced.

        Args:
            settings: Values by name; ``method`` may be among them. A new method keeps the settings that it also has.

        Raises:
            ConfigError: If neither the config nor the method has a setting of that name.

        Example:
            >>> tsam = TrainConfig(method="tsam", options={"rho": 0.2, "t": 5.0})
            >>> tsam.with_settings({"method": "sam", "lr": 0.1}).settings()
            {'method': 'sam', 'lr': 0.1, 'rho': 0.2}
        """
        method = settings.get("method", self.method)
        kept = {name: value for name, value in self.settings().items() if has_setting(method, name)}
        return self.from_settings({**kept, "method": method, **settings})

    def all_options(self) -> dict[str, Any]:
        """Return the values of all options that can be written to a file, with the defaults of the constructor."""
        values = {name: self.options.get(name, p.default) for name, p in method_options(self.method).items()}
        return {name: value for name, value in values.items() if isinstance(value, _PLAIN)}

    def to_json(self) -> dict[str, Any]:
        """Return all fields and all options, as ``config.json`` has them."""
        return dataclasses.asdict(self) | {"options": self.all_options()}

    def wrap(self, base: torch.optim.Optimizer, **common: Any) -> tiltsam.SharpnessAware:
        """Return the method around a base optimizer.

        Args:
            base: The optimizer.
            **common: ``model``, ``seed`` and ``parallel``; those that the constructor does not accept are dropped.

        Raises:
            ConfigError: If an option is out of bounds, or ranks train together and the method has no ``parallel``.
        """
        method = tiltsam.METHODS[self.method]
        parameters = inspect.signature(method).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            if common.get("parallel") and "parallel" not in parameters:
                raise ConfigError(f"{self.method} has no option parallel: train it in one process")
            common = {name: value for name, value in common.items() if name in parameters}
        if self.every > 1:
            method = _with_plain_steps(method, self.every)
        try:
            return method(base, **self.options, **common)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def check_options(self) -> None:
        """Raise a ConfigError if the method refuses the value of an option, before anything is trained."""
        self.wrap(torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=self.lr))

    def key(self) -> str:
        """Return a short name of all settings but the seed: runs that differ only in the seed are averaged."""
        changed = {name: value for name, default in DEFAULTS.items() if (value := getattr(self, name)) != default}
        body = {**changed, **self.options}
        body = {k: float(v) if isinstance(v, int) else v for k, v in body.items() if k not in ("seed", "device")}
        return f"{self.method}-{json_digest(body)[:10]}"


def tilt_defaults(example_tilt: float, class_tilt: float | None) -> dict[str, float]:
    """Return the defaults of the fields that depend on the tilts."""
    negative = example_tilt < 0
    return {
        "example_ess": TILT_ESS if negative and class_tilt is None else 0.0,
        "example_tilt_warmup": TILT_WARMUP if negative else 0.0,
    }


DEFAULTS: dict[str, Any] = {
    **{f.name: f.default for f in dataclasses.fields(TrainConfig) if f.name != "options"},
    **tilt_defaults(0.0, None),
}
"""The defaults of the fields, without the options; of those that depend on a tilt, the values without one."""

# ---------------------------------------------------------------- the options of a method


def method_options(method: str) -> Mapping[str, Parameter]:
    """Return the options of a method: the arguments of its constructor that a config can set, by name.

    The first argument is the base optimizer. Arguments that have the name of a field are left out.

    Raises:
        ConfigError: If there is no such method.

    Example:
        >>> list(method_options("asam"))
        ['rho', 'eta']
    """
    if method not in tiltsam.METHODS:
        close = difflib.get_close_matches(method.lower(), tiltsam.METHODS, 1) if "," not in method else []
        hint = f"did you mean {close[0]}? " if close else ""
        separate = "; separate methods by spaces" if "," in method else ""
        raise ConfigError(f"unknown method {method!r}: {hint}one of {', '.join(tiltsam.METHODS)}{separate}")
    return _options(tiltsam.METHODS[method])


@lru_cache
def _options(constructor: Callable[..., tiltsam.SharpnessAware]) -> Mapping[str, Parameter]:
    try:
        signature = inspect.signature(constructor, eval_str=True)
    except NameError:  # an annotation that is imported for type checkers only
        signature = inspect.signature(constructor)
    _, *arguments = signature.parameters.values()
    left_out = {*_NOT_OPTIONS, *field_types()}
    named = [p for p in arguments if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name not in left_out]
    return {p.name: p for p in named if set(allowed_types(p.annotation)) - {NoneType}}


def has_setting(method: str, name: str) -> bool:
    """Return whether a config of the method can set a field or an option of that name.

    Raises:
        ConfigError: If there is no such method.
    """
    options = method_options(method)
    if name in NEEDED_OPTION:
        return NEEDED_OPTION[name] in options
    return name in options or name in field_types()


def ignores_tilt(config: TrainConfig) -> bool:
    """Return whether a tilt would have no effect, because there is one sample."""
    options = config.all_options()
    return options.get("num_samples") == 1 and options.get("sampler") != "hmc"  # HMC samples with it


def warn_if_tilt_has_no_effect(config: TrainConfig, name: str) -> None:
    """Warn if a config sets a tilt, but has one sample; the name is that of its method."""
    if ignores_tilt(config) and any(config.settings().get(setting) for setting in TILT_SETTINGS):
        warnings.warn(f"{name} has one sample, so t has no effect: set num_samples to 3 or more", stacklevel=2)


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


# ---------------------------------------------------------------- types of settings


def allowed_types(hint: Any) -> list[Any]:
    """Return what a setting may be, from its annotation: plain types, and the values of a ``Literal``.

    Types that a file cannot hold, such as a schedule, are left out. Without an annotation all plain types are returned.
    """
    if hint is Parameter.empty or hint is Any or isinstance(hint, str):
        return list(_PLAIN)
    if get_origin(hint) in (Union, UnionType):
        return [kind for part in get_args(hint) for kind in allowed_types(part)]
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [hint] if hint in _PLAIN else []


@lru_cache
def field_types() -> dict[str, Any]:
    """Return the annotations of the fields, without the options."""
    return {name: hint for name, hint in get_type_hints(TrainConfig).items() if name != "options"}


def _check_type(name: str, value: Any, hint: Any) -> None:
    allowed = allowed_types(hint)
    types = {kind for kind in allowed if isinstance(kind, type)} | ({int} if float in allowed else set())
    fits = isinstance(value, tuple(types)) and (bool in types or not isinstance(value, bool))
    if not fits and value not in [kind for kind in allowed if not isinstance(kind, type)]:
        names = ["None" if kind is NoneType else getattr(kind, "__name__", repr(kind)) for kind in allowed]
        wanted = " or ".join(names)
        raise ConfigError(f"{name} must be {wanted}, got {shorten(repr(value), 60)}")
