"""A thin view of a tensor-parallel process group: fixed-order sums and verdicts that all ranks reach together."""
from __future__ import annotations

from typing import Any, Callable

import torch
import torch.distributed as dist

from .errors import AlignkitError, InputError


class TP:
    """The ranks that share one layer. `TP(None)` is a single rank; otherwise `group` is a torch process group
    whose rank order is the shard order.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def __repr__(self) -> str:
        return f"TP(rank={self.rank}, size={self.size})"

    def all_gather(self, t: torch.Tensor) -> list[torch.Tensor]:
        """The tensor of every rank, in rank order; shapes must agree."""
        if self.size == 1:
            return [t]
        t = t.contiguous()
        out = [torch.empty_like(t) for _ in range(self.size)]
        dist.all_gather(out, t, group=self.group)
        return out

    def tree_sum(self, t: torch.Tensor) -> torch.Tensor:
        """Sum over ranks by the balanced tree of rank order (neighbours first), in t's type. An odd rank out
        joins at the next level."""
        parts = self.all_gather(t)
        while len(parts) > 1:
            parts = [parts[i] + parts[i + 1] if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
        return parts[0]

    def shard(self, t: torch.Tensor) -> torch.Tensor:
        """This rank's equal slice along dim 0."""
        return t if self.size == 1 else t.chunk(self.size, dim=0)[self.rank]

    def check(self, op: str, checks: Callable[[], Any]) -> list[Any]:
        """Run `checks` on this rank and raise on every rank if it failed on any.

        `checks` raises an AlignkitError or returns this rank's metadata; the metadata of all ranks is returned. A
        rank that fails alone would leave the others waiting in the op's collectives, so the verdict is one itself.
        """
        if self.size == 1:
            return [checks()]
        try:
            error, verdict = None, (None, checks())
        except AlignkitError as e:
            error, verdict = e, (type(e), str(e))
        verdicts: list[Any] = [None] * self.size
        dist.all_gather_object(verdicts, verdict, group=self.group)
        if error is not None:
            raise error
        for rank, (kind, value) in enumerate(verdicts):
            if kind is not None:
                raise kind(f"{value} (in {op}, on rank {rank} of the tensor-parallel group)")
        return [value for _, value in verdicts]

    def check_same(self, op: str, checks: Callable[[], dict[str, Any]]) -> None:
        """`check`, and require the returned dict to be the same on every rank; the error names what differs."""
        seen = self.check(op, checks)
        for key in seen[0]:
            values = [s.get(key) for s in seen]
            if any(v != values[0] for v in values):
                raise InputError(f"{key}: differs between the ranks of the tensor-parallel group in {op}: {values}")


SINGLE = TP(None)
