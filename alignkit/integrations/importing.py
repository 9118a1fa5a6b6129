"""Import hooks: functions that run when a module is imported, in any process and order of imports.

`startup/sitecustomize.py` loads this file by its path in every Python process of a NeMo-RL run, so it imports the
standard library alone.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable
from types import ModuleType


class WhenImported(importlib.abc.MetaPathFinder):
    """A finder that calls a function when a module has been imported, at once if it already is.

    calls: name of a module -> function of the module. The importing statement raises the function's exceptions.
    """

    def __init__(self, calls: dict[str, Callable[[ModuleType], None]]) -> None:
        self._waiting = dict(calls)

    def begin(self) -> None:
        sys.meta_path.insert(0, self)
        for name in list(self._waiting):
            module = sys.modules.get(name)
            if module is not None and not getattr(module.__spec__, "_initializing", False):
                self._waiting.pop(name)(module)

    def end(self) -> None:
        self._waiting.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, fullname, path, target=None):
        if fullname not in self._waiting:
            return None
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                if (call := self._waiting.pop(fullname, None)) is not None:
                    call(module)

            spec.loader.exec_module = exec_module
        return spec
