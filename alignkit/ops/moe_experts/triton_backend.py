"""Triton backend of `combine`, the sum over a row's experts in tree order, and of `weigh`, a step of its backward pass.

The order of summation is the contract's (docs/contract.md, "Mixture of experts"). BLOCK_H and num_warps are free.
BLOCK_K must cover a row's ids, and `_weigh`'s BLOCK a pair's features. reference.py documents the functions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...contract.experts import ExpertTree
from ...runtime.launch import launch
from .._triton import next_power_of_2, tree_sum
from ..silu_mul.triton_backend import silu_gradients, silu_times

NONE = tl.constexpr(2**30)
"""schedule: leaf index of absent ids, above all leaves."""


@triton.jit
def _leaf(Y, W, r, place, nth, j, ok, k, H, WEIGHTED: tl.constexpr):
    """Load the weighted pair of the row's nth id; never -0, so that adding absent leaves (0) changes no bit."""
    y = tl.load(Y + place * H + j, mask=ok, other=0.0).to(tl.float32)
    if WEIGHTED:
        y = tl.load(W + r * k + nth, mask=place >= 0, other=0.0) * y
    return y + 0.0


@triton.jit
def _nth(order, value, n):
    """Return the value at the nth position of the order."""
    return tl.sum(tl.where(order == n, value, 0), axis=0)


@triton.jit
def _combine(
    Y,
    PLACE,
    IDS,
    W,
    OUT,
    k,
    H,
    run,
    width,
    WEIGHTED: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Sum a row's pairs in tree order; `waiting` holds, per level, a left subtree whose right sibling is incomplete."""
    r = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    i = tl.arange(0, BLOCK_K)
    place = tl.load(PLACE + r * k + i, mask=i < k, other=-1)
    expert = tl.load(IDS + r * k + i, mask=i < k, other=0).to(tl.int32)
    leaf = tl.where(place >= 0, expert // run * width + expert % run, NONE)
    key = leaf.to(tl.int64) * BLOCK_K + i  # unique
    order = tl.sum((key[None, :] < key[:, None]).to(tl.int32), axis=1)
    count = tl.sum((place >= 0).to(tl.int32), axis=0)
    zero = tl.zeros((BLOCK_H,), tl.float32)
    waiting = (zero,)
    for _ in tl.static_range(LEVELS - 1):
        waiting += (zero,)
    held = 0  # bit l is set if `waiting` holds a sum at level l
    acc = zero
    p = _nth(order, place, 0)
    following = _leaf(Y, W, r, p, _nth(order, i, 0), j, (j < H) & (count > 0), k, H, WEIGHTED)
    for n in range(count):
        acc = following
        more = n + 1 < count
        p = _nth(order, place, n + 1)  # prefetched while the current pair is added
        following = _leaf(Y, W, r, p, _nth(order, i, n + 1), j, (j < H) & more, k, H, WEIGHTED)
        differing = _nth(order, leaf, n) ^ tl.where(more, _nth(order, leaf, n + 1), NONE)
        updated = ()
        for level in tl.static_range(LEVELS):
            one = waiting[level]
            if (differing >> (level + 1) != 0) & (held >> level & 1 != 0):
                acc = one + acc
                held = held ^ (1 << level)
            if differing >> level == 1:
                one = acc
                held = held | (1 << level)
            updated += (one,)
        waiting = updated
    tl.store(OUT + r * H + j, acc.to(OUT.dtype.element_ty), mask=j < H)


def combine(y, place, ids, weights, experts: int, out) -> None:
    rows, h = out.shape
    tree = ExpertTree.of(experts)
    block = min(next_power_of_2(h), 1024)
    launch(
        _combine,
        (rows, triton.cdiv(h, block)),
        (y, place, ids, weights, out, ids.shape[1], h, tree.run, tree.width),
        {"num_warps": max(block // 256, 1)},
        WEIGHTED=weights is not None,
        LEVELS=max((tree.groups * tree.width).bit_length() - 1, 1),
        BLOCK_K=next_power_of_2(ids.shape[1]),
        BLOCK_H=block,
    )


@triton.jit
def _weigh(G, H, W, DW, D, WA, F, BLOCK: tl.constexpr, LEVELS: tl.constexpr):
    p = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    h = H + p * 2 * F + j
    gate = tl.load(h, mask=j < F, other=0.0).to(tl.float32)
    up = tl.load(h + F, mask=j < F, other=0.0).to(tl.float32)
    g = tl.load(G + p * F + j, mask=j < F, other=0.0)
    w = tl.load(W + p)
    a = silu_times(gate, up).to(WA.dtype.element_ty).to(tl.float32)
    total = tree_sum(tl.reshape(g * a, (1, BLOCK)), LEVELS)
    tl.store(DW + p + tl.arange(0, 1), total + 0.0)
    tl.store(WA + p * F + j, (w * a).to(WA.dtype.element_ty), mask=j < F)
    dgate, dup = silu_gradients(gate, up, (w * g).to(D.dtype.element_ty).to(tl.float32))
    d = D + p * 2 * F + j
    tl.store(d, dgate.to(D.dtype.element_ty), mask=j < F)
    tl.store(d + F, dup.to(D.dtype.element_ty), mask=j < F)


def weigh(g, h, w) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dw = torch.empty(len(h), dtype=torch.float32, device=h.device)
    d, wa = (torch.empty(shape, dtype=h.dtype, device=h.device) for shape in (h.shape, g.shape))
    if len(h):
        block = next_power_of_2(g.shape[1])
        launch(
            _weigh,
            (len(h),),
            (g, h, w, dw, d, wa, g.shape[1]),
            {"num_warps": max(1, min(16, block // 512))},
            BLOCK=block,
            LEVELS=block.bit_length() - 1,
        )
    return dw, d, wa
