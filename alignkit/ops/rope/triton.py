"""Triton: elementwise, a row per token and head. On every device the table comes from the host, in double there."""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._triton import EXACT, next_power_of_2


@triton.jit
def _rope(X, POS, TABLE, Y, rows, positions, sxt, sxh, H: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
          R: tl.constexpr, INVERSE: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    j = tl.arange(0, BLOCK)[None, :]
    t = r // H
    ok = (r < rows)[:, None] & (j < HALF)
    p = tl.load(POS + t, mask=r < rows, other=0)
    known = ok & ((p >= 0) & (p < positions))[:, None]  # there is no row for another position: NaN
    row = TABLE + p[:, None] * (2 * HALF) + j
    cos = tl.load(row, mask=known, other=float("nan"))
    sin = tl.load(row + HALF, mask=known, other=float("nan"))
    if INVERSE:
        sin = -sin
    x = X + (t * sxt + (r % H) * sxh)[:, None] + j
    a, b = tl.load(x, mask=ok, other=0.0).to(tl.float32), tl.load(x + HALF, mask=ok, other=0.0).to(tl.float32)
    y = Y + r[:, None] * (2 * HALF) + j
    tl.store(y, tl.fma(a, cos, -(b * sin)).to(Y.dtype.element_ty), mask=ok)
    tl.store(y + HALF, tl.fma(b, cos, a * sin).to(Y.dtype.element_ty), mask=ok)


def apply(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, inverse: bool) -> torch.Tensor:
    tokens, heads, dim = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = tokens * heads
    if rows:
        block = next_power_of_2(dim // 2)
        r = max(1, 1024 // block)
        _rope[(triton.cdiv(rows, r),)](x, positions, table, y, rows, table.shape[0], x.stride(0), x.stride(1), H=heads,
                                       HALF=dim // 2, BLOCK=block, R=r, INVERSE=inverse, num_warps=4, **EXACT)
    return y
