"""Triton gated_rms_norm: balanced-tree sums over a row; dweight by chains of rows, summed by the tree.

The order of summation is RMSNorm's (docs/contract.md, "On Hopper GPUs"). The rows per program and num_warps are free.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...runtime.launch import launch
from .._triton import next_power_of_2, tree_sum
from ..rms_norm.triton_backend import DW_ROWS, _gradients, _rstd, sum_partials
from ..silu_mul.triton_backend import silu_gradients, silu_times


@triton.jit(do_not_specialize=["rows"])
def _gated_rms_norm(
    X, W, GATE, Y, RSTD, rows, sx, sg, eps, H: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr, R: tl.constexpr
):
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    j = tl.arange(0, BLOCK)
    ok = (r < rows)[:, None] & (j < H)[None, :]
    x = tl.load(X + r[:, None] * sx + j[None, :], mask=ok, other=0.0).to(tl.float32)
    z = tl.load(GATE + r[:, None] * sg + j[None, :], mask=ok, other=0.0).to(tl.float32)
    w = tl.load(W + j, mask=j < H, other=0.0).to(tl.float32)
    rstd = _rstd(tree_sum(x * x, LEVELS), eps, H)
    y = silu_times(z, x * rstd[:, None] * w[None, :])
    tl.store(Y + r[:, None] * H + j[None, :], y.to(Y.dtype.element_ty), mask=ok)
    tl.store(RSTD + r, rstd, mask=r < rows)


@triton.jit(do_not_specialize=["rows", "chains"])
def _gated_rms_norm_grad(
    DY,
    X,
    W,
    GATE,
    RSTD,
    DX,
    DGATE,
    PART,
    rows,
    chains,
    sx,
    sg,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS: tl.constexpr,
    R: tl.constexpr,
):
    chain = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    j = tl.arange(0, BLOCK)
    w = tl.load(W + j, mask=j < H, other=0.0).to(tl.float32)[None, :]
    dw = tl.zeros((R, BLOCK), tl.float32)
    for i in range(ROWS):
        r = chain * ROWS + i
        ok = (r < rows)[:, None] & (j < H)[None, :]
        x = tl.load(X + r[:, None] * sx + j[None, :], mask=ok, other=0.0).to(tl.float32)
        z = tl.load(GATE + r[:, None] * sg + j[None, :], mask=ok, other=0.0).to(tl.float32)
        d = tl.load(DY + r[:, None] * H + j[None, :], mask=ok, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + r, mask=r < rows, other=0.0)[:, None]
        dgate, e = silu_gradients(z, x * rstd * w, d)
        dx, dw = _gradients(e, x, w, rstd, dw, H, LEVELS)
        tl.store(DX + r[:, None] * H + j[None, :], dx.to(DX.dtype.element_ty), mask=ok)
        tl.store(DGATE + r[:, None] * H + j[None, :], dgate.to(DGATE.dtype.element_ty), mask=ok)
    # + 0.0: no partial sum is -0, so zero-padding the tree changes no bit.
    tl.store(PART + chain[:, None] * H + j[None, :], dw + 0.0, mask=(chain < chains)[:, None] & (j < H)[None, :])


def forward(x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y and fp32 rstd [rows], for x and gate [rows, H]."""
    rows, h = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = next_power_of_2(h)
        r = max(1, 1024 // block)
        launch(
            _gated_rms_norm,
            (triton.cdiv(rows, r),),
            (x, weight, gate, y, rstd, rows, x.stride(0), gate.stride(0), eps),
            {"num_warps": max(1, min(16, block * r // 1024))},
            H=h,
            BLOCK=block,
            LEVELS=block.bit_length() - 1,
            R=r,
        )
    return y, rstd


def backward(dy, x, weight, gate, rstd) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dx [rows, H], fp32 dweight [H] and dgate [rows, H], for contiguous dy."""
    rows, h = x.shape
    dx, dgate = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if not rows:
        return dx, torch.zeros(h, dtype=torch.float32, device=x.device), dgate
    block, chains = next_power_of_2(h), triton.cdiv(rows, DW_ROWS)
    r = max(1, 1024 // block)
    parts = torch.empty(chains, h, dtype=torch.float32, device=x.device)
    launch(
        _gated_rms_norm_grad,
        (triton.cdiv(chains, r),),
        (dy, x, weight, gate, rstd, dx, dgate, parts, rows, chains, x.stride(0), gate.stride(0)),
        {"num_warps": max(1, min(16, r * block // 512))},
        H=h,
        BLOCK=block,
        LEVELS=block.bit_length() - 1,
        ROWS=DW_ROWS,
        R=r,
    )
    return dx, sum_partials(parts), dgate
