"""Triton: sequences of few queries and perhaps many keys, as when decoding. The leaves of all of them, one after the other, of
each head of keys are cut into equal runs, one for each program. What a program does not have whole it leaves in memory: of a first
part the joined state, of later ones that of each leaf; `_join_leaves` joins those in order. So which program does what changes
no bit."""

from __future__ import annotations

import triton
import triton.language as tl

from . import sharing
from .common import (
    VALUES,
    block,
    fill,
    is_few,
    meet,
    queries,
    read_state,
    span,
    stays,
    visit,
    write_result,
    write_state,
)

RUN = tl.constexpr(sharing.RUN)


@triton.jit
def _begin(OVERLAP: tl.constexpr):
    """The kernel before this one is done, and the next may be put on the GPU: it waits here in turn. To be called before any
    memory is looked at. OVERLAP: launched so that it may be there before its turn."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _leaves(
    STARTS, KV_LEN, s, seqs, tokens, width, most, PAGE: tl.constexpr, BLOCK_Q: tl.constexpr, LEAF: tl.constexpr
):
    """Of sequences s of a batch: how many leaves of one head tiles of queries visit."""
    ok = s < seqs
    q0 = tl.minimum(tl.maximum(tl.load(STARTS + s, mask=ok, other=0), 0), tokens).to(tl.int32)
    q1 = tl.minimum(tl.maximum(tl.load(STARTS + s + 1, mask=ok, other=0), q0), tokens).to(tl.int32)
    kv_len = tl.load(KV_LEN + s, mask=ok, other=0)
    q_len = q1 - q0
    fits = (kv_len >= q_len) & (kv_len <= width * PAGE)
    kv_len = tl.where(fits & is_few(q_len, kv_len, most), kv_len, 0).to(tl.int32)
    return ((kv_len + LEAF - 1) // LEAF) * ((q_len + BLOCK_Q - 1) // BLOCK_Q)


@triton.jit
def _states_of(STATES, hk, parts, slots, STATE: tl.constexpr):
    """A head's states: those of the leaves that a program goes on with, one program after the other; then of each, what it begins."""
    return STATES + tl.cast(hk, tl.int64) * parts * slots * STATE


@triton.jit
def _begun(part, parts, slots):
    """Which of a head's states is that of a tile which program `part` begins."""
    return tl.cast(parts, tl.int64) * (slots - 1) + part


@triton.jit
def _sum_and_most(a, b, c, d):
    return a + c, tl.maximum(b, d)


