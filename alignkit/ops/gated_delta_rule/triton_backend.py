"""Triton backend of `chunk_gated_delta_rule_bwd_dhu`: one program per sequence, head and slice of V.

The op is the backward pass of the gated delta rule's chunk states. cuda_backend.py computes it faster for bf16 and
fp16, to the same bits. GEMMs and rounding points are the contract's (docs/contract.md, "Gated delta rule"). BV, the
columns of V per program (a divisor of V), num_warps and num_stages are free.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ...runtime.launch import launch
from . import CHUNK


@triton.jit
def _start(CU, i, rows):
    """Return the first row of sequence i, clamped to [0, rows]."""
    return tl.minimum(tl.maximum(tl.load(CU + i).to(tl.int64), 0), rows)


@triton.jit
def _rows_of(P, row, rows, pitch, first, W: tl.constexpr, C: tl.constexpr):
    """Load C rows from `row` on and W columns from `first` on, as [C, W]; rows from `rows` on are zero."""
    r = row + tl.arange(0, C)
    offsets = r.to(tl.int64)[:, None] * pitch + (first + tl.arange(0, W))[None, :]
    return tl.load(P + offsets, mask=(r < rows)[:, None], other=0.0)


@triton.jit(do_not_specialize=["rows", "chunks", "heads", "group"])
def _back(
    Q,
    K_,
    W,
    DO,
    DV,
    G,
    GK,
    DHT,
    CU,
    DH,
    DH0,
    DV2,
    rows,
    chunks,
    heads,
    group,
    scale,
    unit,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    V_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute one sequence, head and slice of BV columns of V; `unit` converts gates to exponents of 2."""
    first = tl.program_id(0) * BV
    head = tl.program_id(1) % heads
    sequence = tl.program_id(1) // heads
    if CU is None:
        begin = sequence.to(tl.int64) * rows
        count = rows
        before = sequence * chunks
    else:
        begin = _start(CU, sequence, rows)
        count = tl.maximum(_start(CU, sequence + 1, rows) - begin, 0).to(tl.int32)
        before = 0
        for i in range(sequence):
            before += ((tl.maximum(_start(CU, i + 1, rows) - _start(CU, i, rows), 0) + C - 1) // C).to(tl.int32)
    key_heads = heads // group
    # Addresses of the first row of this sequence and head.
    q = Q + (begin * key_heads + head // group) * K
    k = K_ + (begin * key_heads + head // group) * K
    w = W + (begin * heads + head) * K
    do = DO + (begin * heads + head) * V
    dv = DV + (begin * heads + head) * V
    dv2 = DV2 + (begin * heads + head) * V
    of_k, of_v = tl.arange(0, K), first + tl.arange(0, BV)
    if V_FIRST:
        inner = of_k[:, None] + of_v[None, :] * K
    else:
        inner = of_k[:, None] * V + of_v[None, :]
    state = tl.program_id(1).to(tl.int64) * K * V
    if DHT is None:
        D = tl.zeros((K, BV), tl.float32)
    else:
        D = tl.load(DHT + state + inner)
    steps = (count + C - 1) // C
    for step in range(steps):
        chunk = steps - 1 - step
        row = chunk * C
        rounded = D.to(Q.dtype.element_ty)
        state_index = (before + chunk).to(tl.int64) * heads + head
        # With a wrong num_chunks, dh has no room for the chunks beyond it.
        tl.store(DH + state_index * K * V + inner, rounded, mask=(before + chunk < chunks) | (CU is None))

        x = tl.dot(_rows_of(k, row, count, key_heads * K, 0, K, C), rounded, input_precision=PRECISION)
        of_dv = tl.full((C,), 1.0, tl.float32)
        of_do = tl.full((C,), 1.0, tl.float32) * scale
        decay = tl.full((K,), 1.0, tl.float32)
        last = tl.minimum(row + C, count) - 1
        if G is not None:
            g = G + begin * heads + head
            r = tl.minimum(row + tl.arange(0, C), last)
            gates = tl.load(g + r.to(tl.int64) * heads)
            g_last = tl.load(g + last.to(tl.int64) * heads)
            of_dv = tl.exp2((g_last - gates) * unit)
            of_do = scale * tl.exp2(gates * unit)
            decay = tl.exp2(g_last * unit) * decay
        if GK is not None:
            decay = decay * tl.exp2(tl.load(GK + ((begin + last) * heads + head) * K + of_k) * unit)
        # fma instead of x + dv: the compiler folds `dot(a, b, 0) + c` into `dot(a, b, c)`, which sums in another order.
        x = tl.fma(
            tl.broadcast_to(of_dv[:, None], (C, BV)),
            x,
            _rows_of(dv, row, count, heads * V, first, BV, C).to(tl.float32),
        )
        new = x.to(Q.dtype.element_ty)
        r = row + tl.arange(0, C)
        tl.store(dv2 + r.to(tl.int64)[:, None] * heads * V + of_v[None, :], new, mask=(r < count)[:, None])

        scaled = _rows_of(do, row, count, heads * V, first, BV, C).to(tl.float32) * of_do[:, None]
        D = D * decay[:, None]
        D = tl.dot(
            tl.trans(_rows_of(q, row, count, key_heads * K, 0, K, C)),
            scaled.to(Q.dtype.element_ty),
            D,
            input_precision=PRECISION,
        )
        D = tl.dot(tl.trans(_rows_of(w, row, count, heads * K, 0, K, C)), new * -1.0, D, input_precision=PRECISION)
    if DH0 is not None:
        tl.store(DH0 + state + inner, D)


def bwd_dhu(
    q, k, w, do, dv, g, gk, dht, scale: float, cu_seqlens, state_v_first: bool, base2: bool, dh, dh0, dv2
) -> None:
    """Write dh, dh0 (unless None) and dv2."""
    q, k, w, do, dv = (t.contiguous() for t in (q, k, w, do, dv))
    key_dim, heads, value_dim = q.shape[3], *do.shape[2:]
    sequences = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    exact = q.dtype == torch.float32
    columns = 16 if exact and key_dim == 256 else 32
    launch(
        _back,
        (value_dim // columns, sequences * heads),
        (
            q,
            k,
            w,
            do,
            dv,
            g,
            gk,
            dht,
            cu_seqlens,
            dh,
            dh0,
            dv2,
            q.shape[1],
            dh.shape[1],
            heads,
            heads // q.shape[2],
            scale,
            1.0 if base2 else math.log2(math.e),
        ),
        {"num_warps": 4, "num_stages": 1},
        K=key_dim,
        V=value_dim,
        BV=columns,
        C=CHUNK,
        V_FIRST=state_v_first,
        PRECISION="ieee" if exact else "tf32",
    )
