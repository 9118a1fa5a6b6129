"""Device functions shared by the Triton attention kernels.

The rows of a tile are query positions times the query heads of a GQA group. Keys are visited leaf by leaf, and within a
leaf in blocks of KVB positions. The state of a query is its softmax state: the exponent offset Z, the sum of
probabilities L and the unnormalized output A. A probability is ``2 ** (score * factor + Z)``.

The order of keys, KVB, LEAF, the rescaling test and the merge are the contract's (docs/contract.md, "Attention"). Rows
per tile, the assignment of leaves to programs and prefetching are free.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...runtime.families import SM90
from ...runtime.shared import KERNELS

PAD = tl.constexpr(KERNELS["kStatisticsPad"])
RUNTIME_ARGS = [
    "tokens",
    "seqs",
    "tiles",
    "programs",
    "parts",
    "slots",
    "pads",
    "pages",
    "width",
    "table_row",
    "max_queries",
]
"""schedule: arguments that change from call to call; the kernels are not specialized on their values."""
RESERVE = tl.constexpr(SM90.reserve)
"""contract: headroom, an exponent of 2. A leaf's first score has probability 2^-RESERVE; one of 2 or more rescales."""
DECODE_QUERIES, DECODE_CONTEXT = tl.constexpr(16), tl.constexpr(2048)
"""schedule: at most DECODE_QUERIES queries after at least DECODE_CONTEXT keys are computed by the decode kernels."""


@triton.jit
def find_sequence(STARTS, seqs, tile, BLOCK: tl.constexpr, MORE: tl.constexpr = 1):
    """Return the sequence of `tile`: the tiles of sequence s begin at STARTS[s] // BLOCK + s * MORE."""
    low = 0
    high = seqs
    while low + 1 < high:
        mid = (low + high) // 2
        if tl.load(STARTS + mid) // BLOCK + mid * MORE <= tile:
            low = mid
        else:
            high = mid
    return low


@triton.jit
def span(STARTS, s, seqs, tokens):
    """Return the first row and the row count of sequence s, clamped to [0, tokens) for invalid STARTS."""
    q0 = tl.minimum(tl.maximum(tl.load(STARTS + s), 0), tokens).to(tl.int32)
    q1 = tl.minimum(tl.maximum(tl.load(STARTS + tl.minimum(s + 1, seqs)), q0), tokens).to(tl.int32)
    return q0, q1 - q0


