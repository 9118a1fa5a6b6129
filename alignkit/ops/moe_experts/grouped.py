"""Triton: the products of all experts in one launch, in the order of ../linear/triton.py, so of the same bits.

How many rows an expert has is read on the device. There are programs for as many tiles of rows as there may be; those
that find no rows end at once. Rows are read where they lie, whichever pair they are of.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ...runtime.launch import launch
from .._triton import next_power_of_2
from ..linear.triton import sums
from ..silu_mul.triton import silu_times
from .problem import Grouped, Matrices

MOST_EXPERTS = 4096
"""Each program looks at the ends of all."""
BAND = 8
"""Tiles are taken in bands of so many rows of tiles, so that weights stay in L2."""


@triton.jit
def _expert(OFFSETS, t, E, BY_PAIR: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of the t-th tile of rows: the expert, the first pair, and where the expert's pairs end, which is not behind the first if
    there is no such tile.

    Few pairs: tile t begins at pair t, if one begins there. Many: expert e, whose pairs begin at o, has the tiles from
    o // BLOCK_M + e on, which are as many as it needs or one more.
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
def _tile(slots, cols, GROUP: tl.constexpr):
    """Which tile of rows, and which of columns."""
    pid = tl.program_id(0)
    first = pid // (GROUP * cols) * GROUP
    band = tl.minimum(slots - first, GROUP)
    return first + pid % (GROUP * cols) % band, pid % (GROUP * cols) // band


@triton.jit
def _rows(A, ROW, i, ok, sam):
    """Where the rows of pairs i begin."""
    if ROW is not None:
        i = tl.load(ROW + i, mask=ok, other=0)
    return A + i * sam


@triton.jit
def _matrix(A, B, expert, sbe, TABLE: tl.constexpr, ALIGNED: tl.constexpr):
    """The expert's, of A's type: from B on, or at the address that B has for it."""
    if TABLE:
        b = tl.load(B + expert).to(tl.pointer_type(A.dtype.element_ty))
        if ALIGNED:
            b = tl.multiple_of(b, 16)
    else:
        b = B + expert * sbe
    return b


@triton.jit(do_not_specialize=["slots", "STEPS"])
def _products(
    A,
    ROW,
    B,
    C,
    OFFSETS,
    slots,
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
    GROUP: tl.constexpr,
):
    t, column = _tile(slots, tl.cdiv(N, BLOCK_N), GROUP)
    expert, first, end = _expert(OFFSETS, t, E, BY_PAIR, BLOCK_E, BLOCK_M)
    if first >= end:
        return
    i = first + tl.arange(0, BLOCK_M)
    j = column.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_ok, n_ok = i < end, j < N
    a = _rows(A, ROW, i, m_ok, sam)[:, None]
    b = _matrix(A, B, expert, sbe, TABLE, ALIGNED) + j[None, :] * sbn
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = sums(a, b, acc, K, STEPS, sak, sbk, m_ok, n_ok, LEAVES, BLOCK_M, BLOCK_N, BLOCK_K)
    tl.store(C + i[:, None] * scm + j[None, :], acc.to(C.dtype.element_ty), mask=m_ok[:, None] & n_ok[None, :])


@triton.jit(do_not_specialize=["slots", "STEPS"])
def _gated(
    A,
    ROW,
    B,
    H,
    Y,
    OFFSETS,
    slots,
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
    GROUP: tl.constexpr,
):
    """The tiles of gate and up that belong together, and Y from them; H, if it is not None, has both."""
    t, column = _tile(slots, tl.cdiv(F, BLOCK_N), GROUP)
    expert, first, end = _expert(OFFSETS, t, E, BY_PAIR, BLOCK_E, BLOCK_M)
    if first >= end:
        return
    i = first + tl.arange(0, BLOCK_M)
    j = column.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_ok, n_ok = i < end, j < F
    a = _rows(A, ROW, i, m_ok, sam)[:, None]
    b = _matrix(A, B, expert, sbe, TABLE, ALIGNED)
    gate, up = b + j[None, :] * sbn, b + (F + j)[None, :] * sbn
    g_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    u_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for s in range(STEPS):
        ks = s * BLOCK_K + tl.arange(0, BLOCK_K)
        at = tl.load(a + ks[None, :].to(tl.int64) * sak, mask=m_ok[:, None] & (ks < K)[None, :], other=0.0)
        ok, down = (ks < K)[:, None] & n_ok[None, :], ks[:, None].to(tl.int64) * sbk
        g_acc = tl.dot(at, tl.load(gate + down, mask=ok, other=0.0), g_acc, input_precision="ieee")
        u_acc = tl.dot(at, tl.load(up + down, mask=ok, other=0.0), u_acc, input_precision="ieee")
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
    GROUP: tl.constexpr,
):
    """A chain over an expert's pairs, in steps from its first one on; behind its last are zeros."""
    row, column = _tile(tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K), GROUP)
    expert = tl.program_id(1).to(tl.int64)
    n = row.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = column.to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    n_ok, k_ok = n < N, k < K
    first, end = tl.load(OFFSETS + expert), tl.load(OFFSETS + expert + 1)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for s in range(tl.cdiv((end - first).to(tl.int32), BLOCK_R)):
        i = first + s * BLOCK_R + tl.arange(0, BLOCK_R)
        ok = i < end
        at = tl.load(
            _rows(A, A_ROW, i, ok, sar)[None, :] + n[:, None] * san, mask=n_ok[:, None] & ok[None, :], other=0.0
        )
        bt = tl.load(
            _rows(B, B_ROW, i, ok, sbr)[:, None] + k[None, :] * sbk, mask=ok[:, None] & k_ok[None, :], other=0.0
        )
        acc = tl.dot(at, bt, acc, input_precision="ieee")
    c = C + expert * N * K + n[:, None] * K + k[None, :]
    tl.store(c, acc.to(C.dtype.element_ty), mask=n_ok[:, None] & k_ok[None, :])


