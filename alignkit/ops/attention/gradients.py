"""Triton attention backward: dQ over tiles of queries, dK and dV over tiles of keys.

The order of summation is the contract's (docs/contract.md, "Attention"): dQ over ascending keys, dK and dV over
ascending queries, one head of the GQA group after another. The final `+ 0.0` is the contract's too: without it, the
sign of a sum that underflows would depend on the masked keys and queries of a tile.
Tile sizes change no bits, with two limits: BLOCK_I must divide BLOCK_N and PAD. `_delta`'s R and num_warps are fixed,
because they determine the order of `tl.sum`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import PAD, RUNTIME_ARGS, fill_rows, find_sequence, load_queries, load_rows, span, statistics_offset


@triton.jit(do_not_specialize=RUNTIME_ARGS)
def _delta(
    DO, O, DELTA, STARTS, tokens, seqs, pads, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr
):
    """Compute delta, the row sums of dO * O per query and head, in fp32 and in the same order for every query."""
    if tl.load(STARTS + seqs) != tokens:
        return
    h = tl.program_id(0) % HEADS
    tile = tl.program_id(0) // HEADS
    s = find_sequence(STARTS, seqs, tile, R)
    q0, q_len = span(STARTS, s, seqs, tokens)
    pos = (tile - (q0 // R + s)) * R + tl.arange(0, R)
    ok = (pos >= 0) & (pos < q_len)
    token = (q0 + pos).to(tl.int64)
    head = tl.zeros((R,), tl.int32) + h
    g = load_queries(DO, token, head, ok, HEADS * D, D, D, DP).to(tl.float32)
    o = load_queries(O, token, head, ok, HEADS * D, D, D, DP).to(tl.float32)
    tl.store(DELTA + statistics_offset(q0, s, h, pads) + pos, tl.sum(g * o, axis=1), mask=ok)


@triton.jit(do_not_specialize=RUNTIME_ARGS)
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
    """Compute dQ of one tile of queries (tiled as in `_tiles`) over its keys in ascending order."""
    hk = tl.program_id(0) % (HEADS // GROUP)
    tile = tiles - 1 - tl.program_id(0) // (HEADS // GROUP)
    if (tl.load(STARTS) != 0) | (tl.load(STARTS + seqs) != tokens):
        fill_rows(DQ, float("nan"), tile, tokens, tiles, hk, GROUP * D, HEADS * D)
        return
    s = find_sequence(STARTS, seqs, tile, BLOCK_Q)
    q0, q_len = span(STARTS, s, seqs, tokens)
    first = (tile - (q0 // BLOCK_Q + s)) * BLOCK_Q
    if (first < 0) | (first >= q_len):
        return
    r = tl.arange(0, BLOCK_M)
    pos = first + r // GROUP
    head = hk * GROUP + r % GROUP
    ok = (pos < q_len) & (r < BLOCK_Q * GROUP)
    token = (q0 + pos).to(tl.int64)
    q = load_queries(Q, token, head, ok, sqt, sqh, D, DP)
    g = load_queries(DO, token, head, ok, HEADS * D, D, D, DP)
    statistics = statistics_offset(q0, s, head, pads) + pos
    shift = tl.load(SHIFT + statistics, mask=ok, other=0.0)
    delta = tl.load(DELTA + statistics, mask=ok, other=0.0)
    K += hk.to(tl.int64) * skh
    V += hk.to(tl.int64) * svh
    dq = tl.zeros((BLOCK_M, DP), tl.float32)
    end = tl.minimum(q_len, first + BLOCK_Q)
    for b in range(0, end, BLOCK_N):
        j = b + tl.arange(0, BLOCK_N)
        row = q0 + tl.minimum(j, end - 1)
        k = load_rows(K, row, skt, D, DP)
        v = load_rows(V, row, svt, D, DP)
        p = tl.exp2(tl.fma(tl.dot(q, tl.trans(k), input_precision="ieee"), factor, shift[:, None]))
        if b + BLOCK_N > first + 1:
            p = tl.where(j[None, :] <= pos[:, None], p, 0.0)
        ds = p * (tl.dot(g, tl.trans(v), input_precision="ieee") - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    d = tl.arange(0, DP)
    out = DQ + (token[:, None] * HEADS + head[:, None]) * D + d[None, :]
    tl.store(out, ((dq + 0.0) * scale).to(DQ.dtype.element_ty), mask=ok[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=RUNTIME_ARGS)
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
    """Compute dK and dV of one tile of keys: heads of the GQA group one after another, queries ascending."""
    tl.static_assert(BLOCK_N % BLOCK_I == 0, "BLOCK_N must be a multiple of BLOCK_I")
    tl.static_assert(PAD % BLOCK_I == 0, "BLOCK_I must divide PAD: statistics are padded to PAD")
    KV: tl.constexpr = HEADS // GROUP
    hk = tl.program_id(0) % KV
    tile = tl.program_id(0) // KV
    if (tl.load(STARTS) != 0) | (tl.load(STARTS + seqs) != tokens):
        fill_rows(DK, float("nan"), tile, tokens, tiles, hk, D, KV * D)
        fill_rows(DV, float("nan"), tile, tokens, tiles, hk, D, KV * D)
        return
    s = find_sequence(STARTS, seqs, tile, BLOCK_N)
    q0, n = span(STARTS, s, seqs, tokens)
    first = (tile - (q0 // BLOCK_N + s)) * BLOCK_N
    if (first < 0) | (first >= n):
        return
    j = first + tl.arange(0, BLOCK_N)
    row = q0 + tl.minimum(j, n - 1)
    k = load_rows(K + hk.to(tl.int64) * skh, row, skt, D, DP)
    v = load_rows(V + hk.to(tl.int64) * svh, row, svt, D, DP)
    dk = tl.zeros((BLOCK_N, DP), tl.float32)
    dv = tl.zeros((BLOCK_N, DP), tl.float32)
    blocks = tl.cdiv(n - first, BLOCK_I)
    for b in range(GROUP * blocks):
        h = hk * GROUP + b // blocks
        i0 = first + b % blocks * BLOCK_I
        i = i0 + tl.arange(0, BLOCK_I)
        t = q0 + tl.minimum(i, n - 1)
        q = load_rows(Q + h.to(tl.int64) * sqh, t, sqt, D, DP)
        g = load_rows(DO + h * D, t, HEADS * D, D, DP)
        # Beyond the last query SHIFT is -inf and DELTA is 0, so p and ds are 0.
        statistics = statistics_offset(q0, s, h, pads) + i
        shift = tl.load(SHIFT + statistics)
        delta = tl.load(DELTA + statistics)
        p = tl.exp2(tl.fma(tl.dot(k, tl.trans(q), input_precision="ieee"), factor, shift[None, :]))
        if i0 < first + BLOCK_N:
            p = tl.where(j[:, None] <= i[None, :], p, 0.0)
        dv = tl.dot(p.to(g.dtype), g, dv, input_precision="ieee")
        ds = p * (tl.dot(v, tl.trans(g), input_precision="ieee") - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    d = tl.arange(0, DP)
    out = ((q0 + j).to(tl.int64)[:, None] * KV + hk) * D + d[None, :]
    ok = (j < n)[:, None] & (d < D)[None, :]
    tl.store(DK + out, ((dk + 0.0) * scale).to(DK.dtype.element_ty), mask=ok)
    tl.store(DV + out, (dv + 0.0).to(DV.dtype.element_ty), mask=ok)
