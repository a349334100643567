"""TSAM and the methods it is compared with.

=========  ==================  ===========================================  =================================
name       class               gradient given to the base                   passes a step
=========  ==================  ===========================================  =================================
``erm``    ERM                 ∇L(θ)                                        1
``sam``    SAM                 ∇L(θ + ρ n(g))                               2
``asam``   ASAM                ∇L(θ + ρ T²g/‖Tg‖), T = |w| + η              2
``esam2``  LineSearchSAM       ∇L at the worst of K points along n(g)       2, and K forward
``pgn``    PGN                 (1−α) g + α ∇L(θ + ρ n(g))                   2
``rsam``   RSAM                ∇L(θ + ρ n(Δ + λ∇L(θ+Δ)))                    2
``tsam``   TSAM                Σ_j softmax((t−δ) L_j) ∇L(θ+ε_j)             2s (shared ascent: s+1)
=========  ==================  ===========================================  =================================

Here ``g = ∇L(θ)`` on the mini-batch and ``n(v) = v/(‖v‖+1e-12)``. More methods are in :mod:`tiltsam.optim.variants`.
Everything after ``base`` is passed by name. The options ``model``, ``seed``, ``buffers_once``, ``same_dropout``,
``parallel`` and ``skip_nonfinite`` are explained in :class:`~tiltsam.optim.sharpness_aware.SharpnessAware`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from tiltsam.distributed import Parallel
from tiltsam.optim.sharpness_aware import DETECTED, SharpnessAware
from tiltsam.optim.validation import check_sampler
from tiltsam.optim.variants import GSAM, USAM, WSAM, FriendlySAM, LookSAM, MomentumSAM
from tiltsam.samplers import (
    HMC,
    AdaptiveAscent,
    Ascent,
    Center,
    CenterThenAscent,
    Gaussian,
    LineSearch,
    RandomAscent,
    Sampler,
    Uniform,
)
from tiltsam.schedules import Schedule
from tiltsam.space.parameter_space import ParameterSpace
from tiltsam.space.protocol import default_radius
from tiltsam.space.step_record import FixedWeights, Weighting
from tiltsam.space.validation import check_count, check_nonnegative, check_unit
from tiltsam.tilting import StreamingTilt

__all__ = ["ASAM", "ERM", "METHODS", "PGN", "RSAM", "SAM", "TSAM", "LineSearchSAM"]

SamplerName: TypeAlias = Literal["ascent", "uniform", "gaussian", "hmc"]

_SAMPLERS: dict[str, type[Sampler]] = {"ascent": Ascent, "uniform": Uniform, "gaussian": Gaussian, "hmc": HMC}


class TSAM(SharpnessAware):
    r"""Tilted sharpness-aware minimisation (Algorithms 1 and 2 of the paper). Two passes a sample.

    Descends the tilted loss :math:`L^t(θ) = (1/t) \log E_μ[\exp(t L(θ+ε))]` with s samples a step:

    .. code-block:: text

        for j = 1..s:
            δ_j  uniform in the ball of radius R
            ε_j  = δ_j + ρ n(∇L(θ + δ_j))
        v = softmax((t − δ) L(θ + ε_j))
        the base steps from θ with Σ_j v_j ∇L(θ + ε_j)

    ``examples/tsam_minimal.py`` is the same in sixty plain lines.

    Args:
        base: The optimizer that does the update, an instance.
        t: Tilt >= 0: 0 averages the samples, a large t follows the worst. A number or a callable of the step.
        rho: Length of the ascent, >= 0, with the meaning and scale it has in SAM. A group's own ``rho`` wins. The
            samplers ``"uniform"``, ``"gaussian"`` and ``"hmc"`` have no ascent and do not use it.
        radius: Radius R of the random start; by default 0.003·√d, where d is the number of trainable coordinates.
        num_samples: Number of samples, s >= 1. With one sample TSAM is SAM from a random start, at SAM's cost, and t
            has no effect; step for step this did as well as three samples (docs/evidence.md).
        delta: The part of the tilt that the sampler accounts for, in [0, t]; sample weights use ``t − delta``. By
            default t/2 as in the paper, or 0 for naive sampling, whose draws follow μ itself.
        sampler: How samples are drawn: ``"ascent"`` is Algorithm 2, ``"uniform"`` and ``"gaussian"`` are naive
            sampling, ``"hmc"`` is Hamiltonian Monte Carlo. An instance of a sampler is accepted, too.
        share_ascent: Use one ascent gradient, at θ, for all samples: s+1 passes instead of 2s.
        ascent_steps: The paper's N: N ascents of length ρ/N per sample, N+1 passes. Short for
            ``sampler=Ascent(num_steps=N)``.
        model: See :class:`SharpnessAware`, like all following arguments.
        seed: Seed of the noise.
        buffers_once: Whether buffers keep the values of the first pass.
        same_dropout: Whether all passes use the same dropout masks.
        parallel: The processes that take each step together.
        skip_nonfinite: Do not step the base if no sample is finite.

    Cost: 2s forward+backward passes a step; s with ``rho=0`` or naive sampling. Memory: one copy of the weights and one
    gradient, whatever s, unless samples are captured to run concurrently (:func:`tiltsam.capture`).

    Note:
        The paper prints ρ = 20, α = 0.995 for a parameter α that its algorithm lacks. We read a ball of radius 20 split
        into R = 19.9 and ρ = 0.1. The samples of Algorithm 2 follow no known density, so its aggregate is not a
        consistent estimate of ∇L^t. ``sampler="uniform"`` is; ``HMC(num_proposals=K)`` is as K grows, and its default
        K = 1 is not.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> x, y = torch.randn(16, 4), torch.randn(16, 1)
        >>> optimizer = TSAM(torch.optim.SGD(model.parameters(), lr=0.1), t=5.0, num_samples=3)
        >>> def closure():
        ...     loss = torch.nn.functional.mse_loss(model(x), y)
        ...     loss.backward()
        ...     return loss
        >>> loss = optimizer.step(closure)
        >>> optimizer.info.num_backwards
        6
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        t: float | Schedule = 20.0,
        rho: float | Schedule = 0.1,
        radius: float | Schedule | None = None,
        num_samples: int = 3,
        delta: float | Schedule | None = None,
        sampler: SamplerName | Sampler = "ascent",
        share_ascent: bool = False,
        ascent_steps: int = 1,
        model: nn.Module | None = None,
        seed: int = 0,
        buffers_once: bool = True,
        same_dropout: bool = True,
        parallel: Parallel | None = DETECTED,
        skip_nonfinite: bool = False,
    ) -> None:
        check_count("ascent_steps", ascent_steps)
        chosen = _sampler(sampler)
        if share_ascent or ascent_steps > 1:
            name = "share_ascent" if share_ascent else "ascent_steps"
            if not isinstance(chosen, Ascent):
                raise ValueError(f'{name} needs sampler="ascent", got {sampler!r}')
            if share_ascent and ascent_steps > 1:
                raise ValueError(f"ascent_steps must be 1 with share_ascent, got {ascent_steps}")
            chosen = replace(chosen, share_ascent=True) if share_ascent else replace(chosen, num_steps=ascent_steps)
        super().__init__(
            base,
            chosen,
            {"t": t, "rho": rho, "radius": radius, "num_samples": num_samples, "delta": delta},
            model=model,
            seed=seed,
            buffers_once=buffers_once,
            same_dropout=same_dropout,
            parallel=parallel,
            skip_nonfinite=skip_nonfinite,
        )

    def check_settings(self) -> None:
        """See :class:`SharpnessAware`."""
        super().check_settings()
        t, radius, delta = self.setting("t"), self.setting("radius"), self.setting("delta")
        check_nonnegative("t", t)
        if radius is not None:
            check_nonnegative("radius", radius)
        if delta is not None:
            check_nonnegative("delta", delta)
            if delta > t:
                raise ValueError(f"delta must be <= t, got delta={delta} with t={t}")
        check_count("num_samples", self.num_samples)
        if self.num_samples > 1 and self.sampler.deterministic:
            raise ValueError(
                f"num_samples must be 1 with {self.sampler!r}, whose samples are all the same, got {self.num_samples}"
            )

    def write_settings(self, space: ParameterSpace) -> None:
        """See :class:`SharpnessAware`."""
        super().write_settings(space)
        t, radius, delta = self.setting("t"), self.setting("radius"), self.setting("delta")
        if delta is None:
            delta = t / 2 if self.sampler.tilted else 0.0
        space.scalars.set("delta", float(delta))
        space.scalars.set("sample_weight_tilt", float(t - delta))
        space.scalars.set("radius", default_radius(space.dim) if radius is None else float(radius))

    @property
    def num_samples(self) -> int:
        """Number of samples of a step."""
        return self._hyperparameters["num_samples"]  # type: ignore[no-any-return]

    def weighting(self, space: ParameterSpace) -> Weighting:
        """See :class:`SharpnessAware`."""
        return StreamingTilt(space.setting("sample_weight_tilt"))


