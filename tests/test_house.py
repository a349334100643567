"""The house keeps its rooms in order: imports run one way, names are documented, examples run."""

import ast
import doctest
import graphlib
import importlib
import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tiltsam

ROOT = Path(tiltsam.__file__).parent
REPOSITORY = ROOT.parent.parent
NEED_TRITON = {"tiltsam.kernels"} if importlib.util.find_spec("triton") is None else set()
MODULES = sorted(
    m.name
    for m in pkgutil.walk_packages([str(ROOT)], "tiltsam.")
    if not m.name.endswith("__main__") and m.name not in NEED_TRITON
)

# Each room, and the rooms it may look into. The lab may look everywhere; nobody looks into the lab.
CORE = {
    "tilting": set(),
    "warning": set(),
    "vectors": set(),
    "bases": set(),
    "buffers": {"vectors"},
    "space": set(),
    "kernels": set(),
    "streams": set(),
    "distributed": {"warning"},
    "settings": set(),
    "shell": {"memory", "settings"},
    "info": {"warning"},
    "checks": {"distributed", "warning"},
    "branches": set(),
    "blocks": {"distributed", "memory", "vectors"},
    "memory": {"buffers", "distributed", "vectors", "warning"},
    "accumulator": {"blocks", "distributed", "fused", "vectors"},
    "scaling": {"accumulator"},
    "fused": {"kernels", "samplers", "space", "vectors"},
    "passes": {"buffers"},
    "parameters": {
        *("accumulator", "blocks", "branches", "buffers", "checks", "distributed", "fused", "passes", "scaling"),
        *("settings", "space", "streams", "tilting", "vectors", "weighing"),
    },
    "lanes": {"branches", "buffers", "fused", "parameters", "samplers", "vectors"},
    "samplers": {"space"},
    "weighing": {"samplers", "tilting"},
    "wrapper": {
        *("buffers", "checks", "distributed", "info", "lanes", "memory", "parameters", "passes", "samplers"),
        *("settings", "shell", "weighing"),
    },
    "optim": {"checks", "parameters", "samplers", "settings", "tilting", "warning", "weighing", "wrapper"},
    "capture": {"bases", "flatness", "info", "lanes", "parameters", "passes", "warning", "wrapper"},
    "sharpness": {"flatness", "tilting", "warning"},
    "curvature": {"flatness"},
    "landscape": {"flatness", "warning"},
    "flatness": {"buffers", "checks", "distributed", "passes", "settings", "space", "streams", "tilting", "warning"},
    "integrations": {"distributed", "info", "parameters", "wrapper"},
    "toys": {"samplers", "space", "tilting"},
}


