"""What the kernels of attention in Triton share: rows of a tile are query positions times the heads of a group; keys are
visited leaf by leaf, in a leaf in blocks from its first position."""

from __future__ import annotations

import triton
import triton.language as tl

from ...runtime.families import SM90

PAD = tl.constexpr(128)
VALUES = ["tokens", "seqs", "tiles", "programs", "slots", "pads", "pages", "width", "most"]
"""Arguments that change from call to call: no kernel is compiled for one of their values."""
SLACK, MOST = tl.constexpr(SM90.kv_slack), tl.constexpr(2.0**SM90.kv_slack)
"""A running maximum moves to that of a block if this exceeds it by more than SLACK powers of 2; so a probability is up to MOST."""
BITS_OF_MOST, UNIT = tl.constexpr(0x40800000), tl.constexpr(2.0**-21)
"""MOST as fp32, and the last of the low bits above it."""
FEW, FAR = tl.constexpr(16), tl.constexpr(2048)
"""A sequence of at most so many queries that is continued after so many positions is `few`'s: it has many keys for its tiles."""


@triton.jit
def find(STARTS, seqs, tile, BLOCK: tl.constexpr):
    """The sequence that `tile` belongs to: sequence s owns tiles from STARTS[s] // BLOCK + s on."""
    low = 0
    high = seqs
    while low + 1 < high:
        mid = (low + high) // 2
        if tl.load(STARTS + mid) // BLOCK + mid <= tile:
            low = mid
        else:
            high = mid
    return low


@triton.jit
def span(STARTS, s, seqs, tokens):
    """The first row of sequence s and its number of rows: rows of [0, tokens), whatever STARTS holds."""
    q0 = tl.minimum(tl.maximum(tl.load(STARTS + s), 0), tokens).to(tl.int32)
    q1 = tl.minimum(tl.maximum(tl.load(STARTS + tl.minimum(s + 1, seqs)), q0), tokens).to(tl.int32)
    return q0, q1 - q0


