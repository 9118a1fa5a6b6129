"""Host-side paging for the backends whose kernel takes a row per position (cpu, reference)."""

from __future__ import annotations

import torch

from .._common import require


def by_rows(kernel):
    """The backend's `forward` and `paged` from ``kernel(q, k, v, q_start, kv_start, kv_rows, scale)``, where kv_rows
    is the row of k and v that holds each position of each sequence, or None where keys lie with the queries."""

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
    """Raise InputError where a sequence's length does not fit its queries or blocks, or a block is not in the cache."""
    longest = int(lens.max()) if lens.numel() else 0
    require(bool((lens >= queries).all()), "seq_lens: shorter than the sequence's queries")
    require(
        longest <= table.shape[1] * block_size,
        f"seq_lens: {longest} positions exceed block_table's {table.shape[1]} blocks",
    )
    used = torch.arange(table.shape[1], device=table.device) * block_size < lens[:, None]
    require(
        not bool((used & ((table < 0) | (table >= num_blocks))).any()),
        f"block_table: a block is not in [0, {num_blocks})",
    )


def _cache_rows(table: torch.Tensor, lens: torch.Tensor, block_size: int):
    """Where each sequence's positions begin, and the cache row of every position, one sequence after the other."""
    position = torch.arange(int(lens.max()) if lens.numel() else 0, device=lens.device)
    rows = (table[:, position // block_size] * block_size + position % block_size)[position[None] < lens[:, None]]
    return torch.nn.functional.pad(lens.cumsum(0), (1, 0)), rows
