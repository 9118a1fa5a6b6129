"""alignkit: the same weights and the same tokens give the same logprob bits, in vLLM and in Megatron-core.

`patch_vllm()` and `patch_megatron()` put both engines on the ops of `alignkit.ops`; `alignkit.drift` and
`alignkit check` show that they agree. Importing alignkit imports neither engine; what stands below it, such as
`alignkit.drift`, is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engines.patch import Patch

from .contract import contract_id
from .errors import AlignkitError, BackendError, DriftError, InputError, UnsupportedError

__version__ = "0.1.0"


_BELOW = ("drift", "integrations", "megatron", "ops", "testing", "vllm")


def patch_vllm() -> Patch:
    """Align vLLM in this process and in the workers it starts: see `alignkit.vllm.patch_vllm`."""
    from .vllm import patch_vllm

    return patch_vllm()


def patch_megatron(vocab_size: int | None = None, *, keep_logits: bool = False) -> Patch:
    """Align Megatron-core in this process: see `alignkit.megatron.patch_megatron`."""
    from .megatron import patch_megatron

    return patch_megatron(vocab_size, keep_logits=keep_logits)


def __getattr__(name: str) -> Any:
    if name in _BELOW:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_BELOW, "__version__"})


__all__ = [
    "AlignkitError",
    "BackendError",
    "DriftError",
    "InputError",
    "UnsupportedError",
    "contract_id",
    "patch_megatron",
    "patch_vllm",
]
