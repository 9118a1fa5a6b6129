"""Megatron-core adapter: `patch_megatron`, `set_vocab_size`, `status`, `logprobs` and `output_processor`.

Importing this package does not import Megatron; calling one of its functions does. Public: names and
signatures are documented in docs/api/megatron.md.
"""

from __future__ import annotations

import importlib

from alignkit.errors import UnsupportedError

_MODULES = {
    "patch_megatron": "patch",
    "set_vocab_size": "patch",
    "status": "patch",
    "Patch": "patch",
    "logprobs": "head",
    "output_processor": "head",
    "LogProbs": "head",
    "LogProbsRequest": "head",
}
__all__ = list(_MODULES)


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] != "megatron":
            raise
        raise UnsupportedError(f"{name}: Megatron-core is not installed ({e}). Install megatron-core") from None
