"""The trainable weights as one vector: a center θ, a point near it, and the loss and gradient at that point.

:mod:`tiltsam.space.protocol` is what samplers are written against, :class:`ParameterSpace` implements it for the
weights of a network.
"""

from tiltsam.space.protocol import EPS, Draw, Evaluation, Space, Spread, Vector

__all__ = ["EPS", "Draw", "Evaluation", "Space", "Spread", "Vector"]
