"""Triton backend: the sort of at most MAX_IDS ids by expert, in one launch.

The position of an id is the number of smaller keys. All values are integers, so block sizes change no result. pairs.py
computes the same `Pairs` in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...runtime.launch import launch
from .problem import Ids, Pairs

MAX_IDS = 8192
"""schedule: maximum number of ids, which are all compared with each other."""
BLOCK = 16
"""schedule: ids or expert offsets per program."""


@triton.jit
def _local(IDS, i, ok, first, experts):
    """Return the local expert index of ids i; `experts` for experts of other ranks."""
    e = tl.load(IDS + i, mask=ok, other=-1).to(tl.int64) - first
    return tl.where((e >= 0) & (e < experts), e, experts)


@triton.jit(do_not_specialize=["n", "first"])
def _rank(
    IDS, ROW, CHOICE, PLACE, OFFSETS, n, first, experts, TOP_K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_J: tl.constexpr
):
    """Rank the keys e * n + i of ids i with local expert e; index n + e ranks e * n, the offset of expert e."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = _local(IDS, i, i < n, first, experts)
    mine = tl.where(i < n, e * n + i, (i - n).to(tl.int64) * n)
    before = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, n, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        other = _local(IDS, j, j < n, first, experts) * n + j
        before += tl.sum(((other[None, :] < mine[:, None]) & (j < n)[None, :]).to(tl.int64), axis=1)
    tl.store(ROW + before, (i // TOP_K).to(tl.int64), mask=i < n)
    tl.store(CHOICE + before, i.to(tl.int64), mask=i < n)
    tl.store(PLACE + i, tl.where(e < experts, before, -1), mask=i < n)
    tl.store(OFFSETS + i - n, before, mask=(i >= n) & (i <= n + experts))


def rejects(p: Ids) -> str | None:
    """Return why this kernel is not used for a problem, or None."""
    return f"rows * top_k: must be at most {MAX_IDS}, got {p.count}" if p.count > MAX_IDS else None


def pairs(ids: torch.Tensor, first: int, experts: int) -> Pairs:
    """Return the pairs of ids [rows, k]; see pairs.py."""
    n = ids.numel()
    row, choice = (torch.empty(n, dtype=torch.int64, device=ids.device) for _ in range(2))
    place = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
    offsets = torch.empty(experts + 1, dtype=torch.int64, device=ids.device)
    grid = (triton.cdiv(n + experts + 1, BLOCK),)
    args = (ids.contiguous(), row, choice, place, offsets, n, first, experts)
    launch(_rank, grid, args, {"num_warps": 4}, TOP_K=ids.shape[1], BLOCK=BLOCK, BLOCK_J=256)
    return Pairs(row, choice, place, offsets)
