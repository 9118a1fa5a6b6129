"""Sharding of the vocabulary over ranks, and the exchange of logits of tiles that span two shards.

A tile has VOCAB_TILE ids from a global multiple of VOCAB_TILE on, for every sharding (contract). The rank that computes
a tile changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...contract import VOCAB_TILE
from ...dist import TP
from .._common import check_int, require

INF = float("inf")


@dataclass(frozen=True)
class Shards:
    """Vocabulary shards: rank r holds ids [starts[r], starts[r] + sizes[r]); ids from `vocab_size` on are padding."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    vocab_size: int

    @staticmethod
    def describe(start: int, size: int, vocab_size: int | None) -> tuple[int, int, int | None]:
        """Check one rank's shard in isolation; return (start, size, vocab_size)."""
        start = check_int("vocab_start", start, 0)
        require(size > 0, "logits: this rank's vocabulary shard must have at least 1 id, got 0")
        return start, size, None if vocab_size is None else check_int("vocab_size", vocab_size, 1)

    @classmethod
    def agree(cls, tp: TP, op: str, checks: Callable) -> Shards:
        """Check the arguments of all ranks together and return the shards.

        Args:
            tp: Ranks that share the vocabulary.
            op: Name of the op in errors.
            checks: Returns this rank's `describe`, a dict of arguments that must be equal on all ranks, and the largest
                target with its index.

        Raises:
            InputError: the shards or arguments do not match; the same error on every rank.
        """
        parts, metas, largest = zip(*tp.check(op, checks), strict=True)
        for name in ("vocab_size", *metas[0]):
            values = [p[2] for p in parts] if name == "vocab_size" else [meta[name] for meta in metas]
            require(
                all(v == values[0] for v in values),
                f"{name}: must be equal on all ranks of the tensor-parallel group, got {values} by rank (in {op})",
            )
        end = 0
        for rank, (start, size, _) in enumerate(parts):
            require(
                start == end,
                f"vocab_start: shards must be contiguous, but {'overlap' if start < end else 'leave a gap'} at id "
                f"{min(start, end)}: rank {rank} must start at {end}, got {start}",
            )
            end += size
        size = parts[0][2] if parts[0][2] is not None else end
        require(size <= end, f"vocab_size: must be at most {end}, the sum of all ranks' vocabulary shards, got {size}")
        for rank, (target, where) in enumerate(largest):
            require(
                target < size,
                f"target: must be in [0, {size}), got {target} at {where}"
                + (f" (on rank {rank} of the tensor-parallel group)" if tp.size > 1 else ""),
            )
        return cls(tuple(p[0] for p in parts), tuple(p[1] for p in parts), size)

    def columns(self, rank: int) -> int:
        """Return the number of this rank's ids without padding."""
        return min(max(self.vocab_size - self.starts[rank], 0), self.sizes[rank])

    def lead(self, rank: int) -> int:
        """Return the columns before this rank's first tile border; their tile starts on an earlier rank."""
        return min(-self.starts[rank] % VOCAB_TILE, self.columns(rank))

    def tail(self, rank: int) -> int:
        """Return the first column of the tile that continues on later ranks (the number of columns if none does)."""
        columns = self.columns(rank)
        if rank + 1 == len(self.starts) or not self.lead(rank + 1):
            return columns
        return max(columns - (self.starts[rank] + columns) % VOCAB_TILE, self.lead(rank))

    def cut_tile(self, logits: Callable[[slice], torch.Tensor], tp: TP) -> torch.Tensor | None:
        """Return the logits [n, <= 128] of the tile that starts on this rank and continues on later ones, or None.

        The rank with the first id of such a tile receives its (at most 127) columns on later ranks; nothing else is
        sent. `logits(columns)` returns this rank's fp32 logits.
        """
        leads = [self.lead(r) for r in range(len(self.starts))]
        if not any(leads):
            return None
        mine = torch.nn.functional.pad(logits(slice(0, leads[tp.rank])), (0, max(leads) - leads[tp.rank]), value=-INF)
        others = tp.all_gather(mine)
        tail, columns = self.tail(tp.rank), self.columns(tp.rank)
        if tail == columns:
            return None
        parts, end = [logits(slice(tail, columns))], self.starts[tp.rank] + columns
        for r in range(tp.rank + 1, len(leads)):
            if end % VOCAB_TILE == 0:
                break
            parts.append(others[r][:, : leads[r]])
            end += leads[r]
        return torch.cat(parts, dim=1)
