"""A model held still: the mean loss of a data set as a function of the weights.

Every measurement of flatness asks the same thing of a model, "what is the loss of this data set at these
weights?", and must leave no trace of having asked. :class:`LossSurface` is the one place that knows how: it
puts the model in eval mode, pins the random numbers, walks the data, and on leaving puts back, bit for bit,
the weights, the buffers, the gradients, the mode of every module and the state of the random generators,
whatever was raised in between. A ``torch.autocast`` around a measurement holds for the loss function, not for
what is made of it.

The convention for data, here and in every function that measures:

- ``loss_fn(model, batch)`` returns the *mean* loss of the batch as a scalar tensor.
- ``batches`` is anything that can be walked more than once (a list, a ``DataLoader``) or a function without
  arguments that starts a new walk. A batch is a tensor, or tuples, lists and dicts of them; its tensors are
  moved to the device of the model.
- The loss of the data set is the mean over batches weighted by their size, the length of the first tensor
  found. A loss that is a mean over something else (tokens) brings its own ``size_of``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from tiltsam.batches import leaves, to_device
from tiltsam.buffers import kept_buffers, to_the_end
from tiltsam.checks import check_storage
from tiltsam.distributed import is_sharded
from tiltsam.flatness.losses import check_finite, scalar
from tiltsam.flatness.randomness import RandomSources
from tiltsam.flatness.sums import weighted_mean
from tiltsam.passes import NeedsGraphError, forward_only
from tiltsam.vectors import apart, dense

__all__ = [
    "Batches",
    "LossFn",
    "LossSurface",
    "Progress",
    "batch_size",
    "generator",
    "layers",
    "supervised",
    "trainable",
    "walk",
]

Batches: TypeAlias = Iterable[Any] | Callable[[], Iterable[Any]]
"""A data set: a re-iterable of batches, or a function that returns one walk over them."""


class LossFn(Protocol):
    """The mean loss of one batch, a scalar tensor."""

    def __call__(self, model: nn.Module, batch: Any, /) -> Tensor:
        """The loss; gradients must be able to flow back from it."""


class Progress(Protocol):
    """Told after each unit of work how many are done, of how many at most."""

    def __call__(self, done: int, total: int, /) -> None:
        """Units of work done, and the most there can be."""


class LossSurface:
    """The mean loss over a data set as a function of a model's trainable parameters.

    A context manager. Inside, the model is in eval mode, and each walk over the data starts from the same random
    state (:class:`~tiltsam.flatness.randomness.RandomSources`), so a shuffling loader or a random augmentation gives
    the same batches each time: the loss is a function of the weights alone. On leaving, the model is as it was.

    Args:
        model: The model; only its trainable parameters count.
        loss_fn: ``loss_fn(model, batch)``, the mean loss of a batch.
        batches: The data set, see :mod:`tiltsam.flatness.evaluation`.
        parameters: Names of the parameters to look at, or a single name; all trainable ones by default.
        size_of: The weight of a batch in the mean over the data set.
        seed: Where each walk over the data puts the random state.

    Attributes:
        names: The names of the parameters, in the order of the model.
        params: The parameters themselves. Move them only after reading ``origin``, which is what saves them.
        autocast: The precision of each kind of device that was under autocast on entering.

    Raises:
        ValueError: If the model has no trainable parameter, ``parameters`` names one it does not have, a parameter is
            sharded, complex or in another's memory, or ``batches`` is for one walk, a batch or a set of examples.
        TypeError: If ``loss_fn`` is a criterion of torch, which takes outputs and targets.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))]
        >>> with LossSurface(model, supervised(nn.functional.mse_loss), data) as surface:
        ...     before = surface.loss()
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        batches: Batches,
        *,
        parameters: Sequence[str] | None = None,
        size_of: Callable[[Any], float] | None = None,
        seed: int = 0,
    ) -> None:
        if not callable(batches) and isinstance(batches, Iterator):
            raise ValueError(
                f"batches is a {type(batches).__name__}, which can be walked only once; "
                "give a list, a DataLoader, or a function that starts a new walk"
            )
        if isinstance(batches, Mapping):
            raise ValueError(f"batches is one batch ({type(batches).__name__}): write [batch]")
        if isinstance(batches, Dataset) and not isinstance(batches, IterableDataset):
            raise ValueError(f"batches is a {type(batches).__name__}, which yields examples: wrap it in a DataLoader")
        if getattr(loss_fn, "__module__", None) in ("torch.nn.functional", "torch.nn.modules.loss"):
            raise TypeError(
                "loss_fn is called as loss_fn(model, batch): write tiltsam.flatness.evaluation.supervised(criterion) "
                f"around a criterion of outputs and targets, got {loss_fn}"
            )
        known = trainable(model)
        names = [parameters] if isinstance(parameters, str) else parameters
        wanted = dict.fromkeys(known if names is None else names)
        if missing := [name for name in wanted if name not in known]:
            raise ValueError(f"the model has no trainable parameter named {', '.join(missing)}")
        chosen = [name for name in known if name in wanted]
        if not chosen:
            raise ValueError("no parameter was chosen: parameters is empty")
        if two := [name for name in chosen if known[name].is_complex()]:
            raise ValueError(
                f"parameter {two[0]} is complex, and flatness is measured along real coordinates: make its real and "
                "imaginary parts the parameter (torch.view_as_real)"
            )
        self.model = model
        self.loss_fn = loss_fn
        self.batches = batches
        self.size_of = batch_size if size_of is None else size_of
        self.seed = seed
        self.names = chosen
        self.params: list[nn.Parameter] = [known[name] for name in chosen]
        self.device = self.params[0].device
        self.autocast: dict[str, torch.dtype] = {}
        self._random = RandomSources(self.device, batches)
        self._walked = False  # whether a walk over the data found any
        self._draws: tuple[Any, ...] | None = None  # where evaluations that are to draw alike begin
        self._differentiates: bool | None = None  # whether loss_fn does inside, once that is known
        self._origin: list[Tensor] | None = None
        self._others: list[tuple[nn.Parameter, Tensor]] = []
        self._stack = ExitStack()
        self._differentiating = True  # the caller's grad mode

    @property
    def origin(self) -> list[Tensor]:
        """Copies of the parameters as they were, made when first asked for; restored on leaving."""
        if self._origin is None:
            self._origin = [p.detach().clone() for p in self.params]
        return self._origin

    def save_all(self) -> None:
        """Save the frozen parameters as well as ``origin``, for who is going to move them too."""
        _ = self.origin
        chosen = {id(p) for p in self.params}
        self._others = [(p, p.detach().clone()) for p in self.model.parameters() if id(p) not in chosen]

    def __enter__(self) -> LossSurface:
        self._differentiating = torch.is_grad_enabled()
        with ExitStack() as stack:  # whatever one of the steps back raises, the others are taken
            # A caller inside no_grad or inference_mode still gets gradients where a measurement needs them.
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.callback(torch.clear_autocast_cache)
            kinds = filter(torch.amp.is_autocast_available, {"cpu", self.device.type})
            self.autocast = {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
            for kind in self.autocast:
                stack.enter_context(torch.autocast(kind, enabled=False))
            stack.callback(self._random.restore, self._random.state())
            modes = [(module, module.training) for module in self.model.modules()]  # some are in eval mode on purpose
            for module, mode in modes:
                stack.callback(setattr, module, "training", mode)
            stack.callback(_train_again, modes)
            for param in self.model.parameters():
                stack.callback(setattr, param, "grad", param.grad)
                param.grad = None  # a loss that calls backward adds to one of its own
            stack.enter_context(kept_buffers(self.model))
            stack.callback(to_the_end, self._restore_all)
            self.model.eval()
            if any(getattr(module, "max_norm", None) is not None for module in self.model.modules()):
                self.save_all()  # such an embedding shortens its rows in place, whoever calls it
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._stack.close()
        except BaseException:  # an interrupt may have lost a callback that was about to be called
            try:
                to_the_end(self._restore_all)
            finally:
                self._stack.close()
                torch.set_grad_enabled(self._differentiating)
            raise

    def _restore_all(self) -> None:
        """Restore the weights and drop their backup, which is kept as ``origin`` if this fails; safe to repeat."""
        self.restore()
        for param, saved in self._others:
            _write(param, saved)
        self._origin, self._others = None, []

    def restore(self) -> None:
        """Put the parameters back where they were; nothing to do if ``origin`` was never read."""
        if self._origin is not None:
            for param, saved in zip(self.params, self._origin, strict=True):
                _write(param, saved)

    def walk(self) -> Iterator[tuple[Any, float]]:
        """One walk over the data: batches on the device of the model, each with its size.

        Raises:
            ValueError: If there is no batch, or one of a size that is not positive.
        """
        self._random.seed(self.seed)
        empty = True
        for number, batch in enumerate(walk(self.batches)):
            empty, self._walked = False, True
            size = float(self.size_of(batch))
            if not (math.isfinite(size) and size > 0):
                raise ValueError(f"batch {number} has size {size:g}; a batch must hold at least one example")
            yield to_device(batch, self.device), size
        if empty and self._walked:
            raise ValueError("batches can be walked only once: give a list, or a function that starts a new walk")
        if empty:
            raise ValueError("the data set is empty: batches yielded nothing")

    def loss(self, where: str = "") -> float:
        """The loss of the data set at the current weights. One forward pass over the data, no graph.

        Args:
            where: What to call these weights in an error message.

        Raises:
            ValueError: If the loss of a batch is not a finite scalar.
        """
        values, sizes = [], []
        with torch.no_grad():
            for batch, size in self.walk():
                values.append(self.value(batch))
                sizes.append(size)
        # One transfer for the whole walk: the device runs ahead of the host until here.
        losses = torch.stack(values).to("cpu", torch.float64)
        check_finite(losses, where)
        return weighted_mean(losses, torch.tensor(sizes, dtype=torch.float64, device="cpu"))[0]

    @contextmanager
    def same_draws(self) -> Iterator[None]:
        """Inside, every evaluation starts from one random state: losses differ by the weights, not by their noise."""
        self._draws = self._random.state()
        try:
            yield
        finally:
            self._draws = None

    def evaluate(self, batch: Any) -> Tensor:
        """The loss of one batch at the current weights, a scalar with its graph, under the caller's autocast."""
        with ExitStack() as stack:
            for kind, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype))
            # Autocast keeps its copies of the weights until the outermost one ends, wherever they move meanwhile.
            torch.clear_autocast_cache()
            if self._draws is not None:
                self._random.restore(self._draws)
            return scalar(self.loss_fn(self.model, batch))

    def sloping(self, batch: Any) -> Tensor:
        """:meth:`evaluate`, for who is going to differentiate; a ValueError if that cannot be done."""
        loss = self.evaluate(batch)
        if not loss.requires_grad:
            raise ValueError("what loss_fn returns has no gradient: it was detached, or the model runs under no_grad")
        return loss

    def value(self, batch: Any) -> Tensor:
        """The loss of one batch at the current weights, a scalar; without a graph, unless the loss needs one itself."""
        if self._differentiates is None:
            state = self._random.state()
            try:
                found: Tensor = forward_only(lambda: self.evaluate(batch), skip_backward=False).detach()
            except NeedsGraphError:
                self._random.restore(state)
                self._differentiates = True  # a gradient penalty, say, or forces
            else:
                self._differentiates = False
                return found
        with torch.set_grad_enabled(self._differentiates):
            return self.evaluate(batch).detach()

    def gradient(self, batch: Any) -> tuple[Tensor, list[Tensor]]:
        """The loss of one batch and its gradient at the current weights, to be overwritten; ``.grad`` is left alone."""
        loss = self.sloping(batch)
        grads = torch.autograd.grad(loss, self.params, allow_unused=True)
        whole = (None if g is None else g.to_dense() for g in grads)  # that of an embedding may be sparse
        # That of a sum is one number, spread out over all elements.
        own = apart(g if g is None or dense(g) else g.clone() for g in whole)
        pairs = zip(own, self.params, strict=True)
        return loss.detach(), [torch.zeros_like(p) if g is None else g for g, p in pairs]


