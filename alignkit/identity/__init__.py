"""Identity of a model's weights: a fingerprint that does not depend on layout or engine.

`weights` computes and compares fingerprints; `alignkit.megatron.fingerprint` and `alignkit.vllm.fingerprint` say which
rows and columns of the HF tensors a rank holds. `sync` verifies weight syncs. `identity` names an engine's kernels and
weights. docs/identity.md.
Public: the names in `__all__`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .identity import Identity

if TYPE_CHECKING:
    from .weights import Fingerprint, of_checkpoint

__all__ = ["Fingerprint", "Identity", "of_checkpoint"]


def __getattr__(name: str) -> Any:
    """Import `weights`, and with it the ops, on first use: `alignkit.drift` needs `Identity` alone."""
    if name in __all__:
        from . import weights

        return getattr(weights, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
