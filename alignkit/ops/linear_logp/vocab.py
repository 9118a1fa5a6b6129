"""How the vocabulary is shared among ranks, and how tiles and ranks join into one row's statistics."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import torch

from ... import backends
from ...contract import VOCAB_TILE
from ...tp import TP
from .._common import require

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
        require(size > 0, "logits: this rank's vocabulary shard is empty")
        require(start >= 0, f"vocab_start: {start} is negative")
        require(vocab_size is None or vocab_size > 0, f"vocab_size: {vocab_size} is not positive")
        return start, size, vocab_size

    @classmethod
    def agree(cls, tp: TP, op: str, checks: Callable, check_targets: Callable[[int], None]) -> Shards:
        """Collect the parts of all ranks; every rank raises the same InputError if they do not fit, or if
        `check_targets` with the global size fails on any."""
        seen = tp.check(op, checks)
        parts, metas = zip(*seen)
        for name, values in (("vocab_size", [p[2] for p in parts]), ("arguments", list(metas))):
            require(all(v == values[0] for v in values),
                    f"{name}: differs between the ranks of the tensor-parallel group in {op}: {values}")
        end = 0
        for rank, (start, size, _) in enumerate(parts):
            require(start == end, f"vocab_start: the shards {'overlap' if start < end else 'leave a hole'} at id "
                                  f"{min(start, end)}: rank {rank} starts at {start}, expected {end}")
            end += size
        size = parts[0][2] if parts[0][2] is not None else end
        require(size <= end, f"vocab_size: {size} exceeds the {end} rows of all shards")
        tp.check(op, lambda: check_targets(size))
        return cls(tuple(p[0] for p in parts), tuple(p[1] for p in parts), size)

    def columns(self, rank: int) -> int:
        """How many of this rank's rows count."""
        return min(max(self.vocab_size - self.starts[rank], 0), self.sizes[rank])

    def local(self, target: torch.Tensor, rank: int) -> torch.Tensor:
        """Column of a global id on this rank, -1 where another rank has it."""
        col = target - self.starts[rank]
        return torch.where((col >= 0) & (col < self.columns(rank)), col, -1)

    def _lead(self, rank: int) -> int:
        """Columns before this rank's first tile border; they belong to a tile that an earlier rank began."""
        return min(-self.starts[rank] % VOCAB_TILE, self.columns(rank))

    def whole_tiles(self, z: torch.Tensor, tp: TP) -> torch.Tensor:
        """The logits of the tiles that begin on this rank, [n, >= 0], columns from a tile border.

        Where a shard's border cuts a tile, the rank that holds the tile's first id takes the (at most 127)
        columns of it that lie on later ranks; else nothing is sent.
        """
        leads = [self._lead(r) for r in range(len(self.starts))]
        if not any(leads):
            return z
        mine = z.new_full((z.shape[0], max(leads)), -INF)
        mine[:, :leads[tp.rank]] = z[:, :leads[tp.rank]]
        others = tp.all_gather(mine)
        parts = [z[:, leads[tp.rank]:]]
        if parts[0].shape[1]:
            end = self.starts[tp.rank] + self.columns(tp.rank)
            for r in range(tp.rank + 1, len(leads)):
                if end % VOCAB_TILE == 0:
                    break
                parts.append(others[r][:, :leads[r]])
                end += leads[r]
        return torch.cat(parts, dim=1)


def merge(z: torch.Tensor, tp: TP, entropy: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Statistics of rows from the logits z [n, C] of whole tiles on every rank:
    m fp32 [n], the maximum; s int64 [n], 2^39 times the sum of exp(z - m); u likewise of exp(z - m) (m - z).
    """
    backend = backends.select("linear_logp", z.device)
    n = z.shape[0]
    tile_m, q, u = backend.tile_stats(z.contiguous(), entropy)
    own = tile_m.amax(dim=1) if tile_m.shape[1] else torch.full((n,), -INF, dtype=torch.float32, device=z.device)
    m = torch.stack(tp.all_gather(own)).amax(dim=0)
    w = backend.exp(torch.where(tile_m == -INF, -INF, tile_m - m[:, None])).double()
    s = _join(w * q.double(), tp)
    if not entropy:
        return m, s, None
    gap = torch.where(tile_m == -INF, 0.0, m[:, None].double() - tile_m.double())
    return m, s, _join(w * (u.double() + q.double() * gap), tp)


def _join(terms: torch.Tensor, tp: TP) -> torch.Tensor:
    """Terms in units of 2^-23 to integers in units of 2^-39, summed over tiles and ranks. NaN counts 0:
    m is NaN then, and so is the result."""
    whole = (terms * 65536.0).round().nan_to_num(0.0).to(torch.int64)
    return torch.stack(tp.all_gather(whole.sum(dim=1))).sum(dim=0)


