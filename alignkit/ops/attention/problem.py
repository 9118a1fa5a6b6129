"""Description of an attention problem, the input of kernel selection.

The rules in cuda_backend.py read the fields; alignkit/explain.py fills them from words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...runtime.operands import Operand, operand

Relaunch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""A function that repeats a paged call with another q, k, v and out.

Shapes, strides and dtypes must be those of the first call; tensors that were 16-byte aligned must be so again.
"""


class Attention(NamedTuple):
    """An attention problem: backend, operands and sizes."""

    backend: str
    """The fastest eligible backend."""
    q: Operand
    """[T, Hq, D]."""
    k: Operand
    """[rows, Hkv, D], like v; rows: T for packed sequences, else those of the cache."""
    v: Operand
    seqs: int
    page: int = 0
    """Rows per page of the cache; 0: packed sequences."""
    pages: int = 0
    """The largest number of pages of a sequence."""

    @staticmethod
    def of(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *sizes: int) -> Attention:
        """Describe a problem by its tensors; `sizes`: seqs, page and pages."""
        return Attention(backend, *(operand(t) for t in (q, k, v)), *sizes)  # pyright: ignore[reportArgumentType]
