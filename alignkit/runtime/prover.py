"""Registration of the function that proves the contract's bits on a device, which `validated` calls.

The ops compute the golden bits and lie above this folder. The package's `__init__` therefore registers the function.
This file imports no torch, because `import alignkit` must not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Prover = Callable[["torch.device", str], "str | None"]
"""Function of a device and its backend that computes the golden bits there and returns the first mismatch, or None."""
_prover: Prover | None = None


def register(prover: Prover) -> None:
    """Register the function that computes the golden bits."""
    global _prover
    _prover = prover


def first_mismatch(device: torch.device, backend: str) -> str | None:
    """Compute the golden bits on `device`; return the first mismatch, or None."""
    assert _prover is not None, "alignkit/__init__.py registers the prover"
    return _prover(device, backend)
