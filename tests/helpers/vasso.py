"""VaSSO, as docs/add-a-method.md writes it: a user's method that must pass the tests of tiltsam's methods."""

import ast
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "add-a-method.md"

# The imports and the classes, in this module's names, so that pickles find them. The page's example takes a step, which
# would import torch's compiler while tests are collected.
for _block in PAGE.read_text().split("```python\n")[1:3]:
    _parsed = ast.parse(_block.split("```")[0], PAGE.name)
    _parsed.body = [_node for _node in _parsed.body if isinstance(_node, ast.Import | ast.ImportFrom | ast.ClassDef)]
    exec(compile(_parsed, PAGE.name, "exec"), globals())