def _schedule(m: int, n: int, k: int, *, warps: int = 4, stages: int = 4) -> dict:
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "num_warps": warps, "num_stages": stages}


def _fp32(rows: float) -> dict:
    return _schedule(16 if rows <= 16 else 64, 64, 32, stages=2)


def _of_products(rows: float, leaves: int) -> dict:
    """By the rows that an expert has on average."""
    if rows <= 16:
        return _schedule(16, 64, 128)
    if rows <= 64:
        return _schedule(64, 64, 64)
    return _schedule(128, 256, 64, warps=8, stages=3) if leaves == 1 else _schedule(64, 128, 64, warps=8)


def _of_gated(rows: float) -> dict:
    if rows <= 16:
        return _schedule(16, 32, 128)
    return _schedule(64, 64, 64) if rows <= 64 else _schedule(128, 128, 64, warps=8, stages=3)


def _run(kernel, chosen: dict, pairs: int, tensors: tuple, b: Matrices, n: int, k: int, strides: tuple, **constants):
    """`kernel` on all tiles of `pairs` rows and n columns."""
    experts, across, step = len(b), chosen["BLOCK_M"], chosen["BLOCK_K"]
    many = pairs // across + experts
    slots = min(many, pairs)
    (matrices, of_expert), (row, column) = b.memory(), b[0].stride()
    a, a_row, *rest = tensors
    numbers = slots, experts, n, k, triton.cdiv(k, step), *a.stride(), of_expert, row, column, *strides
    launch(
        kernel,
        (slots * triton.cdiv(n, chosen["BLOCK_N"]),),
        (a, a_row, matrices, *rest, *numbers),
        {"num_warps": chosen["num_warps"], "num_stages": chosen["num_stages"]},
        **constants,
        TABLE=not b.stacked,
        ALIGNED=not b.stacked and b[0].data_ptr() % 16 == 0,
        BY_PAIR=pairs < many,
        BLOCK_E=next_power_of_2(experts),
        BLOCK_M=across,
        BLOCK_N=chosen["BLOCK_N"],
        BLOCK_K=step,
        GROUP=BAND,
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
    """As each.py's. `schedule` overrides the choice, here and below; none changes a bit."""
    (pairs, n), k = out.shape, a.shape[1]
    rows = pairs / len(b)
    chosen = (_fp32(rows) if a.dtype == torch.float32 else _of_products(rows, leaves)) | schedule
    if leaves > 1:  # a step of the loop stays inside a leaf, which is a multiple of 16
        chosen["BLOCK_K"] = math.gcd(chosen["BLOCK_K"], k // leaves)
    _run(_products, chosen, pairs, (a, row, out, offsets), b, n, k, (out.stride(0),), LEAVES=leaves)


def gated(
    a: torch.Tensor, row: torch.Tensor | None, b: Matrices, offsets: torch.Tensor, h: torch.Tensor | None, **schedule
) -> torch.Tensor:
    pairs, f = len(a) if row is None else len(row), b.shape[0] // 2
    out = torch.empty(pairs, f, dtype=a.dtype, device=a.device)
    if pairs:
        rows = pairs / len(b)
        chosen = (_fp32(rows) if a.dtype == torch.float32 else _of_gated(rows)) | schedule
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
    few = a.dtype == torch.float32
    chosen = (_schedule(64, 64, 32, stages=2) if few else _schedule(128, 128, 64, warps=8, stages=3)) | schedule
    launch(
        _gradients,
        (triton.cdiv(n, chosen["BLOCK_M"]) * triton.cdiv(k, chosen["BLOCK_N"]), experts),
        (a, a_row, b, b_row, out, offsets, n, k, *a.stride(), *b.stride()),
        {"num_warps": chosen["num_warps"], "num_stages": chosen["num_stages"]},
        BLOCK_N=chosen["BLOCK_M"],
        BLOCK_K=chosen["BLOCK_N"],
        BLOCK_R=chosen["BLOCK_K"],
        GROUP=BAND,
    )


def refuses(p: Grouped) -> str | None:
    """Why they are not for this problem; None: they are."""
    if p.b is None:
        return "the experts' matrices differ in strides or alignment"
    if p.a[2] != p.b[2]:
        return f"operands are {p.a[2]} and {p.b[2]}"
    if p.experts > MOST_EXPERTS:
        return f"there are more than {MOST_EXPERTS} experts"
    if p.out is not None and p.out[1][-1] != 1:
        return "the result's columns are apart"
    return None