def imports(path: Path) -> set[str]:
    """The rooms of tiltsam that a file imports when it is loaded or run."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "tiltsam":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tiltsam."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("tiltsam.")}
    return found


def files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py")) if (ROOT / room).is_dir() else [ROOT / f"{room}.py"]


@pytest.mark.parametrize("room", CORE)
def test_imports_run_one_way(room):
    for path in files(room):
        assert imports(path) - {room} <= CORE[room], path


def test_imports_have_no_cycle():
    graphlib.TopologicalSorter(CORE).prepare()  # raises CycleError


def test_nobody_imports_the_lab():
    allowed = {"cli.py", "__main__.py"}
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith("lab/") and name not in allowed:
            assert "lab" not in imports(path), path


def test_the_library_needs_torch_alone():
    """Importing the core pulls in nothing that is not torch or the standard library."""
    code = (
        "import sys, torch; before = set(sys.modules); import tiltsam; "
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(ast.literal_eval(run.stdout)) <= {"tiltsam", "torch"}


@pytest.mark.parametrize("version", ["2.8.0", "2.10.1+cu130", "2.9.0a0+git1234567", "1.13.1"])
def test_old_torch_is_refused(version):
    with pytest.raises(ImportError, match=rf"2\.11.*{re.escape(version)}"):
        tiltsam._check_torch(version)
    code = f"import torch; torch.__version__ = {version!r}; import tiltsam.optim"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1
    assert f"ImportError: tiltsam needs torch>=2.11, found torch {version}" in run.stderr


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0+cu130", "2.12.0a0+git", "2.15.0.dev20260101", "3.0", "unknown"])
def test_new_torch_is_accepted(version):
    tiltsam._check_torch(version)


def test_torch_floor_is_that_of_the_package():
    floor = ".".join(map(str, tiltsam._TORCH_FLOOR))
    assert f'dependencies = ["torch>={floor}"]' in (REPOSITORY / "pyproject.toml").read_text()


@pytest.mark.parametrize("name", MODULES)
def test_public_names_are_documented(name):
    module = importlib.import_module(name)
    assert module.__doc__, name
    for public in getattr(module, "__all__", []):
        thing = getattr(module, public)
        if not (inspect.isclass(thing) or inspect.isfunction(thing)) or thing.__module__ != name:
            continue
        assert inspect.getdoc(thing), f"{name}.{public}"
        if inspect.isclass(thing):
            for attribute, member in vars(thing).items():
                if inspect.isfunction(member) and not attribute.startswith("_"):
                    assert inspect.getdoc(member), f"{name}.{public}.{attribute}"


@pytest.mark.parametrize("name", ["tiltsam", *MODULES])
def test_documented_examples_run(name):
    module = importlib.import_module(name)
    results = doctest.testmod(module, extraglobs={"torch": __import__("torch"), "tiltsam": tiltsam})
    assert results.failed == 0


@pytest.mark.parametrize("path", sorted(REPOSITORY.glob("*.md")) + sorted((REPOSITORY / "docs").rglob("*.md")), ids=str)
def test_python_in_the_pages_runs(path, tmp_path, monkeypatch):
    """Every ```python block of a page, in order, in one namespace."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for number, block in enumerate(path.read_text().split("```python\n")[1:]):
        code = block.split("```")[0]
        exec(compile(code, f"{path.name} block {number}", "exec"), namespace)


# The rooms that users import: all that they offer is in the reference.
OFFERED = [
    *("tiltsam", "tiltsam.averaging", "tiltsam.capture", "tiltsam.curvature", "tiltsam.landscape", "tiltsam.optim"),
    *("tiltsam.samplers", "tiltsam.sharpness", "tiltsam.tilting"),
    *("tiltsam.toys", "tiltsam.toys.chain_space", "tiltsam.lab.theory.estimators", "tiltsam.lab.theory.statements"),
    *("tiltsam.integrations.accelerate", "tiltsam.integrations.lightning", "tiltsam.integrations.transformers"),
    *("tiltsam.lab.compare", "tiltsam.lab.report", "tiltsam.lab.sweep", "tiltsam.lab.train"),
]


@pytest.fixture(scope="module")
def reference():
    """Everything that the pages of docs/api show: rooms, and the members they list of them."""
    shown = []
    for path in sorted((REPOSITORY / "docs" / "api").glob("*.md")):
        for room, members in re.findall(r"^::: (\S+)\n    options:\n      members: \[(.*)\]$", path.read_text(), re.M):
            module = importlib.import_module(room)
            shown += [module, *(getattr(module, name) for name in members.split(", "))]
    return shown


@pytest.mark.parametrize("name", OFFERED)
def test_public_names_are_in_the_reference(name, reference):
    room = importlib.import_module(name)
    missing = [public for public in room.__all__ if not any(getattr(room, public) is thing for thing in reference)]
    assert not missing, f"docs/api lacks {missing} of {name}"



def test_the_readme_shows_both_commands():
    text = (REPOSITORY / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text
    assert tiltsam.__version__ in (REPOSITORY / "CHANGELOG.md").read_text()


def test_install_hints_work_from_a_clone():
    """tiltsam is on no package index, and an unquoted bracket is a pattern in zsh."""
    texts = [path for folder in ("src", "docs", "examples") for path in (REPOSITORY / folder).rglob("*")]
    for path in [REPOSITORY / "README.md", *texts]:
        if path.suffix in (".py", ".md"):
            assert not re.findall(r"pip install \S*tiltsam\S*|pip install \.\[\S*", path.read_text()), path
