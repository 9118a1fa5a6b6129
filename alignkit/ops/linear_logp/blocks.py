"""In which blocks of rows and columns logits are taken. No bit depends on it."""

from __future__ import annotations

import torch

from ...contract import VOCAB_TILE
from ...runtime.families import CPU, SM90

WORKSPACE = {CPU: 1 << 23, SM90: SM90.multiprocessors << 20}
"""Bytes of logits alive at a time, and of their gradients, if the caller does not say, by device family; not in the
contract."""
PART_ROWS = {CPU: None, SM90: 4096}
"""Rows of logits computed at a time, so that they are still in the cache when they are read; not in the contract."""
EVEN = SM90.multiprocessors // 2 * VOCAB_TILE
"""So many ids, or a multiple, are shared evenly by the multiprocessors of a GPU; 256 at least."""


def cuts(start: int, stop: int, step: int | None, border: int = 0) -> list[slice]:
    """[start, stop) cut wherever the distance to `border` is a multiple of `step`; whole if that is None."""
    inner = () if step is None else range(start + step - (start - border) % step, stop, step)
    return [slice(a, b) for a, b in zip((start, *inner), (*inner, stop), strict=True) if a < b]


def cpu_rows(columns: int, workspace: int) -> int:
    """Rows of logits on the CPU that stay below the limit: a multiple of 16."""
    return max(1, workspace // (64 * columns)) * 16


def even(columns: int) -> int:
    """At most so many where possible, such that a GPU is well used."""
    return columns // EVEN * EVEN or max(columns // 256, 1) * 256


def part_of(values: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    return None if values is None else values[rows]
