"""Triton: rows of a tile are query positions times the heads of a group; keys in blocks from position 0.

One forward kernel serves training (packed) and rollout (paged): prefill, chunks and decode differ in the tile only.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ... import contract
from .._triton import EXACT, exp, fixed, next_power_of_2

KV_BLOCK = contract.KV_BLOCK["sm90"]


@triton.jit
def _find(STARTS, seqs, pid, BLOCK: tl.constexpr):
    """The sequence that tile `pid` belongs to: sequence s owns tiles from STARTS[s] // BLOCK + s on."""
    low = 0
    high = seqs
    while low + 1 < high:
        mid = (low + high) // 2
        if tl.load(STARTS + mid) // BLOCK + mid <= pid:
            low = mid
        else:
            high = mid
    return low


@triton.jit
def _forward(Q, K, V, O, M, L, Q_START, KV_LEN, TABLE, scale, seqs, sqt, sqh, skt, skh, svt, svh, table_row,
             PAGE: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
             BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, KVB: tl.constexpr, KEEP: tl.constexpr):
    pid, hk = tl.program_id(0), tl.program_id(1)
    s = _find(Q_START, seqs, pid, BLOCK_Q)
    q0 = tl.load(Q_START + s)
    q_len = tl.load(Q_START + s + 1) - q0
    first = (pid - (q0 // BLOCK_Q + s)) * BLOCK_Q
    if first >= q_len:
        return
    kv_len = q_len
    if PAGE > 0:
        kv_len = tl.load(KV_LEN + s)
    context = kv_len - q_len
    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, DP)
    pos = first + r // GROUP
    head = hk * GROUP + r % GROUP
    ok = (pos < q_len) & (r < BLOCK_Q * GROUP)
    token = (q0 + pos).to(tl.int64)
    q = tl.load(Q + token[:, None] * sqt + head[:, None] * sqh + d[None, :], mask=ok[:, None] & (d < D)[None, :], other=0.0)
    m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, DP), tl.float32)
    end = tl.minimum(kv_len, context + first + BLOCK_Q)
    for b in range(0, end, KVB):
        p = b + tl.arange(0, KVB)
        there = p < end
        if PAGE > 0:
            page = tl.load(TABLE + s.to(tl.int64) * table_row + p // PAGE, mask=there, other=0).to(tl.int64)
            row = page * PAGE + p % PAGE
        else:
            row = (q0 + p).to(tl.int64)
        k = tl.load(K + row[None, :] * skt + hk * skh + d[:, None], mask=there[None, :] & (d < D)[:, None], other=0.0)
        v = tl.load(V + row[:, None] * svt + hk * svh + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
        score = tl.dot(q, k, input_precision="ieee") * scale
        score = tl.where((p[None, :] <= (context + pos)[:, None]) & there[None, :], score, -float("inf"))
        top = tl.maximum(m, tl.max(score, axis=1))
        alpha = exp(m - top)
        e = exp(score - top[:, None])
        total = tl.sum(fixed(e), axis=1).to(tl.float32) * 1.1920928955078125e-07
        l = tl.fma(l, alpha, total)
        acc = tl.dot(e.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m = top
    o = O + (token[:, None] * HEADS + head[:, None]) * D + d[None, :]
    out = tl.div_rn(acc, tl.where(ok, l, 1.0)[:, None] + acc * 0.0)
    tl.store(o, out.to(O.dtype.element_ty), mask=ok[:, None] & (d < D)[None, :])
    if KEEP:
        tl.store(M + token * HEADS + head, m, mask=ok)
        tl.store(L + token * HEADS + head, l, mask=ok)


def forward(q, k, v, starts, scale):
    return _launch(q, k, v, starts, None, None, 0, scale, True)


def paged(q, k, v, block_table, q_start, seq_lens, block_size, scale):
    return _launch(q, k, v, q_start, seq_lens, block_table, block_size, scale, False)[0]


def _launch(q, k, v, q_start, kv_len, table, page, scale, keep, block_m=None):
    """table: int [B, max_blocks] with pages of `page` rows, or None where keys lie with the queries.
    block_m overrides the tile; tests use it to show that it changes no bit."""
    tokens, heads, dim = q.shape
    seqs, group = q_start.shape[0] - 1, heads // k.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    m, l = ((torch.empty(tokens, heads, dtype=torch.float32, device=q.device) for _ in range(2)) if keep else (None, None))
    if tokens:
        tile = 16 if q.dtype == torch.float32 or tokens <= 4 * seqs else 64
        block_m = max(block_m or tile, next_power_of_2(group))
        block_q = block_m // group
        grid = (tokens // block_q + seqs, k.shape[1])
        _forward[grid](q, k, v, out, m, l, q_start, kv_len, table, scale, seqs, q.stride(0), q.stride(1), k.stride(0),
                       k.stride(1), v.stride(0), v.stride(1), 0 if table is None else table.stride(0),
                       PAGE=page if table is not None else 0, GROUP=group, HEADS=heads, D=dim, DP=next_power_of_2(dim),
                       BLOCK_M=block_m, BLOCK_Q=block_q, KVB=KV_BLOCK, KEEP=keep, num_warps=4, num_stages=2, **EXACT)
    return out, m, l


@triton.jit
def _delta(DO, O, DELTA, rows, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    d = tl.arange(0, DP)
    ok = (r < rows)[:, None] & (d < D)[None, :]
    g = tl.load(DO + r[:, None] * D + d[None, :], mask=ok, other=0.0).to(tl.float32)
    o = tl.load(O + r[:, None] * D + d[None, :], mask=ok, other=0.0).to(tl.float32)
    tl.store(DELTA + r, tl.sum(g * o, axis=1), mask=r < rows)


@triton.jit
def _grad_q(Q, K, V, DO, M, L, DELTA, DQ, START, scale, seqs, sqt, sqh, skt, skh, svt, svh, GROUP: tl.constexpr,
            HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr):
    pid, h = tl.program_id(0), tl.program_id(1)
    hk = h // GROUP
    s = _find(START, seqs, pid, B)
    q0 = tl.load(START + s)
    n = tl.load(START + s + 1) - q0
    first = (pid - (q0 // B + s)) * B
    if first >= n:
        return
    i = first + tl.arange(0, B)
    d = tl.arange(0, DP)
    ok, dk = i < n, d < D
    t = (q0 + i).to(tl.int64)
    q = tl.load(Q + t[:, None] * sqt + h * sqh + d[None, :], mask=ok[:, None] & dk[None, :], other=0.0)
    g = tl.load(DO + (t[:, None] * HEADS + h) * D + d[None, :], mask=ok[:, None] & dk[None, :], other=0.0)
    m = tl.load(M + t * HEADS + h, mask=ok, other=0.0)
    l = tl.load(L + t * HEADS + h, mask=ok, other=1.0)
    delta = tl.load(DELTA + t * HEADS + h, mask=ok, other=0.0)
    dq = tl.zeros((B, DP), tl.float32)
    for b in range(0, tl.minimum(first + B, n), B):
        j = b + tl.arange(0, B)
        row = (q0 + j).to(tl.int64)
        there = j < n
        k = tl.load(K + row[:, None] * skt + hk * skh + d[None, :], mask=there[:, None] & dk[None, :], other=0.0)
        v = tl.load(V + row[None, :] * svt + hk * svh + d[:, None], mask=there[None, :] & dk[:, None], other=0.0)
        e = exp(tl.dot(q, tl.trans(k), input_precision="ieee") * scale - m[:, None])
        p = tl.where((j[None, :] <= i[:, None]) & ok[:, None], tl.div_rn(e, l[:, None] + e * 0.0), 0.0)
        ds = p * (tl.dot(g, v, input_precision="ieee") - delta[:, None]) * scale
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    tl.store(DQ + (t[:, None] * HEADS + h) * D + d[None, :], dq.to(DQ.dtype.element_ty), mask=ok[:, None] & dk[None, :])


@triton.jit
def _grad_kv(Q, K, V, DO, M, L, DELTA, DK, DV, START, scale, seqs, sqt, sqh, skt, skh, svt, svh, GROUP: tl.constexpr,
             HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr):
    pid, hk = tl.program_id(0), tl.program_id(1)
    s = _find(START, seqs, pid, B)
    q0 = tl.load(START + s)
    n = tl.load(START + s + 1) - q0
    first = (pid - (q0 // B + s)) * B
    if first >= n:
        return
    j = first + tl.arange(0, B)
    d = tl.arange(0, DP)
    there, dd = j < n, d < D
    row = (q0 + j).to(tl.int64)
    k = tl.load(K + row[:, None] * skt + hk * skh + d[None, :], mask=there[:, None] & dd[None, :], other=0.0)
    v = tl.load(V + row[:, None] * svt + hk * svh + d[None, :], mask=there[:, None] & dd[None, :], other=0.0)
    dk = tl.zeros((B, DP), tl.float32)
    dv = tl.zeros((B, DP), tl.float32)
    for h in range(hk * GROUP, (hk + 1) * GROUP):
        for b in range(first, n, B):
            i = b + tl.arange(0, B)
            t = (q0 + i).to(tl.int64)
            ok = i < n
            q = tl.load(Q + t[:, None] * sqt + h * sqh + d[None, :], mask=ok[:, None] & dd[None, :], other=0.0)
            g = tl.load(DO + (t[:, None] * HEADS + h) * D + d[None, :], mask=ok[:, None] & dd[None, :], other=0.0)
            m = tl.load(M + t * HEADS + h, mask=ok, other=0.0)
            l = tl.load(L + t * HEADS + h, mask=ok, other=1.0)
            delta = tl.load(DELTA + t * HEADS + h, mask=ok, other=0.0)
            e = exp(tl.dot(k, tl.trans(q), input_precision="ieee") * scale - m[None, :])
            p = tl.where((j[:, None] <= i[None, :]) & ok[None, :] & there[:, None], tl.div_rn(e, l[None, :] + e * 0.0), 0.0)
            dv = tl.dot(p.to(g.dtype), g, dv, input_precision="ieee")
            ds = p * (tl.dot(v, tl.trans(g), input_precision="ieee") - delta[None, :]) * scale
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    out = (row[:, None] * (HEADS // GROUP) + hk) * D + d[None, :]
    tl.store(DK + out, dk.to(DK.dtype.element_ty), mask=there[:, None] & dd[None, :])
    tl.store(DV + out, dv.to(DV.dtype.element_ty), mask=there[:, None] & dd[None, :])


def backward(q, k, v, starts, out, m, l, d_out, scale):
    tokens, heads, dim = q.shape
    seqs, group = starts.shape[0] - 1, heads // k.shape[1]
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    if tokens:
        delta = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
        dp = next_power_of_2(dim)
        _delta[(triton.cdiv(tokens * heads, 16),)](d_out, out, delta, tokens * heads, D=dim, DP=dp, R=16, num_warps=4, **EXACT)
        block = 16 if q.dtype == torch.float32 else 64
        strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1))
        shared = {"GROUP": group, "HEADS": heads, "D": dim, "DP": dp, "B": block, "num_warps": 4, "num_stages": 2} | EXACT
        tiles = tokens // block + seqs
        _grad_q[(tiles, heads)](q, k, v, d_out, m, l, delta, dq, starts, scale, seqs, *strides, **shared)
        _grad_kv[(tiles, k.shape[1])](q, k, v, d_out, m, l, delta, dk, dv, starts, scale, seqs, *strides, **shared)
    return dq, dk, dv