class ERM(SharpnessAware):
    """Plain training behind the same interface: one pass at θ, bitwise the base optimizer.

    Args:
        base: The optimizer that does the update, an instance.
        model: See :class:`SharpnessAware`, like all following arguments.
        seed: Unused; this method draws no noise.
        buffers_once: Whether buffers keep the values of the first pass.
        same_dropout: Whether all passes use the same dropout masks.
        parallel: The processes that take each step together.
        skip_nonfinite: Do not step the base if the gradient is not finite.
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        model: nn.Module | None = None,
        seed: int = 0,
        buffers_once: bool = True,
        same_dropout: bool = True,
        parallel: Parallel | None = DETECTED,
        skip_nonfinite: bool = False,
    ) -> None:
        super().__init__(
            base,
            Center(),
            {},
            model=model,
            seed=seed,
            buffers_once=buffers_once,
            same_dropout=same_dropout,
            parallel=parallel,
            skip_nonfinite=skip_nonfinite,
        )


class SAM(SharpnessAware):
    """Sharpness-aware minimisation (Foret et al. 2021): ``∇L(θ + ρ n(∇L(θ)))``. Two passes.

    Args:
        base: The optimizer that does the update, an instance.
        rho: Length of the ascent, >= 0. A number or a callable of the step; a group's own ``rho`` wins.
        model: See :class:`SharpnessAware`, like all following arguments.
        seed: Unused; this method draws no noise.
        buffers_once: Whether buffers keep the values of the first pass.
        same_dropout: Whether all passes use the same dropout masks.
        parallel: The processes that take each step together.
        skip_nonfinite: Do not step the base if no sample is finite.

    Example:
        >>> w = torch.nn.Parameter(torch.tensor([3.0]))
        >>> sam = SAM(torch.optim.SGD([w], lr=0.1), rho=1.0)
        >>> def closure():
        ...     loss = (w**2 / 2).sum()
        ...     loss.backward()
        ...     return loss
        >>> sam.step(closure)  # the loss at 3 + 1
        tensor(8.)
        >>> w.data  # 3 - 0.1 times the gradient there, 4
        tensor([2.6000])
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float | Schedule = 0.05,
        model: nn.Module | None = None,
        seed: int = 0,
        buffers_once: bool = True,
        same_dropout: bool = True,
        parallel: Parallel | None = DETECTED,
        skip_nonfinite: bool = False,
    ) -> None:
        super().__init__(
            base,
            Ascent(),
            {"rho": rho},
            model=model,
            seed=seed,
            buffers_once=buffers_once,
            same_dropout=same_dropout,
            parallel=parallel,
            skip_nonfinite=skip_nonfinite,
        )


