"""How much Python an eager step runs through."""

import sys
from pathlib import Path

import tiltsam
from helpers.cases import Problem, sgd

PACKAGE = str(Path(tiltsam.__file__).parent)


def named_functions_of(action):
    """Return the functions and methods of the package that an action calls, as (file, name).

    Comprehensions, generator expressions and lambdas are lines of the function they are in.
    """
    seen = set()

    def profile(frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            seen.add((code.co_filename, code.co_qualname))

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return seen


def test_step_visits_few_files_and_functions():
    problem = Problem()
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), num_samples=2, model=problem.model)
    for _ in range(2):  # the first builds the space, the second notes where its memory is
        optimizer.step(problem.closure)
    seen = named_functions_of(lambda: optimizer.step(problem.closure))
    files = {file for file, _ in seen}
    found = f"{len(files)} files, {len(seen)} functions"
    assert len(files) <= 14, found
    assert len(seen) <= 90, found
