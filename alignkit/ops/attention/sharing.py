"""How the leaves of sequences with few queries are shared among programs, and what these leave in memory for the join: of shapes
alone, so that a CUDA graph may hold it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...runtime.families import SM90
from .._common import require
from .._triton import next_power_of_2

ROWS = 16
"""Of a tile, positions times the heads of a group, unless that is larger."""
A_MULTIPROCESSOR = 2
"""Programs."""
RUN = 8
"""Words that a program leaves for those who join: see few.py."""
WORKSPACE = 1 << 28
"""Bytes for states of leaves: beyond that there are fewer programs, down to one a multiprocessor."""


class Sharing(NamedTuple):
    leaves: int
    """Of a sequence, at most."""
    parts: int
    """Programs for each head of keys."""
    slots: int
    """States that a program may leave."""
    state: int
    """Numbers of a state: for each row its sums of values; then what is added to the scores of each, and the sums of probabilities,
    of a multiple of 4 rows: 16 bytes each."""

    def memory(self, kv_heads: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """For states, and for what programs say of them."""
        programs = self.parts * kv_heads
        states = torch.empty(programs * self.slots, self.state, dtype=torch.float32, device=device)
        return states, torch.empty(programs, RUN, dtype=torch.int32, device=device)


def positions(group: int) -> int:
    """Queries of a tile."""
    return max(ROWS, next_power_of_2(group)) // group


def share(
    shape: Sequence[int],
    kv_heads: int,
    positions: int,
    longest: int,
    a_multiprocessor: int = A_MULTIPROCESSOR,
    programs: int = 0,
) -> Sharing:
    """Of queries of the shape [T, Hq, D] over `kv_heads` heads of keys, in tiles of so many positions; `longest`: positions of a
    sequence, at most. `programs`: in all, about; 0: so many on each multiprocessor."""
    tokens, heads, dim = shape
    leaves, rows = max(-(-longest // SM90.kv_leaf), 1), positions * heads // kv_heads
    state = rows * dim + 2 * (-(-rows // 4) * 4)
    require(tokens * leaves * kv_heads < 2**31, f"block_table: {longest} positions are too many for {tokens} queries")
    if not programs:
        room = WORKSPACE // (4 * state * leaves)
        programs = min(SM90.multiprocessors * a_multiprocessor, max(room, SM90.multiprocessors))
    parts = max(min(programs // kv_heads, tokens * leaves), 1)
    return Sharing(leaves, parts, min(-(-tokens * leaves // parts), leaves - 1) + 1, state)


class Kind(NamedTuple):
    """What of a batch the kernels of few queries are compiled for."""

    at_once: int
    """Sequences that a program looks at, 1 where there is no other: a warp's, or more."""
    more: bool
    """There are more than that."""
    alone: bool
    """There is no more than a leaf for each multiprocessor: one program at a time is on it."""
    searched: bool
    """Rows are fewer than borders between programs: who joins searches those for that of its row. One row's is the first."""


def kind(seqs: int, tokens: int, all_of_them: bool, kv_heads: int, shared: Sharing) -> Kind:
    """`all_of_them`: it is taken for one query each; else there are more rows, and nobody searches."""
    at_once = 1 if seqs == 1 else 32 if seqs <= 32 else 512
    alone = seqs * shared.leaves * kv_heads <= SM90.multiprocessors
    return Kind(at_once, seqs > at_once, alone, all_of_them and 1 < tokens < shared.parts - 1)


def batches(heads: int, kv_heads: int, dim: int, longest: int, most: int) -> list[int]:
    """How many sequences, up to `most`: the first number of each kind, of one query each."""
    first: dict[Kind, int] = {}
    for seqs in range(1, most + 1):
        shared = share((seqs, heads, dim), kv_heads, 1, longest)
        first.setdefault(kind(seqs, seqs, True, kv_heads, shared), seqs)
    return list(first.values())


def workspace(q: torch.Tensor, kv_heads: int, longest: int) -> int:
    """How many numbers the states are at most, of no more queries than q's."""
    most = 0
    for of_tile in (1, positions(q.shape[1] // kv_heads)):
        s = share(q.shape, kv_heads, of_tile, longest)
        most = max(most, s.parts * kv_heads * s.slots * s.state)
    return most
