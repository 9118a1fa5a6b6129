"""A thin view of a tensor-parallel process group: fixed-order sums and verdicts that all ranks reach together."""
from __future__ import annotations

import os
import weakref
from typing import Any, Callable, Hashable

import torch
import torch.distributed as dist

from . import symmetric
from .errors import AlignkitError, InputError

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name until torch 2.12
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, dict] = weakref.WeakKeyDictionary()
"""By NCCL group: what this rank's metadata was answered with when it was first exchanged."""


def strict() -> bool:
    """Whether ``ALIGNKIT_STRICT=1``: values on a GPU are looked at before they are used, and ranks compare their
    metadata in every call, although both wait for the device."""
    return os.environ.get("ALIGNKIT_STRICT", "0") == "1"


class TP:
    """The ranks that share one layer. `TP(None)` is a single rank; otherwise `group` is a torch process group
    whose rank order is the shard order. Its tensors' collectives may be captured in a CUDA graph.
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
        out = t.new_empty((self.size, *t.shape))
        _gather(out.view(-1), t.view(-1), group=self.group)
        return list(out.unbind(0))

    def tree_sum(self, t: torch.Tensor) -> torch.Tensor:
        """Sum over ranks by the balanced tree of rank order (neighbours first), in t's type. An odd rank out
        joins at the next level."""
        return self._sum(t, False)

    def tree_sum_scatter(self, t: torch.Tensor) -> torch.Tensor:
        """This rank's slice along dim 0 of `tree_sum(t)`; only the slices travel. The ranks must divide dim 0."""
        return self._sum(t, True)

    def sum_products(self, product: symmetric.Product, rows: int, columns: int, device: torch.device, *,
                     bias: torch.Tensor | None = None, dtype: torch.dtype = torch.float32,
                     scatter: bool = False) -> torch.Tensor:
        """`tree_sum`, or `tree_sum_scatter`, of fp32 [rows, columns] that `product` makes where they are added, which
        takes one copy less; plus bias [columns] in fp32, rounded to `dtype`."""
        if (shared := self._workspace(device, rows, columns, scatter)) is not None:
            if dtype in symmetric.DTYPES:
                return shared.sum(product, rows, columns, bias, dtype, scatter)
            bias = None if bias is None else bias.float()
            return shared.sum(product, rows, columns, bias, torch.float32, scatter).to(dtype)
        sums = torch.empty(rows, columns, dtype=torch.float32, device=device)
        product(slice(0, rows), sums)
        y = self._sum_gathered(sums, scatter)
        return (y if bias is None else y + bias.float()).to(dtype)

    def _sum(self, t: torch.Tensor, scatter: bool) -> torch.Tensor:
        if self.size == 1:
            return t
        rows, columns = (len(t), t[:1].numel()) if scatter else (t.numel(), 1)
        if t.dtype != torch.float32 or (shared := self._workspace(t.device, rows, columns, scatter)) is None:
            return self._sum_gathered(t, scatter)
        flat = t.reshape(rows, columns)
        y = shared.sum(lambda part, out: out.copy_(flat[part]), rows, columns, None, t.dtype, scatter)
        return y.view(-1, *t.shape[1:]) if scatter else y.view(t.shape)

    def _sum_gathered(self, t: torch.Tensor, scatter: bool) -> torch.Tensor:
        if not scatter:
            return _tree(self.all_gather(t))
        t = t.contiguous()
        parts = torch.empty_like(t)
        dist.all_to_all_single(parts, t, group=self.group)
        return _tree(list(parts.chunk(self.size, dim=0)))

    def _workspace(self, device: torch.device, rows: int, columns: int, scatter: bool) -> symmetric.Workspace | None:
        """The group's, if it takes these sums. On all ranks or none, as their shapes agree."""
        found = None if self.group is None else symmetric.workspace(self.group, device)
        return found if found is not None and found.takes(rows, columns, scatter) else None

    def shard(self, t: torch.Tensor) -> torch.Tensor:
        """This rank's equal slice along dim 0."""
        return t if self.size == 1 else t.chunk(self.size, dim=0)[self.rank]

    def check(self, op: str, checks: Callable[[], Hashable]) -> list[Any]:
        """Run `checks` on this rank and raise on every rank if it failed on any.

        `checks` raises an AlignkitError or returns this rank's metadata, made of tuples; the metadata of all ranks is
        returned. A rank that fails alone would leave the others waiting in the op's collectives, so the verdict is one
        itself. Over NCCL that waits for the device, so there each metadata is exchanged once and then remembered,
        unless `strict`: ranks that disagree are told so when either is new, and wait for each other otherwise.
        """
        if self.size == 1:
            return [checks()]
        try:
            error, verdict = None, (None, checks())
        except AlignkitError as e:
            error, verdict = e, (type(e), str(e))
        remembered: dict | None = None
        if "nccl" in dist.get_backend(self.group) and not strict():
            remembered = _agreed.setdefault(self.group, {})
            if error is None and (op, verdict[1]) in remembered:
                return remembered[op, verdict[1]]
        verdicts: list[Any] = [None] * self.size
        dist.all_gather_object(verdicts, verdict, group=self.group)
        if error is not None:
            raise error
        for rank, (kind, value) in enumerate(verdicts):
            if kind is not None:
                raise kind(f"{value} (in {op}, on rank {rank} of the tensor-parallel group)")
        values = [value for _, value in verdicts]
        if remembered is not None:
            remembered[op, verdict[1]] = values
        return values

    def check_same(self, op: str, checks: Callable[[], dict[str, Hashable]]) -> None:
        """`check`, and require the returned dict to be the same on every rank; the error names what differs."""
        seen = self.check(op, lambda: tuple(checks().items()))
        for key, _ in seen[0]:
            values = [dict(s).get(key) for s in seen]
            if any(v != values[0] for v in values):
                raise InputError(f"{key}: differs between the ranks of the tensor-parallel group in {op}: {values}")


def _tree(parts: list[torch.Tensor]) -> torch.Tensor:
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return parts[0]


SINGLE = TP(None)
