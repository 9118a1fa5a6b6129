"""Description of an RMSNorm problem, the input of kernel selection.

The rules in cuda_backend.py read the fields; alignkit/explain.py fills them from words.
"""

from __future__ import annotations

from typing import NamedTuple

from ...runtime.operands import Operand


class Norm(NamedTuple):
    """An RMSNorm problem: backend and operands."""

    backend: str
    """The fastest eligible backend."""
    tensors: tuple[Operand, ...]
    """x, then the other bf16 or fp32 inputs: forward the weight; backward dy, the weight and d_total if not None."""