def supervised(criterion: Callable[[Any, Any], Tensor]) -> LossFn:
    """The usual case: ``criterion(model(inputs), targets)`` for batches of ``(inputs, targets)``.

    Example:
        >>> loss_fn = supervised(nn.functional.cross_entropy)
        >>> loss_fn(nn.Linear(2, 3), (torch.ones(4, 2), torch.zeros(4, dtype=torch.long))).shape
        torch.Size([])
    """
    if (reduction := getattr(criterion, "reduction", None)) in ("sum", "none"):
        raise ValueError(f"the criterion must give the mean loss of a batch, got one with reduction={reduction!r}")

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        if isinstance(batch, Tensor):  # two rows of which would pass for inputs and targets
            why = "a batch must be (inputs, targets), got a Tensor: for a single one write [(inputs, targets)]"
            raise ValueError(why)
        inputs, targets = batch
        return criterion(model(inputs), targets)

    return loss_fn


def batch_size(batch: Any) -> int:
    """The number of examples in a batch: the length of the first tensor found in it, depth first.

    Raises:
        ValueError: If it holds no tensor with a first dimension.
    """
    for leaf in leaves(batch):
        if leaf.dim() > 0:
            return len(leaf)
    raise ValueError(f"cannot tell the size of a batch of type {type(batch).__name__}; give size_of")


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name; one that is tied under several names comes once.

    Raises:
        ValueError: If there is none, two share memory, or one of the model's is sharded.
    """
    if sharded := [name for name, p in model.named_parameters() if is_sharded(p)]:
        raise ValueError(
            f"parameter {sharded[0]} is sharded, and flatness is measured by each process alone: gather the model "
            "first, by loading its full state dict into one that is not sharded (get_model_state_dict of "
            "torch.distributed.checkpoint.state_dict, with full_state_dict=True)"
        )
    found = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel() > 0}
    if not found:
        raise ValueError("the model has no trainable parameters")
    check_storage(list(found.values()))
    return found


def layers(model: nn.Module) -> dict[str, list[str]]:
    """The trainable parameters of each layer, the module that owns them: ``{layer: [parameter names]}``.

    Example:
        >>> layers(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)))
        {'0': ['0.weight', '0.bias'], '2': ['2.weight', '2.bias']}
    """
    found: dict[str, list[str]] = {}
    for name in trainable(model):
        found.setdefault(name.rpartition(".")[0], []).append(name)
    return found


def generator(device: torch.device, *key: int | str) -> torch.Generator:
    """A generator whose stream depends on the key alone, ``(purpose, seed, sample)`` say.

    The key is hashed, so neighbouring seeds and samples are unrelated and nobody's stream is another's.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest, "big") >> 1)


def walk(batches: Batches) -> Iterable[Any]:
    """One walk over the data set."""
    return batches() if callable(batches) else batches


def _train_again(modes: list[tuple[nn.Module, bool]]) -> None:
    """Tell modules their mode, the outer ones first: some do more than note it (adapters that merge their weights)."""
    for module, mode in modes:
        if module.training != mode:
            module.train(mode)


def _write(tensor: Tensor, saved: Tensor) -> None:
    tensor.detach().copy_(saved)  # an interrupted no_grad() would leave gradients switched off