class ASAM(SharpnessAware):
    """Adaptive SAM (Kwon et al. 2021): ``ε = ρ T²g/‖Tg‖`` with ``T = |w| + η``. Two passes.

    Args:
        base: The optimizer that does the update, an instance.
        rho: Length in the adaptive metric, about ten times SAM's.
        eta: η >= 0 in T = |w| + η; it keeps small weights movable.
        model: See :class:`SharpnessAware`, like all following arguments.
        seed: Unused; this method draws no noise.
        buffers_once: Whether buffers keep the values of the first pass.
        same_dropout: Whether all passes use the same dropout masks.
        parallel: The processes that take each step together.
        skip_nonfinite: Do not step the base if no sample is finite.
    """

    checks: ClassVar = {"eta": check_nonnegative}

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float | Schedule = 0.5,
        eta: float | Schedule = 0.01,
        model: nn.Module | None = None,
        seed: int = 0,
        buffers_once: bool = True,
        same_dropout: bool = True,
        parallel: Parallel | None = DETECTED,
        skip_nonfinite: bool = False,
    ) -> None:
        super().__init__(
            base,
            AdaptiveAscent(),
            {"rho": rho, "eta": eta},
            model=model,
            seed=seed,
            buffers_once=buffers_once,
            same_dropout=same_dropout,
            parallel=parallel,
            skip_nonfinite=skip_nonfinite,
        )