@triton.jit
def _earlier(leaves, passed, item):
    """How many of some sequences, which begin `passed` leaves after the first of all, end before leaf `item`, and where the
    last of these does."""
    ends = passed + tl.cumsum(leaves)
    done = ends <= item
    return tl.reduce((done.to(tl.int32), tl.where(done, ends, 0)), 0, _sum_and_most)


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
    parts,
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
    MORE: tl.constexpr,
    STATE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program's run, of the leaves of one head: there are `parts` for each head. It looks at SEQS sequences at a time; MORE:
    there are more of them. STATE: numbers of a state, 0 if no sequence has a second leaf. It also fills some of the rows that
    hold no query with zeros, and of those of a sequence that does not fit with NaN."""
    KV: tl.constexpr = HEADS // GROUP
    ROWS: tl.constexpr = BLOCK_Q * GROUP
    _begin(OVERLAP)
    w = tl.program_id(0)
    hk = w % KV  # neighbours read the same positions of their heads, which lie side by side, at about the same time
    part = w // KV
    tl.store(RUNS + w * RUN, 0)  # nothing to join, unless it says so below
    begin, end = tl.load(STARTS), tl.load(STARTS + seqs)
    each = tl.arange(0, SEQS)
    of_each = _leaves(STARTS, KV_LEN, each, seqs, tokens, width, most, PAGE, BLOCK_Q, LEAF)
    total = tl.sum(of_each.to(tl.int64))
    passed = total.to(tl.int32)
    if MORE:
        for c in range(SEQS, seqs, SEQS):
            more = _leaves(STARTS, KV_LEN, c + each, seqs, tokens, width, most, PAGE, BLOCK_Q, LEAF)
            total += tl.sum(more.to(tl.int64))
    if (begin != 0) | (end > tokens):
        fill(O, float("nan"), w, tokens, parts * KV, 0, HEADS * D, HEADS * D)
        return

    # More than there is memory for are only there if STARTS decreases.
    most_leaves = tl.cast(tokens, tl.int64) * ((width * PAGE + LEAF - 1) // LEAF)
    total = tl.where(total > most_leaves, 0, total).to(tl.int32)
    run = (total + parts - 1) // parts
    item = part * run
    stop = tl.minimum(item + run, total)
    # The first state of a program's. It has as many as a run has leaves, or all but the first of a sequence, whose rest one has then.
    own = part * tl.minimum(run, slots - 1)
    s, before = _earlier(of_each, 0, item)  # the sequence of the run's first leaf, and how many leaves are before that
    if MORE:
        for c in range(SEQS, seqs, SEQS):
            more = _leaves(STARTS, KV_LEN, c + each, seqs, tokens, width, most, PAGE, BLOCK_Q, LEAF)
            done, ends = _earlier(more, passed, item)
            s += done
            before = tl.maximum(before, ends)
            passed += tl.sum(more)

    while item < stop:
        q0, q_len = span(STARTS, s, seqs, tokens)
        kv_len = tl.load(KV_LEN + s)
        fits = (kv_len >= q_len) & (kv_len <= width * PAGE) & is_few(q_len, kv_len, most)
        kv_len = tl.where(fits, kv_len, 0).to(tl.int32)
        leaves = (kv_len + LEAF - 1) // LEAF
        there = leaves * ((q_len + BLOCK_Q - 1) // BLOCK_Q)
        if item < before + there:
            tile = (item - before) // leaves
            leaf = item - before - tile * leaves
            first = tile * BLOCK_Q
            take = tl.minimum(leaves - leaf, stop - item)
            context = kv_len - q_len
            r = tl.arange(0, BLOCK_M)
            pos = first + r // GROUP
            head = hk * GROUP + r % GROUP
            ok = (pos < q_len) & (r < ROWS)
            token = (q0 + pos).to(tl.int64)
            states = _states_of(STATES, hk, parts, slots, STATE)
            pages_of = TABLE + tl.cast(s, tl.int64) * table_row
            first_key = leaf * LEAF
            end_of_keys = tl.minimum((leaf + take) * LEAF, context + tl.minimum(q_len, first + BLOCK_Q))
            at, page_of = block(pages_of, first_key, end_of_keys, PAGE, KVB)
            tl.debug_barrier()  # or the assembler has queries wait for pages, and then keys for queries
            Z, L, A = visit(
                queries(Q, token, head, ok, sqt, sqh, D, DP),
                K + hk.to(tl.int64) * skh,
                V + hk.to(tl.int64) * svh,
                pages_of,
                at,
                page_of,
                states + tl.cast(own, tl.int64) * STATE,
                factor,
                q0,
                context,
                first,
                pos,
                ok,
                first_key,
                end_of_keys,
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
                STATE,
            )
            if take == leaves:
                write_result(O, token, head, L, A, ok, HEADS, D, DP)
            elif leaf == 0:
                write_state(states + _begun(part, parts, slots) * STATE, Z, L, A, ok, ROWS, D, DP, STATE)
            elif leaf <= run:  # the program before began the tile
                here = RUNS + w * RUN
                tl.store(here, leaf)
                tl.store(here + 1, leaves)
                tl.store(here + 2, context + first)
                tl.store(here + 3, q0 + first)
                tl.store(here + 4, tl.minimum(q_len - first, BLOCK_Q))
                tl.store(here + 5, own)
            item += take
        if item >= before + there:
            before += there
            s += 1

    # What no leaf is of.
    fill(O, 0.0, end.to(tl.int32) + w, tokens, parts * KV, 0, HEADS * D, HEADS * D)
    for s in range(w, seqs, parts * KV):
        q0, q_len = span(STARTS, s, seqs, tokens)
        kv_len = tl.load(KV_LEN + s)
        if (kv_len < q_len) | (kv_len > width * PAGE):
            fill(O, float("nan"), q0, q0 + q_len, 1, 0, HEADS * D, HEADS * D)


@triton.jit
def _join_next(
    STATES,
    Z,
    L,
    A,
    r,
    there,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    STATE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """The next AHEAD leaves, or `there` if that is less, joined to Z, L, A. STATES: of the first of them. In most cases Z stays as it is,
    so the sums of the leaves before are multiplied by 1, which need not be done: their next ones then wait for one operation."""
    zs, ls, accs = (), (), ()
    all_stay = Z - Z == 0.0
    for x in tl.static_range(AHEAD):
        z, l, acc = read_state(STATES + x * STATE, r, x < there, ROWS, D, DP, STATE)
        zs += (z,)
        ls += (l,)
        accs += (acc,)
        all_stay &= stays(Z, z)
    if all_stay:
        for x in tl.static_range(AHEAD):
            after = tl.exp2(Z - zs[x])
            L = tl.fma(ls[x], after, L)
            A = tl.fma(accs[x], after, A)
    else:
        for x in tl.static_range(AHEAD):
            to, before, after = meet(Z, zs[x])
            L = tl.where(x < there, tl.fma(ls[x], after, L * before), L)
            A = tl.where(x < there, tl.fma(accs[x], after, A * before), A)
            Z = tl.where(x < there, to, Z)
    return Z, L, A


@triton.jit(do_not_specialize=VALUES)
def _join_leaves(
    O,
    STATES,
    RUNS,
    slots,
    parts,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    LEAF: tl.constexpr,
    STATE: tl.constexpr,
    DP: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """What a program of `_few` began and one and perhaps more after it finished, of one query and head. The first of these left in
    RUNS: the leaf that it went on with, else 0; how many leaves the tile has; position and row of its first query, how many
    queries it has; which one its state of that leaf is among the head's, in which later leaves follow. Of a head's `parts` programs,
    whoever joins takes one, or, if PARTS is not 0, as there are fewer rows, looks at all of them (PARTS or fewer) for that of
    one row. Of one row alone, it is the second program. AHEAD: states that are on their way at a time."""
    KV: tl.constexpr = HEADS // GROUP
    ROWS: tl.constexpr = BLOCK_Q * GROUP
    _begin(OVERLAP)
    hk = tl.program_id(0) % KV
    part = tl.program_id(0) // KV + 1  # nobody began what the first goes on with
    if PARTS > 0:
        each = tl.arange(0, PARTS)
        of_each = RUNS + (each * KV + hk) * RUN
        goes_on = tl.load(of_each, mask=each < parts, other=0) > 0
        row = tl.load(of_each + 3, mask=each < parts, other=-1)
        part = tl.max(tl.where(goes_on & (row == tl.program_id(0) // KV), each, 0))
    RUNS += (part * KV + hk) * RUN
    leaf = tl.load(RUNS)
    leaves = tl.load(RUNS + 1)
    position = tl.load(RUNS + 2)
    token = tl.load(RUNS + 3)
    have = tl.load(RUNS + 4)
    at = tl.load(RUNS + 5)
    r = tl.program_id(1)  # of the tile's rows
    if (leaf == 0) | (r >= have * GROUP):  # nothing, or beyond the tile's queries
        return
    seen = tl.minimum(leaves, (position + r // GROUP) // LEAF + 1)
    STATES = _states_of(STATES, hk, parts, slots, STATE)
    Z, L, A = read_state(STATES + _begun(part - 1, parts, slots) * STATE, r, leaf > 0, ROWS, D, DP, STATE)
    STATES += tl.cast(at, tl.int64) * STATE
    for next in range(leaf, seen, AHEAD):
        Z, L, A = _join_next(STATES, Z, L, A, r, seen - next, ROWS, D, DP, STATE, AHEAD)
        STATES += AHEAD * STATE
    d = tl.arange(0, DP)
    o = O + ((token + r // GROUP).to(tl.int64) * HEADS + hk * GROUP + r % GROUP) * D + d
    tl.store(o, tl.div_rn(A, L + A * 0.0).to(O.dtype.element_ty), mask=d < D)
