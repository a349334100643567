"""Where a step looks: kernels that choose perturbations ε of the weights and evaluate the gradient there.

A kernel is a small frozen object with two methods. ``begin(space)`` runs once a step, ``sample(space, j, state)`` once
for each of the s samples; it leaves ``space.point`` at θ+ε_j and returns a :class:`Draw`. Everything a kernel needs of
the world is the :class:`~tiltsam.space.Space` protocol, and every random number comes from the stream of sample j.
``docs/add-a-method.md`` makes one.

Which of them estimate the gradient of the tilted loss consistently (s→∞)?

==================  =====================  ==================================================================
kernel              passes for s samples   draws
==================  =====================  ==================================================================
Center              s                      ε = 0 (plain training)
Uniform, Gaussian   s                      exactly μ: consistent with weights softmax(t L)
Ascent              2s (shared: s + 1)     Algorithm 2: biased, no density is known; the paper's choice, cheap
HMC                 s (1 + N proposals)    μ exp(δL) in the limit of many proposals: consistent
==================  =====================  ==================================================================

``AdaptiveAscent``, ``LineSearch``, ``RandomAscent`` and ``CenterThenAscent`` are the relatives' (ASAM, ESAM2, RSAM,
PGN). Those that work in one method alone, having settings or a number of samples that no other has, name it in
``only_for``.
"""

from tiltsam.samplers.ascent import AdaptiveAscent, Ascent, CenterThenAscent, LineSearch, RandomAscent
from tiltsam.samplers.hmc import HMC
from tiltsam.samplers.kernel import Draw, Sampler, Start, Stateless, after_ascent, drawn, evaluated
from tiltsam.samplers.noise import Center, Gaussian, Uniform

__all__ = [
    "HMC",
    "AdaptiveAscent",
    "Ascent",
    "Center",
    "CenterThenAscent",
    "Draw",
    "Gaussian",
    "LineSearch",
    "RandomAscent",
    "Sampler",
    "Start",
    "Stateless",
    "Uniform",
    "after_ascent",
    "drawn",
    "evaluated",
]
