"""Toy problems with exact answers: the paper's figures and theorems as a laboratory.

- :mod:`~tiltsam.toys.objectives`: losses of one variable, and ERM, SAM and TSAM objectives on them by quadrature.
- :mod:`~tiltsam.toys.descent`: descent, flow, stationary points, global minimisers and where they jump.
- :mod:`~tiltsam.toys.chain_space`: many chains of a sampler on a known function.
"""

from tiltsam.toys.descent import Minimum, Path, descend, flow, jumps, minimise, stationary_points
from tiltsam.toys.objectives import (
    COUNTEREXAMPLE,
    HMC_TEST,
    TOY1,
    TOY2,
    WAVE,
    Ball,
    Noise,
    Normal,
    Point,
    Problem,
    Tilted,
    erm,
    lemma_derivatives,
    linear,
    quadratic,
    sam,
    tsam,
)

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
