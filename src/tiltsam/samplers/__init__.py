"""Samplers choose perturbations ε of the weights and evaluate the gradient there.

A sampler is a small frozen object with two methods. ``begin(space)`` runs once a step, ``sample(space, j, common)``
once for each of the s samples; it moves ``space.point`` to θ+ε_j, evaluates there and returns a :class:`Draw`. A
sampler uses the :class:`~tiltsam.space.Space` protocol and nothing else, and draws random numbers only from the
generator of its sample. ``docs/add-a-method.md`` writes one.

==================  =================================  ===============================================================
sampler             passes for s samples               draws
==================  =================================  ===============================================================
Center              s                                  ε = 0 (plain training)
Uniform, Gaussian   s                                  exactly μ: consistent with sample weights softmax(t L)
Ascent              2s (or s + 1)                      Algorithm 2: biased, density unknown; the paper's choice, cheap
HMC                 s (1 + num_steps · num_proposals)  μ exp(δL) in the limit of many proposals: consistent
==================  =================================  ===============================================================

"Consistent" means that the aggregate tends to the gradient of the tilted loss as s grows. ``AdaptiveAscent``,
``LineSearch``, ``RandomAscent`` and ``CenterThenAscent`` belong to ASAM, ESAM2, RSAM and PGN, those of
:mod:`~tiltsam.samplers.variants` to GSAM, LookSAM, Friendly-SAM, USAM and Momentum-SAM; those that do not work in every
method name theirs in ``only_for``.
"""

from tiltsam.samplers.ascent import AdaptiveAscent, Ascent, CenterThenAscent, LineSearch, RandomAscent
from tiltsam.samplers.base import Sampler, Start
from tiltsam.samplers.hmc import HMC
from tiltsam.samplers.noise import Center, Gaussian, Uniform
from tiltsam.samplers.variants import FriendlyAscent, MomentumAscent, PowerAscent, ReusedAscent, SurrogateGap
from tiltsam.space.protocol import Draw, draw_after_ascent, draw_at

__all__ = [
    "HMC",
    "AdaptiveAscent",
    "Ascent",
    "Center",
    "CenterThenAscent",
    "Draw",
    "FriendlyAscent",
    "Gaussian",
    "LineSearch",
    "MomentumAscent",
    "PowerAscent",
    "RandomAscent",
    "ReusedAscent",
    "Sampler",
    "Start",
    "SurrogateGap",
    "Uniform",
    "draw_after_ascent",
    "draw_at",
]
