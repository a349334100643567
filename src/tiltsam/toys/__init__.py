"""Losses of one variable with exact objectives, and samplers on functions with known densities.

- :mod:`~tiltsam.toys.problems`: the losses.
- :mod:`~tiltsam.toys.objectives`: the ERM, SAM and TSAM objectives of a loss, by quadrature.
- :mod:`~tiltsam.toys.descent`: gradient descent, gradient flow, stationary points and global minimisers.
- :mod:`~tiltsam.toys.quadrature`: the adaptive quadrature rule.
- :mod:`~tiltsam.toys.chain_space`: many chains of a sampler on a known function.
"""

from tiltsam.toys.descent import Minimum, Path, descend, flow, jumps, minimise, stationary_points
from tiltsam.toys.objectives import Ball, Noise, Normal, Point, Tilted, erm, lemma_derivatives, sam, tsam
from tiltsam.toys.problems import COUNTEREXAMPLE, HMC_TEST, TOY1, TOY2, WAVE, Problem, linear, quadratic

__all__ = [
    "COUNTEREXAMPLE",
    "HMC_TEST",
    "TOY1",
    "TOY2",
    "WAVE",
    "Ball",
    "Minimum",
    "Noise",
    "Normal",
    "Path",
    "Point",
    "Problem",
    "Tilted",
    "descend",
    "erm",
    "flow",
    "jumps",
    "lemma_derivatives",
    "linear",
    "minimise",
    "quadratic",
    "sam",
    "stationary_points",
    "tsam",
]
