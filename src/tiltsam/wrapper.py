"""The engine: any torch optimizer, made to descend a gradient gathered around θ instead of at θ.

:class:`SharpnessAware` composes *where to look* (a kernel of :mod:`tiltsam.samplers`) with *how to weigh* what was seen
(a tilt, or fixed weights), and hands the aggregate to the optimizer it wraps. The methods in :mod:`tiltsam.optim` are
such compositions and little more. What torch expects of an optimizer beside its step is in :mod:`tiltsam.shell`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from tiltsam.buffers import to_the_end
from tiltsam.checks import (
    NEEDS_CLOSURE,
    NEEDS_SCALER,
    changes_nothing,
    check_automatic,
    check_base,
    check_count,
    check_kept,
    check_minimizes,
    check_model,
    check_nonnegative,
    check_parallel,
    check_sampler,
    check_seed,
    warn_low_precision,
    warn_missing_model,
    warn_missing_scaler,
)
from tiltsam.distributed import Parallel
from tiltsam.info import NonfiniteCount, StepInfo
from tiltsam.lanes import Lanes, draws, fits
from tiltsam.memory import Memory
from tiltsam.parameters import Closure, ParameterSpace
from tiltsam.passes import Passes
from tiltsam.samplers import Center, Sampler
from tiltsam.settings import Schedule
from tiltsam.shell import Shell
from tiltsam.weighing import FixedWeights, Ledger, OneSample, Weighing

__all__ = ["Schedule", "SharpnessAware", "StepInfo"]

_LAST = -1  # key of a hook of the base; torch's own are counted from 0


class SharpnessAware(Shell):
    """A torch optimizer that wraps another and gives it a gradient gathered around the weights.

    It shares ``param_groups`` and ``state`` with ``base``: schedulers, hooks, ``add_param_group`` and checkpoints work
    on either. Its own settings (``settings`` of each method) are entries of the parameter groups, under the names of
    the constructor's arguments; where the base already uses a name (Adadelta's ``rho``, RMSprop's ``alpha``) ours is
    ``tilt_<name>``. ``rho`` may differ between groups, and schedules leave alone those that brought their own (an entry
    ``own_rho`` says which); the others are one number for the whole step. A base that is wrapped once more takes the
    new method's settings, and goes on counting steps.

    A step is one of the wrapper's, and inside it one of the base's: torch's global step hooks run for both (for the
    wrapper alone where :func:`tiltsam.capture` replays a graph), and are told by their first argument which it is.

    A step that raises leaves no trace: whatever the closure or a hook before the base's step raises (a Ctrl-C, too),
    weights, buffers and the step count are those from before the step, bit for bit. Once the base has begun its update
    the weights are the base's: if that raises midway, they stay as it leaves them.

    Args:
        base: An *instance* of a torch optimizer, which does the update; without ``maximize=True`` unless the sampler
            stays at θ.
        sampler: Where to look.
        settings: Own settings and their initial values; a callable is a schedule, evaluated at each step.
        model: Needed for BatchNorm and dropout: the model's buffers (BatchNorm's running statistics) move once a step,
            at its first pass, and dropout draws one mask for all passes of a step. The first step warns if a layer of
            BatchNorm is trained without it.
        seed: Seed of the noise. All noise follows from (seed, step, sample): a resumed run draws what an unbroken one
            would have drawn, and the global random state is never touched.
        buffers_once: Turn the first of ``model``'s effects off.
        same_dropout: Turn the second off.
        every: Look around at every k-th step only, and take plain steps (one pass at θ) between.
        parallel: Which processes take each step together, see :class:`tiltsam.Parallel`; by default found out (DDP,
            FSDP2, or all processes of ``torch.distributed``). ``None``: this process trains on its own.
        skip_nonfinite: If no sample of a step that counts is finite, do not step the base at all. Costs one host
            synchronisation a step; without it the base is stepped with a zero gradient.
        foreach: Fused kernels on lists of tensors, or the plain loop; both give the same numbers.
    """

    per_group: ClassVar[frozenset[str]] = frozenset({"own_rho", "rho"})

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse ``SAM(params, SGD, lr=0.1)``, as other packages want it, before Python finds fault with ``lr``."""
        first = list(inspect.signature(cls.__init__).parameters)[1:2]
        given = args or [kwargs[name] for name in first if name in kwargs]  # nothing where a copy is made
        if given and first == ["base"]:  # a method of one's own may begin with something else
            check_base(given[0], cls.__name__, SharpnessAware)
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
        every: int = 1,
        parallel: Parallel | None = Parallel(),  # noqa: B008 (frozen)
        skip_nonfinite: bool = False,
        foreach: bool = True,
    ) -> None:
        check_base(base, type(self).__name__, SharpnessAware)
        check_model(model, base)
        check_sampler(sampler)
        check_seed(seed)
        check_parallel(parallel)
        self.sampler = sampler
        self.model = model
        self.parallel = parallel
        self.skip_nonfinite = skip_nonfinite
        self._passes_options = {"buffers_once": buffers_once, "same_random": same_dropout}
        self._foreach = foreach
        self._stepped = False  # whether this object has taken a step
        self._space: ParameterSpace | None = None
        self._space_key: tuple[Any, ...] = ()
        self._info: StepInfo | None = None
        self._nonfinite = NonfiniteCount()
        self._own = tuple(name for name in settings if name not in self.per_group)
        self._run: Callable[[ParameterSpace], StepInfo] | None = None  # in place of execute
        self._lanes: Lanes | None = None  # where samples are drawn beside each other
        self._stepping = False  # whether a step is in progress
        own = {**settings, "every": every, "seed": seed, "steps_taken": 0}
        super().__init__(base, own, self.per_group, Memory(getattr(sampler, "keeps", ())))
        self.check_settings()

    def __getstate__(self) -> dict[str, Any]:
        # Left out: a scheduler's patch of step, hooks (as torch does), and what is rebuilt at the next step.
        state = {k: v for k, v in self.__dict__.items() if k != "step" and not k.startswith("_optimizer_")}
        return {**state, "_space": None, "_info": None, "_stepping": False}

    # ---------------------------------------------------------------- settings

    def check_settings(self) -> None:
        """Raise on a value out of bounds. Called at construction and, since groups can be edited, before each step.

        A method with bounds of its own overrides it, and calls this one, too.
        """
        if "rho" in self._settings:
            for rho in self._settings.in_groups("rho"):
                check_nonnegative("rho", rho)
        check_count("every", self.setting("every"))
        if not isinstance(self.sampler, Center):
            check_minimizes(self.param_groups)

    def write_settings(self, space: ParameterSpace) -> None:
        """Put this method's numbers where the kernels read them, by ``space.setting(name)``; before each step.

        All settings that are numbers are put there. A method whose kernels read others, made of them, overrides it.
        """
        for name in self._own:
            if not isinstance(value := self.setting(name), bool) and isinstance(value, int | float):
                space.set(name, float(value))
        if "rho" in self._settings:
            space.set_rho([float(rho) for rho in self._settings.in_groups("rho")])

    @property
    def num_samples(self) -> int:
        """How many samples a step takes."""
        return 1

    def num_lanes(self) -> int:
        """How many samples of the coming step can be drawn beside each other; 0 where that is none or one."""
        sampler, number = self._plan()
        return number if number > 1 and fits(sampler) else 0

    def weighing(self, space: ParameterSpace) -> Weighing:
        """How the samples of a step are weighed, where there are several: alike, unless a method overrides it."""
        return FixedWeights(torch.ones(self.num_samples, dtype=space.dtype, device=space.device))

    def _plan(self) -> tuple[Sampler, int]:
        """Where to look at this step, and how often."""
        if self.setting("steps_taken") % self.setting("every"):
            return Center(), 1
        return self.sampler, self.num_samples

    # ---------------------------------------------------------------- a step

    def step(  # type: ignore[override]
        self,
        closure: Closure | Sequence[Closure] | None = None,
        ascent_closure: Closure | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Tensor:
        """Evaluate around θ, come back to θ, and let the base descend the aggregate gradient.

        Args:
            closure: Runs forward and backward on *one* mini-batch and returns the loss; called several times. It need
                not clear gradients, except those of parameters that are not this optimizer's: there all passes add up.
                A tensor that it sets as a gradient by hand is the step's to overwrite.
                For gradient accumulation, loop over micro-batches inside and return the total.
                Or one for each sample of the step, on a part of the mini-batch each: s samples at the price of one.
            ascent_closure: Used in its place where a gradient only points the way up (the first pass of SAM, the first
                of each sample of TSAM): the same on part of the mini-batch makes those passes cheaper.
            scaler: For float16: the closure calls ``scaler.scale(loss).backward()`` and returns the loss as it is.
                The aggregate is unscaled once, before the base's step hooks see it; overflowing samples count nothing,
                the base does not step if all do, and the scaler hears of it. Call ``scaler.update()`` afterwards.
                Without ``scaler=`` the base descends the scaled gradient. The first step warns if a GradScaler is in
                use and the loss or a gradient is above 1000; it cannot see what the closure does.

        Returns:
            The loss that was descended: the tilted loss of the samples for TSAM, the loss at the perturbed point for
            SAM. Detached, on the device of the parameters; NaN if no sample was finite. Without a closure, which is
            allowed only while rates and gradients are zero (``torch.distributed.checkpoint`` makes a base's state so),
            NaN: nothing is evaluated.

        Raises:
            RuntimeError: If called inside the closure of a step, or if the weights could not be restored after an
                error. The next step then restores them first.
        """
        if self._stepping:
            raise RuntimeError(f"{type(self).__name__}.step must not be called inside its own closure")
        if closure is None and changes_nothing(self.param_groups):
            self.base.step()
            return torch.full((), torch.nan)  # no loss was evaluated
        closures = [closure] if callable(closure) else closure
        if not isinstance(closures, Sequence) or not all(callable(one) for one in closures):  # a loss, say
            raise TypeError(NEEDS_CLOSURE.format(name=type(self).__name__))
        if ascent_closure is not None and not callable(ascent_closure):
            hint = ": write scaler=scaler" if isinstance(ascent_closure, torch.amp.GradScaler) else ""
            raise TypeError(f"ascent_closure must be a closure, got {type(ascent_closure).__name__}{hint}")
        for one in closures if not isinstance(self.sampler, Center) else ():
            check_automatic(one, type(self).__name__)
        differentiating = torch.is_grad_enabled()
        # An interrupt may arrive at any bytecode, also while a context manager or a finally block below is left. This
        # one handler covers them all, so what it does must not depend on where the interrupt arrived.
        try:
            self._stepping = True
            with torch.no_grad():
                space = self.prepare(closures, ascent_closure)
                loss = self._step(space, scaler)
            self._stepping = False
        except BaseException:
            self._stepping = False
            torch.set_grad_enabled(differentiating)
            if self._space is not None:
                to_the_end(self._space.roll_back)
            raise
        return loss

    def _step(self, space: ParameterSpace, scaler: torch.amp.GradScaler | None) -> Tensor:
        space.scaling.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        try:
            with space.on_device(), space.world.explaining(self.setting("steps_taken")):
                self._info = (self._run or self.execute)(space)
                space.begin_update()  # if the base was not stepped here: it was skipped, or a trainer steps it
        finally:
            space.closures, space.ascent_closure, space.scaling.scaler = [_released], None, None
        self._settings.count_step()
        if not self._stepped:
            self._stepped = True
            self._check_first_step(space, scaled=scaler is not None)
        return self._info.loss

    def _check_first_step(self, space: ParameterSpace, *, scaled: bool) -> None:
        """Warn of mistakes that only a step shows."""
        if self.model is None and self._passes_options["buffers_once"] and space.num_forwards > 1:
            warn_missing_model(space.params)
        if not scaled:
            warn_missing_scaler(self.last.loss, self.last.gradient_norms)

    def prepare(self, closure: Closure | Sequence[Closure], ascent_closure: Closure | None = None) -> ParameterSpace:
        """The host's part of a step: schedules, checks, numbers and seeds, put where the device reads them."""
        space = self._settle()
        for p in (p for group in self.param_groups for p in group["params"] if not p.requires_grad):
            p.grad = None  # the base would go on descending what it had when it was frozen
        space.streams.begin(self.setting("seed"), self.setting("steps_taken"))
        space.closures, space.ascent_closure = [closure] if callable(closure) else list(closure), ascent_closure
        if len(space.closures) != 1:
            self._check_parts(len(space.closures), whole_ascent=ascent_closure is not None)
        return space

    def _check_parts(self, number: int, *, whole_ascent: bool) -> None:
        """Whether each sample of a step can have a part of the mini-batch of its own."""
        name, samples = type(self).__name__, self.num_samples
        if number != samples or not self.sampler.independent:
            takes = f"one, or one for each of its {samples} samples" if self.sampler.independent else "one"
            raise ValueError(f"{name} takes {takes}; got {number} closures")
        if self.setting("every") > 1:
            raise ValueError(f"the plain steps of every={self.setting('every')} need one closure, got {number}")
        if getattr(self.sampler, "shared", False) and not whole_ascent:
            raise ValueError("one ascent for all samples needs ascent_closure where each sample has a closure")

    def _settle(self) -> ParameterSpace:
        """Make the settings what they are to be at the coming step."""
        self._settings.fill()  # a group may have been added to the base behind our back
        self._settings.follow_schedules()
        self.check_settings()
        space = self.current_space()
        self._memory.fill(space.params)
        self.write_settings(space)
        return space

    def execute(self, space: ParameterSpace, watch: Callable[[StepInfo], None] = lambda info: None) -> StepInfo:
        """The device's part of a step. Nothing in it looks at a value (but for ``skip_nonfinite``).

        ``watch`` is shown the info as soon as it is there: inside a capture, in a branch beside the base's update.
        """
        info = self.gather(space, watch)
        space.hand_over()
        with self._before_update(space.begin_update):
            if space.scaling.scaler is not None:
                space.scaling.step(self.base, space.mean, info.weights, info.num_nonfinite)
            elif not self.skip_nonfinite or bool(info.weights.any().item()):
                self.base.step()
        space.branch.rejoin()
        return info

    @contextmanager
    def _before_update(self, hook: Callable[..., None]) -> Iterator[None]:
        """Inside, ``base.step()`` calls ``hook`` after all its other pre-hooks, right before its update."""
        hooks = self.base._optimizer_step_pre_hooks
        hooks.pop(_LAST, None)  # left behind by a step that was interrupted: it would not come last
        hooks[_LAST] = hook
        try:
            yield
        finally:
            hooks.pop(_LAST, None)

    @contextmanager
    def executing(self, run: Callable[[ParameterSpace], StepInfo]) -> Iterator[None]:
        """Inside, ``step`` runs the device's part by ``run``: the replay of a graph, say."""
        self._run = run
        try:
            yield
        finally:
            self._run = None

    @contextmanager
    def drawing_in(self, lanes: Lanes | None) -> Iterator[None]:
        """Inside, a step draws its samples in ``lanes``, beside each other."""
        self._lanes = lanes
        try:
            yield
        finally:
            self._lanes = None

    def frozen(self, changeable: frozenset[str] = frozenset()) -> Hashable:
        """All that decides which kernels the coming step launches and what constants they carry.

        Two steps with equal answers differ at most in numbers that are read from the device: this method's own, and
        those of the base named in ``changeable``.
        """
        space = self._settle()
        own = self._settings.entries()
        base = tuple(
            (name, value)
            for group in self.param_groups
            for name, value in group.items()
            if name not in own | changeable and (value is None or isinstance(value, bool | int | float | str | tuple))
        )
        modes = tuple(m.training for m in self.model.modules()) if self.model is not None else ()
        return self._space_key, self._plan(), space.shape_of_settings(), modes, base

    def gather(self, space: ParameterSpace, watch: Callable[[StepInfo], None] = lambda info: None) -> StepInfo:
        """All of a step but the base's part: visit, evaluate, accumulate, come back. See :meth:`execute`."""
        sampler, num_samples = self._plan()
        infos: list[Mapping[str, Tensor]] = []

        def weighing() -> Weighing:
            return self.weighing(space) if num_samples > 1 else OneSample()

        space.scaling.free = sampler.scale_free
        try:
            space.begin_step(num_samples)
            mine = space.world.my_samples(num_samples, independent=sampler.independent)
            ledger = space.ledger(weighing(), num_samples)
            if not mine:
                space.stand_by()
            for k, (there, draw, distance) in enumerate(draws(sampler, space, mine, self._lanes)):
                share = ledger.add(draw, distance)
                there.accumulate(draw.gradient, share, draw.valid, first=k == 0, keep=draw.keep)
                infos.append(draw.info)
            if space.world.splits_samples:
                ledger = space.join_samples(ledger, mine, space.ledger(weighing(), num_samples))
            with space.branch.aside():
                info = self._report(space, ledger, infos)
                watch(info)
            space.branch.hold(ledger, infos)
            space.end_passes()
        except BaseException:
            space.roll_back()
            raise
        return info

    def _report(self, space: ParameterSpace, ledger: Ledger, infos: list[Mapping[str, Tensor]]) -> StepInfo:
        numbers = ledger.numbers()
        if space.scaling.scaler is not None and space.scaling.free:
            numbers["gradient_norms"] = numbers["gradient_norms"] / space.scaling.factor()
        self._nonfinite.add(numbers["num_nonfinite"])
        return StepInfo(
            **numbers,
            num_forwards=space.num_forwards,
            num_backwards=space.num_backwards,
            num_ascents=space.num_ascents,
            num_parts=len(space.closures),
            sampler={name: torch.stack([info[name] for info in infos]) for name in (infos[0] if infos else ())},
        )

    @property
    def _step_supports_amp_scaling(self) -> _RefusesScalerStep:
        """What ``GradScaler.step`` tests first. Reading it is harmless, its truth value raises."""
        return _RefusesScalerStep(type(self).__name__)

    @property
    def last(self) -> StepInfo:
        """What the last step saw, without waiting for the device and without warnings."""
        if self._info is None:
            raise NoStepError("no step was taken yet: info describes the last one")
        return self._info

    @property
    def info(self) -> StepInfo:
        """What the last step saw. Reading it waits for the device once, to warn about samples that were not finite."""
        last = self.last
        self._nonfinite.warn()
        return last

    def current_space(self) -> ParameterSpace:
        """The space over the parameters that are trainable now; built anew only when they or their groups changed."""
        groups = [group["params"] for group in self.param_groups]
        key = tuple(
            tuple((id(p), p.requires_grad, p.dtype, p.device, p.shape, p.stride()) for p in group) for group in groups
        )
        if self._space is None or key != self._space_key:
            if self._space is not None:
                self._space.roll_back()  # if an earlier restore failed, its backup must not be lost
            devices = [p.device for group in groups for p in group]
            passes = Passes(self.model, devices=devices, **self._passes_options)
            space = ParameterSpace(groups, passes=passes, parallel=self.parallel, foreach=self._foreach)
            check_kept(self._memory.names, space.world)
            space.memory, self._space, self._space_key = self._memory, space, key
            warn_low_precision(self._space.params)
        return self._space


class NoStepError(RuntimeError, AttributeError):
    """Raised by ``info`` before the first step; an AttributeError, so that ``hasattr`` and ``inspect`` work."""


class _RefusesScalerStep:
    """Refuses ``GradScaler.step(optimizer)``, which cannot run the passes of a step."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __bool__(self) -> bool:
        raise RuntimeError(NEEDS_SCALER.format(name=self._name))


def _released() -> Tensor:
    raise RuntimeError("the closure of a finished step was called")
