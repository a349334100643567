"""The trainable parameters of a model as one vector, with a center θ and a point that samplers move.

:class:`ParameterSpace` is all that a sampler sees of a network: it saves the weights, evaluates the closure wherever
the point is, and restores every bit when the passes of a step end, however they end.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Self

import torch
from torch import Tensor

from tiltsam.distributed import Parallel, Ranks, Sharding, local_part, reshard
from tiltsam.space.evaluator import Closure, Evaluator, scale_of
from tiltsam.space.gradient_mean import GradientMean
from tiltsam.space.model_state import ModelState
from tiltsam.space.protocol import EPS, Draw, Evaluation, Spread
from tiltsam.space.randomness import NoiseGenerators
from tiltsam.space.sampler_state import SamplerState
from tiltsam.space.scalars import DeviceScalars
from tiltsam.space.step_record import StepRecord, Weighting
from tiltsam.space.tensor_lists import TensorLists, allocate, as_real
from tiltsam.space.validation import check_storage

__all__ = ["ParameterSpace"]


class ParameterSpace(TensorLists):
    """The trainable parameters of some parameter groups as a :class:`~tiltsam.space.protocol.Space`.

    Memory besides the parameters, in their own precision: one copy of them (``center``) if steps move the point, one
    mean of gradients if a step has several samples, and the vectors that a sampler asks for by name. All are allocated
    once and reused at every step.

    Args:
        groups: The parameters by group. Frozen ones are skipped.
        model_state: Buffers and random states that the passes of a step share.
        parallel: The processes that take a step together.
        sampler_state: Vectors that the sampler keeps between steps.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        *,
        model_state: ModelState | None = None,
        parallel: Parallel | None = None,
        sampler_state: SamplerState | None = None,
    ) -> None:
        members = {id(p): (p, g) for g, group in enumerate(groups) for p in group if p.requires_grad}.values()
        self.params = [p for p, _ in members if p.numel()]
        self._empty = [p for p, _ in members if not p.numel()]  # they have no coordinates
        if not self.params:
            raise ValueError("no trainable parameters: every tensor is frozen (requires_grad=False) or empty")
        check_storage(self.params)
        self.model_state = model_state if model_state is not None else ModelState()
        self.sharding = sharding = Sharding(self.params)
        self.ranks = Ranks(parallel, self.model_state.model, sharding)
        here = self._local_tensors()
        self.ranks.check_same_weights(here)
        dtype = torch.float64 if any(x.dtype == torch.float64 for x in here) else torch.float32
        group_of = [g for p, g in members if p.numel()]
        super().__init__(here, group_of, [p.dim() for p in self.params], sharding=sharding, dtype=dtype)
        self.dim = sum(p.numel() * (2 if p.is_complex() else 1) for p in self.params)
        self.scalars = DeviceScalars(len(groups), dtype, self.device)
        self.radius = self.scalars.tensors["radius"]
        self._indices_by_device: dict[torch.device, list[int]] = {}
        for i, x in enumerate(here):
            self._indices_by_device.setdefault(x.device, []).append(i)
        self.generators = NoiseGenerators(list(self._indices_by_device))
        self.evaluator = Evaluator(self.params, self.model_state, self.ranks, sharding, dtype, self.device)
        self.gradient_mean = GradientMean(self.params, here, self.blocks, sharding, self.ranks)
        self.sampler_state = sampler_state if sampler_state is not None else SamplerState()
        self._point = here
        self._center: list[Tensor] = []  # allocated by the first step that moves the point
        self.weights_saved = False  # whether _center holds θ
        self._moved = False  # whether the point was handed out since θ was saved
        self._perturbation_norm: Tensor | None = self.zero  # ‖point − θ‖, if known; this very tensor at θ
        self._gradient: list[Tensor | None] = []  # of the last evaluation
        self._gradients_before: list[Tensor | None] | None = None  # until the mean replaces them
        self.is_unfinished = False  # whether a step has begun and is neither taken nor undone

    # ---------------------------------------------------------------- a step: save, perturb, restore

    def begin_passes(
        self,
        closures: Sequence[Closure],
        ascent_closure: Closure | None = None,
        scaler: torch.amp.GradScaler | None = None,
        *,
        moves: bool = True,
    ) -> None:
        """Save the weights; from here on the point may move. If anything is raised, call :meth:`roll_back`.

        Args:
            closures: One closure for all samples, or one for each.
            ascent_closure: Used for gradients that only give the direction of an ascent.
            scaler: The GradScaler that the closures use.
            moves: Whether the point will move at all.
        """
        if self.sharding.needs_views:
            self._point = self._local_tensors()  # p.data may be another tensor than at the last step
        if self.sharding.mesh is not None:
            reshard(self.model_state.model)  # an evaluation before the step may have left weights gathered at θ
        self._perturbation_norm = self.zero
        self.gradient_mean.begin_step()
        self.evaluator.begin_step(closures, ascent_closure, scaler)
        self.model_state.begin_step()
        if self.sampler_state.names:
            self.sampler_state.begin_step(self.params)
        self.is_unfinished = True
        self._gradients_before = [p.grad for p in self.params + self._empty]
        if moves:
            self.copy_(self.center, self._point)
            self.weights_saved = True

    def end_passes(self) -> None:
        """Restore the weights bit for bit and release the closures."""
        self._gradient.clear()  # the mean has what is needed of it
        self._restore()
        self.model_state.end_step()
        self.evaluator.end_step()

    def _restore(self) -> None:
        """Copy θ back if the point has moved; safe to repeat."""
        if self.weights_saved and self._moved:
            try:
                self.copy_(self._point, self._center)
            except Exception:  # a foreach copy may need memory, and an interrupt may have left autograd on
                for x, theta in zip(self._point, self._center, strict=True):
                    x.detach().copy_(theta)
        self.weights_saved = self._moved = False

    def assign_gradients(self) -> None:
        """Assign the mean of the samples' gradients to ``.grad`` of the parameters."""
        self.gradient_mean.assign()
        self._gradients_before = None

    def commit(self, *_: object) -> None:
        """Mark the step as taken: from here on it is not undone. First check that all ranks have the same gradient.

        Also used as a step hook of the base, whose arguments are ignored.
        """
        if self.is_unfinished:
            if not self.ranks.alone:
                self.ranks.check_same_gradients(self.params)
            self.is_unfinished = False

    def roll_back(self) -> None:
        """Undo a step that was not taken: weights, gradients, buffers and the sampler's vectors.

        What to undo follows from what was saved, not from where the step was interrupted, so this may be repeated if it
        is interrupted itself. Gradients stay once :meth:`assign_gradients` has set them.

        Raises:
            RuntimeError: If the weights cannot be restored. Their backup is kept, and the next step tries again.
        """
        try:
            self._restore()
        except Exception as error:
            raise RuntimeError(
                "the weights could not be restored and are still perturbed. Their original values are in "
                "optimizer.current_space().center; the next optimizer.step() restores them first"
            ) from error
        finally:
            self.evaluator.end_step()
            if self._gradients_before is not None:
                self.model_state.end_step()
                for p, grad in zip(self.params + self._empty, self._gradients_before, strict=True):
                    p.grad = grad
                self.gradient_mean.discard()
                if self.sharding.mesh is not None:
                    reshard(self.model_state.model, after_error=True)  # copies gathered at the perturbed weights
                self._gradients_before = None
            if self.is_unfinished:
                self.model_state.roll_back()
                self.sampler_state.roll_back(self.params)
                self.is_unfinished = self.weights_saved  # the weights could not be restored: the next step tries again

    def _local_tensors(self) -> list[Tensor]:
        return [as_real(local_part(p)) for p in self.params] if self.sharding.needs_views else list(self.params)

    def on_device(self) -> AbstractContextManager[object]:
        """Make the parameters' GPU the current one: Triton launches there."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def replica(self, point: list[Tensor]) -> Self:
        """Return a space over the same parameters and settings whose point is ``point`` and whose center is θ itself.

        For captured steps: the parameters are made to use the memory of ``point`` while their kernels are recorded, so
        θ neither moves nor has to be saved. Later changes to the settings are seen.
        """
        other = copy.copy(self)
        other.evaluator = copy.copy(self.evaluator)
        # Detached: the parameters themselves are made to use other memory.
        other._point, other._center = point, [x.detach() for x in self._local_tensors()]
        other.weights_saved, other._perturbation_norm = True, None
        other.release_vectors()
        return other

    def release_vectors(self) -> None:
        """Release scratch vectors and the last gradient."""
        self._scratch, self._gradient = {}, []

    # ---------------------------------------------------------------- numbers

    @property
    def rho(self) -> Tensor:
        """See :class:`Space`."""
        return self.scalars.rho

    @property
    def noisy(self) -> bool:
        """See :class:`Space`."""
        return self.scalars.noisy

    @property
    def ascending(self) -> bool:
        """See :class:`Space`."""
        return self.scalars.ascending

    def setting(self, name: str) -> Tensor:
        """See :class:`Space`."""
        numbers = self.scalars.tensors
        if name not in numbers:
            raise LookupError(f"the method has no numeric setting {name!r}; it has {', '.join(sorted(numbers))}")
        return numbers[name]

    # ---------------------------------------------------------------- passes

    def begin_sample(self, sample: int) -> None:
        """Let the next passes be those of this sample: it may have its own closure."""
        self.evaluator.current_sample = sample

    def evaluate(self, *, ascent: bool = False, after: Evaluation | None = None) -> Evaluation:
        """See :class:`Space`."""
        self._gradient.clear()  # a sampler may still hold the list; its memory is free from here on
        loss, gradient = self.evaluator.loss_and_gradient(ascent=ascent)
        self._gradient = gradient
        if self.evaluator.scaler is not None:
            self.scale_(gradient, 1 / scale_of(self.evaluator.scaler, loss))
        norm, finite = self._norm_if_finite(gradient, loss, after)
        if ascent and self.scalars.unperturbed:
            self.zero_unperturbed_(gradient)
            norm = torch.where(finite, self.norm(gradient), self.zero)
        if ascent and self.ranks.local_ascent:
            finite = self.ranks.all(finite)  # each rank has its own gradient: all must decide alike
            norm = norm.masked_fill(~finite, 0.0)
        return Evaluation(loss, gradient, norm, finite)

    def _norm_if_finite(
        self, gradient: list[Tensor | None], loss: Tensor, after: Evaluation | None
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of the gradient, or 0 unless it, the loss and ``after`` are finite; and whether they are."""
        norm = self.norm(gradient)
        if self.device.type == "cpu":  # reading values is free
            if math.isfinite(loss.item()) and math.isfinite(norm.item()) and (after is None or after.finite):
                return norm, self.true
            return self.zero, self.false
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        if after is not None:
            finite = finite & after.finite
        return torch.where(finite, norm, self.zero), finite

    def forward(self) -> Tensor:
        """See :class:`Space`."""
        return self.evaluator.loss()

    def step_record(self, weighting: Weighting | None, num_samples: int) -> StepRecord:
        """Return an empty record of the samples of a step."""
        return StepRecord(weighting)

    def add_to_mean(self, draw: Draw, share: Tensor, *, single: bool) -> None:
        """Add a sample's gradient to the mean of the step.

        Args:
            draw: The sample.
            share: Its share of the total weight so far.
            single: Whether it is the only sample of the step.
        """
        if single:
            self.zero_unless_(draw.gradient, draw.valid)
            self.gradient_mean.set(draw.gradient)
            return
        self.gradient_mean.add(draw.gradient, share.to(self.dtype), draw.valid)

    # ---------------------------------------------------------------- moving the point

    @property
    def point(self) -> list[Tensor]:
        """See :class:`Space`. Reading it marks the point as moved, since samplers write to it in place."""
        if not self.weights_saved:
            raise RuntimeError("the point can be moved only between begin_passes(moves=True) and end_passes()")
        self._perturbation_norm = None
        self._moved = True
        return self._point

    @property
    def center(self) -> list[Tensor]:
        """See :class:`Space`."""
        if not self._center:
            self._center, _ = allocate(self._point)
        return self._center

    def reset_to_center(self) -> None:
        """See :class:`Space`."""
        if self._perturbation_norm is not self.zero:
            self.copy_(self._point, self._center)
            self._perturbation_norm = self.zero

    def add_noise(self, sample: int, spread: Spread) -> None:
        """See :class:`Space`. The noise is drawn into the point itself: no other vector holds it."""
        point = self.point
        self.normal_(point, sample)
        self.scale_(point, spread.scale(lambda: self.norm(point), lambda: self.uniform(sample), self.dim))
        self.add_(point, self._center)

    def add_filter_noise(self, sample: int, gamma: Tensor) -> None:
        """See :class:`Space`."""
        point = self.point
        self.normal_(point, sample)
        scales = self.filter_norms(self._center)
        self.scale_(scales, gamma)
        self.map_(point, lambda z, w, scale: torch.addcmul(w, z, scale), self._center, scales)

    def ascend(self, at: Evaluation, rho: Tensor) -> None:
        """See :class:`Space`."""
        norm = at.norm
        self.zero_unless_(at.gradient, at.finite)
        if self.scalars.unperturbed:
            self.zero_unperturbed_(at.gradient)
            norm = self.norm(at.gradient)
        scale = rho / (norm + EPS)
        distance = scale * norm if self._perturbation_norm is self.zero and rho.dim() == 0 else None
        self.add_scaled_(self.point, at.gradient, scale)
        self._perturbation_norm = distance

    def ascend_adaptive(self, at: Evaluation, rho: Tensor, eta: Tensor) -> None:
        """See :class:`Space`."""
        self.zero_unless_(at.gradient, at.finite)
        self.zero_unperturbed_(at.gradient)
        self.scale_by_abs_(at.gradient, self._center, eta)
        # Tg gets its length before it is scaled again: in half precision T²g may be too small to represent.
        self.scale_(at.gradient, rho / (self.norm(at.gradient) + EPS))
        self.scale_by_abs_(at.gradient, self._center, eta)
        self.add_(self.point, at.gradient)

    def perturbation_norm(self) -> Tensor:
        """Return ``‖point − θ‖``. Call it after the last evaluation of a sample: it may overwrite the point."""
        if self._perturbation_norm is not None:
            return self._perturbation_norm
        self.add_(self.point, self._center, alpha=-1.0)
        return self.norm(self._point)

    # ---------------------------------------------------------------- vectors

    def state_vector(self, name: str) -> list[Tensor]:
        """See :class:`Space`."""
        return self.sampler_state.vector(name, self.params)

    def zero_unperturbed_(self, x: Sequence[Tensor | None]) -> None:
        """See :class:`Space`."""
        if not self.scalars.unperturbed:
            return
        for block, here, _ in self._pairs(x, x, by_group=True):
            if block.group in self.scalars.unperturbed:
                torch._foreach_zero_(here)

    def normal_(self, x: Sequence[Tensor], sample: int) -> None:
        """See :class:`Space`. Drawn tensor by tensor in parameter order, whatever the parameter groups."""
        for device, indices in self._indices_by_device.items():
            generator = self.generators.generator(sample, device)
            for i in indices:
                if self.sharding.mesh is None:
                    x[i].normal_(generator=generator)
                else:
                    self.sharding.normal_(i, x[i], generator)

    def uniform(self, sample: int) -> Tensor:
        """See :class:`Space`."""
        generator = self.generators.generator(sample, self.device)
        return torch.rand((), generator=generator, dtype=self.dtype, device=self.device)
