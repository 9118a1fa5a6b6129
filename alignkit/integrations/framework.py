"""What the patches of frameworks are made of: calls as the framework's modules are imported, and engines patched by them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from alignkit.engines import patch as engine_patch
from alignkit.integrations.importing import WhenImported


class Framework(engine_patch.Patch):
    """Handle of what is replaced in a framework, and in engines for it, in this process; `undo` restores it."""

    def begin(self, calls: dict[str, Callable[[ModuleType], None]]) -> None:
        """calls: by the name of a module of the framework."""
        self._engines: list[engine_patch.Patch] = []
        self._later = WhenImported(calls)
        self._later.begin()

    def align(self, engine: type[engine_patch.Patch], patch: Callable[[], engine_patch.Patch]) -> None:
        """Patches an engine by `patch`, which is undone with this one unless the engine was patched before."""
        fresh = engine.live() is None
        handle = patch()
        if fresh:
            self._engines.append(handle)

    def restored(self) -> None:
        if "_later" in vars(self):
            self._later.end()
            for handle in self._engines:
                handle.undo()
