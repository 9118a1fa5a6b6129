"""Triton: tiles of outputs, k ascending in steps of 16 through the tensor core; the schedule follows M, the bits do not.

The tensor core's result depends on the order of k alone, whatever the tile, so every schedule below is a chain. fp32
inputs take fused multiply-adds in the same order.
"""
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .._triton import EXACT


@triton.jit
def _load(a, b, k, K, sak, sbk, m_ok, n_ok, BLOCK_K: tl.constexpr):
    """The tiles of both operands at k; a, b point at k = 0 of their rows."""
    ks = k + tl.arange(0, BLOCK_K)
    at = tl.load(a + ks[None, :].to(tl.int64) * sak, mask=m_ok[:, None] & (ks < K)[None, :], other=0.0)
    bt = tl.load(b + ks[:, None].to(tl.int64) * sbk, mask=(ks < K)[:, None] & n_ok[None, :], other=0.0)
    return at, bt


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
    if LEAVES == 1:
        acc = tl.load(c, mask=ok, other=0.0) if ACCUMULATE else zero
        for k in range(0, K, BLOCK_K):
            at, bt = _load(a, b, k, K, sak, sbk, m_ok, n_ok, BLOCK_K)
            acc = tl.dot(at, bt, acc, input_precision="ieee")
    else:  # one loop over all of k, so that loads run ahead of the leaves; sums of 1, 2 and 4 leaves wait for their pair
        step = K // LEAVES
        acc, one, two, four = zero, zero, zero, zero
        for k in range(0, K, BLOCK_K):
            at, bt = _load(a, b, k, K, sak, sbk, m_ok, n_ok, BLOCK_K)
            acc = tl.dot(at, bt, acc, input_precision="ieee")
            if (k + BLOCK_K) % step == 0:
                done = (k + BLOCK_K) // step
                if done % 2 == 1:
                    one = acc
                    acc = zero
                else:
                    acc = one + acc
                    if done % 4 == 0:
                        acc = two + acc
                        if done % 8 == 0:
                            acc = four + acc
                        elif done < LEAVES:
                            four = acc
                            acc = zero
                    elif done < LEAVES:
                        two = acc
                        acc = zero
    if HAS_BIAS:
        acc += tl.load(BIAS + j, mask=n_ok, other=0.0).to(tl.float32)[None, :]
    tl.store(c, acc.to(C.dtype.element_ty), mask=ok)


def _schedule(m: int, n: int, dtype: torch.dtype, leaves: int) -> dict:
    """Tile, warps and stages by the number of rows."""
    if dtype == torch.float32:
        return {"BLOCK_M": 16 if m <= 16 else 64, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}
    if m <= 16 or (leaves > 1 and m <= 64):
        return {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}
    if m <= 64:
        return {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}
    if leaves == 1 and (m <= 256 or n <= 1024):
        return {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}
    if leaves > 1:
        return {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 4}
    return {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}


def matmul(a: torch.Tensor, b: torch.Tensor, leaves: int, bias: torch.Tensor | None, out: torch.Tensor,
           accumulate: bool, **schedule) -> None:
    """`schedule` overrides the choice; tests use it to show that it changes no bit."""
    m, k = a.shape
    n = b.shape[0]
    if a.dtype != b.dtype:
        a, b = a.float(), b.float()
    chosen = _schedule(m, n, a.dtype, leaves) | schedule
    if leaves > 1:  # a step of the loop stays inside a leaf, which is a multiple of 16
        chosen["BLOCK_K"] = math.gcd(chosen["BLOCK_K"], k // leaves)
    grid = (triton.cdiv(m, chosen["BLOCK_M"]) * triton.cdiv(n, chosen["BLOCK_N"]),)
    _matmul[grid](a, b, out, bias, m, n, k, a.stride(0), a.stride(1), b.stride(0), b.stride(1), out.stride(0),
                  LEAVES=leaves, HAS_BIAS=bias is not None, ACCUMULATE=accumulate, GROUP=8, **chosen, **EXACT)
