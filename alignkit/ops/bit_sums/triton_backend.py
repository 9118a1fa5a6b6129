"""Triton bit_sums. Integer sums have the same bits in any order, so tile sizes are free."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...runtime.launch import launch

ROWS, COLUMNS = 8, 512
"""schedule: rows and columns of a tile. A tile of several rows reads the weights once."""
ALIGNMENT = 16
"""hardware: bytes of a vector load."""


@triton.jit
def _bit_sums(
    ADDRESSES, W, OUT, rows, n, sx, TYPE: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    tensor = tl.program_id(1).to(tl.int64)
    x_ptr = tl.load(ADDRESSES + tensor).to(tl.pointer_type(TYPE))
    if ALIGNED:
        x_ptr = tl.multiple_of(x_ptr, 16)
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # A product of 32 and 64 bits modulo 2^64: of the weight's low half 64 bits, of its high half the low 32 bits.
    low = tl.zeros((ROWS, COLUMNS), tl.uint64)
    high = tl.zeros((ROWS, COLUMNS), tl.uint32)
    for first in range(0, n, COLUMNS):
        j = first + tl.arange(0, COLUMNS)
        ok = (r < rows)[:, None] & (j < n)[None, :]
        x = tl.load(x_ptr + r[:, None] * sx + j[None, :], mask=ok, other=0).to(tl.uint32)
        w = tl.load(W + j, mask=j < n, other=0).to(tl.uint64)
        low += x.to(tl.uint64) * w.to(tl.uint32).to(tl.uint64)[None, :]
        high += x * (w >> 32).to(tl.uint32)[None, :]
    total = tl.sum(low, axis=1) + (tl.sum(high, axis=1).to(tl.uint64) << 32)
    tl.store(OUT + tensor * rows + r, total.to(tl.int64), mask=r < rows)


def addresses(bits: list[torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """Return the addresses of tensors, and whether all of them are aligned for vector loads."""
    found = [x.data_ptr() for x in bits]
    return torch.tensor(found, device=bits[0].device), not any(address % ALIGNMENT for address in found)


def sums(bits: list[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    first = bits[0]
    out = torch.zeros(len(bits), first.shape[0], dtype=torch.int64, device=first.device)
    if first.numel():
        rows, n = first.shape
        pointers, aligned = addresses(bits)
        launch(
            _bit_sums,
            (triton.cdiv(rows, ROWS), len(bits)),
            (pointers, weights, out, rows, n, first.stride(0)),
            {"num_warps": 4},
            TYPE={2: tl.uint16, 4: tl.uint32}[first.element_size()],
            ALIGNED=aligned,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
        )
    return out
