"""Partition of leaves among the programs of decode attention, and the workspace for their states.

Everything here depends on shapes alone, so it is valid for replays of a CUDA graph. The partition changes speed and
memory, never bits. few.py writes and reads the states and records; triton_backend.py allocates them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...runtime.families import SM90
from .._common import require
from .._triton import next_power_of_2

ROWS = 16
"""schedule: rows of a decode tile (positions times heads of a GQA group), unless the group is larger.

It must be a power of two, as Triton's tiles are.
"""
PROGRAMS_PER_SM = 2  # schedule: programs of the decode kernel
RECORD = 8
"""schedule: int32 words of the record that a program writes for the merge kernel.

`few._merge_leaves` lists the words; RECORD must be at least their number.
"""
WORKSPACE = 1 << 28
"""schedule: bytes for leaf states; a larger demand lowers the number of programs, down to one per SM."""


class Sharing(NamedTuple):
    """A partition of leaves among programs."""

    leaves: int
    """The largest number of leaves of a sequence."""
    parts: int
    """Programs per KV head."""
    slots: int
    """The largest number of states that a program writes."""
    state: int
    """fp32 numbers per state: the unnormalized output of each row, then the offsets and the sums of probabilities.

    The last two are padded to a multiple of 4 rows, or 16 bytes.
    """

    def memory(self, kv_heads: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate the states, fp32 [programs * slots, state], and the records, int32 [programs, RECORD]."""
        programs = self.parts * kv_heads
        states = torch.empty(programs * self.slots, self.state, dtype=torch.float32, device=device)
        return states, torch.empty(programs, RECORD, dtype=torch.int32, device=device)


def positions(group: int) -> int:
    """Return the number of query positions of a decode tile."""
    return max(ROWS, next_power_of_2(group)) // group


def share(
    shape: Sequence[int],
    kv_heads: int,
    positions: int,
    longest: int,
    programs_per_sm: int = PROGRAMS_PER_SM,
    programs: int = 0,
) -> Sharing:
    """Partition the leaves of queries of shape [T, Hq, D] among programs.

    Args:
        shape: [T, Hq, D].
        kv_heads: KV heads.
        positions: query positions of a tile.
        longest: the largest number of positions of a sequence.
        programs_per_sm: programs per SM, if `programs` is 0.
        programs: the approximate number of programs in total; 0: `programs_per_sm` on each SM, within WORKSPACE.
    """
    tokens, heads, dim = shape
    leaves, rows = max(-(-longest // SM90.kv_leaf), 1), positions * heads // kv_heads
    state = rows * dim + 2 * (-(-rows // 4) * 4)
    require(
        tokens * leaves * kv_heads < 2**31,
        f"block_table: queries * KV heads * (positions / {SM90.kv_leaf}, rounded up) must be below 2^31, got "
        f"{tokens} * {kv_heads} * {leaves} = {tokens * kv_heads * leaves} for a table of {longest} positions. Pass "
        "fewer columns of block_table",
    )
    if not programs:
        room = WORKSPACE // (4 * state * leaves)
        programs = min(SM90.sm_count * programs_per_sm, max(room, SM90.sm_count))
    parts = max(min(programs // kv_heads, tokens * leaves), 1)
    return Sharing(leaves, parts, min(-(-tokens * leaves // parts), leaves - 1) + 1, state)


class Variant(NamedTuple):
    """The properties of a batch for which the decode kernels are specialized."""

    chunk: int
    """Sequences whose lengths a program reads at a time: 1 (the batch has one), 32 (one per lane) or 512."""
    more: bool
    """True if the batch has more than `chunk` sequences."""
    one_per_sm: bool
    """True if the batch has at most one leaf per SM, so each SM runs one program."""
    search: bool
    """True if rows are fewer than records, so that the merge kernel searches for the record of its row.

    False for a single row, whose record is the first.
    """


def variant(seqs: int, tokens: int, decode_all: bool, kv_heads: int, shared: Sharing) -> Variant:
    """Return the variant of a batch; `decode_all`: tiles have one query, which is required for `search`."""
    chunk = 1 if seqs == 1 else 32 if seqs <= 32 else 512
    one_per_sm = seqs * shared.leaves * kv_heads <= SM90.sm_count
    return Variant(chunk, seqs > chunk, one_per_sm, decode_all and 1 < tokens < shared.parts - 1)


def variant_batches(heads: int, kv_heads: int, dim: int, longest: int, max_seqs: int) -> list[int]:
    """Return the smallest batch of each variant, for batches of 1 to max_seqs sequences of one query each."""
    first: dict[Variant, int] = {}
    for seqs in range(1, max_seqs + 1):
        shared = share((seqs, heads, dim), kv_heads, 1, longest)
        first.setdefault(variant(seqs, seqs, True, kv_heads, shared), seqs)
    return list(first.values())


def workspace(q: torch.Tensor, kv_heads: int, longest: int) -> int:
    """Return the largest number of fp32 elements of the states, for at most as many queries as q has."""
    size = 0
    for tile_queries in (1, positions(q.shape[1] // kv_heads)):
        s = share(q.shape, kv_heads, tile_queries, longest)
        size = max(size, s.parts * kv_heads * s.slots * s.state)
    return size
