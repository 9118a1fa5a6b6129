"""Attention as it is described to those who may compute it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...runtime.operands import Operand, operand

Again = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""What does a call again with another q, k, v and result, of the same shapes, strides and types; where those begin at a multiple of
16 bytes, so do these."""


class Attention(NamedTuple):
    backend: str
    """The fastest that may compute it."""
    q: Operand
    """[T, Hq, D]."""
    k: Operand
    """[rows, Hkv, D], as is v: the rows of q, or those of a cache."""
    v: Operand
    seqs: int
    page: int = 0
    """Rows of a page of the cache; 0: packed sequences."""
    pages: int = 0
    """That a sequence may have at most."""

    @staticmethod
    def of(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *sizes: int) -> Attention:
        return Attention(backend, *(operand(t) for t in (q, k, v)), *sizes)  # pyright: ignore[reportArgumentType]
