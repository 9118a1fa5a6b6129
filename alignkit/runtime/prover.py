"""The function that proves the contract's bits on a device, which `validated` calls, and the kernels that failed it.

The ops compute the golden bits and lie above this folder. The package's `__init__` therefore registers the function.
This file imports no torch, because `import alignkit` must not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Prover = Callable[["torch.device", str], "str | None"]
"""Function of a device and its backend that computes the golden bits there and returns the first mismatch, or None."""
_prover: Prover | None = None
_passed_over: dict[tuple[str, str, str], str] = {}
"""Operation, kernel and backend -> why the kernel is not used in this process."""


def register(prover: Prover) -> None:
    """Register the function that computes the golden bits."""
    global _prover
    _prover = prover


def first_mismatch(device: torch.device, backend: str) -> str | None:
    """Compute the golden bits on `device`; return the first mismatch, or None."""
    assert _prover is not None, "alignkit/__init__.py registers the prover"
    return _prover(device, backend)


def pass_over(op: str, kernel: str, backend: str, why: str) -> None:
    """Exclude a kernel from the selection in this process, with a warning."""
    _passed_over[op, kernel, backend] = why
    warnings.warn(
        f"{op}: the kernel {kernel!r} of the backend {backend!r} failed the self-test and is not used in this process, "
        f"the next one of `alignkit explain {op}` replaces it: {why}"
    )


def is_passed_over(op: str, kernel: str, backend: str) -> bool:
    return (op, kernel, backend) in _passed_over


def passed_over() -> list[str]:
    """Return the kernels that are not used in this process, in words."""
    return [f"{kernel} ({backend}) of {op}: {why}" for (op, kernel, backend), why in _passed_over.items()]
