"""TSAM and the methods it is compared with, each a few lines on the engine of :mod:`tiltsam.wrapper`.

=========  ==================  ===========================================  =================================
name       class               gradient handed to the base                  passes a step
=========  ==================  ===========================================  =================================
``erm``    ERM                 ∇L(θ)                                        1
``sam``    SAM                 ∇L(θ + ρ n(g))                               2
``asam``   ASAM                ∇L(θ + ρ T²g/‖Tg‖), T = |w| + η              2
``esam2``  LineSearchSAM       ∇L at the worst of K points along n(g)       2, and K forward
``pgn``    PGN                 (1−α) g + α ∇L(θ + ρ n(g))                   2
``rsam``   RSAM                ∇L(θ + ρ n(Δ + λ∇L(θ+Δ)))                    2
``tsam``   TSAM                Σ_j softmax((t−δ) L_j) ∇L(θ+ε_j)             2s (shared ascent: s+1)
=========  ==================  ===========================================  =================================

Here ``g = ∇L(θ)`` on the mini-batch and ``n(v) = v/(‖v‖+1e-12)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
from torch.optim import Optimizer

from tiltsam.checks import check_count, check_nonnegative
from tiltsam.parameters import ParameterSpace
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
from tiltsam.settings import Schedule, default_radius
from tiltsam.tilting import StreamingTilt
from tiltsam.warning import warn
from tiltsam.weighing import FixedWeights, Weighing
from tiltsam.wrapper import SharpnessAware

__all__ = ["ASAM", "ERM", "METHODS", "PGN", "RSAM", "SAM", "TSAM", "LineSearchSAM"]

SamplerName: TypeAlias = Literal["ascent", "uniform", "gaussian", "hmc"]

_SAMPLERS: dict[str, type[Sampler]] = {"ascent": Ascent, "uniform": Uniform, "gaussian": Gaussian, "hmc": HMC}


class TSAM(SharpnessAware):
    r"""Tilted sharpness-aware minimisation (Algorithms 1 and 2 of the paper). Two passes a sample.

    Descends the tilted loss :math:`L^t(θ) = (1/t) \log E_μ[\exp(t L(θ+ε))]` by s samples a step:

    .. code-block:: text

        for j = 1..s:
            δ_j  uniform in the ball of radius R
            ε_j  = δ_j + ρ n(∇L(θ + δ_j))
        v = softmax((t − δ) L(θ + ε_j))
        the base steps from θ with Σ_j v_j ∇L(θ + ε_j)

    Args:
        base: The optimizer that does the update, an instance.
        t: Tilt >= 0, a number or a callable of the step. 0 averages the samples, a large t follows the worst; ``None``
            means 20. A single sample has all the weight, whatever t.
        rho: Length of the ascent, >= 0; with the meaning and scale it has in SAM. A group's own ``rho`` wins.
            The samplers ``"uniform"``, ``"gaussian"`` and ``"hmc"`` have no ascent and make no use of it.
        radius: Radius R of the random start; ``None`` means 0.003·√d, d the number of trainable coordinates.
        num_samples: s >= 1; ``None`` means one, which is SAM from a random start, at its cost, and step for step did as
            well as the paper's 3 or 5 (docs/evidence.md).
        delta: The part of the tilt that the sampler takes over, ``0 <= delta <= t``; the weights use ``t − delta``.
            ``None`` means t/2 as in the paper, or 0 for naive sampling, whose draws follow μ itself.
        sampler: ``"ascent"`` (Algorithm 2), ``"uniform"`` or ``"gaussian"`` (naive sampling), ``"hmc"``, or an instance
            from :mod:`tiltsam.samplers` (not those of ASAM, PGN and RSAM alone) or of one's own.
        model: Keeps BatchNorm's statistics and dropout's masks the same in all passes; see :class:`SharpnessAware`.
        seed: Seed of the noise.
        share_ascent: One ascent gradient, at θ, for all samples: s+1 passes in place of 2s.
        **options: ``every``, ``buffers_once``, ``same_dropout``, ``skip_nonfinite``, ``foreach``: see
            :class:`SharpnessAware`.

    Cost: 2s forward+backward passes a step; s with ``rho=0`` or naive sampling; 2 where the samples share the batch out
    among them (a closure each, see :meth:`SharpnessAware.step`). Memory: one copy of the weights and one gradient,
    whatever s, unless samples are captured to run beside each other (``concurrent`` of :func:`tiltsam.capture`).

    Note:
        The paper prints ρ = 20, α = 0.995 for a parameter α that its algorithm lacks. We read a ball of radius 20 split
        into R = 19.9 and ρ = 0.1. The samples of Algorithm 2 follow no known density, so its aggregate is not a
        consistent estimate of ∇L^t; ``sampler="uniform"`` or HMC is.

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
        t: float | Schedule | None = None,
        rho: float | Schedule = 0.1,
        radius: float | Schedule | None = None,
        num_samples: int | None = None,
        delta: float | None = None,
        sampler: SamplerName | Sampler = "ascent",
        model: torch.nn.Module | None = None,
        seed: int = 0,
        *,
        share_ascent: bool = False,
        **options: Any,
    ) -> None:
        kernel = _sampler(sampler)
        if share_ascent:
            if not isinstance(kernel, Ascent):
                raise ValueError(f'share_ascent needs sampler="ascent", got {sampler!r}')
            kernel = replace(kernel, shared=True)
        settings = {
            "t": 20.0 if t is None else t,
            "rho": rho,
            "radius": radius,
            "num_samples": 1 if num_samples is None else num_samples,
            "delta": delta,
        }
        super().__init__(base, kernel, settings, model=model, seed=seed, **options)
        if t is not None and num_samples is None and isinstance(kernel, Ascent | Uniform | Gaussian):
            warn(
                "t weighs samples against each other, and by default there is one: say num_samples=3, or leave t out",
                UserWarning,
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
        if self.num_samples > 1 and getattr(self.sampler, "deterministic", False):
            raise ValueError(
                f"num_samples must be 1 with {self.sampler!r}, whose samples are all the same, got {self.num_samples}"
            )

    def write_settings(self, space: ParameterSpace) -> None:
        """See :class:`SharpnessAware`."""
        super().write_settings(space)
        t, radius, delta = self.setting("t"), self.setting("radius"), self.setting("delta")
        if delta is None:
            delta = t / 2 if self.sampler.tilted else 0.0
        space.set("delta", float(delta))
        space.set("tilt", float(t - delta))
        space.set_radius(default_radius(space.dim) if radius is None else float(radius))

    @property
    def num_samples(self) -> int:
        """How many samples a step takes."""
        return self.setting("num_samples")  # type: ignore[no-any-return]

    def weighing(self, space: ParameterSpace) -> Weighing:
        """See :class:`SharpnessAware`."""
        return StreamingTilt(space.setting("tilt"))


class ERM(SharpnessAware):
    """Plain training behind the same interface: one pass at θ, bitwise the base optimizer.

    Args:
        base: The optimizer that does the update, an instance.
        **options: See :class:`SharpnessAware`.
    """

    def __init__(self, base: Optimizer, **options: Any) -> None:
        super().__init__(base, Center(), {}, **options)


class SAM(SharpnessAware):
    """Sharpness-aware minimisation (Foret et al. 2021): ``∇L(θ + ρ n(∇L(θ)))``. Two passes.

    Args:
        base: The optimizer that does the update, an instance.
        rho: Length of the ascent, >= 0, a number or a callable of the step; a group's own ``rho`` wins.
        **options: See :class:`SharpnessAware`.
    """

    def __init__(self, base: Optimizer, rho: float | Schedule = 0.05, **options: Any) -> None:
        super().__init__(base, Ascent(), {"rho": rho}, **options)


class ASAM(SharpnessAware):
    """Adaptive SAM (Kwon et al. 2021): ``ε = ρ T²g/‖Tg‖`` with ``T = |w| + η``. Two passes.

    Args:
        base: The optimizer that does the update, an instance.
        rho: Length in the adaptive metric, typically 0.5 to 2.
        eta: η >= 0, keeps small weights movable.
        **options: See :class:`SharpnessAware`.
    """

    def __init__(
        self, base: Optimizer, rho: float | Schedule = 0.5, eta: float | Schedule = 0.01, **options: Any
    ) -> None:
        super().__init__(base, AdaptiveAscent(), {"rho": rho, "eta": eta}, **options)

    def check_settings(self) -> None:
        """See :class:`SharpnessAware`."""
        super().check_settings()
        check_nonnegative("eta", self.setting("eta"))


class LineSearchSAM(SharpnessAware):
    """The paper's ESAM2: SAM at the worst of K step lengths ρk/K. Two passes and K forward passes.

    Args:
        base: The optimizer that does the update, an instance.
        rho: The longest step, >= 0.
        num_points: K >= 1; 10 forward passes cost about what two more samples of TSAM do.
        **options: See :class:`SharpnessAware`.

    Note:
        Backward passes of the closure are skipped in the K forward passes, however they are called: a closure that goes
        on to clamp or log gradients finds ``None`` there.
    """

    def __init__(self, base: Optimizer, rho: float | Schedule = 0.05, num_points: int = 10, **options: Any) -> None:
        check_count("num_points", num_points)
        super().__init__(base, LineSearch(num_points), {"rho": rho}, **options)


class PGN(SharpnessAware):
    """Penalising the gradient norm (Zhao et al. 2022): ``(1−α) ∇L(θ) + α ∇L(θ + ρ n(∇L(θ)))``. Two passes.

    Args:
        base: The optimizer that does the update, an instance.
        rho: Length of the ascent (the paper's r), >= 0.
        alpha: Weight of the perturbed gradient in [0, 1]: 0 is plain training, 1 is SAM.
        **options: See :class:`SharpnessAware`.
    """

    def __init__(
        self, base: Optimizer, rho: float | Schedule = 0.05, alpha: float | Schedule = 0.5, **options: Any
    ) -> None:
        super().__init__(base, CenterThenAscent(), {"rho": rho, "alpha": alpha}, **options)

    def check_settings(self) -> None:
        """See :class:`SharpnessAware`."""
        super().check_settings()
        alpha = self.setting("alpha")
        check_nonnegative("alpha", alpha)
        if alpha > 1:
            raise ValueError(f"alpha must be <= 1, got {alpha}")

    @property
    def num_samples(self) -> int:
        """Two: θ, and SAM's point."""
        return 2

    def weighing(self, space: ParameterSpace) -> Weighing:
        """See :class:`SharpnessAware`."""
        alpha = space.setting("alpha")
        return FixedWeights(torch.stack([1 - alpha, alpha]))


class RSAM(SharpnessAware):
    """Random SAM (Liu et al. 2022): the ascent starts from filter-wise noise. Two passes.

    ``Δ ~ N(0, (γ‖w_filter‖)²)`` filter by filter, ``ε = ρ n(Δ + λ ∇L(θ+Δ))``.

    Args:
        base: The optimizer that does the update, an instance.
        rho: Length of the perturbation, >= 0.
        gamma: γ >= 0, size of the noise relative to each filter; a callable of the step makes it grow.
        lam: λ >= 0, weight of the gradient in the direction.
        **options: See :class:`SharpnessAware`.
    """

    def __init__(
        self,
        base: Optimizer,
        rho: float | Schedule = 0.05,
        gamma: float | Schedule = 5e-4,
        lam: float | Schedule = 2.0,
        **options: Any,
    ) -> None:
        super().__init__(base, RandomAscent(), {"rho": rho, "gamma": gamma, "lam": lam}, **options)

    def check_settings(self) -> None:
        """See :class:`SharpnessAware`."""
        super().check_settings()
        check_nonnegative("gamma", self.setting("gamma"))
        check_nonnegative("lam", self.setting("lam"))


METHODS: dict[str, Callable[..., SharpnessAware]] = {
    "erm": ERM,
    "sam": SAM,
    "asam": ASAM,
    "esam2": LineSearchSAM,
    "pgn": PGN,
    "rsam": RSAM,
    "tsam": TSAM,
}
"""The paper's names, each with its constructor."""


def _sampler(sampler: str | Sampler) -> Sampler:
    if isinstance(sampler, str):
        if sampler not in _SAMPLERS:
            raise ValueError(f"sampler must be one of {', '.join(_SAMPLERS)}, or an instance; got {sampler!r}")
        return _SAMPLERS[sampler]()
    if isinstance(sampler, type):
        raise TypeError(f"sampler must be a name or an instance, got the class: write {sampler.__name__}()")
    if method := getattr(sampler, "only_for", None):
        raise ValueError(f"{sampler!r} does not work in TSAM: use {method}")
    return sampler
