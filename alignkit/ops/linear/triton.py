"""Triton: tiles of outputs, k ascending in steps of 16 through the tensor core; the schedule follows M, the bits do not.

The tensor core's result depends on the order of k alone, whatever the tile, so every schedule below is a chain. fp32
inputs take fused multiply-adds in the same order.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._triton import EXACT


@triton.jit
def _chain(a, b, acc, sak, sbk, k0, k1, m_ok, n_ok, BLOCK_K: tl.constexpr):
    """acc continued over k in [k0, k1); a, b point at k = 0 of the tile's rows."""
    for k in range(k0, k1, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        at = tl.load(a + ks[None, :].to(tl.int64) * sak, mask=m_ok[:, None] & (ks < k1)[None, :], other=0.0)
        bt = tl.load(b + ks[:, None].to(tl.int64) * sbk, mask=(ks < k1)[:, None] & n_ok[None, :], other=0.0)
        acc = tl.dot(at, bt, acc, input_precision="ieee")
    return acc


@triton.jit
def _matmul(A, B, C, BIAS, M, N, K, sam, sak, sbn, sbk, scm, LEAVES: tl.constexpr, HAS_BIAS: tl.constexpr,
            ACCUMULATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
            GROUP: tl.constexpr):
    pid = tl.program_id(0)
    rows, cols = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = pid // (GROUP * cols) * GROUP  # tiles in bands of GROUP rows, so that weights stay in L2
    band = tl.minimum(rows - first, GROUP)
    i = (first + pid % (GROUP * cols) % band).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = (pid % (GROUP * cols) // band).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_ok, n_ok = i < M, j < N
    a, b = A + i[:, None] * sam, B + j[None, :] * sbn
    c = C + i[:, None] * scm + j[None, :]
    ok = m_ok[:, None] & n_ok[None, :]
    zero = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    step = K // LEAVES
    if LEAVES == 1:
        acc = tl.load(c, mask=ok, other=0.0) if ACCUMULATE else zero
        acc = _chain(a, b, acc, sak, sbk, 0, K, m_ok, n_ok, BLOCK_K)
    else:  # the balanced tree, with as few sums pending as it allows
        acc = zero
        for pair4 in tl.static_range(0, LEAVES, 4):
            half = zero
            for pair2 in tl.static_range(pair4, min(pair4 + 4, LEAVES), 2):
                left = _chain(a, b, zero, sak, sbk, pair2 * step, (pair2 + 1) * step, m_ok, n_ok, BLOCK_K)
                right = _chain(a, b, zero, sak, sbk, (pair2 + 1) * step, (pair2 + 2) * step, m_ok, n_ok, BLOCK_K)
                if pair2 == pair4:
                    half = left + right
                else:
                    half = half + (left + right)
            if pair4 == 0:
                acc = half
            else:
                acc = acc + half
    if HAS_BIAS:
        acc += tl.load(BIAS + j, mask=n_ok, other=0.0).to(tl.float32)[None, :]
    tl.store(c, acc.to(C.dtype.element_ty), mask=ok)


def _schedule(m: int, n: int, dtype: torch.dtype, leaves: int) -> dict:
    """Tile, warps and stages by the number of rows."""
    if dtype == torch.float32:
        return {"BLOCK_M": 16 if m <= 16 else 64, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}
    if m <= 16:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128, "num_warps": 4, "num_stages": 5}
    if m <= 64:
        return {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}
    if m <= 256 or n <= 1024:
        return {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}
    if leaves > 1:
        return {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 4}
    return {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}


def matmul(a: torch.Tensor, b: torch.Tensor, leaves: int, bias: torch.Tensor | None, out: torch.Tensor,
           accumulate: bool, **schedule) -> None:
    """`schedule` overrides the choice; tests use it to show that it changes no bit."""
    m, k = a.shape
    n = b.shape[0]
    if a.dtype != b.dtype:
        a, b = a.float(), b.float()
    chosen = _schedule(m, n, a.dtype, leaves) | schedule
    grid = (triton.cdiv(m, chosen["BLOCK_M"]) * triton.cdiv(n, chosen["BLOCK_N"]),)
    _matmul[grid](a, b, out, bias, m, n, k, a.stride(0), a.stride(1), b.stride(0), b.stride(1), out.stride(0),
                  LEAVES=leaves, HAS_BIAS=bias is not None, ACCUMULATE=accumulate, GROUP=8, **chosen, **EXACT)
