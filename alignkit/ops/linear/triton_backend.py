"""Triton backend: output tiles, k ascending in steps of 16 through the tensor core.

The tensor core's result depends on the order of k alone, not on the tile, so every schedule below gives the chain's
bits. fp32 operands use fused multiply-adds in the same order.

The compiler folds `dot(a, b, 0) + x` into `dot(a, b, x)`, which changes the order. It cannot if the accumulator is
loop-carried, so the number of steps (STEPS) must stay a run-time argument that is not specialized. Tile sizes, splits
and launch options are free, but a step must not cross leaves: `_choose` reduces BLOCK_K to a divisor of the leaf.
../moe_experts/grouped.py uses `sums` too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ...runtime.launch import prepared
from ...runtime.operands import MAX_CACHED, Operand, operand
from .._triton import tree_sum
from . import cost
from .cublaslt import round_up_rows
from .problem import Product

_JOINED = 512
"""schedule: outputs per CTA of the kernel that adds partial sums."""


@triton.jit
def _load(a, b, k, K, sak, sbk, m_ok, n_ok, BLOCK_K: tl.constexpr):
    """Load the tiles of both operands at k; a and b point to k = 0 of their rows."""
    ks = k + tl.arange(0, BLOCK_K)
    a_tile = tl.load(a + ks[None, :].to(tl.int64) * sak, mask=m_ok[:, None] & (ks < K)[None, :], other=0.0)
    b_tile = tl.load(b + ks[:, None].to(tl.int64) * sbk, mask=(ks < K)[:, None] & n_ok[None, :], other=0.0)
    return a_tile, b_tile


@triton.jit
def sums(
    a,
    b,
    acc,
    K,
    STEPS,
    sak,
    sbk,
    m_ok,
    n_ok,
    LEAVES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the tile of a chain that continues `acc`, or of the tree of `LEAVES` chains; a, b as for `_load`."""
    if LEAVES == 1:
        for s in range(STEPS):
            a_tile, b_tile = _load(a, b, s * BLOCK_K, K, sak, sbk, m_ok, n_ok, BLOCK_K)
            acc = tl.dot(a_tile, b_tile, acc, input_precision="ieee")
    else:  # one loop over all of k, so that loads are pipelined across leaves; one, two, four hold left subtrees
        zero = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        leaf = STEPS // LEAVES
        acc, one, two, four = zero, zero, zero, zero
        for s in range(STEPS):
            a_tile, b_tile = _load(a, b, s * BLOCK_K, K, sak, sbk, m_ok, n_ok, BLOCK_K)
            acc = tl.dot(a_tile, b_tile, acc, input_precision="ieee")
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
    return acc