@triton.jit
def statistics(q0, s, head, pads):
    """Where the statistics of a sequence's queries begin in an fp32 [HEADS, pads * PAD]: at a
    multiple of PAD, so that a block of them may be read to its end. What no query has keeps its first value."""
    return (tl.cast(head, tl.int64) * pads + (q0 // PAD + s)) * PAD


@triton.jit
def fill(O, value, begin, end, step, hk, WIDTH: tl.constexpr, ROW: tl.constexpr):
    """`value` to part `hk`, of WIDTH elements, of rows begin, begin + step, ... before `end` of O [tokens, ROW]."""
    for t in range(begin, end, step):
        for x in tl.static_range(0, WIDTH, 512):
            i = x + tl.arange(0, 512)
            o = O + tl.cast(t, tl.int64) * ROW + hk * WIDTH + i
            tl.store(o, tl.full((512,), value, O.dtype.element_ty), mask=i < WIDTH)


@triton.jit
def rows(P, row, stride, D: tl.constexpr, DP: tl.constexpr):
    """Rows of P, [len(row), DP], zero beyond D."""
    d = tl.arange(0, DP)
    at = P + ((row.to(tl.int64) * stride)[:, None] + d[None, :])
    if D == DP:
        return tl.load(at)
    else:
        return tl.load(at, mask=(d < D)[None, :], other=0.0)


@triton.jit
def queries(P, token, head, ok, st, sh, D: tl.constexpr, DP: tl.constexpr):
    """Rows (token, head) of P, [len(token), DP], zero where not ok and beyond D."""
    d = tl.arange(0, DP)
    at = P + (token[:, None] * st + head[:, None].to(tl.int64) * sh + d[None, :])
    return tl.load(at, mask=ok[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def is_few(q_len, kv_len, most):
    """Whether a sequence is for the kernels of few queries, not for tiles."""
    return (q_len <= most) | ((q_len <= FEW) & (kv_len - q_len >= FAR))


@triton.jit
def weights(M, m, factor):
    """Of a state and of the next leaf's: the larger of both maxima, and the factors that scale their sums to it."""
    top = tl.maximum(M, m)
    return top, tl.exp2((M - top) * factor), tl.exp2((m - top) * factor)


@triton.jit
def join(M, L, A, m, l, acc, factor, seen):
    """The state M, L, A of the leaves before with m, l, acc of the next joined to it, in the rows that have seen any of that."""
    top, before, here = weights(M, m, factor)
    L = tl.where(seen, tl.fma(L, before, l * here), L)
    A = tl.where(seen[:, None], tl.fma(A, before[:, None], acc * here[:, None]), A)
    return tl.where(seen, top, M), L, A


@triton.jit
def _follow(M, L, A, m, l, acc, factor, leaf, at):
    """`join` for queries at positions `at`; the leaf from position 0 on is taken as it is."""
    if leaf == 0:
        M, L, A = m, l, acc
    else:
        M, L, A = join(M, L, A, m, l, acc, factor, leaf <= at)
    return M, L, A


@triton.jit
def write_state(STATE, m, l, acc, ok, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """A state, of the first ROWS rows, to memory: rows of acc, m and l."""
    r = tl.arange(0, m.shape[0])
    d = tl.arange(0, DP)
    ok = ok & (r < ROWS)
    at = STATE + r * (D + 4)
    tl.store(at[:, None] + d[None, :], acc, mask=ok[:, None] & (d < D)[None, :])
    tl.store(at + D, m, mask=ok)
    tl.store(at + D + 1, l, mask=ok)


@triton.jit
def write_result(O, token, head, L, A, ok, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    d = tl.arange(0, DP)
    out = tl.div_rn(A, L[:, None] + A * 0.0)
    o = O + (token[:, None] * HEADS + head[:, None]) * D + d[None, :]
    tl.store(o, out.to(O.dtype.element_ty), mask=ok[:, None] & (d < D)[None, :])


@triton.jit
def block(TABLE, begin, end, PAGE: tl.constexpr, KVB: tl.constexpr):
    """The positions of a block of keys, and which pages they are in. Of those beyond the end any will do, their probability is 0."""
    at = tl.minimum(begin + tl.arange(0, KVB), end - 1).to(tl.uint32)  # without a sign division by 2^n is a shift
    page = at
    if PAGE > 0:
        page = tl.load(TABLE + (at // PAGE).to(tl.int32)).to(tl.uint32)
    return at, page


@triton.jit
def visit(
    q,
    K,
    V,
    TABLE,
    at,
    page_of,
    STATES,
    factor,
    q0,
    context,
    first,
    pos,
    ok,
    begin,
    end,
    pages,
    skt: tl.constexpr,
    svt: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    KVB: tl.constexpr,
    LEAF: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """The state of queries q at positions context + pos, from context + first on, after the keys [begin, end); begin is where a
    leaf does. K and V point at their head, TABLE at the sequence's pages; `at`, `page_of`: the first `block`. Leaves are joined from
    position 0 on: if SPLIT and begin is not 0, the state of each goes to memory instead, from STATES on."""
    M = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    L = tl.zeros((BLOCK_M,), tl.float32)
    A = tl.zeros((BLOCK_M, DP), tl.float32)
    m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    since = tl.zeros((BLOCK_M,), tl.uint32)  # of a leaf, the sum of probabilities since m moved
    acc = tl.zeros((BLOCK_M, DP), tl.float32)
    for b in range(begin, end, KVB):
        row = q0 + at.to(tl.int32)
        if PAGE > 0:
            row = (tl.minimum(page_of, pages.to(tl.uint32) - 1) * PAGE + at % PAGE).to(tl.int32)
        if DP * q.dtype.primitive_bitwidth <= 4096:
            v = rows(V, row, svt, D, DP)
        score = tl.dot(q, tl.trans(rows(K, row, skt, D, DP)), input_precision="ieee")
        at, page_of = block(TABLE, b + KVB, end, PAGE, KVB)  # ahead, so that no load of keys waits for it
        if b + KVB > context + first + 1:  # some query does not see all of the block
            j = b + tl.arange(0, KVB)
            score = tl.where(j[None, :] <= (context + pos)[:, None], score, -float("inf"))
        top = tl.max(score, axis=1)
        moves = (top - m) * factor > SLACK
        alpha = tl.where(moves, tl.exp2((m - top) * factor), 1.0)
        l = tl.where(moves, tl.fma(since.to(tl.float32), UNIT, l) * alpha, l)
        since = tl.where(moves, 0, since)
        m = tl.where(moves, top, m)
        shift = -m * factor
        p = tl.exp2(tl.fma(score, factor, shift[:, None]))
        # MOST + p is p rounded to a multiple of UNIT, in the low bits; the sum of the others is known, modulo 2^32.
        since += tl.sum((p + MOST).to(tl.uint32, bitcast=True), axis=1) - (KVB * BITS_OF_MOST) % 2**32
        if DP * q.dtype.primitive_bitwidth > 4096:  # keys and values have no room beside each other
            v = rows(V, row, svt, D, DP)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        if ((b + KVB) % LEAF == 0) | (b + KVB >= end):
            l = tl.fma(since.to(tl.float32), UNIT, l)
            leaf = b // LEAF * LEAF
            if SPLIT:
                if begin > 0:
                    to = STATES + tl.cast((leaf - begin) // LEAF, tl.int64) * (ROWS * (D + 4))
                    write_state(to, m, l, acc, ok, ROWS, D, DP)
                else:
                    M, L, A = _follow(M, L, A, m, l, acc, factor, leaf, context + pos)
            else:
                M, L, A = _follow(M, L, A, m, l, acc, factor, leaf, context + pos)
            m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
            l = tl.zeros((BLOCK_M,), tl.float32)
            since = tl.zeros((BLOCK_M,), tl.uint32)
            acc = tl.zeros((BLOCK_M, DP), tl.float32)
    return M, L, A
