"""Triton RMSNorm: balanced-tree sums over the hidden dimension; dweight by chains of rows, summed by the tree.

The order of summation is the contract's (docs/contract.md, "On Hopper GPUs"). The rows per program, the levels per
launch of `_sum_partials` and num_warps are free.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...runtime.launch import launch
from .._triton import next_power_of_2, tree_sum
from .reference import add_gradient

DW_ROWS = 16
"""contract: rows per chain of dweight. Each chain ends with + 0; the balanced tree sums the chains in row order."""


@triton.jit
def _row_offset(r, heads, st, sh):
    """Return the offset of row r as [R, 1], in a tensor with `heads` rows per token."""
    return (r // heads * st + r % heads * sh)[:, None]


@triton.jit
def _scale(W, j, H: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """Load elements j of the weight in fp32, plus 1 if zero-centered."""
    w = tl.load(W + j, mask=j < H, other=0.0).to(tl.float32)
    return w + 1.0 if ZERO_CENTERED else w


@triton.jit
def _rstd(squares, eps, H: tl.constexpr):
    """Return 1 / sqrt(squares / H + eps), from the sums of squares of rows of H elements."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, H * 1.0) + eps))


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    X,
    RESIDUAL,
    W,
    TOTAL,
    Y,
    RSTD,
    rows,
    heads,
    sxt,
    sxh,
    srt,
    srh,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    R: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    j = tl.arange(0, BLOCK)
    ok = (r < rows)[:, None] & (j < H)[None, :]
    x = tl.load(X + _row_offset(r, heads, sxt, sxh) + j[None, :], mask=ok, other=0.0).to(tl.float32)
    if RESIDUAL is not None:
        x += tl.load(RESIDUAL + _row_offset(r, heads, srt, srh) + j[None, :], mask=ok, other=0.0).to(tl.float32)
        total = x.to(TOTAL.dtype.element_ty)
        tl.store(TOTAL + r[:, None] * H + j[None, :], total, mask=ok)
        x = total.to(tl.float32)
    w = _scale(W, j, H, ZERO_CENTERED)
    rstd = _rstd(tree_sum(x * x, LEVELS), eps, H)
    tl.store(Y + r[:, None] * H + j[None, :], (x * rstd[:, None] * w[None, :]).to(Y.dtype.element_ty), mask=ok)
    tl.store(RSTD + r, rstd, mask=r < rows)


