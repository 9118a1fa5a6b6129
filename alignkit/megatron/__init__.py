"""Megatron-core through alignkit's ops: `patch_megatron`, `status`, `logprobs` and `output_processor`.

Importing this package does not import Megatron; calling into it does.
"""
from __future__ import annotations

import importlib

_WHERE = {
    "patch_megatron": "patch",
    "status": "patch",
    "Patch": "patch",
    "logprobs": "head",
    "output_processor": "head",
    "LogProbs": "head",
    "LogProbsRequest": "head",
}
__all__ = list(_WHERE)


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
