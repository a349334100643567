"""Variants of SAM.

===============  ===============  ===============================================  ====================================
name             class            gradient given to the base                       passes a step
===============  ===============  ===============================================  ====================================
``gsam``         GSAM             g_p − α (g − its projection on g_p)              2
``looksam``      LookSAM          g_p at every k-th step, g + α‖g‖/‖g_v‖ g_v else  1 + 1/k
``friendlysam``  FriendlySAM      ∇L(θ + ρ n(g − σm)), m the running mean of g     2
``wsam``         WSAM             (1−2γ)/(1−γ) g + γ/(1−γ) g_p                     2
``usam``         USAM             ∇L(θ + ρ ‖g‖^p n(g))                             2
``momentumsam``  MomentumSAM      ∇L(θ − ρ n(v)), v the momentum                   1
===============  ===============  ===============================================  ====================================

Here ``g = ∇L(θ)``, ``g_p = ∇L(θ + ρ n(g))`` is SAM's gradient, and ``g_v`` the part of the last ``g_p`` that is
orthogonal to its ``g``.

Two more variants are settings of any method. Late-phase SAM is ``rho=tiltsam.schedules.late_phase(...)``: while ``rho``
is 0, a step is that of the base, bit for bit, at one pass (except for TSAM's noise). SAM-ON perturbs the normalisation
layers only: wrap a base over the parameter groups of :func:`norm_groups`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from tiltsam.distributed import Parallel
from tiltsam.optim.sharpness_aware import DETECTED, SharpnessAware
from tiltsam.samplers import (
    Center,
    CenterThenAscent,
    FriendlyAscent,
    MomentumAscent,
    PowerAscent,
    ReusedAscent,
    Sampler,
    SurrogateGap,
)
from tiltsam.schedules import Schedule
from tiltsam.space.parameter_space import ParameterSpace
from tiltsam.space.step_record import FixedWeights, Weighting
from tiltsam.space.validation import check_count, check_fraction, check_nonnegative

__all__ = ["GSAM", "USAM", "WSAM", "FriendlySAM", "LookSAM", "MomentumSAM", "norm_groups"]

_NORM_LAYERS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class GSAM(SharpnessAware):
    """Surrogate-gap SAM (Zhuang et al., ICLR 2022): SAM's gradient, less a part of ∇L(θ) orthogonal to it. Two passes.

    ``g_p − α (g − proj g)`` with ``g = ∇L(θ)``, ``g_p = ∇L(θ + ρ n(g))`` and proj the projection on ``g_p``. Needs one
    more vector of memory.

    Args:
        base: The optimizer that does the update, an instance.
        rho: Length of the ascent, >= 0. A number or a callable of the step; a group's own ``rho`` wins.
        alpha: α >= 0, weight of the surrogate gap: 0 is SAM.
        model: See :class:`SharpnessAware`, like all following arguments.
        seed: Unused; this method draws no noise.
        buffers_once: Whether buffers keep the values of the first pass.
        same_dropout: Whether all passes use the same dropout masks.
        parallel: The processes that take each step together.
        skip_nonfinite: Do not step the base if no sample is finite.

    Note:
        The paper lets ρ follow the learning rate: pass a schedule.
    """

    checks: ClassVar = {"alpha": check_nonnegative}

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float | Schedule = 0.05,
        alpha: float | Schedule = 0.4,
        model: nn.Module | None = None,
        seed: int = 0,
        buffers_once: bool = True,
        same_dropout: bool = True,
        parallel: Parallel | None = DETECTED,
        skip_nonfinite: bool = False,
    ) -> None:
        super().__init__(
            base,
            SurrogateGap(),
            {"rho": rho, "alpha": alpha},
            model=model,
            seed=seed,
            buffers_once=buffers_once,
            same_dropout=same_dropout,
            parallel=parallel,
            skip_nonfinite=skip_nonfinite,
        )


class LookSAM(SharpnessAware):
    """SAM at every k-th step; the steps in between reuse its direction (Liu et al., CVPR 2022). 1 + 1/k passes.

    Every k-th step descends SAM's gradient and keeps its part ``g_v`` that is orthogonal to ``g = ∇L(θ)``. The steps
    in between descend ``g + α ‖g‖/‖g_v‖ g_v``, at one pass.

    Args:
        base: The optimizer that does the update, an instance.
        rho: Length of the ascent, >= 0. A number or a callable of the step; a group's own ``rho`` wins.
        alpha: α >= 0, weight of the kept part: 0 takes plain steps in between.
        k: Number of steps from one ascent to the next, >= 1: 1 is SAM.
        model: See :class:`SharpnessAware`, like all following arguments.
        seed: Unused; this method draws no noise.
        buffers_once: Whether buffers keep the values of the first pass.
        same_dropout: Whether all passes use the same dropout masks.
        parallel: The processes that take each step together.
        skip_nonfinite: Do not step the base if no sample is finite.
    """

    checks: ClassVar = {"alpha": check_nonnegative, "k": check_count}

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float | Schedule = 0.05,
        alpha: float | Schedule = 0.7,
        k: int = 5,
        model: nn.Module | None = None,
        seed: int = 0,
        buffers_once: bool = True,
        same_dropout: bool = True,
        parallel: Parallel | None = DETECTED,
        skip_nonfinite: bool = False,
    ) -> None:
        super().__init__(
            base,
            ReusedAscent(),
            {"rho": rho, "alpha": alpha, "k": k},
            model=model,
            seed=seed,
            buffers_once=buffers_once,
            same_dropout=same_dropout,
            parallel=parallel,
            skip_nonfinite=skip_nonfinite,
        )

    def plan(self) -> tuple[Sampler, int]:
        """See :class:`SharpnessAware`. Plain steps while ``rho`` is 0."""
        if not self.ascending:
            return Center(), 1
        return ReusedAscent(refresh=self.setting("steps_taken") % self.setting("k") == 0), 1


class FriendlySAM(SharpnessAware):
    """Friendly-SAM (Li et al., CVPR 2024): ascends along what is specific to the batch. Two passes.

    ``∇L(θ + ρ n(g − σ m))``, where ``m <- λ m + (1−λ) g`` is a running mean of ``g = ∇L(θ)``, kept between steps.

    Args:
        base: The optimizer that does the update, an instance.
        rho: Length of the ascent, >= 0. A number or a callable of the step; a group's own ``rho`` wins.
        sigma: σ >= 0, how much of the mean is subtracted: 0 is SAM.
        lam: λ in [0, 1), decay of the running mean.
        model: See :class:`SharpnessAware`, like all following arguments.
        seed: Unused; this method draws no noise.
        buffers_once: Whether buffers keep the values of the first pass.
        same_dropout: Whether all passes use the same dropout masks.
        parallel: The processes that take each step together.
        skip_nonfinite: Do not step the base if no sample is finite.
    """

    checks: ClassVar = {"sigma": check_nonnegative, "lam": check_fraction}

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float | Schedule = 0.05,
        sigma: float | Schedule = 1.0,
        lam: float | Schedule = 0.9,
        model: nn.Module | None = None,
        seed: int = 0,
        buffers_once: bool = True,
        same_dropout: bool = True,
        parallel: Parallel | None = DETECTED,
        skip_nonfinite: bool = False,
    ) -> None:
        super().__init__(
            base,
            FriendlyAscent(),
            {"rho": rho, "sigma": sigma, "lam": lam},
            model=model,
            seed=seed,
            buffers_once=buffers_once,
            same_dropout=same_dropout,
            parallel=parallel,
            skip_nonfinite=skip_nonfinite,
        )


class WSAM(SharpnessAware):
    """Weighted SAM (Yue et al., KDD 2023): sharpness as a regulariser of weight γ/(1−γ). Two passes.

    ``(1−2γ)/(1−γ) ∇L(θ) + γ/(1−γ) ∇L(θ + ρ n(∇L(θ)))``: an extrapolation from the first through the second if γ > 1/2.

    Args:
        base: The optimizer that does the update, an instance.
        rho: Length of the ascent, >= 0. A number or a callable of the step; a group's own ``rho`` wins.
        gamma: γ in [0, 1): 0 is plain training, 1/2 is SAM.
        model: See :class:`SharpnessAware`, like all following arguments.
        seed: Unused; this method draws no noise.
        buffers_once: Whether buffers keep the values of the first pass.
        same_dropout: Whether all passes use the same dropout masks.
        parallel: The processes that take each step together.
        skip_nonfinite: Do not step the base if no sample is finite.

    Note:
        The base receives the whole gradient. The paper's variant for adaptive bases, which applies the sharpness term
        outside of the base ("decoupled"), is not offered.
    """

    checks: ClassVar = {"gamma": check_fraction}

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float | Schedule = 0.05,
        gamma: float | Schedule = 0.9,
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
            {"rho": rho, "gamma": gamma},
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
        far = space.setting("gamma") / (1 - space.setting("gamma"))
        return FixedWeights(torch.stack([1 - far, far]))


class USAM(SharpnessAware):
    """Unnormalised SAM (Andriushchenko & Flammarion, ICML 2022): ``∇L(θ + ρ ‖g‖^p n(g))``, p = 1. Two passes.

    With p = 1 the perturbation is ``ρ g``, which vanishes where the gradient does; with p = 0 it has SAM's length.

    Args:
        base: The optimizer that does the update, an instance.
        rho: Length of the ascent along a gradient of norm 1, >= 0. A number or a callable of the step; a group's own
            ``rho`` wins.
        power: p >= 0: 1 is unnormalised, 0 is SAM.
        model: See :class:`SharpnessAware`, like all following arguments.
        seed: Unused; this method draws no noise.
        buffers_once: Whether buffers keep the values of the first pass.
        same_dropout: Whether all passes use the same dropout masks.
        parallel: The processes that take each step together.
        skip_nonfinite: Do not step the base if no sample is finite.
    """

    checks: ClassVar = {"power": check_nonnegative}

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float | Schedule = 0.05,
        power: float | Schedule = 1.0,
        model: nn.Module | None = None,
        seed: int = 0,
        buffers_once: bool = True,
        same_dropout: bool = True,
        parallel: Parallel | None = DETECTED,
        skip_nonfinite: bool = False,
    ) -> None:
        super().__init__(
            base,
            PowerAscent(),
            {"rho": rho, "power": power},
            model=model,
            seed=seed,
            buffers_once=buffers_once,
            same_dropout=same_dropout,
            parallel=parallel,
            skip_nonfinite=skip_nonfinite,
        )


class MomentumSAM(SharpnessAware):
    """Momentum-SAM (Becker et al. 2024): ``∇L(θ − ρ n(v))``, v the momentum of the gradients. One pass.

    ``v <- β v + (1−β) g`` with the gradient g of the step. The first step is plain: there is no momentum yet.

    Args:
        base: The optimizer that does the update, an instance.
        rho: Length of the perturbation, >= 0. A number or a callable of the step; a group's own ``rho`` wins.
        beta: β in [0, 1), decay of the momentum; usually that of the base.
        model: See :class:`SharpnessAware`, like all following arguments.
        seed: Unused; this method draws no noise.
        buffers_once: Whether buffers keep the values of the first pass.
        same_dropout: Whether all passes use the same dropout masks.
        parallel: The processes that take each step together.
        skip_nonfinite: Do not step the base if no sample is finite.

    Note:
        Not m-SAM, which divides the batch. The momentum is kept here, so that any base can be used. With SGD of
        momentum β and no weight decay it is proportional to the base's.
    """

    checks: ClassVar = {"beta": check_fraction}

    def __init__(
        self,
        base: Optimizer,
        *,
        rho: float | Schedule = 0.3,
        beta: float | Schedule = 0.9,
        model: nn.Module | None = None,
        seed: int = 0,
        buffers_once: bool = True,
        same_dropout: bool = True,
        parallel: Parallel | None = DETECTED,
        skip_nonfinite: bool = False,
    ) -> None:
        super().__init__(
            base,
            MomentumAscent(),
            {"rho": rho, "beta": beta},
            model=model,
            seed=seed,
            buffers_once=buffers_once,
            same_dropout=same_dropout,
            parallel=parallel,
            skip_nonfinite=skip_nonfinite,
        )


def norm_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two parameter groups of a model: normalisation layers, and all other parameters with ``rho`` 0.

    Methods then perturb the normalisation layers only (SAM-ON, Mueller et al., NeurIPS 2023) and train all parameters.
    Layers are torch's own (BatchNorm, InstanceNorm, LayerNorm, GroupNorm, RMSNorm) and those of a class whose name ends
    in ``Norm``. TSAM's noise still moves all parameters; RSAM's does so only in the pass that computes the ascent.
    With a base that has its own ``rho`` (Adadelta) rename the entry to ``tilt_rho``.

    Raises:
        ValueError: If the model has no such layer with trainable parameters.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        >>> optimizer = tiltsam.SAM(torch.optim.SGD(tiltsam.optim.norm_groups(model), lr=0.1), rho=0.5, model=model)
        >>> [group["rho"] for group in optimizer.param_groups]
        [0.5, 0.0]
    """
    layers = [m for m in model.modules() if isinstance(m, _NORM_LAYERS) or type(m).__name__.endswith("Norm")]
    chosen = {id(p) for layer in layers for p in layer.parameters(recurse=False) if p.requires_grad}
    if not chosen:
        raise ValueError(f"{type(model).__name__} has no normalisation layer with trainable parameters")
    norms, others = ([p for p in model.parameters() if (id(p) in chosen) is inside] for inside in (True, False))
    return [{"params": norms}, {"params": others, "rho": 0.0}]
