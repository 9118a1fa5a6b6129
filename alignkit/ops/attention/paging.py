"""Paging on the host, for backends whose kernel takes the cache row of each position (cpu, reference).

It moves rows and computes no sums. `check_pages` also validates the arguments of GPU calls in strict mode.
"""

from __future__ import annotations

import torch

from ...errors import InputError
from .._common import require
from .._sequences import check_lengths


def by_rows(kernel):
    """Return a backend's `forward` and `paged`, given ``kernel(q, k, v, q_start, kv_start, kv_rows, scale)``.

    kv_rows holds the row of k and v for each position of each sequence; None for packed sequences.
    """

    def forward(q, k, v, starts, scale):
        return kernel(q, k, v, starts, starts, None, scale)

    def paged(q, k, v, block_table, q_start, seq_lens, block_size, scale, out):
        kv_start, rows = _cache_rows(block_table, seq_lens, block_size)
        n = int(q_start[-1])
        out[:n] = kernel(q[:n], k, v, q_start, kv_start, rows, scale)[0]
        out[n:] = 0

    return forward, paged


def check_pages(
    table: torch.Tensor, lens: torch.Tensor, queries: torch.Tensor, block_size: int, num_blocks: int
) -> None:
    """Raise InputError for a sequence length below its queries or beyond its blocks, or a block outside the cache."""
    longest = int(lens.max()) if lens.numel() else 0
    check_lengths(lens, queries)
    require(
        longest <= table.shape[1] * block_size,
        f"seq_lens: must be at most {table.shape[1] * block_size} (block_table's {table.shape[1]} columns of "
        f"{block_size} positions), got {longest}",
    )
    used = torch.arange(table.shape[1], device=table.device) * block_size < lens[:, None]
    if len(outside := (used & ((table < 0) | (table >= num_blocks))).nonzero()):
        at = tuple(outside[0].tolist())
        raise InputError(f"block_table: entries in use must be in [0, {num_blocks}), got {int(table[at])} at {at}")


def _cache_rows(table: torch.Tensor, lens: torch.Tensor, block_size: int):
    """Return the index of each sequence's first position, and the cache row of every position of all sequences."""
    position = torch.arange(int(lens.max()) if lens.numel() else 0, device=lens.device)
    rows = (table[:, position // block_size] * block_size + position % block_size)[position[None] < lens[:, None]]
    return torch.nn.functional.pad(lens.cumsum(0), (1, 0)), rows
