"""Ranks that share sequences (context parallelism), each with two chunks of every one: where its rows are, and the exchange
of rows for heads around an op that needs whole sequences. No sums but those of gradients of heads that several ranks hold."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .tp import balanced_tree, finish


class CP:
    """`CP(None)` is a single rank. Otherwise a sequence is cut into 2 * size equal chunks, of which rank r holds r and
    2 * size - 1 - r, one after the other, as Megatron cuts it. A rank's rows are those of one sequence after the other.

    exchange: for the time of an op a rank has all rows of a part of the heads instead, which are equal parts in rank order.
    Where ranks are more than heads of k and v, several have the same one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    @staticmethod
    def refusal(size: int, heads: int, kv_heads: int) -> str | None:
        """Why `size` ranks cannot share so many heads of q, and of k and v; None if they can."""
        if heads % size:
            return f"{size} ranks do not divide {heads} query heads"
        each, group = heads // size, heads // kv_heads
        if each % group and group % each:
            return f"the {each} query heads of each of {size} ranks are not those of whole KV heads, nor all of one"
        return None

    def positions(self, rows: int, cu_seqlens: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """int64 [rows]: the place in its sequence of each row that this rank has of one sequence, or of several with the
        starts `cu_seqlens`, which count the rows of all ranks."""
        if cu_seqlens is None:
            place, length = torch.arange(rows, device=device), rows
        else:
            place, sequence = self._places(rows, cu_seqlens)
            if self.size == 1:  # as most are, in every layer
                return place
            length = self._lengths(cu_seqlens)[sequence]
        return self._global(place, length, self.rank)

    def order(self, rows: int, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """int64 [size * rows]: of each row of all ranks, one rank's after the other's, its place among the rows of the
        whole sequences, whose starts are `cu_seqlens`."""
        place, sequence = self._places(rows, cu_seqlens)
        length, start = self._lengths(cu_seqlens)[sequence], cu_seqlens.to(torch.int64)[sequence]
        return torch.cat([start + self._global(place, length, rank) for rank in range(self.size)])

    def _places(self, rows: int, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each row: its place among the rank's of its sequence, and which sequence that is."""
        own = self._own(cu_seqlens)
        index = torch.arange(rows, device=own.device)
        # The last sequence that begins at or before a row has it: an empty one begins where the next does.
        sequence = torch.searchsorted(own, index, right=True) - 1
        return index - own[sequence], sequence

    def _lengths(self, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """How many rows of each sequence a rank has; at the end 0, for rows beyond the last."""
        own = self._own(cu_seqlens)
        return torch.cat([own[1:], own[-1:]]) - own

    def _own(self, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """The starts among a rank's rows."""
        starts = cu_seqlens.to(torch.int64)
        return starts if self.size == 1 else starts // self.size

    def _global(self, place: torch.Tensor, length: torch.Tensor | int, rank: int) -> torch.Tensor:
        if self.size == 1:
            return place
        chunk = length // 2
        return torch.where(place < chunk, place + rank * chunk, place + (2 * self.size - 2 - rank) * chunk)

    def to_heads(self, t: torch.Tensor, order: torch.Tensor, heads: int) -> torch.Tensor:
        """[rows, H, D] of this rank -> [size * rows, n, D]: all rows, in their order, of this rank's heads. heads: of q;
        H may be fewer, of k and v."""
        return _ToHeads.apply(t, order, self, heads)

    def to_rows(self, t: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """The inverse for q's heads: [size * rows, n, D] -> [rows, size * n, D]."""
        return _ToRows.apply(t, order, self)

    def _held(self, heads: int, kv_heads: int) -> tuple[int, int]:
        """How many of `kv_heads` a rank has, and how many ranks have the same one."""
        each, group = heads // self.size, heads // kv_heads
        return (each // group, 1) if each >= group else (1, group // each)

    def _spread(self, t: torch.Tensor, order: torch.Tensor, heads: int) -> torch.Tensor:
        rows, have, dim = t.shape
        count, sharers = self._held(heads, have)
        parts = t.view(rows, -1, count, dim).transpose(0, 1)  # [size / sharers, rows, count, dim]
        parts = parts.repeat_interleave(sharers, 0) if sharers > 1 else parts
        taken = self._swap(parts.contiguous()).view(self.size * rows, count, dim)
        whole = torch.empty_like(taken)
        whole[order] = taken
        return whole

    def _collect(self, t: torch.Tensor, order: torch.Tensor, heads: int, have: int) -> torch.Tensor:
        """The inverse. What several ranks give for a head is added in fp32 by the balanced tree of rank order."""
        rows, (count, sharers) = len(t) // self.size, self._held(heads, have)
        parts = self._swap(t[order].contiguous()).view(-1, sharers, rows, count, t.shape[-1])
        if sharers == 1:
            summed = parts[:, 0]
        else:
            added = balanced_tree([part.float() for part in parts.unbind(1)])
            summed = finish(added.view(-1, t.shape[-1]), None, t.dtype).view(added.shape)
        return summed.transpose(0, 1).reshape(rows, have, t.shape[-1]).contiguous()

    def _swap(self, t: torch.Tensor) -> torch.Tensor:
        """Each rank's part for this one, in rank order, of tensors cut into parts along dim 0. As bytes, so of any type."""
        sent = t.view(-1).view(torch.uint8)
        taken = torch.empty_like(sent)
        dist.all_to_all_single(taken, sent, group=self.group)
        return taken.view(t.dtype).view(t.shape)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, order, cp, heads):
        ctx.save_for_backward(order)
        ctx.cp, ctx.heads, ctx.have = cp, heads, t.shape[1]
        return cp._spread(t.contiguous(), order, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        return ctx.cp._collect(grad, order, ctx.heads, ctx.have), None, None, None


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, order, cp):
        ctx.save_for_backward(order)
        ctx.cp = cp
        heads = t.shape[1] * cp.size
        return cp._collect(t, order, heads, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        return ctx.cp._spread(grad.contiguous(), order, grad.shape[1]), None, None
