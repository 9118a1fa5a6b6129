"""Triton attention over tiles of queries: training, and prefill over a paged cache.

common.py holds the arithmetic and its order. KVB and LEAF are the contract's; BLOCK_M and BLOCK_Q are free.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import (
    RUNTIME_ARGS,
    attend,
    fill_rows,
    find_sequence,
    is_decode,
    key_block,
    load_queries,
    span,
    statistics_offset,
    write_result,
)


@triton.jit(do_not_specialize=RUNTIME_ARGS)
def _tiles(
    Q,
    K,
    V,
    O,
    SHIFT,
    STARTS,
    KV_LEN,
    TABLE,
    factor,
    tokens,
    seqs,
    tiles,
    pads,
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
):
    """Compute one tile of queries of one KV head over all of its leaves.

    PAGE = 0: all sequences of a packed batch; SHIFT receives the statistics for the backward pass. PAGE > 0: the
    sequences of a paged cache that are not `is_decode`. The last tiles have the most keys and are scheduled first.
    """
    hk = tl.program_id(0) % (HEADS // GROUP)
    tile = tiles - 1 - tl.program_id(0) // (HEADS // GROUP)
    begin, end = tl.load(STARTS), tl.load(STARTS + seqs)
    if (begin != 0) | (end > tokens) | ((PAGE == 0) & (end != tokens)):
        if PAGE == 0:  # with a cache the decode kernel fills the rows
            fill_rows(O, float("nan"), tile, tokens, tiles, hk, GROUP * D, HEADS * D)
    elif seqs > 0:
        s = find_sequence(STARTS, seqs, tile, BLOCK_Q)
        q0, q_len = span(STARTS, s, seqs, tokens)
        first = (tile - (q0 // BLOCK_Q + s)) * BLOCK_Q
        context = 0
        fits = True
        if PAGE > 0:
            kv_len = tl.load(KV_LEN + s)
            fits = (kv_len >= q_len) & (kv_len <= width * PAGE) & (is_decode(q_len, kv_len, max_queries) == 0)
            context = kv_len.to(tl.int32) - q_len
        if fits & (first >= 0) & (first < q_len):
            r = tl.arange(0, BLOCK_M)
            pos = first + r // GROUP
            head = hk * GROUP + r % GROUP
            ok = (pos < q_len) & (r < BLOCK_Q * GROUP)
            token = (q0 + pos).to(tl.int64)
            seq_table = TABLE + tl.cast(s, tl.int64) * table_row
            end_of_keys = context + tl.minimum(q_len, first + BLOCK_Q)
            key_position, key_page = key_block(seq_table, 0, end_of_keys, PAGE, KVB)
            Z, L, A = attend(
                load_queries(Q, token, head, ok, sqt, sqh, D, DP),
                K + hk.to(tl.int64) * skh,
                V + hk.to(tl.int64) * svh,
                seq_table,
                key_position,
                key_page,
                O,
                factor,
                q0,
                context,
                first,
                pos,
                ok,
                0,
                end_of_keys,
                pages,
                skt,
                svt,
                PAGE,
                0,
                D,
                DP,
                BLOCK_M,
                KVB,
                LEAF,
                0,
            )
            write_result(O, token, head, L, A, ok, HEADS, D, DP)
            if PAGE == 0:
                tl.store(SHIFT + statistics_offset(q0, s, head, pads) + pos, tl.fma(Z, 1.0, -tl.log2(L)), mask=ok)
