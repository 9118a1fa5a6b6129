"""Forward pass of the LM head: logp, log-sum-exp and entropy of each row, over the vocabulary and the ranks.

Row blocks change no bits, but must be equal on all ranks, which run collectives for each row block. Column blocks
change no bits if their borders are borders of vocabulary tiles, the global multiples of VOCAB_TILE. The merge of tiles
is the contract's (docs/contract.md, "Log-softmax over the vocabulary").

A rank's shard may begin and end within a tile. `lead` is the number of columns before its first tile border. `tail` is
the first column of a tile that continues on the next rank. Such a cut tile is computed by the rank that has its first
id: `Shards.cut_tile` appends the next ranks' leading columns to this rank's columns from `tail` on.
"""

from __future__ import annotations

import math

import torch

from ...contract import VOCAB_TILE
from ...dist import TP
from ...runtime import dispatch
from .blocks import cuts, part_of
from .source import Transform
from .vocab import Shards


def row_sums(source, device, n: int, target, temperature, shards: Shards, tp: TP, entropy: bool):
    """Yield each block of the n rows: its slice, and its rows' maxima and sums over all ranks (see `merge_tiles`)."""
    backend = dispatch.select("linear_logp", device)
    start, lead = shards.starts[tp.rank], shards.lead(tp.rank)
    columns, tail = shards.columns(tp.rank), shards.tail(tp.rank)
    tiles = -(-(columns - lead) // VOCAB_TILE)
    height, width = source.blocks(n, max(shards.sizes))
    for rows in cuts(0, n, height):
        size = rows.stop - rows.start
        m, q, u = (
            torch.empty(size, tiles if needed else 0, dtype=dtype, device=device)
            for dtype, needed in ((torch.float32, True), (torch.int32, True), (torch.int32, entropy))
        )
        z_target = None if target is None else torch.zeros(size, dtype=torch.float32, device=device)

        def arguments(first: int, last: int, rows=rows, out=(m, q, u if entropy else None)) -> tuple:
            """Return the other arguments of `statistics` for columns [first, last), with the output tiles."""
            tile = slice((first - lead) // VOCAB_TILE, -((lead - last) // VOCAB_TILE))
            return (
                part_of(temperature, rows),
                part_of(target, rows),
                start + first,
                *(None if t is None else t[:, tile] for t in out),
            )

        if lead < tail and not source.statistics(rows, slice(lead, tail), *arguments(lead, tail), z_target):
            for part in cuts(lead, tail, width, border=-start):
                backend.statistics(
                    source.products(rows, part), source.transform.of(part), *arguments(part.start, part.stop), z_target
                )
        cut = shards.cut_tile(lambda part, rows=rows: source.logits(rows, part), tp)
        if tail < columns:
            cut_arguments = arguments(tail, columns)
            backend.statistics(cut, Transform(), *cut_arguments, z_target)
        if tp.size == 1:
            yield rows, *backend.merge_tiles(m, q, u if entropy else None, z_target, None)
        else:
            own = m.amax(dim=1) if tiles else m.new_full((size,), -math.inf)
            top = torch.stack(tp.all_gather(own)).amax(dim=0)
            _, sums = backend.merge_tiles(m, q, u if entropy else None, z_target, top)
            yield rows, top, torch.stack(tp.all_gather(sums)).sum(dim=0)


def statistics_of(source, target, temperature, shards: Shards, tp: TP, entropy: bool):
    """Return logp, lse and entropy (or None), fp32 [N], on every rank."""
    backend = dispatch.select("linear_logp", target.device)
    parts = [
        backend.finish(m, sums, target[rows], entropy)
        for rows, m, sums in row_sums(source, target.device, len(target), target, temperature, shards, tp, entropy)
    ]
    if len(parts) == 1:
        return parts[0]
    empty = torch.empty(0, dtype=torch.float32, device=target.device)
    logp, lse, ent = zip(*parts, strict=True) if parts else ((empty,),) * 3
    return torch.cat(logp), torch.cat(lse), torch.cat(ent) if entropy else None
