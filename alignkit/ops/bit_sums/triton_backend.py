"""Triton bit_sums. Integer sums have the same bits in any order, so tile sizes are free."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...runtime.launch import launch

ROWS, COLUMNS = 8, 256
"""schedule: rows and columns of a tile. A tile of several rows reads the weights once."""


@triton.jit
def _bit_sums(X, W, OUT, rows, n, sx, MASK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLUMNS), tl.int64)
    for first in range(0, n, COLUMNS):
        j = first + tl.arange(0, COLUMNS)
        ok = (r < rows)[:, None] & (j < n)[None, :]
        x = tl.load(X + r[:, None] * sx + j[None, :], mask=ok, other=0).to(tl.int64) & MASK
        total += x * tl.load(W + j, mask=j < n, other=0)[None, :]
    tl.store(OUT + r, tl.sum(total, axis=1), mask=r < rows)


def sums(bits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(bits.shape[0], dtype=torch.int64, device=bits.device)
    if bits.numel():
        rows, n = bits.shape
        launch(
            _bit_sums,
            (triton.cdiv(rows, ROWS),),
            (bits, weights, out, rows, n, bits.stride(0)),
            {"num_warps": 4},
            MASK=(1 << 8 * bits.element_size()) - 1,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
        )
    return out
