"""Triton l2_norm: balanced-tree sums over a row.

The order of summation is the contract's (docs/contract.md, "On Hopper GPUs"). The rows per program and num_warps are
free.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...runtime.launch import launch
from .._triton import next_power_of_2, tree_sum
from ..rms_norm.triton_backend import _row_offset, by_head


@triton.jit
def factor(x, eps, LEVELS: tl.constexpr):
    """Return 1 / sqrt(sum of squares + eps) of rows x [R, 2^LEVELS]."""
    return tl.div_rn(1.0, tl.sqrt_rn(tree_sum(x * x, LEVELS) + eps))


@triton.jit(do_not_specialize=["rows"])
def _l2_norm(
    X, Y, SCALE, rows, heads, sxt, sxh, eps, H: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr, R: tl.constexpr
):
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    j = tl.arange(0, BLOCK)
    ok = (r < rows)[:, None] & (j < H)[None, :]
    x = tl.load(X + _row_offset(r, heads, sxt, sxh) + j[None, :], mask=ok, other=0.0).to(tl.float32)
    scale = factor(x, eps, LEVELS)
    tl.store(Y + r[:, None] * H + j[None, :], (x * scale[:, None]).to(Y.dtype.element_ty), mask=ok)
    tl.store(SCALE + r, scale, mask=r < rows)


@triton.jit(do_not_specialize=["rows"])
def _l2_norm_grad(
    DY, X, SCALE, DX, rows, heads, sxt, sxh, H: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr, R: tl.constexpr
):
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    j = tl.arange(0, BLOCK)
    ok = (r < rows)[:, None] & (j < H)[None, :]
    x = tl.load(X + _row_offset(r, heads, sxt, sxh) + j[None, :], mask=ok, other=0.0).to(tl.float32)
    g = tl.load(DY + r[:, None] * H + j[None, :], mask=ok, other=0.0).to(tl.float32)
    scale = tl.load(SCALE + r, mask=r < rows, other=0.0)[:, None]
    c = tree_sum(g * x, LEVELS)[:, None] * scale * scale
    # c * -1.0: Triton computes -c as 0 - c, which loses the sign of zero.
    dx = scale * tl.fma(tl.broadcast_to(c * -1.0, x.shape), x, g)
    tl.store(DX + r[:, None] * H + j[None, :], dx.to(DX.dtype.element_ty), mask=ok)


def _launch(kernel, x: torch.Tensor, before: tuple, after: tuple, eps: tuple) -> None:
    """Launch a kernel over the rows of x."""
    h = x.shape[-1]
    rows = x.numel() // h
    if rows:
        x, heads, sxt, sxh = by_head(x)
        block = next_power_of_2(h)
        r = max(1, 1024 // block)
        launch(
            kernel,
            (triton.cdiv(rows, r),),
            (*before, x, *after, rows, heads, sxt, sxh, *eps),
            {"num_warps": max(1, min(16, block * r // 1024))},
            H=h,
            BLOCK=block,
            LEVELS=block.bit_length() - 1,
            R=r,
        )


def forward(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y [..., H] and the fp32 factor of each row."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    scale = torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device)
    _launch(_l2_norm, x, (), (y, scale), (eps,))
    return y, scale


def backward(dy: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return dx [..., H], for contiguous dy."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(_l2_norm_grad, x, (dy,), (scale, dx), ())
    return dx
