"""Exponential tilting of losses: over the samples of a step (TSAM), and over the examples of a batch (TERM).

- :mod:`~tiltsam.tilting.streaming`: tilted loss, weights, mean and variance.
- :mod:`~tiltsam.tilting.examples`: :class:`ExampleTilt`, the loss of a batch with tilted examples.
"""

from tiltsam.tilting.examples import ExampleTilt
from tiltsam.tilting.streaming import (
    StreamingTilt,
    effective_sample_size,
    tilted_loss,
    tilted_mean,
    tilted_var,
    tilted_weights,
)

__all__ = [
    "ExampleTilt",
    "StreamingTilt",
    "effective_sample_size",
    "tilted_loss",
    "tilted_mean",
    "tilted_var",
    "tilted_weights",
]
