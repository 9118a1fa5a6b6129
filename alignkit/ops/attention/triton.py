"""Triton: rows of a tile are query positions times the heads of a group; keys in blocks from position 0.

`_tiles` serves training (packed) and the longer sequences of a rollout (paged), `_short` the sequences with few
queries, such as one when decoding. Both run `_attend`, so they differ in the tile only, which changes no bit. Grids
depend on shapes alone and lengths are read on the device, so all of it may be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...runtime.families import SM90
from ...runtime.launch import launch
from .._triton import LOG2E, next_power_of_2

KV_BLOCK = SM90.kv_block
_PAD = tl.constexpr(128)
_VALUES = ["tokens", "seqs", "tiles", "pads", "pages", "width", "most"]
"""Arguments that change from call to call: no kernel is compiled for one of their values."""


@triton.jit
def _find(STARTS, seqs, tile, BLOCK: tl.constexpr):
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
def _span(STARTS, s, seqs, tokens):
    """The first row of sequence s and its number of rows: rows of [0, tokens), whatever STARTS holds."""
    q0 = tl.minimum(tl.maximum(tl.load(STARTS + s), 0), tokens).to(tl.int32)
    q1 = tl.minimum(tl.maximum(tl.load(STARTS + tl.minimum(s + 1, seqs)), q0), tokens).to(tl.int32)
    return q0, q1 - q0


@triton.jit
def _statistics(q0, s, head, pads):
    """Where the statistics of a sequence's queries begin in an fp32 [HEADS, pads * _PAD] that `_per_query` made: at a
    multiple of _PAD, so that a block of them may be read to its end. What no query has keeps its first value."""
    return (tl.cast(head, tl.int64) * pads + (q0 // _PAD + s)) * _PAD


@triton.jit
def _fill(O, value, begin, end, step, hk, WIDTH: tl.constexpr, ROW: tl.constexpr):
    """`value` to part `hk`, of WIDTH elements, of rows begin, begin + step, ... before `end` of O [tokens, ROW]."""
    for t in range(begin, end, step):
        for x in tl.static_range(0, WIDTH, 128):
            i = x + tl.arange(0, 128)
            o = O + tl.cast(t, tl.int64) * ROW + hk * WIDTH + i
            tl.store(o, tl.full((128,), value, O.dtype.element_ty), mask=i < WIDTH)


@triton.jit
def _rows(P, row, page, stride, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr):
    """Rows of P, [len(row), DP], zero beyond D; rows of pages of PAGE rows if PAGE > 0."""
    d = tl.arange(0, DP)
    at = row.to(tl.int64) * stride
    if PAGE > 0:
        at += page.to(tl.int64) * (stride * PAGE)
    at = P + (at[:, None] + d[None, :])
    if D == DP:
        return tl.load(at)
    else:
        return tl.load(at, mask=(d < D)[None, :], other=0.0)


@triton.jit
def _queries(P, token, head, ok, st, sh, D: tl.constexpr, DP: tl.constexpr):
    """Rows (token, head) of P, [len(token), DP], zero where not ok and beyond D."""
    d = tl.arange(0, DP)
    at = P + (token[:, None] * st + head[:, None].to(tl.int64) * sh + d[None, :])
    return tl.load(at, mask=ok[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _attend(
    Q,
    K,
    V,
    O,
    SHIFT,
    TABLE,
    factor,
    q0,
    q_len,
    context,
    first,
    s,
    hk,
    pads,
    pages,
    sqt: tl.constexpr,
    sqh,
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
    KEEP: tl.constexpr,
):
    """The tile of BLOCK_Q positions from `first` on. K and V point at head `hk`, TABLE at the sequence's pages."""
    r = tl.arange(0, BLOCK_M)
    pos = first + r // GROUP
    head = hk * GROUP + r % GROUP
    ok = (pos < q_len) & (r < BLOCK_Q * GROUP)
    token = (q0 + pos).to(tl.int64)
    q = _queries(Q, token, head, ok, sqt, sqh, D, DP)
    m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, DP), tl.float32)
    end = context + tl.minimum(q_len, first + BLOCK_Q)
    at = tl.minimum(tl.arange(0, KVB), end - 1)  # beyond the end any row will do, its probability is 0
    page = at
    if PAGE > 0:
        page = tl.load(TABLE + at // PAGE).to(tl.int32)
    for b in range(0, end, KVB):
        j = b + tl.arange(0, KVB)
        row = at % PAGE if PAGE > 0 else q0 + at
        here = tl.minimum(tl.maximum(page, 0), pages - 1)
        k = _rows(K, row, here, skt, D, DP, PAGE)
        v = _rows(V, row, here, svt, D, DP, PAGE)
        at = tl.minimum(j + KVB, end - 1)
        if PAGE > 0:  # a block ahead, so that no load of keys waits for it
            page = tl.load(TABLE + at // PAGE).to(tl.int32)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if b + KVB > context + first + 1:  # some query does not see all of the block
            score = tl.where(j[None, :] <= (context + pos)[:, None], score, -float("inf"))
        top = tl.maximum(m, tl.max(score, axis=1))
        shift = -top * factor
        p = tl.exp2(tl.fma(score, factor, shift[:, None]))
        alpha = tl.exp2((m - top) * factor)  # exactly 1 where no key of the block is seen
        # 1 + p is p rounded to a multiple of 2^-23, in the low bits; the sum of the ones leaves modulo 2^32.
        total = tl.sum((p + 1.0).to(tl.uint32, bitcast=True), axis=1) - (KVB * 0x3F800000) % 2**32
        l = tl.fma(l, alpha, total.to(tl.float32) * (2.0**-23))
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m = top
    d = tl.arange(0, DP)
    out = tl.div_rn(acc, l[:, None] + acc * 0.0)
    o = O + (token[:, None] * HEADS + head[:, None]) * D + d[None, :]
    tl.store(o, out.to(O.dtype.element_ty), mask=ok[:, None] & (d < D)[None, :])
    if KEEP:
        tl.store(SHIFT + _statistics(q0, s, head, pads) + pos, tl.fma(-m, factor, -tl.log2(l)), mask=ok)


@triton.jit(do_not_specialize=_VALUES)
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
    KEEP: tl.constexpr,
):
    """The sequences of more than `most` queries, tile by tile; the last tiles, which have most keys, begin first."""
    hk = tl.program_id(0) % (HEADS // GROUP)
    tile = tiles - 1 - tl.program_id(0) // (HEADS // GROUP)
    begin, end = tl.load(STARTS), tl.load(STARTS + seqs)
    if (begin != 0) | (end > tokens) | ((PAGE == 0) & (end != tokens)):
        if PAGE == 0:  # a cache's rows are left to `_short`
            _fill(O, float("nan"), tile, tokens, tiles, hk, GROUP * D, HEADS * D)
    elif seqs > 0:
        s = _find(STARTS, seqs, tile, BLOCK_Q)
        q0, q_len = _span(STARTS, s, seqs, tokens)
        first = (tile - (q0 // BLOCK_Q + s)) * BLOCK_Q
        context = 0
        fits = True
        if PAGE > 0:
            kv_len = tl.load(KV_LEN + s)
            fits = (q_len > most) & (kv_len >= q_len) & (kv_len <= width * PAGE)
            context = kv_len.to(tl.int32) - q_len
        if fits & (first >= 0) & (first < q_len):
            _attend(
                Q,
                K + hk.to(tl.int64) * skh,
                V + hk.to(tl.int64) * svh,
                O,
                SHIFT,
                TABLE + tl.cast(s, tl.int64) * table_row,
                factor,
                q0,
                q_len,
                context,
                first,
                s,
                hk,
                pads,
                pages,
                sqt,
                sqh,
                skt,
                svt,
                PAGE,
                GROUP,
                HEADS,
                D,
                DP,
                BLOCK_M,
                BLOCK_Q,
                KVB,
                KEEP,
            )


@triton.jit(do_not_specialize=_VALUES)
def _short(
    Q,
    K,
    V,
    O,
    STARTS,
    KV_LEN,
    TABLE,
    factor,
    tokens,
    seqs,
    tiles,
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
):
    """The sequences of at most `most` queries, each by one program a head group. It also fills the rows that hold no
    query with zeros, and those of a sequence that does not fit with NaN."""
    hk = tl.program_id(0) % (HEADS // GROUP)
    s = tl.program_id(0) // (HEADS // GROUP)
    begin, end = tl.load(STARTS), tl.load(STARTS + seqs)
    q0, q_len = _span(STARTS, s, seqs, tokens)
    kv_len = tl.load(KV_LEN + s, mask=s < seqs, other=0)
    if (begin != 0) | (end > tokens):
        _fill(O, float("nan"), s, tokens, tiles, hk, GROUP * D, HEADS * D)
    else:
        _fill(O, 0.0, end.to(tl.int32) + s, tokens, tiles, hk, GROUP * D, HEADS * D)
        if (kv_len < q_len) | (kv_len > width * PAGE):
            _fill(O, float("nan"), q0, q0 + q_len, 1, hk, GROUP * D, HEADS * D)
        elif q_len <= most:
            for first in range(0, q_len, BLOCK_Q):
                _attend(
                    Q,
                    K + hk.to(tl.int64) * skh,
                    V + hk.to(tl.int64) * svh,
                    O,
                    O,
                    TABLE + tl.cast(s, tl.int64) * table_row,
                    factor,
                    q0,
                    q_len,
                    kv_len.to(tl.int32) - q_len,
                    first,
                    s,
                    hk,
                    0,
                    pages,
                    sqt,
                    sqh,
                    skt,
                    svt,
                    PAGE,
                    GROUP,
                    HEADS,
                    D,
                    DP,
                    BLOCK_M,
                    BLOCK_Q,
                    KVB,
                    False,
                )


@triton.jit(do_not_specialize=_VALUES)
def _delta(
    DO, O, DELTA, STARTS, tokens, seqs, pads, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr
):
    """The sum of dO times O over a head, by query: fp32, in one order for every query."""
    if tl.load(STARTS + seqs) != tokens:
        return
    h = tl.program_id(0) % HEADS
    tile = tl.program_id(0) // HEADS
    s = _find(STARTS, seqs, tile, R)
    q0, q_len = _span(STARTS, s, seqs, tokens)
    pos = (tile - (q0 // R + s)) * R + tl.arange(0, R)
    ok = (pos >= 0) & (pos < q_len)
    token = (q0 + pos).to(tl.int64)
    head = tl.zeros((R,), tl.int32) + h
    g = _queries(DO, token, head, ok, HEADS * D, D, D, DP).to(tl.float32)
    o = _queries(O, token, head, ok, HEADS * D, D, D, DP).to(tl.float32)
    tl.store(DELTA + _statistics(q0, s, h, pads) + pos, tl.sum(g * o, axis=1), mask=ok)


@triton.jit(do_not_specialize=_VALUES)
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
        _fill(DQ, float("nan"), tile, tokens, tiles, hk, GROUP * D, HEADS * D)
        return
    s = _find(STARTS, seqs, tile, BLOCK_Q)
    q0, q_len = _span(STARTS, s, seqs, tokens)
    first = (tile - (q0 // BLOCK_Q + s)) * BLOCK_Q
    if (first < 0) | (first >= q_len):
        return
    r = tl.arange(0, BLOCK_M)
    pos = first + r // GROUP
    head = hk * GROUP + r % GROUP
    ok = (pos < q_len) & (r < BLOCK_Q * GROUP)
    token = (q0 + pos).to(tl.int64)
    q = _queries(Q, token, head, ok, sqt, sqh, D, DP)
    g = _queries(DO, token, head, ok, HEADS * D, D, D, DP)
    at = _statistics(q0, s, head, pads) + pos
    shift = tl.load(SHIFT + at, mask=ok, other=0.0)
    delta = tl.load(DELTA + at, mask=ok, other=0.0)
    K += hk.to(tl.int64) * skh
    V += hk.to(tl.int64) * svh
    dq = tl.zeros((BLOCK_M, DP), tl.float32)
    end = tl.minimum(q_len, first + BLOCK_Q)
    for b in range(0, end, BLOCK_N):
        j = b + tl.arange(0, BLOCK_N)
        row = q0 + tl.minimum(j, end - 1)
        k = _rows(K, row, 0, skt, D, DP, 0)
        v = _rows(V, row, 0, svt, D, DP, 0)
        p = tl.exp2(tl.fma(tl.dot(q, tl.trans(k), input_precision="ieee"), factor, shift[:, None]))
        if b + BLOCK_N > first + 1:
            p = tl.where(j[None, :] <= pos[:, None], p, 0.0)
        ds = p * (tl.dot(g, tl.trans(v), input_precision="ieee") - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    d = tl.arange(0, DP)
    out = DQ + (token[:, None] * HEADS + head[:, None]) * D + d[None, :]
    tl.store(out, (dq * scale).to(DQ.dtype.element_ty), mask=ok[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=_VALUES)
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
        _fill(DK, float("nan"), tile, tokens, tiles, hk, D, KV * D)
        _fill(DV, float("nan"), tile, tokens, tiles, hk, D, KV * D)
        return
    s = _find(STARTS, seqs, tile, BLOCK_N)
    q0, n = _span(STARTS, s, seqs, tokens)
    first = (tile - (q0 // BLOCK_N + s)) * BLOCK_N
    if (first < 0) | (first >= n):
        return
    j = first + tl.arange(0, BLOCK_N)
    row = q0 + tl.minimum(j, n - 1)
    k = _rows(K + hk.to(tl.int64) * skh, row, 0, skt, D, DP, 0)
    v = _rows(V + hk.to(tl.int64) * svh, row, 0, svt, D, DP, 0)
    dk = tl.zeros((BLOCK_N, DP), tl.float32)
    dv = tl.zeros((BLOCK_N, DP), tl.float32)
    blocks = tl.cdiv(n - first, BLOCK_I)
    for b in range(GROUP * blocks):
        h = hk * GROUP + b // blocks
        i0 = first + b % blocks * BLOCK_I
        i = i0 + tl.arange(0, BLOCK_I)
        t = q0 + tl.minimum(i, n - 1)
        q = _rows(Q + h.to(tl.int64) * sqh, t, 0, sqt, D, DP, 0)
        g = _rows(DO + h * D, t, 0, HEADS * D, D, DP, 0)
        at = _statistics(q0, s, h, pads) + i  # beyond the end: -inf and 0, which add nothing
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


SCHEDULES = {
    "tiles": {"BLOCK_M": 128, "num_warps": 8, "num_stages": 3},
    "short": {"BLOCK_M": 16, "num_warps": 4, "num_stages": 3},
    "grad_q": {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3},
    "grad_kv": {"BLOCK_N": 128, "BLOCK_I": 64, "num_warps": 8, "num_stages": 3},
}
"""Launch options of bf16 with heads of up to 128. None of them changes a bit."""


def _schedule(kernel: str, q: torch.Tensor, group: int, override: dict) -> dict:
    options = dict(SCHEDULES[kernel])
    if q.dtype == torch.float32:  # no tensor core
        options = {name: 16 for name in options if name.startswith("BLOCK")} | {"num_warps": 4, "num_stages": 1}
    elif q.shape[2] > 128:
        options = {name: min(value, 64) for name, value in options.items()} | {"num_stages": 1}
    options |= override
    if "BLOCK_M" in options:
        options["BLOCK_M"] = max(options["BLOCK_M"], next_power_of_2(group))
        options["BLOCK_Q"] = options["BLOCK_M"] // group
    return options


def _factor(scale: float) -> float:
    """Of the scores, for powers of 2. The launch rounds it to fp32."""
    return scale * LOG2E.value


def _shape(q, k) -> dict:
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "HEADS": q.shape[1],
        "D": q.shape[2],
        "DP": max(16, next_power_of_2(q.shape[2])),
    }


def _pads(tokens: int, seqs: int) -> int:
    """How many times _PAD statistics a head has; see `_statistics`."""
    return tokens // _PAD.value + seqs + 1


def forward(q, k, v, starts, scale, **schedule):
    """`schedule` overrides launch options; tests use it to show that they change no bit."""
    tokens, heads, kv = *q.shape[:2], k.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    seqs = starts.shape[0] - 1
    pads = _pads(tokens, seqs)
    shift = torch.full((heads, pads * _PAD.value), float("-inf"), dtype=torch.float32, device=q.device)
    if tokens:
        options = _schedule("tiles", q, heads // kv, schedule)
        tiles = tokens // options["BLOCK_Q"] + seqs + 1
        _run(
            _tiles,
            tiles,
            (q, k, v, out, shift, starts, starts, starts, _factor(scale), tokens, seqs, tiles, pads, 0, 0, 0, 0),
            q,
            k,
            v,
            {"PAGE": 0, "KVB": KV_BLOCK, "KEEP": True} | options,
        )
    return out, shift


def paged(q, k, v, block_table, starts, seq_lens, block_size, scale, out, short=None, **schedule):
    """`short` and `schedule` override the launch options of `_short` and `_tiles`."""
    tokens, heads, kv = *q.shape[:2], k.shape[1]
    if not tokens:
        return
    seqs, width = block_table.shape
    few = _schedule("short", q, heads // kv, short or {})
    alone = tokens <= seqs  # most likely one query each; `_short` takes any number, one tile after the other
    most = tokens if alone else few["BLOCK_Q"]
    lengths = starts, seq_lens, block_table, _factor(scale), tokens, seqs
    pages = k.shape[0] // block_size, width, block_table.stride(0), most
    programs = max(seqs, 1)
    _run(
        _short,
        programs,
        (q, k, v, out, *lengths, programs, *pages),
        q,
        k,
        v,
        {"PAGE": block_size, "KVB": KV_BLOCK} | few,
    )
    if not alone:
        many = _schedule("tiles", q, heads // kv, schedule)
        tiles = tokens // many["BLOCK_Q"] + seqs
        _run(
            _tiles,
            tiles,
            (q, k, v, out, out, *lengths, tiles, 0, *pages),
            q,
            k,
            v,
            {"PAGE": block_size, "KVB": KV_BLOCK, "KEEP": False} | many,
        )


def _run(kernel, programs: int, args: tuple, q, k, v, options: dict) -> None:
    """Launch `kernel`, any but `_delta`, with `programs` for each head of k; `args` end where strides begin."""
    strides = [t.stride() for t in (q, k, v)]
    constants = {name: of[0] for name, of in zip(("sqt", "skt", "svt"), strides, strict=True)}
    constants |= _shape(q, k) | options
    own = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    launch(kernel, (programs * k.shape[1],), (*args, *(of[1] for of in strides)), own, **constants)


def backward(q, k, v, starts, out, shift, d_out, scale, grad_kv=None, **schedule):
    """`schedule` and `grad_kv` override the launch options of `_grad_q` and `_grad_kv`."""
    tokens, heads, dim = q.shape
    seqs, kv = starts.shape[0] - 1, k.shape[1]
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    if tokens:
        pads = _pads(tokens, seqs)
        delta = torch.zeros(heads, pads * _PAD.value, dtype=torch.float32, device=q.device)
        launch(
            _delta,
            ((tokens // 64 + seqs + 1) * heads,),
            (d_out, out, delta, starts, tokens, seqs, pads),
            {"num_warps": 4},
            HEADS=heads,
            D=dim,
            DP=_shape(q, k)["DP"],
            R=64,
        )
        by_query = _schedule("grad_q", q, heads // kv, schedule)
        by_key = _schedule("grad_kv", q, heads // kv, grad_kv or {})

        def values(tiles):
            return starts, _factor(scale), scale, tokens, seqs, tiles, pads

        tiles = tokens // by_query["BLOCK_Q"] + seqs + 1
        _run(_grad_q, tiles, (q, k, v, d_out, shift, delta, dq, *values(tiles)), q, k, v, by_query)
        tiles = tokens // by_key["BLOCK_N"] + seqs + 1
        _run(_grad_kv, tiles, (q, k, v, d_out, shift, delta, dk, dv, *values(tiles)), q, k, v, by_key)
    return dq, dk, dv
