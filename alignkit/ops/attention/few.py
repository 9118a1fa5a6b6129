"""Triton: sequences of few queries and perhaps many keys, as when decoding. The leaves of all of them, one after the other,
are cut into equal runs, one for each program. What a program does not have whole it leaves in memory: of a first part the
joined state, of later ones that of each leaf; `_join_leaves` joins those in order. So which program does what changes no bit."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import VALUES, fill, is_few, join, queries, span, visit, write_result, write_state

RUN = tl.constexpr(8)
"""Words that a program leaves for `_join_leaves`: see there."""


@triton.jit
def _leaves(
    STARTS, KV_LEN, s, seqs, tokens, width, most, PAGE: tl.constexpr, BLOCK_Q: tl.constexpr, LEAF: tl.constexpr
):
    """Of sequences s of a batch: rows and leaves of one head, how many tiles of queries visit these, and whether it fits."""
    ok = s < seqs
    q0 = tl.minimum(tl.maximum(tl.load(STARTS + s, mask=ok, other=0), 0), tokens).to(tl.int32)
    q1 = tl.minimum(tl.maximum(tl.load(STARTS + s + 1, mask=ok, other=0), q0), tokens).to(tl.int32)
    kv_len = tl.load(KV_LEN + s, mask=ok, other=0)
    q_len = q1 - q0
    fits = (kv_len >= q_len) & (kv_len <= width * PAGE)
    kv_len = tl.where(fits & is_few(q_len, kv_len, most), kv_len, 0).to(tl.int32)
    return (kv_len + LEAF - 1) // LEAF, (q_len + BLOCK_Q - 1) // BLOCK_Q, fits


@triton.jit(do_not_specialize=VALUES)
def _few(
    Q,
    K,
    V,
    O,
    STATES,
    RUNS,
    STARTS,
    KV_LEN,
    TABLE,
    factor,
    tokens,
    seqs,
    programs,
    slots,
    pages,
    width,
    table_row,
    most,
    sqh,
    skh,
    svh,
    sqt: tl.constexpr,
    skt: tl.constexpr,
    svt: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    KVB: tl.constexpr,
    LEAF: tl.constexpr,
    SEQS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One program's run; not SPLIT: no sequence has a second leaf. It also fills some of the rows that hold no query with
    zeros, and of those of a sequence that does not fit with NaN."""
    KV: tl.constexpr = HEADS // GROUP
    ROWS: tl.constexpr = BLOCK_Q * GROUP
    STATE: tl.constexpr = ROWS * (D + 4)
    w = tl.program_id(0)
    tl.store(RUNS + w * RUN, 0)  # nothing to join, unless it says so below
    tl.store(RUNS + w * RUN + 1, 0)
    begin, end = tl.load(STARTS), tl.load(STARTS + seqs)
    total = tl.zeros((), tl.int64)
    wrong = 0
    for c in range(0, seqs, SEQS):
        leaves, tiles, fits = _leaves(
            STARTS, KV_LEN, c + tl.arange(0, SEQS), seqs, tokens, width, most, PAGE, BLOCK_Q, LEAF
        )
        total += tl.sum((leaves * tiles).to(tl.int64)) * KV
        wrong += tl.sum((fits == 0).to(tl.int32))
    if (begin != 0) | (end > tokens):
        fill(O, float("nan"), w, tokens, programs, 0, HEADS * D, HEADS * D)
        return
    fill(O, 0.0, end.to(tl.int32) + w, tokens, programs, 0, HEADS * D, HEADS * D)
    if wrong > 0:
        for s in range(w, seqs, programs):
            q0, q_len = span(STARTS, s, seqs, tokens)
            kv_len = tl.load(KV_LEN + s)
            if (kv_len < q_len) | (kv_len > width * PAGE):
                fill(O, float("nan"), q0, q0 + q_len, 1, 0, HEADS * D, HEADS * D)

    # More than there is memory for are only there if STARTS decreases.
    most_leaves = tl.cast(tokens, tl.int64) * KV * ((width * PAGE + LEAF - 1) // LEAF)
    total = tl.where(total > most_leaves, 0, total).to(tl.int32)
    run = (total + programs - 1) // programs
    item = w * run
    stop = tl.minimum(item + run, total)
    s = 0  # the sequence of the run's first leaf, and how many leaves are before that
    before = 0
    passed = 0
    for c in range(0, seqs, SEQS):
        at = c + tl.arange(0, SEQS)
        leaves, tiles, fits = _leaves(STARTS, KV_LEN, at, seqs, tokens, width, most, PAGE, BLOCK_Q, LEAF)
        leaves = leaves * tiles * KV
        ends = passed + tl.cumsum(leaves)
        earlier = (ends <= item) & (at < seqs)
        s += tl.sum(earlier.to(tl.int32))
        before = tl.maximum(before, tl.max(tl.where(earlier, ends, 0)))
        passed += tl.sum(leaves)

    begun = item
    while item < stop:
        q0, q_len = span(STARTS, s, seqs, tokens)
        kv_len = tl.load(KV_LEN + s)
        fits = (kv_len >= q_len) & (kv_len <= width * PAGE) & is_few(q_len, kv_len, most)
        kv_len = tl.where(fits, kv_len, 0).to(tl.int32)
        leaves = (kv_len + LEAF - 1) // LEAF
        there = leaves * KV * ((q_len + BLOCK_Q - 1) // BLOCK_Q)
        if item < before + there:
            leaf = (item - before) % leaves
            hk = (item - before) // leaves % KV
            first = (item - before) // leaves // KV * BLOCK_Q
            take = tl.minimum(leaves - leaf, stop - item)
            context = kv_len - q_len
            r = tl.arange(0, BLOCK_M)
            pos = first + r // GROUP
            head = hk * GROUP + r % GROUP
            ok = (pos < q_len) & (r < ROWS)
            token = (q0 + pos).to(tl.int64)
            states = STATES + tl.cast(w, tl.int64) * slots * STATE
            M, L, A = visit(
                queries(Q, token, head, ok, sqt, sqh, D, DP),
                K + hk.to(tl.int64) * skh,
                V + hk.to(tl.int64) * svh,
                TABLE + tl.cast(s, tl.int64) * table_row,
                states,
                factor,
                q0,
                context,
                first,
                pos,
                ok,
                leaf * LEAF,
                tl.minimum((leaf + take) * LEAF, context + tl.minimum(q_len, first + BLOCK_Q)),
                pages,
                skt,
                svt,
                PAGE,
                ROWS,
                D,
                DP,
                BLOCK_M,
                KVB,
                LEAF,
                SPLIT,
            )
            if take == leaves:
                write_result(O, token, head, L, A, ok, HEADS, D, DP)
            elif leaf == 0:
                write_state(states + (slots - 1) * STATE, M, L, A, ok, ROWS, D, DP)
            elif item == begun:
                here = RUNS + w * RUN
                tl.store(here, leaf)
                tl.store(here + 1, run)
                tl.store(here + 2, leaves)
                tl.store(here + 3, context + first)
                tl.store(here + 4, q0 + first)
                tl.store(here + 5, tl.minimum(q_len - first, BLOCK_Q))
                tl.store(here + 6, hk)
            item += take
        else:
            before += there
            s += 1


@triton.jit(do_not_specialize=VALUES)
def _join_leaves(
    O,
    STATES,
    RUNS,
    factor,
    slots,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    LEAF: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """What program w - 1 of `_few` began and others finished: some rows and columns of the results. Program w left in RUNS: the leaf that
    its run begins with, 0 if that is the first of a tile; how many leaves a run has, and the tile; position and row of the
    tile's first query, how many queries it has, its head of keys."""
    ROWS: tl.constexpr = BLOCK_Q * GROUP
    STATE: tl.constexpr = ROWS * (D + 4)
    w = tl.program_id(0)
    leaf = tl.load(RUNS + w * RUN)
    run = tl.load(RUNS + w * RUN + 1)
    if (leaf == 0) | (leaf > run):
        return
    leaves = tl.load(RUNS + w * RUN + 2)
    position = tl.load(RUNS + w * RUN + 3)
    token = tl.load(RUNS + w * RUN + 4)
    have = tl.load(RUNS + w * RUN + 5)
    hk = tl.load(RUNS + w * RUN + 6)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    ok = (r < ROWS) & (r // GROUP < have)
    inside = ok[:, None] & (d < D)[None, :]
    last = STATES + (tl.cast(w, tl.int64) * slots - 1) * STATE + r * (D + 4)
    M = tl.load(last + D, mask=ok, other=0.0)
    L = tl.load(last + D + 1, mask=ok, other=1.0)
    A = tl.load(last[:, None] + d[None, :], mask=inside, other=0.0)
    at = tl.cast(w, tl.int64) * slots  # the slot of the next leaf, how many of its program's are before it
    index = 0
    for b in range(leaf, leaves, AHEAD):
        for x in tl.static_range(AHEAD):  # unrolled, so that loads are under way before the first of them is needed
            seen = ok & ((b + x) * LEAF <= position + r // GROUP)
            state = STATES + (at + index) * STATE + r * (D + 4)
            m = tl.load(state + D, mask=seen, other=0.0)
            l = tl.load(state + D + 1, mask=seen, other=0.0)
            acc = tl.load(state[:, None] + d[None, :], mask=seen[:, None] & (d < D)[None, :], other=0.0)
            M, L, A = join(M, L, A, m, l, acc, factor, seen)
            index += 1
            at = tl.where(index == run, at + slots, at)
            index = tl.where(index == run, 0, index)
    rows = (token + r // GROUP).to(tl.int64)
    o = O + (rows[:, None] * HEADS + (hk * GROUP + r % GROUP)[:, None]) * D + d[None, :]
    tl.store(o, tl.div_rn(A, L[:, None] + A * 0.0).to(O.dtype.element_ty), mask=inside)
