"""Operand descriptors: the tensor properties that kernel selection and schedules depend on.

They hold shape, strides, dtype and alignment, without values and addresses.
"""

from __future__ import annotations

import torch

MAX_CACHED = 16384
"""schedule: maximum number of cached launches; a server keeps producing new row counts."""

Operand = tuple[torch.Size, tuple[int, ...], torch.dtype, bool]
"""Shape, strides, dtype, and whether the address is a multiple of 16 bytes."""


def operand(t: torch.Tensor | None) -> Operand | None:
    """Return the descriptor of a tensor, or None for None."""
    return None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() % 16 == 0)


def tma_compatible(t: Operand) -> bool:
    """Return whether TMA can load a matrix: contiguous rows that do not overlap, 16-byte aligned."""
    (_, columns), (row, column), dtype, aligned = t
    return aligned and column == 1 and row >= columns and row * dtype.itemsize % 16 == 0