def by_head(t: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """Return t [..., H], its rows per token, and the strides of tokens and of rows.

    t is copied if these two strides cannot describe it.
    """
    if t.ndim > 3:
        t = t.reshape(-1, *t.shape[-2:])
    if t.stride(-1) != 1:
        t = t.contiguous()
    if t.ndim == 3:
        return t, t.shape[1], t.stride(0), t.stride(1)
    return t, 1, t.stride(0) if t.ndim == 2 else 0, 0


def forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, zero_centered: bool = False
):
    """Return the normalized sum x + residual (x if residual is None) and y, both [..., H], and fp32 rstd [rows]."""
    h = x.shape[-1]
    rows = x.numel() // h
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(y)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        x, heads, sxt, sxh = by_head(x)
        srt = srh = 0
        if residual is not None:
            residual, _, srt, srh = by_head(residual)
        block = next_power_of_2(h)
        r = max(1, 1024 // block)
        launch(
            _rms_norm,
            (triton.cdiv(rows, r),),
            (x, residual, weight, total, y, rstd, rows, heads, sxt, sxh, srt, srh, eps),
            {"num_warps": max(1, min(16, block * r // 1024))},
            H=h,
            BLOCK=block,
            LEVELS=block.bit_length() - 1,
            R=r,
            ZERO_CENTERED=zero_centered,
        )
    return total, y, rstd


@triton.jit
def _load(DY, X, RSTD, r, ok, j, heads, sxt, sxh, H: tl.constexpr):
    """Load dy and x of rows r at columns j, and rstd."""
    mask = ok[:, None] & (j < H)[None, :]
    return (
        tl.load(DY + r[:, None] * H + j[None, :], mask=mask, other=0.0),
        tl.load(X + _row_offset(r, heads, sxt, sxh) + j[None, :], mask=mask, other=0.0),
        tl.load(RSTD + r, mask=ok, other=0.0),
    )


@triton.jit
def _gradients(dy, x, w, rstd, dw, H: tl.constexpr, LEVELS: tl.constexpr):
    """Return fp32 dx of rows of H elements, and the chains dw with these rows added; w: [1, 2^LEVELS], rstd: [R, 1]."""
    g = dy * w
    c = tl.div_rn(tree_sum(g * x, LEVELS), H * 1.0)[:, None] * rstd * rstd
    # c * -1.0: Triton computes -c as 0 - c, which loses the sign of zero.
    dx = rstd * tl.fma(tl.broadcast_to(c * -1.0, x.shape), x, g)
    return dx, tl.fma(dy, x * rstd, dw)


@triton.jit(do_not_specialize=["rows", "chains"])
def _rms_norm_grad(
    DY,
    X,
    W,
    RSTD,
    DX,
    PART,
    rows,
    chains,
    heads,
    sxt,
    sxh,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS: tl.constexpr,
    R: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    chain = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    j = tl.arange(0, BLOCK)
    w = _scale(W, j, H, ZERO_CENTERED)[None, :]
    dw = tl.zeros((R, BLOCK), tl.float32)
    r = chain * ROWS
    next_dy, next_x, next_rstd = _load(DY, X, RSTD, r, r < rows, j, heads, sxt, sxh, H)
    for i in range(ROWS):
        dy, x, rstd = next_dy.to(tl.float32), next_x.to(tl.float32), next_rstd[:, None]
        # Prefetch the next rows while the current rows are reduced.
        next_dy, next_x, next_rstd = _load(DY, X, RSTD, r + 1, (r + 1 < rows) & (i + 1 < ROWS), j, heads, sxt, sxh, H)
        dx, dw = _gradients(dy, x, w, rstd, dw, H, LEVELS)
        ok = (r < rows)[:, None] & (j < H)[None, :]
        tl.store(DX + r[:, None] * H + j[None, :], dx.to(DX.dtype.element_ty), mask=ok)
        r += 1
    # + 0.0: no partial sum is -0, so zero-padding the tree changes no bit.
    tl.store(PART + chain[:, None] * H + j[None, :], dw + 0.0, mask=(chain < chains)[:, None] & (j < H)[None, :])


@triton.jit(do_not_specialize=["parts"])
def _sum_partials(PART, OUT, parts, H: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr):
    """Sum each 2^LEVELS consecutive rows of PART [parts, H] by the balanced tree."""
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    p = tl.program_id(1).to(tl.int64) * 2**LEVELS + tl.arange(0, 2**LEVELS)
    v = tl.load(PART + p[None, :] * H + j[:, None], mask=(p < parts)[None, :] & (j < H)[:, None], other=0.0)
    tl.store(OUT + tl.program_id(1).to(tl.int64) * H + j, tree_sum(v, LEVELS), mask=j < H)


def sum_partials(parts: torch.Tensor) -> torch.Tensor:
    """Return the balanced-tree sum of the rows of fp32 parts [parts, H], at least one."""
    h = parts.shape[1]
    while len(parts) > 1:
        sums = parts.new_empty(triton.cdiv(len(parts), 64), h)
        launch(
            _sum_partials,
            (triton.cdiv(h, 32), len(sums)),
            (parts, sums, len(parts)),
            {"num_warps": 4},
            H=h,
            BLOCK=32,
            LEVELS=6,
        )
        parts = sums
    return parts[0]


def backward(dy, x, weight, rstd, d_total=None, zero_centered: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dx + d_total [..., H] and fp32 dweight [H], for contiguous dy."""
    h = x.shape[-1]
    rows = x.numel() // h
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not rows:
        return dx, torch.zeros(h, dtype=torch.float32, device=x.device)
    block, chains = next_power_of_2(h), triton.cdiv(rows, DW_ROWS)
    r = max(1, 1024 // block)
    parts = torch.empty(chains, h, dtype=torch.float32, device=x.device)
    x, heads, sxt, sxh = by_head(x)
    launch(
        _rms_norm_grad,
        (triton.cdiv(chains, r),),
        (dy, x, weight, rstd, dx, parts, rows, chains, heads, sxt, sxh),
        {"num_warps": max(1, min(16, r * block // 512))},
        H=h,
        BLOCK=block,
        LEVELS=block.bit_length() - 1,
        ROWS=DW_ROWS,
        R=r,
        ZERO_CENTERED=zero_centered,
    )
    return add_gradient(dx, d_total), sum_partials(parts)
