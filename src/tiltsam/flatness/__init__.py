"""The machinery behind :mod:`tiltsam.sharpness`, :mod:`tiltsam.curvature` and :mod:`tiltsam.landscape`.

Nothing in this package imports those three.

- :mod:`~tiltsam.flatness.loss_surface`: the mean loss of a data set as a function of the weights, restored on exit.
- :mod:`~tiltsam.flatness.data`: size, device and parts of a batch.
- :mod:`~tiltsam.flatness.randomness`: seeds of the draws, and the global generators pinned during a measurement.
- :mod:`~tiltsam.flatness.numerics`: means with errors, norms, random signs, sums rounded to the weights' precision.
- :mod:`~tiltsam.flatness.hessian`, :mod:`~tiltsam.flatness.lanczos`: Hessian products, eigenpairs and quadrature.
- :mod:`~tiltsam.flatness.worst_case`, :mod:`~tiltsam.flatness.objectives`: m-sharpness, losses of ERM, SAM, TSAM.
"""
