"""Triton: tiles of outputs, k ascending in steps of 16 through the tensor core; M chooses the schedule, not the bits.

The tensor core's result depends on the order of k alone, whatever the tile, so every schedule below is a chain. fp32
inputs take fused multiply-adds in the same order. Chains of bf16 without a bias go to cuBLASLt where its bits are
these.

The compiler folds `dot(a, b, 0) + x` into `dot(a, b, x)`, which is another order. It cannot where the dot's sum goes
round a loop, so the number of steps is never a constant to it.
"""
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .._triton import EXACT, tree_sum
from . import cublaslt


@triton.jit
def _load(a, b, k, K, sak, sbk, m_ok, n_ok, BLOCK_K: tl.constexpr):
    """The tiles of both operands at k; a, b point at k = 0 of their rows."""
    ks = k + tl.arange(0, BLOCK_K)
    at = tl.load(a + ks[None, :].to(tl.int64) * sak, mask=m_ok[:, None] & (ks < K)[None, :], other=0.0)
    bt = tl.load(b + ks[:, None].to(tl.int64) * sbk, mask=(ks < K)[:, None] & n_ok[None, :], other=0.0)
    return at, bt


@triton.jit(do_not_specialize=["M", "STEPS"])
def _matmul(A, B, C, BIAS, M, N, K, STEPS, sam, sak, sbn, sbk, scm, LEAVES: tl.constexpr, HAS_BIAS: tl.constexpr,
            ACCUMULATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
            GROUP: tl.constexpr):
    part = tl.program_id(1).to(tl.int64)  # of k and its leaves: K, STEPS and LEAVES are those of one part
    A += part * K * sak
    B += part * K * sbk
    C += part * M * scm
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
        acc = zero
        for s in range(STEPS):
            at, bt = _load(a, b, s * BLOCK_K, K, sak, sbk, m_ok, n_ok, BLOCK_K)
            acc = tl.dot(at, bt, acc, input_precision="ieee")
    else:  # one loop over all of k: loads run ahead of the leaves; sums of 1, 2 and 4 leaves wait for their pair
        leaf = STEPS // LEAVES
        acc, one, two, four = zero, zero, zero, zero
        for s in range(STEPS):
            at, bt = _load(a, b, s * BLOCK_K, K, sak, sbk, m_ok, n_ok, BLOCK_K)
            acc = tl.dot(at, bt, acc, input_precision="ieee")
            if (s + 1) % leaf == 0:
                done = (s + 1) // leaf
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
    if ACCUMULATE:
        acc += tl.load(c, mask=ok, other=0.0)
    tl.store(c, acc.to(C.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["M"])
def _join(PARTS, C, BIAS, M, N, scm, LEVELS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """C [M, N] = the balanced tree over PARTS fp32 [2^LEVELS, M, N], plus bias, rounded."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = M.to(tl.int64) * N
    ok = at < size
    which = tl.arange(0, 1 << LEVELS)
    parts = tl.load(PARTS + at[:, None] + which[None, :] * size, mask=ok[:, None], other=0.0)
    acc = tree_sum(parts, LEVELS)
    i, j = at // N, at % N
    if HAS_BIAS:
        acc += tl.load(BIAS + j, mask=ok, other=0.0).to(tl.float32)
    tl.store(C + i * scm + j, acc.to(C.dtype.element_ty), mask=ok)


def _tile(m: int, n: int, k: int, parts: int = 1, *, warps: int = 4, stages: int = 4) -> dict:
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "parts": parts, "num_warps": warps, "num_stages": stages}


def _chain_schedule(m: int) -> dict:
    if m <= 16:
        return _tile(16, 32, 128)
    if m <= 128:
        return _tile(64, 32, 128)
    return _tile(64, 64, 64, stages=5) if m <= 256 else _tile(128, 256, 64, warps=8, stages=3)


def _tree_schedule(m: int, n: int, leaf: int) -> dict:
    """Few rows make few tiles; then a tile's leaves are dealt out, which costs the time of joining them."""
    if m <= 64 and leaf <= 256:
        return _tile(16, 32, 128)
    if m > 256:
        return _tile(64, 128, 64, warps=8)
    bm, bn = (16, 64) if m <= 32 else (64, 32)
    count = triton.cdiv(m, bm) * triton.cdiv(n, bn)
    if count >= 256:
        return _tile(128, 128, 64, 8, warps=8, stages=3)
    return _tile(bm, bn, 128, 1 if count > 64 and leaf < 1024 else 1 << (256 // count).bit_length() - 1)


def tiles(a: torch.Tensor, b: torch.Tensor, leaves: int, bias: torch.Tensor | None, out: torch.Tensor,
          accumulate: bool, **schedule) -> None:
    """The kernels above. `schedule` overrides the choice: the tile, and into how many parts the leaves are dealt out to
    blocks of their own. No choice changes a bit."""
    m, k = a.shape
    n = b.shape[0]
    if a.dtype != b.dtype:
        a, b = a.float(), b.float()
    if a.dtype == torch.float32:
        chosen = _tile(16 if m <= 16 else 64, 64, 32, stages=2)
    else:
        chosen = _chain_schedule(m) if leaves == 1 else _tree_schedule(m, n, k // leaves)
    chosen |= schedule
    parts = min(chosen.pop("parts"), leaves)
    if leaves > 1:  # a step of the loop stays inside a leaf, which is a multiple of 16
        chosen["BLOCK_K"] = math.gcd(chosen["BLOCK_K"], k // leaves)
    whole = parts == 1
    c = out if whole else torch.empty(parts, m, n, dtype=torch.float32, device=out.device)
    grid = (triton.cdiv(m, chosen["BLOCK_M"]) * triton.cdiv(n, chosen["BLOCK_N"]), parts)
    _matmul[grid](a, b, c, bias if whole else None, m, n, k // parts, triton.cdiv(k // parts, chosen["BLOCK_K"]),
                  *a.stride(), *b.stride(), c.stride(-2), LEAVES=leaves // parts,
                  HAS_BIAS=whole and bias is not None, ACCUMULATE=accumulate, GROUP=8, **chosen, **EXACT)
    if not whole:
        _join[(triton.cdiv(m * n, 512),)](c, out, bias, m, n, out.stride(0), LEVELS=parts.bit_length() - 1,
                                          HAS_BIAS=bias is not None, BLOCK=512, **EXACT)


def _chain(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
    """What cuBLASLt's algorithms are held against; one tile, so that few kernels are compiled for it."""
    tiles(a, b, 1, None, out, accumulate, BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=3)


def matmul(a: torch.Tensor, b: torch.Tensor, leaves: int, bias: torch.Tensor | None, out: torch.Tensor,
           accumulate: bool) -> None:
    if leaves > 1 or bias is not None or not cublaslt.matmul(a, b, out, accumulate, _chain):
        tiles(a, b, leaves, bias, out, accumulate)