@triton.jit
def statistics_offset(q0, s, head, pads):
    """Return the offset of a sequence's per-query statistics in an fp32 [HEADS, pads * PAD].

    The offset is a multiple of PAD, so a whole block can be loaded. Entries beyond the last query keep their initial
    value.
    """
    return (tl.cast(head, tl.int64) * pads + (q0 // PAD + s)) * PAD


@triton.jit
def fill_rows(O, value, begin, end, step, hk, WIDTH: tl.constexpr, ROW: tl.constexpr):
    """Fill slice `hk` (WIDTH elements) of rows begin, begin + step, ... below `end` of O [tokens, ROW] with `value`."""
    for t in range(begin, end, step):
        for x in tl.static_range(0, WIDTH, 512):
            i = x + tl.arange(0, 512)
            o = O + tl.cast(t, tl.int64) * ROW + hk * WIDTH + i
            tl.store(o, tl.full((512,), value, O.dtype.element_ty), mask=i < WIDTH)


@triton.jit
def load_rows(P, row, stride, D: tl.constexpr, DP: tl.constexpr):
    """Load rows of P as [len(row), DP], zero-padded beyond D."""
    d = tl.arange(0, DP)
    addresses = P + ((row.to(tl.int64) * stride)[:, None] + d[None, :])
    if D == DP:
        return tl.load(addresses)
    else:
        return tl.load(addresses, mask=(d < D)[None, :], other=0.0)


@triton.jit
def load_queries(P, token, head, ok, st, sh, D: tl.constexpr, DP: tl.constexpr):
    """Load rows (token, head) of P as [len(token), DP], zero where not ok and beyond D."""
    d = tl.arange(0, DP)
    addresses = P + (token[:, None] * st + head[:, None].to(tl.int64) * sh + d[None, :])
    return tl.load(addresses, mask=ok[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def is_decode(q_len, kv_len, max_queries):
    """Return True for a sequence of the decode kernels, False for one of the tile kernel."""
    return (q_len <= max_queries) | ((q_len <= DECODE_QUERIES) & (kv_len - q_len >= DECODE_CONTEXT))


@triton.jit
def keeps_offset(Z, z):
    """Return True if merging a leaf of offset z keeps the offset Z of the earlier leaves."""
    return Z - z <= RESERVE


@triton.jit
def merge_factors(Z, z):
    """Return the merged offset of the earlier leaves (Z) and the next one (z), and the factors of their sums."""
    offset = tl.where(keeps_offset(Z, z), Z, z)
    return offset, tl.exp2(offset - Z), tl.exp2(offset - z)


@triton.jit
def merge_state(Z, L, A, z, l, acc, visible):
    """Merge the next leaf's state z, l, acc into Z, L, A, in the rows where a key of that leaf is visible."""
    offset, alpha, beta = merge_factors(Z, z)
    L = tl.where(visible, tl.fma(l, beta, L * alpha), L)
    A = tl.where(visible[:, None], tl.fma(acc, tl.broadcast_to(beta[:, None], acc.shape), A * alpha[:, None]), A)
    return tl.where(visible, offset, Z), L, A


@triton.jit
def _merge_leaf(Z, L, A, z, l, acc, leaf, position):
    """Merge the leaf that begins at `leaf` for queries at `position`; the leaf at position 0 initializes the state."""
    if leaf == 0:
        Z, L, A = z, l, acc
    else:
        Z, L, A = merge_state(Z, L, A, z, l, acc, leaf <= position)
    return Z, L, A


@triton.jit
def write_state(TO, z, l, acc, ok, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, STATE: tl.constexpr):
    """Store a state of STATE numbers: acc of the ROWS rows that are ok, then z of every row, then l of every row.

    Stores cover whole 32-byte sectors, because a partial sector costs a read first: acc in whole rows, z and l of all
    rows. The merge kernel reads states soon, so they stay in L2 (evict_last).
    """
    SUMS: tl.constexpr = (STATE - ROWS * D) // 2
    r = tl.arange(0, z.shape[0])
    d = tl.arange(0, DP)
    mask = (ok & (r < ROWS))[:, None] & (d < D)[None, :]
    tl.store(TO + r[:, None] * D + d[None, :], acc, mask=mask, eviction_policy="evict_last")
    tl.store(TO + ROWS * D + r, z, mask=r < SUMS, eviction_policy="evict_last")
    tl.store(TO + ROWS * D + SUMS + r, l, mask=r < SUMS, eviction_policy="evict_last")


@triton.jit
def read_state(FROM, r, valid, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, STATE: tl.constexpr):
    """Load z, l and acc of row r of a state from `write_state`, for the last time (evict_first).

    If not `valid`, return the identity of the merge: z = inf, so its factor is 2^-inf = 0, and sums of -0, which added
    to any number leave the bits unchanged.
    """
    SUMS: tl.constexpr = (STATE - ROWS * D) // 2
    d = tl.arange(0, DP)
    z = tl.load(FROM + ROWS * D + r, mask=valid, other=float("inf"), eviction_policy="evict_first")
    l = tl.load(FROM + ROWS * D + SUMS + r, mask=valid, other=-0.0, eviction_policy="evict_first")
    return z, l, tl.load(FROM + r * D + d, mask=d < tl.where(valid, D, 0), other=-0.0, eviction_policy="evict_first")


@triton.jit
def write_result(O, token, head, L, A, ok, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Store A / L to O [tokens, HEADS, D], in the rows that are ok."""
    d = tl.arange(0, DP)
    # + A * 0.0 broadcasts L to A's shape without changing it. If A is infinite or NaN, the result is NaN.
    out = tl.div_rn(A, L[:, None] + A * 0.0)
    o = O + (token[:, None] * HEADS + head[:, None]) * D + d[None, :]
    tl.store(o, out.to(O.dtype.element_ty), mask=ok[:, None] & (d < D)[None, :])


@triton.jit
def key_block(TABLE, begin, end, PAGE: tl.constexpr, KVB: tl.constexpr):
    """Return the positions of the key block at `begin` and their pages; positions beyond `end` repeat the last one."""
    position = tl.minimum(begin + tl.arange(0, KVB), end - 1).to(tl.uint32)  # unsigned: division by 2^n is a shift
    page = position
    if PAGE > 0:
        page = tl.load(TABLE + (position // PAGE).to(tl.int32)).to(tl.uint32)
    return position, page


@triton.jit
def attend(
    q,
    K,
    V,
    TABLE,
    key_position,
    key_page,
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
    """Return the softmax state of queries q over the keys [begin, end) of a sequence.

    The queries are at positions context + pos; the smallest is context + first. `begin` is a leaf boundary. K and V
    point at their KV head, TABLE at the sequence's row of the block table. key_position and key_page are the first
    `key_block`. If STATE is 0 or begin is 0, leaves are merged in order. Otherwise the state of each leaf (STATE
    numbers) is written to memory, from STATES on.
    """
    # The sums of probabilities come from the tensor core, as a product with columns of ones. With BLOCK_M < 64 it must
    # be wider than high; otherwise the compiler replicates it in every warp, and the products of keys and values too.
    ONES: tl.constexpr = 16 if BLOCK_M >= 64 else 2 * BLOCK_M
    Z = tl.zeros((BLOCK_M,), tl.float32)
    L = tl.zeros((BLOCK_M,), tl.float32)
    A = tl.zeros((BLOCK_M, DP), tl.float32)
    z = tl.zeros((BLOCK_M,), tl.float32)  # offset of the current leaf
    l = tl.zeros((BLOCK_M, ONES), tl.float32)  # equal columns
    acc = tl.zeros((BLOCK_M, DP), tl.float32)
    j = tl.arange(0, KVB)
    for b in range(begin, end, KVB):
        row = q0 + key_position.to(tl.int32)
        if PAGE > 0:
            row = (tl.minimum(key_page, pages.to(tl.uint32) - 1) * PAGE + key_position % PAGE).to(tl.int32)
        if DP * q.dtype.primitive_bitwidth <= 4096:
            v = load_rows(V, row, svt, D, DP)
        score = tl.dot(q, tl.trans(load_rows(K, row, skt, D, DP)), input_precision="ieee")
        key_position, key_page = key_block(TABLE, b + KVB, end, PAGE, KVB)  # prefetch: key loads need not wait for it
        first_score = tl.sum(tl.where(j[None, :] == 0, score, 0.0), axis=1)
        z = tl.where(b % LEAF == 0, tl.fma(-first_score, factor, -RESERVE), z)
        if b + KVB > context + first + 1:  # causal mask
            score = tl.where(b + j[None, :] <= (context + pos)[:, None], score, -float("inf"))
        row_max = tl.max(score, axis=1)
        rescale = tl.exp2(tl.fma(row_max, factor, z)).to(q.dtype) >= 2.0
        offset = tl.where(rescale, tl.fma(-row_max, factor, -RESERVE), z)
        alpha = tl.where(rescale, tl.exp2(offset - z), 1.0)
        z = offset
        p = tl.exp2(tl.fma(score, factor, z[:, None])).to(q.dtype)
        if DP * q.dtype.primitive_bitwidth > 4096:  # keys and values do not fit in shared memory together
            v = load_rows(V, row, svt, D, DP)
        acc = tl.dot(p, v, acc * alpha[:, None], input_precision="ieee")
        l = tl.dot(p, tl.full((KVB, ONES), 1.0, q.dtype), l * alpha[:, None], input_precision="ieee")
        if ((b + KVB) % LEAF == 0) | (b + KVB >= end):
            total = tl.max(l, axis=1)  # the columns are equal
            leaf = b // LEAF * LEAF
            if STATE > 0:
                if begin > 0:
                    state = STATES + tl.cast((leaf - begin) // LEAF, tl.int64) * STATE
                    write_state(state, z, total, acc, ok, ROWS, D, DP, STATE)
                else:
                    Z, L, A = _merge_leaf(Z, L, A, z, total, acc, leaf, context + pos)
            else:
                Z, L, A = _merge_leaf(Z, L, A, z, total, acc, leaf, context + pos)
            l = tl.zeros((BLOCK_M, ONES), tl.float32)
            acc = tl.zeros((BLOCK_M, DP), tl.float32)
    return Z, L, A
