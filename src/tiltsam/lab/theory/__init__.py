"""The paper's statements and toy figures, checked against exact numbers; ``tiltsam toys`` prints and draws them.

- :mod:`~tiltsam.lab.theory.statements`: the paper's statements as functions that return numbers.
- :mod:`~tiltsam.lab.theory.findings`: each statement of the paper next to what was found.
- :mod:`~tiltsam.lab.theory.estimators`: bias and standard deviation of the optimizer's gradient estimators.
- :mod:`~tiltsam.lab.theory.figures`: the figures.
"""
