"""Triton kernels of the gated delta rule: chunks in parallel, then a scan over the chunks of each sequence and head.

Each operation is the contract's (docs/contract.md, "Gated delta rule"); the columns of v per program and num_warps are
free. Products are chains in steps of 16 k, so no tile may split k.

A sequence has at most one chunk more than its new rows fill, because the first may be open already. So sequence i has
the slots of temporary memory from `starts[i] // CHUNK + 2 i` on.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl

from ...runtime.launch import launch
from .._triton import exp, next_power_of_2
from ..attention.common import find_sequence, span
from .layout import CHUNK, sizes

COLUMNS = 32  # schedule: columns of v per program of the scan
PRECISION = tl.constexpr("ieee")  # contract: products of fp32 are fp32's


@triton.jit
def _span(STARTS, LENS, i, rows):
    """Return the first new row of sequence i, their number, and the position of the first, within bounds."""
    first, count = span(STARTS, i, i + 1, rows)
    start, n = first.to(tl.int64), count.to(tl.int64)
    position = start * 0
    if LENS is not None:
        position = tl.maximum(tl.load(LENS + i).to(tl.int64) - n, 0)
    return start, n, position


@triton.jit
def _rows_of(X, row, h, heads, mask, j, D: tl.constexpr):
    """Load columns j of head h of rows, [CHUNK, len(j)]; zeros outside of the mask."""
    return tl.load(X + (row * heads + h)[:, None] * D + j[None, :], mask=mask[:, None] & (j < D)[None, :], other=0.0)


@triton.jit
def _cached(PAGE, T: tl.constexpr, r, mask, j, D: tl.constexpr):
    """Load columns j of the cached rows r of the model type, from the fp32 words at PAGE."""
    at = PAGE.to(tl.pointer_type(T)) + r[:, None] * D + j[None, :]
    return tl.load(at, mask=mask[:, None] & (j < D)[None, :], other=0.0)


@triton.jit
def _keys(KEYS, PAGE, row, kh, heads, new, old, r, j, K: tl.constexpr, K_AT: tl.constexpr):
    """Load the keys of a chunk: new rows, and old ones from the page unless that is None."""
    k = _rows_of(KEYS, row, kh, heads, new, j, K)
    if PAGE is not None:
        k = tl.where(old[:, None], _cached(PAGE + K_AT, KEYS.dtype.element_ty, r, old, j, K), k)
    return k


@triton.jit(do_not_specialize=["rows", "seqs"])
def _chunks(
    Q,
    KEYS,
    G,
    BETA,
    STARTS,
    LENS,
    PAGES,
    SLOTS,
    SUMS,
    INVERSE,
    WEIGHTS,
    rows,
    seqs,
    heads,
    pages,
    page_stride,
    head_stride,
    K: tl.constexpr,
    V: tl.constexpr,
    K_AT: tl.constexpr,
    R_AT: tl.constexpr,
    G_AT: tl.constexpr,
    D_AT: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK: tl.constexpr,
    C: tl.constexpr,
):
    """Write the sums of g, the inverse D and the weights of u in o, of one chunk and v head."""
    T: tl.constexpr = KEYS.dtype.element_ty
    slot, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s = find_sequence(STARTS, seqs, slot, C, MORE=2)
    start, n, position = _span(STARTS, LENS, s, rows)
    chunk = slot - (start // C + 2 * s)
    first = (position // C + chunk) * C
    if (n <= 0) | (first >= position + n):
        return
    r = tl.arange(0, C)
    at = first + r
    new, old = (at >= position) & (at < position + n), at < position
    row, kh, j = start + at - position, h // SHARE, tl.arange(0, BLOCK)
    page = PAGES
    if PAGES is not None:
        index = tl.load(SLOTS + s).to(tl.int64)
        usable = (index >= 0) & (index < pages)
        old = old & usable
        page = PAGES + index * page_stride + h * head_stride
    k = _keys(KEYS, page, row, kh, heads // SHARE, new, old, r, j, K, K_AT)
    q = _rows_of(Q, row, kh, heads // SHARE, new, j, K)
    total, sums = 0.0, tl.zeros((C,), tl.float32)
    for i in tl.static_range(C):
        mine = (first + i >= position) & (first + i < position + n)
        total += tl.load(G + (start + first + i - position) * heads + h, mask=mine, other=0.0)
        if PAGES is not None:
            before = tl.load(page + G_AT + i, mask=(first + i < position) & usable, other=0.0)
            total = tl.where(first + i < position, before, total)
        sums = tl.where(r == i, total, sums)
    beta = tl.load(BETA + row * heads + h, mask=new, other=0.0)
    seen = r[None, :] <= r[:, None]
    decay = exp(tl.where(seen, sums[:, None] - sums[None, :], 0.0))
    lower = beta[:, None] * (decay * tl.dot(k, tl.trans(k), input_precision=PRECISION))
    inverse = tl.where(r[:, None] == r[None, :], 1.0, 0.0)
    if PAGES is not None:
        cached = tl.load(page + D_AT + r[:, None] * C + r[None, :], mask=old[:, None], other=0.0)
        inverse = tl.where(old[:, None], cached, inverse)
    for i in tl.static_range(C):
        column = tl.sum(tl.where(r[None, :] == i, lower, 0.0), axis=1) * -1.0
        of_row = tl.sum(tl.where(r[:, None] == i, inverse, 0.0), axis=0)
        factors = tl.broadcast_to(column[:, None], (C, C)), tl.broadcast_to(of_row[None, :], (C, C))
        changed = (r > i)[:, None] & new[:, None] & (r <= i)[None, :]
        inverse = tl.where(changed, tl.fma(factors[0], factors[1], inverse), inverse)
    weights = decay * tl.dot(q, tl.trans(k), input_precision=PRECISION)
    weights = tl.where(seen & new[:, None], weights, 0.0).to(T)
    out = (slot * heads + h) * C
    tl.store(SUMS + out + r, sums)
    tl.store(INVERSE + (out + r[:, None]) * C + r[None, :], inverse)
    tl.store(WEIGHTS + (out + r[:, None]) * C + r[None, :], weights)


@triton.jit(do_not_specialize=["rows"])
def _scan(
    Q,
    KEYS,
    VALUES,
    BETA,
    STARTS,
    LENS,
    PAGES,
    SLOTS,
    SUMS,
    INVERSE,
    WEIGHTS,
    OUT,
    rows,
    heads,
    pages,
    page_stride,
    head_stride,
    scale,
    K: tl.constexpr,
    V: tl.constexpr,
    K_AT: tl.constexpr,
    R_AT: tl.constexpr,
    G_AT: tl.constexpr,
    D_AT: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    C: tl.constexpr,
):
    """Compute columns of o of one sequence and head, chunk by chunk, and write the page's s and r."""
    T: tl.constexpr = KEYS.dtype.element_ty
    i, h = tl.program_id(0), tl.program_id(1)
    start, n, position = _span(STARTS, LENS, i, rows)
    r, j, c = tl.arange(0, C), tl.arange(0, BLOCK), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    kh, key_heads = h // SHARE, heads // SHARE
    inside = (j < K)[:, None] & (c < V)[None, :]
    state = tl.zeros((BLOCK, COLUMNS), tl.float32)
    page, cached = PAGES, n < 0
    if PAGES is not None:
        index = tl.load(SLOTS + i).to(tl.int64)
        cached = (index >= 0) & (index < pages) & (n > 0)
        page = PAGES + index * page_stride + h * head_stride
        state = tl.load(page + j[:, None] * V + c[None, :], mask=inside & cached & (position > 0), other=0.0)
    begin = position // C
    slot = (start // C + 2 * i) * heads + h
    for chunk in range(begin, (position + n + C - 1) // C):
        at = chunk * C + r
        new, old = (at >= position) & (at < position + n), (at < position) & cached
        row = start + at - position
        k = _keys(KEYS, page, row, kh, key_heads, new, old, r, j, K, K_AT)
        q = _rows_of(Q, row, kh, key_heads, new, j, K)
        v = _rows_of(VALUES, row, h, heads, new, c, V).to(tl.float32)
        beta = tl.load(BETA + row * heads + h, mask=new, other=0.0)[:, None]
        out = (slot + (chunk - begin) * heads) * C
        sums = tl.load(SUMS + out + r)
        inverse = tl.load(INVERSE + (out + r[:, None]) * C + r[None, :]).to(T)
        weights = tl.load(WEIGHTS + (out + r[:, None]) * C + r[None, :])
        grown, rounded = exp(sums)[:, None], state.to(T)
        side = beta * (v - grown * tl.dot(k, rounded, input_precision=PRECISION)) + 0.0
        side = tl.where(new[:, None], side, 0.0).to(T)
        if PAGES is not None:
            side = tl.where(old[:, None], _cached(page + R_AT, T, r, old, c, V), side)
        u = (tl.dot(inverse, side, input_precision=PRECISION) + 0.0).to(T)
        o = tl.dot(weights, u, grown * tl.dot(q, rounded, input_precision=PRECISION), input_precision=PRECISION)
        mask = new[:, None] & (c < V)[None, :]
        tl.store(OUT + (row * heads + h)[:, None] * V + c[None, :], (scale * o + 0.0).to(T), mask=mask)
        if chunk * C + C <= position + n:
            last = tl.sum(tl.where(r == C - 1, sums, 0.0), axis=0)
            tail = (u.to(tl.float32) * exp(last - sums)[:, None]).to(T)
            state = tl.dot(tl.trans(k), tail, exp(last) * state, input_precision=PRECISION)
        elif PAGES is not None:
            to = (page + R_AT).to(tl.pointer_type(T))
            tl.store(to + r[:, None] * V + c[None, :], side, mask=mask & cached)
    if PAGES is not None:
        tl.store(page + j[:, None] * V + c[None, :], state, mask=inside & cached)


@triton.jit(do_not_specialize=["rows"])
def _cache_rows(
    KEYS,
    STARTS,
    LENS,
    PAGES,
    SLOTS,
    SUMS,
    INVERSE,
    rows,
    heads,
    pages,
    page_stride,
    head_stride,
    K: tl.constexpr,
    V: tl.constexpr,
    K_AT: tl.constexpr,
    R_AT: tl.constexpr,
    G_AT: tl.constexpr,
    D_AT: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK: tl.constexpr,
    C: tl.constexpr,
):
    """Write the new rows of the open chunk to the page: keys, sums of g, rows of D."""
    T: tl.constexpr = KEYS.dtype.element_ty
    i, h = tl.program_id(0), tl.program_id(1)
    start, n, position = _span(STARTS, LENS, i, rows)
    index = tl.load(SLOTS + i).to(tl.int64)
    chunk = (position + n) // C  # the open one; without rows if the last one is complete
    r, j = tl.arange(0, C), tl.arange(0, BLOCK)
    at = chunk * C + r
    new = (at >= position) & (at < position + n) & (index >= 0) & (index < pages)
    k = _rows_of(KEYS, start + at - position, h // SHARE, heads // SHARE, new, j, K)
    page = PAGES + index * page_stride + h * head_stride
    to = (page + K_AT).to(tl.pointer_type(T))
    tl.store(to + r[:, None] * K + j[None, :], k, mask=new[:, None] & (j < K)[None, :])
    out = ((start // C + 2 * i + chunk - position // C) * heads + h) * C
    tl.store(page + G_AT + r, tl.load(SUMS + out + r, mask=new, other=0.0), mask=new)
    square = r[:, None] * C + r[None, :]
    inverse = tl.load(INVERSE + out * C + square, mask=new[:, None], other=0.0)
    tl.store(page + D_AT + square, inverse, mask=new[:, None])


def _run(q, k, v, g, beta, starts, lens, pages, slots, scale: float, out: torch.Tensor) -> None:
    """Compute the new rows of all sequences; `lens`, `pages` and `slots` are None for whole sequences."""
    (rows, heads, v_dim), k_dim, seqs = v.shape, q.shape[2], starts.numel() - 1
    if not rows or not seqs:
        return
    share, chunks = heads // q.shape[1], rows // CHUNK + 2 * seqs
    sums = torch.empty(chunks, heads, CHUNK, dtype=torch.float32, device=v.device)
    inverse = torch.empty(chunks, heads, CHUNK, CHUNK, dtype=torch.float32, device=v.device)
    weights = torch.empty(inverse.shape, dtype=v.dtype, device=v.device)
    k_at, r_at, g_at, d_at, _ = itertools.accumulate(sizes(k_dim, v_dim, v.dtype))  # each part begins after the last
    parts = {"K_AT": k_at, "R_AT": r_at, "G_AT": g_at, "D_AT": d_at}
    shape = {"K": k_dim, "V": v_dim, **parts, "SHARE": share, "BLOCK": max(16, next_power_of_2(k_dim)), "C": CHUNK}
    strides = (0, 0, 0) if pages is None else (pages.shape[0], *pages.stride()[:2])
    cache, temporary = (starts, lens, pages, slots), (sums, inverse, weights)
    launch(
        _chunks,
        (chunks, heads),
        (q, k, g, beta, *cache, *temporary, rows, seqs, heads, *strides),
        {"num_warps": 1},
        **shape,
    )
    launch(
        _scan,
        (seqs, heads, triton.cdiv(v_dim, COLUMNS)),
        (q, k, v, beta, *cache, *temporary, out, rows, heads, *strides, scale),
        {"num_warps": 4},
        **shape,
        COLUMNS=COLUMNS,
    )
    if pages is not None:
        operands = k, *cache, sums, inverse, rows, heads, *strides
        launch(_cache_rows, (seqs, heads), operands, {"num_warps": 1}, **shape)


def forward(q, k, v, g, beta, starts, scale: float) -> torch.Tensor:
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    _run(q, k, v, g, beta, starts, None, None, None, scale, out)
    return out


def paged(q, k, v, g, beta, pages, slots, starts, lens, scale: float) -> torch.Tensor:
    """Return o of the new rows; advance the pages of their sequences in place."""
    out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    _run(q, k, v, g, beta, starts, lens, pages, slots, scale, out)
    return out
