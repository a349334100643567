"""Print every public name of the library with its signature; ``public_api.txt`` holds what is promised.

python tests/golden/public_api.py > tests/golden/public_api.txt
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator

MODULES = (
    "tiltsam",
    "tiltsam.tilting",
    "tiltsam.schedules",
    "tiltsam.samplers",
    "tiltsam.sharpness",
    "tiltsam.curvature",
    "tiltsam.landscape",
    "tiltsam.integrations.accelerate",
    "tiltsam.integrations.lightning",
    "tiltsam.integrations.transformers",
)


def lines() -> Iterator[str]:
    """Each public name on a line, members of a class below it."""
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in sorted(getattr(module, "__all__", ())):
            thing = getattr(module, name)
            if inspect.isclass(thing):
                yield f"{module_name}.{name}{_signature(thing)}"
                yield from _members(f"{module_name}.{name}", thing)
            elif inspect.isfunction(thing):
                yield f"{module_name}.{name}{_signature(thing)}"
            else:
                yield f"{module_name}.{name}: {type(thing).__name__}"


def _members(prefix: str, cls: type) -> Iterator[str]:
    for name in sorted(vars(cls)):
        if name.startswith("_"):
            continue
        member = inspect.getattr_static(cls, name)
        if name == "step" and member.__qualname__ != f"{cls.__name__}.step":
            continue  # torch adds a wrapped copy of the inherited one once there is an instance
        if ":meta private:" in (inspect.getdoc(member) or ""):
            continue
        if isinstance(member, staticmethod | classmethod):
            member = member.__func__
        yield f"    {prefix}.{name}{_signature(member) if inspect.isfunction(member) else ''}"


def _signature(thing: object) -> str:
    try:
        text = str(inspect.signature(thing))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


if __name__ == "__main__":
    print("\n".join(lines()))
