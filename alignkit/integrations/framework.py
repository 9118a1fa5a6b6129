"""Base class of the framework patches: hooks on imports of the framework's modules, and patches of the engines.

The frameworks themselves are in `verl` and `nemo_rl`; `engines.patch` is the base class of the engine patches.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from alignkit.engines import patch as engine_patch
from alignkit.integrations.importing import WhenImported


def require_engines() -> None:
    """Require, in a process that starts workers, that alignkit fits the vLLM and the Megatron-core beside it.

    Raises:
        UnsupportedError: an engine lacks names that alignkit relies on, as versions that are too old do.
    """
    from alignkit.megatron.versions import VERSIONS as MEGATRON
    from alignkit.vllm.versions import VERSIONS as VLLM

    for versions in (VLLM, MEGATRON):
        versions.require_names()


class Framework(engine_patch.Patch):
    """Handle of the patch of a framework and its engines in this process; `undo` restores both."""

    def begin(self, calls: dict[str, Callable[[ModuleType], None]]) -> None:
        """Register functions to call when modules are imported. calls: name of a module -> function of the module."""
        self._engines: list[engine_patch.Patch] = []
        self._import_hooks = WhenImported(calls)
        self._import_hooks.begin()

    def align(self, engine: type[engine_patch.Patch], patch: Callable[[], engine_patch.Patch]) -> None:
        """Patch an engine by `patch`. `undo` restores it, unless the engine was patched before."""
        fresh = engine.live() is None
        handle = patch()
        if fresh:
            self._engines.append(handle)

    def restored(self) -> None:
        if "_import_hooks" in vars(self):
            self._import_hooks.end()
            for handle in self._engines:
                handle.undo()
