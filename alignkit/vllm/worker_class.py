"""Selection of the worker class of an aligned engine: alignkit's, or a subclass that only adds methods to it.

Both constants are part of an aligned engine's configuration, which other processes of the engine read.
"""

from __future__ import annotations

import functools
import pkgutil
from typing import TYPE_CHECKING

from alignkit.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WORKER = "alignkit.vllm.worker.AlignedWorker"
"""Name of alignkit's worker class."""
CONTRACT_KEY = "alignkit"
"""Key of the contract id in an aligned engine's additional_config."""


def worker_class(asked: str, stock: str) -> str:
    """Return the name of the worker class for an engine.

    Args:
        asked: The configured worker class, ``module.Class`` or "auto".
        stock: The name of vLLM's own worker class.

    Raises:
        UnsupportedError: If `asked` cannot be imported, or could leave parts of the engine stock.
    """
    if asked in ("auto", stock, WORKER):
        return WORKER
    if problem := _why_not(asked):
        raise UnsupportedError(f"worker_cls {asked}: {problem}")
    return asked


def is_aligned(vllm_config: VllmConfig) -> bool:
    """Return whether an engine's configuration was created while vLLM was patched."""
    worker, settings = vllm_config.parallel_config.worker_cls, vllm_config.additional_config
    return isinstance(settings, dict) and CONTRACT_KEY in settings and (worker == WORKER or _why_not(worker) is None)


@functools.cache
def _why_not(name: str) -> str | None:
    """Return the reason why a class may not be the worker, or None.

    A subclass that adds methods to alignkit's worker is allowed. One that overrides methods could skip the alignment.
    """
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as e:
        return f"cannot be imported ({e})"
    from alignkit.vllm.worker import AlignedWorker

    if not (isinstance(found, type) and issubclass(found, AlignedWorker)):
        return f"must derive from {WORKER}. Pass a class that only adds methods as worker_extension_cls"
    position = found.__mro__.index(AlignedWorker)
    if found.__mro__[position:] != AlignedWorker.__mro__:
        return f"its other base classes must precede {WORKER} in the MRO"
    added = {key for owner in found.__mro__[:position] for key in vars(owner)} - {"__init__"}
    overridden = sorted(
        key
        for key in added
        if callable(inherited := getattr(AlignedWorker, key, None)) or isinstance(inherited, property)
    )
    return f"must not override {', '.join(overridden)}" if overridden else None
