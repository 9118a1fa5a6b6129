"""What the kernels of attention in Triton share: rows of a tile are query positions times the heads of a group; keys are
visited leaf by leaf, in a leaf in blocks from its first position."""

from __future__ import annotations

import triton
import triton.language as tl

from ...runtime.families import SM90

PAD = tl.constexpr(128)
VALUES = ["tokens", "seqs", "tiles", "programs", "parts", "slots", "pads", "pages", "width", "table_row", "most"]
"""Arguments that change from call to call: no kernel is compiled for one of their values."""
RESERVE = tl.constexpr(SM90.reserve)
"""A probability is 2^-RESERVE where a score is what scores are measured by; where it would be 2 or more, that changes."""
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
def stays(Z, z):
    """Whether what is added to the scores of the leaves before is that of the next one, too, when they are joined."""
    return Z - z <= RESERVE


@triton.jit
def meet(Z, z):
    """Of the leaves before and of the next one, what is added to scores: that of both, and what multiplies their sums."""
    to = tl.where(stays(Z, z), Z, z)
    return to, tl.exp2(to - Z), tl.exp2(to - z)


@triton.jit
def join(Z, L, A, z, l, acc, seen):
    """The state Z, L, A of the leaves before with z, l, acc of the next joined to it, in the rows that have seen any of that."""
    to, before, after = meet(Z, z)
    L = tl.where(seen, tl.fma(l, after, L * before), L)
    A = tl.where(seen[:, None], tl.fma(acc, tl.broadcast_to(after[:, None], acc.shape), A * before[:, None]), A)
    return tl.where(seen, to, Z), L, A


@triton.jit
def _follow(Z, L, A, z, l, acc, leaf, at):
    """`join` for queries at positions `at`; the leaf from position 0 on is taken as it is."""
    if leaf == 0:
        Z, L, A = z, l, acc
    else:
        Z, L, A = join(Z, L, A, z, l, acc, leaf <= at)
    return Z, L, A


@triton.jit
def write_state(TO, z, l, acc, ok, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, STATE: tl.constexpr):
    """A state, of STATE numbers, to memory: ROWS rows of acc, those that are ok, then z of each row, then l of each. Of what is
    written in part, 32 bytes at a time, memory reads the rest first: so it is whole rows, and z and l of all. Soon they are read
    again, while keys and values are not: they had better stay in the cache."""
    SUMS: tl.constexpr = (STATE - ROWS * D) // 2
    r = tl.arange(0, z.shape[0])
    d = tl.arange(0, DP)
    here = (ok & (r < ROWS))[:, None] & (d < D)[None, :]
    tl.store(TO + r[:, None] * D + d[None, :], acc, mask=here, eviction_policy="evict_last")
    tl.store(TO + ROWS * D + r, z, mask=r < SUMS, eviction_policy="evict_last")
    tl.store(TO + ROWS * D + SUMS + r, l, mask=r < SUMS, eviction_policy="evict_last")


@triton.jit
def read_state(FROM, r, there, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, STATE: tl.constexpr):
    """z, l and acc of row r of a state that `write_state` wrote, for the last time. If it is not there: one that changes nothing when it
    is joined, as 2^-inf times its sums of -0 is -0, and any number plus that is itself."""
    SUMS: tl.constexpr = (STATE - ROWS * D) // 2
    d = tl.arange(0, DP)
    z = tl.load(FROM + ROWS * D + r, mask=there, other=float("inf"), eviction_policy="evict_first")
    l = tl.load(FROM + ROWS * D + SUMS + r, mask=there, other=-0.0, eviction_policy="evict_first")
    return z, l, tl.load(FROM + r * D + d, mask=d < tl.where(there, D, 0), other=-0.0, eviction_policy="evict_first")


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
    STATE: tl.constexpr,
):
    """The state of queries q at positions context + pos, from context + first on, after the keys [begin, end); begin is where a
    leaf does. K and V point at their head, TABLE at the sequence's pages; `at`, `page_of`: the first `block`. Leaves are joined from
    position 0 on: if STATE and begin are not 0, the state of each, of STATE numbers, goes to memory instead, from STATES on."""
    # Columns of ones beside the values, whose sums are those of probabilities. A tensor of few rows must be wider than high, or the
    # compiler has every warp compute all of it, scores and sums of values too.
    ONES: tl.constexpr = 16 if BLOCK_M >= 64 else 2 * BLOCK_M
    Z = tl.zeros((BLOCK_M,), tl.float32)
    L = tl.zeros((BLOCK_M,), tl.float32)
    A = tl.zeros((BLOCK_M, DP), tl.float32)
    z = tl.zeros((BLOCK_M,), tl.float32)  # of a leaf, what is added to scores times factor
    l = tl.zeros((BLOCK_M, ONES), tl.float32)  # each column
    acc = tl.zeros((BLOCK_M, DP), tl.float32)
    j = tl.arange(0, KVB)
    for b in range(begin, end, KVB):
        row = q0 + at.to(tl.int32)
        if PAGE > 0:
            row = (tl.minimum(page_of, pages.to(tl.uint32) - 1) * PAGE + at % PAGE).to(tl.int32)
        if DP * q.dtype.primitive_bitwidth <= 4096:
            v = rows(V, row, svt, D, DP)
        score = tl.dot(q, tl.trans(rows(K, row, skt, D, DP)), input_precision="ieee")
        at, page_of = block(TABLE, b + KVB, end, PAGE, KVB)  # ahead, so that no load of keys waits for it
        of_first = tl.sum(tl.where(j[None, :] == 0, score, 0.0), axis=1)
        z = tl.where(b % LEAF == 0, tl.fma(-of_first, factor, -RESERVE), z)
        if b + KVB > context + first + 1:  # some query does not see all of the block
            score = tl.where(b + j[None, :] <= (context + pos)[:, None], score, -float("inf"))
        top = tl.max(score, axis=1)
        moves = tl.exp2(tl.fma(top, factor, z)).to(q.dtype) >= 2.0
        to = tl.where(moves, tl.fma(-top, factor, -RESERVE), z)
        alpha = tl.where(moves, tl.exp2(to - z), 1.0)
        z = to
        p = tl.exp2(tl.fma(score, factor, z[:, None])).to(q.dtype)
        if DP * q.dtype.primitive_bitwidth > 4096:  # keys and values have no room beside each other
            v = rows(V, row, svt, D, DP)
        acc = tl.dot(p, v, acc * alpha[:, None], input_precision="ieee")
        l = tl.dot(p, tl.full((KVB, ONES), 1.0, q.dtype), l * alpha[:, None], input_precision="ieee")
        if ((b + KVB) % LEAF == 0) | (b + KVB >= end):
            total = tl.max(l, axis=1)  # of equal ones
            leaf = b // LEAF * LEAF
            if STATE > 0:
                if begin > 0:
                    to_memory = STATES + tl.cast((leaf - begin) // LEAF, tl.int64) * STATE
                    write_state(to_memory, z, total, acc, ok, ROWS, D, DP, STATE)
                else:
                    Z, L, A = _follow(Z, L, A, z, total, acc, leaf, context + pos)
            else:
                Z, L, A = _follow(Z, L, A, z, total, acc, leaf, context + pos)
            l = tl.zeros((BLOCK_M, ONES), tl.float32)
            acc = tl.zeros((BLOCK_M, DP), tl.float32)
    return Z, L, A
