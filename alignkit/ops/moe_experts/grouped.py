"""Triton backend: grouped GEMMs of all experts in one launch, with the bits of ../linear/triton_backend.py.

The kernels read the row counts on the device. The grid covers the maximum number of row tiles; programs without rows
exit immediately. The kernels gather rows by index. each.py documents the functions.

The order of k is the contract's (docs/contract.md, "Mixture of experts"). STEPS, the number of steps, must stay a
run-time argument without specialization: the compiler could change the order of a constant number of steps
(../linear/triton_backend.py). Tile sizes and launch options are free, but a step of k must not cross leaves:
`products` reduces BLOCK_K to a divisor of the leaf.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ...runtime.launch import launch
from ...runtime.operands import dtype_name
from .._triton import next_power_of_2
from ..linear.triton_backend import sums
from ..silu_mul.triton_backend import silu_times
from .problem import UNEQUAL_MATRICES, Grouped, Matrices

MAX_EXPERTS = 4096
"""schedule: maximum experts per rank, a limit that may be raised: every program loads the offsets of all experts.

cuda_backend.py has a smaller limit, that of its kernels.
"""
GROUP_SIZE_M = 8
"""schedule: row tiles per rasterization band, so that weights stay in L2."""


@triton.jit
def _expert(OFFSETS, t, E, BY_PAIR: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the t-th row tile's expert, its first pair, and the end of the expert's pairs.

    A tile t without pairs returns first >= end.

    - BY_PAIR (fewer pairs than tile slots): tile t starts at pair t. It has pairs only if pair t is a multiple of
      BLOCK_M after the expert's first pair.
    - Otherwise: the tiles of expert e begin at index o // BLOCK_M + e, where o is the expert's first pair. The expert
      has as many tiles as its pairs need, or one more.
    """
    e = tl.arange(0, BLOCK_E)
    ends = tl.load(OFFSETS + 1 + e, mask=e < E, other=2**62)
    if BY_PAIR:
        expert = tl.sum((ends <= t).to(tl.int32), axis=0)
    else:
        expert = tl.sum((ends // BLOCK_M + e + 1 <= t).to(tl.int32), axis=0)
    start, end = tl.load(OFFSETS + expert), tl.load(OFFSETS + tl.minimum(expert + 1, E))
    if BY_PAIR:
        first = tl.where((t - start) % BLOCK_M == 0, t.to(tl.int64), end)
    else:
        first = start + (t - (start // BLOCK_M + expert)) * BLOCK_M
    return expert.to(tl.int64), first, end


@triton.jit
def _tile(max_tiles, cols, GROUP_SIZE_M: tl.constexpr):
    """Return the row tile and the column tile of this program, by groups of GROUP_SIZE_M row tiles."""
    pid = tl.program_id(0)
    first = pid // (GROUP_SIZE_M * cols) * GROUP_SIZE_M
    group_size_m = tl.minimum(max_tiles - first, GROUP_SIZE_M)
    return first + pid % (GROUP_SIZE_M * cols) % group_size_m, pid % (GROUP_SIZE_M * cols) // group_size_m


@triton.jit
def _row_pointers(A, ROW, i, ok, sam):
    """Return the pointers to the rows of A for pairs i; ROW holds their indices, None if A is in the order of pairs."""
    if ROW is not None:
        i = tl.load(ROW + i, mask=ok, other=0)
    return A + i * sam


@triton.jit
def _matrix(A, B, expert, sbe, TABLE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the address of an expert's matrix, of A's dtype: stacked in B, or from the address table B."""
    if TABLE:
        b = tl.load(B + expert).to(tl.pointer_type(A.dtype.element_ty))
        if ALIGNED:
            b = tl.multiple_of(b, 16)
    else:
        b = B + expert * sbe
    return b


@triton.jit(do_not_specialize=["max_tiles", "STEPS"])
def _products(
    A,
    ROW,
    B,
    C,
    OFFSETS,
    max_tiles,
    E,
    N,
    K,
    STEPS,
    sam,
    sak,
    sbe,
    sbn,
    sbk,
    scm,
    LEAVES: tl.constexpr,
    TABLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BY_PAIR: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):
    t, column = _tile(max_tiles, tl.cdiv(N, BLOCK_N), GROUP_SIZE_M)
    expert, first, end = _expert(OFFSETS, t, E, BY_PAIR, BLOCK_E, BLOCK_M)
    if first >= end:
        return
    i = first + tl.arange(0, BLOCK_M)
    j = column.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_ok, n_ok = i < end, j < N
    a = _row_pointers(A, ROW, i, m_ok, sam)[:, None]
    b = _matrix(A, B, expert, sbe, TABLE, ALIGNED) + j[None, :] * sbn
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = sums(a, b, acc, K, STEPS, sak, sbk, m_ok, n_ok, LEAVES, BLOCK_M, BLOCK_N, BLOCK_K)
    tl.store(C + i[:, None] * scm + j[None, :], acc.to(C.dtype.element_ty), mask=m_ok[:, None] & n_ok[None, :])


@triton.jit(do_not_specialize=["max_tiles", "STEPS"])
def _gated(
    A,
    ROW,
    B,
    H,
    Y,
    OFFSETS,
    max_tiles,
    E,
    F,
    K,
    STEPS,
    sam,
    sak,
    sbe,
    sbn,
    sbk,
    TABLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BY_PAIR: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):
    """Compute a tile of gate and the same tile of up; store silu(gate) * up to Y, and gate and up to H unless None.

    The loop is that of `sums` with one leaf, for two accumulators: k ascending, each `tl.dot` continuing its chain.
    """
    t, column = _tile(max_tiles, tl.cdiv(F, BLOCK_N), GROUP_SIZE_M)
    expert, first, end = _expert(OFFSETS, t, E, BY_PAIR, BLOCK_E, BLOCK_M)
    if first >= end:
        return
    i = first + tl.arange(0, BLOCK_M)
    j = column.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_ok, n_ok = i < end, j < F
    a = _row_pointers(A, ROW, i, m_ok, sam)[:, None]
    b = _matrix(A, B, expert, sbe, TABLE, ALIGNED)
    gate, up = b + j[None, :] * sbn, b + (F + j)[None, :] * sbn
    g_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    u_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for s in range(STEPS):
        ks = s * BLOCK_K + tl.arange(0, BLOCK_K)
        a_tile = tl.load(a + ks[None, :].to(tl.int64) * sak, mask=m_ok[:, None] & (ks < K)[None, :], other=0.0)
        ok, k_offset = (ks < K)[:, None] & n_ok[None, :], ks[:, None].to(tl.int64) * sbk
        g_acc = tl.dot(a_tile, tl.load(gate + k_offset, mask=ok, other=0.0), g_acc, input_precision="ieee")
        u_acc = tl.dot(a_tile, tl.load(up + k_offset, mask=ok, other=0.0), u_acc, input_precision="ieee")
    ok = m_ok[:, None] & n_ok[None, :]
    g, u = g_acc.to(Y.dtype.element_ty), u_acc.to(Y.dtype.element_ty)
    if H is not None:
        h = H + i[:, None] * (2 * F) + j[None, :]
        tl.store(h, g, mask=ok)
        tl.store(h + F, u, mask=ok)
    y = silu_times(g.to(tl.float32), u.to(tl.float32))
    tl.store(Y + i[:, None] * F + j[None, :], y.to(Y.dtype.element_ty), mask=ok)


@triton.jit
def _gradients(
    A,
    A_ROW,
    B,
    B_ROW,
    C,
    OFFSETS,
    N,
    K,
    sar,
    san,
    sbr,
    sbk,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):
    """Compute a tile of one expert's weight gradient: a chain over the expert's pairs, in order, padded with zeros."""
    row, column = _tile(tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K), GROUP_SIZE_M)
    expert = tl.program_id(1).to(tl.int64)
    n = row.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = column.to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    n_ok, k_ok = n < N, k < K
    first, end = tl.load(OFFSETS + expert), tl.load(OFFSETS + expert + 1)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for s in range(tl.cdiv((end - first).to(tl.int32), BLOCK_R)):
        i = first + s * BLOCK_R + tl.arange(0, BLOCK_R)
        ok = i < end
        a_tile = tl.load(
            _row_pointers(A, A_ROW, i, ok, sar)[None, :] + n[:, None] * san, mask=n_ok[:, None] & ok[None, :], other=0.0
        )
        b_tile = tl.load(
            _row_pointers(B, B_ROW, i, ok, sbr)[:, None] + k[None, :] * sbk, mask=ok[:, None] & k_ok[None, :], other=0.0
        )
        acc = tl.dot(a_tile, b_tile, acc, input_precision="ieee")
    c = C + expert * N * K + n[:, None] * K + k[None, :]
    tl.store(c, acc.to(C.dtype.element_ty), mask=n_ok[:, None] & k_ok[None, :])


def _schedule(m: int, n: int, k: int, *, warps: int = 4, stages: int = 4) -> dict:
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "num_warps": warps, "num_stages": stages}


def _fp32(rows: float) -> dict:
    return _schedule(16 if rows <= 16 else 64, 64, 32, stages=2)


def _products_schedule(rows: float, leaves: int) -> dict:
    """Return the schedule by the average number of rows per expert."""
    if rows <= 16:
        return _schedule(16, 64, 128)
    if rows <= 64:
        return _schedule(64, 64, 64)
    return _schedule(128, 256, 64, warps=8, stages=3) if leaves == 1 else _schedule(64, 128, 64, warps=8)


def _gated_schedule(rows: float) -> dict:
    if rows <= 16:
        return _schedule(16, 32, 128)
    return _schedule(64, 64, 64) if rows <= 64 else _schedule(128, 128, 64, warps=8, stages=3)


def _run(kernel, chosen: dict, pairs: int, tensors: tuple, b: Matrices, n: int, k: int, strides: tuple, **constants):
    """Launch `kernel` on all tiles of `pairs` rows and n columns."""
    experts, block_m, block_k = len(b), chosen["BLOCK_M"], chosen["BLOCK_K"]
    bound = pairs // block_m + experts
    max_tiles = min(bound, pairs)
    (matrices, expert_stride), (row, column) = b.memory(), b[0].stride()
    a, a_row, *rest = tensors
    numbers = max_tiles, experts, n, k, triton.cdiv(k, block_k), *a.stride(), expert_stride, row, column, *strides
    launch(
        kernel,
        (max_tiles * triton.cdiv(n, chosen["BLOCK_N"]),),
        (a, a_row, matrices, *rest, *numbers),
        {"num_warps": chosen["num_warps"], "num_stages": chosen["num_stages"]},
        **constants,
        TABLE=not b.stacked,
        ALIGNED=not b.stacked and b[0].data_ptr() % 16 == 0,
        BY_PAIR=pairs < bound,
        BLOCK_E=next_power_of_2(experts),
        BLOCK_M=block_m,
        BLOCK_N=chosen["BLOCK_N"],
        BLOCK_K=block_k,
        GROUP_SIZE_M=GROUP_SIZE_M,
    )


def products(
    a: torch.Tensor,
    row: torch.Tensor | None,
    b: Matrices,
    offsets: torch.Tensor,
    leaves: int,
    out: torch.Tensor,
    **schedule,
) -> None:
    """Compute the GEMMs; see each.py. `schedule` overrides items of the chosen schedule; no choice changes a bit."""
    (pairs, n), k = out.shape, a.shape[1]
    rows = pairs / len(b)
    chosen = (_fp32(rows) if a.dtype == torch.float32 else _products_schedule(rows, leaves)) | schedule
    if leaves > 1:  # steps must not cross leaves, whose lengths are multiples of 16
        chosen["BLOCK_K"] = math.gcd(chosen["BLOCK_K"], k // leaves)
    _run(_products, chosen, pairs, (a, row, out, offsets), b, n, k, (out.stride(0),), LEAVES=leaves)


def gated(
    a: torch.Tensor, row: torch.Tensor | None, b: Matrices, offsets: torch.Tensor, h: torch.Tensor | None, **schedule
) -> torch.Tensor:
    pairs, f = len(a) if row is None else len(row), b.shape[0] // 2
    out = torch.empty(pairs, f, dtype=a.dtype, device=a.device)
    if pairs:
        rows = pairs / len(b)
        chosen = (_fp32(rows) if a.dtype == torch.float32 else _gated_schedule(rows)) | schedule
        _run(_gated, chosen, pairs, (a, row, h, out, offsets), b, f, a.shape[1], ())
    return out


def gradients(
    a: torch.Tensor,
    a_row: torch.Tensor | None,
    b: torch.Tensor,
    b_row: torch.Tensor | None,
    offsets: torch.Tensor,
    out: torch.Tensor,
    **schedule,
) -> None:
    experts, n, k = out.shape
    fp32 = a.dtype == torch.float32
    chosen = (_schedule(64, 64, 32, stages=2) if fp32 else _schedule(128, 128, 64, warps=8, stages=3)) | schedule
    # The output tile is [n, k], so BLOCK_M and BLOCK_N of the schedule cut n and k; BLOCK_K is the pairs per step.
    launch(
        _gradients,
        (triton.cdiv(n, chosen["BLOCK_M"]) * triton.cdiv(k, chosen["BLOCK_N"]), experts),
        (a, a_row, b, b_row, out, offsets, n, k, *a.stride(), *b.stride()),
        {"num_warps": chosen["num_warps"], "num_stages": chosen["num_stages"]},
        BLOCK_N=chosen["BLOCK_M"],
        BLOCK_K=chosen["BLOCK_N"],
        BLOCK_R=chosen["BLOCK_K"],
        GROUP_SIZE_M=GROUP_SIZE_M,
    )


def rejects(p: Grouped) -> str | None:
    """Return why these kernels are not used for a problem, or None."""
    if p.b is None:
        return UNEQUAL_MATRICES
    if p.a[2] != p.b[2]:
        return f"dtype: must be equal for both operands, got {dtype_name(p.a[2])} and {dtype_name(p.b[2])}"
    if p.experts > MAX_EXPERTS:
        return f"experts: must be at most {MAX_EXPERTS}, got {p.experts}"
    if p.out is not None and p.out[1][-1] != 1:
        return f"out: stride of the last dimension must be 1, got {p.out[1][-1]}"
    return None
