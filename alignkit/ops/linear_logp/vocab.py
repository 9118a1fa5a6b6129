"""How the vocabulary is shared among ranks."""

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
    """The rows [starts[r], starts[r] + sizes[r]) of the weight live on rank r; ids below `vocab_size` count."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    vocab_size: int

    @staticmethod
    def describe(start: int, size: int, vocab_size: int | None) -> tuple[int, int, int | None]:
        """One rank's part, checked alone."""
        start = check_int("vocab_start", start, 0)
        require(size > 0, "logits: this rank's vocabulary shard is empty")
        return start, size, None if vocab_size is None else check_int("vocab_size", vocab_size, 1)

    @classmethod
    def agree(cls, tp: TP, op: str, checks: Callable) -> Shards:
        """Collect what `checks` returns on each rank: `describe`'s part, the arguments that must be the same, by name, and the
        rank's largest target, (id, where). Every rank raises the same InputError if they do not fit."""
        parts, metas, largest = zip(*tp.check(op, checks), strict=True)
        for name in ("vocab_size", *metas[0]):
            values = [p[2] for p in parts] if name == "vocab_size" else [meta[name] for meta in metas]
            require(
                all(v == values[0] for v in values),
                f"{name}: differs between the ranks of the tensor-parallel group in {op}: {values}",
            )
        end = 0
        for rank, (start, size, _) in enumerate(parts):
            require(
                start == end,
                f"vocab_start: the shards {'overlap' if start < end else 'leave a hole'} at id "
                f"{min(start, end)}: rank {rank} starts at {start}, expected {end}",
            )
            end += size
        size = parts[0][2] if parts[0][2] is not None else end
        require(size <= end, f"vocab_size: {size} exceeds the {end} rows of all shards")
        for rank, (target, where) in enumerate(largest):
            require(
                target < size,
                f"target: id {target} at {where} is not in [0, {size})"
                + (f" (on rank {rank} of the tensor-parallel group)" if tp.size > 1 else ""),
            )
        return cls(tuple(p[0] for p in parts), tuple(p[1] for p in parts), size)

    def columns(self, rank: int) -> int:
        """How many of this rank's rows count."""
        return min(max(self.vocab_size - self.starts[rank], 0), self.sizes[rank])

    def lead(self, rank: int) -> int:
        """Columns before this rank's first tile border; they belong to a tile that an earlier rank began."""
        return min(-self.starts[rank] % VOCAB_TILE, self.columns(rank))

    def tail(self, rank: int) -> int:
        """The column from which on this rank's columns belong to a tile that goes on on later ranks."""
        columns = self.columns(rank)
        if rank + 1 == len(self.starts) or not self.lead(rank + 1):
            return columns
        return max(columns - (self.starts[rank] + columns) % VOCAB_TILE, self.lead(rank))

    def cut_tile(self, logits: Callable[[slice], torch.Tensor], tp: TP) -> torch.Tensor | None:
        """The logits [n, <= 128] of the tile that begins on this rank and goes on on later ones, or None.

        Where a shard's border cuts a tile, the rank that holds the tile's first id takes the (at most 127) columns of
        it that lie on later ranks; else nothing is sent. `logits(columns)` gives this rank's, fp32.
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
