"""Triton qk_norm_rope: queries and keys in one launch, one row per token and head.

The bits are those of `rms_norm` followed by `rope`, and of their two backward passes. The result between the two ops is
rounded to the model type. A change of the arithmetic in ../rms_norm/triton_backend.py or ../rope/triton_backend.py must
be repeated here (docs/contract.md, "RMSNorm" and "RoPE"). ELEMENTS, TREE_LEVELS and num_warps are free.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...runtime.launch import launch
from .._triton import next_power_of_2, tree_sum
from ..rms_norm.triton_backend import DW_ROWS, _gradients, _rstd, _scale
from ..rope.triton_backend import _angles

ELEMENTS = 2048  # schedule: minimum elements per CTA, padding included; a power of two


@triton.jit
def _normed(X, W, T, rstd, ok, j, H: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """Return the normalized elements j of rows of H elements, rounded to T."""
    x = tl.load(X + j[None, :], mask=ok[:, None] & (j < H)[None, :], other=0.0).to(tl.float32)
    return (x * rstd[:, None] * _scale(W, j, H, ZERO_CENTERED)[None, :]).to(T)


@triton.jit
def _squares(X, ok, j, H: tl.constexpr, LEVELS: tl.constexpr):
    """Return the balanced-tree sum of squares of elements j of rows of H elements."""
    x = tl.load(X + j[None, :], mask=ok[:, None] & (j < H)[None, :], other=0.0).to(tl.float32)
    return tree_sum(x * x, LEVELS)


@triton.jit
def _rows(
    X,
    W,
    Y,
    RSTD,
    POS,
    TABLE,
    block,
    rows,
    positions,
    sxt,
    sxh,
    eps,
    H: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    PART: tl.constexpr,
    REST: tl.constexpr,
    R: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    """Normalize and rotate R rows of X, each a head of a token; H heads per token, HALF rotated pairs."""
    T: tl.constexpr = Y.dtype.element_ty
    r = block.to(tl.int64) * R + tl.arange(0, R)
    t, ok = r // H, r < rows
    x, y = X + (t * sxt + (r % H) * sxh)[:, None], Y + r[:, None] * DIM
    j = tl.arange(0, PART)
    mask = ok[:, None] & (j < HALF)[None, :]
    cos, sin = _angles(POS, TABLE, t, ok, mask, j[None, :], positions, HALF)
    if 2 * HALF == BLOCK:  # the last sum of the tree adds the two halves
        squares = _squares(x, ok, j, HALF, LEVELS - 1) + _squares(x + HALF, ok, j, HALF, LEVELS - 1)
    else:
        squares = _squares(x, ok, tl.arange(0, BLOCK), DIM, LEVELS)
    rstd = _rstd(squares, eps, DIM)
    if RSTD is not None:
        tl.store(RSTD + r, rstd, mask=ok)
    a = _normed(x, W, T, rstd, ok, j, HALF, ZERO_CENTERED).to(tl.float32)
    b = _normed(x + HALF, W + HALF, T, rstd, ok, j, HALF, ZERO_CENTERED).to(tl.float32)
    tl.store(y + j[None, :], tl.fma(a, cos, -(b * sin)).to(T), mask=mask)
    tl.store(y + HALF + j[None, :], tl.fma(b, cos, a * sin).to(T), mask=mask)
    if DIM > 2 * HALF:  # dimensions that are not rotated
        i = tl.arange(0, REST)
        rest = _normed(x + 2 * HALF, W + 2 * HALF, T, rstd, ok, i, DIM - 2 * HALF, ZERO_CENTERED)
        tl.store(y + 2 * HALF + i[None, :], rest, mask=ok[:, None] & (i < DIM - 2 * HALF)[None, :])


@triton.jit(do_not_specialize=["q_rows", "k_rows"])
def _qk_norm_rope(
    Q,
    K,
    WQ,
    WK,
    YQ,
    YK,
    Q_RSTD,
    K_RSTD,
    POS,
    TABLE,
    q_rows,
    k_rows,
    positions,
    sqt,
    sqh,
    skt,
    skh,
    eps,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    PART: tl.constexpr,
    REST: tl.constexpr,
    R: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    """Compute q in the first programs and k in the others."""
    block, queries = tl.program_id(0), tl.cdiv(q_rows, R)
    if block < queries:
        _rows(
            Q, WQ, YQ, Q_RSTD, POS, TABLE, block, q_rows, positions, sqt, sqh, eps,
            HQ, DIM, HALF, BLOCK, LEVELS, PART, REST, R, ZERO_CENTERED,
        )  # fmt: skip
    else:
        _rows(
            K, WK, YK, K_RSTD, POS, TABLE, block - queries, k_rows, positions, skt, skh, eps,
            HK, DIM, HALF, BLOCK, LEVELS, PART, REST, R, ZERO_CENTERED,
        )  # fmt: skip


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    table: torch.Tensor,
    zero_centered: bool = False,
    keep: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the new q and k, and fp32 rstd [T * H] of each if `keep`, else None."""
    (tokens, hq, dim), hk, rotary = q.shape, k.shape[1], table.shape[1]
    yq, yk = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k))
    q_rstd, k_rstd = (q.new_empty(t.shape[0] * t.shape[1], dtype=torch.float32) if keep else None for t in (q, k))
    block = next_power_of_2(dim)
    r = max(1, ELEMENTS // block)
    if blocks := triton.cdiv(tokens * hq, r) + triton.cdiv(tokens * hk, r):
        launch(
            _qk_norm_rope,
            (blocks,),
            (
                *(q, k, q_weight, k_weight, yq, yk, q_rstd, k_rstd, positions, table),
                *(tokens * hq, tokens * hk, table.shape[0]),
                *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), eps),
            ),
            {"num_warps": max(1, min(16, r * block // 512))},
            HQ=max(1, hq),  # the kernel divides by HQ and HK even if there are no heads
            HK=max(1, hk),
            DIM=dim,
            HALF=rotary // 2,
            BLOCK=block,
            LEVELS=block.bit_length() - 1,
            PART=next_power_of_2(rotary // 2),
            REST=next_power_of_2(max(1, dim - rotary)),
            R=r,
            ZERO_CENTERED=zero_centered,
        )
    return yq, yk, q_rstd, k_rstd


@triton.jit
def _load(
    DY,
    X,
    RSTD,
    POS,
    TABLE,
    r,
    ok,
    j,
    positions,
    syt,
    syh,
    sxt,
    sxh,
    H: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
):
    """Load dy, dy of the rotation partner of each element, cos, sin, x and rstd for rows r."""
    t, head = r // H, r % H
    mask, rotated = ok[:, None] & (j < DIM)[None, :], ok[:, None] & (j < 2 * HALF)[None, :]
    dy = DY + (t * syt + head * syh)[:, None]
    cos, sin = _angles(POS, TABLE, t, ok, rotated, (j % HALF)[None, :], positions, HALF)
    return (
        tl.load(dy + j[None, :], mask=mask, other=0.0),
        tl.load(dy + ((j + HALF) % (2 * HALF))[None, :], mask=rotated, other=0.0),
        cos,
        sin,
        tl.load(X + (t * sxt + head * sxh)[:, None] + j[None, :], mask=mask, other=0.0),
        tl.load(RSTD + r, mask=ok, other=0.0),
    )


@triton.jit
def _rows_grad(
    DY,
    X,
    W,
    RSTD,
    DX,
    PART,
    POS,
    TABLE,
    block,
    rows,
    positions,
    syt,
    syh,
    sxt,
    sxh,
    H: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS: tl.constexpr,
    R: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    """Compute dx, and R chains of dweight over ROWS rows each."""
    T: tl.constexpr = DX.dtype.element_ty
    chain, chains = block.to(tl.int64) * R + tl.arange(0, R), tl.cdiv(rows, ROWS)
    j = tl.arange(0, BLOCK)
    w = _scale(W, j, DIM, ZERO_CENTERED)[None, :]
    dw = tl.zeros((R, BLOCK), tl.float32)
    r = chain * ROWS
    valid = r < rows
    dy, partner, cos, sin, x, rstd = _load(
        DY, X, RSTD, POS, TABLE, r, valid, j, positions, syt, syh, sxt, sxh, H, DIM, HALF
    )
    for i in range(ROWS):
        a, b, s = dy.to(tl.float32), partner.to(tl.float32), -sin  # inverse rotation, as in `rope`
        first, second = tl.fma(a, cos, -(b * s)), tl.fma(a, cos, b * s)
        rotated = valid[:, None] & (j < 2 * HALF)[None, :]
        dn = tl.where(rotated, tl.where((j < HALF)[None, :], first, second), a).to(T).to(tl.float32)
        this_x, this_rstd, mask = x.to(tl.float32), rstd[:, None], valid[:, None] & (j < DIM)[None, :]
        # Prefetch the next rows while the current rows are reduced.
        valid = (r + 1 < rows) & (i + 1 < ROWS)
        dy, partner, cos, sin, x, rstd = _load(
            DY, X, RSTD, POS, TABLE, r + 1, valid, j, positions, syt, syh, sxt, sxh, H, DIM, HALF
        )
        dx, dw = _gradients(dn, this_x, w, this_rstd, dw, DIM, LEVELS)
        tl.store(DX + r[:, None] * DIM + j[None, :], dx.to(T), mask=mask)
        r += 1
    # + 0.0: no partial sum is -0, so zero-padding the tree changes no bit.
    tl.store(PART + chain[:, None] * DIM + j[None, :], dw + 0.0, mask=(chain < chains)[:, None] & (j < DIM)[None, :])


@triton.jit(do_not_specialize=["q_rows", "k_rows"])
def _qk_norm_rope_grad(
    DYQ,
    DYK,
    Q,
    K,
    WQ,
    WK,
    Q_RSTD,
    K_RSTD,
    DQ,
    DK,
    PART,
    POS,
    TABLE,
    q_rows,
    k_rows,
    positions,
    syqt,
    syqh,
    sykt,
    sykh,
    sqt,
    sqh,
    skt,
    skh,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS: tl.constexpr,
    R: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    """Compute the gradients of q in the first programs and of k in the others; PART holds the chains in that order."""
    chains = tl.cdiv(q_rows, ROWS)
    block, queries = tl.program_id(0), tl.cdiv(chains, R)
    if block < queries:
        _rows_grad(
            DYQ, Q, WQ, Q_RSTD, DQ, PART, POS, TABLE, block, q_rows, positions, syqt, syqh, sqt, sqh,
            HQ, DIM, HALF, BLOCK, LEVELS, ROWS, R, ZERO_CENTERED,
        )  # fmt: skip
    else:
        k_part = PART + chains.to(tl.int64) * DIM
        _rows_grad(
            DYK, K, WK, K_RSTD, DK, k_part, POS, TABLE, block - queries, k_rows, positions, sykt, sykh, skt, skh,
            HK, DIM, HALF, BLOCK, LEVELS, ROWS, R, ZERO_CENTERED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["q_parts", "k_parts"])
def _sum_partials(PART, OUT, q_parts, k_parts, H: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr):
    """Sum each 2^LEVELS consecutive rows of PART by the balanced tree; q's rows precede k's in PART and OUT."""
    block, queries = tl.program_id(1).to(tl.int64), tl.cdiv(q_parts, 2**LEVELS)
    first, end = block * 2**LEVELS, q_parts.to(tl.int64)
    if block >= queries:
        first, end = q_parts + (block - queries) * 2**LEVELS, end + k_parts
    j, p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), first + tl.arange(0, 2**LEVELS)
    v = tl.load(PART + p[None, :] * H + j[:, None], mask=(p < end)[None, :] & (j < H)[:, None], other=0.0)
    tl.store(OUT + block * H + j, tree_sum(v, LEVELS), mask=j < H)


TREE_LEVELS = 6
"""schedule: levels of the dweight tree per launch, at least 1."""


def backward(
    dyq: torch.Tensor,
    dyk: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    q_rstd: torch.Tensor,
    k_rstd: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    zero_centered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return contiguous dq and dk, and the fp32 gradients of the weights."""
    (tokens, hq, dim), hk, rotary = q.shape, k.shape[1], table.shape[1]
    dq, dk = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k))
    block = next_power_of_2(dim)
    r = max(1, 512 // block)
    chains = [triton.cdiv(tokens * heads, DW_ROWS) for heads in (hq, hk)]
    parts = torch.empty(sum(chains), dim, dtype=torch.float32, device=q.device)
    if blocks := sum(triton.cdiv(n, r) for n in chains):
        launch(
            _qk_norm_rope_grad,
            (blocks,),
            (
                *(dyq, dyk, q, k, q_weight, k_weight, q_rstd, k_rstd, dq, dk, parts, positions, table),
                *(tokens * hq, tokens * hk, table.shape[0]),
                *(stride for t in (dyq, dyk, q, k) for stride in t.stride()[:2]),
            ),
            {"num_warps": max(1, min(16, r * block // 256))},
            HQ=max(1, hq),
            HK=max(1, hk),
            DIM=dim,
            HALF=rotary // 2,
            BLOCK=block,
            LEVELS=block.bit_length() - 1,
            ROWS=DW_ROWS,
            R=r,
            ZERO_CENTERED=zero_centered,
        )
    while max(chains) > 1:
        counts = [triton.cdiv(n, 2**TREE_LEVELS) for n in chains]
        out = parts.new_empty(sum(counts), dim)
        launch(
            _sum_partials,
            (triton.cdiv(dim, 32), len(out)),
            (parts, out, *chains),
            {"num_warps": 4},
            H=dim,
            BLOCK=32,
            LEVELS=TREE_LEVELS,
        )
        parts, chains = out, counts
    if 0 in chains:  # no rows
        parts = torch.cat([part if part.numel() else part.new_zeros(1, dim) for part in parts.split(chains)])
    return dq, dk, parts[0], parts[1]
