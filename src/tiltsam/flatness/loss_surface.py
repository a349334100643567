"""The mean loss of a data set as a function of a model's weights.

Every measurement asks for the loss of a data set at some weights and must leave the model unchanged.
:class:`LossSurface` does both: it puts the model in eval mode, pins the random numbers and iterates over the data; on
exit it restores, bit for bit, the weights, the buffers, the gradients, the mode of every module and the state of the
random generators, whatever was raised. ``torch.autocast`` around a measurement applies to the loss function only.

The convention for data, here and in every function that measures:

- ``loss_fn(model, batch)`` returns the *mean* loss of the batch as a scalar tensor.
- ``batches`` is anything that can be iterated more than once (a list, a ``DataLoader``), or a function without
  arguments that returns a new iterator. A batch is a tensor, or nested tuples, lists and dicts of tensors, which are
  moved to the device of the model.
- The loss of the data set is the mean over batches weighted by their size, the length of the first tensor in each.
  Pass ``size_of`` for a loss that is a mean over something else, such as tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from tiltsam.distributed import is_sharded
from tiltsam.flatness.data import batch_size, to_device
from tiltsam.flatness.numerics import finite_losses, weighted_mean, write_sum
from tiltsam.flatness.randomness import RandomSources
from tiltsam.space.evaluator import needs_graph
from tiltsam.space.model_state import BufferSnapshot, uninterrupted
from tiltsam.space.validation import check_storage

__all__ = ["Batches", "LossFn", "LossSurface", "ProgressCallback", "supervised", "trainable"]

Batches: TypeAlias = Iterable[Any] | Callable[[], Iterable[Any]]
"""A data set: a re-iterable of batches, or a function that returns a new iterable of them."""

ProgressCallback: TypeAlias = Callable[[int, int], object]
"""Called as ``progress(done, total)`` after each unit of work."""


class LossFn(Protocol):
    """A function that returns the mean loss of one batch, a scalar tensor."""

    def __call__(self, model: nn.Module, batch: Any, /) -> Tensor:
        """Return the loss; it must be differentiable."""


class LossSurface:
    """The mean loss over a data set as a function of a model's trainable parameters. A context manager.

    Inside the context the model is in eval mode, and each iteration over the data starts from the same random state,
    so a shuffling loader or a random augmentation gives the same batches every time: the loss depends on the weights
    alone. On exit the model is restored.

    Args:
        model: The model.
        loss_fn: ``loss_fn(model, batch)``, the mean loss of a batch.
        batches: The data set, see :mod:`tiltsam.flatness.loss_surface`.
        parameters: Names of the parameters to move, or a single name; all trainable ones by default.
        size_of: Weight of a batch in the mean over the data set; its number of examples by default.
        seed: Seed of the global generators, set before each iteration over the data.

    Attributes:
        names: The names of the parameters, in the order of the model.
        params: The parameters. Use :meth:`move_to` and :meth:`move_by` to change them.
        device: The device of the first parameter; batches are moved there.
        autocast: The dtype of each device type that was under autocast on entry.

    Raises:
        TypeError: If ``model`` is not a module, or ``loss_fn`` is one (a criterion, say).
        ValueError: If ``parameters`` names none of the trainable parameters, or :func:`trainable` rejects the model.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))]
        >>> with LossSurface(model, supervised(nn.functional.mse_loss), data) as surface:
        ...     before = surface.mean_loss()
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
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
        if isinstance(loss_fn, nn.Module) or getattr(loss_fn, "__module__", None) == nn.functional.__name__:
            raise TypeError(
                "loss_fn is called as loss_fn(model, batch): pass tiltsam.sharpness.supervised(criterion) "
                f"for a criterion of outputs and targets, got {loss_fn}"
            )
        known = trainable(model)
        wanted = set(known if parameters is None else [parameters] if isinstance(parameters, str) else parameters)
        if not wanted or not wanted <= known.keys():
            unknown = sorted(wanted - known.keys())
            raise ValueError(f"parameters must name trainable parameters of the model, got {unknown}")
        self.model = model
        self.loss_fn = loss_fn
        self.batches = batches
        self.size_of = batch_size if size_of is None else size_of
        self.seed = seed
        self.names = [name for name in known if name in wanted]
        self.params: list[nn.Parameter] = [known[name] for name in self.names]
        self.device = self.params[0].device
        self.autocast: dict[str, torch.dtype] = {}
        self._random = RandomSources(self.device, batches)
        self._fixed_state: tuple[Any, ...] | None = None  # set by fixed_randomness
        self._needs_grad: bool | None = None  # whether loss_fn calls autograd itself; unknown before the first batch
        self._origin: list[Tensor] | None = None
        self._saved: list[tuple[nn.Parameter, Tensor]] = []
        self._stack = ExitStack()
        self._grad_enabled = True  # the caller's grad mode

    def __enter__(self) -> LossSurface:
        self._grad_enabled = torch.is_grad_enabled()
        try:
            self._prepare()
            return self
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._stack.close()
        except BaseException:  # an interrupt may have lost a callback that was about to be called
            try:
                uninterrupted(self._restore_and_forget)
            finally:
                self._stack.close()
                torch.set_grad_enabled(self._grad_enabled)
            raise

    def _prepare(self) -> None:
        """Set modes, gradients and contexts for measuring; the stack holds what restores each before it changes."""
        stack = self._stack
        # The caller may be inside no_grad or inference_mode.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.callback(torch.clear_autocast_cache)
        kinds = filter(torch.amp.is_autocast_available, {"cpu", self.device.type})
        self.autocast = {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
        for kind in self.autocast:
            stack.enter_context(torch.autocast(kind, enabled=False))
        # Callbacks, not generators: an interrupt abandons a generator, whose end then runs at any later time.
        stack.callback(self._random.restore, self._random.state())
        modes = [(module, module.training) for module in self.model.modules()]
        stack.callback(uninterrupted, partial(_restore_modes, modes))
        self.model.eval()
        grads = [(param, param.grad) for param in self.model.parameters()]
        stack.callback(uninterrupted, partial(_restore_gradients, grads))
        for param, _ in grads:
            param.grad = None  # loss_fn may call backward
        buffers = BufferSnapshot()
        buffers.save(self.model.modules())
        stack.callback(uninterrupted, buffers.restore)
        stack.callback(uninterrupted, self._restore_and_forget)
        if any(getattr(module, "max_norm", None) is not None for module in self.model.modules()):
            self.save_all()  # an embedding with max_norm rescales its rows in place in every forward pass

    @property
    def origin(self) -> list[Tensor]:
        """Copies of the parameters on entry, made on first use; restored on exit."""
        return self._save()

    def _save(self) -> list[Tensor]:
        """Copy the parameters, unless that was done, and return the copies."""
        if self._origin is None:
            self._origin = [p.detach().clone() for p in self.params]
            self._saved += zip(self.params, self._origin, strict=True)
        return self._origin

    def save_all(self) -> None:
        """Save every parameter of the model, the frozen ones too, before they are written directly."""
        self._save()
        saved = {id(param) for param, _ in self._saved}
        self._saved += [(p, p.detach().clone()) for p in self.model.parameters() if id(p) not in saved]

    def restore(self) -> None:
        """Restore the saved parameters; does nothing if none were saved."""
        for param, value in self._saved:
            param.detach().copy_(value)  # an interrupted no_grad() would leave gradients disabled

    def _restore_and_forget(self) -> None:
        """Restore the parameters and drop their copies, which stay in ``origin`` if this fails; safe to repeat."""
        self.restore()
        self._origin, self._saved = None, []

    def move_to(self, offsets: Iterable[Tensor]) -> None:
        """Set the parameters to ``origin + offsets``, one tensor each; warn if half precision rounds them away."""
        write_sum(self.params, self.origin, offsets)

    def move_by(self, offsets: Iterable[Tensor]) -> None:
        """Add ``offsets`` to the parameters as they are now."""
        self._save()
        write_sum(self.params, self.params, offsets)

    def iterate(self) -> Iterator[tuple[Any, float]]:
        """Iterate over the data once: yield each batch, on the device of the model, and its size.

        Raises:
            ValueError: If there is no batch, or the size of one is not positive.
        """
        self._random.seed(self.seed)
        number = -1
        for number, batch in enumerate(self.batches() if callable(self.batches) else self.batches):
            size = float(self.size_of(batch))
            if not 0 < size < math.inf:
                raise ValueError(f"the size of a batch must be finite and > 0, got {size:g} for batch {number}")
            yield to_device(batch, self.device), size
        if number < 0:
            raise ValueError(
                "batches yielded nothing: it is empty, or an iterator that is exhausted after one pass; pass a list, a "
                "DataLoader or a function that returns a new iterator"
            )

    def mean_loss(self, where: str = "") -> float:
        """Return the loss of the data set at the current weights. Cost: one forward pass over the data.

        Args:
            where: Description of these weights for an error message, such as ``" at position 0.5"``.

        Raises:
            ValueError: If the loss of a batch is not a finite scalar.
        """
        losses, sizes = [], []
        for batch, size in self.iterate():
            losses.append(self.batch_loss(batch))
            sizes.append(size)
        return weighted_mean(finite_losses(losses, where), sizes).value

    def batch_loss(self, batch: Any) -> Tensor:
        """Return the loss of one batch, a detached scalar. Runs under ``no_grad`` unless ``loss_fn`` needs autograd."""
        if self._needs_grad is None:
            state = self._random.state()
            try:
                with torch.no_grad():
                    loss = self._evaluate(batch)
                self._needs_grad = False
            except RuntimeError as error:
                if not needs_graph(error):
                    raise
                self._random.restore(state)
                loss = self._evaluate(batch)
                self._needs_grad = True
            return loss.detach()
        with torch.set_grad_enabled(self._needs_grad):
            return self._evaluate(batch).detach()

    def differentiable_loss(self, batch: Any) -> Tensor:
        """Return the loss of one batch with its graph.

        Raises:
            ValueError: If the loss does not require grad.
        """
        loss = self._evaluate(batch)
        if not loss.requires_grad:
            raise ValueError("loss_fn returned a loss that does not require grad: it is detached or made under no_grad")
        return loss

    def loss_and_gradient(self, batch: Any) -> tuple[Tensor, list[Tensor]]:
        """Return the loss of one batch and its gradient, leaving ``.grad`` alone.

        The gradients are dense but may share memory with each other: do not write to them.
        """
        loss = self.differentiable_loss(batch)
        grads = torch.autograd.grad(loss, self.params, allow_unused=True)
        pairs = zip(grads, self.params, strict=True)
        return loss.detach(), [torch.zeros_like(p) if g is None else g.to_dense() for g, p in pairs]

    @contextmanager
    def fixed_randomness(self) -> Iterator[None]:
        """Start every evaluation inside from the same random state, so losses differ only by the weights."""
        self._fixed_state = self._random.state()
        try:
            yield
        finally:
            self._fixed_state = None

    def _evaluate(self, batch: Any) -> Tensor:
        """Return ``loss_fn(model, batch)`` as a 0-dim tensor, computed under the caller's autocast."""
        with ExitStack() as stack:
            for kind, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype))
            # Autocast caches its copies of the weights until the outermost context ends, even if the weights change.
            torch.clear_autocast_cache()
            if self._fixed_state is not None:
                self._random.restore(self._fixed_state)
            loss = self.loss_fn(self.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn must return the mean loss of the batch, a scalar tensor, got {got}")
        return loss.reshape(())


def supervised(criterion: Callable[[Any, Any], Tensor]) -> LossFn:
    """Return the loss function ``criterion(model(inputs), targets)`` for batches of ``(inputs, targets)``.

    Raises:
        ValueError: If the criterion has ``reduction="sum"`` or ``"none"``.

    Example:
        >>> loss_fn = supervised(nn.functional.cross_entropy)
        >>> loss_fn(nn.Linear(2, 3), (torch.ones(4, 2), torch.zeros(4, dtype=torch.long))).shape
        torch.Size([])
    """
    if (reduction := getattr(criterion, "reduction", "mean")) in ("sum", "none"):
        raise ValueError(f"criterion must have reduction='mean', got {reduction!r}")

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        if isinstance(batch, Tensor):  # a tensor of two rows would unpack
            raise ValueError(
                "a batch must be (inputs, targets), got a Tensor; pass a single batch as [(inputs, targets)]"
            )
        inputs, targets = batch
        return criterion(model(inputs), targets)

    return loss_fn


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name; a parameter with several names appears once.

    Raises:
        ValueError: If there is none, one is complex or sharded, or two share memory.
    """
    found = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel() > 0}
    if not found:
        raise ValueError("the model has no trainable parameters")
    for name, p in model.named_parameters():
        if is_sharded(p):
            raise ValueError(
                f"parameter {name} is sharded: load the full state dict (get_model_state_dict of "
                "torch.distributed.checkpoint.state_dict with full_state_dict=True) into a model that is not"
            )
        if p.requires_grad and p.is_complex():
            raise ValueError(f"parameters must be real, got {p.dtype} for {name}: use torch.view_as_real")
    check_storage(list(found.values()))
    return found


def _restore_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    """Restore the training mode of each module."""
    try:
        for module, mode in modes:  # outer modules first
            if module.training != mode:
                module.train(mode)  # may do more than set the flag: some adapters merge their weights in eval mode
    finally:
        for module, mode in modes:
            module.training = mode


def _restore_gradients(grads: list[tuple[nn.Parameter, Tensor | None]]) -> None:
    """Restore the gradient of each parameter."""
    for param, grad in grads:
        param.grad = grad
