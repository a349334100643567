"""The package as a whole: import layers, documented names, examples and pages that run, install hints."""

import ast
import doctest
import functools
import graphlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch.distributed as dist

import tiltsam
from helpers.lab_processes import start_on_ranks

ROOT = Path(tiltsam.__file__).parent
REPOSITORY = ROOT.parent.parent
NEED_TRITON = {"tiltsam.fused.kernels"} if importlib.util.find_spec("triton") is None else set()
MODULES = sorted(
    m.name
    for m in pkgutil.walk_packages([str(ROOT)], "tiltsam.")
    if not m.name.endswith("__main__") and m.name not in NEED_TRITON
)

# A package imports from the layers above it in this list, never from its own or from those below. The library (up to
# "tiltsam", its __init__) does not import the lab.
LAYERS = (
    {"distributed"},
    {"space"},
    {"tilting", "schedules"},
    {"fused", "samplers", "flatness"},
    {"optim", "toys", "sharpness", "curvature", "landscape"},
    {"graphs", "integrations"},
    {"tiltsam"},
    {"lab"},
    {"cli"},
    {"__main__"},
)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imported_modules(path: Path) -> set[str]:
    """Return the modules of tiltsam that a file imports anywhere, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {path}"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in FILES else str(node.module))
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name == "tiltsam" or name.startswith("tiltsam.")}


@functools.cache
def imports() -> dict[str, set[str]]:
    """Return the modules of tiltsam that each of them imports."""
    return {name: imported_modules(path) - {name} for name, path in FILES.items()}


def package(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def test_imports_follow_layers_without_cycles():
    layer = {name: i for i, names in enumerate(LAYERS) for name in names}
    assert {package(module) for module in FILES} == set(layer)
    for module, imported in imports().items():
        for other in imported:
            same = package(module) == package(other)
            assert same or layer[package(other)] < layer[package(module)], f"{module} imports {other}"
    graphlib.TopologicalSorter(imports()).prepare()  # raises CycleError


def test_imported_modules_exist():
    for module, imported in imports().items():
        assert imported <= set(FILES), module


def test_samplers_import_only_the_protocol_of_the_space():
    outside = {
        m for module in FILES if package(module) == "samplers" for m in imports()[module] if package(m) != "samplers"
    }
    assert outside == {"tiltsam.space.protocol", "tiltsam.space.validation"}


def test_nothing_imports_the_integrations():
    """They are optional."""
    outside = [module for module in FILES if package(module) != "integrations"]
    assert not [m for module in outside for m in imports()[module] if package(m) == "integrations"]


def test_class_names_are_unique():
    """One name, one meaning: a class name occurs once in the package."""
    places: dict[str, list[str]] = {}
    for module, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def test_exported_names_of_modules_are_modules():
    """Otherwise ``import tiltsam.x`` and ``tiltsam.x`` differ."""
    assert all(inspect.ismodule(getattr(tiltsam, name)) for name in tiltsam.__all__ if f"tiltsam.{name}" in FILES)


def test_top_level_stays_small():
    entries = [path for path in ROOT.iterdir() if path.name not in ("py.typed", "__pycache__")]
    assert len(entries) <= 18, sorted(path.name for path in entries)


def test_import_needs_only_torch():
    """Importing tiltsam imports nothing but torch and the standard library."""
    code = (
        "import sys, torch; before = set(sys.modules); import tiltsam; "
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(ast.literal_eval(run.stdout)) <= {"tiltsam", "torch"}


@pytest.mark.parametrize("version", ["2.8.0", "2.10.1+cu130", "2.9.0a0+git1234567", "1.13.1"])
def test_import_refuses_old_torch(version):
    with pytest.raises(ImportError, match=rf"2\.11.*{re.escape(version)}"):
        tiltsam._check_torch(version)


def test_import_checks_the_version_of_torch():
    version = "2.10.1+cu130"
    code = f"import torch; torch.__version__ = {version!r}; import tiltsam.optim"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1
    assert f"ImportError: tiltsam needs torch>=2.11, found torch {version}, where FSDP2 gives wrong" in run.stderr


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0+cu130", "2.12.0a0+git", "2.15.0.dev20260101", "3.0", "unknown"])
def test_import_accepts_new_torch(version):
    tiltsam._check_torch(version)


def test_torch_floor_matches_pyproject_and_ci():
    floor = ".".join(map(str, tiltsam._TORCH_FLOOR))
    assert f'dependencies = ["torch>={floor}"]' in (REPOSITORY / "pyproject.toml").read_text()
    assert f'torch: "{floor}"' in (REPOSITORY / ".github" / "workflows" / "ci.yml").read_text()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_tests_the_floor_and_the_newest_torch():
    floor = ".".join(map(str, tiltsam._TORCH_FLOOR))
    run = subprocess.run(
        ["make", "-n", "--no-print-directory", "test-range", "VENV=elsewhere"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"echo 'torch=={floor}.*' >> .venv-torch{floor}/constraints.txt" in run.stdout
    assert re.findall(r"^(\S+)/bin/python -m pytest", run.stdout, re.M) == [f".venv-torch{floor}", ".venv-torchnewest"]


@contextmanager
def skip_without_package():
    """Skip a test if a package is missing that only an extra installs, as on a machine with a GPU and little else."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "tiltsam":
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("name", MODULES)
def test_public_names_are_documented(name):
    with skip_without_package():
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
def test_doctests_run(name):
    with skip_without_package():
        module = importlib.import_module(name)
    results = doctest.testmod(module, extraglobs={"torch": __import__("torch"), "tiltsam": tiltsam})
    assert results.failed == 0


