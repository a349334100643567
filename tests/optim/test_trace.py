"""How much Python an eager step runs through."""

import tiltsam
from helpers.cases import Problem, sgd
from helpers.tracing import named_functions_of
from tiltsam.space.evaluator import forward_only


def test_step_visits_few_files_and_functions():
    forward_only(lambda: None)  # from then on autograd runs through one function more
    problem = Problem()
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), num_samples=2, model=problem.model)
    for _ in range(2):  # the first builds the space, the second notes where its memory is
        optimizer.step(problem.closure)
    seen = named_functions_of(lambda: optimizer.step(problem.closure))
    files = {file for file, _ in seen}
    found = f"{len(files)} files, {len(seen)} functions"
    assert len(files) <= 14, found
    assert len(seen) <= 90, found
