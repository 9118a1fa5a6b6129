"""Triton backend: one program per row, with experts at their leaf positions in the tree.

The order of sums and ties is the contract's (docs/contract.md, "Mixture of experts"); num_warps is free.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...contract.experts import ExpertTree
from ...runtime.launch import launch
from .._triton import exp, next_power_of_2, tree_sum
from .reference import LEAST

ABSENT = tl.constexpr(-(2**31))
"""hardware: key of absent leaves, below the keys of all numbers."""
SUM = tl.constexpr(LEAST)  # contract: reference.py defines it


@triton.jit
def _key(v):
    """Return an int32 with the order of the number v: NaN highest, -0 equal to +0."""
    bits = (v + 0.0).to(tl.int32, bitcast=True)
    return tl.where(v != v, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def _best(key, number, NONE: tl.constexpr):
    """Return the lowest number among those with the greatest key."""
    return tl.min(tl.where(key == tl.max(key, axis=0), number, NONE), axis=0)


@triton.jit
def _sum_over_experts(x, BLOCK: tl.constexpr, LEVELS: tl.constexpr):
    return tl.sum(tree_sum(tl.reshape(x, (1, BLOCK)), LEVELS), axis=0) + 0.0


@triton.jit
def _scores(z, here, SIGMOID: tl.constexpr):
    if SIGMOID:
        scores = tl.div_rn(tl.full(z.shape, 1.0, tl.float32), 1.0 + exp(-z))
    else:
        unknown = tl.max((here & (z != z)).to(tl.int32), axis=0) > 0
        greatest = tl.max(tl.where(here, z, float("-inf")), axis=0)
        scores = exp(z - tl.where(unknown, float("nan"), greatest))
    return tl.where(here, scores, 0.0)


@triton.jit
def _experts(n, run, width, BLOCK: tl.constexpr):
    """Return the expert of each leaf, and whether the leaf is present."""
    leaf = tl.arange(0, BLOCK)
    expert = leaf // width * run + leaf % width
    return expert, (leaf % width < run) & (expert < n)


@triton.jit
def _total(scores, chosen, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr):
    """Return the normalizer of the scores."""
    total = _sum_over_experts(tl.where(chosen, scores, 0.0) if NORMALIZE else scores, BLOCK, LEVELS)
    return total + SUM if SIGMOID else total


@triton.jit
def _route(
    Z,
    BIAS,
    W,
    IDS,
    n,
    run,
    width,
    scale,
    per,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_G: tl.constexpr,
    LEVELS: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    expert, here = _experts(n, run, width, BLOCK)
    z = tl.load(Z + r * n + expert, mask=here, other=0.0)
    scores = _scores(z, here, SIGMOID)
    value = scores if SIGMOID else z
    if BIAS is not None:
        value += tl.load(BIAS + expert, mask=here, other=0.0)
    key = tl.where(here, _key(value), ABSENT)
    if GROUPS > 1:
        group = tl.arange(0, BLOCK_G)
        group_key = tl.full((BLOCK_G,), ABSENT, tl.int32)
        for g in range(GROUPS):
            mine = tl.where(here & (expert // per == g), key, ABSENT)
            first = _best(mine, expert, BLOCK)
            total = tl.sum(tl.where(here & (expert == first), value, 0.0), axis=0)
            if per > 1:
                second = _best(tl.where(expert == first, ABSENT, mine), expert, BLOCK)
                total += tl.sum(tl.where(here & (expert == second), value, 0.0), axis=0)
            group_key = tl.where(group == g, _key(total), group_key)
        kept = here & (expert < 0)
        for _ in range(TOP_GROUPS):
            first = _best(group_key, group, BLOCK_G)
            group_key = tl.where(group == first, ABSENT, group_key)
            kept = kept | (here & (expert // per == first))
        key = tl.where(kept, key, ABSENT)
    chosen = here & (expert < 0)
    for _ in range(TOP_K):
        first = _best(key, expert, BLOCK)
        chosen = chosen | (here & (expert == first))
        key = tl.where(expert == first, ABSENT, key)
    weights = scores
    if NORMALIZE or not SIGMOID:
        weights = tl.div_rn(scores, tl.zeros_like(scores) + _total(scores, chosen, SIGMOID, NORMALIZE, BLOCK, LEVELS))
    if SCALED:
        weights = weights * scale
    nth = r * TOP_K + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(W + nth, weights, mask=chosen)
    tl.store(IDS + nth, expert.to(tl.int64), mask=chosen)


@triton.jit
def _route_grad(
    Z,
    IDS,
    DW,
    DZ,
    n,
    run,
    width,
    scale,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    expert, here = _experts(n, run, width, BLOCK)
    z = tl.load(Z + r * n + expert, mask=here, other=0.0)
    scores = _scores(z, here, SIGMOID)
    chosen = here & (expert < 0)
    g = tl.zeros((BLOCK,), tl.float32)
    for i in range(TOP_K):
        mine = here & (expert == tl.load(IDS + r * TOP_K + i))
        dw = tl.load(DW + r * TOP_K + i)
        g = tl.where(mine, dw * scale if SCALED else dw, g)
        chosen = chosen | mine
    if NORMALIZE or not SIGMOID:
        total = tl.zeros_like(scores) + _total(scores, chosen, SIGMOID, NORMALIZE, BLOCK, LEVELS)
        weights = tl.div_rn(scores, total)
        g = g - _sum_over_experts(tl.where(chosen, weights * g, 0.0), BLOCK, LEVELS)
        if SIGMOID:
            dz = tl.div_rn(g, total) * scores * (1.0 - scores)
        else:
            dz = weights * g
    else:
        dz = g * scores * (1.0 - scores)
    if SIGMOID or NORMALIZE:
        dz = tl.where(chosen, dz, 0.0)
    tl.store(DZ + r * n + expert, dz, mask=here)


def _shape(experts: int) -> tuple[tuple[int, int], dict, dict]:
    """Return (run, width) of the tree over experts, and the kernel's constants and launch options."""
    tree = ExpertTree.of(experts)
    leaves = tree.groups * tree.width
    constants = {"BLOCK": leaves, "LEVELS": leaves.bit_length() - 1}
    return (tree.run, tree.width), constants, {"num_warps": max(1, min(leaves // 256, 16))}


def forward(z, bias, routing) -> tuple[torch.Tensor, torch.Tensor]:
    rows, n = z.shape
    weights = torch.empty(rows, routing.top_k, dtype=torch.float32, device=z.device)
    ids = torch.empty(rows, routing.top_k, dtype=torch.int64, device=z.device)
    if rows:
        tree, constants, options = _shape(n)
        launch(
            _route,
            (rows,),
            (z, bias, weights, ids, n, *tree, routing.scale, n // routing.groups),
            options,
            GROUPS=routing.groups,
            TOP_GROUPS=routing.top_groups,
            TOP_K=routing.top_k,
            SIGMOID=routing.sigmoid,
            NORMALIZE=routing.normalize,
            SCALED=routing.scale != 1.0,
            BLOCK=constants["BLOCK"],
            BLOCK_G=next_power_of_2(routing.groups),
            LEVELS=constants["LEVELS"],
        )
    return weights, ids


def backward(z, ids, grad, routing) -> torch.Tensor:
    dz = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    if len(z):
        tree, constants, options = _shape(z.shape[1])
        launch(
            _route_grad,
            (len(z),),
            (z, ids, grad, dz, z.shape[1], *tree, routing.scale),
            options,
            TOP_K=routing.top_k,
            SIGMOID=routing.sigmoid,
            NORMALIZE=routing.normalize,
            SCALED=routing.scale != 1.0,
            **constants,
        )
    return dz
