"""A step's passes as a context, for tests that use a space without an optimizer."""

from contextlib import contextmanager


@contextmanager
def perturbed(space, *args, **kwargs):
    """Let the point move in the body, then restore the weights; undo the step if anything is raised."""
    try:
        space.begin_passes(*args, **kwargs)
        yield
        space.end_passes()
    except BaseException:
        space.roll_back()
        raise
