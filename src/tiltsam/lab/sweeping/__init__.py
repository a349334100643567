"""The parts of a sweep: ``grids``, a ``plan``, the ``board`` its workers share in a ``store``, and its ``standing``."""