# What torchrun sets for a single process; port 0 is any free one.
ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def python_blocks(path: Path) -> list[str]:
    return [block.split("```")[0] for block in path.read_text().split("```python\n")[1:]]


@pytest.mark.parametrize("path", sorted(REPOSITORY.glob("*.md")) + sorted((REPOSITORY / "docs").rglob("*.md")), ids=str)
def test_python_in_pages_runs(path, tmp_path, monkeypatch):
    """Run the ```python blocks of a page in order, in one namespace; process groups have one rank."""
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks(path)
    if any("init_process_group" in block for block in blocks):
        if not dist.is_available():
            pytest.skip("torch was built without torch.distributed")
        for name, value in ONE_RANK.items():
            monkeypatch.setenv(name, value)
    namespace: dict[str, object] = {}
    try:
        for number, code in enumerate(blocks):
            with skip_without_package():
                exec(compile(code, f"{path.name} block {number}", "exec"), namespace)
    finally:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def run_without_gpu(code):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    exec(code, {"__name__": "__main__"})


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
def test_ddp_script_of_the_page_runs_on_two_ranks(tmp_path):
    script, log = python_blocks(REPOSITORY / "docs" / "distributed.md")[0], tmp_path / "log"
    for process in start_on_ranks(2, run_without_gpu, script, output=log):
        process.join(300)
        assert process.exitcode == 0, log.read_text()
    losses = [float(value) for value in re.findall(r"loss (\d+\.\d+)", log.read_text())]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 2


# Modules that users import: all their public names are in the reference.
PUBLIC = [
    *("tiltsam", "tiltsam.curvature", "tiltsam.graphs", "tiltsam.landscape", "tiltsam.optim"),
    *("tiltsam.samplers", "tiltsam.schedules", "tiltsam.sharpness", "tiltsam.space", "tiltsam.tilting"),
    *("tiltsam.toys", "tiltsam.toys.chain_space", "tiltsam.lab.theory.estimators", "tiltsam.lab.theory.statements"),
    *("tiltsam.integrations.accelerate", "tiltsam.integrations.lightning", "tiltsam.integrations.transformers"),
    *("tiltsam.lab.compare", "tiltsam.lab.scaling", "tiltsam.lab.report", "tiltsam.lab.sweep", "tiltsam.lab.train"),
]


@pytest.fixture(scope="module")
def reference():
    """Return what the pages of docs/api show: modules, and the members listed for them."""
    shown = []
    for path in sorted((REPOSITORY / "docs" / "api").glob("*.md")):
        for name, members in re.findall(r"^::: (\S+)\n    options:\n      members: \[(.*)\]$", path.read_text(), re.M):
            with skip_without_package():
                module = importlib.import_module(name)
            shown += [module, *(getattr(module, member) for member in members.split(", "))]
    return shown


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_in_the_reference(name, reference):
    module = importlib.import_module(name)
    missing = [public for public in module.__all__ if not any(getattr(module, public) is thing for thing in reference)]
    assert not missing, f"docs/api lacks {missing} of {name}"


def documented_fields(cls) -> set[str]:
    """Return the fields of a class and its bases with a docstring, or named in that of the class."""
    found = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("tiltsam"):
            continue
        doc = base.__doc__ or ""
        found |= {word for named in re.findall(r"^ +\w+: |``.*?``", doc, re.M) for word in re.findall(r"\w+", named)}
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        for node, following in pairwise(body):
            if isinstance(node, ast.AnnAssign) and isinstance(following, ast.Expr):
                found.add(node.target.id)
    return found


def test_fields_of_classes_in_the_reference_are_documented(reference):
    """The reference shows only fields with a docstring."""
    missing = {}
    for thing in reference:
        if inspect.isclass(thing) and not thing.__module__.startswith("tiltsam.lab"):
            fields = {field for field in vars(thing).get("__annotations__", {}) if not field.startswith("_")}
            if not fields <= documented_fields(thing):
                missing[thing.__qualname__] = fields - documented_fields(thing)
    assert missing == {}


def test_readme_shows_install_demo_and_test():
    lines = (REPOSITORY / "README.md").read_text().splitlines()
    first = {
        text: next(i for i, line in enumerate(lines) if text in line)
        for text in ("pip install", "make demo", "make test")
    }
    assert max(first.values()) < 25
    assert f"## [{tiltsam.__version__}]" in (REPOSITORY / "CHANGELOG.md").read_text()
    assert f"version: {tiltsam.__version__}\n" in (REPOSITORY / "CITATION.cff").read_text()


def test_install_hints_work_from_a_clone():
    """tiltsam is not on a package index, and zsh expands unquoted brackets."""
    texts = [path for folder in ("src", "docs", "examples") for path in (REPOSITORY / folder).rglob("*")]
    for path in [REPOSITORY / "README.md", *texts]:
        if path.suffix in (".py", ".md"):
            assert not re.findall(r"pip install \S*tiltsam\S*|pip install \.\[\S*", path.read_text()), path
