"""What a kernel's choice and its schedule depend on, of a tensor: all but its values and its address."""

from __future__ import annotations

import torch

MOST = 16384
"""How many schedules are kept: a server meets ever new numbers of rows."""

Operand = tuple[torch.Size, tuple[int, ...], torch.dtype, bool]
"""Shape, strides, type, and whether its address is a multiple of 16 bytes."""


def operand(t: torch.Tensor | None) -> Operand | None:
    return None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() % 16 == 0)


def copied(t: Operand) -> bool:
    """Whether the device's copy engine takes it: rows contiguous, not overlapping, and 16-byte aligned."""
    (_, columns), (row, column), dtype, aligned = t
    return aligned and column == 1 and row >= columns and row * dtype.itemsize % 16 == 0
