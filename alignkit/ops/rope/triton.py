"""Triton: elementwise, a row per token and head. On every device the table comes from the host, in double there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...runtime.launch import launch
from .._triton import next_power_of_2


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
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    R: tl.constexpr,
    INVERSE: tl.constexpr,
):
    r = block.to(tl.int64) * R + tl.arange(0, R)
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
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    R: tl.constexpr,
    INVERSE: tl.constexpr,
):
    _rotate(X, Y, POS, TABLE, tl.program_id(0), tokens * H, positions, sxt, sxh, H, HALF, BLOCK, R, INVERSE)


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
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    R: tl.constexpr,
):
    """The first programs rotate q, the others k."""
    block, queries = tl.program_id(0), tl.cdiv(tokens * HQ, R)
    if block < queries:
        _rotate(Q, YQ, POS, TABLE, block, tokens * HQ, positions, sqt, sqh, HQ, HALF, BLOCK, R, False)
    else:
        _rotate(K, YK, POS, TABLE, block - queries, tokens * HK, positions, skt, skh, HK, HALF, BLOCK, R, False)


def _tile(dim: int) -> dict:
    block = next_power_of_2(dim // 2)
    return {"HALF": dim // 2, "BLOCK": block, "R": max(1, 1024 // block)}


def apply(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, inverse: bool) -> torch.Tensor:
    tokens, heads, dim = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        tile = _tile(dim)
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
    """`apply` to both, in one launch."""
    (tokens, hq, dim), hk = q.shape, k.shape[1]
    yq, yk = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k))
    if tokens:
        tile = _tile(dim)
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
