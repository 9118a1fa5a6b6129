"""Triton: a program per block of rows; sums by the balanced tree over the hidden dimension."""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._triton import EXACT, next_power_of_2, tree_sum

DW_ROWS = 32
"""Rows of one chain of dweight; the chains are added in row order. In the contract."""


@triton.jit
def _forward(X, W, Y, RSTD, rows, sx, eps, H: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
             R: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    j = tl.arange(0, BLOCK)
    ok = (r < rows)[:, None] & (j < H)[None, :]
    x = tl.load(X + r[:, None] * sx + j[None, :], mask=ok, other=0.0).to(tl.float32)
    w = tl.load(W + j, mask=j < H, other=0.0).to(tl.float32)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tree_sum(x * x, LEVELS), H * 1.0) + eps))
    tl.store(Y + r[:, None] * H + j[None, :], (x * rstd[:, None] * w[None, :]).to(Y.dtype.element_ty), mask=ok)
    tl.store(RSTD + r, rstd, mask=r < rows)


@triton.jit
def _backward(DY, X, W, RSTD, DX, PART, rows, H: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
              ROWS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    w = tl.load(W + j, mask=j < H, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    for i in range(ROWS):
        r = block * ROWS + i
        ok = (j < H) & (r < rows)
        x = tl.load(X + r * H + j, mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(DY + r * H + j, mask=ok, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + r, mask=r < rows, other=0.0)
        g = dy * w
        c = tl.div_rn(tl.sum(tree_sum((g * x)[None, :], LEVELS), 0), H * 1.0) * rstd * rstd
        tl.store(DX + r * H + j, (rstd * tl.fma(-c + x * 0.0, x, g)).to(DX.dtype.element_ty), mask=ok)
        dw = tl.fma(dy, x * rstd, dw)
    tl.store(PART + block * H + j, dw, mask=j < H)


@triton.jit
def _join(PART, DW, blocks, H: tl.constexpr, BLOCK: tl.constexpr):
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros((BLOCK,), tl.float32)
    for b in range(blocks):
        dw += tl.load(PART + b.to(tl.int64) * H + j, mask=j < H, other=0.0)
    tl.store(DW + j, dw, mask=j < H)


def forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    rows, h = x.shape
    y = torch.empty(rows, h, dtype=x.dtype, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = next_power_of_2(h)
        r = max(1, 1024 // block)
        warps = max(1, min(16, block * r // 1024))
        _forward[(triton.cdiv(rows, r),)](x, weight, y, rstd, rows, x.stride(0), eps, H=h, BLOCK=block,
                                          LEVELS=block.bit_length() - 1, R=r, num_warps=warps, **EXACT)
    return y, rstd


def backward(dy, x, weight, rstd) -> tuple[torch.Tensor, torch.Tensor]:
    rows, h = x.shape
    dx, dw = torch.empty_like(x), torch.zeros(h, dtype=torch.float32, device=x.device)
    if rows:
        block, blocks = next_power_of_2(h), triton.cdiv(rows, DW_ROWS)
        part = torch.empty(blocks, h, dtype=torch.float32, device=x.device)
        _backward[(blocks,)](dy, x, weight, rstd, dx, part, rows, H=h, BLOCK=block,
                             LEVELS=block.bit_length() - 1, ROWS=DW_ROWS,
                             num_warps=max(1, min(16, block // 512)), **EXACT)
        _join[(triton.cdiv(h, 128),)](part, dw, blocks, H=h, BLOCK=128, num_warps=4, **EXACT)
    return dx, dw
