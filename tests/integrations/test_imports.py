"""The integrations are optional: nothing else imports them."""

import ast
from pathlib import Path

import tiltsam

ROOT = Path(tiltsam.__file__).parent


def test_nothing_imports_the_integrations():
    for path in ROOT.rglob("*.py"):
        if "integrations" not in path.relative_to(ROOT).parts:
            for node in ast.walk(ast.parse(path.read_text())):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                names += [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
                assert not any("integrations" in name for name in names), path
