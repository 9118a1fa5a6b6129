"""Triton RoPE: elementwise, one row per token and head. The table is computed on the CPU, in double.

Each `tl.fma` and each rounding is the contract's (docs/contract.md, "RoPE"). The rows per program
(R) are free; BLOCK and REST must cover the dimensions that are rotated and copied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...runtime.launch import launch
from .._triton import next_power_of_2


@triton.jit
def _angles(POS, TABLE, t, valid, ok, j, positions, HALF: tl.constexpr):
    """Load the cosines and sines of tokens t (where `valid`) in columns j (where `ok`).

    A position outside the table gives NaN.
    """
    p = tl.load(POS + t, mask=valid, other=0)
    in_table = ok & ((p >= 0) & (p < positions))[:, None]
    row = TABLE + p[:, None] * (2 * HALF) + j
    return tl.load(row, mask=in_table, other=float("nan")), tl.load(row + HALF, mask=in_table, other=float("nan"))


@triton.jit
def _rotate(
    X,
    Y,
    POS,
    TABLE,
    block,
    rows,
    positions,
    sxt,
    sxh,
    H: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    R: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Rotate R rows; INVERSE: by the negative angles."""
    r = block.to(tl.int64) * R + tl.arange(0, R)
    j = tl.arange(0, BLOCK)[None, :]
    t = r // H
    ok = (r < rows)[:, None] & (j < HALF)
    cos, sin = _angles(POS, TABLE, t, r < rows, ok, j, positions, HALF)
    if INVERSE:
        sin = -sin
    x = X + (t * sxt + (r % H) * sxh)[:, None] + j
    a, b = tl.load(x, mask=ok, other=0.0).to(tl.float32), tl.load(x + HALF, mask=ok, other=0.0).to(tl.float32)
    y = Y + r[:, None] * DIM + j
    tl.store(y, tl.fma(a, cos, -(b * sin)).to(Y.dtype.element_ty), mask=ok)
    tl.store(y + HALF, tl.fma(b, cos, a * sin).to(Y.dtype.element_ty), mask=ok)
    if DIM > 2 * HALF:  # dimensions that are not rotated
        i = 2 * HALF + tl.arange(0, REST)[None, :]
        mask = (r < rows)[:, None] & (i < DIM)
        rest = tl.load(X + (t * sxt + (r % H) * sxh)[:, None] + i, mask=mask)
        tl.store(Y + r[:, None] * DIM + i, rest, mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _rope(
    X,
    Y,
    POS,
    TABLE,
    tokens,
    positions,
    sxt,
    sxh,
    H: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    R: tl.constexpr,
    INVERSE: tl.constexpr,
):
    rows = tokens * H
    _rotate(X, Y, POS, TABLE, tl.program_id(0), rows, positions, sxt, sxh, H, DIM, HALF, BLOCK, REST, R, INVERSE)


@triton.jit(do_not_specialize=["tokens"])
def _rope_qk(
    Q,
    K,
    YQ,
    YK,
    POS,
    TABLE,
    tokens,
    positions,
    sqt,
    sqh,
    skt,
    skh,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    R: tl.constexpr,
):
    """Rotate q in the first programs and k in the others."""
    block, queries = tl.program_id(0), tl.cdiv(tokens * HQ, R)
    if block < queries:
        _rotate(Q, YQ, POS, TABLE, block, tokens * HQ, positions, sqt, sqh, HQ, DIM, HALF, BLOCK, REST, R, False)
    else:
        k_block = block - queries
        _rotate(K, YK, POS, TABLE, k_block, tokens * HK, positions, skt, skh, HK, DIM, HALF, BLOCK, REST, R, False)


def _tile(dim: int, rotary: int) -> dict:
    """Return the constexpr sizes of a tile."""
    block, rest = next_power_of_2(rotary // 2), next_power_of_2(max(1, dim - rotary))
    return {"DIM": dim, "HALF": rotary // 2, "BLOCK": block, "REST": rest, "R": max(1, 1024 // block)}


def apply(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, inverse: bool) -> torch.Tensor:
    tokens, heads, dim = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        tile = _tile(dim, table.shape[1])
        launch(
            _rope,
            (triton.cdiv(tokens * heads, tile["R"]),),
            (x, y, positions, table, tokens, table.shape[0], x.stride(0), x.stride(1)),
            {"num_warps": 4},
            H=heads,
            **tile,
            INVERSE=inverse,
        )
    return y


def apply_qk(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k in one launch."""
    (tokens, hq, dim), hk = q.shape, k.shape[1]
    yq, yk = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k))
    if tokens:
        tile = _tile(dim, table.shape[1])
        launch(
            _rope_qk,
            (triton.cdiv(tokens * hq, tile["R"]) + triton.cdiv(tokens * hk, tile["R"]),),
            (
                q,
                k,
                yq,
                yk,
                positions,
                table,
                tokens,
                table.shape[0],
                q.stride(0),
                q.stride(1),
                k.stride(0),
                k.stride(1),
            ),
            {"num_warps": 4},
            HQ=hq,
            HK=hk,
            **tile,
        )
    return yq, yk
