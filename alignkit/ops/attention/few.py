"""Triton decode attention (split-KV): sequences of few queries and possibly many keys.

`_decode` cuts the list of all (tile, leaf) pairs of a KV head into equal runs, one per program. A program writes the
results of the tiles whose leaves all lie in its run. Of a tile that spans programs, the first program writes one merged
state to memory, and each later program writes one state per leaf. `_merge_leaves` merges these states in leaf order.

The arithmetic and the order of the merge are the contract's; common.py holds them. Free (schedule): the number of
programs, SEQS, AHEAD, and the sizes of STATES and RECORDS, which sharing.py computes. The fields of a record are
written by `_decode` and read by `_merge_leaves` alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import sharing
from .common import (
    RUNTIME_ARGS,
    attend,
    fill_rows,
    is_decode,
    keeps_offset,
    key_block,
    load_queries,
    merge_factors,
    read_state,
    span,
    write_result,
    write_state,
)

RECORD = tl.constexpr(sharing.RECORD)  # schedule: see sharing.py


@triton.jit
def _pdl_wait(PDL: tl.constexpr):
    """Wait for the previous kernel and let the next one launch, if launched with programmatic dependent launch.

    Must run before any access to global memory.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _count_leaves(
    STARTS, KV_LEN, s, seqs, tokens, width, max_queries, PAGE: tl.constexpr, BLOCK_Q: tl.constexpr, LEAF: tl.constexpr
):
    """Return the number of (tile, leaf) pairs of one KV head for sequences s; 0 for sequences of the tile kernel."""
    ok = s < seqs
    q0 = tl.minimum(tl.maximum(tl.load(STARTS + s, mask=ok, other=0), 0), tokens).to(tl.int32)
    q1 = tl.minimum(tl.maximum(tl.load(STARTS + s + 1, mask=ok, other=0), q0), tokens).to(tl.int32)
    kv_len = tl.load(KV_LEN + s, mask=ok, other=0)
    q_len = q1 - q0
    fits = (kv_len >= q_len) & (kv_len <= width * PAGE)
    kv_len = tl.where(fits & is_decode(q_len, kv_len, max_queries), kv_len, 0).to(tl.int32)
    return ((kv_len + LEAF - 1) // LEAF) * ((q_len + BLOCK_Q - 1) // BLOCK_Q)


@triton.jit
def _head_states(STATES, hk, parts, slots, STATE: tl.constexpr):
    """Return the address of a KV head's states: the leaf states of all programs, then one merged state per program."""
    return STATES + tl.cast(hk, tl.int64) * parts * slots * STATE


@triton.jit
def _first_state_index(part, parts, slots):
    """Return the index, among a head's states, of the merged state of the tile that program `part` begins."""
    return tl.cast(parts, tl.int64) * (slots - 1) + part


@triton.jit
def _sum_and_max(a, b, c, d):
    """Combine two (sum, max) pairs in a reduction."""
    return a + c, tl.maximum(b, d)


@triton.jit
def _sequences_before(leaves, start, item):
    """Return how many consecutive sequences end at or before leaf `item`, and the end of the last of them.

    `leaves` are the sequences' leaf counts; the first sequence begins at leaf `start`.
    """
    ends = start + tl.cumsum(leaves)
    done = ends <= item
    return tl.reduce((done.to(tl.int32), tl.where(done, ends, 0)), 0, _sum_and_max)


@triton.jit(do_not_specialize=RUNTIME_ARGS)
def _decode(
    Q,
    K,
    V,
    O,
    STATES,
    RECORDS,
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
    max_queries,
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
    PDL: tl.constexpr,
):
    """Compute one program's run of leaves of one KV head; each head has `parts` programs.

    Sequence lengths are read SEQS at a time; MORE: the batch has more than SEQS. STATE: numbers per state, 0 if no
    sequence is split. The program also zeroes its share of the padding rows and writes NaN to the rows of sequences
    whose length is invalid.
    """
    KV: tl.constexpr = HEADS // GROUP
    ROWS: tl.constexpr = BLOCK_Q * GROUP
    _pdl_wait(PDL)
    w = tl.program_id(0)
    hk = w % KV  # adjacent programs read adjacent heads of the same positions at about the same time
    part = w // KV
    tl.store(RECORDS + w * RECORD, 0)  # nothing to merge, unless set below
    begin, end = tl.load(STARTS), tl.load(STARTS + seqs)
    ids = tl.arange(0, SEQS)
    counts = _count_leaves(STARTS, KV_LEN, ids, seqs, tokens, width, max_queries, PAGE, BLOCK_Q, LEAF)
    total = tl.sum(counts.to(tl.int64))
    chunk_start = total.to(tl.int32)
    if MORE:
        for c in range(SEQS, seqs, SEQS):
            chunk = _count_leaves(STARTS, KV_LEN, c + ids, seqs, tokens, width, max_queries, PAGE, BLOCK_Q, LEAF)
            total += tl.sum(chunk.to(tl.int64))
    if (begin != 0) | (end > tokens):
        fill_rows(O, float("nan"), w, tokens, parts * KV, 0, HEADS * D, HEADS * D)
        return

    # The workspace holds max_leaves; the total exceeds it only if STARTS decreases.
    max_leaves = tl.cast(tokens, tl.int64) * ((width * PAGE + LEAF - 1) // LEAF)
    total = tl.where(total > max_leaves, 0, total).to(tl.int32)
    run = (total + parts - 1) // parts
    item = part * run
    stop = tl.minimum(item + run, total)
    # Index of the program's first leaf state. A program writes at most `run` leaf states. It also writes at most
    # slots - 1, because the first leaf of a sequence has none.
    own = part * tl.minimum(run, slots - 1)
    # The sequence of the run's first leaf, and where that sequence begins.
    s, seq_start = _sequences_before(counts, 0, item)
    if MORE:
        for c in range(SEQS, seqs, SEQS):
            chunk = _count_leaves(STARTS, KV_LEN, c + ids, seqs, tokens, width, max_queries, PAGE, BLOCK_Q, LEAF)
            done, end_of_done = _sequences_before(chunk, chunk_start, item)
            s += done
            seq_start = tl.maximum(seq_start, end_of_done)
            chunk_start += tl.sum(chunk)

    while item < stop:
        q0, q_len = span(STARTS, s, seqs, tokens)
        kv_len = tl.load(KV_LEN + s)
        fits = (kv_len >= q_len) & (kv_len <= width * PAGE) & is_decode(q_len, kv_len, max_queries)
        kv_len = tl.where(fits, kv_len, 0).to(tl.int32)
        leaves = (kv_len + LEAF - 1) // LEAF
        seq_leaves = leaves * ((q_len + BLOCK_Q - 1) // BLOCK_Q)
        if item < seq_start + seq_leaves:
            tile = (item - seq_start) // leaves
            leaf = item - seq_start - tile * leaves
            first = tile * BLOCK_Q
            take = tl.minimum(leaves - leaf, stop - item)
            context = kv_len - q_len
            r = tl.arange(0, BLOCK_M)
            pos = first + r // GROUP
            head = hk * GROUP + r % GROUP
            ok = (pos < q_len) & (r < ROWS)
            token = (q0 + pos).to(tl.int64)
            states = _head_states(STATES, hk, parts, slots, STATE)
            seq_table = TABLE + tl.cast(s, tl.int64) * table_row
            first_key = leaf * LEAF
            end_of_keys = tl.minimum((leaf + take) * LEAF, context + tl.minimum(q_len, first + BLOCK_Q))
            key_position, key_page = key_block(seq_table, first_key, end_of_keys, PAGE, KVB)
            tl.debug_barrier()  # keeps ptxas from serializing the loads of pages, queries and keys
            Z, L, A = attend(
                load_queries(Q, token, head, ok, sqt, sqh, D, DP),
                K + hk.to(tl.int64) * skh,
                V + hk.to(tl.int64) * svh,
                seq_table,
                key_position,
                key_page,
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
                write_state(states + _first_state_index(part, parts, slots) * STATE, Z, L, A, ok, ROWS, D, DP, STATE)
            elif leaf <= run:  # the previous program began the tile
                record = RECORDS + w * RECORD
                tl.store(record, leaf)
                tl.store(record + 1, leaves)
                tl.store(record + 2, context + first)
                tl.store(record + 3, q0 + first)
                tl.store(record + 4, tl.minimum(q_len - first, BLOCK_Q))
                tl.store(record + 5, own)
            item += take
        if item >= seq_start + seq_leaves:
            seq_start += seq_leaves
            s += 1

    # Rows without leaves: padding, and sequences of invalid length.
    fill_rows(O, 0.0, end.to(tl.int32) + w, tokens, parts * KV, 0, HEADS * D, HEADS * D)
    for s in range(w, seqs, parts * KV):
        q0, q_len = span(STARTS, s, seqs, tokens)
        kv_len = tl.load(KV_LEN + s)
        if (kv_len < q_len) | (kv_len > width * PAGE):
            fill_rows(O, float("nan"), q0, q0 + q_len, 1, 0, HEADS * D, HEADS * D)


@triton.jit
def _merge_next(
    STATES,
    Z,
    L,
    A,
    r,
    count,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    STATE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Merge the next min(AHEAD, count) leaves, whose states begin at STATES, into Z, L, A.

    If every leaf keeps Z, as is usual, the earlier sums have the factor 1. Skipping this multiplication leaves one fma
    per leaf on the dependency chain, with the same bits.
    """
    zs, ls, accs = (), (), ()
    all_keep = Z - Z == 0.0
    for x in tl.static_range(AHEAD):
        z, l, acc = read_state(STATES + x * STATE, r, x < count, ROWS, D, DP, STATE)
        zs += (z,)
        ls += (l,)
        accs += (acc,)
        all_keep &= keeps_offset(Z, z)
    if all_keep:
        # For x >= count, read_state returned the identity of the merge: beta is 0 and the sums are -0.
        for x in tl.static_range(AHEAD):
            beta = tl.exp2(Z - zs[x])
            L = tl.fma(ls[x], beta, L)
            A = tl.fma(accs[x], beta, A)
    else:
        for x in tl.static_range(AHEAD):
            offset, alpha, beta = merge_factors(Z, zs[x])
            L = tl.where(x < count, tl.fma(ls[x], beta, L * alpha), L)
            A = tl.where(x < count, tl.fma(accs[x], beta, A * alpha), A)
            Z = tl.where(x < count, offset, Z)
    return Z, L, A


@triton.jit(do_not_specialize=RUNTIME_ARGS)
def _merge_leaves(
    O,
    STATES,
    RECORDS,
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
    PDL: tl.constexpr,
):
    """Merge the states of a tile that spans programs of `_decode`, for one row of the tile, and write the result.

    The second program of such a tile writes a record to RECORDS:

    - the first leaf of the tile that the second program computes; 0: no record
    - the tile's leaf count
    - the position of the tile's first query, and its row in the batch
    - the tile's query count
    - the index of the state of that first leaf, which the states of later leaves follow

    PARTS = 0: each program of this grid reads the record of one program of `_decode`. PARTS > 0, if rows are fewer than
    programs: each searches all `parts` records, at most PARTS, for the record of its row. AHEAD: states loaded at once.
    """
    KV: tl.constexpr = HEADS // GROUP
    ROWS: tl.constexpr = BLOCK_Q * GROUP
    _pdl_wait(PDL)
    hk = tl.program_id(0) % KV
    part = tl.program_id(0) // KV + 1  # program 0 continues no tile
    if PARTS > 0:
        candidates = tl.arange(0, PARTS)
        records = RECORDS + (candidates * KV + hk) * RECORD
        continues = tl.load(records, mask=candidates < parts, other=0) > 0
        row = tl.load(records + 3, mask=candidates < parts, other=-1)
        part = tl.max(tl.where(continues & (row == tl.program_id(0) // KV), candidates, 0))
    RECORDS += (part * KV + hk) * RECORD
    leaf = tl.load(RECORDS)
    leaves = tl.load(RECORDS + 1)
    position = tl.load(RECORDS + 2)
    token = tl.load(RECORDS + 3)
    num_queries = tl.load(RECORDS + 4)
    state = tl.load(RECORDS + 5)
    r = tl.program_id(1)  # row of the tile
    if (leaf == 0) | (r >= num_queries * GROUP):  # no record, or beyond the tile's queries
        return
    visible = tl.minimum(leaves, (position + r // GROUP) // LEAF + 1)
    STATES = _head_states(STATES, hk, parts, slots, STATE)
    Z, L, A = read_state(STATES + _first_state_index(part - 1, parts, slots) * STATE, r, leaf > 0, ROWS, D, DP, STATE)
    STATES += tl.cast(state, tl.int64) * STATE
    for next in range(leaf, visible, AHEAD):
        Z, L, A = _merge_next(STATES, Z, L, A, r, visible - next, ROWS, D, DP, STATE, AHEAD)
        STATES += AHEAD * STATE
    d = tl.arange(0, DP)
    o = O + ((token + r // GROUP).to(tl.int64) * HEADS + hk * GROUP + r % GROUP) * D + d
    # + A * 0.0 broadcasts L, as in common.write_result.
    tl.store(o, tl.div_rn(A, L + A * 0.0).to(O.dtype.element_ty), mask=d < D)
