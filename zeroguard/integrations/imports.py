"""Be told when a module has been imported, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["ImportHook"]


class ImportHook(MetaPathFinder):
    """Calls ``then`` with a module as soon as it has been imported, before its importer gets it."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name = name
        self._then = then

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """What the other finders find, with its loader followed."""
        if fullname != self.name:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find is not None and finder is not self else None
            if spec is not None:
                self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: Any) -> None:
        # The loader itself stays what it is: importlib.resources, pkgutil and inspect ask the module for it.
        original = getattr(loader, "exec_module", None)
        if original is None:
            return  # a namespace package, or a loader of old: nothing that could be DeepSpeed

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            original(module)
            self._then(module)

        vars(loader)["exec_module"] = exec_module
