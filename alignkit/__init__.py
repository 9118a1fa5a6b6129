"""alignkit: identical logprob bits from vLLM and Megatron-core for identical weights and tokens.

`patch_vllm()` and `patch_megatron()` make both engines compute with the ops of `alignkit.ops`. `alignkit.drift` and
the command `alignkit check` verify that the logprobs agree. `import alignkit` imports neither engine. Submodules such
as `alignkit.drift` are imported on first use. Public: documented in docs/api/alignkit.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    import os
    from collections.abc import Awaitable

    from .engines.patch import Patch
    from .identity import Fingerprint

from .errors import AlignkitError, BackendError, DriftError, InputError, UnsupportedError
from .runtime import prover
from .runtime.ids import contract_id

__version__ = "0.2.0"
"""Version of the package; pyproject.toml reads it here. docs/stability.md states what a new version may change."""

_SUBMODULES = ("bisect", "dist", "drift", "identity", "integrations", "megatron", "ops", "testing", "vllm")
"""Submodules that `__getattr__` imports on first use."""


def patch_vllm() -> Patch:
    """Align vLLM in this process and in the workers that it starts. See `alignkit.vllm.patch_vllm`."""
    from .vllm import patch_vllm

    return patch_vllm()


def patch_megatron(vocab_size: int | None = None, *, keep_logits: bool = False) -> Patch:
    """Align Megatron-core in this process. See `alignkit.megatron.patch_megatron`."""
    from .megatron import patch_megatron

    return patch_megatron(vocab_size, keep_logits=keep_logits)


@overload
def fingerprint(model: str | os.PathLike) -> Fingerprint: ...
@overload
def fingerprint(model: Any, model_dir: str | os.PathLike) -> Fingerprint: ...
@overload
def fingerprint(model: Any) -> Any: ...
def fingerprint(model: Any, model_dir: str | os.PathLike | None = None) -> Fingerprint | Awaitable[Fingerprint]:
    """Return the fingerprint of a model's weights, which does not depend on the engine or the layout.

    Args:
        model: An HF directory; an aligned `vllm.LLM`, `LLMEngine` or `AsyncLLM`, whose result must be awaited; or this
            rank's Megatron model or list of model chunks, unwrapped. With Megatron this is a collective of all
            processes.
        model_dir: HF directory whose config.json describes the Megatron model.

    Returns:
        The fingerprint. Two models have equal weights if ``a == b``; ``a.difference(b)`` names the first difference.

    Raises:
        InputError: replicas of a weight differ, ranks do not hold the whole model, or `model_dir` is missing.
        UnsupportedError: a stock vLLM engine, or weights of no supported architecture.
    """
    if isinstance(model, str) or hasattr(model, "__fspath__"):
        from .identity import of_checkpoint

        return of_checkpoint(model)
    if hasattr(model, "collective_rpc"):
        from .vllm.fingerprint import fingerprint as of_engine

        return of_engine(model)
    if model_dir is None:
        raise InputError("model_dir: must be the HF directory that describes a Megatron model, got None")
    from .megatron.fingerprint import fingerprint as of_megatron

    return of_megatron(model, model_dir)


def _prove(device, backend: str) -> str | None:
    from .ops import golden

    return golden.difference(device, backend)


prover.register(_prove)


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBMODULES, "__version__"})


__all__ = [
    "AlignkitError",
    "BackendError",
    "DriftError",
    "InputError",
    "UnsupportedError",
    "contract_id",
    "fingerprint",
    "patch_megatron",
    "patch_vllm",
]
