"""Which class the workers of an aligned engine are of: alignkit's, or one that adds methods to it."""

from __future__ import annotations

import functools
import pkgutil
from typing import TYPE_CHECKING

from alignkit.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WORKER = "alignkit.vllm.worker.AlignedWorker"
MADE = "alignkit"
"""Of an aligned engine's additional_config: by which contract."""


def worker_class(asked: str, stock: str) -> str:
    """The worker class of an engine that asked for `asked`, as vLLM names it (``module.Class``, or "auto"). stock: vLLM's own.

    Raises UnsupportedError for one that could leave parts of it stock, or that cannot be imported."""
    if asked in ("auto", stock, WORKER):
        return WORKER
    if problem := _why_not(asked):
        raise UnsupportedError(f"worker_cls {asked}: {problem}")
    return asked


def is_aligned(vllm_config: VllmConfig) -> bool:
    """Whether this configuration of an engine was made while vLLM was patched."""
    worker, more = vllm_config.parallel_config.worker_cls, vllm_config.additional_config
    return isinstance(more, dict) and MADE in more and (worker == WORKER or _why_not(worker) is None)


@functools.cache
def _why_not(name: str) -> str | None:
    """Why a class may not be the worker. One that adds methods to alignkit's may; one that has others in their place could leave
    out what keeps the engine aligned."""
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as e:
        return f"it cannot be imported ({e})"
    from alignkit.vllm.worker import AlignedWorker

    if not (isinstance(found, type) and issubclass(found, AlignedWorker)):
        return f"it does not derive from {WORKER} (or give its methods by worker_extension_cls)"
    at = found.__mro__.index(AlignedWorker)
    if found.__mro__[at:] != AlignedWorker.__mro__:
        return f"bases of its own do not all stand before {WORKER}"
    added = {key for owner in found.__mro__[:at] for key in vars(owner)} - {"__init__"}
    taken = sorted(
        key for key in added if callable(had := getattr(AlignedWorker, key, None)) or isinstance(had, property)
    )
    return f"it overrides {', '.join(taken)}" if taken else None
