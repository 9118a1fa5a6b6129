"""Context parallelism: row positions of a rank, and the all-to-all between sequence and head sharding.

Each rank holds two chunks of every sequence. An op that needs whole sequences runs on a shard of the heads instead.
The only sums are gradients of KV heads that several ranks replicate; docs/contract.md, "Attention", fixes their order.

Public: names and signatures are documented in docs/api/dist.md. The order of chunks is Megatron-core's.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .tp import balanced_tree, finish


class CP:
    """Context-parallel ranks, which share every sequence.

    A sequence is cut into 2 * size equal chunks; rank r holds chunks r and 2 * size - 1 - r, in this order, as in
    Megatron-core. The rows of a rank are its chunks of one sequence after the other.

    `to_heads` and `to_rows` exchange sequence shards for head shards (all-to-all). In head shards, each rank has all
    rows of an equal part of the heads, in rank order. With more ranks than KV heads, several ranks have the same KV
    head. The forward pass is a pure permutation; docs/contract.md, "Attention", defines the gradient sums.

    Attributes:
        group: Process group; None for a single rank.
        rank: Rank in the group.
        size: Number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        """Wrap a process group.

        Args:
            group: torch process group, in the order of the context-parallel ranks; None for a single rank.
        """
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    @staticmethod
    def refusal(size: int, heads: int, kv_heads: int) -> str | None:
        """Return the requirement that `size` ranks violate, with its values, or None if they can share the heads.

        Args:
            size: Number of context-parallel ranks.
            heads: Query heads.
            kv_heads: KV heads; divides `heads`.
        """
        if heads % size:
            return f"must divide the {heads} query heads, got {size}"
        each, group = heads // size, heads // kv_heads
        if each % group and group % each:
            return (
                f"query heads per rank must divide {group} (the query heads of a KV head) or be a multiple of {group}, "
                f"got {heads} / {size} = {each}"
            )
        return None

    def positions(self, rows: int, cu_seqlens: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """Return the position, within its sequence, of each row of this rank.

        Args:
            rows: Rows of this rank.
            cu_seqlens: int [B + 1], starts of the packed sequences in rows of all ranks; None for one sequence.
            device: Device of the result if `cu_seqlens` is None.

        Returns:
            int64 [rows].
        """
        if cu_seqlens is None:
            index, length = torch.arange(rows, device=device), rows
        else:
            index, sequence = self._local_rows(rows, cu_seqlens)
            if self.size == 1:  # the common case, called in every layer
                return index
            length = self._local_lengths(cu_seqlens)[sequence]
        return self._global_position(index, length, self.rank)

    def order(self, rows: int, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """Return the row of each gathered row in the concatenation of the whole sequences.

        Args:
            rows: Rows of this rank.
            cu_seqlens: int [B + 1], starts of the packed sequences in rows of all ranks.

        Returns:
            int64 [size * rows]; gathered rows are concatenated in rank order.
        """
        index, sequence = self._local_rows(rows, cu_seqlens)
        length, start = self._local_lengths(cu_seqlens)[sequence], cu_seqlens.to(torch.int64)[sequence]
        return torch.cat([start + self._global_position(index, length, rank) for rank in range(self.size)])

    def _local_rows(self, rows: int, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return, for each row of a rank, its index among the rank's rows of its sequence, and the sequence."""
        starts = self._local_starts(cu_seqlens)
        index = torch.arange(rows, device=starts.device)
        # A row belongs to the last sequence that starts at or before it; empty sequences share a start with the next.
        sequence = torch.searchsorted(starts, index, right=True) - 1
        return index - starts[sequence], sequence

    def _local_lengths(self, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """Return a rank's rows per sequence, and a final 0 for rows beyond the last sequence."""
        starts = self._local_starts(cu_seqlens)
        return torch.cat([starts[1:], starts[-1:]]) - starts

    def _local_starts(self, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """Return the starts of the sequences in rows of one rank."""
        starts = cu_seqlens.to(torch.int64)
        return starts if self.size == 1 else starts // self.size

    def _global_position(self, index: torch.Tensor, length: torch.Tensor | int, rank: int) -> torch.Tensor:
        """Return the position in its sequence of a rank's row `index`; `length` is the rank's rows of the sequence."""
        if self.size == 1:
            return index
        chunk = length // 2
        return torch.where(index < chunk, index + rank * chunk, index + (2 * self.size - 2 - rank) * chunk)

    def to_heads(self, t: torch.Tensor, order: torch.Tensor, heads: int) -> torch.Tensor:
        """Exchange sequence shards for head shards.

        Differentiable once: the gradient of a KV head that several ranks have is rounded to t's dtype on each, then
        added in fp32 by the balanced tree of rank order and rounded again.

        Args:
            t: [rows, H, D], any dtype; the rows of this rank, all heads. Copied if not contiguous.
            order: `order(rows, cu_seqlens)`.
            heads: Query heads; H is `heads`, or the number of KV heads for k and v.

        Returns:
            [size * rows, n, D]: all rows, in sequence order, of this rank's n heads.
        """
        return _ToHeads.apply(t, order, self, heads)

    def to_rows(self, t: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """Exchange head shards of query heads back for sequence shards; the inverse of `to_heads`.

        Args:
            t: [size * rows, n, D]: all rows, in sequence order, of this rank's n query heads.
            order: `order(rows, cu_seqlens)`.

        Returns:
            [rows, size * n, D]: the rows of this rank, all heads. Differentiable once.
        """
        return _ToRows.apply(t, order, self)

    def _kv_heads_per_rank(self, heads: int, kv_heads: int) -> tuple[int, int]:
        """Return a rank's number of KV heads, and the number of ranks that have the same KV head."""
        each, group = heads // self.size, heads // kv_heads
        return (each // group, 1) if each >= group else (1, group // each)

    def _scatter_heads(self, t: torch.Tensor, order: torch.Tensor, heads: int) -> torch.Tensor:
        """Return all rows of this rank's heads."""
        rows, total, dim = t.shape
        count, replicas = self._kv_heads_per_rank(heads, total)
        parts = t.view(rows, -1, count, dim).transpose(0, 1)  # [size / replicas, rows, count, dim]
        parts = parts.repeat_interleave(replicas, 0) if replicas > 1 else parts
        received = self._all_to_all(parts.contiguous()).view(self.size * rows, count, dim)
        whole = torch.empty_like(received)
        whole[order] = received
        return whole

    def _gather_heads(self, t: torch.Tensor, order: torch.Tensor, heads: int, total: int) -> torch.Tensor:
        """Invert `_scatter_heads`; replicas of a KV head are added in fp32 by the balanced tree of rank order."""
        rows, (count, replicas) = len(t) // self.size, self._kv_heads_per_rank(heads, total)
        parts = self._all_to_all(t[order].contiguous()).view(-1, replicas, rows, count, t.shape[-1])
        if replicas == 1:
            summed = parts[:, 0]
        else:
            added = balanced_tree([part.float() for part in parts.unbind(1)])
            summed = finish(added.view(-1, t.shape[-1]), None, t.dtype).view(added.shape)
        return summed.transpose(0, 1).reshape(rows, total, t.shape[-1]).contiguous()

    def _all_to_all(self, t: torch.Tensor) -> torch.Tensor:
        """Exchange equal parts along dim 0, as bytes; return the received parts in rank order."""
        sent = t.view(-1).view(torch.uint8)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received.view(t.dtype).view(t.shape)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, order, cp, heads):
        ctx.save_for_backward(order)
        ctx.cp, ctx.heads, ctx.total = cp, heads, t.shape[1]
        return cp._scatter_heads(t.contiguous(), order, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        return ctx.cp._gather_heads(grad, order, ctx.heads, ctx.total), None, None, None


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, order, cp):
        ctx.save_for_backward(order)
        ctx.cp = cp
        heads = t.shape[1] * cp.size
        return cp._gather_heads(t, order, heads, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        return ctx.cp._scatter_heads(grad.contiguous(), order, grad.shape[1]), None, None
