"""Modules that are imported late."""

import importlib
from typing import Any


class Lazy:
    """A module that is imported when one of its attributes is read: the trainers take seconds to import."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks for marks of fixtures
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