class LineSearchSAM(SharpnessAware):
    """The paper's ESAM2: SAM at the worst of K step lengths ρk/K. Two passes and K forward passes.

    Args:
        base: The optimizer that does the update, an instance.
        rho: The longest step, >= 0.
        num_points: Number of points tried, K >= 1, at a forward pass each. Ten cost about as much as two more samples
            of TSAM.
        model: See :class:`SharpnessAware`, like all following arguments.
        seed: Unused; this method draws no noise.
        buffers_once: Whether buffers keep the values of the first pass.
        same_dropout: Whether all passes use the same dropout masks.
        parallel: The processes that take each step together.
        skip_nonfinite: Do not step the base if no sample is finite.

    Note:
        Backward passes of the closure are skipped in the K forward passes, however they are called: a closure that
        clamps or logs gradients finds ``None`` there.
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float | Schedule = 0.05,
        num_points: int = 10,
        model: nn.Module | None = None,
        seed: int = 0,
        buffers_once: bool = True,
        same_dropout: bool = True,
        parallel: Parallel | None = DETECTED,
        skip_nonfinite: bool = False,
    ) -> None:
        super().__init__(
            base,
            LineSearch(num_points),
            {"rho": rho},
            model=model,
            seed=seed,
            buffers_once=buffers_once,
            same_dropout=same_dropout,
            parallel=parallel,
            skip_nonfinite=skip_nonfinite,
        )


class PGN(SharpnessAware):
    """Gradient norm penalty (Zhao et al. 2022): ``(1−α) ∇L(θ) + α ∇L(θ + ρ n(∇L(θ)))``. Two passes.

    Args:
        base: The optimizer that does the update, an instance.
        rho: Length of the ascent (r in its paper), >= 0.
        alpha: Weight of the perturbed gradient in [0, 1]: 0 is plain training, 1 is SAM.
        model: See :class:`SharpnessAware`, like all following arguments.
        seed: Unused; this method draws no noise.
        buffers_once: Whether buffers keep the values of the first pass.
        same_dropout: Whether all passes use the same dropout masks.
        parallel: The processes that take each step together.
        skip_nonfinite: Do not step the base if no sample is finite.
    """

    checks: ClassVar = {"alpha": check_unit}

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float | Schedule = 0.05,
        alpha: float | Schedule = 0.5,
        model: nn.Module | None = None,
        seed: int = 0,
        buffers_once: bool = True,
        same_dropout: bool = True,
        parallel: Parallel | None = DETECTED,
        skip_nonfinite: bool = False,
    ) -> None:
        super().__init__(
            base,
            CenterThenAscent(),
            {"rho": rho, "alpha": alpha},
            model=model,
            seed=seed,
            buffers_once=buffers_once,
            same_dropout=same_dropout,
            parallel=parallel,
            skip_nonfinite=skip_nonfinite,
        )

    @property
    def num_samples(self) -> int:
        """Two: θ, and SAM's point."""
        return 2

    def plan(self) -> tuple[Sampler, int]:
        """See :class:`SharpnessAware`. One pass while ``rho`` is 0."""
        return super().plan() if self.ascending else (Center(), 1)

    def weighting(self, space: ParameterSpace) -> Weighting:
        """See :class:`SharpnessAware`."""
        alpha = space.setting("alpha")
        return FixedWeights(torch.stack([1 - alpha, alpha]))


class RSAM(SharpnessAware):
    """Random SAM (Liu et al. 2022): the ascent starts from noise scaled to each filter. Two passes.

    ``Δ ~ N(0, (γ‖w_filter‖)²)`` filter by filter, ``ε = ρ n(Δ + λ ∇L(θ+Δ))``.

    Args:
        base: The optimizer that does the update, an instance.
        rho: Length of the perturbation, >= 0.
        gamma: γ >= 0, size of the noise relative to each filter. A callable of the step makes it grow.
        lam: λ >= 0, weight of the gradient in the direction.
        model: See :class:`SharpnessAware`, like all following arguments.
        seed: Seed of the noise.
        buffers_once: Whether buffers keep the values of the first pass.
        same_dropout: Whether all passes use the same dropout masks.
        parallel: The processes that take each step together.
        skip_nonfinite: Do not step the base if no sample is finite.
    """

    checks: ClassVar = {"gamma": check_nonnegative, "lam": check_nonnegative}

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float | Schedule = 0.05,
        gamma: float | Schedule = 5e-4,
        lam: float | Schedule = 2.0,
        model: nn.Module | None = None,
        seed: int = 0,
        buffers_once: bool = True,
        same_dropout: bool = True,
        parallel: Parallel | None = DETECTED,
        skip_nonfinite: bool = False,
    ) -> None:
        super().__init__(
            base,
            RandomAscent(),
            {"rho": rho, "gamma": gamma, "lam": lam},
            model=model,
            seed=seed,
            buffers_once=buffers_once,
            same_dropout=same_dropout,
            parallel=parallel,
            skip_nonfinite=skip_nonfinite,
        )


METHODS: dict[str, Callable[..., SharpnessAware]] = {
    "erm": ERM,
    "sam": SAM,
    "asam": ASAM,
    "esam2": LineSearchSAM,
    "pgn": PGN,
    "rsam": RSAM,
    "tsam": TSAM,
    "gsam": GSAM,
    "looksam": LookSAM,
    "friendlysam": FriendlySAM,
    "wsam": WSAM,
    "usam": USAM,
    "momentumsam": MomentumSAM,
}
"""All methods by name: TSAM and those of its paper, then the variants of SAM."""


def _sampler(sampler: str | Sampler) -> Sampler:
    if isinstance(sampler, str):
        if sampler not in _SAMPLERS:
            raise ValueError(f"sampler must be one of {', '.join(_SAMPLERS)}, or an instance; got {sampler!r}")
        return _SAMPLERS[sampler]()
    check_sampler(sampler)
    if sampler.only_for:
        raise ValueError(f"{sampler!r} does not work in TSAM: use {sampler.only_for}")
    return sampler
