"""Sizes of the blocks of rows and columns in which logits are computed; they affect speed and memory alone.

The one block size that is contract, `Family.head_rows`, is in alignkit/runtime/families.py. source.py applies the
sizes. Tests replace WORKSPACE, PART_ROWS and EVEN to obtain several blocks.
"""

from __future__ import annotations

import torch

from ...contract import VOCAB_TILE
from ...runtime.families import CPU, GPU_FAMILIES, SM90

WORKSPACE = {CPU: 1 << 23} | dict.fromkeys(GPU_FAMILIES, SM90.sm_count << 20)
"""schedule: default limit, in bytes, of the logits alive at a time and of their gradients, by device family."""
PART_ROWS = {CPU: None} | dict.fromkeys(GPU_FAMILIES, 4096)
"""schedule: rows of logits computed at a time, so that they are still cached when they are read."""
EVEN = SM90.sm_count // 2 * VOCAB_TILE
"""schedule: a multiple of 256 ids that fills all SMs evenly; block widths are multiples of EVEN if possible."""


def cuts(start: int, stop: int, step: int | None, border: int = 0) -> list[slice]:
    """Split [start, stop) wherever the distance to `border` is a multiple of `step`; not at all if `step` is None."""
    inner = () if step is None else range(start + step - (start - border) % step, stop, step)
    return [slice(a, b) for a, b in zip((start, *inner), (*inner, stop), strict=True) if a < b]


def cpu_rows(columns: int, workspace: int) -> int:
    """Return the rows of logits that fit in `workspace` bytes on the CPU, a multiple of 16."""
    return max(1, workspace // (64 * columns)) * 16


def even(columns: int) -> int:
    """Round `columns` down to a multiple of `EVEN`, or else of 256; at least 256."""
    return columns // EVEN * EVEN or max(columns // 256, 1) * 256


def part_of(values: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    """Return values[rows], or None for None."""
    return None if values is None else values[rows]
