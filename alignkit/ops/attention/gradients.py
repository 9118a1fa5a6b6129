"""Triton: the gradients of attention, over tiles of queries and tiles of keys."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import VALUES, fill, find, queries, rows, span, statistics


@triton.jit(do_not_specialize=VALUES)
def _delta(
    DO, O, DELTA, STARTS, tokens, seqs, pads, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr
):
    """The sum of dO times O over a head, by query: fp32, in one order for every query."""
    if tl.load(STARTS + seqs) != tokens:
        return
    h = tl.program_id(0) % HEADS
    tile = tl.program_id(0) // HEADS
    s = find(STARTS, seqs, tile, R)
    q0, q_len = span(STARTS, s, seqs, tokens)
    pos = (tile - (q0 // R + s)) * R + tl.arange(0, R)
    ok = (pos >= 0) & (pos < q_len)
    token = (q0 + pos).to(tl.int64)
    head = tl.zeros((R,), tl.int32) + h
    g = queries(DO, token, head, ok, HEADS * D, D, D, DP).to(tl.float32)
    o = queries(O, token, head, ok, HEADS * D, D, D, DP).to(tl.float32)
    tl.store(DELTA + statistics(q0, s, h, pads) + pos, tl.sum(g * o, axis=1), mask=ok)


@triton.jit(do_not_specialize=VALUES)
def _grad_q(
    Q,
    K,
    V,
    DO,
    SHIFT,
    DELTA,
    DQ,
    STARTS,
    factor,
    scale,
    tokens,
    seqs,
    tiles,
    pads,
    sqh,
    skh,
    svh,
    sqt: tl.constexpr,
    skt: tl.constexpr,
    svt: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Tiles of queries as in `_tiles`, over their keys ascending."""
    hk = tl.program_id(0) % (HEADS // GROUP)
    tile = tiles - 1 - tl.program_id(0) // (HEADS // GROUP)
    if (tl.load(STARTS) != 0) | (tl.load(STARTS + seqs) != tokens):
        fill(DQ, float("nan"), tile, tokens, tiles, hk, GROUP * D, HEADS * D)
        return
    s = find(STARTS, seqs, tile, BLOCK_Q)
    q0, q_len = span(STARTS, s, seqs, tokens)
    first = (tile - (q0 // BLOCK_Q + s)) * BLOCK_Q
    if (first < 0) | (first >= q_len):
        return
    r = tl.arange(0, BLOCK_M)
    pos = first + r // GROUP
    head = hk * GROUP + r % GROUP
    ok = (pos < q_len) & (r < BLOCK_Q * GROUP)
    token = (q0 + pos).to(tl.int64)
    q = queries(Q, token, head, ok, sqt, sqh, D, DP)
    g = queries(DO, token, head, ok, HEADS * D, D, D, DP)
    at = statistics(q0, s, head, pads) + pos
    shift = tl.load(SHIFT + at, mask=ok, other=0.0)
    delta = tl.load(DELTA + at, mask=ok, other=0.0)
    K += hk.to(tl.int64) * skh
    V += hk.to(tl.int64) * svh
    dq = tl.zeros((BLOCK_M, DP), tl.float32)
    end = tl.minimum(q_len, first + BLOCK_Q)
    for b in range(0, end, BLOCK_N):
        j = b + tl.arange(0, BLOCK_N)
        row = q0 + tl.minimum(j, end - 1)
        k = rows(K, row, skt, D, DP)
        v = rows(V, row, svt, D, DP)
        p = tl.exp2(tl.fma(tl.dot(q, tl.trans(k), input_precision="ieee"), factor, shift[:, None]))
        if b + BLOCK_N > first + 1:
            p = tl.where(j[None, :] <= pos[:, None], p, 0.0)
        ds = p * (tl.dot(g, tl.trans(v), input_precision="ieee") - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    d = tl.arange(0, DP)
    out = DQ + (token[:, None] * HEADS + head[:, None]) * D + d[None, :]
    tl.store(out, (dq * scale).to(DQ.dtype.element_ty), mask=ok[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=VALUES)
def _grad_kv(
    Q,
    K,
    V,
    DO,
    SHIFT,
    DELTA,
    DK,
    DV,
    STARTS,
    factor,
    scale,
    tokens,
    seqs,
    tiles,
    pads,
    sqh,
    skh,
    svh,
    sqt: tl.constexpr,
    skt: tl.constexpr,
    svt: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Tiles of keys, over the queries that see them ascending, one head of the group after the other."""
    tl.static_assert(BLOCK_N % BLOCK_I == 0, "a block of queries would end beyond the sequence's statistics")
    KV: tl.constexpr = HEADS // GROUP
    hk = tl.program_id(0) % KV
    tile = tl.program_id(0) // KV
    if (tl.load(STARTS) != 0) | (tl.load(STARTS + seqs) != tokens):
        fill(DK, float("nan"), tile, tokens, tiles, hk, D, KV * D)
        fill(DV, float("nan"), tile, tokens, tiles, hk, D, KV * D)
        return
    s = find(STARTS, seqs, tile, BLOCK_N)
    q0, n = span(STARTS, s, seqs, tokens)
    first = (tile - (q0 // BLOCK_N + s)) * BLOCK_N
    if (first < 0) | (first >= n):
        return
    j = first + tl.arange(0, BLOCK_N)
    row = q0 + tl.minimum(j, n - 1)
    k = rows(K + hk.to(tl.int64) * skh, row, skt, D, DP)
    v = rows(V + hk.to(tl.int64) * svh, row, svt, D, DP)
    dk = tl.zeros((BLOCK_N, DP), tl.float32)
    dv = tl.zeros((BLOCK_N, DP), tl.float32)
    blocks = tl.cdiv(n - first, BLOCK_I)
    for b in range(GROUP * blocks):
        h = hk * GROUP + b // blocks
        i0 = first + b % blocks * BLOCK_I
        i = i0 + tl.arange(0, BLOCK_I)
        t = q0 + tl.minimum(i, n - 1)
        q = rows(Q + h.to(tl.int64) * sqh, t, sqt, D, DP)
        g = rows(DO + h * D, t, HEADS * D, D, DP)
        at = statistics(q0, s, h, pads) + i  # beyond the end: -inf and 0, which add nothing
        shift = tl.load(SHIFT + at)
        delta = tl.load(DELTA + at)
        p = tl.exp2(tl.fma(tl.dot(k, tl.trans(q), input_precision="ieee"), factor, shift[None, :]))
        if i0 < first + BLOCK_N:
            p = tl.where(j[:, None] <= i[None, :], p, 0.0)
        dv = tl.dot(p.to(g.dtype), g, dv, input_precision="ieee")
        ds = p * (tl.dot(v, tl.trans(g), input_precision="ieee") - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    d = tl.arange(0, DP)
    out = ((q0 + j).to(tl.int64)[:, None] * KV + hk) * D + d[None, :]
    ok = (j < n)[:, None] & (d < D)[None, :]
    tl.store(DK + out, (dk * scale).to(DK.dtype.element_ty), mask=ok)
    tl.store(DV + out, dv.to(DV.dtype.element_ty), mask=ok)
