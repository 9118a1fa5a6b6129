"""Triton: the pairs of few rows in one launch, each put where it belongs by counting those before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...runtime.launch import launch
from .problem import Ids, Pairs

MOST = 8192
"""Ids: each is compared with all."""
BLOCK = 16
"""Ids, or ends of experts, of a program."""


@triton.jit
def _local(IDS, i, ok, first, experts):
    """Which of the experts from `first` on; `experts` if none of them."""
    e = tl.load(IDS + i, mask=ok, other=-1).to(tl.int64) - first
    return tl.where((e >= 0) & (e < experts), e, experts)


@triton.jit(do_not_specialize=["n", "first"])
def _rank(
    IDS, ROW, CHOICE, PLACE, OFFSETS, n, first, experts, TOP_K: tl.constexpr, BLOCK: tl.constexpr, ACROSS: tl.constexpr
):
    """Pair i of `n`, of local expert e, is the number e n + i; and e n is where expert e begins, for i = n + e."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = _local(IDS, i, i < n, first, experts)
    mine = tl.where(i < n, e * n + i, (i - n).to(tl.int64) * n)
    before = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, n, ACROSS):
        j = start + tl.arange(0, ACROSS)
        other = _local(IDS, j, j < n, first, experts) * n + j
        before += tl.sum(((other[None, :] < mine[:, None]) & (j < n)[None, :]).to(tl.int64), axis=1)
    tl.store(ROW + before, (i // TOP_K).to(tl.int64), mask=i < n)
    tl.store(CHOICE + before, i.to(tl.int64), mask=i < n)
    tl.store(PLACE + i, tl.where(e < experts, before, -1), mask=i < n)
    tl.store(OFFSETS + i - n, before, mask=(i >= n) & (i <= n + experts))


def refuses(p: Ids) -> str | None:
    return f"{p.count} ids, of up to {MOST}" if p.count > MOST else None


def pairs(ids: torch.Tensor, first: int, experts: int) -> Pairs:
    """Of ids [rows, k], those of `experts` from `first` on."""
    n = ids.numel()
    row, choice = (torch.empty(n, dtype=torch.int64, device=ids.device) for _ in range(2))
    place = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
    offsets = torch.empty(experts + 1, dtype=torch.int64, device=ids.device)
    grid = (triton.cdiv(n + experts + 1, BLOCK),)
    args = (ids.contiguous(), row, choice, place, offsets, n, first, experts)
    launch(_rank, grid, args, {"num_warps": 4}, TOP_K=ids.shape[1], BLOCK=BLOCK, ACROSS=256)
    return Pairs(row, choice, place, offsets)