@triton.jit(do_not_specialize=["M", "STEPS"])
def _matmul(
    A,
    B,
    C,
    BIAS,
    M,
    N,
    K,
    STEPS,
    sam,
    sak,
    sbn,
    sbk,
    scm,
    LEAVES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    RESUME: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):
    part = tl.program_id(1).to(tl.int64)  # part of k and its leaves; K, STEPS and LEAVES describe one part
    A += part * K * sak
    B += part * K * sbk
    C += part * M * scm
    pid = tl.program_id(0)
    rows, cols = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = pid // (GROUP_SIZE_M * cols) * GROUP_SIZE_M  # groups of tile rows, so that weights stay in L2
    group_size_m = tl.minimum(rows - first, GROUP_SIZE_M)
    i = (first + pid % (GROUP_SIZE_M * cols) % group_size_m).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = (pid % (GROUP_SIZE_M * cols) // group_size_m).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_ok, n_ok = i < M, j < N
    a, b = A + i[:, None] * sam, B + j[None, :] * sbn
    c = C + i[:, None] * scm + j[None, :]
    ok = m_ok[:, None] & n_ok[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if RESUME:
        acc = tl.load(c, mask=ok, other=0.0)
    acc = sums(a, b, acc, K, STEPS, sak, sbk, m_ok, n_ok, LEAVES, BLOCK_M, BLOCK_N, BLOCK_K)
    if HAS_BIAS:
        acc += tl.load(BIAS + j, mask=n_ok, other=0.0).to(tl.float32)[None, :]
    if ACCUMULATE:
        acc += tl.load(c, mask=ok, other=0.0)
    tl.store(c, acc.to(C.dtype.element_ty), mask=ok)


@triton.jit
def _join(PARTS, C, BIAS, N, stride, scm, LEVELS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute C [M, N] = the balanced tree over 2^LEVELS partial sums [M, N], `stride` elements apart, plus bias."""
    i, j = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = j < N
    part = tl.arange(0, 1 << LEVELS).to(tl.int64)
    parts = tl.load(PARTS + i * N + j[:, None] + part[None, :] * stride, mask=ok[:, None], other=0.0)
    acc = tree_sum(parts, LEVELS)
    if HAS_BIAS:
        acc += tl.load(BIAS + j, mask=ok, other=0.0).to(tl.float32)
    tl.store(C + i * scm + j, acc.to(C.dtype.element_ty), mask=ok)


def prepared_join(device: int, m: int, n: int, stride: int, row: int, parts: int, has_bias: bool) -> Callable:
    """Return a launcher (partial sums, out, bias) that adds the parts; `row` is out's row stride."""
    rest = (n, stride, row, parts.bit_length() - 1, has_bias, _JOINED)
    return prepared(device, _join, (m, triton.cdiv(n, _JOINED), 1), rest)


def _tile(m: int, n: int, k: int, parts: int = 1, *, warps: int = 4, stages: int = 4) -> dict:
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "parts": parts, "num_warps": warps, "num_stages": stages}


def _chain_schedule(m: int) -> dict:
    if m <= 16:
        return _tile(16, 32, 128)
    if m <= 128:
        return _tile(64, 32, 128)
    return _tile(64, 64, 64, stages=5) if m <= 256 else _tile(128, 256, 64, warps=8, stages=3)


def _tree_schedule(m: int, n: int, k: int, leaves: int) -> dict:
    """Return the tile of a k-tree by cost.py; a fixed one for many rows, which are rare here (see hopper.py)."""
    if m > 256:
        return _tile(64, 128, 64, warps=8)
    return _tile(*cost.best_of_tiles(round_up_rows(m), n, k, leaves)[1])


def schedule(m: int, n: int, k: int, leaves: int, dtype: torch.dtype) -> dict:
    """Return the schedule of a GEMM: tile, warps, stages, and the parts that its leaves are split into."""
    if dtype == torch.float32:
        chosen = _tile(16 if m <= 16 else 64, 64, 32, stages=2)
    else:
        chosen = _chain_schedule(m) if leaves == 1 else _tree_schedule(m, n, k, leaves)
    return chosen | {"parts": min(chosen["parts"], leaves)}


@functools.lru_cache(MAX_CACHED)
def _choose(
    device: int,
    a: Operand,
    b: Operand,
    bias: Operand | None,
    out: Operand,
    leaves: int,
    accumulate: bool,
    resumed: bool,
    given: tuple,
) -> tuple[Callable, Callable | None, int]:
    """Return the launchers of the GEMM and of the sum of its parts (None for one part), and the number of parts."""
    ((m, k), a_strides, dtype, _), ((n, _), b_strides, _, _), row = a, b, out[1][0]
    chosen = schedule(m, n, k, leaves, dtype) | dict(given)
    parts = min(chosen["parts"], leaves)
    whole = parts == 1
    block_k = chosen["BLOCK_K"]
    if leaves > 1:  # steps must not cross leaves, whose lengths are multiples of 16
        block_k = math.gcd(block_k, k // leaves)
    rest = (
        m,
        n,
        k // parts,
        triton.cdiv(k // parts, block_k),
        *a_strides,
        *b_strides,
        row if whole else n,
        leaves // parts,
        whole and bias is not None,
        accumulate,
        resumed,
        chosen["BLOCK_M"],
        chosen["BLOCK_N"],
        block_k,
        8,
    )
    grid = (triton.cdiv(m, chosen["BLOCK_M"]) * triton.cdiv(n, chosen["BLOCK_N"]), parts, 1)
    product = prepared(device, _matmul, grid, rest, num_warps=chosen["num_warps"], num_stages=chosen["num_stages"])
    return product, None if whole else prepared_join(device, m, n, m * n, row, parts, bias is not None), parts


def tiles(
    a: torch.Tensor,
    b: torch.Tensor,
    leaves: int,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    accumulate: bool,
    resumed: bool = False,
    **given,
) -> None:
    """Compute a GEMM by the kernels above.

    `resumed` continues the chains (one leaf) from the values in `out`. `given` overrides items of the `schedule`; no
    choice changes a bit.
    """
    if a.dtype != b.dtype:
        a, b = a.float(), b.float()
    product, join, parts = _choose(
        out.get_device(),
        operand(a),
        operand(b),
        operand(bias),
        operand(out),
        leaves,
        accumulate,
        resumed,
        tuple(given.items()),
    )
    if join is None:
        product(a, b, out, bias)
    else:
        sums = torch.empty(parts, *out.shape, dtype=torch.float32, device=out.device)
        product(a, b, sums, None)
        join(sums, out, bias)


def chain(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, accumulate: bool) -> None:
    """Compute the chain, as the reference of cuBLASLt's trials; with a fixed tile, to compile few kernels."""
    tiles(a, b, 1, bias, out, accumulate, BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=3)


def prepare(p: Product) -> Callable:
    return functools.partial(_run, p.leaves, p.accumulate)


def _run(
    leaves: int, accumulate: bool, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    tiles(a, b, leaves, None if bias is None else bias.contiguous(), out, accumulate)


def resume(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Continue the chains from the values in `out` (fp32)."""
    tiles(a, b, 1, None, out, False, True)
