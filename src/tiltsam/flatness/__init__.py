"""What the measurements of flatness stand on; users start at ``tiltsam.sharpness``, ``.curvature`` and ``.landscape``.

- :mod:`~tiltsam.flatness.evaluation`: a model's loss as a function of its weights, that leaves no trace;
  :mod:`~tiltsam.flatness.randomness`: the random numbers it may draw; :mod:`~tiltsam.flatness.sums`: means and norms.
- :mod:`~tiltsam.flatness.hessian`, :mod:`~tiltsam.flatness.lanczos`: Hessian products and eigenpairs on the device;
  :mod:`~tiltsam.flatness.probes`, :mod:`~tiltsam.flatness.density`: random probes, and the spectrum they show.
- :mod:`~tiltsam.flatness.worst_case`, :mod:`~tiltsam.flatness.objectives`: sharpness by ascent, the cross table.
- :mod:`~tiltsam.flatness.comparison`, :mod:`~tiltsam.flatness.figures`: all of it for several models, drawn.
"""
