"""Triton: elementwise. The table comes from the host, where it is computed in double, on every device."""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._triton import EXACT, next_power_of_2


@triton.jit
def _rope(X, POS, TABLE, Y, tokens, sxt, sxh, H: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
          HEADS: tl.constexpr, INVERSE: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HEADS)[:, None]
    j = tl.arange(0, BLOCK)[None, :]
    ok = (h < H) & (j < HALF)
    row = TABLE + tl.load(POS + t) * (2 * HALF)
    cos = tl.load(row + j + h * 0, mask=ok, other=0.0)
    sin = tl.load(row + HALF + j + h * 0, mask=ok, other=0.0)
    if INVERSE:
        sin = -sin
    x = X + t * sxt + h * sxh + j
    a, b = tl.load(x, mask=ok, other=0.0).to(tl.float32), tl.load(x + HALF, mask=ok, other=0.0).to(tl.float32)
    y = Y + (t * H + h) * (2 * HALF) + j
    tl.store(y, tl.fma(a, cos, -(b * sin)).to(Y.dtype.element_ty), mask=ok)
    tl.store(y + HALF, tl.fma(b, cos, a * sin).to(Y.dtype.element_ty), mask=ok)


def apply(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, inverse: bool) -> torch.Tensor:
    tokens, heads, dim = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens:
        _rope[(tokens,)](x, positions, table, y, tokens, x.stride(0), x.stride(1), H=heads, HALF=dim // 2,
                         BLOCK=next_power_of_2(dim // 2), HEADS=next_power_of_2(heads), INVERSE=inverse, num_warps=4, **EXACT)
    return y
