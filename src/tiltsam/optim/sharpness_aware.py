"""The optimizer that wraps another: it gives the base a gradient computed from evaluations near the weights.

A step of any method:

.. code-block:: text

    save θ
    for j in 1..s:
        sampler: move the weights to θ + ε_j, evaluate loss and gradient there
        mean of gradients += share of sample j · (its gradient − mean)
    restore θ
    base.step() with the mean as gradient

Methods choose a sampler (where to evaluate, :mod:`tiltsam.samplers`) and a weighting (how samples count).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from tiltsam.distributed import Parallel
from tiltsam.fused import parameter_space
from tiltsam.optim.hyperparameters import Hyperparameters
from tiltsam.optim.sample_parallel import average_samples_over_ranks
from tiltsam.optim.step_info import StepInfo
from tiltsam.optim.validation import (
    NEEDS_SCALER,
    add_hint,
    check_arguments,
    check_base,
    check_call,
    check_minimizes,
    check_not_lightning,
    check_sampler,
    is_state_initialization,
    warn_changed_weights,
    warn_low_precision,
    warn_missing_model,
    warn_missing_scaler,
    warn_sharded_without_model,
    warn_split_samples_without_model,
)
from tiltsam.samplers import Sampler
from tiltsam.space.evaluator import NEEDS_CLOSURE, Closure, check_closures, scale_of
from tiltsam.space.model_state import ModelState, uninterrupted
from tiltsam.space.parameter_space import ParameterSpace
from tiltsam.space.sampler_state import SamplerState
from tiltsam.space.step_record import FixedWeights, StepRecord, Weighting
from tiltsam.space.validation import check_count, check_nonnegative, warn

__all__ = ["SharpnessAware", "Step"]

DETECTED = Parallel()  # the processes of DDP, FSDP2 or torch.distributed
_MAX_PENDING = 256  # samples whose validity is kept before it is summed up


class Step(NamedTuple):
    """What a step needs to run."""

    space: ParameterSpace
    sampler: Sampler
    num_samples: int
    closures: Sequence[Closure]
    ascent_closure: Closure | None = None
    scaler: torch.amp.GradScaler | None = None


class SharpnessAware(Optimizer):
    """A torch optimizer that wraps another one and gives it a gradient computed from evaluations near the weights.

    It shares ``param_groups`` and ``state`` with ``base``: schedulers, hooks, ``add_param_group`` and checkpoints work
    on either. The settings of a method are entries of the parameter groups, under the names of the constructor's
    arguments; if the base already uses a name (Adadelta's ``rho``, RMSprop's ``alpha``) ours is ``tilt_<name>``.
    ``rho`` may differ between groups. A schedule skips groups that set their own ``rho``. If the base has a
    ``rho`` of its own (Adadelta), write ``tilt_rho`` there. All other settings have one value for the whole step.

    Each step also steps the base, so torch's global step hooks run twice.

    A step that raises is undone: whatever the closure or a hook before the base's update raises, including a Ctrl-C,
    weights, buffers and the step count are those from before the step, bit for bit (``.grad`` may be empty). An error
    inside the base's own update is not undone.

    Args:
        base: An *instance* of a torch optimizer.
        sampler: Where to evaluate.
        settings: Settings of the method and their initial values; a callable is a schedule, evaluated at each step.
        model: All that the closure runs; several modules in one ``nn.ModuleList``. Pass it for models with BatchNorm:
            buffers are then updated once a step, at its first pass.
        seed: Seed of the noise. All noise derives from (seed, step, sample): a resumed run draws what an uninterrupted
            one would have drawn, and the global random state is never used.
        buffers_once: Whether ``model``'s buffers keep the values of the first pass.
        same_dropout: Whether all passes start from the same random state of torch (CPU and CUDA), so that dropout masks
            are the same. numpy and ``random`` are left alone.
        parallel: The processes that take each step together, see :class:`tiltsam.Parallel`; by default they are
            detected (DDP, FSDP2, or all processes of ``torch.distributed``). ``None``: this process trains on its own.
        skip_nonfinite: If no sample of a step is finite, do not step the base. Costs one host synchronisation a step;
            otherwise the base steps with a zero gradient.
    """

    checks: ClassVar[Mapping[str, Callable[[str, Any], None]]] = {}
    """For settings that must be bounded: called with name and value whenever settings have changed."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Reject ``SAM(params, SGD, lr=0.1)``, the signature of other packages, before Python rejects ``lr``."""
        check_call(cls, SharpnessAware, args, kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        base: Optimizer,
        sampler: Sampler,
        settings: Mapping[str, Any],
        *,
        model: torch.nn.Module | None = None,
        seed: int = 0,
        buffers_once: bool = True,
        same_dropout: bool = True,
        parallel: Parallel | None = DETECTED,
        skip_nonfinite: bool = False,
    ) -> None:
        check_base(base, type(self).__name__, SharpnessAware)
        check_arguments(base, model, parallel)
        check_sampler(sampler)
        self.base = base
        self.sampler = sampler
        self.model = model
        self.parallel = parallel
        self.skip_nonfinite = skip_nonfinite
        self._model_options = {"buffers_once": buffers_once, "same_dropout": same_dropout}
        self._sampler_state = SamplerState(sampler.state_names)
        self._sampler_state.check_base(base)
        # Optimizer.__init__ would create its own groups and state. Its unpickling path sets up the rest of an
        # Optimizer (hooks, the profiled step) around ours.
        Optimizer.__setstate__(self, {"defaults": {**base.defaults}})
        initial = {**settings, "seed": seed, "steps_taken": 0}
        self._hyperparameters = Hyperparameters(base, type(self).__name__, initial)
        self._setting_names = [name for name in settings if name != "rho"]
        self._space: ParameterSpace | None = None
        self._layout: list[Any] = []  # of the parameters that the space was built for
        self._written: tuple[Any, ...] = ()  # settings that were checked and written to the space
        self._info: StepInfo | None = None
        self._valid: list[Tensor] = []  # whether samples were finite, not counted yet
        self._num_nonfinite: Tensor | int = 0
        self._stepping = False  # whether a step is in progress
        self._has_stepped = False
        self.check_settings()

    __new__.__signature__ = inspect.signature(__init__)  # type: ignore[attr-defined]  # for help()

    def __getstate__(self) -> dict[str, Any]:
        # Leave out a scheduler's patch of step, hooks (as torch does), and what the next step builds again.
        state = {k: v for k, v in self.__dict__.items() if k != "step" and not k.startswith("_optimizer_")}
        return {**state, "_space": None, "_written": (), "_info": None, "_stepping": False}

    # ---------------------------------------------------------------- what a method may override

    def check_settings(self) -> None:
        """Raise on a setting out of bounds. Called when settings have changed. Overrides call ``super()``."""
        check_count("seed", self.setting("seed"), 0)
        for name, check in self.checks.items():
            check(name, self.setting(name))
        if "rho" in self._hyperparameters:
            for rho in self._hyperparameters.per_group_values("rho"):
                check_nonnegative("rho", rho)
        if self.sampler.moves:
            check_minimizes(self.param_groups)

    def write_settings(self, space: ParameterSpace) -> None:
        """Write settings to the device, where samplers read them by ``space.setting(name)``.

        All settings that are numbers are written; override it for numbers derived from them, and call ``super()``.
        """
        for name in self._setting_names:
            if not isinstance(value := self.setting(name), bool) and isinstance(value, int | float):
                space.scalars.set(name, float(value))
        if "rho" in self._hyperparameters:
            space.scalars.set_rho([float(rho) for rho in self._hyperparameters.per_group_values("rho")])

    @property
    def ascending(self) -> bool:
        """Whether ``rho`` is nonzero in any parameter group: :meth:`plan` may choose a plain step otherwise."""
        return "rho" in self._hyperparameters and any(self._hyperparameters.per_group_values("rho"))

    @property
    def num_samples(self) -> int:
        """Number of samples of a step."""
        return 1

    def plan(self) -> tuple[Sampler, int]:
        """Return the sampler and the number of samples of the coming step.

        Override it for a method that does something else at some steps, decided by ``self.setting("steps_taken")``.
        Called more than once a step: it must have no side effects.
        """
        return self.sampler, self.num_samples

    def weighting(self, space: ParameterSpace) -> Weighting:
        """Return how the sample weights of a step are computed, if it has several samples; by default equal."""
        return FixedWeights(torch.ones(self.plan()[1], dtype=space.dtype, device=space.device))

    # ---------------------------------------------------------------- a step

    def step(  # type: ignore[override]
        self,
        closure: Closure | Sequence[Closure] | None = None,
        ascent_closure: Closure | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Tensor:
        """Evaluate around θ, restore θ, and let the base descend the aggregate gradient.

        Args:
            closure: Runs forward and backward on *one* mini-batch and returns the loss; called several times. It need
                not clear gradients, except those of parameters that are not this optimizer's. For gradient
                accumulation, loop over micro-batches inside and return the total.
                Or a list with one closure per sample, each on its own part of the mini-batch (m-SAM).
            ascent_closure: Runs instead of ``closure`` where only the direction of an ascent is needed (SAM's first
                pass). Evaluating part of the mini-batch there makes it cheaper.
            scaler: For float16: the closure calls ``scaler.scale(loss).backward()`` and returns the unscaled loss. The
                base's hooks see the unscaled aggregate. Samples that overflow get no weight; if all do, the base does
                not step. Call ``scaler.update()`` afterwards.

        Returns:
            The aggregate loss: for SAM the loss at the perturbed point, for TSAM the tilted loss of the samples with
            tilt t − δ (t/2 by default), the tilt of their weights. Detached, on the device of the parameters; NaN if no
            sample was finite, or without a closure, which is allowed only while rates and gradients are zero
            (``torch.distributed.checkpoint`` calls ``step()`` then, to create the base's state).

        Raises:
            RuntimeError: If called inside the closure of a step, or if the weights could not be restored after an
                error. The next step then restores them first.
        """
        name = type(self).__name__
        if closure is None and is_state_initialization(self.param_groups):
            self.base.step()
            return torch.full((), torch.nan)
        closures = check_closures(closure, ascent_closure, name)
        if not self._has_stepped and self.sampler.moves:
            for one in closures:
                check_not_lightning(one, name)
        return self._run(closures, ascent_closure, scaler, self._step_base).loss

    @torch._disable_dynamo  # type: ignore[attr-defined]  # in a compiled train step, SAM would be traced without its ascent
    def _run(
        self,
        closures: Sequence[Closure],
        ascent_closure: Closure | None,
        scaler: torch.amp.GradScaler | None,
        update: Callable[[Step, StepInfo], None],
    ) -> StepInfo:
        """Take a step: begin, aggregate, update, finish. If anything is raised before the update, undo it.

        An interrupt may arrive at any bytecode, also while a context manager below is left. The one handler here covers
        them all, so what it does must not depend on where the interrupt arrived.
        """
        if self._stepping:
            raise self._nested_step_error()
        grad_enabled = torch.is_grad_enabled()
        try:
            self._stepping = True
            with torch.no_grad():
                step = self.begin(closures, ascent_closure, scaler)
                with step.space.on_device():
                    info = self._aggregate(step)
                    if not self._has_stepped:
                        self._warn_at_first_step(step, info)
                    update(step, info)
                self._finish(info)
            self._stepping = False
        except BaseException as error:
            self._stepping = False
            uninterrupted(lambda: self._undo(grad_enabled))
            add_hint(error)
            if self._space is not None and not self._space.ranks.alone:
                self._space.ranks.annotate(error)
            raise
        return info

    def _undo(self, grad_enabled: bool) -> None:
        """Undo a step that raised, and set torch's grad mode; safe to repeat."""
        try:
            torch.set_grad_enabled(False)  # the weights are written in place
            if self._space is not None:
                self._space.roll_back()
        finally:
            torch.set_grad_enabled(grad_enabled)

    def begin(
        self,
        closures: Sequence[Closure],
        ascent_closure: Closure | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Step:
        """Prepare a step on the host: apply schedules, check bounds, write settings and seeds to the device.

        :meta private:
        """
        self._hyperparameters.update()
        space = self.current_space()
        if space.is_unfinished:
            space.roll_back()
        values = self._hyperparameters.values()
        if values != self._written:
            self.check_settings()
            self.write_settings(space)
            self._written = values
        if not space.ranks.alone:
            space.ranks.check_not_joined()
        for group in self.base.param_groups:
            for p in group["params"]:
                if not p.requires_grad:
                    p.grad = None  # otherwise the base keeps applying the gradient from before it was frozen
        space.generators.begin_step(self._hyperparameters["seed"], self._hyperparameters["steps_taken"])
        sampler, num_samples = self.plan()
        if scaler is not None and not scaler.is_enabled():
            scaler = None
        step = Step(space, sampler, num_samples, closures, ascent_closure, scaler)
        if len(closures) != 1:
            self._check_parts(step)
        return step

    def _check_parts(self, step: Step) -> None:
        """Raise ValueError unless each sample can have its own closure."""
        sampler, num_samples = step.sampler, step.num_samples
        if len(step.closures) != num_samples or not sampler.independent:
            each = sampler.independent and num_samples > 1
            takes = f"one closure, or one for each of its {num_samples} samples" if each else "one closure"
            raise ValueError(f"{type(self).__name__} takes {takes}; got {len(step.closures)}")
        if sampler.share_ascent and step.ascent_closure is None:
            raise ValueError("a shared ascent needs ascent_closure if each sample has its own closure")

    def _aggregate(self, step: Step) -> StepInfo:
        """Run all passes of a step and restore the weights; the gradient is in ``step.space.gradient_mean``."""
        space = step.space
        space.begin_passes(step.closures, step.ascent_closure, step.scaler, moves=step.sampler.moves)
        record = self.average_samples(space, step.sampler, step.num_samples)
        loss = record.loss()
        space.end_passes()
        evaluator = space.evaluator
        return StepInfo(
            loss,
            record.table,
            record.sampler_info,
            valid=record.valid,
            num_forwards=evaluator.num_forwards,
            num_backwards=evaluator.num_backwards,
            num_ascents=evaluator.num_ascents,
            num_parts=len(step.closures),
        )

    def average_samples(self, space: ParameterSpace, sampler: Sampler, num_samples: int) -> StepRecord:
        """Draw the samples of a step and average their gradients, weighted. This is the loop over samples.

        :meta private:
        """
        weighting = self.weighting(space) if num_samples > 1 else None
        if space.ranks.splits_samples:
            return average_samples_over_ranks(space, sampler, num_samples, weighting)
        record = space.step_record(weighting, num_samples)
        common = sampler.begin(space)
        for j in range(num_samples):
            space.begin_sample(j)
            draw = sampler.sample(space, j, common)
            share = record.add(draw, space.perturbation_norm())
            space.add_to_mean(draw, share, single=num_samples == 1)
        return record

    def _step_base(self, step: Step, info: StepInfo) -> None:
        """Let the base descend the mean of the gradients."""
        space = step.space
        space.assign_gradients()
        hook = self.base.register_step_pre_hook(space.commit)  # added last: if another hook raises, undo the step
        try:
            if step.scaler is not None:
                self._step_scaled(step.scaler, space, info)
            elif not self.skip_nonfinite or bool(info.weights.any().item()):
                self.base.step()
        finally:
            hook.remove()
        space.commit()  # if the base was skipped

    def _step_scaled(self, scaler: torch.amp.GradScaler, space: ParameterSpace, info: StepInfo) -> None:
        """Step the base through the scaler, which skips it if no sample has weight, and report overflows to it."""
        space.gradient_mean.scale_(scale_of(scaler, info.loss))
        scaler.unscale_(self.base)
        overflows = scaler._found_inf_per_device(self.base).values()
        for found in overflows:
            found.add_((info.weights == 0).all().to(found))  # scaler.step reads it
        scaler.step(self.base)
        for found in overflows:
            found.add_((info.num_nonfinite > 0).to(found))  # scaler.update reads it

    @Optimizer.profile_hook_step
    def replay(self, run: Callable[[], StepInfo]) -> Tensor:
        """Take a step whose passes and update are launched by ``run``, a captured graph. Step hooks run as usual.

        :meta private:
        """
        if self._stepping:
            raise self._nested_step_error()
        with torch.no_grad():
            info = run()
            self._finish(info)
        return info.loss

    def _nested_step_error(self) -> RuntimeError:
        return RuntimeError(f"{type(self).__name__}.step must not be called inside its own closure")

    def _warn_at_first_step(self, step: Step, info: StepInfo) -> None:
        """Warn about what the passes have shown; before the update, in case warnings are errors."""
        if self.model is None and self._model_options["buffers_once"] and info.num_forwards > 1:
            warn_missing_model(step.space.params)
        if self.model is None and step.space.ranks.splits_samples:
            warn_split_samples_without_model()
        if self.model is None and step.space.sharding.groups and step.sampler.moves:
            warn_sharded_without_model()
        if step.space.evaluator.changes_weights and step.sampler.moves:
            warn_changed_weights(type(self).__name__)
        if step.scaler is None:
            warn_missing_scaler(info.loss, info.gradient_norms)

    def _finish(self, info: StepInfo) -> None:
        """Count the step and keep its info."""
        self._info = info
        self._valid += info.valid
        if len(self._valid) > _MAX_PENDING:
            self._count_nonfinite()
        self._hyperparameters.count_step()
        self._has_stepped = True

    def compute_gradient(
        self,
        closure: Closure | Sequence[Closure],
        ascent_closure: Closure | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Tensor:
        """Run the passes of a step and replace ``.grad`` by the aggregate, without stepping the base.

        For trainers that clip, log and step on their own: ``optimizer.base.step()`` is the other half. The step counts
        as taken. Gradients do not accumulate over calls: loop over micro-batches inside the closure.

        Args:
            closure: As for :meth:`step`.
            ascent_closure: As for :meth:`step`.
            scaler: The scaler that the closure uses. The gradient is left scaled, as after any backward; if a pass
                overflowed it becomes infinite, so that the scaler skips the step and lowers its scale.

        Returns:
            The loss of the first pass, a scalar: for SAM the one at the weights, which a plain step would report. This
            rank's loss, in the closure's dtype. The aggregate loss is ``optimizer.info.loss``.

        Example:
            >>> w = torch.nn.Parameter(torch.tensor([3.0]))
            >>> sam = tiltsam.SAM(torch.optim.SGD([w], lr=0.1), rho=1.0)
            >>> def closure():
            ...     loss = (w**2 / 2).sum()
            ...     loss.backward()
            ...     return loss
            >>> sam.compute_gradient(closure)
            tensor(4.5000)
            >>> w.grad  # at 3 + 1
            tensor([4.])
        """
        self._opt_called = True  # otherwise a scheduler warns that it was stepped before the optimizer
        closures = check_closures(closure, ascent_closure, type(self).__name__)
        self._run(closures, ascent_closure, scaler, self._leave_gradient)
        return self.current_space().evaluator.first_loss.reshape(())

    def _leave_gradient(self, step: Step, info: StepInfo) -> None:
        """Leave the mean of the gradients to a trainer that steps the base."""
        space = step.space
        space.assign_gradients()
        if step.scaler is not None:
            space.gradient_mean.scale_(scale_of(step.scaler, info.loss))
            gradient = next(p.grad for p in space.params if p.grad is not None)
            gradient.add_(torch.where(info.num_nonfinite > 0, torch.inf, 0.0).to(gradient))
        elif self.skip_nonfinite and not bool(info.weights.any().item()):
            self.zero_grad()  # a base skips parameters without a gradient
        space.commit()

    @property
    def is_perturbed(self) -> bool:
        """Whether a step is in progress that has not restored the weights yet.

        :meta private:
        """
        return self._space is not None and self._space.weights_saved

    # ---------------------------------------------------------------- the space and what a step measured

    def current_space(self) -> ParameterSpace:
        """Return the space over the parameters that are trainable now; rebuilt only when they change.

        :meta private:
        """
        space = self._space
        layout = [  # what the space depends on; a DTensor has no address of its own
            [
                (id(p), p.requires_grad, p.dtype, p.stride(), None if hasattr(p, "device_mesh") else p.data_ptr())
                for p in group["params"]
            ]
            for group in self.base.param_groups
        ]
        if space is not None:
            if layout == self._layout:
                return space
            with torch.no_grad():
                space.roll_back()  # if an earlier restore failed, its backup must not be lost
        space = parameter_space(
            [group["params"] for group in self.param_groups],
            model_state=ModelState(
                self.model,
                devices=[p.device for group in self.param_groups for p in group["params"]],
                **self._model_options,
            ),
            parallel=self.parallel,
            sampler_state=self._sampler_state,
        )
        names = self._sampler_state.names
        if names and space.ranks.local_ascent:
            raise ValueError(f"Parallel(ascent='local') would make each rank keep another {', '.join(names)}")
        self._sampler_state.allocate(space.params)
        # In this order: if any line above raises, or an interrupt arrives between these, the next step builds it again.
        self._written = ()
        self._space = space
        self._layout = layout
        warn_low_precision(space.params)
        return space

    def capture_key(self, step: Step, changeable: frozenset[str] = frozenset()) -> Hashable:
        """Return a key of a captured step: steps of one space with equal keys may share a graph.

        They differ at most in numbers that are read from the device: the method's own, and those of the base named in
        ``changeable``.

        :meta private:
        """
        skipped = self._hyperparameters.entries() | changeable
        base = tuple(
            (name, value)
            for group in self.param_groups
            for name, value in group.items()
            if name not in skipped and (value is None or isinstance(value, bool | int | float | str | tuple))
        )
        modes = tuple(m.training for m in self.model.modules()) if self.model is not None else ()
        return step.sampler, step.num_samples, step.space.scalars.structure(), modes, base

    @property
    def info(self) -> StepInfo:
        """What the last step measured. Reading its tensors' values waits for the device; nothing else does."""
        if self._info is None:
            raise AttributeError("no step was taken yet")  # so that hasattr and inspect work
        return self._info

    def check_nonfinite(self) -> None:
        """Warn about samples that were not finite since the last call. Waits for the device."""
        self._count_nonfinite()
        number, self._num_nonfinite = int(self._num_nonfinite), 0
        if number:
            warn(
                f"{number} sample{'s' if number > 1 else ''} had a loss or gradient that is not finite and got weight "
                "zero: lower rho, radius or the learning rate if this continues"
            )

    def _count_nonfinite(self) -> None:
        """Count samples that were not finite, without waiting for the device."""
        if self._valid:
            device = self._valid[-1].device
            flags = torch.stack([x.to(device) for x in self._valid])
            self._num_nonfinite = self._num_nonfinite + (flags == 0).sum()
            self._valid.clear()

    @property
    def _step_supports_amp_scaling(self) -> _RefusesScalerStep | bool:
        """Read by ``GradScaler.step``: its truth value raises with the lines to write.

        Accelerate creates the state of a checkpoint through the scaler: such a step is allowed.
        """
        return not is_state_initialization(self.param_groups) and _RefusesScalerStep(type(self).__name__)

    # ---------------------------------------------------------------- torch.optim.Optimizer, shared with the base

    def setting(self, name: str) -> Any:
        """Return a setting that has one value for the whole step."""
        return self._hyperparameters[name]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The base's parameter groups."""
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.base.param_groups = value

    @property
    def state(self) -> Any:
        """The base's state."""
        return self.base.state

    @state.setter
    def state(self, value: Any) -> None:
        self.base.state = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base, with this method's settings unless it brings its own."""
        self.base.add_param_group(param_group)
        try:
            self._hyperparameters.fill()
            self.check_settings()
        except Exception:
            self.param_groups.pop()
            raise

    @property
    def first_step(self) -> NoReturn:
        """Not supported.

        Other SAM packages split a step in two; this raises AttributeError and shows the closure to write.

        :meta private:
        """
        name = type(self).__name__
        raise AttributeError(f"{name} has no first_step and second_step. {NEEDS_CLOSURE.format(name=name)}")

    second_step = first_step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients. Never needed: a step clears them before each pass."""
        self.base.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the base's state dict, its groups with this method's settings, and the sampler's vectors."""
        self._hyperparameters.fill()
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state = self._sampler_state.state_dict(self.base)
        for post in self._optimizer_state_dict_post_hooks.values():
            replaced = post(self, state)
            state = state if replaced is None else replaced
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, or a checkpoint of the bare base: settings then stay as they are.

        Of a checkpoint of another method only ``rho``, ``seed`` and ``steps_taken`` are loaded, with a warning.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        self._hyperparameters.fill()
        before = [dict(group) for group in self.param_groups]
        state_dict = self._hyperparameters.drop_foreign_settings(state_dict)
        self._sampler_state.load_state_dict(self.base, state_dict)
        self._hyperparameters.fill(before)
        for post in self._optimizer_load_state_dict_post_hooks.values():
            post(self)
        self.check_settings()

    def __repr__(self) -> str:
        base = re.sub(r"^ +(own_rho|steps_taken|tilt_method): .*\n", "", repr(self.base), flags=re.MULTILINE)
        return f"{type(self).__name__}({self._hyperparameters},\n  base={base})"


class _RefusesScalerStep:
    """Refuses ``GradScaler.step(optimizer)``, which cannot run the passes of a step."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __bool__(self) -> bool:
        raise RuntimeError(NEEDS_SCALER.format(name=self._name))
