"""Triton: queries and keys in one launch, a row per token and head. A row is normalised and rotated as `rms_norm` and
`rope` do it, and rounded between them as theirs is in memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...runtime.launch import launch
from .._triton import next_power_of_2, tree_sum
from ..rms_norm.triton import _rstd, _scale
from ..rope.triton import _angles

ELEMENTS = 2048
"""Of a block of rows, at least."""


@triton.jit
def _normed(X, W, T, rstd, ok, j, H: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """Elements j of rows, of H, as they are rounded to T."""
    x = tl.load(X + j[None, :], mask=ok[:, None] & (j < H)[None, :], other=0.0).to(tl.float32)
    return (x * rstd[:, None] * _scale(W, j, H, ZERO_CENTERED)[None, :]).to(T)


@triton.jit
def _squares(X, ok, j, H: tl.constexpr, LEVELS: tl.constexpr):
    """The sum of squares of elements j of rows, of H."""
    x = tl.load(X + j[None, :], mask=ok[:, None] & (j < H)[None, :], other=0.0).to(tl.float32)
    return tree_sum(x * x, LEVELS)


@triton.jit
def _rows(
    X,
    W,
    Y,
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
    T: tl.constexpr = Y.dtype.element_ty
    r = block.to(tl.int64) * R + tl.arange(0, R)
    t, ok = r // H, r < rows
    x, y = X + (t * sxt + (r % H) * sxh)[:, None], Y + r[:, None] * DIM
    j = tl.arange(0, PART)
    here = ok[:, None] & (j < HALF)[None, :]
    cos, sin = _angles(POS, TABLE, t, ok, here, j[None, :], positions, HALF)
    if 2 * HALF == BLOCK:  # the tree's last sum is of the halves, which are at hand
        squares = _squares(x, ok, j, HALF, LEVELS - 1) + _squares(x + HALF, ok, j, HALF, LEVELS - 1)
    else:
        squares = _squares(x, ok, tl.arange(0, BLOCK), DIM, LEVELS)
    rstd = _rstd(squares, eps, DIM)
    a = _normed(x, W, T, rstd, ok, j, HALF, ZERO_CENTERED).to(tl.float32)
    b = _normed(x + HALF, W + HALF, T, rstd, ok, j, HALF, ZERO_CENTERED).to(tl.float32)
    tl.store(y + j[None, :], tl.fma(a, cos, -(b * sin)).to(T), mask=here)
    tl.store(y + HALF + j[None, :], tl.fma(b, cos, a * sin).to(T), mask=here)
    if DIM > 2 * HALF:  # what is not rotated of a head
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
    """The first programs are q's, the others k's."""
    block, queries = tl.program_id(0), tl.cdiv(q_rows, R)
    if block < queries:
        _rows(
            Q, WQ, YQ, POS, TABLE, block, q_rows, positions, sqt, sqh, eps,
            HQ, DIM, HALF, BLOCK, LEVELS, PART, REST, R, ZERO_CENTERED,
        )  # fmt: skip
    else:
        _rows(
            K, WK, YK, POS, TABLE, block - queries, k_rows, positions, skt, skh, eps,
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
) -> tuple[torch.Tensor, torch.Tensor]:
    (tokens, hq, dim), hk, rotary = q.shape, k.shape[1], table.shape[1]
    yq, yk = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k))
    block = next_power_of_2(dim)
    r = max(1, ELEMENTS // block)
    if blocks := triton.cdiv(tokens * hq, r) + triton.cdiv(tokens * hk, r):
        launch(
            _qk_norm_rope,
            (blocks,),
            (
                *(q, k, q_weight, k_weight, yq, yk, positions, table),
                *(tokens * hq, tokens * hk, table.shape[0]),
                *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), eps),
            ),
            {"num_warps": max(1, min(16, r * block // 512))},
            HQ=max(1, hq),  # without heads there are no rows, but the code that divides by their number
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
    return yq, yk
