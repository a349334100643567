"""The paper's statements, toy figures and gradient estimators, checked against exact numbers."""
